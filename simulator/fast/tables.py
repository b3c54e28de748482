"""Tables of the fast estimate: costs of every operator under one strategy, worked out by the lowering itself.

Nothing is priced here that ``estimate`` does not price: a row is what ``ProgramBuilder`` says of one operator
between given neighbours, and a boundary is what ``lowering.transfers`` says of two stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from datafiles.words import counted
from simulator.closed_forms.operator_needs import saved_bytes
from simulator.closed_forms.stage_prices import (
    added_s,
    again_s,
    beyond_host_s,
    collective_s,
    items_s,
    transfers_s,
    weights_s,
)
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
from simulator.fast.layouts import Layouts, Spent, spent
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
    OWN,
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
from simulator.fast.structure import Names
from simulator.fidelity import Fidelity
from simulator.lowering.program import ProgramBuilder, StageView
from simulator.lowering.recompute import copies_saved_part
from simulator.lowering.synchronisation import scatters
from simulator.lowering.transfers import boundary, received_gathers
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
    """Works out tables, rows of operators between unlike neighbours, and boundaries."""

    def __init__(
        self, costs: CostTables, structure: Structure, savings: Savings, names: Names, channels: Channels
    ) -> None:
        self.costs = costs
        self.problem = costs.problem
        self.structure = structure
        self.savings = savings
        self.names = names
        self.channels = channels
        self.waits_for_gathers = "gather" in costs.problem.runtime.host_waits
        numbers = Interner()
        self.layouts = Layouts(costs, names, numbers)
        self._holdings = Holdings(costs, channels, numbers)

    def row(
        self,
        index: int,
        strategies: Mapping[int, Sharding],
        devices: Sequence[int],
        microbatch_size: int,
        entering: Iterable[int] = (),
    ) -> list[Spent]:
        """Return what an operator takes forward and backward, and by input what a segment does not repeat.

        Between these, first of a pair, whether it saves a part that it copies; and what its backward pass takes longer
        where its weight gradients come later.

        Args:
            index: The operator.
            strategies: Its own and those of its neighbours in its stage.
            devices: Of the stage.
            microbatch_size: Samples over all replicas.
            entering: Tensors that arrive in shards of the sequence.
        """
        names = [self.names.tensors[tensor] for tensor in entering]
        view = view_of(self.costs, strategies, devices, microbatch_size, names)
        forward, backward, entering = ProgramBuilder(view, Fidelity()).operator_alone(index)
        parted_s = 0.0
        if any(item.collective is not None and not item.chained for item in backward):  # It travels beside them.
            halves = view_of(self.costs, strategies, devices, microbatch_size, names, schedule="zb-h1")
            _, apart, _ = ProgramBuilder(halves, Fidelity()).operator_alone(index)
            parted_s = items_s(halves, apart) - items_s(view, backward)
        inputs = self.structure.input_offsets[index + 1] - self.structure.input_offsets[index]
        parts = [forward, backward, *(entering.get(position, []) for position in range(inputs))]
        found = [spent(view, items) for items in parts]
        return [*found[:2], (float(copies_saved_part(view, index)), 0.0), (parted_s, 0.0), *found[2:]]

    # Whole tables

    def table(self, strategy: Sharding, devices: Sequence[int], microbatch_size: int) -> Table:
        """Return the table of a strategy.

        Raises:
            ValueError: If the strategy does not fit the devices, the microbatch or an operator.
        """
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
        structure, workload = self.structure, self.problem.workload
        count = len(workload)
        sums = np.zeros((count + 1, TIME_COLUMNS))
        memory_sums = np.zeros((count + 1, MEMORY_COLUMNS))
        entering_s = np.zeros((len(structure.input_producers), 2))
        rows: dict[int, list[Spent]] = {}
        for number, index in enumerate(self.names.examples):
            near = structure.neighbours[structure.neighbour_offsets[index] : structure.neighbour_offsets[index + 1]]
            try:
                strategies = dict.fromkeys([*near.tolist(), index], strategy)
                rows[number] = self.row(index, strategies, devices, microbatch_size)
            except ValueError:  # Unsuited to it or to a neighbour; plans that combine the two are refused.
                width = int(structure.input_offsets[index + 1] - structure.input_offsets[index])
                rows[number] = [(0.0, 0.0)] * (OF_INPUTS + width)
        for index, number in enumerate(structure.classes.tolist()):
            row = rows[number]
            sums[index + 1, [FORWARD_S, FORWARD_HOST_S]] = row[0]
            sums[index + 1, [BACKWARD_S, BACKWARD_HOST_S]] = row[1]
            if len(row) > OF_INPUTS:
                entering_s[structure.input_offsets[index] : structure.input_offsets[index + 1]] = row[OF_INPUTS:]
        resolved = [resolve(strategy, op) for op in workload.operators]
        families = np.full((MAX_FAMILIES, FAMILY), -1, dtype=np.int64)
        family_of: dict[object, int] = {}
        has_private = np.zeros(count, dtype=np.int64)
        maxima = np.zeros((MAXIMA, count))
        own: dict[tuple[int, Sharding], Holding] = {}
        weights: dict[tuple[int, Sharding], float] = {}
        added: dict[tuple[int, Sharding], tuple[float, float]] = {}
        again: dict[tuple[int, Sharding], tuple[float, float]] = {}
        beyond: dict[tuple[int, Sharding], tuple[float, ...]] = {}
        beyond_s = np.zeros((count if self.waits_for_gathers else 0, 4))
        tied_bytes, tied, tied_work = [], [], []
        holdings: list[Holding] = []
        for index in range(count):
            key = (workload.signatures[index], resolved[index])
            if key not in own:
                try:
                    own[key] = self._holdings.of(index, resolved[index], devices, microbatch_size, family_of, families)
                except MeasuredSeriesError:
                    raise
                except ValueError:
                    own[key] = self._holdings.nothing(index)
                view = view_of(self.costs, {index: resolved[index]}, devices, microbatch_size)
                weights[key] = 0.0 if own[key].unsuited else weights_s(view, first=False)
                added[key], again[key] = ((0.0, 0.0),) * 2 if own[key].unsuited else (added_s(view), again_s(view))
                if self.waits_for_gathers:
                    beyond[key] = (0.0,) * 4 if own[key].unsuited else beyond_host_s(view, index)
            found = own[key]
            if self.waits_for_gathers:
                beyond_s[index] = beyond[key]
            sums[index + 1, WEIGHT_S], sums[index + 1, UNSUITED] = weights[key], found.unsuited
            scattered = ADDED_SCATTERED_S - ADDED_S if scatters(resolved[index], self.problem.runtime) else 0
            sums[index + 1, [ADDED_S + scattered, ADDED_HOST_S + scattered]] = added[key]
            sums[index + 1, [AGAIN_S, AGAIN_HOST_S]] = again[key]
            copies, _ = rows[structure.classes[index]][COPIES_PART]
            sums[index + 1, PARTED_S], _ = rows[structure.classes[index]][PARTED]
            has_private[index] = PRIVATE * (found.private > 0) + COPIED * (copies > 0)
            maxima[[PRODUCT, LARGEST], index] = found.product, found.largest
            maxima[[BUFFER, BUCKET], index] = found.buffer, found.bucket
            column = memory_sums[index + 1]
            column[KEPT] = column[AGAIN] = found.private
            column[WEIGHTED], column[TO_MULTIPLY] = found.weighted, found.to_multiply
            column[GATHERED], column[UNSHARDED] = found.gathered, found.unsharded
            column[[GIVEN_BACK, END_GIVEN]] = found.given
            column[STATES:] = found.states
            sums[index + 1, PASSED_BYTES:BUCKETS] = found.work
            sums[index + 1, BUCKETS], sums[index + 1, LARGE] = found.buckets, found.num_large
            sums[index + 1, ELEMENTS:] = found.elements
            tied_bytes += found.tied_bytes
            tied += found.tied
            tied_work += found.tied_work
            holdings.append(found)
        made_bytes, read_bytes = self._sizes(holdings)
        made, settling_s, in_shards = self.layouts.made(resolved, devices, microbatch_size)
        saved, gathered = self._saved(holdings, made_bytes, in_shards)
        for kind, summed in ((WHOLE, KEPT), (SHARD, AGAIN)):
            less = np.concatenate([[0.0], saved[:-1, kind]])
            less[self.savings.offsets[:-1]] = 0.0
            np.add.at(memory_sums[:, summed], self.savings.operators + 1, saved[:, kind] - less)
        np.cumsum(memory_sums, axis=0, out=memory_sums)
        forward, backward, waiting = self._needed(holdings, made_bytes, read_bytes)
        maxima[KEPT_PEAK] = memory_sums[1:, KEPT] + (backward + waiting + gathered[0])
        maxima[AGAIN_PEAK] = memory_sums[1:, AGAIN] + (np.maximum(forward, backward) + waiting + gathered[1])
        maxima[FORWARD_PEAK] = memory_sums[1:, KEPT] + (forward + gathered[0])
        waiting_sums = memory_sums[:, UNSHARDED] * (self.problem.runtime.waiting_gradient_share or 0.0)
        weights_wait = waiting_sums[self.structure.part_stop[self.structure.part_of]] - waiting_sums[1:]
        maxima[[KEPT_WAIT_PEAK, AGAIN_WAIT_PEAK]] = maxima[[KEPT_PEAK, AGAIN_PEAK]] + weights_wait
        for_weights = memory_sums[1:, [WEIGHTED, TO_MULTIPLY]].sum(axis=1)
        maxima[[KEPT_SPLIT_PEAK, AGAIN_SPLIT_PEAK]] = maxima[[KEPT_PEAK, AGAIN_PEAK]] - for_weights
        np.cumsum(sums, axis=0, out=sums)
        self._add_gathers(sums, families)
        read, parts = self.layouts.read(resolved)
        return Table(
            sums=sums,
            memory_sums=memory_sums,
            entering_s=entering_s,
            settling_s=settling_s,
            saved_bytes=saved,
            made_bytes=made_bytes,
            read_bytes=read_bytes,
            replicas=replicas,
            has_private=has_private,
            maxima=np.stack([range_maxima(row) for row in maxima]),
            made=made,
            read=read,
            passed=self.layouts.passed(resolved),
            in_shards=in_shards,
            num_parts=parts,
            families=families,
            tied_bytes=np.array(tied_bytes).reshape(-1, NUM_STATES),
            tied=np.array(tied, dtype=np.int64).reshape(-1, 4),
            tied_work=np.array(tied_work, dtype=np.float64).reshape(-1, STEP_COLUMNS),
            beyond_host_s=beyond_s,
        )

    def _sizes(self, holdings: Sequence[Holding]) -> tuple[Floats, Floats]:
        """Return bytes of every tensor where it is made and, by reading, where it is read."""
        workload, made, read = self.problem.workload, [], []
        for name in self.names.tensors:
            producer = workload.producer[name]
            made.append(holdings[producer].made[workload.operators[producer].outputs.index(name)])
            for reader in workload.consumers[name]:
                read.append(holdings[reader].read[workload.operators[reader].inputs.index(name)])
        return np.array(made, dtype=np.float64), np.array(read, dtype=np.float64)

    def _saved(self, holdings: Sequence[Holding], made_bytes: Floats, in_shards: Ints) -> tuple[Floats, Floats]:
        """Return what each saving keeps where neighbours have the same strategy, and what operators gather again.

        Returns:
            As ``MemoryTables.saved_bytes``; float64[2, N], outside segments and in them.
        """
        drops = not self.problem.runtime.keeps_gathered_inputs
        saved, gathered = np.zeros((len(self.names.savings), 3)), np.zeros((2, len(holdings)))
        counts = np.diff(self.savings.offsets)
        tensor_of = np.repeat(self.savings.tensors, counts).tolist()
        firsts = np.repeat(self.savings.offsets[:-1], counts).tolist()
        makers = np.repeat(self.savings.producers, counts).tolist()
        keeps_shards = self.problem.runtime.keeps_gathered_shards
        for saving, (index, place) in enumerate(self.names.savings):
            saved[saving] = own = holdings[index].saved[place]
            first = firsts[saving]
            keeps_made = keeps_shards or (self.names.savings[first][0] == makers[saving] and saved[first, OWN] > 0.0)
            tensor = tensor_of[saving]
            if tensor >= 0:
                made, regathers = made_bytes[tensor], drops and bool(in_shards[tensor])
                for kind in (SHARD, WHOLE):
                    saved[saving, kind] = saved_bytes(
                        made, own, regathers=regathers, keeps_made=keeps_made, in_segment=kind == SHARD
                    )
                gathered[:, index] += (own > made) * own * np.array([regathers, True])
        return saved, gathered

    def _needed(
        self, holdings: Sequence[Holding], made_bytes: Floats, read_bytes: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Return by operator what it works in forward and backward, and gradients that wait for others.

        All operators have the same strategy.

        A gradient is there from the last reader of a tensor, where its backward pass begins it, to who made that.
        """
        shape, last_reading = self.structure, self.structure.reader_offsets[1:] - 1
        waiting, begun = np.zeros(len(holdings) + 1), np.zeros(len(holdings))
        np.add.at(waiting, shape.producers + 1, made_bytes)
        np.add.at(waiting, shape.readers[last_reading], -made_bytes)
        np.add.at(begun, shape.readers[last_reading], read_bytes[last_reading])
        forward, backward = np.array([found.own_working for found in holdings]).T
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

    # Boundaries

    def boundary(self, first: StageView, second: StageView, tensors: Iterable[int]) -> list[float]:
        """Return seconds of transfers forward and backward, and of making whole what arrives, on either side.

        Args:
            first, second: The stages.
            tensors: Numbers of the tensors that cross.
        """
        names = [self.names.tensors[tensor] for tensor in tensors]
        forward, backward = boundary(first, second, names)
        return [
            transfers_s(self.costs, forward),
            transfers_s(self.costs, backward),
            sum(collective_s(second, item) for item in received_gathers(second, first, names)),
            sum(collective_s(first, item) for item in received_gathers(first, second, names)),
        ]
