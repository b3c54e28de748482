"""vTrain's measured single-node runs: GPTs of hidden 1024 and 2048 on up to eight A100s.

How the table is read (``docs/residuals.md`` has the errors under each reading):

- A microbatch more, or a layer more, costs the same to the last bit in all rows that differ in nothing else. Whole runs
  do not repeat so well: the rows are sums of parts that were timed one by one. Hence the runtime
  ``megatron-deepspeed-timed``, whose host never runs ahead.
- The source names a vocabulary of 50257. Unsplit, the head takes twice as long as aligned products would; split in two
  it does not, and Megatron pads what it splits.
- The source's configuration says full recomputation. A sample more adds to a layer what one takes that recomputes its
  attention alone; with all of it hidden 2048 would reach 232 Tflop/s, more than the matrix products by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datafiles.tables import load_table
from experiments.cases.case import Case, Measured, Skipped, data_file, in_unit, problem_of, uniform
from workloads.models.gpt import GPTSpec

IN_DISTRIBUTION, OTHER_TENSOR, OTHER_HIDDEN = "vtrain-in-distribution", "vtrain-tp-4-8", "vtrain-hidden-2048"
ALL = "vtrain-single-node"
GROUPS = (ALL, IN_DISTRIBUTION, OTHER_TENSOR, OTHER_HIDDEN)
SOURCE = "vTrain data/ground_truth_single.csv"
TABLE = "measured_runs/dev.csv"
CALIBRATION_EVERY = 4
CLUSTER, RUNTIME, RECOMPUTE = "a100-80g-dgx:1x8", "megatron-deepspeed-timed", "selective"
PADDED_TO = 128
"""Megatron pads a vocabulary that it splits to this times the tensor-parallel degree."""


def is_calibration(row: dict[str, Any]) -> bool:
    """Return whether constants may be fitted on a row: it is then never reported.

    Every fourth row of its file among those of hidden 1024 and tensor-parallel 1 or 2, under a tenth of all.
    So hidden 2048 and tensor-parallel 4 and 8 are out of distribution whatever is fitted.
    """
    return (
        row["hidden"] == 1024 and row["tp"] <= 2 and row_number(row["notes"]) % CALIBRATION_EVERY == 0
    )  # fmt: skip


def row_number(notes: str) -> int:
    """Return the row of vTrain's own file that a note names.

    >>> row_number("1F1B; Megatron-DeepSpeed; CSV row 12")
    12
    """
    found = re.search(r"CSV row (\d+)$", notes)
    if found is None:
        raise ValueError(f"notes must end in the row of vTrain's file (CSV row 12), got {notes!r}")
    return int(found[1])


def rows(data: Path) -> list[dict[str, Any]]:
    """Return vTrain's rows of the table of measured runs."""
    integers = ("layers", "hidden", "heads", "seq", "vocab", "gpus", "tp", "pp", "dp", "microbatch", "global_batch")
    table = load_table(data / TABLE, floats=("value",), integers=integers)
    return [row for row in table if row["source"] == SOURCE]


def spec_of(row: dict[str, Any]) -> GPTSpec:
    """Return the model of a row."""
    return GPTSpec(
        name=row["model"],
        layers=row["layers"],
        hidden=row["hidden"],
        heads=row["heads"],
        seq_len=row["seq"],
        vocab=row["vocab"],
        vocab_multiple=PADDED_TO * row["tp"] if row["tp"] > 1 else 1,
    )


def case_of(row: dict[str, Any]) -> Case:
    """Return the case of one row, calibration rows included."""
    hidden, tp = row["hidden"], row["tp"]
    groups = [ALL]
    if hidden == 1024 and tp <= 2:
        groups.append(IN_DISTRIBUTION)
    if tp > 2:
        groups.append(OTHER_TENSOR)
    if hidden == 2048:
        groups.append(OTHER_HIDDEN)
    row_id = f"vtrain/ground_truth_single.csv#{row_number(row['notes'])}"
    return Case(
        row_id=row_id,
        groups=tuple(groups),
        problem=problem_of(
            model=spec_of(row),
            cluster=CLUSTER,
            runtime=RUNTIME,
            global_batch=row["global_batch"],
        ),
        plan=uniform(tp=tp, pp=row["pp"], dp=row["dp"], microbatch=row["microbatch"], recompute=RECOMPUTE),
        measured=Measured(iteration_time_s=in_unit(row, "ms", row_id) / 1e3, out_of_memory=False),
        source=SOURCE,
        rivals=f"{row['model']} on {row['gpus']} GPUs, batch {row['global_batch']}",
        features={
            "hidden": hidden, "layers": row["layers"], "tp": tp, "pp": row["pp"], "dp": row["dp"],
            "microbatch": row["microbatch"], "batch": row["global_batch"],
        },
    )  # fmt: skip


def cases(data: Path | None) -> Iterator[Case | Skipped]:
    """Yield every row that constants may not be fitted on."""
    path = data_file(data, TABLE, GROUPS)
    if isinstance(path, Skipped):
        yield path
        return
    assert data is not None
    held_out = 0
    for row in rows(data):
        if is_calibration(row):
            held_out += 1
        else:
            yield case_of(row)
    yield Skipped((ALL, IN_DISTRIBUTION), held_out, "calibration rows")
