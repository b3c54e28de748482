"""Where the borders of stages are best, compiled: bisection on the slowest stage, then Equation 2 around there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from searchers.aceso import arrays as layout
from searchers.aceso import recompute_kernels, stage_kernels
from searchers.aceso.arrays import (
    BACKWARD,
    FORWARD,
    MEMORY,
    NUM_FIGURES,
    TIME_SYNC,
    TIME_TRANSFER,
    Arrays,
    Bytes,
    Floats,
    Int32s,
)
from searchers.aceso.stage_kernels import fill_figures, microbatch_time
from simulator.compiled_cache import compiled_with, inlined, uncounted

CAPACITY = 1 << 19
"""Rows of what is remembered: 21 MB; where half are taken it begins anew."""
CELLS, OPERATORS, GPUS, COPIES = 1 << 8, 1 << 19, 1 << 11, 1 << 6
"""What a key distinguishes: 63 bits, mixed with 30 of links into 62; n stages share one by chance with n^2 / 9e18.

A cluster file has at most 1,024 GPUs a node, and a search 16 stages.
"""
SPREAD = -7046029254386353131
"""An odd number near 2**64 / 1.618, as 64 bits with sign: neighbouring keys end up far apart (Knuth, volume 3, 6.4)."""
NARROW = 3
"""Narrow borders on either side of one that it may move to: a transformer layer has at most three."""
TIME, STEADY, SYNC, BYTES = range(4)


class Known(NamedTuple):
    """Stages of one cell each that were priced, by open addressing: a search prices most of them often.

    Attributes:
        keys: int64[CAPACITY]; 0 where a row is free.
        figures: float64[CAPACITY, 4]: seconds per microbatch, those without transfers, seconds of synchronisation
            per iteration, bytes.
        used: int64[1]: rows taken.
    """

    keys: NDArray[np.int64]
    figures: Floats
    used: NDArray[np.int64]


def nothing_known() -> Known:
    """Return an empty table."""
    return Known(np.zeros(CAPACITY, np.int64), np.zeros((CAPACITY, 4)), np.zeros(1, np.int64))


class Room(NamedTuple):
    """To price a stage in: int32[operators] and uint8[operators] twice, float64[NUM_FIGURES]."""

    cells: Int32s
    flags: Bytes
    other: Bytes
    figures: Floats


class Paths(NamedTuple):
    """To move all borders in: of each stage by the places where it may begin and end, and of each border.

    Attributes:
        places: int32[stages + 1, width]. Operators; those outside the workload do not count.
        seconds, load: float64[stages, width, width].
        reachable: uint8[stages + 1, width].
        summed, before: float64 and int32[stages + 1, width]. Least seconds up to a border, and where that one began.
        path, chosen: int32[stages + 1].
    """

    places: Int32s
    seconds: Floats
    load: Floats
    reachable: Bytes
    summed: Floats
    before: Int32s
    path: Int32s
    chosen: Int32s


class Stages(NamedTuple):
    """The stages of a pipeline but for their borders.

    Attributes:
        cells: int32[num_stages].
        gpus, in_flight, links: int32[num_stages], as in ``stage_kernels.fill_figures``.
        limit: Bytes.
        recompute: As in ``stage_kernels.fill_figures``.
    """

    cells: Int32s
    gpus: Int32s
    in_flight: Int32s
    links: Int32s
    limit: float
    recompute: int


@compiled_with(layout, recompute_kernels, stage_kernels)
def balanced_cuts(
    arrays: Arrays, stages: Stages, known: Known, weight: float, cuts: Int32s, window: int, narrow: Int32s
) -> int:
    """Move the borders of stages of one cell each to where the pipeline is fastest; return stages newly priced.

    The least time of the slowest stage is found by bisection: the stages take as many operators as fit, one after
    the other. Then every border may move by up to ``window`` operators, or to the next narrow ones on either side, all
    together, to where Equation 2 is least: over slow links few bytes to send are worth more than stages of equal
    length. Where nothing fits the borders stay.

    Args:
        arrays: Costs.
        stages: All but their borders.
        known: What was priced before under the same arrays, limit and recomputation; added to.
        weight: Microbatches less one.
        cuts: int32[num_stages + 1]; borders, moved in place.
        window: Operators; 0 for bisection alone.
        narrow: Where least crosses (``narrow_borders``), ascending.
    """
    if 2 * known.used[0] > len(known.keys):
        known.keys[:] = 0
        known.used[0] = 0
    before = known.used[0]
    num_stages, count = len(stages.cells), cuts[-1]
    room = Room(np.zeros(count, np.int32), np.zeros(count, np.uint8), np.zeros(count, np.uint8), np.zeros(NUM_FIGURES))
    total = 0.0
    for index in range(count):
        least = np.inf
        for stage in range(num_stages):
            cell = stages.cells[stage]
            least = min(least, arrays.columns[cell, FORWARD, index] + arrays.columns[cell, BACKWARD, index])
        total += least
    low, high = total / num_stages, 0.0
    for stage in range(num_stages):
        row = _row_of(arrays, stages, known, stage, cuts[stage], cuts[stage + 1], room)
        fits = known.figures[row, BYTES] <= stages.limit
        high = max(high, known.figures[row, TIME]) if fits else np.inf
        if not fits:
            break
    found = np.zeros(num_stages + 1, np.int32)
    _copy(cuts, found)
    trial = np.zeros(num_stages + 1, np.int32)
    if high == np.inf:
        high = low * 1.5
        for _ in range(8):
            _greedy_cuts(arrays, stages, known, high, count, trial, room)
            if trial[0] == 0:
                _copy(trial, found)
                break
            low, high = high, high * 1.6
        if trial[0] != 0:
            return int(known.used[0] - before)
    while high - low > 1e-3 * high:
        middle = 0.5 * (low + high)
        _greedy_cuts(arrays, stages, known, middle, count, trial, room)
        if trial[0] == 0:
            high = middle
            _copy(trial, found)
        else:
            low = middle
    if window > 0 and num_stages > 1:
        width = 2 * (window + NARROW) + 1
        paths = Paths(
            np.empty((num_stages + 1, width), np.int32),
            np.empty((num_stages, width, width)), np.empty((num_stages, width, width)),
            np.empty((num_stages + 1, width), np.uint8), np.empty((num_stages + 1, width)),
            np.empty((num_stages + 1, width), np.int32), np.empty(num_stages + 1, np.int32),
            np.empty(num_stages + 1, np.int32),
        )  # fmt: skip
        _fill_places(paths.places, found, window, narrow)
        _polish(arrays, stages, known, weight, found, window, room, paths)
    _copy(found, cuts)
    return int(known.used[0] - before)


@uncounted
def _fill_places(places: Int32s, cuts: Int32s, window: int, narrow: Int32s) -> None:
    """Fill in where each border may go; where it is stands in column ``window``."""
    for border in range(len(cuts)):
        for place in range(2 * window + 1):
            places[border, place] = cuts[border] + place - window
        behind = 0
        while behind < len(narrow) and narrow[behind] <= cuts[border]:
            behind += 1
        for number in range(2 * NARROW):
            index = behind - NARROW + number
            places[border, 2 * window + 1 + number] = narrow[index] if 0 <= index < len(narrow) else -1


@inlined
def _copy(cuts: Int32s, to: Int32s) -> None:
    """Copy borders. An assignment to ``to[:]`` is compiled with the error of unlike shapes: three seconds."""
    for border in range(len(cuts)):
        to[border] = cuts[border]


@uncounted
def _row_of(
    arrays: Arrays,
    stages: Stages,
    known: Known,
    stage: int,
    start: int,
    stop: int,
    room: Room,
) -> int:
    """Return the row of a stage, priced if it is new."""
    cell, gpus = stages.cells[stage], stages.gpus[stage]
    in_flight, links = stages.in_flight[stage], stages.links[stage]
    key = np.int64(cell)
    key = key * OPERATORS + start
    key = key * OPERATORS + stop
    key = key * GPUS + gpus
    key = key * COPIES + in_flight
    key *= SPREAD
    key = (key ^ key >> 32 ^ links) * SPREAD
    key = key ^ key >> 29 | 1
    last = len(known.keys) - 1
    row = ((key * SPREAD) >> 32) & last
    while known.keys[row] != key:
        if known.keys[row] == 0:
            size, figures = stop - start, room.figures
            room.cells[:size], figures[:] = cell, 0.0
            fill_figures(
                arrays, room.cells[:size], start, stop, gpus, in_flight, links, stages.limit, stages.recompute,
                room.flags[:size], room.other[:size], figures,
            )  # fmt: skip
            known.keys[row] = key
            known.used[0] += 1
            known.figures[row, TIME] = microbatch_time(figures)
            known.figures[row, STEADY] = known.figures[row, TIME] - figures[TIME_TRANSFER]
            known.figures[row, SYNC] = figures[TIME_SYNC]
            known.figures[row, BYTES] = figures[MEMORY]
            break
        row = (row + 1) & last
    return int(row)


@uncounted
def _greedy_cuts(
    arrays: Arrays,
    stages: Stages,
    known: Known,
    goal: float,
    count: int,
    cuts: Int32s,
    room: Room,
) -> None:
    """Give each stage as many operators as it does within ``goal`` seconds; ``cuts[0]`` is -1 where some remain."""
    num_stages = len(stages.gpus)
    start = 0
    cuts[0] = 0
    for stage in range(num_stages):
        most = count - (num_stages - 1 - stage)
        low, high = start, most  # low fits (nothing), high is the largest that may
        if stage == num_stages - 1:
            low = most - 1
        while low < high:
            stop = (low + high + 1) // 2
            row = _row_of(arrays, stages, known, stage, start, stop, room)
            if known.figures[row, STEADY] <= goal and known.figures[row, BYTES] <= stages.limit:
                low = stop
            else:
                high = stop - 1
        stop = low
        reached = False
        for _ in range(14):
            if stop <= start or (stage == num_stages - 1 and stop < most):
                break
            row = _row_of(arrays, stages, known, stage, start, stop, room)
            if known.figures[row, TIME] <= goal and known.figures[row, BYTES] <= stages.limit:
                reached = True
                break
            stop -= 1
        if not reached:
            cuts[0] = -1
            return
        start = stop
        cuts[stage + 1] = stop


@uncounted
def _polish(
    arrays: Arrays,
    stages: Stages,
    known: Known,
    weight: float,
    cuts: Int32s,
    window: int,
    room: Room,
    paths: Paths,
) -> None:
    """Move all borders among their places so that Equation 2, ``max(weight * time + sync) + sum(time)``, is least.

    Exact: the least sum with every stage's load below a bound has its own largest load; nothing between that and the
    bound is better, so it is the next bound. Only the trade-offs between sum and largest load are visited.
    """
    num_stages, count = len(stages.gpus), cuts[-1]
    places, seconds, load, reachable, summed, before, path, chosen = paths
    width = places.shape[1]
    seconds[:], load[:], reachable[:] = np.inf, np.inf, 0
    reachable[0, window] = 1
    for stage in range(num_stages):
        for place in range(width):
            stop = places[stage + 1, place]
            if stop > count or stop < 1 or (stage == num_stages - 1 and stop != count):
                continue
            for from_place in range(width):
                start = places[stage, from_place]
                if reachable[stage, from_place] == 0 or start >= stop or start < 0:
                    continue
                row = _row_of(arrays, stages, known, stage, start, stop, room)
                if known.figures[row, BYTES] <= stages.limit:
                    own = known.figures[row, TIME]
                    seconds[stage, from_place, place] = own
                    load[stage, from_place, place] = weight * own + known.figures[row, SYNC]
                    reachable[stage + 1, place] = 1
    path[:], chosen[:] = window, window
    bound, best = np.inf, np.inf
    while True:
        summed[:] = np.inf
        summed[0, window] = 0.0
        for stage in range(num_stages):
            for place in range(width):
                for from_place in range(width):
                    through = summed[stage, from_place] + seconds[stage, from_place, place]
                    if load[stage, from_place, place] < bound and through < summed[stage + 1, place]:
                        summed[stage + 1, place] = through
                        before[stage + 1, place] = from_place
        total = summed[num_stages, window]
        # The largest load is at least that of the mean time.
        if total == np.inf or total * (1.0 + weight / num_stages) >= best:
            break
        largest = 0.0
        for stage in range(num_stages, 0, -1):
            path[stage - 1] = before[stage, path[stage]]
            largest = max(largest, load[stage - 1, path[stage - 1], path[stage]])
        if largest + total < best:
            best = largest + total
            for border in range(num_stages + 1):
                chosen[border] = path[border]
        bound = largest
    for stage in range(num_stages):
        cuts[stage] = places[stage, chosen[stage]]
