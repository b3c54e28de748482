"""A campaign's arithmetic on made-up measurements: what is fitted predicts them again, and what is found is counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from experiments.accuracy.run import run_case  # noqa: E402
from experiments.campaign_cases import write_case_file  # noqa: E402
from experiments.cases.campaigns import cases_of  # noqa: E402
from hardware_models.profile_scaling import ProfileScaling  # noqa: E402
from simulator.simulate import simulate, simulate_time_s  # noqa: E402
from tests.validation.test_campaign_figures import measured, profile  # noqa: E402
from tests.validation.test_campaign_files import load  # noqa: E402
from validation.campaigns import run as run_module  # noqa: E402
from validation.campaigns.definition import Campaign  # noqa: E402
from validation.campaigns.fit import EXPOSED_COLLECTIVES, Calibration, fit_campaign  # noqa: E402
from validation.campaigns.result import evaluate  # noqa: E402
from validation.campaigns.run import RoundResult, fastest_round, finished_rounds, load_rounds, run_campaign  # noqa: E402
from validation.campaigns.work import UnitWork, campaign_work  # noqa: E402
from validation.measurement import DeviceTime, RankMemory, TimedAction  # noqa: E402
from validation.measurement_file import measurement_mapping  # noqa: E402
from validation.profiling.overlap import OverlapRow  # noqa: E402
from validation.profiling.stage_times import stage_times  # noqa: E402

COUNT = 51
"""Operators of the model, a millisecond forward and two backward each."""
COMMUNICATION = [
    (kind, 2, float(size), 1e-4 + size * 1e-9)
    for kind in ("transfer_intra_node", "all_reduce", "all_gather", "reduce_scatter", "broadcast")
    for size in (256, 4194304)
]
PIPELINE, REPLICAS, SINGLE = range(3)


@pytest.fixture(scope="module")
def campaign() -> Campaign:
    pipeline = {"model": "gpt", "pp": 2, "num_microbatches": 4}
    return load(
        name="cpu-gloo",
        calibration=[
            {**pipeline, "schedule": "gpipe"},
            {"model": "gpt", "dp": 2, "num_microbatches": 2},
            {"model": "gpt", "num_microbatches": 3},
        ],
        report=[pipeline, {**pipeline, "schedule": "zb-h1"}, {"model": "gpt", "tp": 2, "num_microbatches": 2}],
    )


@pytest.fixture(scope="module")
def unit(campaign: Campaign) -> UnitWork:
    (found,) = campaign_work(campaign)
    return found


def turn(
    unit: UnitWork, factor: float = 1.0, overlap: float = 1.5, changes: Mapping[int, Mapping[str, Any]] | None = None
) -> RoundResult:
    """Return a round whose iterations take a factor longer: 0.8 s in pipelines, else 0.5 s.

    A pass takes its operators, three quarters of them in a process alone, a fifth more in pipelines and 30 % more in
    the plan of one device. Each rank waits 50 ms for collectives.
    """
    found = []
    for position, job in enumerate(unit.jobs):
        halves = {"forward": 1e-3, "backward_input": 1.5e-3, "backward_weight": 1.5e-3}
        phases = halves if position == unit.first_half else {"forward": 1e-3, "backward": 2e-3}
        stages = len(job.plan.stages)
        share = 1.2 if stages == 2 else 1.0
        share = {unit.first_alone: 0.75, unit.first_calibration + SINGLE: 1.3}.get(position, share)
        forward_s = (share * COUNT * 1e-3 / stages,) * stages
        one = measured(
            factor * (0.8 if stages == 2 else 0.5), forward_s,
            operator_s={(phase, index): each for phase, each in phases.items() for index in range(COUNT)},
            devices=tuple(DeviceTime(each, 1.0, 0.0, 0.02, 0.03, 0.0, 0.05, 1.0) for each in sorted(job.plan.devices)),
        )  # fmt: skip
        own = (changes or {}).get(position, {})
        hashed = job.plan.canonical_hash(job.problem.workload)
        found.append(replace(one, stage_backward_s=tuple(2 * each for each in forward_s), plan_hash=hashed, **own))
    row = OverlapRow("all_reduce", 1.0, 1.0, 1.0, 1.0, overlap, 2 * overlap)
    return RoundResult(tuple(COMMUNICATION), (row,), {unit.name: tuple(found)})


def test_what_is_fitted_predicts_what_it_was_fitted_on(unit: UnitWork) -> None:
    found = fit_campaign([unit], [turn(unit, overlap=1.2), turn(unit, overlap=1.3), turn(unit, overlap=1.9)])[unit.name]
    assert found.company_cost == pytest.approx(0.25) and found.num_profiled == 2
    assert found.overlap == (1.3, 2.6)
    assert set(found.halves) == {op.role for op in unit.problem.workload.operators}
    assert all(ratio == pytest.approx(1.5) for ratio in found.halves.values())
    assert all(seconds == pytest.approx((1e-3, 2e-3)) for seconds in found.raw_s.values())

    def passes_s(calibration: Calibration, number: int) -> float:
        _, job = unit.calibration[number]
        result = simulate(job.plan, calibration.apply(job.problem, job.plan))
        return sum(map(sum, stage_times(result, len(job.plan.stages))))

    assert passes_s(found, SINGLE) == pytest.approx(1.3 * COUNT * 3e-3, rel=0.005)
    assert passes_s(found, REPLICAS) == pytest.approx(COUNT * 3e-3, rel=0.005)
    calm = replace(found, profile=replace(found.profile, pass_overhead_s=0.0))
    assert passes_s(calm, PIPELINE) == pytest.approx(1.2 * COUNT * 3e-3, rel=0.005)
    _, job = unit.calibration[PIPELINE]
    before = replace(found, collective_overhead_s=0.0)  # it is fitted last, on plans without stages
    assert simulate_time_s(job.plan, before.apply(job.problem, job.plan)) == pytest.approx(0.8)

    # Two plans of one stage wait for collectives, 50 ms each: profiling under tensor parallelism, and two replicas.
    jobs = [unit.profiling.operators[1].job, unit.calibration[REPLICAS][1]]
    tables = [simulate(each.plan, found.apply(each.problem, each.plan)).breakdown().iloc[0] for each in jobs]
    assert sum(float(row[list(EXPOSED_COLLECTIVES)].sum()) for row in tables) == pytest.approx(0.1, rel=1e-3)


def test_a_calibration_plan_without_memory_in_one_round_is_not_fitted(unit: UnitWork) -> None:
    failed = {unit.first_calibration + number: {"out_of_memory": True} for number in (SINGLE, PIPELINE)}
    found = fit_campaign([unit], [turn(unit), turn(unit, changes=failed), turn(unit)])[unit.name]
    assert (found.single_factor, found.profile.operator_factor, found.profile.pass_overhead_s) == (1.0, 1.0, 0.0)
    with pytest.raises(ValueError, match="profiling runs must fit into memory"):
        fit_campaign([unit], [turn(unit), turn(unit, changes={unit.first_half: {"out_of_memory": True}})])


def test_a_split_backward_has_the_overhead_of_a_pass_twice(unit: UnitWork) -> None:
    base = replace(profile(unit.problem, 0.5), operator_factor=1.1, pass_overhead_s=0.51)
    calibration = Calibration(base, single_factor=1.3, halves={"mlp": 1.5})
    gpipe, replicas, single = (job.plan for _, job in unit.calibration)
    split = unit.report[1][1].plan
    raw_s = {("mlp", 1, 1): (1.0, 1.0), ("mlp", 8, 1): (16.0, 24.0), ("mlp", 6, 2): (0.0, 0.0)}
    known = replace(calibration, raw_s=raw_s)
    assert known.raw("mlp", 6, 1) == (12.0, 18.0) and known.raw("mlp", 6, 4) is known.raw("norm", 6, 1) is None
    assert calibration.scaling(unit.problem, single) == ProfileScaling(1.3)
    in_company = replace(calibration, company_cost=0.25, num_profiled=2)  # a quarter is gone without
    for number, factor in ((SINGLE, 1.3 * 0.75), (REPLICAS, 1.0)):
        _, job = unit.calibration[number]
        assert in_company.scaling(job.problem, job.plan).factor == pytest.approx(factor)
    assert calibration.scaling(unit.problem, replicas) == ProfileScaling(1.0)
    assert calibration.scaling(unit.problem, gpipe) == ProfileScaling(1.1, {}, 0.02, 0.02)
    assert calibration.scaling(unit.problem, split) == ProfileScaling(1.1, {"mlp": 1.5}, 0.02, 0.04)


def test_what_is_found_are_medians_of_rounds_and_plans_without_memory_have_no_error(
    campaign: Campaign, unit: UnitWork, tmp_path: Path
) -> None:
    rounds = []
    for number, factor in enumerate((1.0, 1.1, 1.5)):
        split, tensor = {"out_of_memory": number == 1}, {"memory": (RankMemory(0, 100 + number, 200 - number),)}
        rounds.append(turn(unit, factor, changes={unit.first_report + 1: split, unit.first_report + 2: tensor}))
    calibrations = fit_campaign([unit], rounds)
    found = evaluate(campaign, [unit], rounds, calibrations, "here", "today")
    pipeline, failed, parallel = found.outcomes
    assert [each.measured_s for each in pipeline.quantities] == pytest.approx([0.88, *(0.0306, 0.0612) * 2])
    assert pipeline.spread == pytest.approx(0.5 / 1.1) and pipeline.samples_s == pytest.approx((0.8, 0.88, 1.2))
    assert pipeline.iteration.error == pytest.approx(pipeline.result.iteration_time_s / 0.88 - 1)
    assert [each.out_of_memory for each in found.outcomes] == [False, True, False] and failed.samples_s == ()
    assert failed.to_mapping()["waiting_s"] == {"predicted": 0.0, "measured": 0.0}
    memory = parallel.memory
    assert (memory.measured_allocated, memory.measured_reserved, pipeline.memory.measured_allocated) == (102, 200, None)
    result = parallel.result
    assert memory.predicted_allocated == result.peak_allocated_bytes < memory.predicted_reserved
    assert memory.to_mapping()["allocated_error"] == memory.predicted_allocated / 102 - 1
    # By sample 0.22 and 0.275 s: further apart than the margin.
    assert campaign.options.ranking_margin < 0.25 and found.ranking.pairs == 1
    errors = [pipeline.iteration.error, parallel.iteration.error]
    summary = found.summary()
    assert summary["predicted_to_fit_but_did_not"] == [failed.plan.name] and summary["out_of_memory"] == 1
    assert summary["bias"] == pytest.approx(sum(errors) / 2)
    assert summary["mean_absolute_error"] == pytest.approx(sum(map(abs, errors)) / 2) == found.median_absolute
    assert summary["worst_absolute_error"] == max(map(abs, errors))
    assert found.overlap == {"all_reduce": (1.5, 3.0)}

    # A file of cases predicts the same.
    write_case_file(found, tmp_path / "cpu-gloo.yaml")
    cases = {case.row_id.partition("#")[2]: case for case in cases_of(tmp_path / "cpu-gloo.yaml")}
    for outcome in (pipeline, parallel):
        again = run_case(cases[outcome.plan.name])
        assert again.iteration_time_s == pytest.approx(outcome.iteration.predicted_s, rel=1e-3)
        assert again.time_error == pytest.approx(outcome.iteration.error, rel=0.01)
    assert cases[parallel.plan.name].measured.peak_bytes == 102
    assert cases[failed.plan.name].measured.iteration_time_s is None


def test_the_fastest_round_has_the_quickest_of_every_run(unit: UnitWork) -> None:
    action = TimedAction(0, "F", 0, 0, 0.0, 1.0, 0.0)
    with_trace = {"traced": ((action,), ()), "actions": (action,)}
    first = turn(unit, 1.5, changes={0: {"iteration_time_s": 0.1}, 1: with_trace})
    second = turn(unit, 1.2)
    slower = tuple((*row[:3], row[3] * factor) for row, factor in zip(COMMUNICATION, (2.0, 0.5) * 5, strict=True))
    best = fastest_round([first, replace(second, communication=slower)])
    times = [each.iteration_time_s for each in best.measured[unit.name]]
    assert times == [0.1, *(each.iteration_time_s for each in second.measured[unit.name][1:])]
    traced = best.measured[unit.name][1]
    assert (traced.traced, traced.actions) == (((action,), ()), (action,))
    expected = tuple((*row[:3], row[3] * factor) for row, factor in zip(COMMUNICATION, (1.0, 0.5) * 5, strict=True))
    assert best.communication == expected and len(best.overlap) == 2


def test_an_interrupted_campaign_makes_only_what_is_missing(
    campaign: Campaign, unit: UnitWork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, str]] = []
    folder = tmp_path / "of" / "results"

    def run_unit(campaign: Campaign, own: UnitWork, where: Path, number: int) -> Mapping[str, Any]:
        if len(made) == 1:
            made.append((number, "interrupted"))
            raise KeyboardInterrupt
        made.append((number, own.name))
        return {"jobs": [measurement_mapping(each, with_trace=False) for each in turn(own, number).measured[own.name]]}

    rows = {"rows": [list(row) for row in COMMUNICATION], "overlap": []}
    monkeypatch.setattr(run_module, "_run_unit", run_unit)
    monkeypatch.setattr(run_module, "_measure_communication", lambda campaign: rows)
    with pytest.raises(KeyboardInterrupt):
        run_campaign(campaign, [unit], folder, rounds=2)
    assert finished_rounds(campaign, [unit], folder) == 1
    run_campaign(campaign, [unit], folder, rounds=2)
    assert made == [(1, unit.name), (2, "interrupted"), (2, unit.name)]
    assert finished_rounds(campaign, [unit], folder) == 2
    times = [each.measured[unit.name][-1].iteration_time_s for each in load_rounds(campaign, [unit], folder)]
    assert times == [0.5, 1.0]
    assert len(list(load_rounds(campaign, [unit], folder, limit=1))) == 1
    with pytest.raises(ValueError, match="results of another kind"):
        run_campaign(campaign, [unit], folder, rounds=2, with_profiling=False)
    with pytest.raises(ValueError, match="another campaign"):
        run_campaign(load(), campaign_work(load()), folder, rounds=2)
    other = replace(unit, report=unit.report[:-1])
    with pytest.raises(ValueError, match="does not hold what the campaign runs"):
        list(load_rounds(campaign, [other], folder))
