"""Compile functions once per machine: numba with a cache on disk that works wherever the package lies.

Numba keeps compiled code in ``NUMBA_CACHE_DIR`` where that is set; else in ``__pycache__`` beside the source;
else, where the package folder cannot be written, in the user's cache folder. Where even that is not writable
(a container without a home), a folder of this user alone under the system's temporary folder is taken. Cached
files are loaded with pickle, so a folder that others can write is never used. Processes that need the same function
at the same time do not each compile it: one does, and the others wait for it.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import numba
from numba.core import types
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import register_jitable

Function = TypeVar("Function", bound=Callable[..., Any])
_njit = cast(Any, numba.njit)  # Its stub leaves out what numba's own code uses: ``_nrt``, counting references.
_UNCOUNTED = {"_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def compiled(function: Function) -> Function:
    """Return ``function`` compiled by numba on its first call, or loaded from the cache.

    Args:
        function: Module-level function of scalars and arrays. Whatever compiled functions it calls must be in
            the same file (numba looks only at that file's date to tell whether the cache is stale), or named to
            `compiled_with`. It may make arrays, so references are counted on every array that it uses: who loops
            leaves the loop to an `inlined` function, which is given the arrays.
    """
    try:
        made = _counting(function)
    except RuntimeError as error:  # No folder to cache in.
        if "cannot cache" not in str(error):
            raise
        config: Any = numba.config
        config.CACHE_DIR = private_folder()
        made = _counting(function)
    return cast(Function, _for_any_number(_compiled_by_one(made)))


def _counting(function: Function) -> Any:
    # Said aloud, since what is not said numba takes from the function that calls this one first.
    return _njit(cache=True, forceinline=False, _nrt=True)(function)


def compiled_with(*modules: ModuleType) -> Callable[[Function], Function]:
    """Return a decorator like `compiled`, for functions that take compiled functions or constants of other modules.

    The cache is stale as well once one of those files has changed: their dates and sizes are kept beside the
    function's own.

    Args:
        modules: All such modules, also those that the called functions take from; kept as ``compiled_over``.
    """

    def decorate(function: Function) -> Function:
        made = compiled(function)
        if not hasattr(made, "_cache"):  # numba is switched off (NUMBA_DISABLE_JIT)
            return made
        cast(Any, made).compiled_over = modules
        kept = cast(Any, made)._cache._cache_file
        files = [Path(cast(str, module.__file__)).stat() for module in modules]
        kept._source_stamp = (kept._source_stamp, *((file.st_mtime, file.st_size) for file in files))
        return made

    return decorate


def inlined(function: Function) -> Function:
    """Return ``function``, which makes no arrays, to be copied into the machine code of the compiled ones that call it.

    Callers in other files name this one to `compiled_with`. No references are counted in it (nor in what it calls, but
    for `compiled` functions), so it works on views of arrays, and on tuples of arrays, as if they were numbers. Numba
    refuses a function that makes an array, and ``a[:] = b`` of two arrays, for which it may.
    """
    return cast(Function, _for_compiled_callers(_njit(forceinline=True, **_UNCOUNTED)(function)))


def uncounted(function: Function) -> Function:
    """Return ``function``, which makes no arrays, compiled as `inlined` does but not copied, for compiled callers.

    For what is called seldom: a copy is optimised again with each function that it is copied into.
    """
    return cast(Function, _for_compiled_callers(_njit(forceinline=False, **_UNCOUNTED)(function)))


def also_compiled(function: Function) -> Function:
    """Return ``function`` as it is, for Python, and callable by compiled functions, which compile it as `inlined`."""
    return register_jitable(forceinline=True, _nrt=False)(function)


class _Watch:
    """A clock that stands still while this process compiles, waits for another that does, or loads what one did."""

    def __init__(self) -> None:
        # How long it has stood, and since when it stands; in one, as other threads read it.
        self._state: tuple[float, float | None] = (0.0, None)

    def stop(self) -> None:
        self._state = self._state[0], time.perf_counter()

    def go_on(self) -> None:
        stood_s, since_s = self._state
        if since_s is not None:
            self._state = stood_s + time.perf_counter() - since_s, None

    def moment_s(self) -> float:
        stood_s, since_s = self._state
        return (time.perf_counter() if since_s is None else since_s) - stood_s


_watch = _Watch()


def moment_s() -> float:
    """Return a moment as ``time.perf_counter`` does, but for the time that went by with compiling.

    Seconds of a search are taken with it: what it finds must not depend on whether it is the first on a machine.
    """
    return _watch.moment_s()


_in_turn: list[Any] = []
"""The function that this process compiles, or loads, in its turn. What that one calls is compiled with it."""


def _compiled_by_one(function: Any) -> Any:
    """Return a compiled function that one process compiles while others wait, and then load it from the cache.

    Numba has every process compile what it does not find: as many times the work, and no result sooner.
    """
    if not hasattr(function, "_cache"):  # numba is switched off (NUMBA_DISABLE_JIT)
        return function
    compile_or_load = function.compile

    def compile_in_turn(signature: Any) -> Any:
        with global_compiler_lock:  # First: a thread that has it waits for no turn of another thread.
            if _in_turn:
                return compile_or_load(signature)
            try:
                _in_turn.append(function)
                _watch.stop()
                with _turn(Path(f"{_kept_as(function)}.lock")):
                    return compile_or_load(signature)
            finally:
                _in_turn.clear()
                _watch.go_on()

    function.compile = compile_in_turn
    return function


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Wait until no other process is here with this path; the system ends the turn of a process that ends.

    Where files cannot be locked (Windows; a folder that cannot be written; some network file systems), nobody waits.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError:
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield
            return
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # Said aloud, since a process that was forked meanwhile has it open too.


def _kept_as(function: Any) -> Path:
    """Return the path of what numba keeps of a function, but for what it adds to the name."""
    name = function.py_func.__qualname__.replace("<", "").replace(">", "")
    module = function.py_func.__module__.rsplit(".", 1)[-1]
    return Path(function._cache.cache_path) / f"{module}.{name}"


def _for_any_number(function: Any) -> Any:
    """Return a compiled function that is not compiled again for each number, or kind of integer, that callers have.

    Numba takes ``f(0)`` for another kind of argument than ``f(n)``, also where a loop counts from nought, and an
    element of an array of int32 for another than a place in it: a quarter of what the compiled estimate takes to
    compile, and half of what Aceso's search does.
    """
    if not hasattr(function, "get_call_template"):  # numba is switched off (NUMBA_DISABLE_JIT)
        return function
    template_of = function.get_call_template

    def get_call_template(args: Sequence[Any], kws: Mapping[str, Any]) -> Any:
        return template_of(tuple(map(_widened, args)), {name: _widened(kind) for name, kind in kws.items()})

    function.get_call_template = get_call_template
    return function


def _widened(kind: Any) -> Any:
    """Return the kind of argument that a compiled function has for one: int64 for any integer that fits into it."""
    kind = cast(Any, types).unliteral(kind)
    fits = isinstance(kind, types.Integer) and kind.maxval <= types.int64.maxval
    return types.int64 if fits else kind


def _for_compiled_callers(function: Any) -> Any:
    """Return a compiled function that has no entry for Python, and says so where Python calls it: numba would crash."""
    if not hasattr(function, "overloads"):  # numba is switched off (NUMBA_DISABLE_JIT)
        return function

    def add_overload(made: Any) -> None:
        function.overloads[tuple(made.signature.args)] = made

    def refuse(*args: Any, **kws: Any) -> None:
        name = function.__name__
        raise TypeError(f"{name} is called by compiled functions; in Python call {name}.py_func")

    function.add_overload, function._compile_for_args = add_overload, refuse
    return _for_any_number(function)


def private_folder() -> str:
    """Return a folder under the temporary folder that only this user can write, made if needed."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"windtunnel-numba-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o022:
        return str(folder)
    return tempfile.mkdtemp(prefix="windtunnel-numba-")


def is_cached(function: Callable[..., Any]) -> bool:
    """Return whether compiled code of ``function`` is on disk, or compiled already in this process, or not needed."""
    dispatcher = cast(Any, function)
    if not hasattr(dispatcher, "signatures") or dispatcher.signatures:  # The first: numba is switched off.
        return True
    kept_as = _kept_as(dispatcher)
    return any(kept_as.parent.glob(f"{kept_as.name}-*.nbc"))


@compiled
def _nothing() -> int:
    return 0


def load_compiler() -> None:
    """Load what numba loads for the first compiled function that a process calls (half a second).

    Who times several things calls this first, lest the first of them pays for all.
    """
    _nothing()
