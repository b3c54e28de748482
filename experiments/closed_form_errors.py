"""How far the closed forms of time and memory are from the simulator, on random uniform plans.

Models, clusters, runtimes, degrees, ZeRO levels, schedules and how gradients are reduced are drawn with equal odds, but
for those that stand twice in a list; what is not legal is drawn again. Nothing is fitted on these plans.

Run: ``python -m experiments.closed_form_errors --plans 1500 --seed 41 [--of memory]`` (minutes)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import islice
from random import Random
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track

from simulator.closed_forms.estimate import Estimate, estimate
from simulator.costs import CostTables
from simulator.plan import Plan
from simulator.problem import Problem, ProblemSpec
from simulator.simulate import simulate, simulate_time_s
from simulator.uniform import uniform_plan
from simulator.validate import validate

MODELS = (
    "gpt3-350m", "gpt3-1.3b", "gpt3-2.6b", "llama2-7b", "bert-large", "bert-huge-32", "t5-770m", "t5-3b", "t5-large-32",
    "vit-large", "vit-huge-32", "swin-huge-32", "wide-resnet-500m", "wide-resnet-1b", "resnet-50", "xlnet-36",
)  # fmt: skip
CLUSTERS = (
    "a100-40g-dgx:1x8", "a100-40g-dgx-100g:2x8", "a100-80g-dgx:1x8", "g4dn.12xlarge:2x4", "h100-dgx:1x8",
    "p3.16xlarge:1x8", "rtx3090-pcie:1x4", "titan-rtx-pcie:1x8", "v100-1gpu-25g:8x1", "v100-pcie-4:2x4",
    "dgx2-v100:1x16",
)  # fmt: skip
RUNTIMES = (
    "alpa", "composer-fsdp", "deepspeed-zero3-2021", "galvatron-v1", "galvatron-v1-bf16", "megatron-deepspeed",
    "megatron-lm-2021", "megatron-lm-2023", "pytorch-ddp", "pytorch-fsdp2", "windtunnel-executor",
)  # fmt: skip
PLANS_OF_A_PROBLEM = 4


class Drawn(NamedTuple):
    """A random plan, its closed forms, and how it was drawn."""

    problem: Problem
    costs: CostTables
    plan: Plan
    estimate: Estimate
    spec: ProblemSpec
    words: dict[str, Any]


def drawn_plans(random: Random) -> Iterator[Drawn]:
    """Yield legal plans without end."""
    while True:
        spec = ProblemSpec(
            random.choice(MODELS), random.choice(CLUSTERS), random.choice(RUNTIMES), random.choice((32, 64))
        )
        with suppress(ValueError):  # The runtime's attention does not suit the model.
            problem = spec.load()
            costs = CostTables(problem)
            for _ in range(PLANS_OF_A_PROBLEM):
                words = _words(random, problem.num_devices)
                with suppress(ValueError):  # Degrees that do not divide, or numbers that a GPU has no curves for.
                    plan = _plan(problem, words)
                    yield Drawn(problem, costs, plan, estimate(plan, problem, costs), spec, words)


def _plan(problem: Problem, words: dict[str, Any]) -> Plan:
    uniform = uniform_plan(problem, **{word: value for word, value in words.items() if word != "reshards"})
    return validate(replace(uniform, reshard_after_forward=words["reshards"]), problem)


def _words(random: Random, num_devices: int) -> dict[str, Any]:
    tp, pp = random.choice((1, 1, 1, 2, 4)), random.choice((1, 1, 2, 4))
    dp = max(1, num_devices // (tp * pp))
    schedule = random.choice(("1f1b", "1f1b", "gpipe", "zb-h1", "interleaved")) if pp > 1 else "1f1b"
    zero = random.choice((0, 1, 2, 3, 3)) if dp > 1 else 0
    return {
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "microbatch": random.choice((1, 2, 4)),
        "zero": zero,
        "recompute": random.choice(("none", "none", "full")),
        "schedule": schedule,
        "chunks": 2 if schedule == "interleaved" else 1,
        "gradient_reduction": random.choice(("last", "every")),
        "overlap_gradient_sync": random.random() < 0.8,
        "reshards": zero < 3 or random.random() < 0.8,
    }


def errors_of(drawn: Drawn, of: str) -> list[float]:
    """Return how far the closed form is above what the simulator finds, as shares of that.

    Args:
        drawn: The plan.
        of: ``time``, of the iteration, or ``memory``, of the largest live bytes of each stage.
    """
    if of == "time":
        seconds = simulate_time_s(drawn.plan, drawn.problem, engine="compiled", costs=drawn.costs)
        return [drawn.estimate.iteration_time_s / seconds - 1]
    simulated = simulate(drawn.plan, drawn.problem, engine="compiled", costs=drawn.costs, leave_out_periods=True)
    peaks = [0.0] * len(drawn.plan.stages)
    for memory, members in zip(simulated.memory, simulated.graph.device_members, strict=True):
        for position, stage in enumerate(drawn.plan.stages):
            if members[0] in stage.devices:
                peaks[position] = max(peaks[position], memory.peak_allocated_bytes)
    return [own / peak - 1 for own, peak in zip(drawn.estimate.peak_bytes, peaks, strict=True)]


def main() -> None:
    """Print errors by what was drawn, and the farthest of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=1500, help="how many")
    parser.add_argument("--seed", type=int, default=41, help="the same plans for the same seed")
    parser.add_argument("--of", choices=("time", "memory"), default="time", help="of iterations, or of stages' peaks")
    parser.add_argument("--json", action="store_true", help="print each plan and its error instead")
    options = parser.parse_args()
    if options.plans < 1:
        parser.error(f"--plans must be at least 1, got {options.plans}")
    plans = islice(drawn_plans(Random(options.seed)), options.plans)
    console = Console(stderr=True)
    drawn = track(plans, "plans", options.plans, console=console)
    found = [(error, each) for each in drawn for error in errors_of(each, options.of)]
    if options.json:
        print(json.dumps([{"error": error, **asdict(each.spec), **each.words} for error, each in found], indent=1))
        return
    _print("all", [error for error, _ in found])
    for word in ("zero", "schedule", "recompute", "pp", "tp", "gradient_reduction", "reshards"):
        for value in sorted({each.words[word] for _, each in found}):
            _print(f"{word} {value}", [error for error, each in found if each.words[word] == value])
    for runtime in RUNTIMES:
        _print(runtime, [error for error, each in found if each.spec.runtime == runtime])
    for error, each in sorted(found, key=lambda one: -abs(one[0]))[:10]:
        print(f"{error:+.1%}: {each.spec.model}, {each.spec.cluster}, {each.spec.runtime}, {each.words}")


def _print(name: str, errors: list[float]) -> None:
    if errors:
        print(f"{name}: {len(errors)}, {np.abs(errors).mean():.2%} ({min(errors):+.1%} to {max(errors):+.1%})")


if __name__ == "__main__":
    main()
