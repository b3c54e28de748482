"""Aceso's performance model of one pipeline stage, compiled: time and memory."""

from __future__ import annotations

import numpy as np

from searchers.aceso import arrays as layout
from searchers.aceso import recompute_kernels
from searchers.aceso.arrays import (
    BACKWARD,
    ENTERS,
    EXTRA_BACKWARD,
    EXTRA_FORWARD,
    FAR,
    FORWARD,
    GRADIENT,
    INPUT,
    KEPT,
    LEAVES,
    MEMORY,
    NEIGHBOUR_BITS,
    NUM_FIGURES,
    OUTPUT,
    STATE,
    STEP,
    TIED_GRADIENT,
    TIED_STATE,
    TIED_STEP,
    TIME_BACKWARD,
    TIME_FORWARD,
    TIME_RECOMPUTE,
    TIME_RESHARD,
    TIME_SYNC,
    TIME_TRANSFER,
    WEIGHT,
    Arrays,
    Bytes,
    Floats,
    Int32s,
)
from searchers.aceso.recompute_kernels import choose, choose_as_released, freed_and_largest
from simulator.compiled_cache import compiled_with, inlined, uncounted

kernel = compiled_with(layout, recompute_kernels)


@inlined
def transfer_time(arrays: Arrays, between_nodes: int, gpus_log: int, num_bytes: float) -> float:
    """Return seconds of a message from each GPU of a stage, all at once."""
    sizes = arrays.transfer_bytes[between_nodes]
    # Stages of whole nodes send from every node at once.
    seconds = arrays.transfer_s[between_nodes, min(gpus_log, arrays.transfer_s.shape[1] - 1)]
    if num_bytes <= 0.0:
        return 0.0
    last = len(sizes) - 1
    place = 0
    while place < last and sizes[place + 1] <= num_bytes:
        place += 1
    if arrays.rules[0]:
        place = max(place - 1, 0)
        return float(num_bytes * seconds[place] / sizes[place])
    if num_bytes <= sizes[0]:
        return float(seconds[0])
    if place == last:
        return float(num_bytes * seconds[last] / sizes[last])
    part = (num_bytes - sizes[place]) / (sizes[place + 1] - sizes[place])
    return float(seconds[place] + part * (seconds[place + 1] - seconds[place]))


@inlined
def border_time(
    arrays: Arrays, between_nodes: int, gpus_log: int, cell: int, index: int, neighbour: int, is_end: bool
) -> float:
    """Return seconds in which a stage sends to a neighbour, and gathers what it had from there in parts.

    Each GPU of the neighbour receives what it needs: whole where its tensor degree is another.

    Args:
        arrays: Costs.
        between_nodes: 1 over the border of two nodes.
        gpus_log: Of the stage, a power of two.
        cell, index: Of the stage's operator at the border.
        neighbour: 0: as the stage itself; else bit 0 is set, bits 1 to 4 are its GPUs, a power of two, and the rest the
            cell of its operator at the border.
        is_end: The neighbour comes after the stage.
    """
    degree = arrays.degrees[cell, 0]
    part_bytes = arrays.columns[cell, LEAVES if is_end else ENTERS, index]
    whole_bytes = arrays.columns[cell, OUTPUT if is_end else INPUT, index]
    receivers_log, sent_bytes, is_alike = gpus_log, part_bytes, True
    if neighbour & 1:
        other = neighbour >> 5
        receivers_log, is_alike = (neighbour >> 1) & 15, arrays.degrees[other, 0] == degree
        if is_end:
            sent_bytes = arrays.columns[other, ENTERS if is_alike else INPUT, index + 1]
        else:
            sent_bytes = arrays.columns[other, LEAVES if is_alike else OUTPUT, index - 1]
    seconds = transfer_time(arrays, between_nodes, receivers_log, sent_bytes)
    if is_alike and part_bytes < whole_bytes:
        seconds += arrays.gather[degree, 0] + arrays.gather[degree, 1] * whole_bytes
    return float(seconds)


@inlined
def sync_time(arrays: Arrays, gpus_log: int, tensor_log: int, num_bytes: float) -> float:
    """Return seconds in which the replicas of a stage sum gradients."""
    replicas_log = gpus_log - tensor_log
    if replicas_log <= 0 or num_bytes <= 0.0:
        return 0.0
    return float(arrays.sync[tensor_log, replicas_log, 0] + arrays.sync[tensor_log, replicas_log, 1] * num_bytes)


@inlined
def reshard_time(arrays: Arrays, before: int, after: int, index: int) -> float:
    """Return seconds to move what enters operator ``index`` from one cell's layout to another's, both passes.

    Where the tensor degree grows, samples are gathered forward and cut backward; where it shrinks, the other way
    round: one all-gather over as many neighbours as the degrees differ by.
    """
    shift = abs(arrays.degrees[after, 0] - arrays.degrees[before, 0])
    if shift == 0:
        return 0.0
    num_bytes = max(arrays.columns[before, INPUT, index], arrays.columns[after, INPUT, index])
    return float(arrays.gather[shift, 0] + arrays.gather[shift, 1] * num_bytes)


@uncounted
def fill_figures(
    arrays: Arrays,
    cells: Int32s,
    start: int,
    stop: int,
    gpus: int,
    in_flight: int,
    links: int,
    limit: float,
    recompute: int,
    flags: Bytes,
    other: Bytes,
    figures: Floats,
) -> None:
    """Write the figures of one stage.

    Args:
        arrays: Costs.
        cells: Per operator of the stage.
        start, stop: Operators of the stage.
        gpus: GPUs of the stage.
        in_flight: Microbatches whose activations it keeps at once.
        links: Bit 0: a stage comes before; bit 1: one comes after; bits 2 and 3: it is on another node; bits 4 to 16
            and 17 to 29: that before and after, as ``border_time`` has them.
        limit: Bytes to stay below, for the choice of recomputed operators.
        recompute: 0: ``flags`` are given; 1: choose the largest activations first; 2: the most bytes per second
            first; 3: whichever of the two takes less time; 4: as the public code does.
        flags: uint8[stop - start]; recomputed operators, written if chosen.
        other: uint8[stop - start]. To work in.
        figures: float64[NUM_FIGURES]; times of both passes and memory are infinite where an operator has no such cell.
    """
    forward = backward = states = weights = kept = gradients = step = reshard = 0.0
    extra_forward = extra_backward = extra = sync = 0.0
    gpus_log = 0
    while (1 << gpus_log) < gpus:
        gpus_log += 1
    release = arrays.rules[1] != 0
    for offset in range(stop - start):
        index, cell = start + offset, cells[offset]
        forward += arrays.columns[cell, FORWARD, index]
        backward += arrays.columns[cell, BACKWARD, index]
        states += arrays.columns[cell, STATE, index]
        weights += arrays.columns[cell, WEIGHT, index]
        kept += arrays.columns[cell, KEPT, index] + arrays.columns[cell, FAR, index]
        gradients += arrays.columns[cell, GRADIENT, index]
        step += arrays.columns[cell, STEP, index]
        before = arrays.tied_to[index]
        if before >= start and cells[before - start] == cell:
            states -= arrays.columns[cell, TIED_STATE, index]
            step -= arrays.columns[cell, TIED_STEP, index]
            gradients -= arrays.columns[cell, TIED_GRADIENT, index]
        if index + 1 < stop or not release or stop - start == 1:
            extra_forward = max(extra_forward, arrays.columns[cell, EXTRA_FORWARD, index])
            extra_backward = max(extra_backward, arrays.columns[cell, EXTRA_BACKWARD, index])
        if offset > 0 and cells[offset - 1] != cell:
            reshard += reshard_time(arrays, cells[offset - 1], cell, index)
        # Operators of one tensor degree in a row sum their gradients together.
        if index + 1 == stop or arrays.degrees[cells[offset + 1], 0] != arrays.degrees[cell, 0]:
            sync += sync_time(arrays, gpus_log, arrays.degrees[cell, 0], gradients)
            gradients = 0.0
    if forward == np.inf:
        # An operator has no such cell: all its columns are infinite, and what follows would subtract them.
        if recompute != 0:
            flags[:] = 0
        figures[:] = 0.0
        figures[TIME_FORWARD] = figures[TIME_BACKWARD] = figures[MEMORY] = np.inf
        return
    extra = max(extra_forward + extra_backward, weights) if release else max(extra_forward, extra_backward)
    entering = arrays.columns[cells[0], INPUT, start] if links & 1 or arrays.rules[2] else 0.0
    kept += entering
    fixed = states + extra
    freed = largest = seconds = 0.0
    if recompute == 0:
        freed, largest, seconds = freed_and_largest(arrays, cells, flags, start, stop)
    elif fixed + kept * in_flight > limit and recompute == 4:
        flags[:] = 0
        choose_as_released(arrays, cells, flags, start, stop, in_flight, fixed, kept, limit)
        freed, largest, seconds = freed_and_largest(arrays, cells, flags, start, stop)
    elif fixed + kept * in_flight > limit:
        flags[:] = 0
        freed, largest, seconds = choose(
            arrays, cells, flags, start, stop, in_flight, fixed, kept, limit, recompute == 2
        )
        if recompute == 3:
            other[:] = 0
            found = choose(arrays, cells, other, start, stop, in_flight, fixed, kept, limit, True)
            first = fixed + (kept - freed) * in_flight + largest <= limit
            second = fixed + (kept - found[0]) * in_flight + found[1] <= limit
            if second and (not first or found[2] < seconds):
                for offset in range(stop - start):
                    flags[offset] = other[offset]
        freed, largest, seconds = freed_and_largest(arrays, cells, flags, start, stop)
    else:
        flags[:] = 0
    transfer = 0.0
    # The release also charges what enters the first stage and leaves the last, inside a node.
    if links & 1 or release:
        far = (links >> 2) & 1 if links & 1 else 0
        neighbour = (links >> 4) & ((1 << NEIGHBOUR_BITS) - 1)
        transfer += border_time(arrays, far, gpus_log, cells[0], start, neighbour, False)
    if links & 2 or release:
        far = (links >> 3) & 1 if links & 2 else 0
        neighbour = links >> (4 + NEIGHBOUR_BITS)
        transfer += border_time(arrays, far, gpus_log, cells[stop - start - 1], stop - 1, neighbour, True)
    figures[TIME_FORWARD] = forward
    figures[TIME_BACKWARD] = backward
    figures[TIME_RECOMPUTE] = seconds
    figures[TIME_TRANSFER] = transfer
    figures[TIME_RESHARD] = reshard
    figures[TIME_SYNC] = sync
    # The optimizer steps when nothing is kept for backward any more.
    figures[MEMORY] = max(fixed + (kept - freed) * in_flight + largest, states + step)


@kernel
def stage_figures(
    arrays: Arrays,
    cells: Int32s,
    start: int,
    stop: int,
    gpus: int,
    in_flight: int,
    links: int,
    limit: float,
    recompute: int,
    flags: Bytes,
    figures: Floats,
) -> None:
    """Write the figures of one stage: ``fill_figures``, for Python."""
    other = np.empty(stop - start, np.uint8)
    fill_figures(arrays, cells, start, stop, gpus, in_flight, links, limit, recompute, flags, other, figures)


@inlined
def microbatch_time(figures: Floats) -> float:
    """Return the seconds per microbatch of a stage."""
    return float(
        figures[TIME_FORWARD]
        + figures[TIME_BACKWARD]
        + figures[TIME_RECOMPUTE]
        + figures[TIME_TRANSFER]
        + figures[TIME_RESHARD]
    )


@kernel
def price_stops(
    arrays: Arrays,
    cells: Int32s,
    start: int,
    stops: Int32s,
    gpus: int,
    in_flight: int,
    links: int,
    limit: float,
    recompute: int,
    seconds: Floats,
    sync: Floats,
) -> None:
    """Write the seconds of a microbatch and of synchronisation of the stages ``[start, stop)``.

    The first is infinity where a stage does not fit.
    """
    figures = np.zeros(NUM_FIGURES)
    flags, other = np.zeros(len(cells), np.uint8), np.empty(len(cells), np.uint8)
    for place in range(len(stops)):
        size = stops[place] - start
        fill_figures(
            arrays, cells[:size], start, stops[place], gpus, in_flight, links, limit, recompute, flags[:size],
            other[:size], figures,
        )  # fmt: skip
        seconds[place] = microbatch_time(figures) if figures[MEMORY] <= limit else np.inf
        sync[place] = figures[TIME_SYNC]
