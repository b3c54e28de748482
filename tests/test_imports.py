"""Data flows one way, and so do imports."""

import ast
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
    "simulator.batch": 4,
    "validation.kinds": 0,
    "validation.execution": 1,
    "validation.profiling": 2,
    "validation.campaigns": 3,
}
"""Parts of a package; one imports from lower ones of its own, and from what stands in none."""
FILES = sorted(path for package in FLOORS for path in (ROOT / package).rglob("*.py"))


def imported(path: Path, depth: int = 1) -> set[str]:
    """Return the first ``depth`` words of the names of all imports of a file, those inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {".".join(name.split(".")[:depth]) for name in names}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_imports_only_from_floors_below(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    for name in imported(path) & set(FLOORS):
        assert name == package or FLOORS[name] < FLOORS[package], f"{package} must not import {name}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_part_of_a_package_imports_only_from_parts_below(room: str) -> None:
    files = sorted((ROOT / room.replace(".", "/")).rglob("*.py"))
    assert len(files) > 1
    for path in files:
        for name in imported(path, depth=2) & set(ROOMS):
            of_another = name.split(".")[0] != room.split(".")[0]
            below = of_another or name == room or ROOMS[name] < ROOMS[room]
            assert below, f"{path.relative_to(ROOT)} must not import {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_validation_imports_torch(path: Path) -> None:
    assert "torch" not in imported(path) or path.relative_to(ROOT).parts[0] == "validation"


def test_every_package_is_found() -> None:
    packages = [*FLOORS, *(room.replace(".", "/") for room in ROOMS)]
    assert all((ROOT / package / "__init__.py").is_file() for package in packages)
