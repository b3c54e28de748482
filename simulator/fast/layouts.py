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
    """Works out how tensors lie. Shardings are per operator, canonical.

    Args:
        costs: Cost tables.
        names: Of the tensors.
        numbers: Of layouts, shared with whoever compares them.
    """

    def __init__(self, costs: CostTables, names: Names, numbers: Interner) -> None:
        self.costs = costs
        self.workload = costs.problem.workload
        self.names = names
        self._numbers = numbers

    def made(
        self, shardings: Sequence[Sharding], devices: Sequence[int], microbatch_size: int
    ) -> tuple[Ints, Floats, Ints]:
        """Return, per tensor, the number of its layout, seconds of settling it, and whether it is made in shards."""
        workload = self.workload
        found = []
        known: dict[object, tuple[int, Spent, bool]] = {}
        for name in self.names.tensors:
            producer, number = self._maker(name)
            key = (workload.signatures[producer], number)
            if key not in known:
                sharding = shardings[producer]
                try:
                    made = self._placements(producer, number, sharding)
                    view = view_of(self.costs, {producer: sharding}, devices, microbatch_size)
                    settling = spent(view, ProgramBuilder(view, Fidelity()).output_settled(name))
                except ValueError:
                    known[key] = -1, (0.0, 0.0), False
                else:
                    known[key] = self._number(settled(made), sharding), settling, made_in_shards(sharding, made)
            found.append(known[key])
        layouts, settling_s, in_shards = zip(*found, strict=True) if found else ((), (), ())
        return (
            np.array(layouts, dtype=np.int64),
            np.array(settling_s).reshape(-1, 2),
            np.array(in_shards, dtype=np.int64),
        )

    def read(self, shardings: Sequence[Sharding]) -> tuple[Ints, Ints]:
        """Return, per reading, the number of its layout, and in how many shards of the sequence it would arrive."""
        workload = self.workload
        found = []
        known: dict[object, tuple[int, int]] = {}
        for name in self.names.tensors:
            for reader in workload.consumers[name]:
                position = workload.operators[reader].inputs.index(name)
                key = (workload.signatures[reader], position)
                if key not in known:
                    sharding = shardings[reader]
                    try:
                        wanted = tuple(split.inputs[position] for split in self.costs.splits(reader, sharding))
                    except ValueError:
                        known[key] = -1, 1
                    else:
                        parts = num_parts(sharding, wanted, workload.tensors[name])
                        known[key] = self._number(wanted, sharding), parts
                found.append(known[key])
        layouts, parts_of = zip(*found, strict=True) if found else ((), ())
        return np.array(layouts, dtype=np.int64), np.array(parts_of, dtype=np.int64)

    def passed(self, shardings: Sequence[Sharding]) -> Ints:
        """Return, per operator, the number of the layout of what a stage that begins with it only passes on."""
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
