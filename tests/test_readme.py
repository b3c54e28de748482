"""What the README says works."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest
import typer

from experiments.cli import app
from hardware_models.cluster import parse_cluster
from tests.experiments.commands import run
from workloads.models.families import FAMILIES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = [
    (page.name, line)
    for page in PAGES
    for line in page.read_text().replace("\\\n", " ").splitlines()
    if re.match(r"\s*windtunnel [a-z]", line)
]


def test_the_example_runs_and_has_eight_lines() -> None:
    text = (ROOT / "README.md").read_text()
    examples = doctest.DocTestParser().get_examples(text)
    assert sum(example.source.count("\n") for example in examples) <= 9
    failed, tried = doctest.testfile(
        str(ROOT / "README.md"), module_relative=False, optionflags=doctest.ELLIPSIS
    )
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=lambda value: str(value)[:60])
def test_every_command_shown_exists_with_its_options(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    command = typer.main.get_command(app).commands[words[1]]  # type: ignore[attr-defined]
    if len(words) > 2 and words[2] in getattr(command, "commands", ()):
        command = command.commands[words[2]]
    known = {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}
    for parameter in command.params:
        wanted = [*parameter.opts, *parameter.secondary_opts]
        asks = not parameter.required or parameter.param_type_name == "argument" or "--help" in words
        assert asks or set(wanted) & set(words), f"{page}: {words[1]} needs {wanted[0]}"
    for word in words[2:]:
        assert not word.startswith("-") or word in known, f"{page}: {word} is no option of {words[1]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_inside_the_project_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


def test_the_facade_names_what_it_promises() -> None:
    import windtunnel

    for name in windtunnel.__all__:
        assert getattr(windtunnel, name) is not None
    assert set(windtunnel.__all__) <= set(dir(windtunnel))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = windtunnel.nothing


def test_the_searchers_of_the_guide_work(tmp_path: Path) -> None:
    from searchers.base import NoFeasiblePlan
    from searchers.budget import Budget
    from searchers.registry import searcher_named
    from tests.searchers.tiny import tiny_problem

    guide = (ROOT / "docs" / "write-your-own-searcher.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)[:2]
    path = tmp_path / "mine.py"
    path.write_text(first + second)
    found = searcher_named(f"{path}:PipelineOrReplicas").search(tiny_problem(2))
    assert found.counters["evaluations"] == 2
    climbed = searcher_named(f"{path}:HillClimber").search(tiny_problem(2), Budget(evaluations=10))
    assert climbed.counters["evaluations"] == 10 and climbed.counters["moves"] >= 1
    with pytest.raises(NoFeasiblePlan, match="no legal plan"):
        searcher_named(f"{path}:HillClimber").search(tiny_problem(8, 1), Budget(evaluations=10))


def test_the_guides_plan_that_is_not_uniform_is_legal() -> None:
    import windtunnel as wt

    guide = (ROOT / "docs" / "write-your-own-searcher.md").read_text()
    (code,) = re.findall(r"```python\n(def cut_plan.*?)```", guide, flags=re.DOTALL)
    names = {"wt": wt}
    exec(code, names)
    spec = {"model": "gpt3-350m", "cluster": "v100-32g-dgx1:1x4", "runtime": "megatron-lm-2021", "global_batch": 16}
    problem = wt.ProblemSpec(**spec).load()
    plan = names["cut_plan"](problem, [5], [2, 1], 4)  # type: ignore[operator]
    wt.validate(plan, problem)
    uneven = wt.simulate(plan, problem)
    assert uneven.num_devices == 4
    assert uneven.mfu < wt.simulate(wt.uniform_plan(problem, pp=2, dp=2, recompute="full"), problem).mfu


def test_the_files_of_the_guide_to_ones_own_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = (ROOT / "docs" / "your-own-model-and-cluster.md").read_text()
    files = re.findall(r"```yaml\n# (\S+)\n(.*?)```", guide, flags=re.DOTALL)
    assert [name for name, _ in files] == ["my-gpt.yaml", "my-cluster.yaml", "my-runtime.yaml"]
    for name, content in files:
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    for page, line in COMMANDS:
        if page == "your-own-model-and-cluster.md":
            code, _, error = run(capsys, *shlex.split(line)[1:])
            assert code == 0, f"{line}: {error}"
    assert parse_cluster("my-cluster.yaml:2x4+v100-32g-dgx1:1x8").num_devices == 16


def test_the_table_of_the_guide_to_ones_own_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = (ROOT / "docs" / "your-own-runs.md").read_text()
    (content,) = re.findall(r"```csv\n(.*?)```", guide, flags=re.DOTALL)
    (tmp_path / "runs.csv").write_text(content)
    monkeypatch.chdir(tmp_path)
    lines = [line for page, line in COMMANDS if page == "your-own-runs.md"]
    assert len(lines) == 4
    for line in lines:
        code, out, error = run(capsys, *shlex.split(line)[1:])
        assert code == 0 and ("2 measured runs" in out or "calibrate" in line), error


def test_the_guide_to_ones_own_lists_every_field_of_every_family() -> None:
    guide = (ROOT / "docs" / "your-own-model-and-cluster.md").read_text()
    rows = [[re.findall(r"`(\w+)`", cell) for cell in line.split("|")[1:4]] for line in guide.splitlines()]
    listed = {row[0][0]: (row[1], row[2]) for row in rows if len(row) == 3 and row[0]}
    fields = {name: family.spec.model_fields for name, family in FAMILIES.items()}
    assert listed == {
        name: tuple(
            [key for key, field in own.items() if key not in ("name", "family") and field.is_required() is required]
            for required in (True, False)
        )
        for name, own in fields.items()
    }
