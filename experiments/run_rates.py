"""Rates that tables of runs report (tokens/s, TFLOP/s of a GPU), as the iteration time they say."""

from __future__ import annotations

import re
from collections.abc import Callable

from simulator.plan import Plan
from simulator.problem import Problem
from workloads.models.fields import ModelSpec
from workloads.models.gpt import GPTSpec

METRICS = ("iteration_time", "tokens_per_s", "samples_per_s", "tflops_per_gpu")
"""What ``value`` may be, named by the column ``metric``; an iteration time in ``unit`` s or ms."""
UNITS = {
    "tokens_per_s": ("tokens/s of all GPUs", r"tok(en)?s?(/s|/sec| ?per s)"),
    "samples_per_s": ("samples/s of all GPUs", r"(sample|seq(uence)?|im(a)?g(e)?)s?(/s|/sec| ?per s)"),
    "tflops_per_gpu": ("TFLOP/s of one GPU", r"tflops?(/s|/sec)?(/(gpu|device))?"),
}
"""What a rate is counted in, and what tables write for it; without a ``unit`` it is taken to be that."""


def iteration_s(
    metric: str, value: float, unit: str | None, problem: Problem, plan: Plan, flop: Callable[[], float]
) -> float:
    """Return the iteration time that a value of a metric says.

    Args:
        metric: One of ``METRICS``.
        value: Above 0.
        unit: As the table writes it, if it does.
        problem, plan: What was run.
        flop: Returns what the rate counts of one iteration; asked for ``tflops_per_gpu`` alone.

    Raises:
        ValueError: If there is no such metric, the unit is not its own, or the GPU cannot be as quick.
    """
    if metric == "iteration_time":
        if unit is not None and unit.lower() not in ("s", "ms"):
            raise ValueError(f"unit of an iteration time must be s or ms, got {unit!r}")
        return value / 1e3 if unit is not None and unit.lower() == "ms" else value
    if metric in UNITS and unit is not None:
        words, known = UNITS[metric]
        if not re.fullmatch(known, unit.lower()):
            raise ValueError(f"unit of {metric} must be {words}, got {unit!r}")
    samples = plan.global_batch
    if metric == "samples_per_s":
        return samples / value
    if metric == "tokens_per_s":
        if not problem.workload.tokens_per_sample:
            name = problem.workload.name
            raise ValueError(f"tokens_per_s needs a model with tokens, which {name} has not; give samples_per_s")
        return samples * problem.workload.tokens_per_sample / value
    if metric == "tflops_per_gpu":
        dtype = problem.runtime.implementation.dtype
        peak = max(node.gpu.peak(dtype) for node in problem.hardware.cluster.nodes) / 1e12
        if value > peak:
            raise ValueError(f"tflops_per_gpu must be at most the GPU's peak of {peak:g} in {dtype}, got {value:g}")
        return flop() / (len(plan.devices) * value * 1e12)
    raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")


def published_flop(spec: ModelSpec | None, samples: int, *, recompute: bool) -> float:
    """Return the FLOP of an iteration that a published rate counts.

    Args:
        spec: Shape of the model; None of a layer profile.
        samples: Of the iteration.
        recompute: Whether every layer is computed again for backward.

    Raises:
        ValueError: If the model is no GPT.

    Source:
        Narayanan et al., SC 2021, Equation 3, with full recomputation; Korthikanti et al. 2022, Equation 7, else.
    """
    if not isinstance(spec, GPTSpec):
        raise ValueError("tflops_per_gpu has a published formula for GPT alone; give iteration_time_s")
    passes = 4 if recompute else 3
    layers = 24.0 * passes * spec.layers * spec.hidden**2 * (1 + spec.seq_len / (6 * spec.hidden))
    return samples * spec.seq_len * (layers + 6.0 * spec.hidden * spec.vocab)
