"""PipeDream's planner against its own program's results and exhaustive search."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from searchers.base import Searcher
from searchers.pipedream.antichains import antichain_states
from searchers.pipedream.planner import (
    Level,
    PipeDreamOptions,
    PipeDreamStage,
    bottleneck_s,
    plan_pipeline,
)
from searchers.pipedream.searcher import PipeDream
from searchers.piper.searcher import Piper
from simulator.problem import Problem, ProblemSpec
from simulator.simulate import simulate_time_s
from simulator.uniform import uniform_plan
from tests.hardware_models.data_folder import data_folder
from tests.searchers.tiny import tiny_problem
from tests.simulator.problems import chain_of_opaque, chain_problem
from workloads.layer_profile import LayerNode, LayerProfile, load_layer_profile

NVLINK = ((8, 25e9), (2, 3.125e9))
FAST = ((8, 130e9), (2, 3.125e9))
SMALL = ((4, 10e9), (4, 1.25e9))
# Profile, levels, transfers counted: bottleneck in ms, states, speedup over one GPU, that of data parallelism.
# Bottlenecks as the public optimizer printed them for the same options.
PROGRAM = [
    ("pipedream/vgg16_b64.csv", NVLINK, False, 46.38, 40, 14.50, 9.75),
    ("pipedream/vgg16_b64.csv", NVLINK, True, 65.77, 40, 10.23, 9.75),
    ("pipedream/vgg16_b64.csv", SMALL, False, 44.12, 40, 15.24, 4.97),
    ("pipedream/vgg16_b64.csv", SMALL, True, 67.13, 40, 10.02, 4.97),
    ("pipedream/alexnet.csv@256", NVLINK, False, 5.51, 22, 15.48, 4.95),
    ("pipedream/alexnet.csv@256", NVLINK, True, 9.71, 22, 8.79, 4.95),
    ("pipedream/alexnet.csv@256", SMALL, True, 15.10, 22, 5.65, 1.83),
    ("pipedream/gnmt8.csv@64", NVLINK, False, 9.89, 99, 9.04, 2.06),
    ("pipedream/gnmt8.csv@64", SMALL, False, 11.08, 99, 8.07, 0.66),
    ("pipedream/resnet50_b128.csv", NVLINK, True, 32.01, 240, 13.85, 13.56),
    ("dapple/vgg19_b32.csv", FAST, True, 15.36, 25, None, None),
    ("dapple/vgg19_b32.csv", NVLINK, True, 15.36, 25, None, None),
    ("dapple/amoebanet36_b1.csv", NVLINK, True, 11.71, 43, None, None),
    ("dapple/xlnet36_b1.csv", NVLINK, True, 24.9, 41, None, None),
    ("dapple/xlnet36_b1.csv", FAST, True, 21.9, 41, None, None),
]


def states_of(name: str):  # type: ignore[no-untyped-def]
    folder, _, file = name.partition("/")
    return antichain_states(load_layer_profile(f"{data_folder(folder)}/{file}"))


def levels_of(pairs: tuple[tuple[int, float], ...]) -> list[Level]:
    return [Level(*pair) for pair in pairs]


@pytest.mark.parametrize(("name", "pairs", "transfers", "bottleneck_ms", "count", "speedup", "plain"), PROGRAM)
def test_bottlenecks_are_those_of_the_public_optimizer(
    name: str, pairs, transfers: bool, bottleneck_ms: float, count: int, speedup, plain
) -> None:
    states = states_of(name)
    assert states.num_states == count
    options = PipeDreamOptions(transfers=transfers)
    found = plan_pipeline(states, levels_of(pairs), options)
    printed_to = 0.05 if "xlnet" in name else 0.0
    assert found.bottleneck_s * 1e3 == pytest.approx(bottleneck_ms, rel=1e-3, abs=printed_to)
    if speedup:
        time_s = float(states.time_s[-1])
        assert time_s / found.bottleneck_s == pytest.approx(speedup, abs=0.006)
        assert time_s / found.data_parallel_s == pytest.approx(plain, abs=0.006)
    assert bottleneck_s(states, levels_of(pairs), found.stages, options) == pytest.approx(found.bottleneck_s, rel=1e-9)


def test_stages_are_those_of_dapples_table_6_and_of_the_optimizer_on_chains() -> None:
    vgg16, vgg19 = states_of("pipedream/vgg16_b64.csv"), states_of("dapple/vgg19_b32.csv")
    without = plan_pipeline(vgg16, levels_of(NVLINK), PipeDreamOptions(transfers=False))
    assert without.words == "[0,8)x8 [8,25)x7 [25,40)x1"
    table_6 = plan_pipeline(vgg19, levels_of(FAST))
    assert table_6.words == "[0,11)x8 [11,17)x6 [17,19)x1 [19,25)x1"
    slower = plan_pipeline(vgg19, levels_of(NVLINK))
    assert slower.words == "[0,11)x8 [11,14)x4 [14,17)x2 [17,19)x1 [19,25)x1"
    amoeba = plan_pipeline(states_of("dapple/amoebanet36_b1.csv"), levels_of(NVLINK))
    ends = [stage.last + 1 for stage in amoeba.stages]
    assert ends == [5, 8, 11, 14, 17, 19, 22, 25, 27, 29, 31, 33, 35, 37, 39, 43]
    assert {len(stage.devices) for stage in amoeba.stages} == {1}


def random_profile(random: np.random.Generator, layers: int) -> LayerProfile:
    nodes = [
        LayerNode(
            name=f"n{layer}",
            layer="layer",
            forward_s=float(random.uniform(1e-3, 3e-3)),
            backward_s=float(random.uniform(2e-3, 6e-3)),
            output_bytes=float(random.uniform(0, 1e7)),
            parameter_bytes=float(random.uniform(0, 4e7)),
            saved_bytes=0.0,
            predecessors=(f"n{layer - 1}",) if layer else (),
        )
        for layer in range(layers)
    ]
    return LayerProfile("random", 1, tuple(nodes))


def partitions(num_layers: int, gpus: int) -> Iterator[list[PipeDreamStage]]:
    """Yield every way to cut layers and deal all GPUs to the stages."""
    for stages in range(1, min(num_layers, gpus) + 1):
        for cuts in itertools.combinations(range(1, num_layers), stages - 1):
            for shares in itertools.combinations(range(1, gpus), stages - 1):
                layers, members = itertools.pairwise((0, *cuts, num_layers)), itertools.pairwise((0, *shares, gpus))
                yield [
                    PipeDreamStage(a - 1, b - 1, tuple(range(c, d)))
                    for (a, b), (c, d) in zip(layers, members, strict=True)
                ]


@pytest.mark.parametrize("rule", ["released", "paper"])
@pytest.mark.parametrize("seed", range(5))
def test_on_one_level_it_is_as_good_as_every_partition(seed: int, rule: str) -> None:
    states = antichain_states(random_profile(np.random.default_rng(seed), 6))
    levels, options, gpus = [Level(5, 3e9)], PipeDreamOptions(data_parallel=rule), 5
    best = min(bottleneck_s(states, levels, plan, options) for plan in partitions(6, gpus))
    assert plan_pipeline(states, levels, options).bottleneck_s == pytest.approx(best, rel=1e-9)


def test_a_diamond_has_the_antichains_of_its_branches() -> None:
    def node(name: str, *before: str) -> LayerNode:
        return LayerNode(name, name, 1.0, 2.0, 8.0, 4.0, 0.0, before)

    diamond = LayerProfile("diamond", 1, (node("a"), node("b", "a"), node("c", "a"), node("d", "b", "c")))
    states = antichain_states(diamond)
    found = {"".join(sorted(names)): size for names, size in zip(states.nodes, states.output_bytes, strict=True)}
    # A cut behind a and b carries b, and a for c. Behind b and c the optimizer still counts a, since it asks for each
    # member of the antichain on its own whether something further up has other readers.
    assert found == {"a": 8.0, "ab": 16.0, "ac": 16.0, "abc": 24.0, "abcd": 8.0}
    assert states.time_s[-1] == 12.0


def test_memory_and_unknown_rules_are_refused_with_reasons() -> None:
    states = antichain_states(random_profile(np.random.default_rng(0), 4))
    with pytest.raises(ValueError, match="finds no plan"):
        plan_pipeline(states, [Level(2, 1e9)], PipeDreamOptions(memory_bytes=-1.0))
    with pytest.raises(ValueError, match="data_parallel must be one of"):
        PipeDreamOptions(data_parallel="mine")
    with pytest.raises(ValueError, match="replica_assignment must be"):
        PipeDream(replica_assignment="half")


def test_round_robin_plans_are_legal_and_keep_the_bottleneck() -> None:
    problem = chain_problem(chain_of_opaque(5, 1e-3, 2e-3), num_devices=4, global_batch=32)
    turns = PipeDream(replica_assignment="round_robin", microbatch=1).search(problem)
    slices = PipeDream(microbatch=8).search(problem)
    assert turns.plans[0].objective == pytest.approx(slices.plans[0].objective, rel=1e-9)
    assert turns.best.rotates




def mixed_problems() -> Iterator[Problem]:
    """Yield a problem on a V100 and a T4 server, in either order, and on two T4 servers."""
    v100s, t4s = "p3.8xlarge:1x4", "g4dn.12xlarge:1x4"
    for cluster in (f"{v100s}+{t4s}", f"{t4s}+{v100s}", "g4dn.12xlarge:2x4"):
        yield ProblemSpec(
            model="amp-gpt2", cluster=cluster, runtime="megatron-deepspeed", global_batch=64
        ).load()


@pytest.mark.parametrize("searcher", [PipeDream(), Piper()])
def test_a_mixed_cluster_is_as_slow_as_its_slowest_node_wherever_it_stands(searcher: Searcher) -> None:
    objectives = []
    for problem in mixed_problems():
        plan = uniform_plan(problem, pp=8, microbatch=4)
        objectives.append(searcher.score(plan, problem).objective)
    simulated_s = simulate_time_s(plan, problem, engine="compiled")
    steady_s = 16 / (16 + 7) * simulated_s  # without filling and emptying
    assert objectives[-1] == pytest.approx(steady_s, rel=0.2)
    assert objectives == pytest.approx([objectives[-1]] * 3, rel=0.05)  # the V100 server has a slower card


def test_pipers_tensor_degrees_cost_what_they_do_on_the_slowest_node_wherever_it_stands() -> None:
    """All-reduces of four V100s on NVLink take a tenth of those of four T4s on PCIe."""
    objectives = [
        Piper().score(uniform_plan(problem, tp=4, pp=2, microbatch=4), problem).objective
        for problem in mixed_problems()
    ]
    assert objectives == pytest.approx([objectives[-1]] * 3, rel=0.05)  # the V100 server has a slower card


@pytest.mark.parametrize("replica_assignment", ["slice", "round_robin"])
@pytest.mark.parametrize(("devices", "batch"), [(4, 1), (8, 2), (8, 3)])
def test_a_stage_has_no_more_replicas_than_there_are_samples(devices: int, batch: int, replica_assignment: str) -> None:
    """Its objective knows no samples, so it would replicate a stage on GPUs that nothing is left for."""
    found = PipeDream(replica_assignment=replica_assignment).search(tiny_problem(devices, batch))
    replicas = [len(stage.devices) for stage in found.best.stages]
    assert max(replicas) <= batch
    assert sum(replicas) == devices


@pytest.mark.parametrize("rule", ["released", "paper"])
@pytest.mark.parametrize("seed", range(4))
def test_with_a_limit_of_replicas_it_is_as_good_as_every_partition_that_keeps_it(seed: int, rule: str) -> None:
    states = antichain_states(random_profile(np.random.default_rng(seed), 6))
    levels, gpus = [Level(5, 3e9)], 5
    for most in range(1, gpus + 1):
        options = PipeDreamOptions(data_parallel=rule, max_replicas=most)
        best = min(
            bottleneck_s(states, levels, plan, options)
            for plan in partitions(6, gpus)
            if max(len(stage.devices) for stage in plan) <= most
        )
        assert plan_pipeline(states, levels, options).bottleneck_s == pytest.approx(best, rel=1e-9)


def test_a_limit_of_replicas_may_take_a_slower_stage_inside_for_more_machines() -> None:
    """Two machines of two GPUs, slow between them: each runs both layers, so neither layer has more than two replicas.

    Inside a machine one stage on both GPUs is quicker, and leaves one machine alone to run it.
    """
    nodes = [
        LayerNode("a", "layer", 4.0, 6.0, 100.0, 0.0, 0.0, ()),
        LayerNode("b", "layer", 3.0, 6.0, 0.0, 0.0, 0.0, ("a",)),
    ]
    states = antichain_states(LayerProfile("two", 1, tuple(nodes)))
    levels = [Level(2, 1000.0), Level(2, 1.0)]
    found = plan_pipeline(states, levels, PipeDreamOptions(max_replicas=2))
    assert [stage.devices for stage in found.stages] == [(0, 2), (1, 3)]
    assert found.bottleneck_s == pytest.approx(10.0 / 2)
    assert found.bottleneck_s == bottleneck_s(states, levels, found.stages, PipeDreamOptions())
    three = plan_pipeline(states, [levels[0], Level(3, 1.0)], PipeDreamOptions(max_replicas=3))
    assert three.bottleneck_s == pytest.approx(10.0 / 3)  # was refused


def test_a_limit_of_replicas_holds_over_all_levels() -> None:
    states = antichain_states(random_profile(np.random.default_rng(0), 8))
    levels = [Level(2, 3e9), Level(3, 1e9)]
    for most in range(1, 7):
        found = plan_pipeline(states, levels, PipeDreamOptions(max_replicas=most))
        assert max(len(stage.devices) for stage in found.stages) <= most
    with pytest.raises(ValueError, match="3 states that uses all 6 GPUs: at most 1 of them may run one stage"):
        plan_pipeline(
            antichain_states(random_profile(np.random.default_rng(0), 3)), levels, PipeDreamOptions(max_replicas=1)
        )
