"""Runtime files: one for each framework and year, or what one does otherwise than another.

A file has every field of `Runtime` that has no default, and the source of each. Or it names a ``base``, another runtime
by name or path, and has what differs: fields, single choices of ``implementation``, sources that were read anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from datafiles.errors import DataFileError
from datafiles.loader import load_mapping
from datafiles.names import nearest
from datafiles.schema import FileModel, file_model, validated
from hardware_models.runtime import Runtime
from hardware_models.schema import Text
from workloads.kinds.base import DTYPE_BYTES, Implementation

RUNTIMES = Path(__file__).parent / "runtimes"
SUFFIXES = (".yaml", ".yml", ".json")

_STATED = (
    *("dtype", "fused_softmax", "fused_bias_activation", "fused_bias_dropout", "fused_norm", "logits_dtype"),
    *("bias_in_matmul", "fused_softmax_multiple", "fused_loss", "flash_causal_skip", "flash_generation"),
)
"""Choices that a file makes though `Implementation` has a default."""

_ImplementationFile = file_model(Implementation, required=_STATED)
_RuntimeFile = file_model(
    Runtime, without=("name",), implementation=_ImplementationFile, description=Text, base=(Text | None, None)
)


@cache
def runtime_names() -> tuple[str, ...]:
    """Return the names of all shipped runtimes, sorted."""
    return tuple(sorted(path.stem for path in RUNTIMES.glob("*.yaml")))


def runtime_description(name: str) -> str:
    """Return the one-line description of a shipped runtime."""
    return str(_read(name).model_dump(include={"description"})["description"])


def runtimes_in(dtypes: Collection[str], like: Runtime) -> tuple[str, ...]:
    """Return the shipped runtimes that train in one of some dtypes, those nearest to another first.

    Near is as many bytes a number, then as many of the other facts alike.

    >>> runtimes_in(["tf32", "fp16"], like=load_runtime("galvatron-v1"))[0]
    'galvatron-v1-tf32'
    """
    num_bytes = DTYPE_BYTES[like.implementation.dtype]

    def distance(runtime: Runtime) -> tuple[bool, int]:
        pairs = [(runtime, like), (runtime.implementation, like.implementation)]
        unlike = sum(value != vars(other)[name] for own, other in pairs for name, value in vars(own).items())
        return DTYPE_BYTES[runtime.implementation.dtype] != num_bytes, unlike

    found = [runtime for name in runtime_names() if (runtime := load_runtime(name)).implementation.dtype in dtypes]
    return tuple(runtime.name for runtime in sorted(found, key=distance))


def load_runtime(name_or_path: str | Path) -> Runtime:
    """Return a shipped runtime by name, or one from a YAML file of the same format.

    Raises:
        ValueError: If there is none of that name, or the file or one that it is based on breaks a rule.

    >>> load_runtime("megatron-lm-2021").state_bytes_per_parameter
    16.0
    """
    text = str(name_or_path)
    file = _read(text)
    values = {name: getattr(file, name) for name in type(file).model_fields if name not in ("base", "description")}
    values["implementation"] = Implementation(**values["implementation"].model_dump())
    return Runtime(name=text if text in runtime_names() else Path(text).stem, **values)


def runtime_fields(name_or_path: str) -> list[tuple[str, str, str]]:
    """Return every field of a runtime, with what it takes from its base: names, values and sources.

    The choices of ``implementation`` have one source together.

    >>> [(name, value) for name, value, _ in runtime_fields("megatron-lm-2023-flash")][:3]
    [('base', 'megatron-lm-2023'), ('implementation', ''), ('implementation.dtype', 'bf16')]
    """
    values = _read(name_or_path).model_dump(exclude={"description"})
    sources, choices, base = values.pop("sources"), values.pop("implementation"), values.pop("base")
    return [
        ("base", base or "none", ""),
        ("implementation", "", sources["implementation"]),
        *((f"implementation.{name}", _written(value), "") for name, value in choices.items()),
        *((name, _written(value), sources.get(name, "")) for name, value in values.items()),
    ]


def files_of_runtime(name_or_path: str | Path) -> list[Path]:
    """Return the file of a runtime and those that it is based on, there or not; none where it is a shipped one."""
    found: list[Path] = []
    text = str(name_or_path)
    while _is_path(text) and Path(text) not in found:
        found.append(Path(text))
        try:
            base = load_mapping(found[-1]).get("base")
        except DataFileError:
            break
        text = _beside(found[-1], base) if isinstance(base, str) else ""
    return found


def _is_path(text: str) -> bool:
    return text not in runtime_names() and text.endswith(SUFFIXES)


def _beside(path: Path, base: str) -> str:
    """Return what the base of a file is by name, or by path from where it is read."""
    return os.path.normpath(path.parent / base) if _is_path(base) else base


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _read(text: str, what: str = "runtime", above: tuple[Path, ...] = ()) -> FileModel:
    """Return a runtime as its file has it, completed from its base.

    Args:
        text: Name or path.
        what: What says so, for messages.
        above: Files that are based on it.
    """
    if text in runtime_names():
        return _read_shipped(text)
    if not _is_path(text):
        raise ValueError(
            f"{what} must be a known one or a path to a YAML file, got {text!r}; {nearest(text, runtime_names())}"
        )
    path = Path(text)
    if path.resolve() in above:
        chain = " -> ".join(file.name for file in (*above, path))
        raise ValueError(f"{what} must not lead back to a file that is based on it, got {chain}; name another there")
    if above and not path.is_file():
        raise ValueError(f"{what} must be a known runtime or a file, but there is no file {text}")
    return _read_file(path, text, (*above, path.resolve()))


@cache
def _read_shipped(name: str) -> FileModel:
    return _read_file(RUNTIMES / f"{name}.yaml", f"runtime {name}")


def _read_file(path: Path, place: str, above: tuple[Path, ...] = ()) -> FileModel:
    own = load_mapping(path)
    mapping, base = own, own.get("base")
    if base is not None:
        if not isinstance(base, str):
            raise DataFileError(place, f"base: must be the name of a runtime or a path, got {base!r}")
        mapping = _completed(own, _read(_beside(path, base), f"{place}: base", above))
    file = validated(_RuntimeFile, mapping, place)
    fields = set(_RuntimeFile.model_fields) - {"base", "description", "sources"}
    sourced = set(own.get("sources", ()))
    missing, unknown = sorted(fields & set(own) - sourced), sorted(sourced - fields)
    if missing or unknown:
        raise DataFileError(
            place,
            f"sources must have one line per field; missing: {', '.join(missing) or 'none'}; "
            f"unknown: {', '.join(unknown) or 'none'}",
        )
    inherited = f" (what the file does not say is that of its base {base})" if base else ""
    for broken, words in _contradictions(mapping):
        if broken:
            raise DataFileError(place, words + inherited)
    return file


def _contradictions(mapping: Mapping[str, Any]) -> list[tuple[bool, str]]:
    """Return what the fields of a runtime may not say together: whether these do, and why not."""
    waits = mapping.get("host_waits") or ()
    return [
        (
            bool(mapping.get("overlaps_input_reductions")) and mapping.get("host_runs_ahead") is False,
            "overlaps_input_reductions needs host_runs_ahead: a host that waits for each launch overlaps nothing",
        ),
        (
            (mapping.get("bucket_bytes") or 0) > (mapping["gradient_bytes"] if mapping.get("copies_gradients") else 0),
            "bucket_bytes must be part of gradient_bytes, and needs copies_gradients: where gradients live in buckets, "
            "write bucket_bytes: 0, gradient_bytes of one copy, and frees_gradients: none",
        ),
        (
            bool(mapping.get("reduces_by_unit")) and mapping.get("gradient_bucket_bytes") is not None,
            "reduces_by_unit needs gradient_bucket_bytes: null, since units are reduced, not buckets",
        ),
        (
            "receive" in waits and mapping.get("transfer_mode") == "overlapped",
            "host_waits must not have receive where transfer_mode is overlapped: nothing waits for what travels beside",
        ),
        (
            bool(mapping.get("refreshes_in_forward"))
            and (
                "gather" in waits
                or bool(mapping.get("copies_gathered"))
                or mapping.get("parameter_calls_above") is not None
            ),
            "refreshes_in_forward goes with neither gather among host_waits, copies_gathered nor "
            "parameter_calls_above, which are of ZeRO-3's gathers",
        ),
        (
            (mapping.get("flat_workspace_bytes") or 0) > mapping["optimizer_workspace_bytes"],
            "flat_workspace_bytes must be part of optimizer_workspace_bytes",
        ),
        (
            bool(mapping.get("drops_gradients"))
            and (mapping.get("frees_gradients") != "all" or mapping.get("scatters_under_zero1") is not False),
            "drops_gradients needs frees_gradients: all and scatters_under_zero1: false: it is of whole gradients that "
            "every iteration makes anew",
        ),
    ]


def _completed(own: Mapping[str, Any], base: FileModel) -> dict[str, Any]:
    """Return a mapping with what it does not say taken from its base, but for the description."""
    of = base.model_dump(exclude={"base", "description"})
    parts = {
        name: {**of[name], **own[name]} for name in ("implementation", "sources") if isinstance(own.get(name), Mapping)
    }
    return {**of, **own, **parts}
