"""What the fast estimate needs to know of a workload once: who feeds, reads and saves what, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from simulator.costs import CostTables
from simulator.fast.arrays import NEVER, Structure
from simulator.fast.memory import Savings
from simulator.plan import Sharding
from simulator.problem import Problem
from simulator.saved import is_private, saved_tensors
from workloads.local import dtype_bytes

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Names:
    """What the numbers in a ``Structure`` mean.

    Attributes:
        tensors: Names of the T tensors.
        savings: ``(operator, place among the tensors it saves)`` of each saving.
        tied: ``(operator, place among its parameters)`` of each tied parameter.
        examples: One operator of each class.
    """

    tensors: tuple[str, ...]
    savings: tuple[tuple[int, int], ...]
    tied: tuple[tuple[int, int], ...]
    examples: tuple[int, ...]


def saved_by(costs: CostTables, index: int, sharding: Sharding, samples: int, gpu_type: str) -> dict[str, float]:
    """Return the bytes of every tensor that an operator saves, each once, private ones included."""
    cost = costs.operator(index, sharding, samples, gpu_type)
    return dict(saved_tensors(costs.problem.workload, index, cost))


def saved_names(costs: CostTables, index: int, gpu_type: str) -> list[str]:
    """Return the named tensors that an operator can save, whatever its strategy.

    A fused softmax saves its output, and the unfused one that takes its place for few heads a private copy instead;
    flash attention saves its output of one sample, and a private copy of several where the sequence comes first. So the
    names are those of one sample, and of as many as the fused kernel asks for.
    """
    several = costs.problem.runtime.implementation.fused_softmax_multiple
    saved = (name for samples in (several, 1) for name in saved_by(costs, index, (), samples, gpu_type))
    return [name for name in dict.fromkeys(saved) if not is_private(name)]


def structure(problem: Problem, costs: CostTables) -> tuple[Structure, Savings, Names]:
    """Return who feeds, reads and saves what in a problem's workload."""
    workload = problem.workload
    count = len(workload)
    gpu_type = problem.gpu_types[0]
    names = tuple(name for op in workload.operators for name in op.outputs if name in workload.consumers)
    producers = [workload.producer[name] for name in names]
    readers = [workload.consumers[name] for name in names]
    neighbours, classes, examples = _surroundings(problem)
    touched: list[list[int]] = [[] for _ in range(count + 1)]
    for index, found in enumerate(neighbours):
        for cut in range(min(found, default=index) + 1, index + 1):
            touched[cut].append(index)
    crossing: list[list[int]] = [[] for _ in range(count + 1)]
    for tensor, (producer, found_readers) in enumerate(zip(producers, readers, strict=True)):
        for cut in range(producer + 1, found_readers[-1] + 1):
            crossing[cut].append(tensor)

    savers: dict[str, list[tuple[int, int]]] = {}
    for index in range(count):
        for place, name in enumerate(saved_names(costs, index, gpu_type)):
            savers.setdefault(name, []).append((index, place))
    first_saver = np.full(count, NEVER, dtype=np.int64)
    entering: list[list[int]] = [[] for _ in range(count + 1)]
    saved_producers = []
    for number, (name, found_savers) in enumerate(savers.items()):
        made = workload.producer.get(name)
        saved_producers.append(NEVER if made is None else made)
        if made is not None:
            first_saver[made] = min(first_saver[made], found_savers[0][0])
        for cut in range(0 if made is None else made + 1, found_savers[-1][0] + 1):
            entering[cut].append(number)
    unsaved: list[list[tuple[int, int]]] = [[] for _ in range(count + 1)]
    reading = 0
    for tensor, (name, producer, found_readers) in enumerate(zip(names, producers, readers, strict=True)):
        saved_at = {index for index, _ in savers.get(name, ())}
        for before, reader in zip([producer, *found_readers], found_readers, strict=False):
            if reader not in saved_at:
                for cut in range(before + 1, reader + 1):
                    unsaved[cut].append((tensor, reading))
            reading += 1

    sizes: dict[str, float] = {}
    for name, producer in zip(names, producers, strict=True):
        maker = workload.operators[producer]
        dtype = maker.definition.output_dtype(maker.outputs.index(name))
        size = float(prod(workload.tensors[name]))
        sizes[name] = size * dtype_bytes(dtype, problem.runtime.implementation)
    forms = [(sizes[name], workload.tensors[name][:1]) for name in names]
    number_of = {form: number for number, form in enumerate(dict.fromkeys(forms))}
    number_in = {name: number for number, name in enumerate(names)}
    tied = [
        (index, place)
        for index in range(count)
        for place, parameter in enumerate(workload.parameters(index))
        if parameter.tie is not None
    ]
    keys = [workload.parameters(index)[place].tie for index, place in tied]
    tie_numbers = [list(dict.fromkeys(keys)).index(key) for key in keys]
    units, parts = np.array(costs.units, dtype=np.int64), np.array(costs.unit_parts, dtype=np.int64)
    all_savers = [saver for found_savers in savers.values() for saver in found_savers]
    inputs = [[workload.producer.get(name, NEVER) for name in op.inputs] for op in workload.operators]
    tied_operators = np.array([index for index, _ in tied], dtype=np.int64)
    arrays = Structure(
        *_rows(neighbours),
        np.array(classes, dtype=np.int64),
        *_rows(inputs),
        np.array([number_in.get(name, -1) for op in workload.operators for name in op.inputs], dtype=np.int64),
        *_rows(touched),
        *_rows(crossing),
        np.array(producers, dtype=np.int64),
        np.array([number_of[form] for form in forms], dtype=np.int64),
        *_rows(readers),
        first_saver,
        *_bounds(units),
        *_bounds(parts),
        np.array([1 if unit in costs.root_units else 2 for unit in range(units[-1] + 1)], dtype=np.int64),
        tied_operators,
        np.array(tie_numbers, dtype=np.int64),
    )
    place_of = {name: number for number, name in enumerate(savers)}
    saved = Savings(
        *_rows([[index for index, _ in found_savers] for found_savers in savers.values()]),
        np.array(saved_producers, dtype=np.int64),
        np.array([number_in.get(name, -1) for name in savers], dtype=np.int64),
        np.array([place_of.get(name, -1) for name in names], dtype=np.int64),
        *_rows(entering),
        _rows([[reading for _, reading in found] for found in unsaved])[0],
        np.array([both for found in unsaved for both in found], dtype=np.int64).reshape(-1, 2),
    )
    return arrays, saved, Names(names, tuple(all_savers), tuple(tied), tuple(examples))


def _surroundings(problem: Problem) -> tuple[list[list[int]], list[int], list[int]]:
    """Return neighbours and class of every operator, and an example of each class."""
    workload = problem.workload
    ids: dict[object, int] = {}
    neighbours, classes, examples = [], [], []
    for index, op in enumerate(workload.operators):
        found: set[int] = set()
        for name in op.inputs:
            if name in workload.producer:
                found.add(workload.producer[name])
                found.update(reader for reader in workload.consumers[name] if reader < index)
        ordered = sorted(found)
        place = {other: number for number, other in enumerate(ordered)}
        inputs: list[object] = []
        for name in op.inputs:
            producer = workload.producer.get(name)
            if producer is None:
                inputs.append(None)
                continue
            earlier = [reader for reader in workload.consumers[name] if reader < index]
            inputs.append(
                (
                    place[producer],
                    workload.operators[producer].outputs.index(name),
                    tuple(
                        (place[reader], tuple(p for p, x in enumerate(workload.operators[reader].inputs) if x == name))
                        for reader in earlier
                    ),
                )
            )
        key = (workload.signatures[index], tuple(workload.signatures[other] for other in ordered), tuple(inputs))
        if key not in ids:
            ids[key] = len(ids)
            examples.append(index)
        neighbours.append(ordered)
        classes.append(ids[key])
    return neighbours, classes, examples


def _bounds(numbers: Ints) -> tuple[Ints, Ints, Ints]:
    """Return ascending numbers of operators, and where each number begins and ends."""
    every = np.arange(numbers[-1] + 1)
    return numbers, np.searchsorted(numbers, every), np.searchsorted(numbers, every, side="right")


def _rows(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return offsets, np.array([item for row in rows for item in row], dtype=np.int64)
