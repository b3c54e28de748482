"""Elimination, the MILP and brute force agree; transfer tables agree with whole graphs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from searchers.alpa.elimination import solve
from searchers.alpa.intra_op import ATTRIBUTES, IntraOp, IntraOpOptions
from searchers.alpa.meshes import LogicalMesh, Submesh, all_logical_meshes
from searchers.alpa.milp import solve_milp
from searchers.alpa.pareto import front, solve_within
from searchers.alpa.stage_costs import StageSolver
from searchers.alpa.strategy_graph import StrategyGraph
from simulator.costs import cost_tables
from simulator.problem import Problem, ProblemSpec
from tests.searchers.tiny import tiny_problem

FORBIDDEN_SHARE = 0.1


def random_graph(seed: int, num_nodes: int, kind: str) -> StrategyGraph:
    """Return a chain with skip edges, or an encoder whose last node every decoder node reads."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 5, num_nodes)
    costs = [random.uniform(0, 1, size) for size in sizes]
    for cost in costs:
        cost[1:][random.uniform(size=len(cost) - 1) < FORBIDDEN_SHARE] = np.inf
    pairs = {(i, i + 1) for i in range(num_nodes - 1)}
    if kind == "skip":
        pairs |= {(i, i + 3) for i in range(num_nodes - 3) if random.uniform() < 0.5}
    else:
        middle = num_nodes // 2
        pairs |= {(middle, i) for i in range(middle + 1, num_nodes)}
    edges = {(u, v): random.uniform(0, 1, (sizes[u], sizes[v])) for u, v in sorted(pairs)}
    return StrategyGraph(costs, edges, [random.uniform(0, 1, (1, size)) for size in sizes])


@pytest.mark.parametrize("kind", ["skip", "encoder-decoder"])
@pytest.mark.parametrize("block", range(4))
def test_elimination_equals_the_milp_on_random_graphs(kind: str, block: int) -> None:
    for seed in range(25 * block, 25 * (block + 1)):
        graph = random_graph(seed, 6 + seed % 9, kind)
        best, assignment = solve(graph)
        assert graph.objective(assignment) == pytest.approx(best, rel=1e-9)
        reference, _ = solve_milp(graph)
        assert best == pytest.approx(reference, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6), st.sampled_from(["skip", "encoder-decoder"]))
def test_elimination_equals_brute_force(seed: int, num_nodes: int, kind: str) -> None:
    graph = random_graph(seed, num_nodes, kind)
    every = itertools.product(*(range(len(cost)) for cost in graph.costs))
    assert solve(graph)[0] == pytest.approx(min(graph.objective(choice) for choice in every), rel=1e-12)


def test_the_milp_keeps_a_limit_and_says_when_none_is_possible() -> None:
    graph = random_graph(3, 7, "skip")
    every = list(itertools.product(*(range(len(cost)) for cost in graph.costs)))
    totals = sorted(graph.total(0, choice) for choice in every)
    limit = totals[len(totals) // 4]
    best = min(graph.objective(choice) for choice in every if graph.total(0, choice) <= limit)
    assert solve_milp(graph, limit=(0, limit))[0] == pytest.approx(best, rel=1e-6)
    with pytest.raises(ValueError, match="no assignment"):
        solve_milp(graph, limit=(0, totals[0] - 0.1))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 6))
def test_what_two_choices_bring_together_counts_towards_the_limit(seed: int, num_nodes: int) -> None:
    graph = random_graph(seed, num_nodes, "skip")
    random = np.random.default_rng(seed + 1)
    ends = 0, num_nodes - 1
    table = random.uniform(-1, 0, (1, len(graph.costs[0]), len(graph.costs[-1])))
    graph = replace(graph, edges={ends: np.zeros(table.shape[1:])} | dict(graph.edges), pairs={ends: table})
    choices = itertools.product(*(range(len(cost)) for cost in graph.costs))
    every = [choice for choice in choices if np.isfinite(graph.objective(choice))]
    totals = sorted(graph.total(0, choice) for choice in every)
    limit = totals[len(totals) // 3] + 1e-9
    best = min(graph.objective(choice) for choice in every if graph.total(0, choice) <= limit)
    assert solve_milp(graph, limit=(0, limit))[0] == pytest.approx(best, rel=1e-6)
    point, bound = solve_within(graph, 0, limit)
    assert graph.total(0, point.assignment) == pytest.approx(point.attribute) and point.attribute <= limit
    assert bound <= best * (1 + 1e-9) and best <= point.objective * (1 + 1e-9)


def test_forbidden_everywhere_is_an_error() -> None:
    graph = StrategyGraph([np.array([np.inf]), np.array([1.0])], {(0, 1): np.zeros((1, 2 - 1))})
    with pytest.raises(ValueError, match="no assignment"):
        solve(graph)


def problems() -> list[tuple[Problem, LogicalMesh]]:
    """Return a GPT and a T5 (whose encoder output every decoder layer reads) on a two-axis mesh."""
    t5 = ProblemSpec(model="t5-770m", cluster="v100-32g-dgx1:1x4", runtime="alpa", global_batch=8).load()
    mesh = LogicalMesh(Submesh(1, 4), 2, 2, batch_forced=False)
    return [(tiny_problem(4, 8), mesh), (t5, mesh)]


@pytest.mark.parametrize("number", [0, 1], ids=["gpt", "t5"])
@pytest.mark.parametrize("recompute", [False, True])
def test_transfer_tables_give_the_optimum_of_every_interval(number: int, recompute: bool) -> None:
    problem, mesh = problems()[number]
    options = IntraOpOptions(recompute=recompute, free_axes=number == 0)
    intra = IntraOp(cost_tables(problem), mesh, 4, 2, options)
    spans = problem.workload.layers
    solver = StageSolver(intra, spans)
    stages = solver.all_stages()
    count = len(spans)
    chosen = [(i, j) for i in range(count) for j in range(i, count)]
    for first, last in chosen if number == 0 else [(0, 3), (20, 30), (23, 26), (26, 29), (count - 3, count - 1)]:
        best, _ = solve(intra.graph(spans[first][0], spans[last][1]))
        assert stages.objective[first, last] == pytest.approx(best, rel=1e-9)
        alone = solver.stage(first, last)
        assert alone["seconds"] == stages.seconds[first, last]
        assert alone["objective"] == stages.objective[first, last]


def test_attributes_follow_the_choices() -> None:
    problem, mesh = problems()[0]
    intra = IntraOp(cost_tables(problem), mesh, 4, 2, IntraOpOptions(recompute=False))
    spans = problem.workload.layers
    stages = StageSolver(intra, spans).all_stages()
    graph = intra.graph(0, len(problem.workload))
    best, assignment = solve(graph)
    totals = [graph.total(number, assignment) for number in range(len(ATTRIBUTES))]
    last = len(spans) - 1
    assert stages.elements[0, last] == pytest.approx(totals[ATTRIBUTES.index("elements")])
    assert stages.saved_bytes[0, last] == pytest.approx(totals[ATTRIBUTES.index("saved_bytes")])
    # Seconds of nodes and edges, and synchronisation spread over two microbatches, make up the objective.
    assert stages.seconds[0, last] + stages.sync_s[0, last] / 2 == pytest.approx(best)


def test_heavy_operators_are_never_repeated_and_a_forced_batch_lies_on_the_rows() -> None:
    problem, _ = problems()[0]
    for mesh in all_logical_meshes(problem.hardware.cluster):
        intra = IntraOp(cost_tables(problem), mesh, 4, 2, IntraOpOptions())
        for index, op in enumerate(problem.workload.operators):
            for sharding in intra.strategies(index):
                if op.kind == "linear":
                    assert all(axis.split != "replicate" for axis in sharding)
                if mesh.batch_forced and mesh.rows > 1:
                    assert sharding[0].split == "batch" and sharding[0].size % mesh.rows == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 6), st.floats(0.0, 1.0))
def test_a_limit_is_kept_and_the_bound_holds(seed: int, num_nodes: int, share: float) -> None:
    graph = random_graph(seed, num_nodes, "skip")
    every = [
        choice
        for choice in itertools.product(*(range(len(cost)) for cost in graph.costs))
        if np.isfinite(graph.objective(choice))
    ]
    totals = [graph.total(0, choice) for choice in every]
    limit = min(totals) + share * (max(totals) - min(totals))
    best = min(graph.objective(choice) for choice in every if graph.total(0, choice) <= limit)
    found, bound = solve_within(graph, 0, limit)
    assert found.attribute <= limit and found.objective == pytest.approx(graph.objective(found.assignment))
    assert bound <= best * (1 + 1e-9) and best <= found.objective * (1 + 1e-9)
    hull = front(graph, 0)
    for before, after in itertools.pairwise(hull):
        assert before.objective < after.objective and before.attribute > after.attribute
    for price in (0.0, 0.1, 1.0, 10.0):
        least = min(graph.objective(choice) + price * graph.total(0, choice) for choice in every)
        assert min(point.objective + price * point.attribute for point in hull) == pytest.approx(least)


def test_below_the_least_need_is_an_error() -> None:
    graph = random_graph(5, 5, "skip")
    with pytest.raises(ValueError, match="at least"):
        solve_within(graph, 0, -1.0)


@pytest.mark.parametrize("number", [0, 1], ids=["gpt", "t5"])
def test_followed_choices_are_those_behind_the_tables(number: int) -> None:
    """The tables say what an interval costs; the choices read back from them must cost exactly that."""
    problem, mesh = problems()[number]
    intra = IntraOp(cost_tables(problem), mesh, 4, 2, IntraOpOptions(recompute=False, free_axes=number == 0))
    spans = problem.workload.layers
    solver = StageSolver(intra, spans)
    stages = solver.all_stages()
    count = len(spans)
    every = [(i, j) for i in range(count) for j in range(i, count)]
    for first, last in every if number == 0 else [(20, 30), (20, 24), (0, 3), (25, 26), (count - 3, count - 1)]:
        start, stop = spans[first][0], spans[last][1]
        leaving = {
            index
            for begin, end in spans[first : last + 1]
            for index in range(begin, end)
            for name in problem.workload.operators[index].outputs
            if any(reader >= end for reader in problem.workload.consumers.get(name, ()))
        }
        graph = intra.graph(start, stop, leaving)
        shardings = solver.assignment(first, last)
        chosen = [intra.strategies(start + place).index(sharding) for place, sharding in enumerate(shardings)]
        assert graph.objective(chosen) == pytest.approx(stages.objective[first, last], rel=1e-9)
        for name in ("elements", "saved_bytes", "remaining_bytes"):
            expected = float(getattr(stages, name)[first, last])
            assert graph.total(ATTRIBUTES.index(name), chosen) == pytest.approx(expected, rel=1e-9)


def test_a_rank_has_the_samples_that_are_asked_for() -> None:
    problem, _ = problems()[0]
    for mesh in all_logical_meshes(problem.hardware.cluster):
        intra = IntraOp(cost_tables(problem), mesh, 8, 1, IntraOpOptions(min_samples=4, free_axes=True))
        free = IntraOp(cost_tables(problem), mesh, 8, 1, IntraOpOptions(free_axes=True))
        for index in range(len(problem.workload)):
            samples = {intra.samples(sharding) for sharding in intra.strategies(index)}
            assert samples <= {4, 8}
            wanted = [sharding for sharding in free.strategies(index) if free.samples(sharding) >= 4]
            if wanted:
                assert list(intra.strategies(index)) == wanted
