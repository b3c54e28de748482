"""Searchers in somebody's own file: what a comparison says of their mistakes, and what counts as their code."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest

from experiments.compare import compare
from searchers.budget import Budget
from searchers.registry import files_of
from simulator.problem import ProblemSpec

SPEC = ProblemSpec(model="gpt3-350m", cluster="v100-32g-dgx1:1x2", runtime="megatron-lm-2021", global_batch=4)
BUDGET = Budget(evaluations=4)

OWN = """
from searchers.base import NoFeasiblePlan, Searcher
{imports}

class Own(Searcher):
    name, paper = "own", "none"

    def search(self, problem, budget=None, seed=0):
        {body}
"""


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("raise ValueError('own: not for two devices')", "not applicable", "not for two devices"),
        ("raise NoFeasiblePlan('own', 'nothing fits')", "no plan", "nothing fits"),
        ("return None", "failed", "must return a SearchResult"),
        ("import sys; sys.exit(3)", "failed", "left by sys.exit(3)"),
        ("import json; json.loads('{')", "failed", "JSONDecodeError"),
        ("raise KeyError('oops')", "failed", "in search"),
    ],
)
def test_a_searcher_that_breaks_the_contract_failed_and_one_that_refuses_does_not_apply(
    tmp_path: Path, body: str, status: str, words: str
) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN.format(imports="", body=body))
    (row,) = compare(SPEC, (f"{file}:Own",), budget=BUDGET).to_dict("records")
    assert row["status"] == status and words in row["reason"]


def test_a_searcher_that_cannot_be_made_failed(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN.format(imports="", body="pass\n\n    def __init__(self, depth, objective): ..."))
    (row,) = compare(SPEC, (f"{file}:Own",), budget=BUDGET).to_dict("records")
    assert row["status"] == "failed" and "keyword arguments alone, none of them required" in row["reason"]


def test_files_of_a_searcher_are_those_that_it_imports_from_its_folder(tmp_path: Path) -> None:
    """Its package looks for modules beside the searcher too; what is installed, or this project's, is nobody's own."""
    texts = {
        "own.py": "import numpy\nimport searchers.base\nfrom pkg import a\nimport missing",
        "pkg/__init__.py": "",
        "pkg/a.py": "import helper",
        "helper.py": "import own",
        "unused.py": "",
        "searchers/base.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {str(path.relative_to(tmp_path)) for path in files_of(f"{tmp_path}/own.py:Own")}
    assert found == {"own.py", "pkg/__init__.py", "pkg/a.py", "helper.py"}
    assert files_of("aceso") == () and files_of(f"{tmp_path}/gone.py") == ()


def test_what_failed_is_tried_again_and_what_a_file_imports_is_part_of_it(tmp_path: Path) -> None:
    """The file is named without its class, and imports a helper from its folder."""
    file, helper, folder = tmp_path / "own.py", tmp_path / "helper.py", tmp_path / "out"
    body = "raise (OSError if helper.FAILS else ValueError)(f'own: {helper.WORDS}')"
    file.write_text(OWN.format(imports=f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import helper", body=body))

    def reason(fails: bool, words: str) -> str:
        helper.write_text(f"FAILS, WORDS = {fails}, {words!r}")
        sys.modules.pop("helper", None)
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        return str(compare(SPEC, (str(file),), budget=BUDGET, output=folder)["reason"].iloc[0])

    assert "OSError: own: no licence" in reason(True, "no licence")
    assert reason(False, "not here").endswith("not here")
    assert reason(False, "not there").endswith("not there")
