"""Runtime files: one for each framework and year, or what one does otherwise than another.

A file has every field of `Runtime` that has no default, and the source of each. Or it names a ``base``, another runtime
by name or path, and has what differs: fields, single choices of ``implementation``, sources that were read anew.
"""

from __future__ import annotations

import json
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
    return str(_read(name).model_dump()["description"])


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
    if not text.endswith(SUFFIXES):
        raise ValueError(
            f"{what} must be a known one or a path to a YAML file, got {text!r}; {nearest(text, runtime_names())}"
        )
    path = Path(text)
    if path.resolve() in above:
        raise ValueError(f"{what} must not lead back to the file itself, got {text!r}")
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
        is_path = base not in runtime_names() and base.endswith(SUFFIXES)
        mapping = _completed(own, _read(str(path.parent / base) if is_path else base, f"{place}: base", above))
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
    if mapping.get("overlaps_input_reductions") and mapping.get("host_runs_ahead") is False:
        raise DataFileError(
            place,
            "overlaps_input_reductions needs host_runs_ahead: a host that waits for each launch overlaps nothing",
        )
    return file


def _completed(own: Mapping[str, Any], base: FileModel) -> dict[str, Any]:
    """Return a mapping with what it does not say taken from its base, but for the description."""
    of = base.model_dump(exclude={"base", "description"})
    parts = {
        name: {**of[name], **own[name]} for name in ("implementation", "sources") if isinstance(own.get(name), Mapping)
    }
    return {**of, **own, **parts}
