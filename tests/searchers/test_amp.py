"""AMP's cuts equal brute force; its formula follows the plan; mixed clusters are searched and simulated."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from searchers.amp import Amp, crossing_s, formula_s, layer_costs
from searchers.amp_cuts import best_cuts
from searchers.base import NoFeasiblePlan
from searchers.budget import Budget
from searchers.layers import blocks
from simulator.costs import cost_tables
from simulator.plan import Axis
from simulator.problem import ProblemSpec
from simulator.simulate import simulate, simulate_time_s
from simulator.uniform import recompute_segments, uniform_plan
from simulator.validate import validate
from tests.searchers.tiny import tiny_problem


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 4), st.integers(1, 30), st.sampled_from([1.0, 1e-3]))
def test_cuts_equal_brute_force(seed: int, layers: int, stages: int, microbatches: int, unit_s: float) -> None:
    stages = min(stages, layers)
    random = np.random.default_rng(seed)
    seconds = random.uniform(0.1, 1.0, layers) * unit_s
    crossing = random.uniform(0.0, 2.0, (stages - 1, layers)) * unit_s

    def value(cuts: list[tuple[int, int]]) -> float:
        longest = max(seconds[first:stop].sum() for first, stop in cuts)
        sent = sum(crossing[number, stop - 1] for number, (_, stop) in enumerate(cuts[:-1]))
        return float(sent + (microbatches - 1) * longest)

    best = np.inf
    for inner in itertools.combinations(range(1, layers), stages - 1):
        ends = [0, *inner, layers]
        best = min(best, value(list(itertools.pairwise(ends))))
    found = best_cuts(seconds, crossing, microbatches)
    assert [first for first, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert value(found) == pytest.approx(best, rel=1e-9)


def test_the_formula_on_one_device_is_microbatches_times_layers_and_one_transfer_less_than_two_stages() -> None:
    problem = tiny_problem(1, 4)
    spans = blocks(problem.workload)
    for recompute in ("none", "full"):
        plan = Amp().plan(problem, 1, 1, 1, 2, recompute)
        again = recompute_segments(problem.workload, 0, len(problem.workload), recompute)
        seconds, _ = layer_costs(problem, spans, (), 2, again)
        assert formula_s(plan, problem) == pytest.approx(2 * seconds.sum(), rel=1e-12)
    two = tiny_problem(2, 4)
    plan = Amp().plan(two, 1, 1, 2, 2, "none")
    seconds, leaving = layer_costs(two, spans, (), 2)
    sent = crossing_s(two, leaving[0], (0,), (1,), 1)
    assert formula_s(plan, two) == pytest.approx(seconds.sum() + max(seconds) + sent, rel=1e-12)


@pytest.mark.parametrize(("tp", "dp", "pp"), [(1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)])
def test_a_plan_runs_the_whole_batch_at_any_degrees(tp: int, dp: int, pp: int) -> None:
    problem = tiny_problem(4, 8)
    plan = Amp().plan(problem, tp, dp, pp, 2, "none")
    assert (plan.microbatch_size, plan.num_microbatches) == (2 * dp, 4 // dp)
    assert validate(plan, problem).global_batch == 8


def test_the_head_runs_forward_once_where_layers_run_twice() -> None:
    """Of 24 layers (12 h^2 products and 4 s h of attention a token) and a head of h v, the layers alone."""
    problem = ProblemSpec(model="gpt3-350m", cluster="v100-32g-dgx1:1x1", runtime="alpa", global_batch=8).load()
    hidden, tokens, vocabulary = 1024, 2048, 51200
    layers = 24 * (12 * hidden**2 + 2 * tokens * hidden)
    share = layers / (layers + hidden * vocabulary)
    none, full = (Amp().plan(problem, 1, 1, 1, 8, recompute) for recompute in ("none", "full"))
    costs = cost_tables(problem).table((), 8, problem.gpu_types[0])
    added_s = formula_s(full, problem) - formula_s(none, problem)
    assert added_s == pytest.approx(share * costs.forward_s.sum(), rel=0.08)
    found = [simulate_time_s(plan, problem, engine="compiled") for plan in (none, full)]
    assert added_s == pytest.approx(found[1] - found[0], rel=0.05)


@pytest.mark.parametrize(
    ("runtime", "num_bytes"),
    [("megatron-lm-2021", 2 * 356_837_376), ("galvatron-v1", 4 * (356_837_376 + 51_200 * 1024))],
)
def test_a_weight_that_a_stage_uses_twice_is_reduced_as_the_runtime_does_so(runtime: str, num_bytes: int) -> None:
    """A ring of two moves all 356,837,376 parameters of GPT-3 350M over 25 Gb/s, once; or the embedding by each use."""
    problem = ProblemSpec(model="gpt3-350m", cluster="v100-1gpu-25g:2x1", runtime=runtime, global_batch=8).load()
    apart = uniform_plan(problem, dp=2, microbatch=1)
    seconds, _ = layer_costs(problem, blocks(problem.workload), (), 1)
    moved_s = problem.hardware.collective("all_reduce", num_bytes, (0, 1)).alone_s
    assert formula_s(apart, problem) == pytest.approx(4 * seconds.sum() + moved_s, rel=1e-9)
    assert moved_s == pytest.approx(num_bytes * 8 / 25e9, rel=0.3)


def test_a_mixed_cluster_is_searched_and_simulated() -> None:
    problem = ProblemSpec(
        model="amp-gpt2",
        cluster="p3.8xlarge:1x4+g4dn.12xlarge:1x4",
        runtime="megatron-deepspeed",
        global_batch=16,
    ).load()
    assert len(set(problem.gpu_types)) == 2
    found = Amp(max_microbatch=1, recompute=("full",)).search(problem, Budget(evaluations=12))
    result = simulate(found.best, problem, engine="compiled")
    assert result.fits and result.iteration_time_s > 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_on_a_mixed_cluster_each_type_has_the_collectives_of_its_own_links(order: tuple[int, int]) -> None:
    parts = ("p3.8xlarge:1x4", "g4dn.12xlarge:1x4")

    def layers_s(cluster: str) -> np.ndarray:
        problem = ProblemSpec(
            model="amp-gpt2", cluster=cluster, runtime="megatron-deepspeed", global_batch=16
        ).load()
        sharding = (Axis("batch", 1), Axis("tensor", 4))
        return layer_costs(problem, blocks(problem.workload), sharding, 2)[0]

    v100s, t4s = map(layers_s, parts)
    assert t4s.sum() > 4 * v100s.sum()  # what staging each byte in host memory costs beside NVLink
    mixed = layers_s("+".join(parts[number] for number in order))
    np.testing.assert_allclose(mixed, (v100s + t4s) / 2, rtol=1e-12)


def test_a_problem_without_a_mix_of_degrees_says_what_stands_against_it() -> None:
    problem = ProblemSpec("gpt3-350m", "v100-1gpu-25g:32x1", "megatron-lm-2021", 1).load()
    with pytest.raises(NoFeasiblePlan, match="pp must be at most the 24 layers of gpt3-350m, got 32"):
        Amp().search(problem)
