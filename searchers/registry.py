"""Searchers by name: built in, from installed packages, or a class in a user's own file."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from datafiles.names import nearest
from searchers.base import Searcher, UnfitResultError

ENTRY_POINT_GROUP = "windtunnel.searchers"

PACKAGES = frozenset(
    {"datafiles", "experiments", "hardware_models", "searchers", "simulator", "validation", "windtunnel", "workloads"}
)
"""This project's: none of them is part of somebody's own file, wherever that lies."""

BUILT_IN = {
    "megatron-grid": "searchers.megatron_grid:MegatronGrid",
    "aceso": "searchers.aceso.searcher:Aceso",
    "aceso-dp": "searchers.aceso.dynamic_program:AcesoDynamicProgram",
    "ddp": "searchers.pure:DistributedDataParallel",
    "megatron-tp": "searchers.pure:MegatronTensorParallel",
    "gpipe": "searchers.pure:GPipe",
    "fsdp": "searchers.pure:FullyShardedDataParallel",
    "deepspeed-3d": "searchers.pure:DeepSpeed3D",
    "alpa": "searchers.alpa.searcher:Alpa",
    "mpe": "searchers.mpe.searcher:Mpe",
    "mpe-naive": "searchers.mpe.searcher:NaiveEstimator",
    "amp": "searchers.amp:Amp",
    "flexflow-mcmc": "searchers.mcmc:FlexFlowMcmc",
    "dapple": "searchers.dapple.searcher:Dapple",
    "dp-no-overlap": "searchers.dapple.searcher:DataParallelNoOverlap",
    "dp-overlap": "searchers.dapple.searcher:DataParallelOverlap",
    "pipedream": "searchers.pipedream.searcher:PipeDream",
    "piper": "searchers.piper.searcher:Piper",
    "galvatron-bmw": "searchers.galvatron.searcher:GalvatronBMW",
    "galvatron-bmw-free": "searchers.galvatron.searcher:GalvatronFreeMicrobatches",
    "galvatron-base": "searchers.galvatron.searcher:GalvatronBase",
    "galvatron": "searchers.galvatron.searcher:GalvatronPlain",
    "galvatron-dp-tp": "searchers.galvatron.searcher:GalvatronDataTensor",
    "galvatron-dp-pp": "searchers.galvatron.searcher:GalvatronDataPipeline",
    "galvatron-1f1b-mem": "searchers.galvatron.searcher:GalvatronMemoryBalanced",
    "galvatron-1f1b-time": "searchers.galvatron.searcher:GalvatronTimeBalanced",
    "galvatron-1f1b-bi": "searchers.galvatron.searcher:GalvatronBiObjective",
    "exhaustive": "searchers.exhaustive:Exhaustive",
    "random": "searchers.random_search:RandomSearch",
}
"""Name to ``module:class``; imported only when asked for."""


def searcher_names() -> tuple[str, ...]:
    """Return the names of all registered searchers, built-in ones first."""
    return tuple(BUILT_IN) + tuple(sorted(set(_plugins()) - set(BUILT_IN)))


def searcher_class(name: str) -> type[Searcher]:
    """Return a searcher class.

    Args:
        name: A registered name, or ``path/to/file.py:Class`` for one's own. Such a file is executed.

    Raises:
        ValueError: If there is none of that name (the message lists the nearest), or if what is found is
            not a searcher.
    """
    if ".py:" in name or name.endswith(".py"):
        return _checked(_from_file(name), name)
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return _checked(getattr(importlib.import_module(module), attribute), name)
    plugins = _plugins()
    if name in plugins:
        return _checked(plugins[name].load(), name)
    known = nearest(name, searcher_names())
    raise ValueError(f"unknown searcher {name!r}; {known}; your own: --searcher path/to/file.py:ClassName")


def searcher_named(name: str, **options: Any) -> Searcher:
    """Return a searcher, constructed with ``options``.

    >>> searcher_named("megatron-grid").name
    'megatron-grid'
    """
    made = searcher_class(name)
    try:
        return made(**options)
    except TypeError as error:
        if not is_file(name):
            raise
        raise UnfitResultError(
            f"searcher {name} must be made with keyword arguments alone, none of them required; it raised "
            f"{raised(error, name)}"
        ) from error


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _from_file(reference: str) -> object:
    path, class_name = file_and_class(reference)
    file_name = str(path)
    if not path.is_file():
        raise ValueError(f"searcher file {file_name!r} does not exist; write path/to/file.py:ClassName")
    spec = importlib.util.spec_from_file_location(f"windtunnel_plugin_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py path always has a loader"
    module = importlib.util.module_from_spec(spec)
    _forget(files_of(reference)[1:], path.parent)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # It fell into a class that was being made.
            raise KeyboardInterrupt from None
        words = f"searcher file {file_name!r} must run as Python; it raised {raised(error, reference)}"
        raise ValueError(words) from error
    classes = [
        attribute
        for attribute, value in vars(module).items()
        if _is_searcher(value) and not inspect.isabstract(value) and value.__module__ == module.__name__
    ]
    if not class_name and len(classes) == 1:
        class_name = classes[0]
    if not class_name:
        what = f"has the searchers {', '.join(classes)}" if classes else "has no subclass of Searcher"
        raise ValueError(f"{file_name} {what}; write {file_name}:ClassName")
    if not hasattr(module, class_name):
        raise ValueError(f"{file_name} has no {class_name!r}; {nearest(class_name, classes)}")
    return getattr(module, class_name)


def is_file(name: str) -> bool:
    """Return whether a searcher's name is a class in somebody's own file.

    >>> is_file("searcher/mine.py:HillClimber"), is_file("aceso")
    (True, False)
    """
    return ".py" in name


def raised(error: BaseException, name: str) -> str:
    """Return an error of a searcher in words: its type, what it says, and where (the last place in its own file)."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = list(traceback.extract_tb(error.__traceback__))
    if is_file(name):
        path = file_and_class(name)[0].resolve()
        frames = [frame for frame in frames if Path(frame.filename).resolve() == path] or frames
    return f"{type(error).__name__}: {error} ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})"


def file_and_class(reference: str) -> tuple[Path, str]:
    """Return the file and the class, if it names one, of a searcher in somebody's own file."""
    file_name, _, class_name = reference.rpartition(":") if ".py:" in reference else (reference, "", "")
    return Path(file_name), class_name


def files_of(reference: str) -> tuple[Path, ...]:
    """Return somebody's own file and the modules in its folder that it imports, and those in turn; of names, nothing.

    A file that is not there, or is no Python, imports nothing.
    """
    if not is_file(reference):
        return ()
    first = file_and_class(reference)[0]
    waiting, found = [first], list[Path]()
    while waiting:
        path = waiting.pop()
        if path in found or not path.is_file():
            continue
        found.append(path)
        with suppress(SyntaxError, ValueError):
            for node in ast.walk(ast.parse(path.read_bytes())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for top in {name.partition(".")[0] for name in names} - PACKAGES - {""}:
                    for folder in (path.parent, first.parent):
                        waiting += [folder / f"{top}.py", *sorted((folder / top).glob("**/*.py"))]
    return tuple(found)


def _forget(files: Iterable[Path], folder: Path) -> None:
    """Drop modules that files in a folder stand for: they may have been loaded from another, or be of an older text.

    Not those that are installed, whatever lies in the folder.
    """
    tops = {file.relative_to(folder).parts[0].removesuffix(".py") for file in files}
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None) or sys.prefix
        if name.partition(".")[0] in tops and not origin.startswith((sys.prefix, sys.base_prefix)):
            del sys.modules[name]


def _is_searcher(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Searcher)


def _checked(value: object, name: str) -> type[Searcher]:
    if not isinstance(value, type) or not issubclass(value, Searcher):
        raise ValueError(f"{name} must be a subclass of searchers.base.Searcher, got {value!r}")
    if inspect.isabstract(value):
        missing = ", ".join(sorted(value.__abstractmethods__))
        raise ValueError(f"{name} must define {missing}")
    for attribute in ("name", "paper"):
        if not isinstance(getattr(value, attribute, None), str):
            raise ValueError(f"{name} must set the class attribute {attribute!r} to a string")
    return value
