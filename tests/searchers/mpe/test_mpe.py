"""The paper's counts, from counters that are incremented where the work is done; exactness; the printed path."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from searchers.alpa import simulator_oracle
from searchers.alpa.intra_op import IntraOpOptions
from searchers.alpa.meshes import LogicalMesh, all_logical_meshes
from searchers.alpa.oracle import NOT_LEGAL, CostModelOracle, SearchCost, StageCost
from searchers.alpa.simulator_oracle import NoisyOracle, SimulatorOracle
from searchers.mpe.estimator import StageEstimator
from searchers.mpe.holistic import shortest_path
from searchers.mpe.searcher import Mpe
from simulator.costs import cost_tables
from simulator.plan import Plan
from simulator.problem import Problem, ProblemSpec
from simulator.result import SimulationResult
from simulator.simulate import simulate
from tests.searchers.tiny import tiny_problem


def gpt2(cluster: str = "rtx3090-pcie:1x8") -> Problem:
    """Return GPT-2 1.5B: 48 blocks, embedding and head, 50 layers."""
    return ProblemSpec(model="gpt2-1.5b", cluster=cluster, runtime="alpa", global_batch=64).load()


def oracle_of(problem: Problem, microbatch: int = 8) -> CostModelOracle:
    spans = problem.workload.layers
    return CostModelOracle(
        cost_tables(problem), spans, microbatch, problem.global_batch // microbatch, IntraOpOptions()
    )


def measure_all(oracle: CostModelOracle) -> SearchCost:
    """Ask for every stage on every mesh, as Alpa does."""
    count = len(oracle.spans)
    for mesh in all_logical_meshes(oracle.costs.problem.hardware.cluster):
        for first in range(count):
            for last in range(first, count):
                oracle.measure(mesh, first, last)
    return oracle.cost


def measure_estimates(oracle: CostModelOracle, reuse: str, edges: bool = True) -> SearchCost:
    """Ask the estimator for the whole model on every mesh."""
    estimator = StageEstimator(oracle, oracle.costs, reuse, edges)  # type: ignore[arg-type]
    for mesh in all_logical_meshes(oracle.costs.problem.hardware.cluster):
        estimator.lookup(mesh, 0, len(oracle.spans) - 1)
    return oracle.cost


def test_the_counts_of_the_paper() -> None:
    alpa = measure_all(oracle_of(gpt2()))
    assert (alpa.compilations, alpa.profiles) == (17_850, 35_700)
    mpe = measure_estimates(oracle_of(gpt2()), "none")
    assert (mpe.compilations, mpe.profiles) == (1_386, 2_772)
    unique = measure_estimates(oracle_of(gpt2()), "unique")
    assert (unique.compilations, unique.profiles) == (84, 168)
    # Weighted by layers, a stage costs what it holds: 22,100 against 148 layers a mesh.
    assert alpa.compiled_layers / mpe.compiled_layers == pytest.approx(22_100 / 148)


def test_counts_of_another_depth_and_cluster() -> None:
    problem = tiny_problem(4, 8)  # four layers; meshes of 1, 2, 4 GPUs: 2 + 3 + 4
    assert measure_all(oracle_of(problem)).compilations == 4 * 5 // 2 * 9
    assert measure_estimates(oracle_of(problem), "none").compilations == 7 * 9
    assert measure_estimates(oracle_of(problem), "none", edges=False).compilations == 4 * 9


def test_asking_again_costs_nothing() -> None:
    oracle = oracle_of(tiny_problem(2, 8))
    first = measure_all(oracle).compilations
    assert measure_all(oracle).compilations == first


def test_on_additive_costs_the_estimate_is_exact_and_the_naive_one_is_not() -> None:
    problem = gpt2()
    oracle = oracle_of(problem)
    estimator = StageEstimator(oracle, oracle.costs)
    naive = StageEstimator(oracle, oracle.costs, edges=False)
    worst, waits = 0.0, list[float]()
    for mesh in all_logical_meshes(problem.hardware.cluster):
        if mesh.num_devices in (2, 8) and oracle.solver(mesh).legal:
            for first, last in [(0, 1), (0, 49), (10, 20), (30, 49), (48, 49)]:
                exact, found = oracle.answer(mesh, first, last), estimator.lookup(mesh, first, last)
                if (first, last) == (0, 49):
                    # The head has the embedding's weight: layers alone count it twice, and its gradient waits for none.
                    assert 1 <= found.state_bytes / exact.state_bytes < 1.06
                    found = found._replace(state_bytes=exact.state_bytes, step_bytes=exact.step_bytes)
                    waits.append(exact.working_bytes - found.working_bytes)  # none where the two lie otherwise
                    found = found._replace(working_bytes=exact.working_bytes)
                assert tuple(found) == pytest.approx(tuple(exact), rel=1e-6)
                worst = max(worst, abs(naive.lookup(mesh, first, last).peak_bytes() / exact.peak_bytes() - 1))
    embedding = problem.workload.operators[0].attributes
    whole = int(embedding["vocab"]) * int(embedding["hidden"]) * problem.runtime.tied_gradient_bytes
    assert min(waits) >= 0.0 and max(waits) <= whole
    assert worst > 0.1  # layers alone: each brings its own working memory


@pytest.mark.parametrize(("model", "off"), [("bert-large", (0.0, 1e-9)), ("wide-resnet-500m", (0.02, 0.03))])
def test_it_is_exact_where_layers_choose_by_their_neighbours_and_near_where_choices_reach_further(
    model: str, off: tuple[float, float]
) -> None:
    spec = ProblemSpec(model=model, cluster="v100-32g-dgx1:1x4", runtime="dapple-tensorflow", global_batch=16)
    problem, searcher = spec.load(), Mpe()
    spans = searcher.layers(problem)
    oracle = CostModelOracle(cost_tables(problem), spans, 4, 4, IntraOpOptions())
    estimator = StageEstimator(oracle, oracle.costs, "none")
    last, errors = len(spans) - 1, []
    for mesh in itertools.chain.from_iterable(searcher.meshes(problem)):
        for first in range(last - 1):
            for stop in (first + 2, last):
                exact, found = oracle.measure(mesh, first, stop), estimator.lookup(mesh, first, stop)
                errors += [abs(found.seconds / exact.seconds - 1)] if np.isfinite(exact.seconds) else []
    assert off[0] <= max(errors) <= off[1]


class _PairRefused(CostModelOracle):
    """Two neighbours that are legal alone and not together."""

    def measure(self, mesh: LogicalMesh, first: int, last: int) -> StageCost:
        return NOT_LEGAL if (first, last) == (0, 1) else super().measure(mesh, first, last)


def test_no_stage_is_free_because_two_neighbours_are_not_legal_together() -> None:
    """Sums over what is infinite are no numbers further on; what is below nothing is nothing."""
    costs = cost_tables(tiny_problem(2, 8))
    oracle = _PairRefused(costs, costs.problem.workload.layers, 2, 4, IntraOpOptions())
    estimator = StageEstimator(oracle, costs, "none")
    for mesh in all_logical_meshes(costs.problem.hardware.cluster):
        assert estimator.lookup(mesh, 2, 3) == NOT_LEGAL


def test_the_simulator_as_oracle_counts_hosts_and_peaks() -> None:
    problem = tiny_problem(2, 8)
    model = oracle_of(problem)
    simulated = SimulatorOracle(model)
    for mesh in all_logical_meshes(problem.hardware.cluster):
        exact, found = model.answer(mesh, 0, 3), simulated.answer(mesh, 0, 3)
        assert found.seconds == pytest.approx(exact.seconds, rel=0.15)
        assert found.peak_bytes() == pytest.approx(exact.peak_bytes(), rel=0.25)


def test_noise_shrinks_with_repeats_and_is_the_same_for_the_same_question() -> None:
    problem = tiny_problem(2, 8)
    exact = oracle_of(problem)
    mesh = all_logical_meshes(problem.hardware.cluster)[0]
    once = [NoisyOracle(exact, 0.1, 1, seed=seed) for seed in range(200)]
    often = [replace(noisy, repeats=100) for noisy in once]
    true = exact.answer(mesh, 0, 1).seconds
    spread_once = np.std([noisy.answer(mesh, 0, 1).seconds / true for noisy in once])
    spread_often = np.std([noisy.answer(mesh, 0, 1).seconds / true for noisy in often])
    assert spread_once == pytest.approx(0.1, rel=0.25)
    assert spread_often == pytest.approx(0.01, rel=0.25)
    assert once[0].answer(mesh, 0, 1) == once[0].answer(mesh, 0, 1)
    crowded = [NoisyOracle(exact, 0.0, contention=0.1, seed=seed).answer(mesh, 0, 1).seconds for seed in range(200)]
    assert min(crowded) >= true and np.mean(crowded) == pytest.approx(1.1 * true, rel=0.03)


def brute_force(allowed: np.ndarray, sizes: list[int], devices: int) -> float:
    """Return the least sum of latencies over all paths on at most ``devices`` devices."""
    layers = len(allowed)
    best = np.inf
    for cuts in itertools.product([False, True], repeat=layers - 1):
        ends = [i for i, cut in enumerate(cuts) if cut] + [layers - 1]
        starts = [0, *(end + 1 for end in ends[:-1])]
        for meshes in itertools.product(range(len(sizes)), repeat=len(ends)):
            if sum(sizes[mesh] for mesh in meshes) <= devices:
                total = sum(
                    allowed[first, last, mesh].min() for first, last, mesh in zip(starts, ends, meshes, strict=True)
                )
                best = min(best, total)
    return best


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 6))
def test_the_printed_path_is_the_least_sum(seed: int, layers: int, devices: int) -> None:
    random = np.random.default_rng(seed)
    sizes = [1, 2, 4]
    seconds = random.uniform(0.1, 1.0, (layers, layers, 3, 2))
    fits = random.uniform(size=seconds.shape) < 0.7
    best = brute_force(np.where(fits, seconds, np.inf), sizes, devices)
    found = shortest_path(seconds, fits, np.array(sizes), devices)
    assert (found is None) == (not np.isfinite(best))
    if found is not None:
        assert found.objective == pytest.approx(best, rel=1e-12)
        assert sum(sizes[stage.submesh] for stage in found.stages) <= devices


def test_equal_stages_are_simulated_once_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(tiny_problem(2, 8))  # a problem of its own, so that nothing is known of it
    simulated: list[int] = []

    def counted(plan: Plan, *args: object, **options: object) -> SimulationResult:
        simulated.append(plan.stages[0].num_operators())
        return simulate(plan, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(simulator_oracle, "simulate", counted)
    first = SimulatorOracle(oracle_of(problem))
    meshes = [mesh for mesh in all_logical_meshes(problem.hardware.cluster) if first.model.solver(mesh).legal]
    count = len(first.spans)
    every = [(mesh, i, j) for mesh in meshes for i in range(count) for j in range(i, count)]
    answers = [first.answer(*stage) for stage in every]
    runs = len(simulated)
    # Fewer than stages: the two blocks are alike, and some meshes are cut alike.
    assert 0 < runs < len(simulator_oracle.STEADY) * len(every)
    second = SimulatorOracle(oracle_of(problem))
    assert [second.answer(*stage) for stage in every] == answers
    assert len(simulated) == runs
    other = SimulatorOracle(oracle_of(problem, microbatch=4))
    other.answer(*every[0])
    assert len(simulated) > runs
