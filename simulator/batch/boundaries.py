"""Transfers between the stages of many plans: what crosses a boundary, between whom, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from simulator.batch.pipeline import boundary_codes
from simulator.batch.plans import PlanBatch
from simulator.batch.stages import REPLICATED, Floats, Ints, ModelShape
from simulator.problem import Problem

Way = tuple[Ints, Ints, Floats]
"""Transfers of one microbatch: sending units, receiving units, seconds alone."""


@dataclass(frozen=True)
class Boundary:
    """Transfers of one microbatch over one boundary; units counted from the first of their stage.

    Attributes:
        forward_s, backward_s: Hold for every unit, where all are alike; else NaN.
        forward, backward: All transfers.
    """

    forward_s: float
    backward_s: float
    forward: Way
    backward: Way


class Boundaries:
    """Works out boundaries, equal ones once.

    Args:
        problem: The problem.
        shape: Shape of its workload.
        transfers: They take time.
        blocking: A stage goes on only when what it sent has arrived.
    """

    def __init__(self, problem: Problem, shape: ModelShape, *, transfers: bool, blocking: bool) -> None:
        self.problem = problem
        self.shape = shape
        self.transfers = transfers
        self.blocking = blocking
        self.period = period(problem)
        self.known: dict[int, Boundary] = {}
        self._transfer_s: dict[tuple[float, int, int, bool], float] = {}
        sizes: dict[float, int] = {}
        self._tensor_ids = np.array([sizes.setdefault(size, len(sizes)) for size in shape.tensor_bytes], dtype=np.int64)

    def times(
        self, batch: PlanBatch, unit_sizes: Ints, layouts: tuple[Ints, Ints]
    ) -> tuple[Floats, Floats, NDArray[np.uint64]]:
        """Return seconds forward and backward, and a key, of every stage; NaN where units of a stage differ.

        Rows belong to the boundary behind a stage; those of last stages say nothing.

        Args:
            batch: The plans.
            unit_sizes: int64[S]. Neighbouring devices of a stage that act as one.
            layouts: ``StageRowsBuilder.layouts`` where tensors are split.
        """
        count = batch.num_stages
        before = np.flatnonzero(~np.append(batch.is_first[1:], True))
        after = before + 1
        shape = self.shape
        made, read = layouts
        size = batch.microbatch_size[batch.plan_of_stage[before]]
        place = batch.first_devices[before] % self.period
        meshes = [batch.tp[before], batch.dp[before], batch.tp[after], batch.dp[after]]
        degrees = np.stack([*meshes, unit_sizes[before], unit_sizes[after], size, place], axis=1)
        cuts = batch.stops[before]
        keys, sent, received = boundary_codes(
            batch.firsts[before],
            cuts,
            batch.stops[after],
            degrees,
            self._tensor_ids,
            made,
            read,
            shape.reader_offsets,
            shape.readers,
            shape.producers,
            shape.crossing_offsets,
            shape.crossing,
        )
        starts = np.concatenate([[0], np.cumsum(shape.crossing_offsets[cuts + 1] - shape.crossing_offsets[cuts])])
        distinct, example, inverse = np.unique(keys, return_index=True, return_inverse=True)
        found = np.empty((len(distinct), 2))
        for number, row in enumerate(example.tolist()):
            key = int(distinct[number])
            if key not in self.known:
                codes = slice(int(starts[row]), int(starts[row + 1]))
                self.known[key] = self._boundary(
                    batch, int(before[row]), unit_sizes, sent[codes].tolist(), received[codes].tolist()
                )
            found[number] = self.known[key].forward_s, self.known[key].backward_s
        forward_s, backward_s = np.zeros(count), np.zeros(count)
        forward_s[before], backward_s[before] = found[inverse].T
        key_of_stage = np.zeros(count, dtype=np.uint64)
        key_of_stage[before] = keys
        return forward_s, backward_s, key_of_stage

    def _boundary(
        self, batch: PlanBatch, stage: int, unit_sizes: Ints, sent: list[int], received: list[int]
    ) -> Boundary:
        """Work out the transfers between a stage and the next."""
        shape = self.shape
        cut = int(batch.stops[stage])
        ours = (int(batch.dp[stage]), int(batch.tp[stage]))
        theirs = (int(batch.dp[stage + 1]), int(batch.tp[stage + 1]))
        size = int(batch.microbatch_size[batch.plan_of_stage[stage]])
        tensors = shape.crossing[shape.crossing_offsets[cut] : shape.crossing_offsets[cut + 1]]
        forward: dict[tuple[int, int], float] = {}
        backward: dict[tuple[int, int], float] = {}
        for tensor, code, other in zip(tensors.tolist(), sent, received, strict=True):
            num_bytes = float(shape.tensor_bytes[tensor]) * size
            code, other = (code if ours[1] > 1 else REPLICATED), (other if theirs[1] > 1 else REPLICATED)
            for total, way in (
                (forward, _route(*ours, code, *theirs, other)),
                (backward, _route(*theirs, other, *ours, code)),
            ):
                for source, target, share in way:
                    total[source, target] = total.get((source, target), 0.0) + share * num_bytes
        first, second = int(batch.first_devices[stage]), int(batch.first_devices[stage + 1])
        own, others = int(unit_sizes[stage]), int(unit_sizes[stage + 1])
        out, back = (
            self._way(forward, first, own, second, others),
            self._way(backward, second, others, first, own),
        )
        units, other_units = ours[0] * ours[1] // own, theirs[0] * theirs[1] // others
        return Boundary(self._alike_s(out, units, other_units), self._alike_s(back, other_units, units), out, back)

    def _way(
        self, transfers: dict[tuple[int, int], float], source: int, own: int, target: int, others: int
    ) -> tuple[Ints, Ints, Floats]:
        """Return transfers between units: of those between the same two, the slowest is always the last."""
        slowest: dict[tuple[int, int], float] = {}
        period, seconds_of = self.period, self._transfer_s
        for (a, b), num_bytes in transfers.items():
            node, slot = divmod(source + a, period)
            other_node, other_slot = divmod(target + b, period)
            key = (num_bytes, slot, other_slot, node == other_node)
            seconds = seconds_of.get(key)
            if seconds is None:
                price = self.problem.hardware.transfer(num_bytes, source + a, target + b)
                seconds = seconds_of[key] = price.alone_s if self.transfers else 0.0
            pair = (a // own, b // others)
            slowest[pair] = max(slowest.get(pair, 0.0), seconds)
        pairs = np.array(list(slowest), dtype=np.int64)
        return pairs[:, 0].copy(), pairs[:, 1].copy(), np.array(list(slowest.values()))

    def _alike_s(self, way: tuple[Ints, Ints, Floats], num_sources: int, num_targets: int) -> float:
        """Return the seconds after which every unit has received, if all start together; NaN if not alike.

        Where a stage waits for what it sends, all its units must have sent by then, too.
        """
        sources, targets, seconds = way
        longest = float(seconds.max())
        slowest = seconds == longest
        alike = len(np.unique(targets[slowest])) == num_targets
        if self.blocking:
            alike &= len(np.unique(sources[slowest])) == num_sources
        return longest if alike else float("nan")


def period(problem: Problem) -> int:
    """Return after how many devices a cluster repeats itself: its node where all are equal, else its size."""
    nodes = problem.hardware.cluster.nodes
    alike = all(replace(node, first_device=0) == nodes[0] for node in nodes)
    return nodes[0].num_devices if alike else problem.num_devices


@lru_cache(maxsize=65536)
def _route(
    dp: int, tp: int, layout: int, other_dp: int, other_tp: int, other_layout: int
) -> tuple[tuple[int, int, float], ...]:
    """Return ``(sender, receiver, share of the tensor)``, as ``lowering.transfers.route`` has them.

    Args:
        dp, tp, layout: Mesh of the sender and how the tensor lies over its tensor axis.
        other_dp, other_tp, other_layout: The same of the receiver.
    """
    found = []
    sent = [0] * (dp * tp)
    for receiver in range(other_dp * other_tp):
        batch, rank = divmod(receiver, other_tp)
        for part in range(batch * dp // other_dp, -(-(batch + 1) * dp // other_dp)):
            low, high = max(part * other_dp, batch * dp), min((part + 1) * other_dp, (batch + 1) * dp)
            share = (high - low) / (dp * other_dp)
            if layout == REPLICATED:
                cut = 1 if other_layout == REPLICATED else other_tp
                holder = min(range(part * tp, (part + 1) * tp), key=sent.__getitem__)
                sent[holder] += high - low
                found.append((holder, receiver, share / cut))
            elif layout == other_layout:
                for piece in range(rank * tp // other_tp, -(-(rank + 1) * tp // other_tp)):
                    low = max(piece * other_tp, rank * tp)
                    high = min((piece + 1) * other_tp, (rank + 1) * tp)
                    found.append((part * tp + piece, receiver, share * (high - low) / (tp * other_tp)))
            else:
                cut = tp if other_layout == REPLICATED else tp * other_tp
                found += [(part * tp + piece, receiver, share / cut) for piece in range(tp)]
    return tuple(found)
