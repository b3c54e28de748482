"""Where the bottleneck is, and which primitives come first (Heuristics 1 and 2)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from searchers.aceso.balance import load_order
from searchers.aceso.configuration import Configuration
from searchers.aceso.model import PerformanceModel
from searchers.aceso.prices import Price
from searchers.aceso.primitives import PRIMITIVES, RESOURCES, Primitive

__all__ = ["consumption", "load_order", "primitive_groups", "random_groups"]


def consumption(model: PerformanceModel, configuration: Configuration, price: Price) -> list[dict[str, float]]:
    """Return what each stage consumes of each resource, as a share of what all stages do.

    Computation is what the stage's GPUs would take if they shared one GPU's work without loss; communication is
    what they take beyond that (collectives, transfers, smaller kernels); memory is the bytes where some stage does
    not fit, else the seconds that recomputation costs.
    """
    rows: list[dict[str, float]] = []
    for start, stage, found in zip(configuration.cuts, configuration.stages, price.stages, strict=False):
        ideal = model.ideal_s(stage, start, configuration.microbatch)
        rows.append(
            {
                "computation": ideal,
                "communication": max(0.0, found.time_s - found.recompute_s - ideal),
                "memory": found.recompute_s if price.fits else found.memory_bytes,
            }
        )
    totals = {name: sum(row[name] for row in rows) for name in RESOURCES}
    return [{name: row[name] / totals[name] if totals[name] else 0.0 for name in RESOURCES} for row in rows]


def searched_primitives() -> list[Primitive]:
    """Return the primitives that the search picks itself."""
    return [primitive for primitive in PRIMITIVES.values() if primitive.searched]


def primitive_groups(
    model: PerformanceModel, configuration: Configuration, price: Price, stage: int
) -> list[list[Primitive]]:
    """Return groups of primitives in the order of Heuristic 2, for the bottleneck ``stage``.

    Resources come by the share that the stage consumes. For each, first the primitives that lower it and raise no
    other resource of which the stage has more than its share, then the others that lower it; at the end the rest.
    Out of memory, only what lowers memory.
    """
    known = searched_primitives()
    if not price.fits:
        return [[primitive for primitive in known if primitive.memory < 0]]
    shares = consumption(model, configuration, price)[stage]
    average = 1.0 / len(configuration.stages)
    groups: list[list[Primitive]] = []
    seen: set[str] = set()
    for resource in sorted(RESOURCES, key=lambda name: -shares[name]):
        lowering = [each for each in known if each.effect(resource) < 0 and each.name not in seen]
        harmless = [
            each
            for each in lowering
            if not any(each.effect(other) > 0 and shares[other] > average for other in RESOURCES)
        ]
        for group in (harmless, [each for each in lowering if each not in harmless]):
            if group:
                groups.append(group)
                seen.update(each.name for each in group)
    rest = [each for each in known if each.name not in seen]
    return [*groups, rest] if rest else groups


def random_groups(generator: random.Random, names: Sequence[Primitive] | None = None) -> list[list[Primitive]]:
    """Return every primitive as a group of its own, in random order: the search without Heuristic 2."""
    known = list(searched_primitives() if names is None else names)
    generator.shuffle(known)
    return [[primitive] for primitive in known]
