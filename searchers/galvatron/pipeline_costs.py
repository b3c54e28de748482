"""What the layers of a stage and the stages of a pipeline come to: memory (Eq. 2), time (Eq. 9) and balance (Eq. 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from simulator.closed_forms.estimate import queued_s

MIB = 1 << 20

Numbers = TypeVar("Numbers", float, NDArray[np.float64])


@dataclass(frozen=True)
class LayerCost:
    """One layer, one strategy, one microbatch.

    Attributes:
        step_s: Forward and backward without gradient synchronisation (Eq. 9's no_grad_sync).
        sync_s: What the last microbatch takes longer: gradients behind its backward pass, and the optimizer.
        stretch_s: Of that, by how much its backward pass ends later, for which the stage before waits.
        forward_bytes: O_f: kept per microbatch in flight.
        backward_bytes: O_b: needed on top during the layer's own backward pass.
        state_bytes: O_ms: parameters, gradients, optimizer states.
        optimizer_bytes: What the optimizer step works in, when nothing is kept for backward any more.
        output_bytes: What one rank hands to the next layer.
        sent_bytes: Of that, what a stage that ends here holds besides, per microbatch in flight.
        received_bytes: What one that begins here does.
        buffer_bytes: What is never given back, as all layers of a stage share.
        early_bytes: Of ``backward_bytes``, what operators before the last tied parameter need: a gradient of that waits
            beside them where the stage holds it already.
    """

    step_s: float
    sync_s: float
    stretch_s: float
    forward_bytes: float
    backward_bytes: float
    state_bytes: float
    optimizer_bytes: float
    output_bytes: float
    sent_bytes: float
    received_bytes: float
    buffer_bytes: float
    early_bytes: float


def in_flight(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> int:
    """Return how many microbatches a stage holds at once.

    >>> [in_flight("1f1b", stage, 4, 8) for stage in range(4)], in_flight("gpipe", 0, 4, 8)
    ([4, 3, 2, 1], 8)
    """
    return num_microbatches if schedule == "gpipe" else min(num_stages - stage, num_microbatches)


def pipeline_s(
    step_s: Sequence[float],
    sync_s: Sequence[float],
    num_microbatches: int,
    *,
    last_s: Sequence[float] | None = None,
    delays_s: Sequence[float] | None = None,
    backward_s: Sequence[float] | None = None,
    paper: bool = False,
) -> float:
    """Return Eq. 9: ``(m - 1) max(step) + sum(step + sync)``, seconds per iteration.

    The printed sum counts every stage's synchronisation, though stages synchronise side by side, and later ones while
    earlier ones still run their last backward passes, ``backward_s``. Here what sticks out longest counts once, unless
    ``paper``, but for ``delays_s``, the part of each that delays the backward pass of the stage before. A last
    microbatch that is smaller takes ``last_s``.

    >>> pipeline_s([2.0, 3.0], [1.0, 0.5], 4), pipeline_s([2.0, 3.0], [1.0, 0.5], 4, paper=True)
    (15.0, 15.5)
    >>> pipeline_s([2.0, 3.0], [1.0, 0.5], 4, last_s=[1.0, 1.5])
    13.5
    >>> pipeline_s([2.0, 3.0], [1.0, 0.5], 4, delays_s=[0.25, 0.5])
    15.5
    >>> pipeline_s([2.0, 3.0], [0.5, 2.0], 4), pipeline_s([2.0, 3.0], [0.5, 2.0], 4, backward_s=[1.25, 2.0])
    (16.0, 14.75)
    """
    delays_s = delays_s or [0.0] * len(sync_s)
    rest_s = ahead_s = 0.0
    for sync, delay, backward in zip(sync_s, delays_s, backward_s or [0.0] * len(sync_s), strict=True):
        rest_s = max(rest_s, sync - delay - ahead_s)
        ahead_s += backward + delay
    synced_s = sum(sync_s) if paper else sum(delays_s) + rest_s
    if last_s is not None:
        return queued_s(step_s, last_s, num_microbatches) + synced_s
    return (num_microbatches - 1) * max(step_s) + sum(step_s) + synced_s


def peak_bytes(costs: Sequence[LayerCost], held: float, *, sends: bool = False) -> float:
    """Return Eq. 2 of a stage: the largest of what is kept up to a layer plus its backward need, and all states.

    The optimizer step, which comes when nothing is kept any more, can need more.

    Args:
        costs: Layers of the stage in order.
        held: Microbatches in flight; the others of them keep every layer's forward memory.
        sends: Another stage follows.
    """
    whole = sum(cost.forward_bytes for cost in costs)
    running = peak = 0.0
    for cost in costs:
        running += cost.forward_bytes
        peak = max(peak, running + cost.backward_bytes)
    step = sum(cost.optimizer_bytes for cost in costs)
    ends = costs[0].received_bytes + (costs[-1].sent_bytes if sends else 0.0)
    lasting = sum(cost.state_bytes for cost in costs) + max(cost.buffer_bytes for cost in costs)
    return max((held - 1) * whole + peak + held * ends, step) + lasting


def released_bytes(costs: Sequence[LayerCost], held: float) -> float:
    """Return what the layers of a stage take by the release's model with ``held`` microbatches in flight.

    Under checkpointing one layer's inner activations are set aside, of all microbatches in flight.
    """
    return sum(released_layer_bytes(cost, held) for cost in costs) + held * max(cost.backward_bytes for cost in costs)


def released_layer_bytes(cost: LayerCost, held: float) -> float:
    """Return what a layer takes by the release's model with ``held`` microbatches in flight."""
    return float(in_whole_mib(held * cost.forward_bytes + cost.state_bytes))


def in_whole_mib(num_bytes: Numbers) -> Numbers:
    """Return bytes rounded up to whole MiB: a number, or an array of any shape."""
    rounded: Numbers = np.ceil(num_bytes / MIB) * MIB
    return rounded


def balance_degree(loads: Sequence[float]) -> float:
    """Return Eq. 6: ``1 - max / sum``, at most ``1 - 1 / P``.

    >>> balance_degree([1.0, 1.0, 1.0, 1.0]), balance_degree([3.0, 1.0])
    (0.75, 0.25)
    """
    return 1.0 - max(loads) / sum(loads)
