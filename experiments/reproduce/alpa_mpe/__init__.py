"""Alpa (OSDI 2022) and MPE: their figures and tables."""

from __future__ import annotations

from experiments.reproduce.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = ()
