"""Megatron-LM on A100s: Table 1 of SC 2021, 1.7 to 1,008 billion parameters on 32 to 3,072 GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from datafiles.tables import load_table
from experiments.cases.case import PRINTED, Case, Measured, Skipped, cluster_string, problem_of, uniform
from workloads.models.gpt import GPTSpec
from workloads.registry import model_spec

GROUPS = ("megatron-sc21-table1",)
SOURCE = "Narayanan et al., SC 2021, Table 1"


def cases(data: Path | None) -> Iterator[Case | Skipped]:
    """Yield the ten rows; nothing is read from ``data``."""
    columns = ("row", "num_gpus", "tp", "pp", "dp", "virtual_stages", "microbatch", "global_batch")
    table = load_table(PRINTED / "megatron_sc21_table1.csv", integers=columns, floats=("tflop_per_s_per_gpu",))
    for row in table:
        spec = model_spec(row["model"])
        assert isinstance(spec, GPTSpec)
        flop = reported_flop(spec, row["global_batch"])
        rate = row["num_gpus"] * row["tflop_per_s_per_gpu"] * 1e12
        chunks = row["virtual_stages"]
        yield Case(
            row_id=f"megatron_sc21_table1.csv#{row['row']}",
            groups=GROUPS,
            problem=problem_of(
                model=row["model"],
                cluster=cluster_string("a100-80g-dgx", row["num_gpus"], 8),
                runtime="megatron-lm-2021",
                global_batch=row["global_batch"],
            ),
            plan=uniform(
                tp=row["tp"],
                pp=row["pp"],
                dp=row["dp"],
                microbatch=row["microbatch"],
                recompute="full",
                schedule="interleaved" if chunks > 1 else "1f1b",
                chunks=chunks,
            ),
            measured=Measured(iteration_time_s=flop / rate, out_of_memory=False),
            source=SOURCE,
            features={
                "model": row["model"], "tp": row["tp"], "pp": row["pp"], "virtual stages": chunks,
                "microbatch": row["microbatch"],
            },
        )  # fmt: skip


def reported_flop(spec: GPTSpec, global_batch: int) -> float:
    """Return the FLOP of one iteration that the paper's TFLOP/s count, recomputation included.

    Source:
        Narayanan et al., SC 2021, Equation 3: 96 B s l h^2 (1 + s / 6h + V / 16 l h).
    """
    return (
        96.0 * global_batch * spec.seq_len * spec.layers * spec.hidden**2
        * (1 + spec.seq_len / (6 * spec.hidden) + spec.vocab / (16 * spec.layers * spec.hidden))
    )  # fmt: skip
