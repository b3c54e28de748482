"""AMP (NeurIPS 2022): its published trials."""

from __future__ import annotations

from experiments.reproduce.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        "amp-trials",
        "Every trial on 16 T4s: AMP's estimate, its formula on our tables, our simulator, measured.",
        "Li et al., NeurIPS 2022, src/results of its repository",
        "experiments.reproduce.amp.trials:run",
    ),
)
