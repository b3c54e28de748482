"""Piper's planner against its own program's objectives and exhaustive search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

import numpy as np
import pytest

from searchers.piper.compiled_planner import choose_implementations
from searchers.piper.model import Edge, Implementation, PiperInput, Tie, load_piper_input, piper_input
from searchers.piper.planner import plan_piper
from searchers.piper.searcher import Piper, load_s
from simulator.problem import ProblemSpec
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from tests.hardware_models.data_folder import data_folder
from tests.searchers.tiny import tiny_problem
from workloads.registry import build_workload

GIB = 2**30
# Devices, memory in GiB, microbatches: objective that Piper's own program printed, its stages and devices.
PROGRAM = [
    (8, 80, 128, 0.12760, 1, 8),
    (32, 8, 480, 0.041670, 14, 32),
    (64, 8, 512, 0.020957, 13, 64),
    (64, 80, 512, 0.016885, 1, 64),
]


@pytest.mark.parametrize(("devices", "memory_gib", "microbatches", "objective", "stages", "used"), PROGRAM)
def test_objectives_are_those_of_pipers_program(
    devices: int, memory_gib: int, microbatches: int, objective: float, stages: int, used: int
) -> None:
    stated = load_piper_input(data_folder("piper") / "bert32a100.json")
    found = plan_piper(
        replace(
            stated,
            num_devices=devices,
            memory_bytes=memory_gib * GIB,
            num_microbatches=microbatches,
            bandwidth_bytes_per_s=25 * GIB,
        )
    )
    assert found.objective_s == pytest.approx(objective, rel=1e-3)
    assert (len(found.stages), found.num_devices) == (stages, used)


@pytest.mark.slow
def test_512_devices_take_the_programs_objective_too() -> None:
    stated = load_piper_input(data_folder("piper") / "bert32a100.json")
    wide = replace(stated, num_devices=512, memory_bytes=8 * GIB, num_microbatches=1920)
    found = plan_piper(replace(wide, bandwidth_bytes_per_s=25 * GIB))
    assert found.objective_s == pytest.approx(0.0025611, rel=1e-3)
    assert (len(found.stages), found.num_devices) == (12, 510)


def random_input(seed: int, *, branch: bool) -> PiperInput:
    random = np.random.default_rng(seed)
    count = 4
    names = tuple("abcd")
    pairs = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")] if branch else [("a", "b"), ("b", "c"), ("c", "d")]

    def options(degree: int, name: str) -> tuple[Implementation, ...]:
        before = {u: float(random.uniform(0, 2e6)) for u, v in pairs if v == name and degree > 1}
        after = {v: float(random.uniform(0, 2e6)) for u, v in pairs if u == name and degree > 1}
        weights, time = float(random.uniform(1e6, 2e7)) / degree, float(random.uniform(1, 4)) * 1e-3 / degree**0.8
        kept = float(random.uniform(1e6, 4e6)) / degree
        return (
            Implementation("vanilla", time, weights, kept, 2 * weights, before, after),
            Implementation("again", time * 1.3, weights, kept / 8, 2 * weights + kept, before, after),
        )

    return PiperInput(
        names=names,
        implementations=tuple({degree: options(degree, name) for degree in (1, 2)} for name in names[:count]),
        edges=tuple(Edge(u, v, float(random.uniform(0, 2e6))) for u, v in pairs),
        num_devices=4,
        memory_bytes=4.5e7,
        bandwidth_bytes_per_s=1e9,
        num_microbatches=12,
    )


def partitions(problem: PiperInput, ideals: list[int], start: int) -> Iterator[list[int]]:
    """Yield every chain of nested down-sets as the masks of its stages."""
    if start == ideals[-1]:
        yield []
        return
    for ideal in ideals:
        if ideal != start and start & ~ideal == 0:
            for rest in partitions(problem, ideals, ideal):
                yield [ideal & ~start, *rest]


def best_of_all(problem: PiperInput) -> float:
    """Return the smallest objective over every partition, degree and choice of implementations."""
    shapes = [(t, d) for t in (1, 2) for d in range(1, 5) if t * d <= 4 and 12 % d == 0]
    best = float("inf")
    for masks in partitions(problem, problem.ideals(), 0):
        layers = [[name for i, name in enumerate(problem.names) if mask >> i & 1] for mask in masks]
        best = min(best, _best_tail(problem, layers, shapes, 0, 0, len(layers) - 1))
    return best


def _best_tail(problem, layers, shapes, devices: int, degrees: int, stage: int) -> float:  # type: ignore[no-untyped-def]
    if stage < 0:
        return 0.0
    best = float("inf")
    for t, d in shapes:
        if devices + t * d > problem.num_devices:
            continue
        in_flight = ceil((degrees + d) / d)
        load = _best_load(problem, layers[stage], t, d, in_flight)
        if load < float("inf"):
            rest = _best_tail(problem, layers, shapes, devices + t * d, degrees + d, stage - 1)
            best = min(best, max(load, rest))
    return best


def _best_load(problem: PiperInput, names: list[str], t: int, d: int, in_flight: int) -> float:
    best = float("inf")
    if any(t not in problem.implementations[problem.names.index(name)] for name in names):
        return best
    for bits in range(2 ** len(names)):
        chosen = {name: ("vanilla", "again")[bits >> i & 1] for i, name in enumerate(names)}
        memory = 0.0
        sync = 0.0
        for name, implementation in chosen.items():
            options = problem.implementations[problem.names.index(name)][t]
            option = next(each for each in options if each.name == implementation)
            memory += option.memory_per_microbatch_bytes * in_flight + option.memory_bytes
            sync += sum(size for other, size in option.sync_forward_bytes.items() if other not in chosen)
            sync += sum(size for other, size in option.sync_backward_bytes.items() if other not in chosen)
        memory -= sum(
            tie.memory_bytes * (sum(name in chosen for name in tie.layers) - 1)
            for tie in problem.ties
            if tie.degree == t and any(name in chosen for name in tie.layers)
        )
        if memory <= problem.memory_bytes:
            extra = 2 * sync / d / problem.bandwidth_bytes_per_s
            best = min(best, load_s(problem, chosen, t, d) + extra)
    return best


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_on_small_graphs_it_is_as_good_as_exhaustive_search(seed: int, branch: bool) -> None:
    problem = random_input(seed, branch=branch)
    best = best_of_all(problem)
    assert plan_piper(problem, knapsack="exact").objective_s == pytest.approx(best, rel=1e-9)
    greedy = plan_piper(problem).objective_s
    assert best * (1 - 1e-9) <= greedy <= best * 1.25


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_shared_weights_are_held_and_reduced_once_a_stage_as_in_exhaustive_search(seed: int, branch: bool) -> None:
    """Three layers share one weight, with tensor degree 2 only two of them, as T5's embeddings and head may."""
    problem = random_input(seed, branch=branch)
    ties = (Tie(1, ("a", "b", "d"), 1e7, 2e7), Tie(2, ("a", "d"), 5e6, 1e7))
    heavy = tuple(
        {
            degree: tuple(
                replace(each, weight_bytes=each.weight_bytes + tied, memory_bytes=each.memory_bytes + 2 * tied)
                for each in options
            )
            for degree, options in own.items()
            for tied in (0.0 if name == "c" else 1e7 / degree,)
        }
        for name, own in zip(problem.names, problem.implementations, strict=True)
    )
    problem = replace(problem, implementations=heavy, memory_bytes=6.5e7, ties=ties)
    best = best_of_all(problem)
    found = plan_piper(problem, knapsack="exact")
    assert found.objective_s == pytest.approx(best, rel=1e-9)
    assert found.held_bytes <= problem.memory_bytes
    assert found.objective_s <= plan_piper(replace(problem, ties=()), knapsack="exact").objective_s * (1 + 1e-9)
    assert best * (1 - 1e-9) <= plan_piper(problem).objective_s <= best * 1.25


@pytest.mark.parametrize("seed", range(6))
def test_it_is_so_where_layers_lack_a_degree_and_where_the_quickest_degree_has_no_room(seed: int) -> None:
    """Such plans were refused: slower than four times what all layers take in their quickest degree."""
    problem = random_input(seed, branch=False)
    lacking = replace(
        problem,
        implementations=tuple(
            {degree: each for degree, each in own.items() if degree == 1 or number % 2}
            for number, own in enumerate(problem.implementations)
        ),
    )
    quick = replace(
        problem,
        num_devices=1,
        memory_bytes=1e9,
        implementations=tuple(
            {1: own[1], 2: tuple(replace(each, time_s=each.time_s / 1000) for each in own[2])}
            for own in problem.implementations
        ),
    )
    for each in (lacking, quick):
        found = plan_piper(each, knapsack="exact").objective_s
        assert found == pytest.approx(best_of_all(each), rel=1e-9) and np.isfinite(found)


@pytest.mark.parametrize("seed", range(60))
def test_equal_layers_taken_together_cost_what_they_cost_one_by_one(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_kinds, width, count = random.integers(1, 4), random.integers(1, 4), random.integers(1, 12)
    kinds = random.integers(0, num_kinds, count)
    times, per_microbatch, fixed = (random.uniform(0.5, 4.0, (num_kinds, width))[kinds] for _ in range(3))
    counts = random.integers(1, width + 1, num_kinds)[kinds]
    examples = np.array([np.flatnonzero(kinds == kind)[0] for kind in np.unique(kinds)])
    numbers = np.array([(kinds == kind).sum() for kind in np.unique(kinds)])
    for in_flight in (1, 3):
        for memory in np.linspace(0.5, 4.5, 9) * count * (1 + in_flight):
            rest = (times, per_microbatch, fixed, counts, in_flight, memory)
            expected, held = choose_implementations(np.arange(count), np.ones(count, dtype=np.int64), *rest)
            seconds, together = choose_implementations(examples, numbers, *rest)
            assert seconds == pytest.approx(expected, rel=1e-12)
            if np.isfinite(expected):
                assert (together == [held[kinds == kind].sum(axis=0) for kind in np.unique(kinds)]).all()
                assert expected == pytest.approx((held * times).sum(), rel=1e-12)
                needed = per_microbatch * in_flight + fixed
                assert (held * needed).sum() <= memory * (1 + 1e-12)


def test_a_diamond_has_six_down_sets_and_what_cannot_be_is_refused() -> None:
    problem = random_input(0, branch=True)
    assert len(problem.ideals()) == 6
    with pytest.raises(ValueError, match="finds no plan within"):
        plan_piper(replace(problem, memory_bytes=1.0))
    with pytest.raises(ValueError, match="cycle"):
        replace(problem, edges=(*problem.edges, Edge("d", "a", 1.0))).ideals()
    with pytest.raises(ValueError, match="not an input of Piper"):
        piper_input({"nodes": []}, "file")
    bare = {"maxDevices": 2, "maxMemoryPerDevice": 1.0, "bandwidth": 1.0, "mbsInBatch": 4}
    for ends in (("a", "b"), ("b", "a")):
        edge = dict(zip(("sourceId", "destId"), ends, strict=True), communicationCost=1.0)
        with pytest.raises(ValueError, match=f"two nodes of the file, got {ends[0]} to {ends[1]}"):
            piper_input({**bare, "nodes": [{"id": "a", "TMPCs": {}}], "edges": [edge]}, "file")
    with pytest.raises(ValueError, match="knapsack must be one of"):
        plan_piper(problem, knapsack="best")


def test_a_stated_layer_takes_its_passes_and_runs_forward_once_more_where_it_is_recomputed() -> None:
    """All layers together take what one microbatch computes in a simulation of one GPU."""
    problem = tiny_problem(1, 4)
    layers = [options[1] for options in Piper().input(problem, 4).problem.implementations]
    vanilla, recomputed = (sum(each[kind].time_s for each in layers) for kind in (0, 1))
    parts = simulate(uniform_plan(problem, microbatch=4), problem).breakdown().iloc[0]
    assert vanilla == pytest.approx(parts["forward_s"] + parts["backward_s"] + parts["launch_bound_s"], rel=0.05)
    assert recomputed - vanilla == pytest.approx(parts["forward_s"], rel=0.05)


def test_the_objective_of_one_stage_is_its_layers_and_those_that_run_again_twice_forward() -> None:
    """On one GPU, for two microbatches: no transfers and no sums."""
    problem = tiny_problem(1, 4)
    layers = [options[1] for options in Piper().input(problem, 2).problem.implementations]
    plan = uniform_plan(problem, microbatch=2)
    whole = replace(plan, stages=(replace(plan.stages[0], recompute=plan.stages[0].operators),))
    for kind, chosen in enumerate((plan, whole)):
        expected = 2 * sum(each[kind].time_s for each in layers)
        assert Piper().paper_objective(chosen, problem).objective == pytest.approx(expected, rel=1e-12)


def test_an_edge_has_the_tensors_that_its_reader_reads() -> None:
    """T5's decoder embedding hands on the encoder's output too, 512 x 1,024 half floats each; layers read either."""
    problem = ProblemSpec(model="t5-large-32", cluster="local-cpu:1x2", runtime="megatron-lm-2021", global_batch=2)
    stated = Piper().input(problem.load(), 1).problem
    mib = {(edge.source, edge.target): edge.num_bytes / 2**20 for edge in stated.edges}
    both = next(source for source, target in mib if source.endswith("decoder_embedding"))
    first, second = stated.names[stated.names.index(both) + 1 :][:2]
    assert mib[both, first] == 2.0
    assert mib[both, second] == mib[first, second] == 1.0
    again = stated.implementations[stated.names.index(second)][1][1]
    assert again.memory_per_microbatch_bytes == 2 * 2**20  # what the layer reads, and nothing else, is kept


def test_the_searcher_offers_tensor_degrees_and_recomputation_and_replicas_take_turns() -> None:
    found = Piper(microbatch=1).search(tiny_problem(4, 8))
    assert found.best.num_microbatches == 8
    assert sum(len(stage.devices) for stage in found.best.stages) <= 4
    tight = tiny_problem(2, 8, 3_000_000_000)
    again = Piper(microbatch=1).search(tight)
    assert again.plans[0].objective >= Piper(microbatch=1).search(tiny_problem(2, 8)).plans[0].objective


@pytest.mark.parametrize("knapsack", ["greedy", "exact"])
@pytest.mark.parametrize("seed", range(6))
def test_a_plan_holds_what_it_just_fits_in(seed: int, knapsack: str) -> None:
    problem = random_input(seed, branch=seed % 2 == 1)
    try:
        found = plan_piper(problem, knapsack=knapsack)
    except ValueError:
        return
    assert found.held_bytes <= problem.memory_bytes
    again = plan_piper(replace(problem, memory_bytes=found.held_bytes * (1 + 1e-9)), knapsack=knapsack)
    assert again.objective_s == pytest.approx(found.objective_s)


@pytest.mark.parametrize(
    ("model", "overrides", "runtime", "batch", "budgets"),
    [
        ("vit-large", {"layers": 4}, "dapple-tensorflow", 12, (269607210, 318962886, 575712000)),
        ("xlnet-large", {"layers": 2}, "megatron-deepspeed", 8, (421680600, 441112762)),
    ],
)
def test_more_memory_never_loses_every_plan(
    model: str, overrides: dict[str, int], runtime: str, batch: int, budgets: tuple[int, ...]
) -> None:
    """Its one plan fills the memory by its own account: where it did not fit, those that need less were not tried."""
    problem = ProblemSpec(model, "titan-rtx-pcie:1x4", runtime, batch).load()
    attention = problem.runtime.attention
    problem = replace(problem, workload=build_workload(model, attention=attention, overrides=overrides))
    limits = [budget + problem.runtime.outside_allocator_bytes for budget in budgets]
    found = [Piper().search(replace(problem, memory_limit_bytes=limit)).plans[0].objective for limit in limits]
    assert found == sorted(found, reverse=True)


def test_one_microbatch_in_flight_holds_the_same_recomputed_or_not() -> None:
    """As in Piper's own inputs, to 0.2 %: what enters a layer is kept, so it is not brought back besides."""
    published = load_piper_input(f"{data_folder('piper')}/bert32a100.json")
    for problem, apart in ((published, 2e-3), (Piper().input(tiny_problem(2, 4), 2).problem, 1e-12)):
        for implementations in problem.implementations:
            for vanilla, recomputed in implementations.values():
                held = [each.memory_per_microbatch_bytes + each.memory_bytes for each in (vanilla, recomputed)]
                assert held[0] == pytest.approx(held[1], rel=apart)


def test_the_embedding_that_t5s_decoder_and_head_share_is_held_once_a_stage() -> None:
    """The second of two stages holds it for two layers: counted for each, no plan fitted."""
    problem = ProblemSpec("t5-large-32", "v100-1gpu-25g:2x1", "megatron-lm-2021", 2).load()
    problem = replace(problem, memory_limit_bytes=problem.runtime.outside_allocator_bytes + 5_500_000_000)
    assert len(Piper().search(problem).best.stages) == 2
    stated = Piper().input(problem, 1).problem
    (embedding,) = (tie for tie in stated.ties if len(tie.layers) == 3)
    elements = next(np.prod(each.shape) for each in problem.workload.parameters(0) if each.tie is not None)
    assert embedding.memory_bytes == elements * problem.runtime.state_bytes_per_parameter
    assert embedding.weight_bytes == elements * problem.runtime.gradient_accumulation_bytes
    assert stated.tied_weight_bytes(embedding.layers[1:], 1) == embedding.weight_bytes
    by_use = replace(problem, runtime=replace(problem.runtime, reduces_ties_by_use=True))
    assert all(tie.weight_bytes == 0.0 for tie in Piper().input(by_use, 1).problem.ties)



@pytest.mark.parametrize("batch", [1, 2])
def test_more_memory_never_costs_a_problem_of_fewer_microbatches_than_devices(batch: int) -> None:
    """Where nothing fits it falls back on a stage for each device, more than it plans for so few microbatches."""
    problem = ProblemSpec("bert-large", "v100-1gpu-25g:4x1", "megatron-lm-2021", batch).load()
    workload = build_workload("bert-large", attention=problem.runtime.attention, overrides={"layers": 4})
    base = problem.runtime.outside_allocator_bytes
    found = [
        Piper(microbatch=1).search(replace(problem, workload=workload, spec=None, memory_limit_bytes=base + limit))
        for limit in range(1_000_000_000, 3_000_000_000, 250_000_000)
    ]
    assert len(found[0].best.stages) == 4 > batch
    objectives = [each.plans[0].objective for each in found]
    assert objectives == sorted(objectives, reverse=True)
