"""Calibrate, predict, measure: on this machine's cores, with real processes."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from hardware_models.cluster import parse_cluster
from hardware_models.model import HardwareModel
from hardware_models.runtime import load_runtime
from simulator.problem import Problem
from simulator.uniform import uniform_plan
from validation.interleaved import validate_interleaved
from validation.machine_profile import load_machine_profile, save_machine_profile
from workloads.models.gpt import GPTSpec
from workloads.registry import build_from_spec

SPEC = GPTSpec.model_validate(
    {
        "name": "small-gpt", "layers": 4, "hidden": 256, "heads": 4, "seq_len": 128, "vocab": 2048,
        "dropout": 0.0, "attention_dropout": 0.0,
    }
)  # fmt: skip
MICROBATCH = 6


def small(global_batch: int) -> Problem:
    runtime = load_runtime("windtunnel-executor-fp32")
    return Problem(
        build_from_spec(SPEC, runtime.attention), HardwareModel(parse_cluster("local-cpu:1x2")), runtime, global_batch
    )


def test_calibration_and_validation_in_turn_cover_every_stage(tmp_path: Path) -> None:
    """How far off predictions are is the matter of test_campaign_accuracy, where the machine's calm is known."""
    problem = small(3 * MICROBATCH)
    plan = uniform_plan(problem, pp=2, microbatch=MICROBATCH, schedule="1f1b")
    profile, (report,) = validate_interleaved([(plan, problem)], problem, [MICROBATCH], rounds=2, iterations=1)
    assert len(report.rounds) == 2
    names = [each.name for each in report.pooled.quantities]
    assert names == ["iteration"] + [f"stage {stage} {word}" for stage in (0, 1) for word in ("forward", "backward")]
    assert all(each.measured_s > 0 and each.predicted_s > 0 for each in report.pooled.quantities)
    # Three microbatches of two stages: no iteration is shorter than a stage's own passes.
    iteration = report.pooled.iteration
    for side in ("predicted_s", "measured_s"):
        passes = sum(getattr(each, side) for each in report.pooled.quantities if each.name.startswith("stage 1"))
        assert getattr(iteration, side) > passes
    assert report.pooled.measured_share > 0.99
    path = tmp_path / "machine.json"
    save_machine_profile(profile, path)
    assert load_machine_profile(path) == profile


def test_a_calibrating_plan_cannot_be_validated() -> None:
    problem = small(4 * MICROBATCH)
    plan = uniform_plan(problem, pp=2, microbatch=MICROBATCH, schedule="gpipe")
    with pytest.raises(ValueError, match="must not be validated"):
        validate_interleaved([(plan, problem)], problem, [MICROBATCH], rounds=1)


def test_a_profile_of_another_machine_is_refused() -> None:
    from validation.machine_profile import MachineProfile
    from validation.profiler import make_profile

    problem = small(4 * MICROBATCH)
    profile = MachineProfile(make_profile(problem, [], "none"), (), 1.0, 0.0, 0.5, "Pentium", "2000", {}, "nothing")
    with pytest.raises(ValueError, match="another machine"):
        profile.check_machine()
