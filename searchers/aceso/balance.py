"""Arguments of inc/dec-op#: how many operators move, and over which borders.

Two ways. ``relayed`` is the paper's: from the bottleneck towards the idlest stage, as few operators as meet a tight
goal, else a looser one, every stage on the way passing on what it must. ``balanced`` is ours: all borders at once, to
where the pipeline is fastest, found by bisection and dynamic programming on the same prices; it is to the relay what
the relay is to a single migration.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from searchers.aceso.border_kernels import COPIES, Stages, balanced_cuts
from searchers.aceso.configuration import Configuration, prefix_gpus
from searchers.aceso.model import PerformanceModel
from searchers.aceso.prices import Price

WINDOW = 6
"""Operators by which a border may move in the last step, besides to narrow ones: half a transformer layer."""
MIGRATIONS = 5
GOALS = (0.4, 0.2, 0.0)
"""Shares of the gap to the idlest stage that a relay tries to close, tightest first: the public code's."""


def balanced(model: PerformanceModel, configuration: Configuration, window: int = WINDOW) -> Configuration:
    """Return the configuration with its borders where the pipeline is fastest; as it is if a stage is mixed."""
    stages, microbatch = configuration.stages, configuration.microbatch
    if len(stages) == 1 or not all(stage.is_uniform for stage in stages):
        return configuration
    cells = []
    for stage in stages:
        tp = stage.runs[0].tp
        if not model.allows(stage.gpus, tp, microbatch):
            return configuration
        cells.append(model.space.cell(tp, microbatch // (stage.gpus // tp), stage.runs[0].partition))
    first = prefix_gpus(configuration)
    count = len(stages)
    assert count < COPIES, "keys have room for no more stages"
    microbatches = model.microbatches(configuration)
    in_flight = [count - position for position in range(count)]
    if model.compat == "paper":
        in_flight = [min(copies, microbatches) for copies in in_flight]
    links = [
        model.links(position, count, first[position], stages[position].gpus, model.around(stages, position, microbatch))
        for position in range(count)
    ]
    cuts = np.array(configuration.cuts, np.int32)
    stages_but_borders = Stages(
        np.array(cells, np.int32),
        np.array([stage.gpus for stage in stages], np.int32),
        np.array(in_flight, np.int32),
        np.array(links, np.int32),
        float(model.limit_bytes),
        model.order,
    )
    model.stages_priced += balanced_cuts(
        model.tables.arrays,
        stages_but_borders,
        model.known_stages(),
        float(microbatches - 1),
        cuts,
        0 if model.is_large else window,
        model.narrow,
    )
    return configuration.with_cuts([int(cut) for cut in cuts])


def relayed(model: PerformanceModel, configuration: Configuration, price: Price, stage: int) -> Configuration:
    """Return the configuration after up to five migrations away from ``stage`` and what becomes the bottleneck."""
    current, known = configuration, price
    for _ in range(MIGRATIONS):
        moved = migrated(model, current, known, stage)
        if moved is None or not model.may_price():
            break
        found = model.price(moved)
        if not found.better_than(known):
            break
        current, known = moved, found
        stage = load_order(known)[0]
    return current


def load_order(price: Price) -> list[int]:
    """Return the stages, bottleneck first: by memory where it does not suffice, else by time (Heuristic 1)."""
    loads = [stage.memory_bytes if not price.fits else stage.time_s for stage in price.stages]
    return sorted(range(len(loads)), key=lambda position: -loads[position])


def migrated(model: PerformanceModel, configuration: Configuration, price: Price, stage: int) -> Configuration | None:
    """Return the configuration after one relay from ``stage`` to the idlest stage, or None if no goal is met."""
    count = len(configuration.stages)
    if count == 1:
        return None
    if price.fits:
        loads = [each.time_s for each in price.stages]
        slack = [
            (loads[stage] - load) * choice.gpus for load, choice in zip(loads, configuration.stages, strict=True)
        ]
        partner = max((position for position in range(count) if position != stage), key=lambda each: slack[each])
        gap = loads[stage] - loads[partner]
        goals = [loads[stage] - share * gap for share in GOALS]
    else:
        loads = [each.memory_bytes for each in price.stages]
        partner = min((position for position in range(count) if position != stage), key=lambda each: loads[each])
        goals = [price.limit_bytes]
    for goal in goals:
        cuts = _relay(model, configuration, stage, partner, goal, by_memory=not price.fits)
        if cuts is not None:
            return configuration.with_cuts(cuts)
    return None


def _relay(
    model: PerformanceModel, configuration: Configuration, stage: int, partner: int, goal: float, *, by_memory: bool
) -> list[int] | None:
    """Return borders where every stage from ``stage`` to ``partner`` is within ``goal``, moving as little as can be."""
    cuts = list(configuration.cuts)
    step = 1 if partner > stage else -1
    for position in range(stage, partner, step):
        border = position + 1 if step > 0 else position
        low, high = 0, cuts[position + 1] - cuts[position] - 1
        if _load(model, configuration, cuts, position, border, -step * high, by_memory) > goal:
            return None
        while low < high:  # fewest operators that meet the goal
            moved = (low + high) // 2
            if _load(model, configuration, cuts, position, border, -step * moved, by_memory) <= goal:
                high = moved
            else:
                low = moved + 1
        if low == 0 and position == stage:
            low = 1
        cuts[border] -= step * low
    if any(later <= earlier for earlier, later in pairwise(cuts)):
        return None
    load = _load(model, configuration, cuts, partner, partner, 0, by_memory)
    return cuts if load <= goal and cuts != list(configuration.cuts) else None


def _load(
    model: PerformanceModel,
    configuration: Configuration,
    cuts: list[int],
    position: int,
    border: int,
    shift: int,
    by_memory: bool,
) -> float:
    """Return time or memory of a stage with one of its borders shifted."""
    bounds = list(cuts)
    bounds[border] += shift
    choice = configuration.stages[position]
    first = prefix_gpus(configuration)[position]
    if bounds[position + 1] <= bounds[position]:
        return float("inf")
    old = configuration.cuts
    sized = choice.moved((old[position], old[position + 1]), (bounds[position], bounds[position + 1]))
    price = model.stage(
        sized, bounds[position], position, len(configuration.stages), first, configuration.microbatch,
        around=model.around(configuration.stages, position, configuration.microbatch),
    )  # fmt: skip
    if by_memory:
        return price.memory_bytes
    return price.time_s if price.memory_bytes <= model.limit_bytes else float("inf")
