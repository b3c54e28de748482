"""What repeats is left out: the same times and peaks as the whole run, under every runtime, model and schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from hardware_models.model import HardwareModel
from hardware_models.runtime_files import load_runtime, runtime_names
from simulator.costs import CostTables
from simulator.engines.engine_compiled import run_compiled
from simulator.engines.steady_state import shortened
from simulator.fidelity import Fidelity
from simulator.plan import Axis, Plan, Stage
from simulator.problem import Problem
from simulator.run import LaterRun, Run
from simulator.schedules.one_f_one_b import warmup_p_b
from simulator.simulate import simulate, simulate_time_s
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.simulator.problems import SMALL, chain_of_opaque, chain_problem, small_problem
from workloads.graph_builder import GraphBuilder

PLANS = {
    "pp2 tp2": dict(pp=2, tp=2),
    "pp4": dict(pp=4, recompute="full"),
    "pp2 dp2 zero 1": dict(pp=2, dp=2, zero=1),
    "zero 3": dict(dp=4, zero=3),
    "one device": dict(),
    "zb-h1": dict(pp=4, schedule="zb-h1"),
    "interleaved": dict(pp=2, tp=2, schedule="interleaved", chunks=2),
}


def assert_equal_to_the_whole(plan: Plan, problem: Problem, fidelity: Fidelity | None = None) -> bool:
    """Compare both; return whether anything was left out."""
    costs = CostTables(problem)
    whole = simulate(plan, problem, fidelity=fidelity, engine="compiled", costs=costs)
    short = simulate(plan, problem, fidelity=fidelity, engine="compiled", costs=costs, leave_out_periods=True)
    assert short.iteration_time_s == pytest.approx(whole.iteration_time_s, rel=1e-9)
    timed_s = simulate_time_s(plan, problem, fidelity=fidelity, engine="compiled", costs=costs)
    assert timed_s == short.iteration_time_s
    for mine, theirs in zip(short.memory, whole.memory, strict=True):
        for name in ("peak_allocated_bytes", "peak_reserved_bytes", "fits", "peak_where", "consumers"):
            assert getattr(mine, name) == getattr(theirs, name)
        assert mine.peak_time_s == pytest.approx(theirs.peak_time_s, rel=1e-9)
    return isinstance(short.run, LaterRun)


@pytest.mark.parametrize("runtime", runtime_names())
@pytest.mark.parametrize("words", PLANS)
def test_every_runtime_repeats_itself_exactly(runtime: str, words: str) -> None:
    problem = small_problem("gpt", cluster="a100-80g-dgx:2x2", runtime=runtime, global_batch=240)
    options = PLANS[words]
    size = 60 * options.get("dp", 1)
    plan = uniform_plan(problem, microbatch=240 // size, **options)
    assert assert_equal_to_the_whole(plan, problem), "nothing was left out"


@pytest.mark.parametrize("family", sorted(SMALL))
def test_every_family_repeats_itself_exactly(family: str) -> None:
    problem = small_problem(family, cluster="v100-32g-dgx1:1x4", runtime="megatron-lm-2021", global_batch=120)
    shorter = []
    for options in (dict(pp=2, tp=2), dict(pp=4)):
        try:
            plan = uniform_plan(problem, **options)
            validate(plan, problem)
        except ValueError:
            continue
        shorter.append(assert_equal_to_the_whole(plan, problem))
    assert any(shorter)


ROWS = st.fixed_dictionaries(
    {
        "forward_s": st.sampled_from([1e-5, 1e-3, 1.7e-3, 0.0123]),
        "backward_s": st.sampled_from([1e-5, 2e-3, 3.1e-3, 0.02]),
        "output_bytes": st.sampled_from([1, 10**6, 10**8]),
    }
)


@st.composite
def pipelines(draw: st.DrawFn, alike: bool = False) -> tuple[Plan, Problem]:
    """Draw stages, unequal unless ``alike``, warm-ups, replicas, transfers of any size and runtimes."""
    num_stages = draw(st.integers(1, 4))
    equal = draw(ROWS) if alike else None
    builder = GraphBuilder(name="chain", family="opaque", tokens_per_sample=0)
    tensor = builder.input("x", (1,))
    for number in range(2 * num_stages):
        builder.layer(f"layer{number}")
        tensor = builder.add("row", "opaque", [tensor], equal or draw(ROWS))
    m = draw(st.integers(30, 90))
    degree = draw(st.sampled_from([1, 2]))
    schedule = draw(st.sampled_from(["1f1b", "1f1b", "zb-h1", "gpipe"]))
    runtime = load_runtime(draw(st.sampled_from(["megatron-lm-2021", "galvatron-v1", "megatron-deepspeed", "alpa"])))
    problem = Problem(
        workload=builder.build(),
        hardware=HardwareModel.from_name(draw(st.sampled_from(["v100-1gpu-25g:8x1", "a100-80g-dgx:2x4"]))),
        runtime=runtime,
        global_batch=degree * m,
    )
    stages = tuple(
        Stage(
            operators=((2 * stage, 2 * stage + 2),),
            devices=tuple(range(degree * stage, degree * (stage + 1))),
            shardings=((2, (Axis("batch", degree),)),),
        )
        for stage in range(num_stages)
    )
    warmup = warmup_p_b(num_stages, m) if schedule == "1f1b" and draw(st.booleans()) else None
    plan = Plan(
        stages,
        degree,
        m,
        schedule=schedule,
        warmup=warmup,
        gradient_reduction=draw(st.sampled_from(["last", "every"])),
        replica_assignment=draw(st.sampled_from(["slice", "round_robin"])) if schedule == "1f1b" else "slice",
    )
    try:
        return validate(plan, problem), problem
    except ValueError:
        reject()


def long_enough(plan: Plan) -> bool:
    """Whether the pipeline fills, does four periods and drains within three quarters of its microbatches.

    It fills and drains in three times its depth and two microbatches; a period is one, or one for each replica where
    they take turns.
    """
    if plan.schedule == "gpipe":
        return False
    depth = max((*(plan.warmup_in_force() or ()), len(plan.stages)))
    period = len(plan.stages[0].devices) if plan.replica_assignment == "round_robin" else 1
    fewest = 3 * depth + 2 + 4 * period
    fewest += (plan.num_microbatches - fewest) % period
    return 4 * fewest <= 3 * plan.num_microbatches


@settings(max_examples=80, deadline=None)
@given(drawn=pipelines(), effects=st.sets(st.sampled_from(["host", "contention", "overlap-slowdown", "merge"])))
def test_any_pipeline_takes_as_long_as_run_in_full(drawn: tuple[Plan, Problem], effects: set[str]) -> None:
    plan, problem = drawn
    left_out = assert_equal_to_the_whole(plan, problem, Fidelity().without(*effects))
    if not long_enough(plan):
        assert not left_out
    elif len(plan.stages) == 1:  # One stage is never ahead of another: it repeats itself at once.
        assert left_out


@settings(max_examples=40, deadline=None)
@given(drawn=pipelines(alike=True))
def test_equal_stages_with_nothing_between_are_shortened_as_soon_as_they_are_long_enough(
    drawn: tuple[Plan, Problem],
) -> None:
    plan, problem = drawn
    assert assert_equal_to_the_whole(plan, problem, Fidelity.ideal()) == long_enough(plan)


def test_tasks_do_not_grow_with_the_batch() -> None:
    problem = chain_problem(chain_of_opaque(8, 1e-3, 2e-3), num_devices=4, global_batch=100)
    counts, times = [], []
    for m in (100, 1000, 10_000):
        larger = replace(problem, global_batch=m)
        plan = validate(uniform_plan(larger, pp=4), larger)
        found = shortened(plan, CostTables(larger), Fidelity.ideal(), run_compiled)
        assert found is not None
        counts.append(found.lowered.graph.num_tasks)
        times.append(found.iteration_time_s)
    assert counts[0] == counts[1] == counts[2]
    # Equal stages without anything else: (m + p - 1)(t_f + t_b).
    assert times == pytest.approx([(m + 3) * 6e-3 for m in (100, 1000, 10_000)], rel=1e-9)


def test_what_cannot_be_shortened_is_run_in_full() -> None:
    problem = small_problem("gpt", global_batch=64)
    gpipe = uniform_plan(problem, pp=4, schedule="gpipe")
    few = uniform_plan(problem, pp=4, microbatch=4)
    for plan in (gpipe, few):
        assert isinstance(simulate(plan, problem, engine="compiled", leave_out_periods=True).run, Run)


def test_the_whole_run_is_there_for_who_asks() -> None:
    problem = small_problem("gpt", global_batch=64)
    plan = uniform_plan(problem, pp=4)
    whole = simulate(plan, problem, engine="compiled")
    short = simulate(plan, problem, engine="compiled", leave_out_periods=True)
    assert short.graph.num_tasks == whole.graph.num_tasks
    mine, theirs = (found.breakdown().select_dtypes("number").to_numpy() for found in (short, whole))
    assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)
