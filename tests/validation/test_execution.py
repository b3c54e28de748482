"""What ``execute`` returns."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from simulator.uniform import uniform_plan  # noqa: E402
from tests.validation.tiny import problem  # noqa: E402
from validation.execution.executor import execute  # noqa: E402
from validation.execution.reference import run_reference  # noqa: E402


@pytest.mark.measured
def test_a_pipeline_is_measured_stage_by_stage_and_operator_by_operator() -> None:
    of = problem("gpt")
    plan = uniform_plan(of, pp=2, microbatch=2)
    found = execute(plan, of, iterations=2, warmup=1, measure_operators=True, timeout_s=120, num_threads=1)
    assert len(found.iteration_samples_s) == 2
    assert min(found.iteration_samples_s) <= found.iteration_time_s <= max(found.iteration_samples_s)
    assert all(seconds > 0 for seconds in (*found.stage_forward_s, *found.stage_backward_s))
    assert len(found.stage_forward_s) == len(found.stage_backward_s) == 2
    assert found.losses == pytest.approx(run_reference(of, iterations=3).losses, rel=1e-5)
    words = [(action.kind, action.stage, action.microbatch) for action in found.actions]
    assert sorted(words) == sorted((kind, stage, mb) for kind in "FB" for stage in (0, 1) for mb in range(4))
    for action in found.actions:
        assert 0 <= action.start_s <= action.end_s <= found.iteration_samples_s[-1] * 1.01
    operators = range(len(of.workload))
    assert set(found.operator_s) == {(phase, index) for phase in ("forward", "backward") for index in operators}
    mapping = json.loads(json.dumps(found.to_mapping()))
    assert mapping["plan_hash"] == plan.canonical_hash(of.workload)
    assert (found.backend, found.num_devices, found.peak_allocated_bytes) == ("gloo", 2, 0)


def test_arguments_that_make_no_sense_are_refused() -> None:
    of = problem("gpt")
    plan = uniform_plan(of)
    with pytest.raises(ValueError, match="iterations must be at least 1"):
        execute(plan, of, iterations=0)
    with pytest.raises(ValueError, match="device must be one of cpu, cuda"):
        execute(plan, of, device="tpu")
