"""What Alpa takes a stage to cost, beside the simulator on the plan that comes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from searchers.alpa.inter_op import Pipeline, StageChoice
from searchers.alpa.intra_op import IntraOpOptions
from searchers.alpa.meshes import LogicalMesh, Submesh
from searchers.alpa.oracle import CostModelOracle, StageCost
from searchers.alpa.stage_costs import Room
from searchers.alpa.stage_table import to_plan
from simulator.costs import cost_tables
from simulator.problem import Problem, ProblemSpec
from simulator.result import SimulationResult
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from workloads.models.gpt import GPTSpec
from workloads.registry import build_from_spec, build_workload


def problem_on(cluster: str, runtime: str = "alpa", *, heads: int = 16, batch: int = 32) -> Problem:
    """Return a GPT of four layers, its embedding and head two matrices."""
    problem = ProblemSpec(model="gpt3-350m", cluster=cluster, runtime=runtime, global_batch=batch).load()
    shape = GPTSpec(name="small", layers=4, hidden=1024, heads=heads, seq_len=1024, vocab=32000, tied_embeddings=False)
    return replace(problem, workload=build_from_spec(shape), spec=None)


def one_stage(
    problem: Problem, mesh: LogicalMesh, microbatch: int, *, recompute: bool = False, sharded: bool = False
) -> tuple[StageCost, float, SimulationResult]:
    """Return the model as one stage on all devices: what Alpa says, with its gradients' seconds, and the simulator."""
    spans = problem.workload.layers
    count = problem.global_batch // microbatch
    model = CostModelOracle(cost_tables(problem), spans, microbatch, count, IntraOpOptions(recompute=recompute))
    oracle = model.sharding_states() if sharded else model
    last = len(spans) - 1
    plan = to_plan(
        Pipeline(0.0, 0.0, 0.0, (StageChoice(0, last, 0, 0),), 0), problem, oracle, [[mesh]],
        microbatch_size=microbatch, recompute=recompute,
    )  # fmt: skip
    found = oracle.answer(mesh, 0, last)
    return found, oracle.solver(mesh).stage(0, last)["sync_s"], simulate(plan, problem, engine="compiled")


def test_gradients_travel_together_as_the_runtime_sends_them() -> None:
    problem = problem_on("v100-1gpu-10g:4x1")
    _, sync_s, found = one_stage(problem, LogicalMesh(Submesh(4, 1), 4, 1, batch_forced=True), 8)
    exposed_s = float(found.breakdown()["exposed_gradient_sync_s"].iloc[0])
    assert sync_s == pytest.approx(exposed_s, rel=0.02)  # tensor by tensor, 1.15 times as long


def test_launches_behind_others_do_not_add_up() -> None:
    problem = problem_on("a100-40g-dgx:1x2")
    cost, _, found = one_stage(problem, LogicalMesh(Submesh(1, 2), 2, 1, batch_forced=True), 2)
    busy = found.breakdown()[["forward_s", "backward_s", "launch_bound_s"]].iloc[0].sum()
    assert cost.seconds * 16 == pytest.approx(float(busy), rel=0.06)


@pytest.mark.parametrize("recompute", [False, True])
def test_shards_of_the_sequence_are_gathered_again_in_backward(recompute: bool) -> None:
    # Two samples on eight devices: operators are split along the sequence and by heads.
    problem = problem_on("a100-40g-dgx-100g:2x4", batch=8)
    mesh = LogicalMesh(Submesh(2, 4), 8, 1, batch_forced=False)
    cost, sync_s, found = one_stage(problem, mesh, 2, recompute=recompute)
    parts = found.breakdown().iloc[0]
    assert parts["exposed_tensor_parallel_s"] > 0.5 * found.iteration_time_s
    assert 4 * cost.seconds + sync_s == pytest.approx(found.iteration_time_s, rel=0.06)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("samples", [1, 4])
def test_memory_of_a_stage_is_what_is_there_while_its_microbatch_runs(
    recompute: bool, sharded: bool, samples: int
) -> None:
    problem = problem_on("v100-32g-dgx1:1x4")
    mesh = LogicalMesh(Submesh(1, 4), 4, 1, batch_forced=True)
    cost, _, found = one_stage(problem, mesh, 4 * samples, recompute=recompute, sharded=sharded)
    # As the shared closed form: what is not there at once may be added up.
    assert 0.97 < cost.peak_bytes() / found.peak_allocated_bytes < 1.25


def test_a_tensor_that_an_operator_keeps_twice_counts_once() -> None:
    # Scores of attention read queries and keys from one tensor. Under GPipe every microbatch more is kept.
    problem = problem_on("v100-32g-dgx1:1x4")
    cost, _, _ = one_stage(problem, LogicalMesh(Submesh(1, 4), 4, 1, batch_forced=True), 4)
    peaks = [
        simulate(uniform_plan(more, dp=4, microbatch=1, schedule="gpipe"), more, engine="compiled").peak_allocated_bytes
        for more in (replace(problem, global_batch=4 * count) for count in (2, 3))
    ]
    assert cost.kept_bytes == pytest.approx(peaks[1] - peaks[0], rel=0.01)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_shared_weight_is_there_once_and_the_optimizer_works_beside_it(sharded: bool) -> None:
    """GPT-3 350M has 356,837,376 parameters: 16 bytes of each are states, 4 the copied gradient of the step.

    Its head's 51,200 x 1,024 are the embedding's. Over two data-parallel GPUs ZeRO-2 halves 12 and 4 of these:
    gradients are reduced behind the backward pass, and are whole until then.
    """
    runtime = "megatron-lm-2021"
    problem = ProblemSpec(model="gpt3-350m", cluster="a100-40g-dgx:1x2", runtime=runtime, global_batch=2).load()
    mesh = LogicalMesh(Submesh(1, 2), 2, 1, batch_forced=True)
    found, _, simulated = one_stage(problem, mesh, 2, recompute=True, sharded=sharded)
    parameters = 356_837_376
    assert found.state_bytes == parameters * (4 + 12 / 2 if sharded else 16)
    assert found.step_bytes == parameters * (4 / 2 if sharded else 4)
    assert found.peak_bytes(1) == pytest.approx(simulated.peak_allocated_bytes, rel=0.12)
    assert found.peak_bytes(1) >= simulated.peak_allocated_bytes


@pytest.mark.parametrize("reduces", ["last", "every"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_shared_gradient_waits_unless_each_pass_scatters_it(reduces: str, sharded: bool) -> None:
    """As in the simulator; a layer of four samples computed again takes more than the loss."""
    problem = ProblemSpec("gpt3-1.3b", "a100-80g-dgx:1x2", "megatron-lm-2021", 16).load()
    workload = build_workload("gpt3-1.3b", attention="plain", overrides={"layers": 4})
    mesh = LogicalMesh(Submesh(1, 2), 2, 1, batch_forced=True)
    costs, peaks = [], []
    for waits in (False, True):
        runtime = replace(problem.runtime, tied_gradients_wait=waits, reduce_gradients=reduces, attention="plain")
        of = replace(problem, workload=workload, runtime=runtime, spec=None)
        cost, _, simulated = one_stage(of, mesh, 8, recompute=True, sharded=sharded)
        costs.append(cost.working_bytes)
        peaks.append(simulated.peak_allocated_bytes)
    embedding = workload.operators[0].attributes
    num_bytes = int(embedding["vocab"]) * int(embedding["hidden"]) * 2
    scattered = sharded and reduces == "every"
    assert costs[1] - costs[0] == peaks[1] - peaks[0] == (0 if scattered else num_bytes)


@pytest.mark.parametrize("sharded", [False, True])
def test_the_solver_that_keeps_to_the_memory_counts_a_shared_weight_once(sharded: bool) -> None:
    """Room for exactly what the best plan takes: with the embedding counted as the head too, 0.8 GiB more."""
    problem = ProblemSpec("gpt3-350m", "a100-40g-dgx:1x2", "megatron-lm-2021", 2).load()
    mesh = LogicalMesh(Submesh(1, 2), 2, 1, batch_forced=True)
    oracle = CostModelOracle(cost_tables(problem), problem.workload.layers, 2, 1, IntraOpOptions(recompute=False))
    oracle = oracle.sharding_states() if sharded else oracle
    last = len(problem.workload.layers) - 1
    found = oracle.answer(mesh, 0, last)
    room = Room(found.state_bytes + found.kept_bytes, 1)
    free = oracle.shardings(mesh, 0, last)
    assert oracle.shardings(mesh, 0, last, "pareto", room) == free
    with pytest.raises(ValueError, match="no assignment keeps the limit"):
        oracle.shardings(mesh, 0, last, "pareto", room._replace(limit_bytes=room.limit_bytes - 1))
