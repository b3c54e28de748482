"""DAPPLE (PPoPP 2021), and the planners it is compared with: its figures and tables."""

from __future__ import annotations

from experiments.reproduce.experiment import Experiment

_PAPER = "DAPPLE (PPoPP 2021)"
_HERE = "experiments.reproduce.dapple"


def _experiment(name: str, shows: str, where: str, run: str) -> Experiment:
    return Experiment(f"dapple-{name}", shows, f"{_PAPER}, {where}", f"{_HERE}.{run}")


EXPERIMENTS: tuple[Experiment, ...] = (
    _experiment("table1", "Parameters and memory of the benchmarks.", "Table 1", "table1:run"),
    _experiment("table3", "Warm-up P_B against P_A.", "Table 3", "table3:run"),
    _experiment("table4", "Plans of the planner on clusters A, B and C.", "Table 4", "table4:run"),
    _experiment("table5", "Early backward against GPipe on BERT-48.", "Table 5", "table5:run"),
    _experiment("table6", "Strategies of DAPPLE and PipeDream.", "Table 6", "table6:run"),
    _experiment("table7", "The largest BERT on 1 to 8 GPUs.", "Table 7", "table7:run"),
    _experiment("fig3", "Memory over time of GPipe and early backward.", "Figure 3", "fig3:run"),
    _experiment("fig5", "The three placement policies.", "Figure 5", "figures:fig5"),
    _experiment("fig7", "Uneven cuts of small pipelines.", "Figure 7", "figures:fig7"),
    _experiment("fig8", "Slices of a microbatch against round robin.", "Figure 8", "figures:fig8"),
    _experiment("fig10", "Control edges of early backward.", "Figure 10", "figures:fig10"),
    _experiment("fig11", "Speedups of hybrids and of data parallelism.", "Figure 11", "fig11:run"),
    _experiment("fig12", "Speedups of DAPPLE's and PipeDream's plans.", "Figure 12", "table6:fig12"),
    _experiment("formula", "The latency formula against exact replays.", "Section 4.1", "formula_error:run"),
)
