"""What crosses from stage to stage under sequence parallelism, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from simulator.closed_forms.estimate import estimate
from simulator.costs import CostTables
from simulator.fast.estimate import FastEstimator
from simulator.fidelity import Fidelity
from simulator.lowering.crossing import arriving
from simulator.lowering.items import GRADIENTS, Item
from simulator.lowering.lower import stage_views
from simulator.lowering.program import ProgramBuilder
from simulator.lowering.transfers import boundary, crossing_tensors
from simulator.lowering.view import StageView
from simulator.plan import Axis, Plan, Sharding, Stage
from simulator.problem import Problem
from simulator.simulate import simulate_time_s
from simulator.uniform import even_layer_cuts, uniform_plan
from simulator.validate import validate
from tests.simulator.problems import small_problem
from workloads.placements import REPLICATE, Shard

RUNTIME = "megatron-lm-2023"
SHARDS, WHOLE = (Axis("tensor_sequence", 2),), (Axis("tensor", 2),)


def views_of(plan: Plan, problem: Problem, costs: CostTables | None = None) -> tuple[StageView, ...]:
    return stage_views(validate(plan, problem), costs or CostTables(problem))


def crossing_bytes(plan: Plan, problem: Problem) -> list[tuple[float, float]]:
    """Return the bytes of a microbatch over each boundary, forward and backward."""
    views = views_of(plan, problem)
    ways = [
        boundary(first, second, names)
        for first, second, names in zip(views, views[1:], crossing_tensors(views), strict=False)
    ]
    return [(sum(t.num_bytes for t in out), sum(t.num_bytes for t in back)) for out, back in ways]


@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("tp", [2, 4])
def test_every_rank_sends_its_shard_of_the_sequence_once(family: str, tp: int) -> None:
    """Megatron-LM sends s / t tokens of hidden width from rank to rank: s h numbers in all, whatever reads them."""
    problem = small_problem(family, cluster="a100-80g-dgx:2x4", runtime=RUNTIME)
    tokens, hidden = problem.workload.tensors[problem.workload.operators[0].outputs[0]]
    plan = uniform_plan(problem, tp=tp, pp=2, microbatch=2, sequence_parallel=True)
    assert crossing_bytes(plan, problem) == [(2 * 2 * tokens * hidden,) * 2]
    whole = uniform_plan(problem, tp=tp, pp=2, microbatch=2)
    assert crossing_bytes(whole, problem) == [(tp * 2 * 2 * tokens * hidden,) * 2]


def test_shards_of_channels_cross_whole_to_each_rank_that_reads_them_whole() -> None:
    """They are no shards of a sequence: a convolution split by output channels, read by a norm on two other GPUs.

    Of its gradient each maker is sent the channels that it made.
    """
    problem = small_problem("resnet", cluster="a100-80g-dgx:1x4", runtime="megatron-lm-2021-fp32")
    count, split = len(problem.workload), (Axis("tensor_alternative", 2),)
    stages = (Stage(((0, 1),), (0, 1), ((1, split),)), Stage(((1, count),), (2, 3), ((count - 1, split),)))
    plan = Plan(stages, microbatch_size=2, num_microbatches=8)
    (made,) = problem.workload.operators[0].outputs
    assert views_of(plan, problem)[0].crossing(made).placements == (Shard(1),)
    whole = 4 * 2 * prod(problem.workload.tensors[made])
    assert crossing_bytes(plan, problem) == [(2 * whole, whole)]


def test_the_encoders_output_crosses_in_shards_and_passes_a_stage_in_them() -> None:
    """The first stage makes it, the second has a self attention alone, the others have a cross attention each."""
    problem = small_problem("t5", cluster="a100-80g-dgx:2x4", runtime=RUNTIME)
    operators = problem.workload.operators
    memory = next(op.outputs[0] for op in operators if op.role == "encoder_final_norm")
    roles = ["decoder_norm_1", "decoder_post_attention_dropout", "decoder_mlp_linear_1"]
    cuts = [next(index + 1 for index, op in enumerate(operators) if op.role == role) for role in roles]
    bounds = list(zip([0, *cuts], [*cuts, len(operators)], strict=True))
    stages = [Stage((ends,), (2 * n, 2 * n + 1), ((ends[1] - ends[0], SHARDS),)) for n, ends in enumerate(bounds)]
    views = views_of(Plan(tuple(stages), 1, 16), problem)
    assert [view.crossing(memory).placements for view in views] == [(Shard(1),)] * 4
    assert memory not in views[1].arrivals  # passed on
    assert [memory in names for names in crossing_tensors(views)] == [True] * 3


@pytest.mark.parametrize("family", ["gpt", "bert", "t5"])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_cut_moves_no_collective_of_a_layer(family: str, stages: int) -> None:
    """What a reader gathers from an earlier stage it would gather from its own; so with what it reduces."""
    problem = small_problem(family, cluster="a100-80g-dgx:2x4", runtime=RUNTIME)

    def gathered(pp: int) -> list[tuple[str, str]]:
        found = []
        for view in views_of(uniform_plan(problem, tp=2, pp=pp, sequence_parallel=True), problem):
            builder = ProgramBuilder(view, Fidelity())
            for items in (builder.forward(gather=False), builder.backward(GRADIENTS, gather=False, sync=False)):
                for item in items:
                    if item.collective is not None:
                        found.append((problem.workload.operators[item.operator].name, repr(item.collective)))
        return sorted(found)

    assert gathered(stages) == gathered(1)


@pytest.mark.parametrize("sums", [False, True])
def test_each_decoder_layer_gathers_the_encoders_output_for_itself(sums: bool) -> None:
    """Megatron-LM's column-parallel linear gathers its own input: an encoder layer 2, a decoder layer 4, a head 1.

    Backward again, as only shards are kept; and the gradients of what was scattered: an encoder layer 2, a decoder
    layer 3, two embeddings. Where operators share, the decoder layers have one gather of the memory.
    """
    problem = small_problem("t5", cluster="a100-80g-dgx:1x4", runtime=RUNTIME)
    problem = replace(problem, runtime=replace(problem.runtime, sums_input_gradients=sums))
    layers = 2
    (view,) = views_of(uniform_plan(problem, tp=2, sequence_parallel=True), problem)
    builder = ProgramBuilder(view, Fidelity())
    inputs = layers * (2 + 4) + 1 - (layers - 1 if sums else 0)

    def num_gathers(items: list[Item]) -> int:
        return sum(item.collective is not None and item.collective.collective == "all_gather" for item in items)

    assert num_gathers(builder.forward(gather=False)) == inputs
    assert num_gathers(builder.backward(GRADIENTS, gather=False, sync=False)) == inputs + layers * (2 + 3) + 2


def test_a_stage_knows_what_the_one_before_it_sends() -> None:
    """The same stage behind one that makes shards and behind one that makes the tensor whole."""
    problem = small_problem("bert", cluster="a100-80g-dgx:1x4", runtime=RUNTIME)
    (_, cut), (_, stop) = even_layer_cuts(problem.workload, 2)

    def plan(before: Sharding, behind: Sharding) -> Plan:
        stages = (
            Stage(((0, cut),), (0, 1), ((cut, before),)),
            Stage(((cut, stop),), (2, 3), ((stop - cut, behind),)),
        )
        return Plan(stages, 2, 8)

    plans = [plan(before, behind) for before in (SHARDS, WHOLE) for behind in (SHARDS, WHOLE)]
    costs, found = CostTables(problem), FastEstimator(problem)
    together = found.evaluate(found.arrays(plans))
    for number, one in enumerate(plans):
        alone = estimate(one, problem, CostTables(problem))
        assert estimate(one, problem, costs) == alone
        assert simulate_time_s(one, problem, costs=costs) == simulate_time_s(one, problem, costs=CostTables(problem))
        assert together.iteration_time_s[number] == pytest.approx(alone.iteration_time_s, rel=1e-11)
        assert tuple(together.peak_bytes[2 * number : 2 * number + 2]) == alone.peak_bytes
    crossed = [crossing_bytes(one, problem)[0][0] for one in plans]
    assert crossed == [crossed[0], crossed[0], 2 * crossed[0], 2 * crossed[0]]


@pytest.mark.parametrize("family", ["bert", "t5"])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_fast_estimate_knows_what_arrives_in_shards(family: str, keeps: bool, recompute: str) -> None:
    problem = small_problem(family, cluster="a100-80g-dgx:2x4", runtime=RUNTIME)
    problem = replace(problem, runtime=replace(problem.runtime, keeps_gathered_inputs=keeps))
    found = FastEstimator(problem)
    for tp, pp in ((2, 2), (4, 2), (2, 4)):
        plan = uniform_plan(problem, tp=tp, pp=pp, microbatch=2, sequence_parallel=True, recompute=recompute)
        expected, fast = estimate(plan, problem), found.estimate(plan)
        assert fast.iteration_time_s == pytest.approx(expected.iteration_time_s, rel=1e-11)
        assert fast.peak_bytes == expected.peak_bytes


def test_what_arrives_in_shards_is_kept_as_one_where_readers_gather_again() -> None:
    """Full recomputation keeps the input of each layer: s h / t numbers of it, that of the stage's first layer too."""
    problem = small_problem("bert", cluster="a100-80g-dgx:1x4", runtime=RUNTIME)
    tokens, hidden = problem.workload.tensors[problem.workload.operators[0].outputs[0]]
    views = views_of(uniform_plan(problem, tp=2, pp=2, sequence_parallel=True, recompute="full"), problem)
    (arrival,) = views[1].arrivals.values()
    assert arrival.arriving_bytes(views[1].cost(arrival.reader[0])) == 2 * tokens * hidden / 2
    assert arrival.placements == (Shard(1),)


def test_tokens_that_cannot_be_divided_arrive_whole() -> None:
    sharding = (Axis("batch", 2), Axis("column", 4))
    wanted = (Shard(0), REPLICATE)
    found = arriving(sharding, wanted, (6, 8), in_shards=True)
    assert (found.placements, found.num_parts) == (wanted, 1)
    found = arriving(sharding, wanted, (8, 8), in_shards=True)
    assert (found.placements, found.num_parts) == ((Shard(0), Shard(1)), 4)
    assert arriving(sharding, wanted, (8, 8), in_shards=False).placements == wanted
    assert arriving(sharding, (Shard(0), Shard(2)), (8, 8), in_shards=True).placements == (Shard(0), Shard(2))
