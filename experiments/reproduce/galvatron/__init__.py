"""Galvatron-BMW: its figures and tables."""

from __future__ import annotations

from experiments.reproduce.experiment import Experiment

PAPER = "Galvatron-BMW (TKDE 2024)"
FOLDER = "experiments.reproduce.galvatron"

EXPERIMENTS: tuple[Experiment, ...] = tuple(
    Experiment(name=f"galvatron-{name}", shows=shows, source=f"{PAPER}, {where}", run=f"{FOLDER}.{run}")
    for name, shows, where, run in (
        ("table1", "Parameters and activations of the fifteen models.", "Table I", "table1:run"),
        (
            "table2",
            "Eleven strategies on eight RTX TITANs within four memory budgets, 352 cells.",
            "Table II",
            "table2:run",
        ),
        ("table3", "Eleven strategies on 16 RTX TITANs and on 16 A100s.", "Table III", "other_tables:table3"),
        ("table4", "Eleven strategies on 64 A100s.", "Table IV", "other_tables:table4"),
        (
            "table5",
            "Memory-, time- and bi-objectively balanced pipelines on 16 A100s.",
            "Table V",
            "table5:run",
        ),
        ("table6", "Alpa and eleven strategies for GPT-3 models on 32 A100-80GB.", "Table VI", "other_tables:table6"),
        ("fig4", "Balanced pipelines as boxes: memory and time of every stage.", "Figure 4", "fig4:run"),
        ("fig5", "Search time over layers, memory, strategies and devices.", "Figure 5", "fig5:run"),
        ("fig6", "The plans found for three cases, drawn.", "Figure 6", "fig6:run"),
        ("fig7", "Estimation error with and without the overlap slowdown.", "Figure 7", "fig7:run"),
    )
)
