"""Aceso (EuroSys 2024): its figures and tables."""

from __future__ import annotations

from experiments.reproduce.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = ()
