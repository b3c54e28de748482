"""The values of a spec: every name looked up, every file found, every spelling made one."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from os.path import realpath, relpath
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import PydanticSchemaGenerationError, create_model

from datafiles.errors import DataFileError
from datafiles.names import nearest
from datafiles.schema import FileModel, validated
from datafiles.values import MAX_INTEGER
from experiments.console import DEFAULT_RUNTIME, parse_limit

REQUIRED = {"model", "cluster", "global_batch", "searcher"}

DEFAULTS: dict[str, Any] = {
    "runtime": DEFAULT_RUNTIME,
    "memory_limit": None,
    "profile": None,
    "objective": "paper",
    "budget": "20s",
    "seed": 0,
    "without": [],
    "engine": "auto",
}
"""What a run has when the spec is silent; the same as on the command line of ``compare``."""

_FILE_SUFFIXES = (".yaml", ".yml", ".json", ".gz")


@dataclass(frozen=True)
class Checked:
    """A value as fields of `experiments.sweep.job.Run`.

    Attributes:
        fields: Field to value, as spelled in the spec.
        paths: The same with absolute paths, for fields that name files.
        digests: File as spelled to SHA-256 of its content.
    """

    fields: dict[str, Any]
    paths: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


class ValueChecker:
    """Checks values, each spelling once.

    Args:
        folder: Of the spec: files it names must lie here or below.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Checked] = {}
        self._checks: dict[str, Callable[[Any], Checked]] = {
            "model": self._model,
            "cluster": self._cluster,
            "runtime": self._runtime,
            "global_batch": lambda value: Checked({"global_batch": _given(value)}),
            "memory_limit": self._memory_limit,
            "profile": self._profile,
            "searcher": self._searcher,
            "objective": self._objective,
            "budget": self._budget,
            "seed": lambda value: Checked({"seed": _given(value)}),
            "without": self._without,
            "engine": self._engine,
        }

    @property
    def defaults(self) -> dict[str, Checked]:
        """Checked values of fields that a spec may leave out."""
        return {name: self.check(name, value) for name, value in DEFAULTS.items()}

    def check(self, name: str, value: Any) -> Checked:
        """Return the fields a value stands for.

        Raises:
            ValueError: If it names what is not there, or breaks a rule.
        """
        spelling = f"{name}={json.dumps(value)}"
        if spelling not in self._known:
            self._known[spelling] = self._checks[name](value)
        return self._known[spelling]

    def _model(self, value: str | None) -> Checked:
        from workloads.layer_profile import is_profile_name
        from workloads.registry import build_workload, model_names, model_spec

        text = _given(value)
        if text in model_names():
            return Checked({"model": text})
        file, at, batch = text.partition("@") if is_profile_name(text) else (text, "", "")
        if not file.lower().endswith((*_FILE_SUFFIXES, ".csv")):
            if not (self._folder / text / "config.json").is_file():
                model_spec("" if "/" in text else text)  # raises, with the nearest names
            file = f"{text}/config.json"
        checked = self._with_files("model", [(file, at + batch)])
        try:
            build_workload(checked.paths["model"])
        except ValueError as error:  # It may say how to write the file, which a spec has relative to its folder.
            raise ValueError(str(error).replace(realpath(self._folder / file), file)) from None
        return checked

    def _cluster(self, value: str | None) -> Checked:
        from hardware_models.cluster import parse_cluster

        text = _given(value)
        parts = [_split_cluster(part.strip()) for part in text.split("+")]
        checked = self._with_files("cluster", parts)
        parse_cluster(checked.paths.get("cluster", text))
        return checked

    def _runtime(self, value: str | None) -> Checked:
        from hardware_models.runtime_files import files_of_runtime, load_runtime

        text = _given(value)
        checked = self._with_files("runtime", [(text, "") if text.endswith(_FILE_SUFFIXES) else ("", text)])
        runtime = checked.paths.get("runtime", text)
        load_runtime(runtime)
        bases = [relpath(file, self._folder) for file in files_of_runtime(runtime)[1:]]
        digests = self._with_files("runtime", [(file, "") for file in bases]).digests
        return replace(checked, digests={**checked.digests, **digests})

    def _profile(self, value: str | None) -> Checked:
        from hardware_models.calibration_file import load_calibration

        if value is None:
            return Checked({"profile": None})
        checked = self._with_files("profile", [(value, "")])
        load_calibration(checked.paths["profile"])
        return checked

    def _memory_limit(self, value: Any) -> Checked:
        if value is None:
            return Checked({"memory_limit_bytes": None})
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"must be like 28GiB, a number of bytes, or null for no limit, got {value!r}")
        if not isinstance(value, str) and value > 1 << 60:
            raise ValueError(f"must be at most 2**60 bytes, got {value:g}")
        is_whole = isinstance(value, float) and value.is_integer()
        limit_bytes = parse_limit(f"{value:.0f}" if is_whole else str(value))
        if limit_bytes > 1 << 60:
            raise ValueError(f"must be at most 2**60 bytes, got {value}")
        return Checked({"memory_limit_bytes": limit_bytes})

    def _budget(self, value: Any) -> Checked:
        from searchers.budget import Budget

        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(f"must be a time like 20s or a number of evaluations like 500, got {value!r}")
        budget = Budget.parse(str(value))
        if budget.seconds is not None and not math.isfinite(budget.seconds):
            raise ValueError(f"must be finite, got {value!r}")
        return Checked({"budget_s": budget.seconds, "budget_evaluations": budget.evaluations})

    def _searcher(self, value: Any) -> Checked:
        from searchers.registry import searcher_class

        name, options = (value.get("name"), value.get("options", {})) if isinstance(value, dict) else (value, {})
        unknown = sorted(set(value) - {"name", "options"}) if isinstance(value, dict) else []
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r}, {nearest(unknown[0], ['name', 'options'])}")
        if not isinstance(name, str) or not isinstance(options, dict):
            raise ValueError(f"must be a name, or {{name: ..., options: {{...}}}}, got {value!r}")
        file, colon, class_name = name.rpartition(":") if ".py:" in name else (name, "", "")
        parts = [(file, colon + class_name)] if file.endswith(".py") else [("", name)]
        checked = self._with_files("searcher", parts)
        found = searcher_class(checked.paths.get("searcher", name))
        known = _options_of(found)
        options = {option: _whole(given, known.get(option)) for option, given in options.items()}
        for option, given in options.items():
            if option == "objective":
                raise ValueError("objective is a field beside searcher, not one of its options")
            if option not in known:
                raise ValueError(f"{name} has no option {option!r}; {nearest(option, list(known))}")
            _check_type(option, given, known[option])
        try:
            found(**options)
        except TypeError as error:
            raise ValueError(f"{name} does not take these options: {error}") from None
        text = json.dumps(options, sort_keys=True) if options else "{}"
        return Checked({"searcher": name, "options": text}, checked.paths, checked.digests)

    def _objective(self, value: str | None) -> Checked:
        from searchers.scores import OBJECTIVES

        return Checked({"objective": _one_of("objective", _given(value), OBJECTIVES)})

    def _engine(self, value: str | None) -> Checked:
        from simulator.simulate import ENGINE_NAMES

        return Checked({"engine": _one_of("engine", _given(value), ENGINE_NAMES)})

    def _without(self, value: Any) -> Checked:
        from simulator.fidelity import Fidelity

        names = value.split(",") if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"must be a list of effects, such as [contention, host] or [], got {value!r}")
        words = sorted({name.strip().replace("_", "-") for name in names if name.strip()})
        Fidelity().without(*words)
        return Checked({"without": ",".join(words)})

    def _with_files(self, name: str, parts: list[tuple[str, str]]) -> Checked:
        """Find the files that a value names, and note their content.

        Args:
            name: The field.
            parts: ``(file, what follows it)``, joined by ``+`` in the value; no file is an empty string.
        """
        absolute, digests = [], {}
        for file, rest in parts:
            path = Path(realpath(self._folder / file))
            if file and (Path(file).is_absolute() or not path.is_relative_to(self._folder)):
                raise ValueError(f"files must lie in the spec's folder or below, written relative to it, got {file!r}")
            if file and not path.is_file():
                raise ValueError(f"no file {file!r} in the spec's folder {self._folder}")
            if file:
                digests[file] = hashlib.sha256(path.read_bytes()).hexdigest()
            absolute.append(f"{path if file else ''}{rest}")
        text = "+".join(f"{file}{rest}" for file, rest in parts)
        return Checked({name: text}, {name: "+".join(absolute)} if digests else {}, digests)


def _split_cluster(part: str) -> tuple[str, str]:
    """Return the file and the shape of one part of a cluster string; no file if it names a preset."""
    name, colon, shape = part.rpartition(":")
    return (name, colon + shape) if name.endswith(_FILE_SUFFIXES) else ("", part)


def _given(value: Any) -> Any:
    if value is None:
        raise ValueError("must have a value, got nothing (null); leave the key out")
    return value


def _one_of(what: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}; {nearest(value, known)}")
    return value


def _options_of(searcher: type) -> dict[str, Any]:
    """Return the arguments of a searcher's constructor and their types, those it hands to its base class included.

    >>> from searchers.mpe.searcher import Mpe
    >>> {"path", "num_layers", "keep"} <= set(_options_of(Mpe))
    True
    """
    found: dict[str, Any] = {}
    for base in searcher.__mro__:
        if "__init__" not in vars(base):
            continue
        make = vars(base)["__init__"]
        own = list(inspect.signature(make).parameters.values())[1:]
        try:
            types = get_type_hints(make)
        except NameError:  # Imported for type checkers alone.
            types = {}
        for each in own:
            if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
                found.setdefault(each.name, types.get(each.name, Any))
        if not any(each.kind is each.VAR_KEYWORD for each in own):
            break
    return found


def _whole(value: Any, allowed: Any) -> Any:
    """Return 4 for 4e0 where an option is an integer.

    >>> _whole(4.0, int), _whole(4.0, float | None)
    (4, 4.0)
    """
    is_real = allowed is float or float in get_args(allowed)
    return int(value) if isinstance(value, float) and value.is_integer() and not is_real else value


def _check_type(option: str, value: Any, allowed: Any) -> None:
    """Refuse a value that the constructor's annotation does not allow; what no file can say is not looked at.

    >>> _check_type("keep", "abc", int)
    Traceback (most recent call last):
    ValueError: option keep: must be a valid integer, got 'abc'
    """
    try:
        fields: Any = {option: (allowed, ...)}
        model = create_model("Option", __base__=FileModel, **fields)
    except PydanticSchemaGenerationError:
        return
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise ValueError(f"option {option}: an integer must lie within +-{MAX_INTEGER}, got {value:.3g}")
    try:
        validated(model, {option: value}, "option")
    except DataFileError as error:
        raise ValueError(f"option {error.message}") from None
