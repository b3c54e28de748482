"""Devices stand still around collectives between operators (``Runtime.handover_s``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from experiments.calibrate.inferred_parts import corrected, parts_of
from hardware_models.calibration.fit_handover import remainders
from hardware_models.runtime_files import load_runtime
from simulator.closed_forms.estimate import estimate
from simulator.costs import CostTables
from simulator.fast.estimate import FastEstimator
from simulator.fidelity import Fidelity
from simulator.lowering.lower import stage_views
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.simulate import simulate_time_s
from simulator.uniform import uniform_plan
from tests.hardware_models.data_folder import data_folder
from tests.simulator.problems import small_problem
from workloads.registry import build_workload

HANDOVER_S = 1e-3
"""Longer than any operator of the small GPT takes."""
NO_HOST = Fidelity().without("host", "overlap-slowdown")
LAYERS, PER_LAYER = 4, 4
"""Layers of the small GPT; reductions of a layer: two forward and two backward."""
EMBEDDING, HEAD = 1, 3 + 1
"""All-reduces of the vocabulary: of look-ups; of the loss (maximum, sum, own logit), of the head's input gradient."""


def problem_with(handover_s: float, runtime: str = "megatron-lm-2021", layers: int = LAYERS, **changes: Any) -> Problem:
    problem = small_problem("gpt", runtime=runtime, cluster="a100-80g-dgx:1x8")
    workload = build_workload("gpt3-350m", overrides={"layers": layers})
    return replace(problem, workload=workload, runtime=replace(problem.runtime, handover_s=handover_s, **changes))


def seconds(plan: Plan, problem: Problem, fidelity: Fidelity = NO_HOST) -> float:
    return simulate_time_s(plan, problem, fidelity=fidelity)


@pytest.mark.parametrize("microbatch", [2, 8])
def test_each_collective_of_the_operators_counts_once_a_microbatch(microbatch: int) -> None:
    problem = problem_with(HANDOVER_S)
    plan = uniform_plan(problem, tp=4, dp=2, microbatch=microbatch // 2)
    added_s = seconds(plan, problem) - seconds(plan, problem_with(0.0))
    collectives = LAYERS * PER_LAYER + EMBEDDING + HEAD
    assert added_s == pytest.approx(plan.num_microbatches * collectives * HANDOVER_S, rel=1e-9)


def test_what_is_computed_again_hands_over_again() -> None:
    """Of a layer that is computed again whole, both forward reductions: the second is of what enters the next layer."""
    problem = problem_with(HANDOVER_S)
    plain, again = (uniform_plan(problem, tp=8, microbatch=2, recompute=recompute) for recompute in ("none", "full"))
    added_s = [seconds(plan, problem) - seconds(plan, problem_with(0.0)) for plan in (plain, again)]
    assert added_s[1] - added_s[0] == pytest.approx(again.num_microbatches * LAYERS * 2 * HANDOVER_S, rel=1e-9)


@pytest.mark.parametrize(("runtime", "in_full"), [("megatron-lm-2021", 6), ("megatron-lm-2023", 2)])
def test_a_gather_waits_no_longer_than_the_operator_takes_whose_result_travels(runtime: str, in_full: int) -> None:
    """Under sequence parallelism a norm's is gathered, and the gradient of an addition: ranks have met just before.

    Reductions follow products, and what linear layers gather again backward was made long ago: these wait in full, but
    for two of either that travel beside gradients, where the runtime lets them.
    """
    added_s = []
    for layers in (4, 6):
        problem, without = (problem_with(handover_s, runtime, layers) for handover_s in (HANDOVER_S, 0.0))
        plan = uniform_plan(problem, tp=8, microbatch=4, sequence_parallel=True)
        added_s.append((seconds(plan, problem) - seconds(plan, without)) / plan.num_microbatches)
    (view,) = stage_views(plan.canonical(problem.workload), CostTables(problem))
    costs = {problem.workload.operators[index].role: view.cost(index) for index in view.operators}
    gathered = [costs[role].forward for role in ("norm_1", "norm_2")]
    gathered += [costs[role].backward_input for role in ("post_mlp_dropout", "post_attention_dropout")]
    assert max(part.device_s for part in gathered) < HANDOVER_S / 10
    layer_s = sum(part.device_s for part in gathered) + in_full * HANDOVER_S
    assert added_s[1] - added_s[0] == pytest.approx(2 * layer_s, rel=1e-6)


def test_gradients_of_replicas_and_single_gpus_hand_nothing_over() -> None:
    problem = problem_with(HANDOVER_S)
    for degrees in (dict(dp=8), dict(dp=8, zero=3), dict(dp=4, pp=2)):
        plan = uniform_plan(problem, **degrees)  # type: ignore[arg-type]
        assert seconds(plan, problem) == pytest.approx(seconds(plan, problem_with(0.0)), rel=1e-12)


def test_the_effect_can_be_switched_off() -> None:
    problem = problem_with(HANDOVER_S)
    plan = uniform_plan(problem, tp=8, microbatch=2)
    off = seconds(plan, problem, NO_HOST.without("handover"))
    assert off == pytest.approx(seconds(plan, problem_with(0.0)), rel=1e-12)


@pytest.mark.parametrize("runtime", ["megatron-lm-2021", "megatron-lm-2023", "megatron-deepspeed-timed"])
def test_closed_forms_have_it(runtime: str) -> None:
    """The reductions that megatron-lm-2023 hides behind weight gradients count in full in closed forms."""
    problem = problem_with(HANDOVER_S, runtime, overlaps_input_reductions=False)
    without = problem_with(0.0, runtime, overlaps_input_reductions=False)
    plan = uniform_plan(problem, tp=8, microbatch=2, recompute="full")
    simulated_s = seconds(plan, problem, Fidelity()) - seconds(plan, without, Fidelity())
    estimated_s = estimate(plan, problem).iteration_time_s - estimate(plan, without).iteration_time_s
    assert estimated_s == pytest.approx(simulated_s, rel=0.02)
    fast_s = FastEstimator(problem).estimate(plan).iteration_time_s
    assert fast_s == pytest.approx(estimate(plan, problem).iteration_time_s, rel=1e-11)


@pytest.mark.parametrize(("host_s", "is_hidden"), [(1e-6, False), (1.0, True)])
def test_a_host_that_never_runs_ahead_hides_it_behind_what_it_launches(host_s: float, is_hidden: bool) -> None:
    """But for collectives between layers and inside operators: the vocabulary's."""
    changes = dict(host_seconds_per_operator=(host_s, host_s), host_seconds_per_kernel=0.0)
    problem, without = (
        problem_with(handover_s, "megatron-deepspeed-timed", **changes) for handover_s in (HANDOVER_S, 0.0)
    )
    plan = uniform_plan(problem, tp=8, microbatch=2)
    added_s = seconds(plan, problem, Fidelity()) - seconds(plan, without, Fidelity())
    hidden = LAYERS * PER_LAYER + 1 if is_hidden else 0
    collectives = LAYERS * PER_LAYER + EMBEDDING + HEAD - hidden
    assert added_s == pytest.approx(plan.num_microbatches * collectives * HANDOVER_S, rel=1e-6)


@pytest.mark.parametrize("degrees", [dict(tp=8), dict(tp=4, dp=2)])
def test_the_order_of_unlike_nodes_does_not_matter(degrees: dict[str, int]) -> None:
    """The type on which a host that never runs ahead hides least rules."""
    parts = ("v100-32g-dgx1:1x4", "a100-80g-dgx:1x4")
    added = []
    for cluster in ("+".join(parts), "+".join(reversed(parts))):
        problem = small_problem("gpt", runtime="megatron-deepspeed-timed", cluster=cluster)
        without = replace(problem, runtime=replace(problem.runtime, handover_s=0.0))
        plan = uniform_plan(problem, microbatch=2, **degrees)
        added.append(seconds(plan, problem, Fidelity()) - seconds(plan, without, Fidelity()))
        fast_s = FastEstimator(problem).estimate(plan).iteration_time_s
        assert fast_s == pytest.approx(estimate(plan, problem).iteration_time_s, rel=1e-11)
    assert added[0] == pytest.approx(added[1], rel=1e-9) and added[0] > 0


def test_kernels_of_a_profile_wait_as_those_of_the_model() -> None:
    problem, without = (problem_with(handover_s, "megatron-deepspeed-timed") for handover_s in (HANDOVER_S, 0.0))
    plan = uniform_plan(problem, tp=8, microbatch=2)
    ahead = replace(without, runtime=replace(without.runtime, host_runs_ahead=True))
    profiled = corrected(ahead, plan, "x", dict.fromkeys(parts_of(ahead, plan, "x"), 1.0), "x").hardware
    assert profiled.operator_profile is not None and profiled.operator_profile.kernels_only
    model_s, profile_s = (
        seconds(plan, one, Fidelity()) - seconds(plan, other, Fidelity())
        for one, other in (
            (problem, without),
            (replace(problem, hardware=profiled), replace(without, hardware=profiled)),
        )
    )
    assert profile_s == pytest.approx(model_s, rel=1e-9)


@pytest.mark.parametrize(("microbatch", "tp"), [(2, 8), (4, 8), (2, 1)])
def test_operators_measured_apart_have_waited_and_so_have_those_that_grow_from_them(microbatch: int, tp: int) -> None:
    """From other numbers of samples and other degrees. Collectives between layers and inside operators are left."""
    problem, without = (problem_with(handover_s, "megatron-deepspeed-timed") for handover_s in (HANDOVER_S, 0.0))
    measured = uniform_plan(without, tp=tp, dp=8 // tp, microbatch=microbatch)
    profiled = corrected(without, measured, "x", dict.fromkeys(parts_of(without, measured, "x"), 1.0), "x").hardware
    assert profiled.operator_profile is not None and not profiled.operator_profile.kernels_only
    plan = uniform_plan(problem, tp=8, microbatch=2)
    added_s = seconds(plan, replace(problem, hardware=profiled), Fidelity()) - seconds(
        plan, replace(without, hardware=profiled), Fidelity()
    )
    assert added_s == pytest.approx(plan.num_microbatches * (EMBEDDING + HEAD - 1) * HANDOVER_S, rel=1e-6)


def test_runtimes_have_what_the_fit_makes_of_published_operators() -> None:
    found = sorted(each.seconds for each in remainders(data_folder("aceso_v100")) if each.is_fitted)
    assert len(found) == 32
    median_s = (found[15] + found[16]) / 2
    assert load_runtime("megatron-lm-2021").handover_s == pytest.approx(median_s, rel=0.01)
    assert load_runtime("alpa").handover_s == 0.0
