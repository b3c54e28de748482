"""The page of costs: which cases overlap, and how its tables read."""

from __future__ import annotations

from dataclasses import replace

from experiments.cases import galvatron_table2
from experiments.cases.case import Case, Skipped, uniform
from experiments.check_costs import Overlap, overlap_table, overlaps

CASES = [case for case in galvatron_table2.cases(None) if isinstance(case, Case)]


def _first(group: str) -> Case:
    return next(case for case in CASES if group in case.groups and case.measured.iteration_time_s is not None)


def test_gradient_buckets_overlap_and_one_error_is_told_for_each_group() -> None:
    ddp = _first("galvatron-table2-ddp")
    skipped = Skipped(("galvatron-table2",), 1, "no reason")
    unmeasured = replace(ddp, measured=replace(ddp.measured, iteration_time_s=None))
    found = overlaps([skipped, unmeasured, ddp])
    assert [each.group for each in found] == list(ddp.groups)
    for each in found:
        assert each.without_slowdown < each.with_slowdown  # less slowdown, shorter prediction


def test_a_plan_without_overlap_is_left_out() -> None:
    ddp = _first("galvatron-table2-ddp")
    tensor_parallel = uniform(tp=8, microbatch=ddp.problem().global_batch)
    assert overlaps([replace(ddp, plan=tensor_parallel)]) == []


def test_the_table_has_means_of_absolute_and_signed_errors() -> None:
    found = [Overlap("galvatron-table2-ddp", -0.1, -0.2), Overlap("galvatron-table2-ddp", 0.2, 0.0)]
    (row,) = overlap_table(found)[2:]
    assert row == "| DDP | 2 | 15.0% (+5.0%) | 10.0% (-10.0%) |"
