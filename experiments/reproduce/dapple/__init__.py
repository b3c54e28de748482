"""DAPPLE (PPoPP 2021), and the planners it is compared with: its figures and tables."""

from __future__ import annotations

from experiments.reproduce.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = ()
