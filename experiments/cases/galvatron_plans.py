"""Plans that Galvatron's first release ships under the names of Table II's cells: what was run, and how fast it was.

The files are named by GPUs, model and memory budget, and hold the batch that Table II prints for "Galvatron".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from experiments.cases.case import Case, Measured, Skipped, data_file
from experiments.cases.galvatron_table2 import Run
from searchers.galvatron.import_plan import import_plan
from simulator.plan import Plan
from simulator.problem import Problem

GROUP = "galvatron-released-plans"
SOURCE = "Galvatron 1 release (plans); Galvatron-BMW (TKDE), Table II (throughput)"
FOLDER = "galvatron/plans"

# File, model, memory GB, batch; printed samples per second.
ROWS = (
    ("v1_bert__galvatron_config_8gpus_1280hidden_32layers_8G_full.json", "bert-huge-32", 8, 8, 8.16),
    ("v1_bert__galvatron_config_8gpus_1280hidden_32layers_12G_full.json", "bert-huge-32", 12, 16, 11.39),
    ("v1_swin__galvatron_config_8gpus_320embeddim_2_2_26_2_layers_8G_full.json", "swin-huge-32", 8, 48, 31.33),
    ("v1_swin__galvatron_config_8gpus_320embeddim_2_2_26_2_layers_12G_full.json", "swin-huge-32", 12, 64, 41.69),
)


def cases(data: Path | None) -> Iterator[Case | Skipped]:
    """Yield one case per plan file."""
    folder = data_file(data, FOLDER, (GROUP,))
    if isinstance(folder, Skipped):
        yield Skipped((GROUP,), len(ROWS), folder.reason)
        return
    for name, model, memory_gb, batch, throughput in ROWS:
        run = Run(model=model, cluster="titan-rtx-pcie:1x8", memory_gb=memory_gb)

        def plan(problem: Problem, path: Path = folder / name) -> Plan:
            return import_plan(path, problem)

        yield Case(
            row_id=f"{FOLDER}/{name}#1",
            groups=(GROUP,),
            problem=lambda run=run, batch=batch: run.problem(batch),  # type: ignore[misc]
            plan=plan,
            measured=Measured(iteration_time_s=batch / throughput, out_of_memory=False),
            source=SOURCE,
            features={"model": model, "memory GB": memory_gb, "batch": batch},
        )
