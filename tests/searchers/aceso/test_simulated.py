"""Aceso's performance model beside the simulator: what a microbatch keeps, what crosses nodes, who is slowest."""

from __future__ import annotations

import pytest

from searchers.aceso.configuration import from_plan
from searchers.aceso.searcher import Aceso
from searchers.base import cost_tables
from simulator.problem import Problem, ProblemSpec
from simulator.simulate import simulate
from simulator.uniform import uniform_plan


def problem_on(cluster: str, batch: int, model: str = "bert-large", runtime: str = "megatron-lm-2021") -> Problem:
    return ProblemSpec(model=model, cluster=cluster, runtime=runtime, global_batch=batch).load()


@pytest.mark.parametrize("model", ["gpt3-350m", "t5-770m"])
@pytest.mark.parametrize("recompute", ["full", "selective", "none"])
def test_a_microbatch_more_in_flight_keeps_what_it_keeps_in_the_simulator(model: str, recompute: str) -> None:
    """Of a recomputed layer what enters it: no masks, and nothing that an operator of the same layer needs."""
    estimated, simulated = [], []
    for count in (2, 3):
        problem = problem_on("v100-32g-dgx1:1x4", 4 * count, model)
        plan = uniform_plan(problem, pp=4, microbatch=4, recompute=recompute)
        price = Aceso().model(problem).price(from_plan(plan, problem))
        estimated.append(price.stages[0].memory_bytes)
        found = simulate(plan, problem, engine="compiled", costs=cost_tables(problem))
        simulated.append(found.memory[0].peak_allocated_bytes)
    assert estimated[1] - estimated[0] == pytest.approx(simulated[1] - simulated[0], rel=0.05)


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 2, 8), (2, 2, 4), (8, 2, 1), (1, 4, 4), (1, 1, 16), (2, 1, 8)])
@pytest.mark.parametrize("cluster", ["p3.16xlarge:2x8", "a100-80g-dgx-100g:2x8"])
def test_stages_on_two_nodes_share_the_network(cluster: str, tp: int, pp: int, dp: int) -> None:
    """All GPUs of a stage send at once, in parts where they hold the same, and tied embeddings meet at the end."""
    problem = problem_on(cluster, 64, "gpt3-1.3b")
    plan = uniform_plan(problem, tp=tp, pp=pp, dp=dp, microbatch=4)
    found = simulate(plan, problem, engine="compiled", costs=cost_tables(problem))
    assert Aceso().paper_objective(plan, problem).objective == pytest.approx(found.iteration_time_s, rel=0.05)


@pytest.mark.parametrize("degrees", [{"pp": 2, "dp": 4}, {"pp": 2, "tp": 4}])
def test_a_mixed_cluster_is_as_slow_as_its_slowest_node_wherever_it_stands(degrees: dict[str, int]) -> None:
    v100s, t4s = "p3.8xlarge:1x4", "g4dn.12xlarge:1x4"
    for cluster in (f"{v100s}+{t4s}", f"{t4s}+{v100s}"):
        problem = problem_on(cluster, 128, "amp-gpt2", "megatron-deepspeed")
        plan = uniform_plan(problem, microbatch=1, **degrees)
        found = simulate(plan, problem, engine="compiled", costs=cost_tables(problem))
        # The stage on the faster node is taken to be as slow.
        assert 0.93 < Aceso().paper_objective(plan, problem).objective / found.iteration_time_s < 1.25


@pytest.mark.parametrize("cluster", ["p3.16xlarge:1x8+g4dn.12xlarge:2x4", "g4dn.12xlarge:2x4+p3.16xlarge:1x8"])
def test_a_stage_of_more_gpus_than_the_smaller_nodes_have_reduces_over_their_network(cluster: str) -> None:
    """Tensor parallel over eight: inside the V100 server, but over two of T4s, which is what it is taken to cost."""
    problem = problem_on(cluster, 64, "amp-gpt2", "megatron-deepspeed")
    plan = uniform_plan(problem, tp=8, pp=2, microbatch=4)
    found = simulate(plan, problem, engine="compiled", costs=cost_tables(problem))
    assert 0.93 < Aceso().paper_objective(plan, problem).objective / found.iteration_time_s < 1.25


def test_transfers_on_a_mixed_cluster_are_those_of_the_slower_links_wherever_they_are() -> None:
    """Eight stages of one GPU send over PCIe between T4s, which takes six times as long as NVLink between V100s."""
    objectives = []
    for cluster in ("p3.8xlarge:1x4+g4dn.12xlarge:1x4", "g4dn.12xlarge:1x4+p3.8xlarge:1x4"):
        problem = problem_on(cluster, 64, "amp-gpt2", "megatron-deepspeed")
        plan = uniform_plan(problem, pp=8, microbatch=4)
        price = Aceso().model(problem).price(from_plan(plan, problem))
        # An activation of four samples, 1,024 tokens and 1,024 wide, each way, over a lane (link_types.yaml).
        sent_s = 4 * 1024 * 1024 * 2 / 3.72e9 + 44e-6
        assert price.stages[1].transfer_s == pytest.approx(2 * sent_s, rel=0.02)
        objectives.append(price.iteration_s)
    assert objectives[0] == pytest.approx(objectives[1], rel=1e-9)
