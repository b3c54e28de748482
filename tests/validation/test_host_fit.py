"""What a campaign on a GPU knows of kernels and their host: measured apart, fitted apart, predicted together."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from hardware_models.profile_scaling import ProfileScaling  # noqa: E402
from simulator.problem import Problem  # noqa: E402
from simulator.simulate import simulate_time_s  # noqa: E402
from tests.validation.test_campaign_figures import measured  # noqa: E402
from tests.validation.test_campaign_files import load  # noqa: E402
from validation.campaigns.fit import Calibration, fit_campaign  # noqa: E402
from validation.campaigns.run import RoundResult  # noqa: E402
from validation.campaigns.work import UnitWork, campaign_work  # noqa: E402
from validation.execution.executor import Job  # noqa: E402
from validation.measurement import Measurement  # noqa: E402
from validation.profiling.calibration import calibration_jobs, fit  # noqa: E402
from validation.profiling.machine_profile import MachineProfile  # noqa: E402
from validation.profiling.profiler import HELD_BACK_ITERATIONS, profile_rows, recomputing_host_s  # noqa: E402

KERNEL_S, HOST_S = 2e-4, 1e-3
"""Of an operator's kernels for each sample, and of its host for any number; twice as long in backward."""
STEP_S = 2e-3
SMALL, LARGE = 1, 16
"""Samples: the host rules the first, the GPU the second."""


@pytest.fixture(scope="module")
def unit() -> UnitWork:
    calibration = [{"model": "gpt", "microbatch": [SMALL, LARGE], "num_microbatches": 1}]
    report = [{"model": "gpt", "microbatch": 4, "num_microbatches": 1, "recompute": ["none", "full"]}]
    (found,) = campaign_work(load(device="cuda", cluster="h100-dgx:1x1", calibration=calibration, report=report))
    return found


def problem_of(num_devices: int) -> Problem:
    (found,) = campaign_work(
        load(
            device="cuda", cluster=f"h100-dgx:1x{num_devices}",
            calibration=[{"model": "gpt", "num_microbatches": 1}], report=[{"model": "gpt", "num_microbatches": 2}],
        )
    )  # fmt: skip
    return found.problem


def profiled(job: Job) -> Measurement:
    """Return what is measured of a profiling run; where operators are recomputed their host takes thrice as long."""
    samples, count = job.plan.microbatch_size, len(job.problem.workload)
    again = {index for start, stop in job.plan.stages[0].recompute for index in range(start, stop)}
    phases = {"forward": 1, "backward": 2}
    kernels = {(phase, index): n * KERNEL_S * samples for phase, n in phases.items() for index in range(count)}
    host = {(phase, index): n * HOST_S for phase, n in phases.items() for index in range(count)}
    host |= {("recompute", index): 6 * HOST_S for index in again}
    return measured(99.0, (9.0,), operator_s=kernels, operator_host_s=host)


def fitted(unit: UnitWork, calibrated: tuple[float, float], steps: tuple[float, ...] = (STEP_S,) * 3) -> Calibration:
    """Return what is fitted where calibration plans take so long, and the optimizer step and they end so."""
    found = [profiled(run.job) for run in unit.profiling.profiling]
    for seconds, step_s in zip((1.0, *calibrated), steps, strict=True):
        found.append(replace(measured(seconds, (9.0,)), optimizer_s=step_s))
    found += [measured(1.0, (9.0,))] * len(unit.report)
    return fit_campaign([unit], [RoundResult((), (), {unit.name: tuple(found)})])[unit.name]


def predicted_s(calibration: Calibration, job: Job) -> float:
    return simulate_time_s(job.plan, calibration.apply(job.problem, job.plan))


def test_a_gpu_is_profiled_one_microbatch_at_a_time_and_once_with_recomputation(unit: UnitWork) -> None:
    plans = [run.job.plan for run in unit.profiling.profiling]
    found = [(plan.microbatch_size, bool(plan.stages[0].recompute)) for plan in plans]
    assert found == [(SMALL, False), (LARGE, False), (SMALL, True)]
    assert {plan.num_microbatches for plan in plans} == {1}
    assert {run.job.iterations for run in unit.profiling.profiling} == {HELD_BACK_ITERATIONS}
    assert not {job.plan for _, job in unit.report} & set(plans)


def test_rows_have_kernels_and_host_apart(unit: UnitWork) -> None:
    profile = fitted(unit, (1.0, 1.0)).profile.operators
    assert profile.kernels_only
    for row in profile.rows:
        assert (row.forward_s, row.backward_s) == pytest.approx((KERNEL_S * row.samples, 2 * KERNEL_S * row.samples))
        assert (row.forward_host_s, row.backward_host_s) == pytest.approx((HOST_S, 2 * HOST_S))
    again = {row.role: row.recomputed_host_s for row in profile.rows}
    assert again["mlp_linear_1"] == pytest.approx(6 * HOST_S) and again["embedding"] is None


def test_rows_have_what_the_allocator_held_at_most_of_all_operators_of_a_role(unit: UnitWork) -> None:
    run = unit.profiling.operators[0]
    operators = run.job.problem.workload.operators
    taken = {(phase, index): 1000.0 * place + index for place, phase in enumerate(("forward", "backward"), start=1)
             for index in range(len(operators))}  # fmt: skip
    rows = profile_rows(run, replace(profiled(run.job), operator_taken_bytes=taken), "test")
    last = max(index for index, op in enumerate(operators) if op.role == "mlp_linear_1")
    (found,) = (row for row in rows if row.role == "mlp_linear_1")
    assert (found.forward_taken_bytes, found.backward_taken_bytes) == (1000 + last, 2000 + last)
    assert {row.backward_taken_bytes for row in profile_rows(run, profiled(run.job), "test")} == {None}


@pytest.mark.parametrize(("kernels", "host"), [(1.0, 1.0), (1.1, 1.0), (1.0, 0.7), (1.2, 1.5)])
def test_factors_on_kernels_and_host_come_back_from_the_plans_that_they_rule(
    unit: UnitWork, kernels: float, host: float
) -> None:
    plain = fitted(unit, (1.0, 1.0))
    true = replace(plain, single_factor=kernels, host_factor=host)
    small_s, large_s = (predicted_s(true, job) for _, job in unit.calibration)
    found = fitted(unit, (small_s, large_s))
    assert (found.single_factor, found.host_factor) == pytest.approx((kernels, host), rel=0.01)
    for _, job in unit.report:
        assert predicted_s(found, job) == pytest.approx(predicted_s(true, job), rel=0.01)
    none, full = (predicted_s(found, job) for _, job in unit.report)
    assert full - none > 40 * 5 * HOST_S * host  # Four layers of a dozen operators.


def test_a_factor_that_no_plan_speaks_of_stays_at_one(unit: UnitWork) -> None:
    true = replace(fitted(unit, (1.0, 1.0)), single_factor=1.3)
    large = unit.calibration[1]
    alone = replace(unit, calibration=(large,))
    found = [*(profiled(run.job) for run in unit.profiling.profiling), measured(1.0, (9.0,))]
    found += [measured(predicted_s(true, large[1]), (9.0,))] + [measured(1.0, (9.0,))] * len(unit.report)
    got = fit_campaign([alone], [RoundResult((), (), {unit.name: tuple(found)})])[unit.name]
    assert got.host_factor == pytest.approx(1.0, abs=0.01) and got.single_factor == pytest.approx(1.3, rel=0.01)


def test_the_step_is_the_shortest_of_all_runs_as_launches_come_late_in_some(unit: UnitWork) -> None:
    late, early = (fitted(unit, (1.0, 1.0), (5e-3, 4e-3, last)) for last in (4e-3, STEP_S))
    fractions = [each.profile.optimizer_bandwidth_fraction for each in (late, early)]
    assert fractions[1] == pytest.approx(2 * fractions[0])


def test_what_recomputation_adds_is_of_operators_that_run_again(unit: UnitWork) -> None:
    jobs = [unit.profiling.profiling[position].job for position in (0, 2)]
    plain, again = map(profiled, jobs)
    found = recomputing_host_s(plain, again, unit.problem)
    segments = jobs[1].plan.stages[0].recompute
    assert set(found) == {unit.problem.workload.operators[at].role for a, b in segments for at in range(a, b)}
    assert all(seconds == pytest.approx(6 * HOST_S) for seconds in found.values())
    quicker = replace(again, operator_host_s=dict.fromkeys(again.operator_host_s, 1e-9))
    assert set(recomputing_host_s(plain, quicker, unit.problem).values()) == {0.0}


PIPELINE = {"model": "gpt", "pp": 2, "microbatch": SMALL, "num_microbatches": 4}


@pytest.fixture(scope="module")
def pipelined() -> UnitWork:
    calibration = [{**PIPELINE, "schedule": "gpipe"}]
    report = [PIPELINE, {**PIPELINE, "microbatch": LARGE}]
    (found,) = campaign_work(load(device="cuda", cluster="h100-dgx:1x2", calibration=calibration, report=report))
    return found


@pytest.mark.parametrize("host", [0.8, 1.2, 1.5])
def test_a_pipeline_that_the_host_rules_says_nothing_of_kernels(pipelined: UnitWork, host: float) -> None:
    """It would make pipelines that the GPU rules as much slower, and find an overhead of passes that hides."""

    def fit_on(seconds: float) -> Calibration:
        found = [profiled(run.job) for run in pipelined.profiling.profiling]
        found += [replace(measured(1.0, (9.0,)), optimizer_s=STEP_S), measured(seconds, (9.0, 9.0))]
        found += [measured(1.0, (9.0, 9.0))] * len(pipelined.report)
        return fit_campaign([pipelined], [RoundResult((), (), {pipelined.name: tuple(found)})])[pipelined.name]

    (_, calibrating), (_, small), (_, large) = (*pipelined.calibration, *pipelined.report)
    true = replace(fit_on(1.0), single_factor=1.0, host_factor=host)
    true = replace(true, profile=replace(true.profile, operator_factor=1.0))
    found = fit_on(predicted_s(true, calibrating))
    assert found.host_factor == pytest.approx(host, rel=0.01)
    assert found.profile.operator_factor == pytest.approx(1.0, rel=0.01) and found.profile.pass_overhead_s == 0
    for job in (small, large):
        assert predicted_s(found, job) == pytest.approx(predicted_s(true, job), rel=0.01)


@pytest.mark.parametrize("host", [0.8, 1.5])
def test_so_does_that_of_a_machines_profile(host: float) -> None:
    of = replace(problem_of(2), global_batch=4 * SMALL)
    work = calibration_jobs(of, (SMALL,), device="cuda")
    assert work.pipeline is not None
    runs = [profiled(run.job) for run in work.profiling]
    step = replace(measured(1.0, (9.0,)), optimizer_s=STEP_S)

    def pipeline_s(profile: MachineProfile) -> float:
        assert work.pipeline is not None
        return simulate_time_s(work.pipeline.plan, profile.apply(of, work.pipeline.plan))

    plain = fit(of, replace(work, pipeline=None), [[*runs, step]], ())
    true = replace(plain, operators=ProfileScaling(host_factor=host).apply(plain.operators))
    found = fit(of, work, [[*runs, step, measured(pipeline_s(true), (9.0, 9.0))]], ())
    assert pipeline_s(found) == pytest.approx(pipeline_s(true), rel=0.01)
    assert found.operator_factor == pytest.approx(1.0, rel=0.01) and found.pass_overhead_s == 0
    hosts = [sum(row.forward_host_s or 0.0 for row in each.operators.rows) for each in (plain, found)]
    assert hosts[1] == pytest.approx(host * hosts[0], rel=0.01)
