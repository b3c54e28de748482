"""All experiments by name."""

from __future__ import annotations

from datafiles.names import nearest
from experiments.reproduce import aceso, alpa_mpe, amp, cost_models, dapple, galvatron, leaderboard
from experiments.reproduce.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for paper in (aceso, galvatron, dapple, alpa_mpe, amp, leaderboard, cost_models)
    for experiment in paper.EXPERIMENTS
}


def experiments_named(name: str) -> tuple[Experiment, ...]:
    """Return the experiment of that name; ``all`` for every one, ``aceso`` for all whose name begins so.

    Raises:
        ValueError: If there is none.
    """
    if name == "all":
        return tuple(EXPERIMENTS.values())
    if name in EXPERIMENTS:
        return (EXPERIMENTS[name],)
    found = tuple(each for each in EXPERIMENTS.values() if each.name.startswith(f"{name}-"))
    if not found:
        raise ValueError(f"unknown experiment {name!r}; {nearest(name, tuple(EXPERIMENTS))}")
    return found
