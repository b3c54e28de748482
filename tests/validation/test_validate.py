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


def test_a_calibrated_machine_predicts_a_plan_it_was_not_calibrated_on(tmp_path: Path) -> None:
    problem = small(6 * MICROBATCH)
    plan = uniform_plan(problem, pp=2, microbatch=MICROBATCH, schedule="1f1b")
    profile, (report,) = validate_interleaved([(plan, problem)], problem, [MICROBATCH], rounds=3, iterations=2)
    errors = ", ".join(f"{100 * each.iteration.error:+.1f} %" for each in report.rounds)
    print(f"\nmedian |error| {100 * report.median_abs_error:.1f} %, rounds {errors}")
    for each in report.pooled.quantities:
        times = f"{1e3 * each.predicted_s:9.1f} ms {1e3 * each.measured_s:9.1f} ms"
        print(f"{each.name:<18}{times} {100 * each.error:+6.1f} %")
    print(f"factor {profile.operator_factor:.3f}, overhead of a pass {1e3 * profile.pass_overhead_s:.2f} ms")
    assert all(q.measured_s > 0.015 for q in report.pooled.quantities), "stages are too short to say anything"
    assert report.pooled.measured_share > 0.99
    assert report.median_abs_error < 0.35
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
