"""What every operator adds to the passes of a stage under one tensor degree, as arrays for compiled code.

A stage is a range of operators ``[first, stop)`` with one mesh ``(batch dp) x (tensor tp)``. An operator's
computation does not depend on where the range begins, but its collectives do: an input that arrives from
another stage is neither moved on arrival nor settled by the stage that made it. Per operator there is one row
for every interval of ``first`` between which nothing changes (two to four rows for most operators).

Seconds of collectives depend on where the group sits in the cluster. Rows hold how often each distinct
collective occurs; times prices they are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simulator.costs import CostTables
from simulator.lowering.crossing import Crossing, arriving
from simulator.lowering.edges import gathered_inputs, input_collectives
from simulator.lowering.mesh import REDUCTIONS, MeshCollective, mesh_sizes, reshard, settled
from simulator.plan import Axis, Sharding, resolve
from simulator.problem import Problem
from simulator.saved import is_private, saved_tensors
from simulator.uniform import repeated_layers
from workloads.kinds.base import BACKWARD_INPUT, FORWARD
from workloads.local import dtype_bytes
from workloads.placements import PARTIAL, Placement, Shard

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NEVER = np.iinfo(np.int64).max
REPLICATED = 0
"""Code of a layout over the tensor axis; ``1 + dim`` for a tensor cut along ``dim``."""


@dataclass(frozen=True)
class ModelShape:
    """What follows from the workload alone. N operators, T tensors that operators make and read.

    Attributes:
        row_offsets: int64[N + 1]. Rows of each operator.
        row_limits: int64[rows]. A row holds for ``first <= limit``; the next one from there on.
        row_examples: One ``first`` for which the row holds.
        layer_first: int64[N]. First operator of the layer of each.
        segment_first, segment_stop: int64[N]. The repeated layer that full recomputation takes the operator
            with; NEVER, -1 where it is not recomputed.
        first_saver: int64[N]. First operator that saves something the operator makes (-1: itself, inside);
            NEVER where none does. What nothing saves need not be recomputed at the end of a segment.
        first_reader: int64[N]. First reader of any output; NEVER where there is none.
        tensor_names: T names.
        tensor_bytes: float64[T]. Whole tensor, per sample.
        reader_offsets, readers: int64. Readers of each tensor.
        crossing_offsets, crossing: int64. Tensors that cross the cut before each operator.
        producers: int64[T].
    """

    row_offsets: Ints
    row_limits: Ints
    row_examples: Ints
    layer_first: Ints
    segment_first: Ints
    segment_stop: Ints
    first_saver: Ints
    first_reader: Ints
    tensor_names: tuple[str, ...]
    tensor_bytes: Floats
    reader_offsets: Ints
    readers: Ints
    crossing_offsets: Ints
    crossing: Ints
    producers: Ints


def model_shape(problem: Problem, costs: CostTables) -> ModelShape:
    """Return the shape of a problem's workload."""
    workload = problem.workload
    count = len(workload)
    limits: list[int] = []
    examples: list[int] = []
    offsets = [0]
    for index, op in enumerate(workload.operators):
        thresholds: set[int] = set()
        for name in op.inputs:
            if name in workload.producer:
                thresholds.add(workload.producer[name])
                thresholds.update(reader for reader in workload.consumers[name] if reader < index)
        limits += [*sorted(thresholds), NEVER]
        examples += [*sorted(thresholds), index]
        offsets.append(len(limits))
    layer_first = np.zeros(count, dtype=np.int64)
    for first, stop in workload.layers:
        layer_first[first:stop] = first
    segment_first = np.full(count, NEVER, dtype=np.int64)
    segment_stop = np.full(count, -1, dtype=np.int64)
    for first, stop in repeated_layers(workload):
        segment_first[first:stop], segment_stop[first:stop] = first, stop
    first_saver = np.full(count, NEVER, dtype=np.int64)
    gpu_type = problem.gpu_types[0]
    for index in range(count):
        for name, _ in saved_tensors(workload, index, costs.operator(index, (), 1, gpu_type)):
            if is_private(name):
                first_saver[index] = -1
            elif name in workload.producer:
                producer = workload.producer[name]
                first_saver[producer] = min(first_saver[producer], index)
    names = [name for op in workload.operators for name in op.outputs if name in workload.consumers]
    tensor_bytes = []
    for name in names:
        maker = workload.operators[workload.producer[name]]
        dtype = maker.definition.output_dtype(maker.outputs.index(name))
        tensor_bytes.append(
            float(np.prod(workload.tensors[name], dtype=np.float64))
            * dtype_bytes(dtype, problem.runtime.implementation)
        )
    readers = [workload.consumers[name] for name in names]
    producers = [workload.producer[name] for name in names]
    crossing: list[list[int]] = [[] for _ in range(count + 1)]
    first_reader = np.full(count, NEVER, dtype=np.int64)
    for tensor, (producer, found) in enumerate(zip(producers, readers, strict=True)):
        first_reader[producer] = min(first_reader[producer], found[0])
        for cut in range(producer + 1, found[-1] + 1):
            crossing[cut].append(tensor)
    return ModelShape(
        row_offsets=_ints(offsets),
        row_limits=_ints(limits),
        row_examples=_ints(examples),
        layer_first=layer_first,
        segment_first=segment_first,
        segment_stop=segment_stop,
        first_saver=first_saver,
        first_reader=first_reader,
        tensor_names=tuple(names),
        tensor_bytes=np.array(tensor_bytes, dtype=np.float64),
        reader_offsets=_offsets(readers),
        readers=_ints([reader for found in readers for reader in found]),
        crossing_offsets=_offsets(crossing),
        crossing=_ints([tensor for found in crossing for tensor in found]),
        producers=_ints(producers),
    )


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _offsets(rows: Sequence[Sequence[int]]) -> Ints:
    return np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)]).astype(np.int64)


@dataclass(frozen=True)
class StageRows:
    """Times and collectives of every operator under one tensor degree, on one device type.

    Attributes:
        forward_s, backward_s: float64[N]. Computation.
        added_s: float64[N]. Of ``backward_s``, what the first microbatch lacks.
        collectives: Distinct ``(collective, bytes)``, Q of them.
        before_forward, before_again, after_backward: int64[rows, Q]. How often each collective occurs before the
            operator's forward, before it runs again in recomputation (what was reduced on its way into a segment
            stays reduced) and after its backward. Nothing is gathered again: that is for shards of the sequence.
        gathered: For each of the rows, bytes of the inputs that forward gathers and backward needs whole.
        after_forward: int64[N, Q]. Inside the operator, after its forward.
        settling: int64[N, Q]. After the stage's forward, if nothing in the stage reads the output.
    """

    forward_s: Floats
    backward_s: Floats
    added_s: Floats
    collectives: tuple[tuple[str, float], ...]
    before_forward: Ints
    before_again: Ints
    after_backward: Ints
    gathered: tuple[tuple[float, ...], ...]
    after_forward: Ints
    settling: Ints


@dataclass(frozen=True)
class _Around:
    """One row: numbers of the collectives before forward, again, and after backward, and bytes gathered."""

    before_forward: list[int]
    before_again: list[int]
    after_backward: list[int]
    gathered: tuple[float, ...]


class StageRowsBuilder:
    """Works out ``StageRows`` from the cost tables, equal operators once.

    Args:
        costs: Cost tables.
        shape: Shape of their workload.
        tp: Tensor-parallel degree.
        samples: Samples of one rank.
        gpu_type: Device type.
    """

    def __init__(self, costs: CostTables, shape: ModelShape, tp: int, samples: int, gpu_type: str) -> None:
        self.costs = costs
        self.shape = shape
        self.tp, self.samples, self.gpu_type = tp, samples, gpu_type
        self.workload = costs.problem.workload
        self.resolved: list[Sharding] = [resolve((Axis("tensor", tp),), op) for op in self.workload.operators]
        self.numbers: dict[tuple[str, float], int] = {}

    def build(self) -> StageRows:
        """Return the rows."""
        count = len(self.workload)
        found: dict[object, _Around] = {}
        rows: list[_Around] = []
        inside, settling = [], []
        for index in range(count):
            for row in range(self.shape.row_offsets[index], self.shape.row_offsets[index + 1]):
                first = int(self.shape.row_examples[row])
                key = self._key(index, first)
                if key not in found:
                    found[key] = self._around(index, first)
                rows.append(found[key])
            inside.append(self._inside(index, FORWARD))
            settling.append(self._settling(index))
        costs = [
            self.costs.operator(index, self.resolved[index], self.samples, self.gpu_type) for index in range(count)
        ]
        return StageRows(
            forward_s=np.array([cost.forward.device_s for cost in costs], dtype=np.float64),
            backward_s=np.array([cost.backward.device_s for cost in costs], dtype=np.float64),
            added_s=np.array([cost.later_additions.device_s for cost in costs], dtype=np.float64),
            collectives=tuple(self.numbers),
            before_forward=self._matrix([row.before_forward for row in rows]),
            before_again=self._matrix([row.before_again for row in rows]),
            after_backward=self._matrix([row.after_backward for row in rows]),
            gathered=tuple(row.gathered for row in rows),
            after_forward=self._matrix(inside),
            settling=self._matrix(settling),
        )

    def _key(self, index: int, first: int) -> object:
        """Return what the collectives around an operator depend on."""
        signatures, producer_of = self.workload.signatures, self.workload.producer
        key: list[object] = [signatures[index]]
        for name in self.workload.operators[index].inputs:
            producer = producer_of.get(name)
            if producer is None:
                key.append(None)
                continue
            readers = [
                (signatures[reader], self.workload.operators[reader].inputs.index(name))
                for reader in self.workload.consumers[name]
                if first <= reader < index
            ]
            number = self.workload.operators[producer].outputs.index(name)
            made = (signatures[producer], number) if producer >= first else None
            outside = producer < self.shape.segment_first[index]
            key.append((made, outside, tuple(dict.fromkeys(readers)), tuple(readers[:1])))
        return tuple(key)

    def _around(self, index: int, first: int) -> _Around:
        """Return the collectives between an operator and its inputs in a stage that begins with ``first``."""
        before_forward: list[int] = []
        before_again: list[int] = []
        after_backward = self._inside(index, BACKWARD_INPUT)

        def sharding_of(other: int) -> Sharding | None:
            return self.resolved[other] if other >= first else None

        arrivals = self._arrivals(index, first)
        collectives = input_collectives(self.costs, index, sharding_of, self.samples, self.gpu_type, arrivals)
        for phase, item, owner, _ in collectives:
            if self._cost(owner).contains(item):
                continue
            (before_forward if phase == FORWARD else after_backward).append(self._number(item))
            reduced_before = item.collective in REDUCTIONS and owner < self.shape.segment_first[index]
            if phase == FORWARD and not reduced_before:
                before_again.append(self._number(item))
        gathered = tuple(item.num_bytes for _, item in gathered_inputs(self._cost(index), collectives))
        return _Around(before_forward, before_again, after_backward, gathered)

    def _arrivals(self, index: int, first: int) -> dict[str, Crossing]:
        """Return what an operator reads of earlier stages, as it arrives in one that begins with ``first``.

        Nothing comes in shards of the sequence: plans of a batch are tensor parallel without.
        """
        found = {}
        for name in self.workload.operators[index].inputs:
            producer = self.workload.producer.get(name)
            if producer is not None and producer < first:
                reader = next(reader for reader in self.workload.consumers[name] if reader >= first)
                position = self.workload.operators[reader].inputs.index(name)
                found[name] = arriving(
                    self.resolved[reader],
                    self._input_layout(reader, position),
                    self.workload.tensors[name],
                    in_shards=False,
                    reader=(reader, position),
                )
        return found

    def _inside(self, index: int, phase: str) -> list[int]:
        cost = self._cost(index)
        return [self._number(item) for own, item in cost.internal if own == phase and not cost.contains(item)]

    def _settling(self, index: int) -> list[int]:
        cost = self._cost(index)
        found: list[int] = []
        for number, (name, size) in enumerate(
            zip(self.workload.operators[index].outputs, cost.output_bytes, strict=True)
        ):
            have = self._output_layout(index, number)
            if name in self.workload.consumers and PARTIAL in have:
                sizes = mesh_sizes(self.resolved[index])
                moves = reshard(sizes, have, sizes, settled(have), size)
                found += [self._number(item) for item in moves if not cost.contains(item)]
        return found

    def _cost(self, index: int):  # type: ignore[no-untyped-def]
        return self.costs.operator(index, self.resolved[index], self.samples, self.gpu_type)

    def _input_layout(self, index: int, position: int) -> tuple[Placement, ...]:
        return tuple(split.inputs[position] for split in self.costs.splits(index, self.resolved[index]))

    def _output_layout(self, index: int, number: int) -> tuple[Placement, ...]:
        return tuple(split.outputs[number] for split in self.costs.splits(index, self.resolved[index]))

    def _number(self, item: MeshCollective) -> int:
        if item.moves_batch or item.sizes != (self.tp,):
            raise ValueError(f"a batch of plans can hold collectives over the tensor axis only, got {item}")
        return self.numbers.setdefault((item.collective, item.num_bytes), len(self.numbers))

    def _matrix(self, rows: list[list[int]]) -> Ints:
        matrix = np.zeros((len(rows), max(1, len(self.numbers))), dtype=np.int64)
        for row, numbers in enumerate(rows):
            for number in numbers:
                matrix[row, number] += 1
        return matrix

    @cached_property
    def layouts(self) -> tuple[Ints, Ints]:
        """Layout codes of every tensor where it is made, and where each of its readers reads it."""
        made, read = [], []
        for name in self.shape.tensor_names:
            producer = self.workload.producer[name]
            number = self.workload.operators[producer].outputs.index(name)
            made.append(_code(settled(self._output_layout(producer, number))))
            for reader in self.workload.consumers[name]:
                position = self.workload.operators[reader].inputs.index(name)
                read.append(_code(self._input_layout(reader, position)))
        return _ints(made), _ints(read)


def _code(layout: Sequence[Placement]) -> int:
    dims = [1 + placement.dim for placement in layout if isinstance(placement, Shard)]
    if len(layout) > 1 or dims == [1]:
        raise ValueError(f"a batch of plans can cut tensors along one dimension but the batch, got {layout}")
    return dims[0] if dims else REPLICATED


PriceOf = Callable[[str, float], float]


def priced(rows: StageRows, price_s: PriceOf) -> tuple[Floats, Floats]:
    """Return seconds of collectives: float64[N, 2] inside and settling, float64[rows, 3] around operators."""
    prices = np.array([price_s(*key) for key in rows.collectives] or [0.0], dtype=np.float64)
    around = (rows.before_forward, rows.before_again, rows.after_backward)
    return (
        np.stack([rows.after_forward @ prices, rows.settling @ prices], axis=1),
        np.stack([found @ prices for found in around], axis=1),
    )
