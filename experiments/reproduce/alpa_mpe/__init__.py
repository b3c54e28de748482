"""Alpa (OSDI 2022) and MPE (IEEE CAL 2023): their figures and tables."""

from __future__ import annotations

from experiments.reproduce.experiment import Experiment

_HERE = "experiments.reproduce.alpa_mpe"
_MPE = "Yun and Park, IEEE CAL 2023"

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment("mpe-counts", "Compilations and profiles of Alpa and MPE.", f"{_MPE}, III-A", f"{_HERE}.counts:run"),
    Experiment(
        "mpe-fig3", "The worked example of the holistic MPE.", f"{_MPE}, Fig. 3", f"{_HERE}.worked_example:run"
    ),
    Experiment(
        "mpe-fig4", "Search cost of Alpa with and without MPE.", f"{_MPE}, Fig. 4", f"{_HERE}.search_cost:run"
    ),
    Experiment(
        "mpe-fig5",
        "Error of MPE and of the naive estimator by mesh, time and peak memory.",
        f"{_MPE}, Fig. 5 and 6",
        f"{_HERE}.prediction:run",
    ),
    Experiment(
        "mpe-fig7",
        "Iteration time of the plans found with measured and with estimated stages.",
        f"{_MPE}, Fig. 7",
        f"{_HERE}.plans_found:run",
    ),
    Experiment(
        "alpa-p3",
        "GPT on p3.16xlarge, 1 to 64 GPUs: stated plans, our search, Megatron's grid.",
        "Zheng et al., OSDI 2022, Fig. 8 (its artifact's tables)",
        f"{_HERE}.p3:run",
    ),
    Experiment(
        "alpa-search-cost",
        "Accounted search cost of Alpa for the GPT models of Aceso.",
        "Aceso (EuroSys 2024), Exp#2",
        f"{_HERE}.aceso_search_cost:run",
    ),
)
