"""Aceso (EuroSys 2024): its figures and tables."""

from __future__ import annotations

from experiments.reproduce.experiment import Experiment

_PAPER = "Aceso (EuroSys 2024)"
_HERE = "experiments.reproduce.aceso"

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment("aceso-fig1", "How many configurations there are.", f"{_PAPER}, Figure 1", f"{_HERE}.fig1:run"),
    Experiment(
        "aceso-exp1", "Throughput of Aceso's plans and Megatron-LM's.", f"{_PAPER}, Figure 7, Tables 3 and 4",
        f"{_HERE}.exp1:run",
    ),
    Experiment("aceso-exp2", "What the search costs.", f"{_PAPER}, Figure 8", f"{_HERE}.exp2:run"),
    Experiment("aceso-exp3", "Planning 8 to 1,024 layers.", f"{_PAPER}, Figure 9", f"{_HERE}.exp3:run"),
    Experiment("aceso-exp4", "Dynamic programming and Aceso.", f"{_PAPER}, Figure 10", f"{_HERE}.exp4:run"),
    Experiment("aceso-exp5", "Do the two heuristics help?", f"{_PAPER}, Figures 11 and 12", f"{_HERE}.exp5:run"),
    Experiment("aceso-exp6", "Convergence by the longest chain.", f"{_PAPER}, Figure 13", f"{_HERE}.exp6:run"),
    Experiment("aceso-exp7", "Convergence by the start.", f"{_PAPER}, Figure 14", f"{_HERE}.exp7:run"),
    Experiment("aceso-exp8", "Predicted and measured time.", f"{_PAPER}, Figure 15", f"{_HERE}.exp8:run"),
    Experiment("aceso-exp9", "Predicted and measured memory.", f"{_PAPER}, Figure 16", f"{_HERE}.exp8:run_memory"),
)  # fmt: skip
