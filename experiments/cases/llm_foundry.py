"""MosaicML llm-foundry's benchmark table: MPT models with FSDP on A100-80GB, 512 to 65,536 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from datafiles.tables import load_table
from experiments.cases.case import Case, Measured, Skipped, cluster_string, data_file, in_unit, problem_of, uniform
from workloads.models.gpt import GPTSpec

GROUPS = ("llm-foundry-fsdp",)
TABLE = "measured_runs/dev.csv"


def cases(data: Path | None) -> Iterator[Case | Skipped]:
    """Yield one case per row."""
    path = data_file(data, TABLE, GROUPS)
    if isinstance(path, Skipped):
        yield path
        return
    integers = ("layers", "hidden", "heads", "ffn", "vocab", "seq", "gpus", "dp", "zero", "microbatch", "global_batch")
    for number, row in enumerate(load_table(path, floats=("value",), integers=integers)):
        if not row["source"].startswith("llm-foundry"):
            continue
        spec = GPTSpec(
            name=f"{row['model']}-{row['seq']}",
            layers=row["layers"],
            hidden=row["hidden"],
            heads=row["heads"],
            seq_len=row["seq"],
            vocab=row["vocab"],
            dropout=0.0,
            attention_dropout=0.0,
        )
        row_id = f"{TABLE}#{number}"
        yield Case(
            row_id=row_id,
            groups=GROUPS,
            problem=problem_of(
                model=spec,
                cluster=cluster_string("a100-80g-dgx", row["gpus"], 8),
                runtime="composer-fsdp",
                global_batch=row["global_batch"],
            ),
            plan=uniform(
                dp=row["dp"], microbatch=row["microbatch"], zero=row["zero"], recompute=row["recompute"]
            ),
            measured=Measured(
                iteration_time_s=row["global_batch"] * row["seq"] / in_unit(row, "tok/s", row_id), out_of_memory=False
            ),
            source=row["source"],
            features={
                "model": row["model"], "tokens": row["seq"], "gpus": row["gpus"],
                "microbatch": row["microbatch"], "recompute": row["recompute"],
                "accumulation": row["global_batch"] // (row["microbatch"] * row["dp"]),
            },
        )  # fmt: skip
