"""Tables of the fast estimate: costs of every operator under one strategy, worked out by the lowering itself.

Nothing is priced here that ``estimate`` does not price: a row is what ``ProgramBuilder`` says of one operator
between given neighbours, and a boundary is what ``lowering.transfers`` says of two stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from datafiles.words import counted
from simulator.closed_forms.operator_needs import saved_bytes
from simulator.closed_forms.stage_prices import added_s, again_s, beyond_host_s, weights_s
from simulator.costs import CostTables
from simulator.fast.arrays import (
    ADDED_HOST_S,
    ADDED_S,
    ADDED_SCATTERED_S,
    AGAIN_HOST_S,
    AGAIN_S,
    BACKWARD_HOST_S,
    BACKWARD_S,
    BUCKETS,
    COPIED,
    COPIES_PART,
    ELEMENTS,
    FAMILY,
    FORWARD_HOST_S,
    FORWARD_S,
    GATHER,
    GATHER_CHANNEL,
    GATHER_S,
    LARGE,
    MAX_FAMILIES,
    OF_INPUTS,
    PARTED,
    PARTED_S,
    PASSED_BYTES,
    PRIVATE,
    ROOT_S,
    SHARDED,
    STEP_COLUMNS,
    TIME_COLUMNS,
    UNSUITED,
    WEIGHT_S,
    Floats,
    Ints,
    Structure,
)
from simulator.fast.channels import Channels, Interner, MeasuredSeriesError
from simulator.fast.holdings import Holding, Holdings, view_of
from simulator.fast.layouts import Layouts
from simulator.fast.memory import (
    AGAIN,
    AGAIN_PEAK,
    AGAIN_SPLIT_PEAK,
    AGAIN_WAIT_PEAK,
    BUCKET,
    BUFFER,
    END_GIVEN,
    FORWARD_PEAK,
    GATHERED,
    GIVEN_BACK,
    KEPT,
    KEPT_PEAK,
    KEPT_SPLIT_PEAK,
    KEPT_WAIT_PEAK,
    LARGEST,
    MAXIMA,
    MEMORY_COLUMNS,
    NUM_STATES,
    PRODUCT,
    SHARD,
    STATES,
    TO_MULTIPLY,
    UNSHARDED,
    WEIGHTED,
    WHOLE,
    Savings,
    range_maxima,
)
from simulator.fast.rows import RowBuilder
from simulator.fast.structure import Names
from simulator.lowering.synchronisation import scatters
from simulator.plan import Sharding, resolve


@dataclass(frozen=True)
class Table:
    """Every operator of a workload under one strategy: one row of ``TimeTables`` and ``MemoryTables`` each."""

    sums: Floats
    memory_sums: Floats
    entering_s: Floats
    settling_s: Floats
    saved_bytes: Floats
    made_bytes: Floats
    read_bytes: Floats
    replicas: int
    has_private: Ints
    maxima: Floats
    made: Ints
    read: Ints
    passed: Ints
    in_shards: Ints
    num_parts: Ints
    families: Ints
    tied_bytes: Floats
    tied: Ints
    tied_work: Floats
    beyond_host_s: Floats


class TableBuilder:
    """Works out tables: once for operators that are alike, then spread over the workload by numbers.

    Operators of one signature are alike under one strategy but for the collectives around them, and these are alike
    for operators of one class (``Structure.classes``).

    Attributes:
        rows: Works out operators between unlike neighbours, and boundaries.
    """

    def __init__(
        self, costs: CostTables, structure: Structure, savings: Savings, names: Names, channels: Channels
    ) -> None:
        self.costs = costs
        self.problem = costs.problem
        self.structure = structure
        self.savings = savings
        self.names = names
        self.channels = channels
        self.rows = RowBuilder(costs, structure, names)
        self.waits_for_gathers = "gather" in costs.problem.runtime.host_waits
        numbers = Interner()
        self.layouts = Layouts(costs, names, numbers)
        self._holdings = Holdings(costs, channels, numbers)
        self._signatures = np.array(self.problem.workload.signatures, dtype=np.int64)
        widths = np.diff(structure.input_offsets)
        self._class_of_input = np.repeat(structure.classes, widths)
        self._place_of_input = np.arange(widths.sum()) - np.repeat(structure.input_offsets[:-1], widths)

    def table(self, strategy: Sharding, devices: Sequence[int], microbatch_size: int) -> Table:
        """Return the table of a strategy.

        Raises:
            ValueError: If the strategy does not fit the devices, the microbatch or an operator.
        """
        replicas = _replicas(strategy, devices, microbatch_size)
        workload, structure, signatures = self.problem.workload, self.structure, self._signatures
        shardings = [resolve(strategy, workload.operators[index]) for index in workload.signature_examples]
        families = np.full((MAX_FAMILIES, FAMILY), -1, dtype=np.int64)
        holdings = self._holdings_of(shardings, devices, microbatch_size, families)
        alone, beyond_s = self._times_alone(holdings, shardings, devices, microbatch_size)
        around = self._times_around(strategy, devices, microbatch_size)
        of_class = around[structure.classes]
        sums = np.zeros((len(workload) + 1, TIME_COLUMNS))
        sums[1:] = alone[signatures]
        sums[1:, [FORWARD_S, FORWARD_HOST_S]] = of_class[:, 0]
        sums[1:, [BACKWARD_S, BACKWARD_HOST_S]] = of_class[:, 1]
        sums[1:, PARTED_S] = of_class[:, PARTED, 0]
        np.cumsum(sums, axis=0, out=sums)
        self._add_gathers(sums, families)

        layouts = self.layouts
        made, settling_s, in_shards = layouts.made(shardings, devices, microbatch_size)
        read, parts = layouts.read(shardings)
        made_bytes = _padded([found.made for found in holdings])[signatures[structure.producers], layouts.made_as]
        read_bytes = _padded([found.read for found in holdings])[signatures[structure.readers], layouts.read_as]
        saved, gathered = self._saved(holdings, made_bytes, in_shards)
        memory_sums = self._memory_sums(holdings, saved)
        maxima = self._maxima(holdings, memory_sums, made_bytes, read_bytes, gathered)
        has_private = np.array([found.private > 0 for found in holdings])[signatures]
        tied = [holdings[signatures[index]] for index in dict.fromkeys(structure.tied.tolist())]
        return Table(
            sums=sums,
            memory_sums=memory_sums,
            entering_s=around[self._class_of_input, OF_INPUTS + self._place_of_input],
            settling_s=settling_s,
            saved_bytes=saved,
            made_bytes=made_bytes,
            read_bytes=read_bytes,
            replicas=replicas,
            has_private=PRIVATE * has_private + COPIED * (of_class[:, COPIES_PART, 0] > 0),
            maxima=np.stack([range_maxima(row) for row in maxima]),
            made=made,
            read=read,
            passed=layouts.passed(shardings)[signatures],
            in_shards=in_shards,
            num_parts=parts,
            families=families,
            tied_bytes=np.array([each for found in tied for each in found.tied_bytes]).reshape(-1, NUM_STATES),
            tied=np.array([each for found in tied for each in found.tied], dtype=np.int64).reshape(-1, 4),
            tied_work=np.array([each for found in tied for each in found.tied_work]).reshape(-1, STEP_COLUMNS),
            beyond_host_s=beyond_s[signatures] if self.waits_for_gathers else np.zeros((0, 4)),
        )

    def _holdings_of(
        self, shardings: Sequence[Sharding], devices: Sequence[int], microbatch_size: int, families: Ints
    ) -> list[Holding]:
        """Return by signature what its operators hold, and fill in the families of their parameters."""
        family_of: dict[object, int] = {}
        holdings = []
        for index, sharding in zip(self.problem.workload.signature_examples, shardings, strict=True):
            try:
                found = self._holdings.of(index, sharding, devices, microbatch_size, family_of, families)
            except MeasuredSeriesError:
                raise
            except ValueError:
                found = self._holdings.nothing(index)
            holdings.append(found)
        return holdings

    def _times_alone(
        self, holdings: Sequence[Holding], shardings: Sequence[Sharding], devices: Sequence[int], microbatch_size: int
    ) -> tuple[Floats, Floats]:
        """Return by signature what ``TimeTables.sums`` has whatever is around operators; what is beyond their host."""
        sums, beyond_s = np.zeros((len(holdings), TIME_COLUMNS)), np.zeros((len(holdings), 4))
        for number, (index, found) in enumerate(zip(self.problem.workload.signature_examples, holdings, strict=True)):
            row = sums[number]
            row[UNSUITED] = found.unsuited
            if found.unsuited:
                continue
            view = view_of(self.costs, {index: shardings[number]}, devices, microbatch_size)
            row[WEIGHT_S] = weights_s(view, first=False)
            scattered = ADDED_SCATTERED_S - ADDED_S if scatters(shardings[number], self.problem.runtime) else 0
            row[[ADDED_S + scattered, ADDED_HOST_S + scattered]] = added_s(view)
            row[[AGAIN_S, AGAIN_HOST_S]] = again_s(view)
            row[PASSED_BYTES:BUCKETS], row[BUCKETS], row[LARGE] = found.work, found.buckets, found.num_large
            row[ELEMENTS:] = found.elements
            if self.waits_for_gathers:
                beyond_s[number] = beyond_host_s(view, index)
        return sums, beyond_s

    def _times_around(self, strategy: Sharding, devices: Sequence[int], microbatch_size: int) -> Floats:
        """Return rows of classes with neighbours of the same strategy: float64[classes, OF_INPUTS + inputs, 2]."""
        structure = self.structure
        most_inputs = int(np.diff(structure.input_offsets).max(initial=1))
        rows = np.zeros((len(self.names.examples), OF_INPUTS + most_inputs, 2))
        for number, index in enumerate(self.names.examples):
            near = structure.neighbours[structure.neighbour_offsets[index] : structure.neighbour_offsets[index + 1]]
            try:
                strategies = dict.fromkeys([*near.tolist(), index], strategy)
                row = self.rows.row(index, strategies, devices, microbatch_size)
            except ValueError:  # Unsuited to it or to a neighbour; plans that combine the two are refused.
                continue
            rows[number, : len(row)] = row
        return rows

    def _saved(self, holdings: Sequence[Holding], made_bytes: Floats, in_shards: Ints) -> tuple[Floats, Floats]:
        """Return what each saving keeps where neighbours have the same strategy, and what operators gather again.

        Returns:
            As ``MemoryTables.saved_bytes``; float64[2, N], outside segments and in them.
        """
        runtime, savings = self.problem.runtime, self.savings
        gathered = np.zeros((2, len(self._signatures)))
        operators, places = np.array(self.names.savings, dtype=np.int64).reshape(-1, 2).T
        own = _padded([found.saved for found in holdings])[self._signatures[operators], places]
        saved = np.repeat(own[:, None], 3, axis=1)
        counts = np.diff(savings.offsets)
        firsts, makers, tensors = (
            np.repeat(each, counts) for each in (savings.offsets[:-1], savings.producers, savings.tensors)
        )
        keeps_made = runtime.keeps_gathered_shards | ((operators[firsts] == makers) & (own[firsts] > 0.0))
        read = np.flatnonzero(tensors >= 0)
        made = made_bytes[tensors[read]]
        regathers = (in_shards[tensors[read]] > 0) & (not runtime.keeps_gathered_inputs)
        cases = np.stack([made, own[read], regathers, keeps_made[read]], axis=1)
        unlike, case_of = np.unique(cases, axis=0, return_inverse=True)
        for kind in (SHARD, WHOLE):
            sizes = [
                saved_bytes(
                    made, own, regathers=bool(regathers), keeps_made=bool(keeps), in_segment=kind == SHARD
                )
                for made, own, regathers, keeps in unlike.tolist()
            ]
            saved[read, kind] = np.array(sizes)[case_of]
        again = np.where(own[read] > made, own[read], 0.0)
        np.add.at(gathered[0], operators[read], again * regathers)
        np.add.at(gathered[1], operators[read], again)
        return saved, gathered

    def _memory_sums(self, holdings: Sequence[Holding], saved: Floats) -> Floats:
        """Return ``MemoryTables.sums``."""
        rows = np.zeros((len(holdings), MEMORY_COLUMNS))
        for row, found in zip(rows, holdings, strict=True):
            row[KEPT] = row[AGAIN] = found.private
            row[WEIGHTED], row[TO_MULTIPLY] = found.weighted, found.to_multiply
            row[GATHERED], row[UNSHARDED] = found.gathered, found.unsharded
            row[[GIVEN_BACK, END_GIVEN]] = found.given
            row[STATES:] = found.states
        sums = np.zeros((len(self._signatures) + 1, MEMORY_COLUMNS))
        sums[1:] = rows[self._signatures]
        for kind, summed in ((WHOLE, KEPT), (SHARD, AGAIN)):
            less = np.concatenate([[0.0], saved[:-1, kind]])
            less[self.savings.offsets[:-1]] = 0.0
            np.add.at(sums[:, summed], self.savings.operators + 1, saved[:, kind] - less)
        return np.cumsum(sums, axis=0)

    def _maxima(
        self,
        holdings: Sequence[Holding],
        memory_sums: Floats,
        made_bytes: Floats,
        read_bytes: Floats,
        gathered: Floats,
    ) -> Floats:
        """Return what ``MemoryTables.maxima`` are of: float64[MAXIMA, N]."""
        alone = np.zeros((MAXIMA, len(holdings)))
        alone[[PRODUCT, LARGEST, BUFFER, BUCKET]] = np.array(
            [(found.product, found.largest, found.buffer, found.bucket) for found in holdings]
        ).T
        maxima = alone[:, self._signatures]
        forward, backward, waiting = self._needed(holdings, made_bytes, read_bytes)
        maxima[KEPT_PEAK] = memory_sums[1:, KEPT] + (backward + waiting + gathered[0])
        maxima[AGAIN_PEAK] = memory_sums[1:, AGAIN] + (np.maximum(forward, backward) + waiting + gathered[1])
        maxima[FORWARD_PEAK] = memory_sums[1:, KEPT] + (forward + gathered[0])
        waiting_sums = memory_sums[:, UNSHARDED] * (self.problem.runtime.waiting_gradient_share or 0.0)
        weights_wait = waiting_sums[self.structure.part_stop[self.structure.part_of]] - waiting_sums[1:]
        maxima[[KEPT_WAIT_PEAK, AGAIN_WAIT_PEAK]] = maxima[[KEPT_PEAK, AGAIN_PEAK]] + weights_wait
        for_weights = memory_sums[1:, [WEIGHTED, TO_MULTIPLY]].sum(axis=1)
        maxima[[KEPT_SPLIT_PEAK, AGAIN_SPLIT_PEAK]] = maxima[[KEPT_PEAK, AGAIN_PEAK]] - for_weights
        return maxima

    def _needed(
        self, holdings: Sequence[Holding], made_bytes: Floats, read_bytes: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Return by operator what it works in forward and backward, and gradients that wait for others.

        All operators have the same strategy.

        A gradient is there from the last reader of a tensor, where its backward pass begins it, to who made that.
        """
        shape, last_reading = self.structure, self.structure.reader_offsets[1:] - 1
        waiting, begun = np.zeros(len(self._signatures) + 1), np.zeros(len(self._signatures))
        np.add.at(waiting, shape.producers + 1, made_bytes)
        np.add.at(waiting, shape.readers[last_reading], -made_bytes)
        np.add.at(begun, shape.readers[last_reading], read_bytes[last_reading])
        forward, backward = np.array([found.own_working for found in holdings])[self._signatures].T
        return forward, backward + begun, np.cumsum(waiting)[:-1]

    def _add_gathers(self, sums: Floats, families: Ints) -> None:
        """Fill the seconds of gathering whole units; tied parameters are added up by plan."""
        structure, runtime = self.structure, self.problem.runtime
        known: dict[tuple[float, ...], float] = {}
        tied_units = set(structure.unit_of[structure.tied].tolist())
        totals = np.zeros(2)
        for unit, (first, stop) in enumerate(zip(structure.unit_first, structure.unit_stop, strict=True)):
            elements = sums[stop, ELEMENTS:] - sums[first, ELEMENTS:]
            key = tuple(elements.tolist())
            if key not in known:
                num_bytes: dict[int, float] = {}
                channel_of: dict[int, int] = {}
                for family in range(MAX_FAMILIES):
                    if families[family, GATHER] >= 0 and elements[family] > 0:
                        own, is_sharded = int(families[family, GATHER]), families[family, SHARDED] > 0
                        each = runtime.gathered_parameter_bytes if is_sharded else runtime.parameter_bytes
                        num_bytes[own] = num_bytes.get(own, 0.0) + float(elements[family]) * each
                        channel_of[own] = int(families[family, GATHER_CHANNEL])
                known[key] = sum(self.channels.price_s(channel_of[own], size) for own, size in num_bytes.items())
            if unit not in tied_units:
                totals[int(structure.gathers_of[unit] == 1)] += known[key]
            sums[first + 1 : stop + 1, [GATHER_S, ROOT_S]] = totals


def _replicas(strategy: Sharding, devices: Sequence[int], microbatch_size: int) -> int:
    """Return the replicas of a strategy, if it fits its devices and its microbatch."""
    degree = prod(axis.size for axis in strategy)
    replicas = prod(axis.size for axis in strategy if axis.split == "batch")
    if degree != len(devices):
        raise ValueError(
            f"axes of a strategy must multiply to the {counted(len(devices), 'device')} of its stage, got "
            f"{[tuple(axis) for axis in strategy]} = {degree}; use another strategy or placement"
        )
    if replicas > microbatch_size:
        raise ValueError(
            f"each of {replicas} replicas needs a sample of the microbatch, got microbatch_size {microbatch_size}"
        )
    return replicas


def _padded(rows: Sequence[Sequence[float]]) -> Floats:
    """Return rows of unlike lengths as one array, zeros behind the shorter ones."""
    padded = np.zeros((len(rows), max(1, *map(len, rows), 0)))
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded
