"""What Megatron-DeepSpeed of 2020 does besides: the mask crosses with each microbatch, the loss copies its logits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.costs import CostTables
from simulator.lowering.lower import stage_views
from simulator.lowering.transfers import boundary, crossing_tensors
from simulator.plan import Axis
from simulator.problem import Problem
from simulator.simulate import simulate_time_s
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.simulator.problems import small_problem
from workloads.kernels import MemoryBound
from workloads.kinds.base import FORWARD
from workloads.local import localize
from workloads.registry import build_workload


def sent_bytes(problem: Problem, tp: int, pp: int) -> list[list[float]]:
    """Return bytes of every transfer forward and backward over the first boundary."""
    plan = validate(uniform_plan(problem, tp=tp, pp=pp, microbatch=2), problem)
    views = stage_views(plan, CostTables(problem))
    ways = boundary(views[0], views[1], crossing_tensors(views)[0])
    return [[transfer.num_bytes for transfer in way] for way in ways]


def with_mask(sends: bool, *, scatters: bool, family: str = "gpt") -> Problem:
    problem = small_problem(family)
    runtime = replace(problem.runtime, sends_attention_mask=sends, scatters_transfers=scatters)
    return replace(problem, runtime=runtime)


@pytest.mark.parametrize("scatters", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_receiver_gets_one_whole_mask_forward_and_none_backward(tp: int, scatters: bool) -> None:
    before = sent_bytes(with_mask(False, scatters=scatters), tp, 2)
    after = sent_bytes(with_mask(True, scatters=scatters), tp, 2)
    mask = 2 * 2048**2
    assert [now - then for now, then in zip(after[0], before[0], strict=True)] == [mask] * tp
    assert after[1] == before[1]


@pytest.mark.parametrize("devices", [(0, 1), (1, 0), (3, 1)])
def test_the_first_rank_of_several_senders_sends_the_mask(devices: tuple[int, int]) -> None:
    """Two replicas send a half each to one; which of them comes first the mesh says, not the numbers of the devices."""
    problem = with_mask(True, scatters=False)
    both = uniform_plan(problem, dp=2, pp=2)
    first, second = both.stages
    axes = second.shardings[0][0], (Axis("batch", 1),)
    stages = (replace(first, devices=devices), replace(second, devices=(2,), shardings=(axes,)))
    plan = validate(replace(both, stages=stages), problem)
    views = stage_views(plan, CostTables(problem))
    forward, _ = boundary(views[0], views[1], crossing_tensors(views)[0])
    by_source = {transfer.source: transfer.num_bytes for transfer in forward}
    assert by_source[devices[0]] - by_source[devices[1]] == 2 * 2048**2


def test_a_model_without_scores_sends_no_mask() -> None:
    flash = with_mask(True, scatters=False)
    problem = replace(flash, workload=build_workload("gpt3-350m", attention="flash", overrides={"layers": 4}))
    assert sent_bytes(problem, 1, 2) == sent_bytes(
        replace(problem, runtime=replace(problem.runtime, sends_attention_mask=False)), 1, 2
    )


@pytest.mark.parametrize("pp", [2, 4])
def test_a_mask_costs_a_lone_microbatch_its_transfer_at_every_boundary(pp: int) -> None:
    """One microbatch goes from stage to stage alone, so nothing hides what crosses with it."""
    times = []
    for sends in (False, True):
        problem = replace(with_mask(sends, scatters=False), global_batch=1)
        times.append(simulate_time_s(uniform_plan(problem, pp=pp, microbatch=1), problem))
    transfer = with_mask(True, scatters=False).hardware.transfer
    activation, mask = 2 * 2048 * 1024, 2 * 2048**2
    longer_s = [
        transfer(activation + mask, stage, stage + 1).alone_s - transfer(activation, stage, stage + 1).alone_s
        for stage in range(pp - 1)
    ]
    assert min(longer_s) > 0
    assert times[1] - times[0] == pytest.approx(sum(longer_s), rel=1e-9)


def test_cloned_logits_are_one_pass_more_and_three_tensors_at_once() -> None:
    problem = small_problem("gpt")
    index = len(problem.workload) - 1
    op = problem.workload.operators[index]
    shapes = problem.workload.input_shapes(index, 3)
    found = {}
    for clones in (False, True):
        choice = replace(problem.runtime.implementation, loss_clones_logits=clones, logits_dtype="fp32")
        local = localize(op.definition, op.attributes, shapes, [], choice)
        saved = {saved.ref: saved for saved in op.definition.saved(local)}
        kernels = op.definition.kernels(FORWARD, local)
        traffic = sum(kernel.total_bytes for kernel in kernels if isinstance(kernel, MemoryBound))
        found[clones] = (saved, traffic, op.definition.workspace(FORWARD, local))
    logits = 3 * 2048 * 51200
    assert found[True][1] - found[False][1] == 2 * 4 * logits
    assert set(found[True][0]) - set(found[False][0]) == {"logits"}
    assert found[True][0]["logits"].dtype == found[True][0]["softmax"].dtype == "fp32"
    assert found[True][2] == ((found[True][0]["logits"].shape, "fp32"),)
