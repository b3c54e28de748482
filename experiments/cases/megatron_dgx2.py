"""Megatron-LM of 2019 and 2020 on DGX-2: tensor parallelism over 1 to 8 V100s, eight samples, one iteration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from datafiles.tables import load_table
from experiments.cases.case import Case, Measured, Skipped, data_file, in_unit, problem_of, uniform
from workloads.models.gpt import GPTSpec

GROUPS = ("megatron-dgx2",)
TABLE = "measured_runs/dev.csv"
SHAPES = {1: (24, 1920, 15), 2: (30, 2304, 18), 4: (36, 3072, 24), 8: (42, 4096, 32)}
"""Layers, hidden size, heads by tensor-parallel degree (Megatron-LM images/tables.tex of 2020-09)."""


def cases(data: Path | None) -> Iterator[Case | Skipped]:
    """Yield the rows that give an iteration time."""
    path = data_file(data, TABLE, GROUPS)
    if isinstance(path, Skipped):
        yield path
        return
    integers = ("seq", "vocab", "tp", "microbatch", "global_batch")
    for number, row in enumerate(load_table(path, floats=("value",), integers=integers)):
        if not row["gpu"].startswith("V100-SXM3") or row["metric"] != "iteration_time":
            continue
        layers, hidden, heads = SHAPES[row["tp"]]
        spec = GPTSpec(
            name=row["model"],
            layers=layers,
            hidden=hidden,
            heads=heads,
            seq_len=row["seq"],
            vocab=row["vocab"],
        )
        row_id = f"{TABLE}#{number}"
        yield Case(
            row_id=row_id,
            groups=GROUPS,
            problem=problem_of(
                model=spec,
                cluster=f"dgx2-v100:1x{row['tp']}",
                runtime="megatron-lm-2021",
                global_batch=row["global_batch"],
            ),
            plan=uniform(tp=row["tp"], microbatch=row["microbatch"], recompute=row["recompute"]),
            measured=Measured(iteration_time_s=in_unit(row, "ms", row_id) / 1e3, out_of_memory=False),
            source=row["source"],
            features={"tp": row["tp"], "hidden": hidden, "year": "2020" if "tables.tex" in row["source"] else "2019"},
        )
