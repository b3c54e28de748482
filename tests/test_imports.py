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
FILES = sorted(path for package in FLOORS for path in (ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Return the top-level names of all imports of a file, those inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_imports_only_from_floors_below(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    for name in imported(path) & set(FLOORS):
        assert name == package or FLOORS[name] < FLOORS[package], f"{package} must not import {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_validation_imports_torch(path: Path) -> None:
    assert "torch" not in imported(path) or path.relative_to(ROOT).parts[0] == "validation"


def test_every_package_is_found() -> None:
    assert all((ROOT / package / "__init__.py").is_file() for package in FLOORS)
