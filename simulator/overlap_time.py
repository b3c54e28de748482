"""Closed form of what a stage sends beside its passes: gathers one layer ahead, and reductions behind gradients.

While computation and communication both run, both are slower by the device's factors, as in the engine; what is left of
the longer then runs alone. Layers count as equal, and gathers and reductions as one after the other.

Source: the engine's rules (``docs/model.md``); slowing both sides down is Galvatron-BMW's (TKDE 2024, Section V).
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from simulator.compiled_cache import also_compiled


class Sent(NamedTuple):
    """What a stage sends beside its passes.

    Attributes:
        root_s: Gathers before a forward pass that nothing hides.
        gathered_s: The other gathers of either pass of a microbatch.
        reduced_s: A reduction of all gradients.
        layer_share: What the first layer of a pass is of the gathers, and of the pass.
        first_share: What part of a backward pass has gone before the first gradients are reduced.
        last_share: What part of the gradients is there when it has ended, and not before.
        computation_slowdown, communication_slowdown: Factors while both run.
    """

    root_s: float
    gathered_s: float
    reduced_s: float
    layer_share: float
    first_share: float
    last_share: float
    computation_slowdown: float
    communication_slowdown: float


@also_compiled
def beside_s(computed_s: float, sent_s: float, computation_slowdown: float, communication_slowdown: float) -> float:
    """Return the seconds until both are through that begin together.

    >>> beside_s(4.0, 1.0, 1.0, 1.0), beside_s(4.0, 1.0, 2.0, 1.0), beside_s(1.0, 5.0, 1.0, 2.0)
    (4.0, 4.5, 5.5)
    """
    if sent_s * communication_slowdown <= computed_s * computation_slowdown:
        return computed_s + sent_s * communication_slowdown * (1.0 - 1.0 / computation_slowdown)
    return sent_s + computed_s * computation_slowdown * (1.0 - 1.0 / communication_slowdown)


def bucket_shares(elements: float, bucket_elements: float, begun_elements: float) -> tuple[float, float, float]:
    """Return in how many buckets a stage reduces its gradients, and ``first_share`` and ``last_share`` of ``Sent``.

    The last bucket has as many gradients as the others, or all of the stage's first parameters if that is more: a table
    of embeddings is not cut. Others are counted as if tensors were, so there are too many where they are wide.

    Args:
        elements: All of them.
        bucket_elements: So many fill a bucket.
        begun_elements: Of the first operator that has any.

    >>> bucket_shares(100.0, 25.0, 10.0), bucket_shares(100.0, 25.0, 40.0), bucket_shares(100.0, 200.0, 10.0)
    ((4.0, 0.25, 0.25), (4.0, 0.25, 0.4), (1.0, 1.0, 1.0))
    """
    if elements <= bucket_elements:
        return 1.0, 1.0, 1.0
    first = bucket_elements / elements
    return float(ceil(elements / bucket_elements)), first, max(first, begun_elements / elements)


def unit_shares(num_layers: int, num_root: int, begins_in_root: bool, root_share: float) -> tuple[float, float, float]:
    """Return what ``bucket_shares`` does where each layer is reduced by itself, and the root unit at once.

    Args:
        num_layers, num_root: Layers of the stage, without and of the root unit.
        begins_in_root: The first layer is of the root unit, whose gradients are complete when it has been passed.
        root_share: What part of the stage's parameters is of the root unit.

    >>> unit_shares(7, 0, False, 0.0), unit_shares(3, 2, True, 0.4)
    ((7.0, 0.14285714285714285, 0.14285714285714285), (4.0, 0.25, 0.4))
    """
    count = float(max(1, num_layers + min(num_root, 1)))
    return count, 1.0 / count, root_share if begins_in_root and root_share > 0.0 else 1.0 / count


def overlapped_s(
    forward_s: float, backward_s: float, sent: Sent, prefetches: bool, overlaps: bool, every: bool, waits: bool
) -> tuple[float, float, float, float]:
    """Return the seconds of a forward pass, of a backward pass without reductions, of those, and of those once.

    Args:
        forward_s, backward_s: What a microbatch computes.
        sent: What is sent beside.
        prefetches: A layer's parameters are gathered while the one before computes.
        overlaps: Passes go on while gradients are reduced.
        every: Each microbatch's gradients are reduced, not only the sums of all.
        waits: If so, the next pass waits for them.

    Three layers, each gathered in a second, computed in one and two, and reduced in one:

    >>> sent = Sent(0.0, 3.0, 3.0, 1 / 3, 1 / 3, 1 / 3, 1.0, 1.0)
    >>> overlapped_s(3.0, 6.0, sent, False, False, False, False), overlapped_s(3.0, 6.0, sent, True, False, True, False)
    ((6.0, 9.0, 0.0, 3.0), (4.0, 7.0, 3.0, 0.0))
    >>> overlapped_s(3.0, 6.0, sent, True, True, False, False), overlapped_s(3.0, 6.0, sent, True, True, True, True)
    ((4.0, 7.0, 0.0, 1.0), (4.0, 7.0, 1.0, 0.0))
    """
    slow_s, slow_sent_s = sent.computation_slowdown, sent.communication_slowdown
    ahead_s = sent.gathered_s if prefetches else 0.0
    alone_s = sent.gathered_s - ahead_s
    layer, rest = sent.layer_share, 1.0 - sent.layer_share
    gathers_s = layer * ahead_s
    passed_s, returned_s = sent.root_s + alone_s + forward_s, alone_s + backward_s
    if ahead_s > 0.0:
        passed_s = sent.root_s + gathers_s + layer * forward_s
        passed_s += beside_s(rest * forward_s, rest * ahead_s, slow_s, slow_sent_s)
        returned_s = gathers_s + layer * backward_s
        returned_s += beside_s(rest * backward_s, rest * ahead_s, slow_s, slow_sent_s)
    if not overlaps:
        return passed_s, returned_s, sent.reduced_s if every else 0.0, 0.0 if every else sent.reduced_s
    first, last_s = sent.first_share, sent.last_share * sent.reduced_s
    meanwhile_s = rest * ahead_s + sent.reduced_s - last_s
    reducing_s = alone_s + gathers_s + first * backward_s + last_s
    reducing_s += beside_s((1.0 - first) * backward_s, meanwhile_s, slow_s, slow_sent_s)
    if not every:
        return passed_s, returned_s, 0.0, max(0.0, reducing_s - returned_s)
    if waits:
        return passed_s, returned_s, max(0.0, reducing_s - returned_s), 0.0
    # Reductions go on beside the passes of the next microbatch; the last one and the first gather share links.
    shared_s = min(sent.root_s, last_s)
    both_s = sent.root_s + 2.0 * alone_s + shared_s
    both_s += beside_s(forward_s + backward_s, 2.0 * ahead_s + sent.reduced_s - shared_s, slow_s, slow_sent_s)
    within_s = max(0.0, both_s - passed_s - returned_s)
    return passed_s, returned_s, within_s, max(0.0, reducing_s - returned_s - within_s)
