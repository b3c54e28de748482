"""Aceso's performance model beside the simulator: what a microbatch keeps, what crosses nodes, who is slowest."""

from __future__ import annotations

import pytest

from searchers.aceso.configuration import Configuration, Run, StageChoice, from_plan
from searchers.aceso.prices import StagePrice
from searchers.aceso.searcher import Aceso
from simulator.costs import cost_tables
from simulator.fidelity import Fidelity
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
    """All GPUs of a stage send at once, in parts where they hold the same, and tied embeddings meet at the end.

    Equation 2 has no optimizer (47 of 914 ms on A100s), so the simulator does without here.
    """
    problem = problem_on(cluster, 64, "gpt3-1.3b")
    plan = uniform_plan(problem, tp=tp, pp=pp, dp=dp, microbatch=4)
    without = Fidelity().without("optimizer")
    found = simulate(plan, problem, engine="compiled", costs=cost_tables(problem), fidelity=without)
    assert Aceso().paper_objective(plan, problem).objective == pytest.approx(found.iteration_time_s, rel=0.04)


def test_a_weight_that_a_stage_uses_twice_is_held_and_reduced_once() -> None:
    """GPT-3 350M on one GPU has 0.36e9 parameters, of which 51,200 x 1,024 are the embedding's and the head's."""
    problem = problem_on("a100-80g-dgx-100g:2x8", 64, "gpt3-350m")
    plan = uniform_plan(problem, dp=16, microbatch=4)
    found = Aceso().model(problem).price(from_plan(plan, problem)).stages[0]
    simulated = simulate(plan, problem, engine="compiled", costs=cost_tables(problem))
    assert found.sync_s == pytest.approx(simulated.breakdown()["communication_s"][0], rel=2e-3)


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


@pytest.mark.parametrize("degrees", [{"pp": 4}, {"tp": 2, "dp": 2}])
def test_convolutions_need_their_gathered_inputs_and_a_new_weight_gradient(degrees: dict[str, int]) -> None:
    """Of its largest weight, 5,120 x 2,560 x 3 x 3, a gradient of 450 MiB is made before it is added."""
    problem = problem_on("v100-32g-dgx1:1x4", 32, "wide-resnet-1b", "megatron-lm-2021-fp32")
    plan = uniform_plan(problem, microbatch=4, **degrees)
    found = simulate(plan, problem, engine="compiled", costs=cost_tables(problem)).peak_allocated_bytes
    assert 0.9995 <= Aceso().paper_objective(plan, problem).peak_bytes / found <= 1.02


def test_what_the_optimizer_works_in_is_the_peak_of_small_layers() -> None:
    """ViT-Large has 304,326,632 parameters, each with 16 bytes of states and 4 of a copied gradient: 6.09 GB."""
    problem = problem_on("a100-40g-dgx:2x2", 32, "vit-large")
    plan = uniform_plan(problem, dp=4, recompute="full", microbatch=4)
    assert Aceso().paper_objective(plan, problem).peak_bytes == 304_326_632 * 20
    found = simulate(plan, problem, engine="compiled", costs=cost_tables(problem))
    assert found.peak_allocated_bytes == pytest.approx(304_326_632 * 20, rel=1e-3)


def test_between_tensor_degrees_nothing_crosses_in_parts() -> None:
    """A microbatch of 64 MiB between nodes: each of 8 GPUs receives its samples whole, not an eighth or a half of them.

    Forward the first stage sends 16 MiB to each of 4 x 2 GPUs, twice the 64, and back the second 64 MiB to each of 8,
    eight times the 64.
    """
    problem = problem_on("p3.16xlarge:2x8", 64, "gpt3-1.3b")
    model, count = Aceso().model(problem), len(problem.workload)
    cut = next(stop for _, stop in problem.workload.layers if stop >= count // 2)

    def prices(first: int, last: int) -> tuple[StagePrice, ...]:
        stages = StageChoice(8, (Run(cut, first),)), StageChoice(8, (Run(count - cut, last),))
        return model.price(Configuration(8, stages)).stages

    unlike, eights, twos = prices(8, 2), prices(8, 8), prices(2, 2)
    assert unlike[0].transfer_s == pytest.approx(2 * twos[0].transfer_s, rel=0.05)
    assert unlike[1].transfer_s == pytest.approx(8 * eights[1].transfer_s, rel=0.05)
    nic_s = 2**26 * 8 / 25e9
    assert eights[0].transfer_s == pytest.approx(nic_s, rel=0.25)
