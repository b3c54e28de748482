"""What plans ask the tables of ``estimate`` for and these do not have yet, worked out by the lowering itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.fast.arrays import BOUNDARY, NORM, ROW, TABLE, TIE, Ints, PlanColumns, Structure
from simulator.fast.channels import Interner
from simulator.fast.holdings import view_of
from simulator.fast.layouts import Spent
from simulator.fast.store import Store
from simulator.fast.tables import TableBuilder
from simulator.lowering.step import norm_s
from simulator.plan import Sharding


@dataclass(frozen=True)
class MissingRows:
    """Fills a store with what plans need of it.

    Attributes:
        structure, builder, store: Of the problem.
        strategies, placements: By number; they grow with what plans name.
        aliases: Numbers of strategies that are alike on their placements.
    """

    structure: Structure
    builder: TableBuilder
    store: Store
    strategies: Sequence[Sharding]
    placements: Sequence[tuple[int, ...]]
    aliases: Interner

    def work_out(self, columns: PlanColumns, misses: Ints) -> None:
        """Work out what plans asked for, and add it to the store."""
        store = self.store
        for position, (kind, slot, first, second) in enumerate(misses.tolist()):
            try:
                if kind == TABLE:
                    size = self._size(columns, second)
                    devices = self.placements[columns.placements[second]]
                    strategy = self.strategies[columns.strategies[first]]
                    shape = int(store.time.placement_shape[columns.placements[second]])
                    axes = tuple((axis.split, axis.size) for axis in strategy if axis.size > 1)
                    alias = self.aliases((axes, shape, size))
                    store.add_table(slot, self.builder.table(strategy, devices, size), alias)
                elif kind == ROW:
                    store.add_row(slot, self._row(columns, first, second))
                elif kind == BOUNDARY:
                    store.add_boundary(slot, self._boundary(columns, first, second))
                elif kind == NORM:
                    placements = columns.placements[slice(*columns.stage_offsets[first : first + 2])]
                    devices = {device for number in placements for device in self.placements[number]}
                    store.add_norm(slot, norm_s(self.builder.costs, sorted(devices)))
                else:
                    assert kind == TIE
                    rows = self._holders(columns, first, second)
                    holders = [self.placements[columns.placements[row]] for row in rows]
                    store.add_tie(slot, self.builder.channels.of_tied(holders))
            except ValueError:
                store.forget(misses[position:, 1])
                raise
        store.make_room()

    def _holders(self, columns: PlanColumns, place: int, stage: int) -> list[int]:
        """Return the stages that hold a tied parameter: one, or all of plan ``-1 - stage``."""
        if stage >= 0:
            return [stage]
        rows = range(columns.stage_offsets[-1 - stage], columns.stage_offsets[-stage])
        stops = [int(columns.run_stops[columns.run_offsets[row + 1] - 1]) for row in rows]
        shape = self.structure
        operators = shape.tied[shape.ties == shape.ties[place]]
        return [rows[number] for number in dict.fromkeys(np.searchsorted(stops, operators, side="right").tolist())]

    def _size(self, columns: PlanColumns, stage: int) -> int:
        plan = int(np.searchsorted(columns.stage_offsets, stage, side="right")) - 1
        return int(columns.microbatch_size[plan])

    def _row(self, columns: PlanColumns, index: int, stage: int) -> list[Spent]:
        plan = int(np.searchsorted(columns.stage_offsets, stage, side="right")) - 1
        begin, end = columns.run_offsets[stage], columns.run_offsets[stage + 1]
        first = first_operator(columns, stage, int(columns.stage_offsets[plan]))
        shape = self.structure
        near = shape.neighbours[shape.neighbour_offsets[index] : shape.neighbour_offsets[index + 1]]
        own = [other for other in (*near.tolist(), index) if other >= first]
        runs = begin + np.searchsorted(columns.run_stops[begin:end], own, side="right")
        strategies = {other: self.strategies[columns.strategies[run]] for other, run in zip(own, runs, strict=True)}
        devices = self.placements[columns.placements[stage]]
        inputs = slice(shape.input_offsets[index], shape.input_offsets[index + 1])
        arriving = shape.input_tensors[inputs][shape.input_producers[inputs] < first].tolist()
        entering = self._made_in_shards(columns, plan, arriving)
        return self.builder.rows.row(index, strategies, devices, int(columns.microbatch_size[plan]), entering)

    def _made_in_shards(self, columns: PlanColumns, plan: int, tensors: Sequence[int]) -> list[int]:
        """Return those of the tensors that their makers in a plan leave in shards of the sequence."""
        rows = columns.run_offsets[columns.stage_offsets[plan : plan + 2]]
        stops = columns.run_stops[rows[0] : rows[1]]
        runs = rows[0] + np.searchsorted(stops, self.structure.producers[tensors], side="right")
        strategies = (self.strategies[columns.strategies[run]] for run in runs)
        return [
            tensor
            for tensor, strategy in zip(tensors, strategies, strict=True)
            if self.builder.layouts.makes_in_shards(tensor, strategy)
        ]

    def _boundary(self, columns: PlanColumns, stage: int, plan: int) -> list[float]:
        """Return a row of boundaries, from the operators on either side that touch what crosses."""
        shape, first_row = self.structure, int(columns.stage_offsets[plan])
        firsts = [first_operator(columns, row, first_row) for row in (stage, stage + 1)]
        cut, stop = firsts[1], int(columns.run_stops[columns.run_offsets[stage + 2] - 1])
        tensors = shape.crossing[shape.crossing_offsets[cut] : shape.crossing_offsets[cut + 1]].tolist()
        before, behind = {firsts[0]}, {cut}
        for tensor in tensors:
            readers = shape.readers[shape.reader_offsets[tensor] : shape.reader_offsets[tensor + 1]]
            maker = int(shape.producers[tensor])
            if maker >= firsts[0]:
                before.add(maker)
            else:
                before.update(readers[np.searchsorted(readers, firsts[0]) :][:1].tolist())
            behind.update(readers[np.searchsorted(readers, cut) :][:1].tolist())
        entering = [self.builder.names.tensors[i] for i in self._made_in_shards(columns, plan, tensors)]
        sides = []
        for row, indices in ((stage, {i for i in before if i < cut}), (stage + 1, {i for i in behind if i < stop})):
            begin, end = columns.run_offsets[row], columns.run_offsets[row + 1]
            own = sorted(indices)
            runs = begin + np.searchsorted(columns.run_stops[begin:end], own, side="right")
            strategies = {i: self.strategies[columns.strategies[run]] for i, run in zip(own, runs, strict=True)}
            devices = self.placements[columns.placements[row]]
            sides.append(view_of(self.builder.costs, strategies, devices, int(columns.microbatch_size[plan]), entering))
        return self.builder.rows.boundary(sides[0], sides[1], tensors)


def first_operator(columns: PlanColumns, stage: int, first_stage: int) -> int:
    """Return where a stage of the plan whose stages begin with ``first_stage`` begins."""
    return 0 if stage == first_stage else int(columns.run_stops[columns.run_offsets[stage] - 1])
