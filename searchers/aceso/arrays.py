"""The arrays that Aceso's compiled functions read and write, and the names of their columns.

Everything is an array: ``columns[cell, column, operator]`` holds what an operator costs at a cell, that is, at a
tensor degree, a number of samples per GPU and a partition choice. A stage is a range of operators and the cell of
each. Bytes are per GPU, times are seconds per microbatch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Int32s = NDArray[np.int32]
Bytes = NDArray[np.uint8]

FORWARD, BACKWARD, INPUT, OUTPUT, STATE, WEIGHT, KEPT, EXTRA_FORWARD, EXTRA_BACKWARD, GRADIENT = range(10)
FAR, OWN, ENTRY, LISTED, ENTERS, LEAVES, STEP, TIED_STATE, TIED_STEP, TIED_GRADIENT = range(10, 20)
"""Columns: seconds; bytes that enter and leave; model states; weights; kept for backward; the allocator's extra of
each pass; gradients that data-parallel ranks sum; kept besides for an operator farther on than the next; of what is
kept, what no other operator reads, such as masks; kept besides if a recomputed run begins here: inputs that nobody
keeps otherwise; what the release's choice of recomputed operators takes for kept: the profile's figure as it is; what
each GPU gets and sends where a stage begins and ends; what the optimizer step works in; of states,
of that and of gradients, what an operator before in the same stage has already, as both share a weight (the release has
neither)."""
NUM_COLUMNS = 20

TIME_FORWARD, TIME_BACKWARD, TIME_RECOMPUTE, TIME_TRANSFER, TIME_RESHARD, TIME_SYNC, MEMORY = range(7)
"""Figures of a stage: seconds per microbatch (synchronisation: per iteration), bytes."""
NUM_FIGURES = 7
NEIGHBOUR_BITS = 13
"""What describes the stage at a border: that there is one, log2 of its GPUs, and its cell."""


class Arrays(NamedTuple):
    """What the compiled functions read; see ``searchers.aceso.tables``.

    Attributes:
        columns: float64[num_cells, NUM_COLUMNS, num_operators]; a forward time of infinity is no such cell.
        group: int32[num_operators]: operators of one name.
        layer: int32[num_operators].
        may_free: uint8[num_operators]: a recomputed run may begin here.
        reach: int32[num_operators]: the last operator that ``FAR`` is kept for.
        transfer_bytes: float64[2, num_knots]: message sizes, inside a node and between nodes.
        transfer_s: float64[2, num_degrees, num_knots]: seconds of 2**i such messages at once.
        sync: float64[num_degrees, num_replica_counts, 2]: latency and seconds per byte of a gradient all-reduce over
            2**j replicas that are 2**i ranks apart.
        gather: float64[num_degrees, 2]: the same of an all-gather over 2**i neighbours, for resharding.
        degrees: int32[num_cells, 3]: log2 of tensor degree, samples per GPU, partition.
        rules: int64[3]: steps of the transfer table taken as they are (release) instead of interpolated; the last
            operator's extra left out, the weights its least, and transfers at both ends of the pipeline (release); the
            input of the first stage counts.
        tied_to: int32[num_operators]: the operator before that shares a weight with this one; -1 for none.
    """

    columns: Floats
    group: Int32s
    layer: Int32s
    may_free: Bytes
    reach: Int32s
    transfer_bytes: Floats
    transfer_s: Floats
    sync: Floats
    gather: Floats
    degrees: Int32s
    rules: NDArray[np.int64]
    tied_to: Int32s
