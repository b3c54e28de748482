"""What a layer, and a stage of layers, works in besides what is kept: as Alpa's stages count it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from searchers.alpa.intra_op import IntraOp, saved_first
from searchers.layer_memory import LayerWalk
from simulator.plan import Sharding


class LayerNeeds(NamedTuple):
    """What a layer takes of its stage's memory besides what operators keep, in bytes.

    Attributes:
        working_bytes: Alive at most while its backward pass runs, what operators never give back included.
        early_bytes: The same of what comes before its last tied parameter in forward.
        received_bytes: Held per microbatch in flight by a stage that begins here: what earlier stages sent.
        sent_bytes: The same by one that ends here, of what it sends on.
    """

    working_bytes: float
    early_bytes: float
    received_bytes: float
    sent_bytes: float


def layer_needs(
    problem: IntraOp, shardings: Mapping[int, Sharding], before: int, again: tuple[int, int] | None
) -> LayerNeeds:
    """Return what a layer takes besides what its stage keeps of it.

    A stage keeps what operators are the first to keep (``saved_bytes``); where layers are recomputed, what leaves them
    and tokens or images (``remaining_bytes``). See `layer_walk` for arguments.
    """
    walk = layer_walk(problem, shardings, before, again)
    found, received = walk.memory(), walk.received()
    if again:
        kept = found.checkpointed_bytes - found.buffer_bytes
        working, early = (most - kept for most in (found.again_peak_bytes, found.again_early_peak_bytes))
        return LayerNeeds(working, early, sum(received.values()), 0.0)
    counted = {name for index in shardings for name in saved_first(problem.costs).get(index, ())}
    return LayerNeeds(
        found.peak_bytes - found.saved_bytes + found.buffer_bytes,
        found.early_peak_bytes - found.saved_bytes + found.buffer_bytes,
        sum(size for name, size in received.items() if name not in counted),
        found.unkept_output_bytes if problem.costs.problem.runtime.keeps_stage_outputs else 0.0,
    )


def stage_working_bytes(needs: Sequence[LayerNeeds], waiting: Iterable[tuple[int, int, float]]) -> float:
    """Return what is alive at most while backward passes of a stage's layers run.

    Args:
        needs: Of its layers.
        waiting: First and last layer that use a weight, and the bytes of its gradient: the last one makes it, and it
            waits until the first is through.
    """
    beside = [0.0] * len(needs)
    early = [0.0] * len(needs)
    for first, last, num_bytes in waiting:
        early[last] += num_bytes
        for place in range(first, last):
            beside[place] += num_bytes
    return max(
        max(own.working_bytes, own.early_bytes + before) + more
        for own, before, more in zip(needs, early, beside, strict=True)
    )


def layer_walk(
    problem: IntraOp, shardings: Mapping[int, Sharding], before: int, again: tuple[int, int] | None
) -> LayerWalk:
    """Return the walk over a layer that is sharded so.

    Args:
        problem: The intra-operator problem.
        shardings: Of each operator of the layer.
        before: First operator of the layer before it.
        again: Operators ``[start, stop)`` of it that are recomputed, None if it is not.
    """
    span = min(shardings), max(shardings) + 1
    return LayerWalk(problem.costs, span, again or span, before, lambda index: problem.cost(index, shardings[index]))
