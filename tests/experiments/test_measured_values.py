"""What a table says was measured: in the unit that it must be, and above nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.cases import megatron_dgx2, megatron_sc21
from experiments.cases.case import Case, Measured


@pytest.mark.parametrize("value", [0.0, -5.0, float("nan"), float("inf")])
def test_what_was_measured_is_above_nothing(value: float) -> None:
    case = next(entry for entry in megatron_sc21.cases(None) if isinstance(entry, Case))
    for measured in (Measured(iteration_time_s=value), Measured(peak_bytes=value)):
        with pytest.raises(ValueError, match=r"#\S+: (iteration_time_s|peak_bytes) must be above 0"):
            replace(case, measured=measured)


@pytest.mark.parametrize(("cells", "got"), [("-5,ms", "-5.0 ms"), ("3,furlong", "3.0 furlong"), (",ms", "None ms")])
def test_a_measured_value_in_another_unit_or_none_is_refused(tmp_path: Path, cells: str, got: str) -> None:
    folder = tmp_path / "measured_runs"
    folder.mkdir()
    names = "source,model,seq,vocab,gpu,tp,microbatch,global_batch,recompute,metric,value,unit"
    row = f"tables.tex,gpt,1024,51200,V100-SXM3,1,8,8,full,iteration_time,{cells}"
    (folder / "dev.csv").write_text(f"{names}\n{row}\n")
    with pytest.raises(ValueError, match=f"dev.csv#0: value must be a number of ms above 0, got {got}"):
        list(megatron_dgx2.cases(tmp_path))
