"""Data flows one way, and so do imports."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FLOORS = {
    "datafiles": 0,
    "workloads": 1,
    "hardware_models": 2,
    "simulator": 3,
    "searchers": 4,
    "validation": 4,
    "experiments": 5,
    "windtunnel": 6,
}
ROOMS = {
    "simulator.schedules": 0,
    "simulator.lowering": 1,
    "simulator.memory": 2,
    "simulator.engines": 3,
    "simulator.closed_forms": 3,
    "simulator.reports": 3,
    "simulator.fast": 4,
    "validation.kinds": 0,
    "validation.execution": 1,
    "validation.profiling": 2,
    "validation.campaigns": 3,
}
"""Parts of a package; one imports from lower ones of its own, and from what stands in none."""


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def imports(path: Path) -> frozenset[str]:
    """Return the names of all imports of a file, those inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def imported(path: Path, depth: int = 1) -> set[str]:
    """Return the first ``depth`` words of the names of all imports of a file."""
    return {".".join(name.split(".")[:depth]) for name in imports(path)}


@pytest.mark.parametrize("package", FLOORS)
def test_a_package_imports_only_from_floors_below(package: str) -> None:
    for path in files(package):
        for name in imported(path) & set(FLOORS):
            below = name == package or FLOORS[name] < FLOORS[package]
            assert below, f"{path.relative_to(ROOT)} must not import {name}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_part_of_a_package_imports_only_from_parts_below(room: str) -> None:
    paths = files(room.replace(".", "/"))
    assert len(paths) > 1
    for path in paths:
        for name in imported(path, depth=2) & set(ROOMS):
            of_another = name.split(".")[0] != room.split(".")[0]
            below = of_another or name == room or ROOMS[name] < ROOMS[room]
            assert below, f"{path.relative_to(ROOT)} must not import {name}"


@pytest.mark.parametrize("package", FLOORS)
def test_only_validation_imports_torch(package: str) -> None:
    with_torch = [path.relative_to(ROOT) for path in files(package) if "torch" in imported(path)]
    assert bool(with_torch) == (package == "validation"), with_torch


def test_every_package_is_found() -> None:
    packages = [*FLOORS, *(room.replace(".", "/") for room in ROOMS)]
    assert all((ROOT / package / "__init__.py").is_file() for package in packages)
