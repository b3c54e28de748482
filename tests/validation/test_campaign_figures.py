"""What a campaign computes from measurements, against closed forms."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pandas as pd
import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from simulator.costs import CostTables  # noqa: E402
from simulator.problem import Problem  # noqa: E402
from simulator.simulate import simulate  # noqa: E402
from simulator.uniform import uniform_plan  # noqa: E402
from tests.validation.tiny import problem  # noqa: E402
from validation.campaigns.error_split import DeviceSplit, split_errors  # noqa: E402
from validation.campaigns.fit import Calibration, company_share  # noqa: E402
from validation.campaigns.result import rank  # noqa: E402
from validation.measurement import (  # noqa: E402
    DeviceTime,
    IterationRecord,
    Measurement,
    RankRecord,
    TimedAction,
    TimedSpan,
    combine,
)
from validation.profiling.calibration import calibration_jobs, fit  # noqa: E402
from validation.profiling.machine_profile import MachineProfile  # noqa: E402
from validation.profiling.overlap import overlap_row  # noqa: E402
from validation.timers import Clock, CollectiveTimes, OperatorTimes  # noqa: E402


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
    alike = [("gpt", "a", 1.0, 1.0), ("gpt", "b", 1.0, 2.0)]
    assert rank(alike, 0.15).right == rank(alike[::-1], 0.15).right == 0


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


def test_ranks_make_up_a_measurement() -> None:
    """One warm-up iteration and three that count, on two ranks of stage 0 and one of stage 1, backward in halves."""

    def record(rank: int, seconds: tuple[float, ...], forward_s: tuple[float, ...]) -> RankRecord:
        stage = rank // 2
        kinds = [[("F", each), ("I", 0.5 * each), ("W", 0.25 * each)] for each in forward_s]
        actions = [[TimedAction(rank, kind, stage, 0, 1.0, 1.0 + each, 0.0) for kind, each in turn] for turn in kinds]
        times = [DeviceTime(7, each, 2 * each, 0.0, 0.0, 0.0, 0.0, 0.0) for each in forward_s]
        traced = IterationRecord(actions[0], [TimedSpan(rank, "optimizer", -1, "step", 0.0, 1.0)], 0.0, 0.0, 0.0)
        return RankRecord(
            rank, 7, list(seconds), actions, [each / 8 for each in forward_s], times, traced,
            [0.25, 0.5, 0.5, 1.0], (10 + rank, 20 - rank), {("forward", 3): [1.0, 8.0, forward_s[0]]}, ["a note"],
        )  # fmt: skip

    records = [
        record(0, (9.0, 1.0, 2.0, 4.0), (1.0, 2.0, 6.0)),
        record(1, (8.0, 3.0, 1.0, 5.0), (7.0, 3.0, 2.0)),
        record(2, (8.0, 1.0, 1.0, 8.0), (4.0, 4.0, 5.0)),
    ]
    known = {
        "global_batch": 8, "tokens_per_sample": 6, "num_devices": 3, "plan_hash": "", "device_type": "cpu",
        "backend": "gloo", "versions": {},
    }  # fmt: skip
    found = combine(records, warmup=1, num_stages=2, **known)
    assert (found.iteration_samples_s, found.iteration_time_s) == ((3.0, 2.0, 8.0), 3.0)  # the slowest rank's
    assert (found.stage_forward_s, found.stage_backward_s) == ((3.0, 4.0), (2.25, 3.0))
    assert found.optimizer_s == 4.0 / 8
    assert found.losses == (0.75, 1.5, 1.5, 3.0)
    assert found.operator_s == {("forward", 3): 7.0}
    assert [(each.passes_s, each.waiting_s) for each in found.devices] == [(2.0, 4.0), (3.0, 6.0), (4.0, 8.0)]
    assert [action.end_s for action in found.actions if action.kind == "F"] == [7.0, 3.0, 6.0]  # the last iteration's
    assert [len(each) for each in found.traced] == [9, 3] and found.notes == ("a note",)
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (12, 20)
    assert found.spread == (8.0 - 2.0) / 3.0
    assert (found.samples_per_s, found.tokens_per_s_per_device) == pytest.approx((8 / 3, 16 / 3))


def test_what_is_timed_has_a_span_since_the_start_and_is_forgotten_once_it_is_drained() -> None:
    clock = Clock(torch.device("cpu"))
    clock.mark = iter((10.0, 12.0, 13.0, 13.5)).__next__  # type: ignore[method-assign]
    operators = OperatorTimes(clock)
    for _ in range(2):
        with operators.measure("forward", 3):
            pass
    assert operators.spans(1, 9.0)[1] == TimedSpan(1, "forward", 3, "", 4.0, 4.5)
    assert operators.drain() == ({("forward", 3): [2.0, 0.5]}, {}) and operators.drain() == ({}, {})
    clock.mark = iter((10.0, 12.0)).__next__  # type: ignore[method-assign]
    collectives = CollectiveTimes(clock)
    with collectives.measure("all_reduce"):
        pass
    assert collectives.drain(1, 9.0) == [TimedSpan(1, "collective", -1, "all_reduce", 1.0, 3.0)]
    assert collectives.drain(1, 9.0) == []


def test_disturbance_is_time_over_work_of_the_passes_alone() -> None:
    """Passes of 3 s, 1 s of it collectives; of 2.4 s of processor 1.5 s went to a tail that waited 0.1 s."""
    times = DeviceTime(0, 3.0, 0.0, 1.0, 0.1, 0.0, 1.5, 2.4)
    assert measured(1.0, (1.0,), devices=(times,)).disturbance == pytest.approx(2.0)
    calm = replace(times, processor_s=3.4)
    assert measured(1.0, (1.0,), devices=(times, calm)).disturbance == pytest.approx(1.5)
    assert measured(1.0, (1.0,)).disturbance == 1.0


def one_more_microbatch(of: Problem, **options: Any) -> pd.Series[float]:
    """Return the seconds by category, over all devices, that a fourth microbatch of two samples adds to three."""
    three, four = (replace(of, global_batch=2 * number) for number in (3, 4))
    tables = [simulate(uniform_plan(each, microbatch=2, **options), each).breakdown() for each in (three, four)]
    return tables[1].sum(numeric_only=True) - tables[0].sum(numeric_only=True)


COUNTS = {"matmul": 16, "attention": 12, "norm": 9, "elementwise": 12, "embedding and loss": 2}
"""Operators of the tiny GPT: four layers of four products, three of attention, two norms, two additions, one GELU."""


def test_operators_count_by_class_and_cause_as_often_as_they_ran() -> None:
    """Three microbatches and a smaller fourth, which is *host and other*; the median of three rounds counts."""
    of = replace(problem("gpt"), global_batch=7)
    plan = uniform_plan(of, microbatch=2, recompute="full", smaller_last=True).canonical(of.workload)
    seconds = {"forward": 1.0, "backward": 2.0, "recompute": 0.5}
    actions = tuple(TimedAction(0, kind, 0, number, 0.0, 0.0, 0.0) for kind in "FB" for number in range(4))
    rounds = [
        measured(
            total, (1.0,), traced=(actions, ()),
            operator_s={(phase, index): factor * each for phase, each in seconds.items() for index in range(51)},
            devices=(DeviceTime(0, 1.0, 5 * factor, factor, 3.0, factor, 0.0, 1.0),),
        )
        for total, factor in ((2000.0, 1.0), (3000.0, 2.0), (9000.0, 6.0))
    ]  # fmt: skip
    expected = 3 * one_more_microbatch(of, recompute="full")
    result = simulate(plan, of)

    def split(calibration: Calibration) -> DeviceSplit:
        (found,) = split_errors(plan, of, of, result, calibration, rounds)
        assert sum(each for _, each, _ in found.by_class()) == pytest.approx(result.iteration_time_s)
        return found

    causes = split(Calibration(profile(of, 0.5))).by_cause()
    measured_s = {word: each for word, _, each in causes}
    classes = {word: each for word, _, each in split(Calibration(profile(of, 0.5))).by_class()}
    for word, count in COUNTS.items():
        assert classes[word] == pytest.approx(3 * 2 * 3.5 * count)
    assert (measured_s["forward"], measured_s["backward"], measured_s["recompute"]) == pytest.approx((306, 612, 153))
    assert (measured_s["collectives"], measured_s["waiting for stages"], measured_s["optimizer"]) == (5.0, 10.0, 2.0)
    assert measured_s["host and other"] == pytest.approx(3000 - 3 * 2 * 3.5 * 51 - 17)
    predicted = {word: each for word, each, _ in causes}
    for word in ("forward", "backward", "recompute"):
        assert predicted[word] == pytest.approx(expected[f"{word}_s"]), word
    assert predicted["optimizer"] == pytest.approx(result.breakdown()["optimizer_s"][0])

    # Rows of a profile make up whole passes; of that, operators alone took half forward and a quarter backward.
    costs, alone = CostTables(of), {}
    for index, op in enumerate(of.workload.operators):
        cost = costs.operator(index, (), 2, of.gpu_types[0])
        alone[op.role, 4, 1] = cost.forward.device_s, cost.backward.device_s / 2  # of twice the samples
        alone[op.role, 64, 1] = alone[op.role, 2, 8] = 0.0, 0.0
    raw = {word: each for word, each, _ in split(Calibration(profile(of, 0.5), raw_s=alone)).by_cause()}
    for word, share in (("forward", 0.5), ("backward", 0.25), ("recompute", 0.5)):
        assert raw[word] == pytest.approx(share * predicted[word]), word


def test_what_an_operator_takes_alone_is_that_of_its_tensor_parallel_degree() -> None:
    of = problem("gpt")
    plan = uniform_plan(of, tp=2, microbatch=2).canonical(of.workload)
    actions = tuple(TimedAction(rank, kind, 0, 0, 0.0, 0.0, 0.0) for rank in (0, 1) for kind in "FB")
    devices = tuple(DeviceTime(rank, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0) for rank in (0, 1))
    turn = measured(9.0, (1.0,), traced=(actions, ()), devices=devices)
    result, base = simulate(plan, of), profile(of, 0.5)

    def products_s(degree: int) -> float:
        calibration = Calibration(base, raw_s={("mlp_linear_1", 2, degree): (0.0, 0.0)})
        return split_errors(plan, of, of, result, calibration, [turn])[0].by_class()[0][1]

    assert products_s(2) < 0.9 * products_s(1) and products_s(1) == products_s(4)


def test_exposed_collectives_are_all_of_the_breakdowns() -> None:
    of = problem("gpt")
    plan = uniform_plan(of, tp=2, dp=2, microbatch=4, gradient_reduction="last").canonical(of.workload)
    actions = tuple(TimedAction(rank, kind, 0, 0, 0.0, 0.0, 0.0) for rank in range(4) for kind in "FB")
    devices = tuple(DeviceTime(rank, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0) for rank in range(4))
    result = simulate(plan, of)
    row = result.breakdown().iloc[0]
    exposed = [row["exposed_tensor_parallel_s"], row["exposed_gradient_sync_s"]]
    turn = measured(9.0, (1.0,), traced=(actions, ()), devices=devices)
    found = split_errors(plan, of, of, result, Calibration(profile(of, 0.5)), [turn])[0].by_class()
    assert min(exposed) > 0 and dict(each[:2] for each in found)["collectives"] == pytest.approx(sum(exposed))


def test_halves_of_a_split_backward_are_backward_and_the_busiest_device_comes_first() -> None:
    of = problem("gpt")
    plan = uniform_plan(of, pp=2, microbatch=2, schedule="zb-h1").canonical(of.workload)
    actions = tuple(
        TimedAction(rank, kind, rank, number, 0.0, 0.0, 0.0) for rank in (0, 1) for kind in "FIW" for number in range(4)
    )
    seconds = {"forward": 1.0, "backward_input": 2.0, "backward_weight": 0.25}
    turn = measured(
        900.0, (1.0, 1.0), traced=(actions, ()),
        operator_s={(phase, index): each for phase, each in seconds.items() for index in range(51)},
        devices=(DeviceTime(0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0), DeviceTime(1, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)),
    )  # fmt: skip
    result = simulate(plan, of)
    found = split_errors(plan, of, of, result, Calibration(profile(of, 0.5)), [turn])
    assert [each.device for each in found] == [1, 0]
    expected = 4 * one_more_microbatch(of, pp=2, schedule="zb-h1")
    sums = [dict[str, float](), dict[str, float]()]
    for place in (0, 1):
        for split in found:
            for row in split.by_cause():
                sums[place][row[0]] = sums[place].get(row[0], 0.0) + row[1 + place]
    assert sums[0]["forward"] == pytest.approx(expected["forward_s"])
    assert sums[0]["backward"] == pytest.approx(expected["backward_s"] + expected["weight_gradient_s"])
    assert (sums[1]["forward"], sums[1]["backward"]) == pytest.approx((4 * 51 * 1.0, 4 * 51 * 2.25))


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
