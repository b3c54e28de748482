"""What would change Table II's errors: the plans that the release's times choose, gathering once, another overlap.

For every printed cell, at its batch, the mean absolute difference of throughput (and the bias) of

- plans by our cost tables, as ``galvatron-table2`` has them;
- plans by the first release's times, where the release planned (DP+TP, DP+PP, Galvatron);
- those with sharded parameters gathered once an iteration in pipelines;
- the release's own estimates of them.

``--overlap FACTOR`` puts another overlap factor in place of the GPU type's. Only to look: nothing here is chosen by it.

Run: ``python -m experiments.galvatron_candidates``; some minutes
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from experiments.cases.galvatron_table2 import NUM_GPUS, SEARCHED, Run, planner_options
from experiments.reproduce.galvatron.cells import TITLES, at_batch
from experiments.reproduce.galvatron.table2 import MEMORIES, MODELS, STRATEGIES, printed_cells
from searchers.galvatron.judged import judged_plan
from simulator.simulate import simulate

RELEASED = ("galvatron-dp-tp", "galvatron-dp-pp", "galvatron")
"""The systems of the conference version, which the first release holds."""


def released(run: Run, strategy: str, batch: int, throughput: float) -> tuple[float, float, float] | None:
    """Return the differences of a plan by the release's times: simulated, gathered once, and as it estimates."""
    judged = judged_plan(
        run.problem,
        replace(planner_options(strategy, run.num_gpus), time="released"),
        lambda planner: planner.best(batch),
        run.profiles,
    )
    if judged is None:
        return None
    plan = judged.plan if len(judged.plan.stages) == 1 else replace(judged.plan, reshard_after_forward=False)
    once = simulate(plan, run.problem(batch), engine="compiled").samples_per_s
    found = (judged.throughput, once, judged.found.throughput)
    return found[0] / throughput - 1, found[1] / throughput - 1, found[2] / throughput - 1


def line(name: str, differences: Sequence[float]) -> str:
    """Return the mean absolute difference and the bias, in words."""
    found = np.array(differences)
    return f"  {name}: {np.abs(found).mean():.1%} ({found.mean():+.1%}), {len(found)} cells"


def main() -> None:
    """Print the differences, strategy by strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overlap", type=float, help="overlap factor, 1.3 as released")
    overlap = parser.parse_args().overlap
    printed = printed_cells()
    for strategy in STRATEGIES:
        tables, others = [], []
        for memory_gb in MEMORIES:
            for model in MODELS:
                cell = printed[memory_gb, model, strategy]
                if cell.throughput is None or cell.batch is None:
                    continue
                run = Run(model=model, cluster=f"titan-rtx-pcie:1x{NUM_GPUS}", memory_gb=memory_gb, overlap=overlap)
                own = at_batch(run, strategy, cell.batch).throughput
                if own is not None:
                    tables.append(own / cell.throughput - 1)
                if strategy in RELEASED:
                    found = released(run, strategy, cell.batch, cell.throughput)
                    others += [found] if found is not None else []
        print(TITLES[strategy])
        print(line("plans by our cost tables" if strategy in SEARCHED else "simulated", tables))
        for name, differences in zip(
            ("plans by the release's times", "gathered once", "the release's estimates"), zip(*others, strict=True),
            strict=bool(others),
        ):  # fmt: skip
            print(line(name, differences), flush=True)


if __name__ == "__main__":
    main()
