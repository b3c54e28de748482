"""The closed form where groups of an axis, or transfers of a boundary, share cards: against the engine, and by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hardware_models.communication import Communication
from hardware_models.crowding import together_s, unlike_groups
from hardware_models.links import load_network
from hardware_models.model import HardwareModel
from simulator.closed_forms.estimate import estimate
from simulator.closed_forms.stage_prices import stage_step_s, tied_s, transfers_s
from simulator.costs import CostTables
from simulator.engines.engine_simpy import run_simpy
from simulator.fast.estimate import FastEstimator
from simulator.fidelity import Fidelity
from simulator.lowering.lower import stage_views
from simulator.lowering.mesh import groups
from simulator.lowering.step import norm_s
from simulator.lowering.synchronisation import parameter_groups
from simulator.lowering.transfers import Transfer
from simulator.plan import Axis, Plan, Stage
from simulator.problem import Problem
from simulator.simulate import simulate_time_s
from simulator.taskgraph import COMMUNICATION
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.simulator.graphs import GraphBuilder
from tests.simulator.problems import small_problem

SHARING = Fidelity().without("overlap-slowdown", "host", "allocator")
"""What the closed form is about: it knows who shares a link, but no overlap."""

NETWORK = load_network("ethernet-10g")
"""Of p3.8xlarge, whose nodes have one card."""

UNLIKE = "p3.8xlarge:2x4+v100-32g-dgx1:1x8"


def simulated_s(plan: Plan, problem: Problem, fidelity: Fidelity = SHARING) -> float:
    return simulate_time_s(plan, problem, engine="compiled", fidelity=fidelity)


def run_together_s(costs: Sequence[Communication]) -> float:
    """Return when the last of some collectives or transfers ends in the engine, if all start at once."""
    names = dict.fromkeys(name for cost in costs for name, _ in cost.shares)
    numbers = {name: number for number, name in enumerate(names)}
    graph = GraphBuilder(num_resources=len(numbers))
    for cost in costs:
        shares = {numbers[name]: share for name, share in cost.shares}
        graph.add(cost.work_s, latency_s=cost.latency_s, shares=shares, kind=COMMUNICATION)
    return float(run_simpy(graph.build()).end_s.max())


def check(plan: Plan, problem: Problem, most: float = 1.04) -> None:
    """Both closed forms are within a few per cent of the engine, which sharing slows by more than that."""
    expected_s, found_s = simulated_s(plan, problem), estimate(plan, problem).iteration_time_s
    assert 0.99 < found_s / expected_s < most
    assert simulated_s(plan, problem, SHARING.without("contention")) < 0.96 * expected_s
    assert FastEstimator(problem).estimate(plan).iteration_time_s == pytest.approx(found_s, rel=1e-12)


@pytest.mark.parametrize(
    ("cluster", "runtime", "shape"),
    [
        ("p3.8xlarge:4x4", "megatron-lm-2021", dict(tp=4, dp=4)),  # four strided groups on a card
        ("p3.8xlarge:4x4", "megatron-lm-2021", dict(tp=2, dp=8)),  # two, with two ranks on each node
        ("p3.8xlarge:4x4", "megatron-lm-2021", dict(tp=4, dp=4, zero=3)),  # gathers before each use
        ("rtx3090-pcie:2x8", "pytorch-fsdp2", dict(tp=4, dp=4, zero=1)),  # parameters refreshed after the step
        ("p3.8xlarge:4x4", "megatron-lm-2021", dict(pp=2, dp=8)),  # transfers, and weights tied over stages
        ("g4dn.12xlarge:4x4", "megatron-lm-2021", dict(pp=4, dp=4)),
        ("g4dn.12xlarge:4x4", "megatron-lm-2021", dict(tp=2, pp=2, dp=4, zero=1)),
        (UNLIKE, "megatron-lm-2021", dict(tp=4, dp=4)),  # two groups share each small node's card, all the large one's
    ],
)
def test_groups_that_meet_on_a_card_share_it(cluster: str, runtime: str, shape: dict[str, int]) -> None:
    problem = small_problem("gpt", cluster=cluster, runtime=runtime, global_batch=64)
    check(uniform_plan(problem, **shape, overlap_gradient_sync=False), problem)  # type: ignore[arg-type]


def test_tensor_parallel_groups_over_nodes_share_their_cards() -> None:
    problem = small_problem("gpt", cluster="p3.8xlarge:2x4", global_batch=32)
    count = len(problem.workload)
    sharding = ((count, (Axis("tensor", 2), Axis("batch", 4))),)
    check(Plan((Stage(((0, count),), tuple(range(8)), sharding),), 8, 4), problem)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all"])
@pytest.mark.parametrize("num_bytes", [1e3, 1e6, 1e9])
@pytest.mark.parametrize(
    ("cluster", "sizes", "tolerance"),
    [
        ("p3.8xlarge:2x4", (2, 4), 1e-9),
        ("v100-32g-dgx1:2x8", (4, 4), 1e-3),  # in the quick protocol NVLink rules, and pairs have one link or two
        ("p3.8xlarge:3x4+g4dn.12xlarge:1x4", (4, 4), 1e-9),
        ("rtx3090-pcie:2x8", (4, 3), 0.04),  # unlike: groups with one, two and three ranks on a node
    ],
)
def test_groups_at_once_take_what_the_engine_says(cluster, sizes, tolerance, kind, num_bytes) -> None:
    hardware = HardwareModel.from_name(cluster)
    every = groups(sizes, (0,))
    costs = [hardware.collective(kind, num_bytes, members) for members in every]
    if len({(cost.latency_s, cost.work_s, tuple(sorted(share for _, share in cost.shares))) for cost in costs}) == 1:
        tolerance = 1e-9  # the rule is exact for groups that are alike, whatever the machine
    expected_s = run_together_s(costs)
    unlike = unlike_groups(hardware.cluster, every)
    found_s = max(hardware.crowded_collective_s(kind, num_bytes, group) for group in unlike)
    assert found_s == pytest.approx(expected_s, rel=tolerance)


@pytest.mark.parametrize("sizes", [(1e8, 1e8, 1e8, 1e8), (1e8, 1e6, 2e7, 5e7), (1e3, 1e9, 1e6, 1e6)])
def test_transfers_at_once_take_what_the_engine_says(sizes: tuple[float, ...]) -> None:
    hardware = HardwareModel.from_name("p3.8xlarge:2x4")
    costs = [hardware.transfer(size, rank, rank + 4) for rank, size in enumerate(sizes)]
    assert together_s(costs) == pytest.approx(run_together_s(costs), rel=1e-9)


def test_gradients_of_strided_groups_pass_one_card_one_after_the_other_as_it_were() -> None:
    """Four pairs, one per tensor-parallel rank: all their gradients leave each node through one card."""
    seconds = []
    for batch in (8, 16):
        problem = small_problem("gpt", cluster="p3.8xlarge:2x4", global_batch=batch)
        plan = uniform_plan(problem, tp=4, dp=2, microbatch=4, overlap_gradient_sync=False)
        seconds.append(estimate(plan, problem).iteration_time_s)
    (view,) = stage_views(validate(plan, problem), CostTables(problem))
    elements = sum(group.num_elements for group in parameter_groups(view))
    num_bytes = elements * problem.runtime.gradient_accumulation_bytes
    costs = CostTables(problem)
    # One microbatch and two; the host is at the norm when the device is.
    between_s = norm_s(costs, plan.devices)
    reduced_s = 2 * seconds[0] - seconds[1] - sum(stage_step_s(view, 1.0, between_s)) - between_s
    assert reduced_s == pytest.approx(4 * num_bytes / NETWORK.nic_bytes_per_s, rel=0.01)  # Latency is the rest.


def test_transfers_of_a_boundary_share_a_card() -> None:
    problem = small_problem("gpt", cluster="p3.8xlarge:2x4")
    costs, latency_s = CostTables(problem), NETWORK.point_to_point_latency_s
    rate = NETWORK.nominal_bytes_per_s * NETWORK.point_to_point_fraction
    pairs = [Transfer(rank, rank + 4, 1e8) for rank in range(4)]
    assert transfers_s(costs, pairs) == pytest.approx(latency_s + 4e8 / rate, rel=1e-12)
    assert transfers_s(costs, [*pairs[:1], Transfer(1, 5, 1e6)]) == pytest.approx(latency_s + 1.01e8 / rate, rel=1e-12)
    assert transfers_s(costs, pairs[:1]) == problem.hardware.transfer(1e8, 0, 4).alone_s
    inside = [Transfer(0, 3, 1e8), Transfer(1, 2, 1e8)]
    assert transfers_s(costs, inside) == problem.hardware.transfer(1e8, 0, 3).alone_s, "links of their own"


@pytest.mark.parametrize(("tp", "dp"), [(1, 4), (2, 2), (4, 1)])
def test_tied_weights_of_several_ranks_are_reduced_at_once(tp: int, dp: int) -> None:
    """Each of four ranks shares a card with the others; under tensor parallelism each has its part only."""
    problem = small_problem("gpt", cluster="p3.8xlarge:2x4", global_batch=8)
    plan = uniform_plan(problem, pp=2, tp=tp, dp=dp, overlap_gradient_sync=False)
    views = stage_views(validate(plan, problem), CostTables(problem))
    (embedding,) = {g.num_elements for view in views for g in parameter_groups(view) if g.tie is not None}
    num_bytes = 4 * embedding * problem.runtime.gradient_accumulation_bytes
    shared_s = tied_s(views[0].costs, views)
    assert shared_s == pytest.approx(num_bytes / NETWORK.nic_bytes_per_s, rel=0.01)
    if dp == 1:  # Nothing else is reduced.
        more_s = simulated_s(plan, problem) - simulated_s(plan, problem, SHARING.without("gradient-sync"))
        assert shared_s == pytest.approx(more_s, rel=1e-9)
