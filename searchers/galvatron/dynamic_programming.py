"""Layer-level dynamic programming: the cheapest strategy of every layer of a stage within a memory budget.

Source: Galvatron-BMW (TKDE 2024), Eq. 4 and section IV-A2. The paper's state is the layer, the memory spent and the
previous layer's strategy, and Algorithm 3 checks the backward peak (Eq. 2) of what comes out. Here layers are taken
from the last to the first, so that this peak is part of the state. Let P be the peak of the layers behind, and H what
they still hold when their backward passes are over. A layer that keeps k, of which f is free after its backward pass,
and needs b more during that makes them ``k + max(P, H + b)`` and ``H + k - f``. The state is the layer, P in steps of
memory, how activations lie (moving them costs the same whatever else two strategies differ in) and H, where a state
that costs no less and holds no less than another is dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from searchers.galvatron.priced_memory import Needs, priced, without_budget
from searchers.galvatron.stage_table import Floats, Ints, StageTable
from simulator.compiled_cache import compiled, uncounted

MOST = 16
"""States at most that differ in nothing but cost and what is held."""

COARSE = 16
"""Steps of memory that are one in a first pass, whose find cuts most states off in the second."""

FRONT = 256
"""States of less memory at most that one is compared with."""


class _States(NamedTuple):  # Compiled code that is kept knows fields by their order, which must stay.
    """States of one layer: K layouts, E steps of memory, N of each.

    Attributes:
        cost_s: float64[K, E, N]: seconds from this layer to the last.
        peak_bytes: float64[K, E, N]: theirs, above what every layer needs at least.
        held_bytes: float64[K, E, N]: what they hold when their backward passes are over, above that.
        link: int64[K, E, N]: what each was made from.
        number: int64[K, E]: how many there are.
        low, stop: int64[K]: there are none outside these steps, ``[low, stop)``.
    """

    cost_s: Floats
    peak_bytes: Floats
    held_bytes: Floats
    link: Ints
    number: Ints
    low: Ints
    stop: Ints


def search(
    table: StageTable, budget_bytes: float, granularity_bytes: float, most: int = MOST, below_s: float = np.inf
) -> Ints | None:
    """Return the cheapest strategy per layer whose peak (Eq. 2) is within the budget, or None where none was found.

    Exact where steps of memory lose nothing. Bytes are whole: needs are rounded up, what is freed down.

    Args:
        table: Costs.
        budget_bytes: A device's memory.
        granularity_bytes: Memory step. Of states whose peaks are in the same step, those that cost more are dropped, so
            a coarse step can cost time, and find nothing where the budget is met by less than a step; it never breaks
            the budget.
        most: States at most that differ in nothing but cost and what is held.
        below_s: Only what costs less is looked for.
    """
    _, free, free_s = without_budget(table.cost_s, table.layout, table.transition_s)
    if not free_s < below_s:
        return None
    if table.peak_bytes(free) <= budget_bytes:
        return free
    bytes_ = np.ceil(table.kept_bytes), np.ceil(table.backward_bytes), np.floor(table.forward_bytes)
    usable = np.isfinite(table.cost_s) & _can_fit(np.isfinite(table.cost_s), *bytes_, budget_bytes)
    kept, backward, forward = bytes_
    least = np.where(usable, kept, np.inf).min(axis=1)
    left = budget_bytes - float(least.sum())
    if left < 0:
        return None
    cost_s = np.where(usable, table.cost_s, np.inf)
    extra, backward, forward = (np.where(usable, each, 0.0) for each in (kept - least[:, None], backward, forward))
    left = min(left, float(extra.max(axis=1).sum()) + max(0.0, float(backward.max())))
    needs = Needs(extra, backward, forward)
    relaxed = priced(cost_s, needs, table.layout, table.transition_s, left)
    found: Ints | None = None
    if relaxed.seconds < below_s:
        found, below_s = relaxed.chosen, relaxed.seconds * (1 - 1e-12)
    for step_bytes, num_states in ((COARSE * granularity_bytes, 1), (granularity_bytes, most)):
        if relaxed.bound_s >= below_s:
            break
        chosen, seconds = _solve(
            cost_s, needs, table.layout, table.transition_s, relaxed.ahead_s, relaxed.price,
            left, step_bytes, num_states, below_s,
        )  # fmt: skip
        if seconds < below_s:
            found, below_s = chosen, seconds * (1 - 1e-12)
    return found


def _can_fit(
    usable: NDArray[np.bool_], kept: Floats, backward: Floats, forward: Floats, budget_bytes: float
) -> NDArray[np.bool_]:
    """Return which strategies can be within the budget if all other layers take their leanest: bool[L, S]."""
    kept, forward = np.where(usable, kept, np.inf), np.where(usable, forward, 0.0)
    least, least_held = kept.min(axis=1), (kept - forward).min(axis=1)
    before = (least.cumsum() - least)[:, None]
    behind = (least[::-1].cumsum()[::-1] - least)[:, None]
    held = (least_held[::-1].cumsum()[::-1] - least_held)[:, None]
    fits: NDArray[np.bool_] = before + kept + np.maximum(behind, held + backward) <= budget_bytes
    return fits


@uncounted
def _put(states: _States, lies: int, step: int, seconds: float, peak: float, held: float, link: int) -> None:
    """Add a state to those of a layout and step, unless one that costs no more holds no more or has as much room.

    Room is what is free of a peak: peaks of one step count as the same, but of two that cost the same the lower stays.
    Those that the state is better than so are dropped; of too many, the one that costs most.
    """
    cost_s, helds, peaks = states.cost_s[lies, step], states.held_bytes[lies, step], states.peak_bytes[lies, step]
    links = states.link[lies, step]
    count = states.number[lies, step]
    states.low[lies], states.stop[lies] = min(states.low[lies], step), max(states.stop[lies], step + 1)
    room = peak - held
    for place in range(count):
        is_lower = cost_s[place] < seconds or peaks[place] <= peak
        if is_lower and cost_s[place] <= seconds and (helds[place] <= held or peaks[place] - helds[place] >= room):
            return
    left = 0
    dearest = 0
    for place in range(count):
        if cost_s[place] < seconds or (helds[place] < held and peaks[place] - helds[place] > room):
            cost_s[left], peaks[left], helds[left] = cost_s[place], peaks[place], helds[place]
            links[left] = links[place]
            if cost_s[left] > cost_s[dearest]:
                dearest = left
            left += 1
    states.number[lies, step] = left
    place = left
    if left == len(cost_s):
        if cost_s[dearest] <= seconds:
            return
        place = dearest
    else:
        states.number[lies, step] = left + 1
    cost_s[place], peaks[place], helds[place] = seconds, peak, held
    links[place] = link


@uncounted
def _first_that_holds_more(front: Floats, known: int, held: float) -> int:
    first, last = 0, known
    while first < last:
        middle = (first + last) // 2
        if front[1, middle] <= held:
            first = middle + 1
        else:
            last = middle
    return first


@uncounted
def _insert(front: Floats, known: int, first: int, seconds: float, held: float) -> int:
    """Put what costs and holds so much in its place, of those that cost no less; return how many there are then."""
    behind = first
    while behind < known and front[0, behind] >= seconds:
        behind += 1
    if behind == first:
        if known == front.shape[1]:
            return known
        for other in range(known, first, -1):
            front[0, other], front[1, other] = front[0, other - 1], front[1, other - 1]
    else:
        for other in range(behind, known):
            to = other - behind + first + 1
            front[0, to], front[1, to] = front[0, other], front[1, other]
    front[0, first], front[1, first] = seconds, held
    return known + 1 - (behind - first)


@uncounted
def _thin(states: _States, lies: int, front: Floats) -> int:
    """Drop the states of a layout that cost and hold no less than one of a step not above; return how many stay.

    ``front``: float64[2, F], written: what those cost and hold that others are compared with; more costs less.
    """
    total = 0
    known = 0
    for step in range(states.low[lies], states.stop[lies]):
        kept = 0
        for place in range(states.number[lies, step]):
            seconds, held = states.cost_s[lies, step, place], states.held_bytes[lies, step, place]
            first = _first_that_holds_more(front, known, held)
            if first > 0 and front[0, first - 1] <= seconds:  # Of those that hold no more the last costs least.
                continue
            states.cost_s[lies, step, kept] = seconds
            states.held_bytes[lies, step, kept] = held
            states.peak_bytes[lies, step, kept] = states.peak_bytes[lies, step, place]
            states.link[lies, step, kept] = states.link[lies, step, place]
            kept += 1
            known = _insert(front, known, first, seconds, held)
        states.number[lies, step] = kept
        total += kept
    return total


@uncounted
def _clear(states: _States) -> None:
    for lies in range(len(states.number)):
        for step in range(states.low[lies], states.stop[lies]):
            states.number[lies, step] = 0
        states.low[lies], states.stop[lies] = states.number.shape[1], 0


@uncounted
def _move(states: _States, moved_s: Floats, arrived: _States, front: Floats) -> None:
    """Fill ``arrived`` with the states of a layer and moving there from each layout.

    ``moved_s``: float64[K, K]. From layout to layout.
    """
    num_layouts = len(states.number)
    _clear(arrived)
    for source in range(num_layouts):
        for target in range(num_layouts):
            for step in range(states.low[target], states.stop[target]):
                for place in range(states.number[target, step]):
                    _put(
                        arrived,
                        source,
                        step,
                        states.cost_s[target, step, place] + moved_s[source, target],
                        states.peak_bytes[target, step, place],
                        states.held_bytes[target, step, place],
                        states.link[target, step, place],
                    )
        _thin(arrived, source, front)


@compiled
def _longer(links: Ints, length: int) -> Ints:
    """Return an array with room for so many, which begins with these."""
    grown = np.zeros((length, 2), dtype=np.int64)
    for number in range(len(links)):
        grown[number, 0], grown[number, 1] = links[number, 0], links[number, 1]
    return grown


@compiled
def _no_states(num_layouts: int, width: int, most: int) -> _States:
    shape = (num_layouts, width, most)
    number = np.zeros((num_layouts, width), dtype=np.int64)
    low, stop = np.full(num_layouts, width), np.zeros(num_layouts, dtype=np.int64)
    links = np.empty(shape, dtype=np.int64)
    return _States(np.empty(shape), np.empty(shape), np.empty(shape), links, number, low, stop)


@compiled
def _solve(
    cost: Floats,
    needs: Needs,
    layout: Ints,
    transition: Floats,
    ahead: Floats,
    price: float,
    left: float,
    granularity: float,
    most: int,
    below: float,
) -> tuple[Ints, float]:
    """Return strategies and seconds of the cheapest within the budget; infinite seconds if none is below ``below``.

    Args:
        cost: float64[L, S].
        needs: Bytes.
        layout, transition: As of `StageTable`.
        ahead, price: As of `Priced`.
        left: Bytes of the budget beyond the layers' least.
        granularity: Bytes of a step.
        most: States of one layout and step at most.
        below: Seconds.
    """
    num_layers, num_strategies = cost.shape
    num_layouts = transition.shape[1]
    width = int(np.ceil(left / granularity)) + 1
    states, arrived = _no_states(num_layouts, width, most), _no_states(num_layouts, width, most)
    front = np.zeros((2, FRONT))
    links = np.zeros((1024, 2), dtype=np.int64)  # Strategy, and the state that it was added to.
    num_links = 1
    for lies in range(num_layouts):  # Behind the last layer nothing costs or holds anything.
        arrived.number[lies, 0] = arrived.stop[lies] = 1
        arrived.low[lies] = 0
        arrived.cost_s[lies, 0, 0] = arrived.peak_bytes[lies, 0, 0] = arrived.held_bytes[lies, 0, 0] = 0.0
        arrived.link[lies, 0, 0] = 0
    hungriest = np.zeros(num_layers + 1)  # The most that layers before each need during their backward passes.
    for layer in range(num_layers):
        hungriest[layer + 1] = max(hungriest[layer], needs.backward[layer].max())
    for layer in range(num_layers - 1, -1, -1):
        if layer < num_layers - 1:
            _move(states, transition[layer + 1], arrived, front)
        _clear(states)
        for strategy in range(num_strategies):
            own = cost[layer, strategy]
            if own == np.inf:
                continue
            lies = layout[strategy]
            kept, need, freed = (
                needs.extra[layer, strategy], needs.backward[layer, strategy], needs.forward[layer, strategy]
            )
            rest = own + ahead[layer, lies] - price * left
            for step in range(arrived.low[lies], arrived.stop[lies]):
                for place in range(arrived.number[lies, step]):
                    held = arrived.held_bytes[lies, step, place]
                    peak = kept + max(arrived.peak_bytes[lies, step, place], held + need)
                    seconds = arrived.cost_s[lies, step, place]
                    if peak > left or seconds + rest + price * peak >= below:
                        continue
                    seconds += own
                    # To hold even less helps none of those that are to come.
                    held = max(held + kept - freed, peak - hungriest[layer])
                    link = arrived.link[lies, step, place] * num_strategies + strategy
                    _put(states, lies, int(np.ceil(peak / granularity)), seconds, peak, held, link)
        for lies in range(num_layouts):
            total = num_links + _thin(states, lies, front)
            if total > len(links):
                links = _longer(links, 2 * total)
            for step in range(states.low[lies], states.stop[lies]):
                for place in range(states.number[lies, step]):
                    made = states.link[lies, step, place]
                    links[num_links, 0], links[num_links, 1] = made % num_strategies, made // num_strategies
                    states.link[lies, step, place] = num_links
                    num_links += 1
    found = np.zeros(num_layers, dtype=np.int64)
    best = np.inf
    link = 0
    for lies in range(num_layouts):
        for step in range(states.low[lies], states.stop[lies]):
            for place in range(states.number[lies, step]):
                if states.cost_s[lies, step, place] < best:
                    best = states.cost_s[lies, step, place]
                    link = states.link[lies, step, place]
    for layer in range(num_layers if link else 0):
        found[layer] = links[link, 0]
        link = links[link, 1]
    return found, best
