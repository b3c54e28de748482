"""What a campaign computes from measurements, against closed forms."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from simulator.problem import Problem  # noqa: E402
from simulator.simulate import simulate  # noqa: E402
from simulator.uniform import uniform_plan  # noqa: E402
from tests.validation.tiny import problem  # noqa: E402
from validation.campaigns.error_split import split_errors  # noqa: E402
from validation.campaigns.fit import Calibration, company_share  # noqa: E402
from validation.campaigns.result import rank  # noqa: E402
from validation.measurement import DeviceTime, IterationRecord, Measurement, TimedAction, TimedSpan  # noqa: E402
from validation.profiling.calibration import calibration_jobs, fit  # noqa: E402
from validation.profiling.machine_profile import MachineProfile  # noqa: E402
from validation.profiling.overlap import overlap_row  # noqa: E402


def measured(seconds: float, passes_s: tuple[float, ...], **others: Any) -> Measurement:
    """Return what might have been measured of an iteration."""
    return Measurement(
        seconds, (seconds,), 1, 1, 1, passes_s, passes_s, 1e-3, (1.0,), (), (), others.pop("operator_s", {}), "", "cpu",
        "none", {}, **others,
    )  # fmt: skip


def profile(of: Problem, iteration_s: float, factor: float = 1.0) -> MachineProfile:
    """Return what is fitted where passes take 0.2 s, and two stages 0.1 s each times a factor."""
    work = calibration_jobs(of, (1,))
    assert work.pipeline is not None
    count = len(of.workload)
    operators = {(phase, index): 0.2 / count for phase in ("forward", "backward") for index in range(count)}
    alone = [measured(0.4, (0.2,), operator_s=operators) for _ in range(len(work.operators) + 1)]
    pipeline = measured(iteration_s, (0.1 * factor, 0.1 * factor), operator_s=operators)
    return fit(of, work, [[*alone, pipeline]], ())


def test_only_pairs_of_one_unit_beyond_the_margin_are_ranked() -> None:
    plans = [
        ("gpt", "a", 1.0, 1.0),
        ("gpt", "b", 0.9, 1.14),  # 14 % from a: does not count
        ("gpt", "c", 0.8, 2.0),  # predicted faster than a and b, is slower
        ("bert", "d", 9.0, 5.0),
    ]
    ranking = rank(plans, 0.15)
    assert (ranking.pairs, ranking.right) == (2, 0)
    assert ranking.wrong == (("a", "c"), ("b", "c"))
    assert rank([("gpt", "a", 1.0, 1.0), ("gpt", "b", 1.2, 2.0)], 0.15).right == 1


@pytest.mark.parametrize("computation", [1.0, 1.3, 2.0])
@pytest.mark.parametrize("communication", [1.0, 1.5])
@pytest.mark.parametrize("alone", [(1.0, 1.0), (2.0, 1.0), (1.0, 3.0)])
def test_overlap_factors_come_back_from_the_times_they_make(
    computation: float, communication: float, alone: tuple[float, float]
) -> None:
    # Both run until one ends; what is left of the other then runs at full speed.
    shared = min(alone[0] * computation, alone[1] * communication)
    ends = [
        shared + (own - shared / factor) for own, factor in zip(alone, (computation, communication), strict=True)
    ]
    row = overlap_row("copy", alone[0], alone[1], ends[0], ends[1])
    assert row.computation_factor == pytest.approx(computation)
    assert row.communication_factor == pytest.approx(communication)


def test_company_is_all_the_time_in_data_parallel_and_never_alone() -> None:
    of = problem("gpt")
    assert company_share(uniform_plan(of, dp=2).canonical(of.workload), of, 2) == pytest.approx(1.0)
    assert company_share(uniform_plan(of).canonical(of.workload), of, 2) == 0.0
    assert company_share(uniform_plan(of).canonical(of.workload), of, 1) == 1.0


def test_less_bubble_is_more_company() -> None:
    shares = []
    for batch in (2, 4, 8, 16):
        of = replace(problem("gpt"), global_batch=batch)
        shares.append(company_share(uniform_plan(of, pp=2).canonical(of.workload), of, 2))
    assert shares == sorted(shares) and 0.0 < shares[0] < shares[-1] < 1.0


def test_where_a_devices_time_went_adds_up() -> None:
    actions = [TimedAction(0, "F", 0, 0, 0.0, 1.0, 0.0), TimedAction(0, "B", 0, 0, 1.5, 3.0, 0.5)]
    spans = [
        TimedSpan(0, "collective", -1, "all_reduce", 0.2, 0.3),
        TimedSpan(0, "collective", -1, "all_reduce", 3.1, 3.5),
        TimedSpan(0, "optimizer", -1, "step", 3.5, 3.9),
    ]
    found = IterationRecord(actions, spans, 1.0, 3.2, 5.0).device_time(7)
    expected = DeviceTime(7, 2.5, 0.5, 0.1, 0.4, 0.4, 1.0, 3.2)
    assert asdict(found) == pytest.approx(asdict(expected))


@pytest.mark.parametrize(("tied", "waited_s"), [(True, 0.4), (False, 0.0)])
def test_what_a_stage_waits_for_another_in_the_sum_of_a_tied_weight_is_no_collective(
    tied: bool, waited_s: float
) -> None:
    """The last stage is through with its gradients first; what comes last only sums."""
    of = problem("gpt" if tied else "gpt-neox")
    plan = uniform_plan(of, pp=2).canonical(of.workload)
    devices = (DeviceTime(0, 2.0, 0.1, 0.2, 0.1, 0.0, 0.2, 2.0), DeviceTime(1, 1.5, 0.2, 0.2, 0.5, 0.0, 0.6, 1.5))
    found = split_errors(
        plan, of, of, simulate(plan, of), Calibration(profile(of, 0.5)), [measured(3.0, (0.5, 0.5), devices=devices)]
    )
    first, last = ({word: seconds for word, _, seconds in split.by_class()} for split in found)
    assert first["collectives"] == pytest.approx(0.3)
    assert last["collectives"] == pytest.approx(0.7 - waited_s)
    assert last["waiting for stages"] == pytest.approx(0.2 + waited_s + (3.0 - 1.5 - 0.2 - 0.6))


@pytest.mark.parametrize(
    ("iteration_s", "overhead_s", "factor"), [(0.5, 0.0, 1.0), (5.0, 0.5, 1.0), (2.9, 0.25, 0.4), (0.5, 0.0, 2.0)]
)
def test_a_pipeline_quicker_than_its_operators_has_no_overhead_and_says_so(
    iteration_s: float, overhead_s: float, factor: float
) -> None:
    """GPipe of four microbatches on two stages takes five passes each way, of 0.1 s times the factor; less is noise."""
    found = profile(problem("gpt"), iteration_s, factor)
    assert found.operator_factor == pytest.approx(factor, rel=0.1)
    assert ("measure on a calm machine" in found.fitted_on) == (factor != 1)
    assert found.pass_overhead_s == pytest.approx(overhead_s, rel=0.25)
    assert ("which is noise" in found.fitted_on) == (not overhead_s)
