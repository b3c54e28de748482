"""DAPPLE's Table 5: BERT-48 on two stages, GPipe against DAPPLE's early backward, with and without recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from datafiles.tables import load_table
from datafiles.words import counted
from experiments.cases.case import PRINTED, Case, Measured, Skipped, problem_of, uniform
from simulator.plan import Plan
from simulator.problem import Problem
from workloads.registry import model_spec

GROUPS = ("dapple-table5",)
SOURCE = "DAPPLE (PPoPP 2021), Table 5"
MICROBATCH = 2
MODEL = model_spec("bert-48").model_copy(update={"vocab_multiple": 1})
"""Its vocabulary is not padded: nothing is split by tensors."""


def cases(data: Path | None) -> Iterator[Case | Skipped]:
    """Yield the eleven rows; nothing is read from ``data``."""
    table = load_table(
        PRINTED / "dapple_table5.csv",
        integers=("row", "num_microbatches"),
        floats=("throughput_samples_per_s", "average_peak_gb"),
    )
    for row in table:
        count, throughput = row["num_microbatches"], row["throughput_samples_per_s"]
        yield Case(
            row_id=f"dapple_table5.csv#{row['row']}",
            groups=GROUPS,
            problem=problem_of(
                model=MODEL,
                cluster="v100-1gpu-25g:2x1",
                runtime="dapple-tensorflow",
                global_batch=MICROBATCH * count,
            ),
            plan=_plan(row["schedule"], recomputes=row["recompute"] == "full"),
            measured=Measured(
                iteration_time_s=MICROBATCH * count / throughput if throughput else None,
                out_of_memory=throughput is None,
                peak_bytes=row["average_peak_gb"] * 1e9 if row["average_peak_gb"] else None,
                peak_is_average=True,
            ),
            source=SOURCE,
            rivals=counted(count, "microbatch", "microbatches") if throughput else None,
            features={"schedule": row["schedule"], "recompute": row["recompute"], "microbatches": count},
        )


def _plan(schedule: str, *, recomputes: bool) -> Callable[[Problem], Plan]:
    """Return the rule for two equal stages; recomputation keeps what enters a stage and runs all of it again.

    Source:
        Section 6.4: activations are stored at the partition boundaries only, as in GPipe.
    """

    def plan(problem: Problem) -> Plan:
        chosen = uniform(pp=2, microbatch=MICROBATCH, schedule=schedule)(problem)
        if not recomputes:
            return chosen
        return replace(chosen, stages=tuple(replace(stage, recompute=stage.operators) for stage in chosen.stages))

    return plan
