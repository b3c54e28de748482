"""A plan file as a campaign of one plan: what calibrates it is like it, and never it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from simulator.plan import Axis, Plan, resolve, run_lengths
from simulator.problem import ProblemSpec
from simulator.profiled_costs import profiled_as
from simulator.uniform import uniform_plan
from validation.campaigns.definition import Campaign
from validation.campaigns.plan_campaign import plan_campaign
from validation.campaigns.work import campaign_work, sizes_of

MODEL = (
    "family: gpt\nname: small gpt\nlayers: 4\nhidden: 64\nheads: 4\nseq_len: 32\nvocab: 128\n"
    "dropout: 0.0\nattention_dropout: 0.0\n"
)
SHAPES = {
    "pipeline": {"pp": 2, "microbatch": 3, "schedule": "1f1b"},
    "pipeline that is what calibrates others": {"pp": 2, "microbatch": 3, "schedule": "gpipe"},
    "data parallel": {"dp": 2, "microbatch": 3},
    "data parallel that is what calibrates others": {"dp": 2, "microbatch": 3, "zero": 3, "schedule": "gpipe"},
    "tensor parallel": {"tp": 2, "microbatch": 3},
    "data parallel as in a profiling run": {"dp": 2, "microbatch": 3, "schedule": "gpipe"},
    "one device": {"microbatch": 3, "schedule": "gpipe"},
}


def campaign_of(
    folder: Path,
    shape: dict[str, Any],
    microbatches: int = 4,
    runtime: str = "windtunnel-executor-fp32",
    *,
    name: str = "mine",
) -> Campaign:
    model = folder / "model.yaml"
    model.write_text(MODEL)
    samples = shape["microbatch"] * shape.get("dp", 1) * microbatches
    spec = ProblemSpec(str(model), "local-cpu:1x2", runtime, samples)
    return plan_campaign(spec, uniform_plan(spec.load(), **shape), name=name)


@pytest.mark.parametrize("name", SHAPES)
def test_nothing_that_calibrates_is_the_plan(tmp_path: Path, name: str) -> None:
    campaign = campaign_of(tmp_path, SHAPES[name])
    (reported,), (calibrating,) = campaign.report, campaign.calibration
    own = reported.plan.canonical_hash(reported.problem.workload)
    (unit,) = campaign_work(campaign)
    hashes = [job.plan.canonical_hash(reported.problem.workload) for job in unit.jobs]
    assert hashes.count(own) == 1 and hashes[-1] == own
    # A pipeline is calibrated by a pipeline, several devices by several, at the samples that a rank works on.
    assert (len(calibrating.plan.stages) > 1) == (len(reported.plan.stages) > 1)
    assert len(calibrating.plan.devices) == len(reported.plan.devices)
    assert {run.samples for run in unit.profiling.operators} == {3}


def test_another_plan_is_another_campaign(tmp_path: Path) -> None:
    """So results of a plan that was edited since are not taken for its own."""
    first, second = (campaign_of(tmp_path, SHAPES["pipeline"], number) for number in (4, 6))
    assert first.fingerprint != second.fingerprint
    assert first.fingerprint == campaign_of(tmp_path, SHAPES["pipeline"], 4).fingerprint
    assert first.fingerprint != campaign_of(tmp_path, SHAPES["pipeline"], 4, "windtunnel-executor").fingerprint


def test_a_plan_called_communication_has_files_of_its_own(tmp_path: Path) -> None:
    campaign = campaign_of(tmp_path, SHAPES["pipeline"], name="communication")
    assert campaign.units == ["the plan communication"] and campaign.name == "communication"


def test_operators_that_all_ranks_repeat_are_profiled_whole(tmp_path: Path) -> None:
    """They were profiled as if cut in two, which a model with an odd number of heads cannot be."""
    (tmp_path / "odd.yaml").write_text(
        MODEL.replace("heads: 4", "heads: 3").replace("hidden: 64", "hidden: 48") + "vocab_multiple: 1\n"
    )
    spec = ProblemSpec(str(tmp_path / "odd.yaml"), "local-cpu:1x2", "windtunnel-executor-fp32", 4)
    problem = spec.load()
    whole = ((len(problem.workload), (Axis("replicate", 2),)),)
    (stage,) = uniform_plan(problem, dp=2, microbatch=2).stages
    plan = Plan((replace(stage, shardings=whole),), 2, 2)
    (unit,) = campaign_work(plan_campaign(spec, plan, name="mine"))
    assert {(run.samples, run.tensor_size) for run in unit.profiling.operators} == {(2, 1)}


def test_operators_are_profiled_as_a_profile_has_them(tmp_path: Path) -> None:
    """A layer that all ranks repeat, among others that are cut: its operators have the row of one rank."""
    (tmp_path / "model.yaml").write_text(MODEL)
    spec = ProblemSpec(str(tmp_path / "model.yaml"), "local-cpu:1x2", "windtunnel-executor-fp32", 4)
    problem = spec.load()
    operators = problem.workload.operators
    (stage,) = uniform_plan(problem, tp=2, microbatch=2).stages
    words = [(Axis("replicate", 2),) if op.role.startswith("mlp") else (Axis("tensor", 2),) for op in operators]
    plan = Plan((replace(stage, shardings=run_lengths(words)),), 2, 2)
    rows = {
        (2, measured_as[0])
        for op, word in zip(operators, words, strict=True)
        if (measured_as := profiled_as(op, resolve(word, op))) is not None
    }
    assert rows == {(2, 1), (2, 2)} == sizes_of(plan, problem)
