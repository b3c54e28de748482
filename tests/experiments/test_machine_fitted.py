"""Published runs on constants fitted to some of them: none of those is reported, and the draw does not see times."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.accuracy.calibration_rows import calibration_rows, saw
from experiments.accuracy.groups import groups
from experiments.cases import amp, llm_foundry
from experiments.cases.case import Case, Measured, Skipped
from experiments.cases.machine_fitted import ONE_IN, SOURCES, SUFFIX, cases, drawn, machine_fits
from experiments.cases.sources import data_folder
from hardware_models.machine_factors import FACTORS

GROUPS = list(SOURCES)
ON_SHIPPED_CONSTANTS = {"amp-fitted": amp.GROUPS, "llm-foundry-fitted": llm_foundry.GROUPS}


@pytest.mark.parametrize("group", GROUPS)
def test_the_gate_knows_every_row_that_factors_were_fitted_on(group: str) -> None:
    fit = machine_fits()[group]
    assert set(fit.rows) <= calibration_rows((group,))
    assert not set(fit.rows) & calibration_rows(ON_SHIPPED_CONSTANTS[group]), "other groups do not have the factors"
    assert all(saw(row_id + SUFFIX, (group,)) for row_id in fit.rows)
    assert set(fit.factors) == set(FACTORS) and group in groups()
    assert fit.errors["after"] < fit.errors["before"]


@pytest.mark.parametrize("group", GROUPS)
def test_without_data_its_runs_are_skipped_with_a_reason(group: str, tmp_path: Path) -> None:
    (entry,) = [entry for entry in cases(tmp_path) if group in entry.groups]
    assert isinstance(entry, Skipped)


def test_the_draw_takes_every_fifth_run_that_ended_whatever_it_took() -> None:
    def case(number: int, seconds: float | None) -> Case:
        return Case(
            row_id=str(number), groups=("x",), problem=lambda: None, plan=lambda _: None, source="x",  # type: ignore[arg-type, return-value]
            measured=Measured(iteration_time_s=seconds, out_of_memory=seconds is None),
        )  # fmt: skip

    runs = [case(number, None if number in (2, 7) else float(number + 1)) for number in range(17)]
    assert [found.row_id for found in drawn(runs)] == ["5", "11", "16"]
    slower = [case(number, None if number in (2, 7) else 9.0) for number in range(17)]
    assert [found.row_id for found in drawn(slower)] == ["5", "11", "16"]


@pytest.mark.parametrize("group", GROUPS)
def test_the_committed_rows_are_the_drawn_ones_and_the_others_are_reported_on_other_hardware(group: str) -> None:
    data = data_folder(None)
    if data is None:
        pytest.skip("needs the measured runs beside the repository")
    whole = [entry for entry in SOURCES[group](data) if isinstance(entry, Case)]
    fit = machine_fits()[group]
    assert tuple(case.row_id for case in drawn(whole)) == fit.rows
    reported = [entry for entry in cases(data) if isinstance(entry, Case) and entry.groups == (group,)]
    assert {case.row_id for case in reported} == {case.row_id + SUFFIX for case in whole} - {
        row_id + SUFFIX for row_id in fit.rows
    }
    ended = sum(case.measured.iteration_time_s is not None for case in whole)
    assert len(fit.rows) == ended // ONE_IN
    shipped, own = whole[0].problem(), reported[0].problem()
    gpu = own.hardware.cluster.gpu_types[0]
    overlap = [each.hardware.gpu(gpu).overlap_slowdown_computation - 1 for each in (shipped, own)]
    assert overlap[1] == pytest.approx(fit.factors["overlap"] * overlap[0])
