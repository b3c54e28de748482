"""vTrain's rows on an inferred profile: what it was fitted on, what it may report, and what it changes."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from experiments.accuracy.calibration_rows import calibration_rows, saw
from experiments.accuracy.run import check_cases, run_case
from experiments.calibrate.inferred_parts import BLOCKS
from experiments.cases import vtrain, vtrain_inferred
from experiments.cases.case import Case, Skipped
from experiments.cases.sources import data_folder
from experiments.cases.vtrain_inferred import GROUP, SUFFIX, drawn, factors, profile_file
from hardware_models.gpus import curves_of

TABLE_ROWS = 716
ID = "vtrain/ground_truth_single.csv#"
OWN = {f"{ID}{row}" for row in profile_file().rows}
SHIPPED = {row_id for row_id in calibration_rows() if row_id.startswith(ID)}


def row(number: int, *, hidden: int = 1024, tp: int = 1, microbatch: int = 1) -> dict[str, Any]:
    return {
        "model": "gpt", "layers": 4, "hidden": hidden, "heads": 16, "seq": 1024, "vocab": 50257, "gpus": tp, "tp": tp,
        "pp": 1, "dp": 1, "microbatch": microbatch, "global_batch": 8, "value": 100.0, "unit": "ms",
        "notes": f"CSV row {number}",
    }  # fmt: skip


def a_case(row_id: str, group: str) -> Case:
    return replace(vtrain.case_of(row(1)), row_id=row_id, groups=(group,))


def table() -> list[dict[str, Any]]:
    data = data_folder(None)
    if data is None or not (data / vtrain.TABLE).exists():
        pytest.skip("vTrain's rows are not here; set WINDTUNNEL_DATA to a folder that holds them")
    return vtrain.rows(data)


# What it was fitted on


def test_every_tenth_row_is_drawn_kind_by_kind_whatever_the_order_and_the_times() -> None:
    rows = [row(number, tp=1 + number % 2, microbatch=1 + number % 4) for number in range(1, 96)]
    found = drawn(rows)
    assert len(found) == 9
    assert drawn([each | {"value": 1.0} for each in reversed(rows)]) == [each | {"value": 1.0} for each in found]
    assert len({(each["tp"], each["microbatch"]) for each in found}) == 4


def test_the_profile_is_inferred_from_at_most_a_tenth_of_the_rows() -> None:
    assert 0 < len(OWN) <= TABLE_ROWS // 10
    own = {row_id for row_id in calibration_rows((GROUP,)) if row_id.startswith(ID)}
    assert own == OWN  # nothing else that these cases have was fitted on this table


def test_the_committed_rows_are_those_of_the_rule() -> None:
    rows = table()
    assert len(rows) == TABLE_ROWS
    assert {vtrain.row_number(each["notes"]) for each in drawn(rows)} == set(profile_file().rows)


# What it may report


def test_rows_that_the_profile_saw_are_refused_on_it_and_reported_where_nothing_saw_them() -> None:
    seen = sorted(OWN - SHIPPED)[0]
    with pytest.raises(ValueError, match="constants were fitted on 1 of the rows"):
        check_cases([a_case(seen + SUFFIX, GROUP)])
    check_cases([a_case(seen, vtrain.ALL)])


def test_rows_that_the_shipped_constants_saw_are_refused_with_them_and_reported_without() -> None:
    seen = sorted(SHIPPED - OWN)[0]
    for row_id in (seen, f"{seen} on something"):
        with pytest.raises(ValueError, match="constants were fitted on 1 of the rows"):
            check_cases([a_case(row_id, vtrain.ALL)])
    check_cases([a_case(seen + SUFFIX, GROUP)])


def test_a_case_in_both_groups_answers_for_both_fits() -> None:
    for seen in (sorted(SHIPPED - OWN)[0], sorted(OWN - SHIPPED)[0]):
        assert saw(seen, (GROUP, vtrain.ALL))


def test_every_other_row_is_a_case_and_none_that_was_seen(tmp_path: Path) -> None:
    folder = tmp_path / "measured_runs"
    folder.mkdir()
    numbers = [profile_file().rows[0], max(profile_file().rows) + 1, int(sorted(SHIPPED - OWN)[0].partition("#")[2])]
    columns = list(row(1))
    lines = [["source", *columns], *([vtrain.SOURCE, *map(str, row(number).values())] for number in numbers)]
    (folder / "dev.csv").write_text("\n".join(",".join(line) for line in lines) + "\n")
    entries = list(vtrain_inferred.cases(tmp_path))
    cases = [entry for entry in entries if isinstance(entry, Case)]
    assert [case.row_id for case in cases] == [f"{ID}{number}{SUFFIX}" for number in numbers[1:]]
    assert [entry.num_rows for entry in entries if isinstance(entry, Skipped)] == [1]
    check_cases(cases)
    assert run_case(cases[0]).iteration_time_s > 0


# What it changes


def test_the_cases_have_none_of_the_constants_that_other_rows_were_fitted_on() -> None:
    """Of runtime and curves exactly what the list calls replaced differs from what is shipped."""
    given = row(1, tp=2)
    shipped, own = vtrain.case_of(given).problem(), vtrain_inferred.problem_of_row(given)
    changed = {
        each.name for each in fields(shipped.runtime)
        if getattr(shipped.runtime, each.name) != getattr(own.runtime, each.name)
    }  # fmt: skip
    assert changed == {
        "host_seconds_per_kernel", "host_seconds_per_operator", "host_seconds_per_pass", "host_seconds_per_collective",
    }  # fmt: skip
    before, after = (curves_of(each.hardware.cluster.nodes[0].gpu).matmul["fp16"] for each in (shipped, own))
    fraction = profile_file().host["misaligned"]
    assert after == before.model_copy(update={"misaligned_fraction": fraction}) and after != before


def test_each_kind_of_part_has_its_factor_and_others_have_none() -> None:
    kinds = {(hidden, tp, microbatch) for hidden in (1024, 2048) for tp in (1, 2, 4, 8) for microbatch in (1, 2, 4, 8)}
    assert {(part.shape, part.tensor_size, part.samples) for part in factors()} == {
        (vtrain_inferred.shape_of(hidden), tp, microbatch) for hidden, tp, microbatch in kinds
    }
    assert len(factors()) == len(BLOCKS) * len(kinds) and all(0.5 < factor < 2 for factor in factors().values())
    assert vtrain_inferred.problem_of_row(row(1, hidden=512)).hardware.operator_profile.rows == ()  # type: ignore[union-attr]


def test_rows_on_the_profile_are_within_the_target() -> None:
    """Every fifteenth reported row; the accuracy command has all."""
    cases = [entry for entry in vtrain_inferred.cases(data_folder(None)) if isinstance(entry, Case)][::15]
    if not cases:
        pytest.skip("vTrain's rows are not here; set WINDTUNNEL_DATA to a folder that holds them")
    errors = [run_case(case).time_error or 0.0 for case in cases]
    assert sum(map(abs, errors)) / len(errors) < 0.05
