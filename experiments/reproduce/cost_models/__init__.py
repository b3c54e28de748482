"""What searchers minimise, beside the simulator."""

from __future__ import annotations

from experiments.reproduce.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        "cost-models",
        "Every searcher's own estimate of the same plans, time and memory, beside the simulator's.",
        "the papers that the searchers are from",
        "experiments.reproduce.cost_models.table:run",
    ),
)
