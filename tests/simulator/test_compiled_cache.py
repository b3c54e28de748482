"""The cache of compiled functions notices a change in a module that they call or take constants from."""

from __future__ import annotations

import ast
import dis
import importlib
import os
import pkgutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

import numba
import numpy as np
import pytest
from numba.core.caching import FunctionCache
from numba.core.registry import CPUDispatcher

from searchers.budget import Budget
from simulator import compiled_cache
from simulator.compiled_cache import _turn, compiled, inlined

Floats = np.ndarray[Any, np.dtype[np.float64]]
Int32s = np.ndarray[Any, np.dtype[np.int32]]
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("simulator", "searchers")

CALLER = """
import callee
from simulator.compiled_cache import compiled_with


@compiled_with(callee)
def caller(x):
    return callee.called(x) + callee.CONSTANT


print(caller(1), sum(caller.stats.cache_hits.values()))
"""
CALLEE = """
from simulator.compiled_cache import compiled

CONSTANT = {constant}


@compiled
def called(x):
    return {expression}
"""


def printed(folder: Path, constant: int, expression: str) -> tuple[int, int]:
    """Return what the caller makes of 1, and how often it came from the cache, in a new process."""
    text = CALLEE.format(constant=constant, expression=expression)
    callee = folder / "callee.py"
    if not callee.exists() or callee.read_text() != text:
        callee.write_text(text)
        changed = callee.stat().st_mtime + 10 * constant  # clocks of file systems may be coarse
        os.utime(callee, (changed, changed))
    (folder / "caller.py").write_text(CALLER)
    os.utime(folder / "caller.py", (1e9, 1e9))
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "NUMBA_CACHE_DIR": str(folder / "cache")}
    run = subprocess.run(
        [sys.executable, str(folder / "caller.py")], env=environment, capture_output=True, text=True, check=True
    )
    value, hits = run.stdout.split()
    return int(value), int(hits)


def test_a_changed_callee_or_constant_makes_the_caller_stale(tmp_path: Path) -> None:
    assert printed(tmp_path, 100, "x + 1") == (102, 0)
    assert printed(tmp_path, 100, "x + 1") == (102, 1)
    assert printed(tmp_path, 100, "x * 5") == (105, 0)
    assert printed(tmp_path, 700, "x * 5") == (705, 0)


def test_who_has_waited_for_another_process_loads_what_it_has_made(tmp_path: Path) -> None:
    """The other process is one that runs while this one waits for its turn."""
    (tmp_path / "callee.py").write_text(CALLEE.format(constant=1, expression="2 * x"))
    script = """
import subprocess, sys
from contextlib import contextmanager
from simulator import compiled_cache
import callee

@contextmanager
def turn(path):
    subprocess.run([sys.executable, "-c", "import callee; callee.called(21)"], check=True)
    yield

compiled_cache._turn = turn
print(callee.called(21), *callee.called.stats.cache_hits.values(), *callee.called.stats.cache_misses.values())
"""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
    }
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["42", "1"]


def test_the_clock_of_a_search_stands_still_while_something_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first search on a machine ends before it has begun: DAPPLE's planner takes some 20 s to compile."""
    turns = []

    @contextmanager
    def turn(path: Path) -> Iterator[None]:
        time.sleep(0.5)  # As if it took so long.
        turns.append(clock.wall_s)
        yield

    monkeypatch.setattr(compiled_cache, "_turn", turn)
    called = compiled_cache.compiled(lambda number: number + 1)
    clock = Budget(seconds=60).start()
    began_s = time.perf_counter()
    assert called(1) == 2
    passed_s = time.perf_counter() - began_s
    assert len(turns) == 1
    assert turns[0] < 0.4
    assert clock.wall_s < passed_s - 0.4
    before_s = clock.wall_s
    time.sleep(0.05)
    assert clock.wall_s >= before_s + 0.05


def test_it_goes_on_when_compiling_fails() -> None:
    called = compiled_cache.compiled(lambda number: number.nothing)
    clock = Budget(seconds=60).start()
    with pytest.raises(numba.TypingError):
        called(1)
    before_s = clock.wall_s
    time.sleep(0.05)
    assert clock.wall_s >= before_s + 0.05 and not compiled_cache._in_turn


@pytest.mark.skipif(sys.platform == "win32", reason="nobody waits on Windows")
def test_one_has_a_turn_at_a_time(tmp_path: Path) -> None:
    done = []

    def take() -> None:
        with _turn(tmp_path / "folder" / "lock"):
            done.append("second")

    second = threading.Thread(target=take)
    with _turn(tmp_path / "folder" / "lock"):
        second.start()
        second.join(timeout=0.2)
        done.append("first")
    second.join()
    assert done == ["first", "second"]


def test_nobody_waits_where_no_file_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with _turn(tmp_path / "file" / "lock"), _turn(tmp_path / "file" / "lock"):
        pass


@inlined
def _plus(number: int, other: int) -> int:
    return number + other


def _counted(count: int) -> int:
    total = 0
    for number in range(count):
        total = _plus(total, number) + _plus(0, 1)
    return total


def _summed(numbers: Int32s) -> int:
    total = 0
    for place in range(len(numbers)):
        total = _plus(total, numbers[place])
    return total


def test_a_number_is_one_kind_of_argument_written_out_or_from_an_array() -> None:
    """Else the function would be compiled anew for each."""
    assert numba.njit(_counted)(4) == 1 + 2 + 3 + 4  # Not from the cache.
    large = np.full(3, 2**31 - 1)
    for kind in (np.int32, np.uint32, np.int64):
        assert numba.njit(_summed)(large.astype(kind)) == large.sum()
    assert len(cast(Any, _plus).signatures) == 1


def test_what_is_compiled_for_compiled_callers_says_so_in_python() -> None:
    """It has no entry for Python: a call ended the process, once a compiled caller had it compiled."""
    assert numba.njit(_counted)(4) == 10
    with pytest.raises(TypeError, match=r"_plus is called by compiled functions; in Python call _plus\.py_func"):
        _plus(1, 2)
    assert cast(Any, _plus).py_func(1, 2) == 3


@inlined
def _makes_one(count: int) -> int:
    return len(np.zeros(count))


@inlined
def _asks_for_one(count: int) -> int:
    return _zeros_of(count) + 1


@compiled
def _zeros_of(count: int) -> int:
    return len(np.zeros(count))


def test_only_what_counts_references_makes_arrays() -> None:
    """Whoever is compiled first: numba gives what does not say whether it counts the caller's answer."""
    with pytest.raises(numba.core.errors.NumbaError, match=r"NRT required|returning of array"):
        numba.njit(lambda count: _makes_one(count))(3)
    assert numba.njit(lambda count: _asks_for_one(count))(3) == 4


@inlined
def _sum_of(view: Floats) -> float:
    total = 0.0
    for number in range(len(view)):
        total += view[number]
    return total


@inlined
def _sums_of_rows(rows: Floats) -> float:
    total = 0.0
    for row in range(len(rows)):
        total += _sum_of(rows[row])
    return total


def test_inlined_functions_count_no_references() -> None:
    """Not on views of an array in a loop either; the caller counts its own, however long the loop."""
    caller = numba.njit(lambda rows: _sums_of_rows(rows))
    assert caller(np.ones((5, 7))) == 35.0
    for function in (_sum_of, _sums_of_rows):
        (code,) = cast(Any, function).inspect_asm().values()
        assert "NRT_incref" not in code and "NRT_decref" not in code


def imported_from(module: ModuleType) -> dict[str, ModuleType]:
    """Return what names a module takes from which other modules of the project."""
    found = {}
    for node in ast.walk(ast.parse(Path(module.__file__ or "").read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            source = importlib.import_module(node.module or "")
            for alias in node.names:
                value = getattr(source, alias.name)
                found[alias.asname or alias.name] = value if isinstance(value, ModuleType) else source
    return found


def names_of(code: CodeType) -> set[str]:
    """Return what global names code uses, that of functions and loops inside it too."""
    own = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return own.union(*(names_of(each) for each in code.co_consts if isinstance(each, CodeType)))


def reached(function: FunctionType, seen: set[FunctionType]) -> set[ModuleType]:
    """Return the modules that a compiled function, and all that it calls, take names from."""
    own = importlib.import_module(function.__module__)
    found, taken = {own}, imported_from(own)
    seen.add(function)
    for name in names_of(function.__code__):
        value = function.__globals__.get(name)
        if name in taken:
            found.add(taken[name])
        called = getattr(value, "py_func", value)
        if isinstance(called, FunctionType) and called.__module__.split(".")[0] in PACKAGES and called not in seen:
            found |= reached(called, seen)
    return found


def cached_functions() -> Iterator[Any]:
    for package in PACKAGES:
        for info in pkgutil.walk_packages([str(ROOT / package)], f"{package}."):
            module = importlib.import_module(info.name)
            for value in vars(module).values():
                own = isinstance(value, CPUDispatcher) and value.__module__ == module.__name__
                if own and isinstance(value._cache, FunctionCache):
                    yield value


def test_every_compiled_function_names_all_modules_that_it_takes_from() -> None:
    """Else a change there leaves a stale cache: numba looks at the function's own file alone."""
    checked = 0
    for function in cached_functions():
        plain, named = function.py_func, {*getattr(function, "compiled_over", ())}
        missing = reached(plain, set()) - named - {importlib.import_module(plain.__module__), compiled_cache}
        assert not missing, f"{plain.__module__}.{plain.__name__} lacks {sorted(each.__name__ for each in missing)}"
        checked += 1
    assert checked > 20


def test_all_runs_without_numba_too() -> None:
    """In Python itself, for a debugger; uint64 keys wrap as they do compiled."""
    script = """
import numpy
from simulator.closed_forms.estimate import estimate
from simulator.fast.estimate import FastEstimator
from simulator.uniform import uniform_plan
from tests.simulator.problems import small_problem
numpy.seterr(over="ignore")
problem = small_problem("gpt", cluster="a100-80g-dgx:1x8", global_batch=16)
plan = uniform_plan(problem, tp=2, dp=4, zero=3)
print(FastEstimator(problem).estimate(plan).iteration_time_s / estimate(plan, problem).iteration_time_s)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_DISABLE_JIT": "1"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert float(run.stdout) == pytest.approx(1.0, rel=1e-11)
