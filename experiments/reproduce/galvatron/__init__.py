"""Galvatron-BMW: its figures and tables."""

from __future__ import annotations

from experiments.reproduce.experiment import Experiment

PAPER = "Galvatron-BMW (TKDE 2024)"
FOLDER = "experiments.reproduce.galvatron"

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        name="galvatron-table2",
        shows="Eleven strategies on eight RTX TITANs within four memory budgets, 352 cells.",
        source=f"{PAPER}, Table II",
        run=f"{FOLDER}.table2:run",
    ),
)
