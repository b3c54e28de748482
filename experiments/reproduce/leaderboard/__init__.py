"""The leaderboard: every searcher on the same problems, judged by one simulator."""

from __future__ import annotations

from experiments.reproduce.experiment import Experiment

_HERE = "experiments.reproduce.leaderboard"

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        "leaderboard",
        "Every searcher on the same problems under one budget, judged by the simulator.",
        "problems of the papers; experiments/reproduce/leaderboard/problems.yaml",
        f"{_HERE}.run:run",
    ),
    Experiment(
        "leaderboard-time",
        "The same with a budget of wall-clock seconds.",
        "as leaderboard",
        f"{_HERE}.run:run_timed",
    ),
    Experiment(
        "leaderboard-ablations",
        "Which of the leaderboard's conclusions change when the simulator leaves an effect out.",
        "as leaderboard",
        f"{_HERE}.ablations:run",
        shares="leaderboard",
    ),
    Experiment(
        "leaderboard-objective",
        "Searchers with the simulator as objective instead of their own formula.",
        "as leaderboard",
        f"{_HERE}.objective:run",
        shares="leaderboard",
    ),
)
