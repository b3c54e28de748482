"""What the compiled estimate of memory reads, and columns of what it fills: arrays as in ``arrays``."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simulator.compiled_cache import inlined
from simulator.fast.arrays import Floats, Ints

# Columns of ``MemoryTables.sums``: kept bytes (of each tensor the difference to what its saver before keeps), the same
# in recomputed segments, bytes weight gradients need, gradients of outputs of operators with parameters, what ZeRO
# gathers and scatters, of gradients what the operator gives back before it is through, and what that comes to where it
# ends a segment;
# model states but for gradients made anew by whether gradients are sharded, parameters that ZeRO gathers once for all
# that use them, those gradients by sharded, what the optimizer step works in, what refreshing takes but for its largest
# tensor, of gradients made anew shards, and what gradients are flattened into.
KEPT, AGAIN, WEIGHTED, TO_MULTIPLY, GATHERED, UNSHARDED, GIVEN_BACK, END_GIVEN, STATES = range(9)
STAYS, ANEW, STEP, REFRESHED, LATE, FLATTENED = 2, 3, 5, 6, 7, 8
TIED_GATHERED, TIED_SCATTERED, TIED_WAITING, NUM_STATES = 9, 10, 11, 13
MEMORY_COLUMNS = STATES + NUM_STATES

# Columns of ``MemoryTables.saved_bytes`` and rows of ``MemoryTables.maxima``.
OWN, SHARD, WHOLE = range(3)
KEPT_PEAK, AGAIN_PEAK, KEPT_WAIT_PEAK, AGAIN_WAIT_PEAK, KEPT_SPLIT_PEAK, AGAIN_SPLIT_PEAK, FORWARD_PEAK = range(7)
PRODUCT, LARGEST, BUFFER, BUCKET = range(7, 11)
MAXIMA = 11

# Columns of what a stage holds; see ``HeldBytes``. The first six are of activations; WHOLE_BYTES is what ZeRO has whole
# some time, all added up.
KEPT_BYTES, WORKING_BYTES, FIRST_WORKING_BYTES, FOR_WEIGHTS_BYTES, INPUT_PASS_BYTES, WEIGHT_PASS_BYTES = range(6)
LAST_BYTES, GATHERED_BYTES, STATES_BYTES, ANEW_BYTES, STEP_BYTES, REFRESHED_BYTES = range(6, 12)
BUFFER_BYTES, BUCKET_BYTES, WHOLE_BYTES, STAYS_BYTES, FORWARD_BYTES = range(12, 17)
LAST_WORKING_BYTES, LAST_END_BYTES, FLATTENED_BYTES = range(17, 20)
HELD = 20


class MemoryRules(NamedTuple):
    """What holds for the memory of any plan.

    Attributes:
        keeps_gathered, keeps_outputs: What an operator gathered, and what a stage sent, is held.
        keeps_shards: So is a tensor as it was made, beside what was gathered of it, though its producer saves none.
        prefetches, prefetches_forward: ZeRO-3 holds a unit and the next one, in backward and forward passes.
        apart: A unit is given back before its gradients are copied into what is scattered.
        holds_ends: ``Runtime.recompute_holds_ends``.
        bucket_bytes: How much of flattened gradients is there at once.
        waits, waiting: Whether there is a ``Runtime.waiting_gradient_share``, and that, or 1.
    """

    keeps_gathered: bool
    keeps_outputs: bool
    keeps_shards: bool
    prefetches: bool
    prefetches_forward: bool
    apart: bool
    holds_ends: bool
    bucket_bytes: float
    waits: bool
    waiting: float


class Savings(NamedTuple):
    """Who saves what in one workload. Q savings of tensors that have a name.

    Attributes:
        offsets, operators: Savings of each tensor, ascending by operator.
        producers: Per tensor; NEVER for inputs of the graph.
        tensors: Per tensor, its number among those that somebody reads; -1 if nobody does.
        numbers: The way back: per tensor that somebody reads, its number here; -1 if nobody saves it.
        entering_offsets, entering: Per cut, tensors made before it (or given) and saved behind it.
        unsaved_offsets, unsaved: Per cut, tensors made before it whose first reader behind it does not save them, by
            their number among those that somebody reads, and the number of that reading: int64[., 2].
    """

    offsets: Ints
    operators: Ints
    producers: Ints
    tensors: Ints
    numbers: Ints
    entering_offsets: Ints
    entering: Ints
    unsaved_offsets: Ints
    unsaved: Ints


class MemoryTables(NamedTuple):
    """Everything worked out so far; the first axis is the number of a table.

    Attributes:
        sums: float64[tables, N + 1, MEMORY_COLUMNS]. Prefix sums.
        saved_bytes: float64[tables, Q, 3]. As its saver reads it; where its maker has the same strategy, as it is
            computed again; and as it stays, gathered if that is kept.
        made_bytes, read_bytes: float64[tables, T], [tables, readings]. Sizes of tensors.
        in_shards: int64[tables, T]. Whether a tensor is made in shards of the sequence, and so crosses in such.
        num_parts: int64[tables, readings]. In how many of them it arrives where this reading is a stage's first.
        replicas: int64[tables]. Product of the batch axes.
        maxima: float64[tables, MAXIMA, levels, N]. Range maxima: of what the sums of kept bytes have up to an operator
            and what it needs besides in backward, and the same in recomputed segments; both with gradients that wait of
            operators behind in the same part; both less what weight gradients up to there need; of kept bytes and what
            an operator needs besides in forward; of what a pass of weight gradients alone makes
            them in, of tensors that are refreshed, of buffers that are never given back, and of those that a backward
            pass fills with gradients. Row k covers 2^k operators.
        tied_bytes: float64[tables, O, NUM_STATES]. Model states of tied parameters, what ZeRO gathers and scatters, and
            gradients that wait for others of the same weight, by whether gradients are sharded.
        tied_layouts: int64[tables, O].
        capacity_bytes: float64[placements].
    """

    sums: Floats
    saved_bytes: Floats
    made_bytes: Floats
    read_bytes: Floats
    in_shards: Ints
    num_parts: Ints
    replicas: Ints
    maxima: Floats
    tied_bytes: Floats
    tied_layouts: Ints
    capacity_bytes: Floats


@inlined
def longest(maxima: Floats, table: int, kind: int, start: int, stop: int) -> float:
    """Return the largest of ``[start, stop)`` from range maxima."""
    level, width = 0, 1
    while 2 * width <= stop - start:
        width *= 2
        level += 1
    return max(float(maxima[table, kind, level, start]), float(maxima[table, kind, level, stop - width]))


def range_maxima(values: Floats) -> Floats:
    """Return float64[levels, N]: row k holds the maxima of 2^k values from each place on, as ``longest`` reads them."""
    rows = [values]
    width = 1
    while 2 * width <= len(values):
        longer = rows[-1].copy()
        longer[:-width] = np.maximum(rows[-1][:-width], rows[-1][width:])
        rows.append(longer)
        width *= 2
    return np.stack(rows)
