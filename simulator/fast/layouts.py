"""How the tensors of a workload lie where they are made, read and passed on, operator by operator, in numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulator.closed_forms.stage_prices import items_s, launches_s
from simulator.costs import CostTables
from simulator.fast.arrays import Floats, Ints
from simulator.fast.channels import Interner
from simulator.fast.holdings import view_of
from simulator.fast.structure import Names
from simulator.fidelity import Fidelity
from simulator.lowering.crossing import made_in_shards, num_parts, passing
from simulator.lowering.items import Item
from simulator.lowering.mesh import mesh_sizes, settled
from simulator.lowering.program import ProgramBuilder, StageView
from simulator.plan import Sharding, resolve
from workloads.placements import Placement

Spent = tuple[float, float]
"""Seconds of the device, and what launching it takes a host that runs ahead."""


class Layouts:
    """Works out how tensors lie. Shardings are canonical, one for each signature of the workload.

    Args:
        costs: Cost tables.
        names: Of the tensors.
        numbers: Of layouts, shared with whoever compares them.

    Attributes:
        made_as: int64[T]. As which output of its maker each tensor is made.
        read_as: int64[readings]. As which input of its reader.
    """

    def __init__(self, costs: CostTables, names: Names, numbers: Interner) -> None:
        self.costs = costs
        self.workload = costs.problem.workload
        self.names = names
        self._numbers = numbers
        makers = [self._maker(name) for name in names.tensors]
        readings = [
            (reader, self.workload.operators[reader].inputs.index(name))
            for name in names.tensors
            for reader in self.workload.consumers[name]
        ]
        self.made_as = np.array([place for _, place in makers], dtype=np.int64)
        self.read_as = np.array([place for _, place in readings], dtype=np.int64)
        self._makings, self._making_of = self._unlike(makers)
        self._readings, self._reading_of = self._unlike(readings)

    def _unlike(self, places: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], Ints]:
        """Return operators and places of them without those that are alike, and the number there of each that came."""
        signatures = self.workload.signatures
        keys = [(signatures[index], place) for index, place in places]
        first = dict(zip(reversed(keys), reversed(places), strict=True))
        unlike = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        return [first[key] for key in unlike], np.array([unlike[key] for key in keys], dtype=np.int64)

    def made(
        self, shardings: Sequence[Sharding], devices: Sequence[int], microbatch_size: int
    ) -> tuple[Ints, Floats, Ints]:
        """Return, per tensor, the number of its layout, seconds of settling it, and whether it is made in shards."""
        layouts, in_shards = np.full(len(self._makings), -1), np.zeros(len(self._makings), dtype=np.int64)
        settling_s = np.zeros((len(self._makings), 2))
        for making, (producer, place) in enumerate(self._makings):
            sharding = shardings[self.workload.signatures[producer]]
            try:
                made = self._placements(producer, place, sharding)
                view = view_of(self.costs, {producer: sharding}, devices, microbatch_size)
                name = self.workload.operators[producer].outputs[place]
                settling_s[making] = spent(view, ProgramBuilder(view, Fidelity()).output_settled(name))
            except ValueError:
                continue
            layouts[making] = self._number(settled(made), sharding)
            in_shards[making] = made_in_shards(sharding, made)
        return layouts[self._making_of], settling_s[self._making_of], in_shards[self._making_of]

    def read(self, shardings: Sequence[Sharding]) -> tuple[Ints, Ints]:
        """Return, per reading, the number of its layout, and in how many shards of the sequence it would arrive."""
        layouts, parts = np.full(len(self._readings), -1), np.ones(len(self._readings), dtype=np.int64)
        for reading, (reader, place) in enumerate(self._readings):
            sharding = shardings[self.workload.signatures[reader]]
            try:
                wanted = tuple(split.inputs[place] for split in self.costs.splits(reader, sharding))
            except ValueError:
                continue
            layouts[reading] = self._number(wanted, sharding)
            parts[reading] = num_parts(
                sharding, wanted, self.workload.tensors[self.workload.operators[reader].inputs[place]]
            )
        return layouts[self._reading_of], parts[self._reading_of]

    def passed(self, shardings: Sequence[Sharding]) -> Ints:
        """Return, per sharding, the number of the layout of what a stage that begins with it only passes on."""
        return np.array([self._number(passing(sharding), sharding) for sharding in shardings], dtype=np.int64)

    def makes_in_shards(self, tensor: int, strategy: Sharding) -> bool:
        """Return whether a tensor is made in shards of the sequence under a strategy."""
        producer, number = self._maker(self.names.tensors[tensor])
        sharding = resolve(strategy, self.workload.operators[producer])
        return made_in_shards(sharding, self._placements(producer, number, sharding))

    def _maker(self, name: str) -> tuple[int, int]:
        """Return which operator makes a tensor, and as which of its outputs."""
        producer = self.workload.producer[name]
        return producer, self.workload.operators[producer].outputs.index(name)

    def _placements(self, producer: int, number: int, sharding: Sharding) -> tuple[Placement, ...]:
        return tuple(split.outputs[number] for split in self.costs.splits(producer, sharding))

    def _number(self, placements: tuple[Placement, ...], sharding: Sharding) -> int:
        """Return a number for what the transfer of a tensor depends on, on one side."""
        return self._numbers((mesh_sizes(sharding), placements, tuple(axis.split == "batch" for axis in sharding)))


def spent(view: StageView, items: list[Item]) -> Spent:
    """Return what items of a stage's program take its device, and their launches its host."""
    return items_s(view, items), launches_s(view, items)
