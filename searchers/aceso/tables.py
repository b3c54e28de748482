"""What an operator costs at every tensor degree, microbatch size and partition choice, as arrays.

From the shared cost tables (profile rows where the hardware has them, kernels otherwise): the model of the paper. What
the public code reads from its profile is in ``release_tables``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from hardware_models.crowding import CrowdedGroup, together_s
from searchers.aceso.arrays import (
    BACKWARD,
    ENTERS,
    ENTRY,
    EXTRA_BACKWARD,
    EXTRA_FORWARD,
    FAR,
    FORWARD,
    GRADIENT,
    INPUT,
    KEPT,
    LEAVES,
    LISTED,
    NUM_COLUMNS,
    OUTPUT,
    OWN,
    STATE,
    WEIGHT,
    Arrays,
)
from simulator.costs import CostTables, saved_tensors
from simulator.lowering.edges import input_collectives
from simulator.lowering.mesh import MeshCollective, groups
from simulator.plan import Axis, Sharding, resolve
from simulator.problem import Problem
from workloads.kinds.base import FORWARD as FORWARD_PHASE
from workloads.operators import Workload

MIB = float(2**20)
PARTITIONS = ("tensor", "tensor_alternative")
NEVER_RECOMPUTED = ("embedding", "patch_embedding", "lm_loss", "classifier_loss", "loss_sum", "relu")
"""Kinds with which no recomputed run begins: Aceso's public code names embedding, logits, first convolution, ReLU."""
READERS = 8
"""Readers of a tensor that are looked at; T5's decoder layers all read one."""
KNOTS_BYTES = tuple(float(2**power) for power in range(10, 33))


@dataclass(frozen=True)
class Space:
    """The choices there are.

    Attributes:
        degrees: Tensor degrees, powers of two.
        samples: Samples per GPU and microbatch.
        partitions: 1 or 2 partition choices per operator.
        flexible: bool[num_operators]: operators whose other partition moves no data at its borders.
    """

    degrees: tuple[int, ...]
    samples: tuple[int, ...]
    partitions: int
    flexible: NDArray[np.bool_]

    def cell(self, degree: int, samples: int, partition: int = 0) -> int:
        """Return the row of the columns."""
        place = self.degrees.index(degree) * len(self.samples) + self.samples.index(samples)
        return place * self.partitions + partition

    @property
    def num_cells(self) -> int:
        """Rows."""
        return len(self.degrees) * len(self.samples) * self.partitions

    def degree_table(self) -> NDArray[np.int32]:
        """Return int32[num_cells, 3]: log2 of the degree, samples, partition."""
        rows = [
            (degree.bit_length() - 1, samples, partition)
            for degree in self.degrees
            for samples in self.samples
            for partition in range(self.partitions)
        ]
        return np.array(rows, np.int32)


@dataclass(frozen=True)
class Tables:
    """Arrays and the space they cover."""

    arrays: Arrays
    space: Space


def powers_of_two(largest: int) -> tuple[int, ...]:
    """Return the powers of two up to ``largest``.

    >>> powers_of_two(6)
    (1, 2, 4)
    """
    return tuple(2**power for power in range(largest.bit_length()))


def operator_marks(workload: Workload) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint8]]:
    """Return group (operators of one name), layer, and where a recomputed run may begin."""
    names: dict[str, int] = {}
    group = [names.setdefault(block_role(op.role), len(names)) for op in workload.operators]
    layer = [op.layer for op in workload.operators]
    first = {start for start, _ in workload.layers}
    may = [op.kind not in NEVER_RECOMPUTED and index not in first for index, op in enumerate(workload.operators)]
    return np.array(group, np.int32), np.array(layer, np.int32), np.array(may, np.uint8)


def block_role(role: str) -> str:
    """Return a role without the numbers of its block.

    >>> block_role("block-1-0-conv2"), block_role("mlp_linear_1")
    ('conv2', 'mlp_linear_1')
    """
    return role.rsplit("-", 1)[-1] if role.startswith("block-") else role


def latency_and_slope(problem: Problem, kind: str, members: Sequence[int]) -> tuple[float, float]:
    """Return latency and seconds per byte of a collective between 16 and 256 MiB."""
    low, high = (slowest_s(problem, kind, size * MIB, tuple(members)) for size in (16, 256))
    slope = (high - low) / (240 * MIB)
    return max(0.0, low - slope * 16 * MIB), slope


def per_node_of(problem: Problem) -> int:
    """Return the GPUs of a node that a problem uses."""
    return min(problem.hardware.cluster.devices_per_node, problem.num_devices)


def slowest_s(problem: Problem, kind: str, num_bytes: float, members: tuple[int, ...]) -> float:
    """Return seconds of a collective among GPUs that stand so behind a node's first, on the nodes where it is longest.

    Over several nodes all groups of its stride run at once.
    """
    cluster, hardware = problem.hardware.cluster, problem.hardware
    stride = members[1] - members[0]
    seconds = []
    for start in cluster.unlike_starts(max(members) + stride):
        own, *beside = (tuple(start + gpu + other for gpu in members) for other in range(stride))
        if cluster.node_of(own[0]) == cluster.node_of(own[-1]):
            seconds.append(hardware.collective(kind, num_bytes, own).alone_s)
        else:
            seconds.append(hardware.crowded_collective_s(kind, num_bytes, CrowdedGroup(own, tuple(beside))))
    return float(max(seconds))


def cost_arrays(problem: Problem, costs: CostTables, largest_samples: int = 8) -> Tables:
    """Return the paper's model on the shared cost tables.

    Args:
        problem: The problem. Everything takes as long as on the slowest kind of node.
        costs: Shared tables.
        largest_samples: Samples per GPU and microbatch go up to this, in powers of two that divide the batch.
    """
    workload = problem.workload
    per_node = per_node_of(problem)
    degrees = powers_of_two(per_node)
    samples = tuple(size for size in powers_of_two(largest_samples) if problem.global_batch % size == 0)
    flexible = np.array([op.kind == "conv2d" and op.tensor_split != op.alternative_split for op in workload.operators])
    space = Space(degrees, samples, 2 if flexible.any() else 1, flexible)
    columns = np.full((space.num_cells, NUM_COLUMNS, len(workload)), np.inf)
    kinds = _operator_classes(workload)
    tensors = _tensor_spans(workload)
    for degree in degrees:
        for count in samples:
            for partition in range(space.partitions):
                sharding = (Axis(PARTITIONS[partition], degree),)
                _fill(columns[space.cell(degree, count, partition)], costs, sharding, count, kinds, tensors)
    num_degrees = len(degrees)
    gather, sync = np.zeros((num_degrees, 2)), np.zeros((num_degrees, problem.num_devices.bit_length(), 2))
    for shift in range(1, num_degrees):
        gather[shift] = latency_and_slope(problem, "all_gather", range(2**shift))
    for tensor, shift in product(range(num_degrees), range(1, problem.num_devices.bit_length())):
        if 1 << tensor + shift <= problem.num_devices:
            members = [replica << tensor for replica in range(2**shift)]
            sync[tensor, shift] = latency_and_slope(problem, "all_reduce", members)
    columns[:, [ENTERS, LEAVES]] = columns[:, [INPUT, OUTPUT]]
    if problem.runtime.scatters_transfers:
        for degree, count, partition in product(degrees, samples, range(space.partitions)):
            cell = columns[space.cell(degree, count, partition)]
            whole = columns[space.cell(1, count, partition)][[INPUT, OUTPUT]]
            cell[[ENTERS, LEAVES]] = np.minimum(cell[[INPUT, OUTPUT]], whole / degree)
    arrays = Arrays(
        columns,
        *operator_marks(workload),
        _reach(costs, samples[0]),
        np.array([KNOTS_BYTES, KNOTS_BYTES]),
        _transfer_seconds(problem, degrees),
        sync,
        gather,
        space.degree_table(),
        np.array([0, 0, 0], np.int64),
    )
    return Tables(arrays, space)


def _transfer_seconds(problem: Problem, degrees: Sequence[int]) -> NDArray[np.float64]:
    """Return seconds of as many messages at once as a stage has GPUs: float64[2, num_degrees, num_knots].

    Inside a node, and over the border of two; on the nodes where they take longest.
    """
    hardware, last = problem.hardware, problem.num_devices - 1
    cluster, per_node = hardware.cluster, per_node_of(problem)
    met = reversed(list(zip(pairwise(cluster.kind_of_node), cluster.nodes[1:], strict=True)))
    borders = [node.first_device for node in dict(met).values()]
    found = np.zeros((2, len(degrees), len(KNOTS_BYTES)))
    for place, count in enumerate(degrees):
        near = max(1, min(count, per_node // 2))  # stages of one node
        inside = [
            [(gpu, min(gpu + near, last)) for gpu in range(start, start + near)]
            for start in cluster.unlike_starts(min(2 * near, last + 1))
        ]
        across = [
            [(gpu, min(gpu + count, last)) for gpu in range(border - count, border)]
            for border in [each for each in borders if count <= each <= last + 1 - count] or [per_node]
        ]
        for between, choices in enumerate((inside, across)):
            for knot, size in enumerate(KNOTS_BYTES):
                found[between, place, knot] = max(
                    together_s(hardware.transfer(size, *route) for route in routes) for routes in choices
                )
    return found


def _operator_classes(workload: Workload) -> tuple[NDArray[np.int64], list[int]]:
    """Return a class per operator (same kind, same neighbours) and an operator of each class."""
    ids: dict[object, int] = {}
    examples: list[int] = []
    found = np.zeros(len(workload), np.int64)
    signatures, consumers = workload.signatures, workload.consumers
    for index, op in enumerate(workload.operators):
        around: list[object] = [signatures[index]]
        for name in op.inputs:
            producer = workload.producer.get(name)
            around.append(-1 if producer is None else signatures[producer])
            around.append(tuple(signatures[reader] for reader in consumers[name] if index - 64 < reader < index))
        key = tuple(around)
        if key not in ids:
            ids[key] = len(ids)
            examples.append(index)
        found[index] = ids[key]
    return found, examples


@dataclass(frozen=True)
class _Spans:
    """Where each tensor is made and last read: int64[num_tensors] each; ``number`` among its maker's outputs."""

    maker: NDArray[np.int64]
    number: NDArray[np.int64]
    last_reader: NDArray[np.int64]
    is_saved: NDArray[np.bool_]


def _tensor_spans(workload: Workload) -> _Spans:
    rows = [
        (index, number, workload.consumers[name][-1])
        for index, op in enumerate(workload.operators)
        for number, name in enumerate(op.outputs)
        if name in workload.consumers
    ]
    table = np.array(rows, np.int64).reshape(-1, 3)
    return _Spans(table[:, 0], table[:, 1], table[:, 2], np.ones(len(rows), bool))


def _fill(
    columns: NDArray[np.float64],
    costs: CostTables,
    sharding: Sharding,
    samples: int,
    classes: tuple[NDArray[np.int64], list[int]],
    spans: _Spans,
) -> None:
    """Write one cell; it stays infinite where an operator cannot be split so."""
    problem = costs.problem
    workload, runtime = problem.workload, problem.runtime
    gpu_type = problem.gpu_types[0]
    of_class, examples = classes
    values = np.zeros((NUM_COLUMNS, len(examples)))
    produced = np.zeros((2, len(examples)))
    try:
        for place, index in enumerate(examples):
            _fill_class(values[:, place], produced[:, place], costs, sharding, samples, gpu_type, index)
    except ValueError:  # this degree does not divide the model
        return
    per_parameter = runtime.state_bytes_per_parameter
    values[STATE] = values[GRADIENT] * per_parameter
    values[WEIGHT] = values[GRADIENT] * runtime.parameter_bytes
    values[GRADIENT] *= runtime.gradient_accumulation_bytes
    columns[:] = values[:, of_class]
    sizes = produced[0][of_class][spans.maker] if len(spans.maker) else np.zeros(0)
    change = np.zeros(len(workload) + 1)
    np.add.at(change, spans.maker, sizes)
    np.add.at(change, spans.last_reader, -sizes)
    open_bytes = np.maximum(np.cumsum(change)[:-1], 0.0)
    columns[OUTPUT] = open_bytes
    columns[INPUT] = np.concatenate([[0.0], open_bytes[:-1]])


def _fill_class(
    values: NDArray[np.float64],
    produced: NDArray[np.float64],
    costs: CostTables,
    sharding: Sharding,
    samples: int,
    gpu_type: str,
    index: int,
) -> None:
    """Write what one operator costs, collectives with equally split neighbours included."""
    workload = costs.problem.workload

    def sharding_of(which: int) -> Sharding:
        return resolve(sharding, workload.operators[which])

    def cost_of(which: int):  # type: ignore[no-untyped-def]
        return costs.operator(which, sharding_of(which), samples, gpu_type)

    cost = cost_of(index)
    # A stage may lie anywhere: it is as slow as on the slowest type of GPU.
    on_types = [
        costs.operator(index, sharding_of(index), samples, each) for each in dict.fromkeys(costs.problem.gpu_types)
    ]
    seconds = [
        max(max(part.device_s, part.host_s) for part in parts)
        for parts in zip(*((on_type.forward, on_type.backward) for on_type in on_types), strict=True)
    ]
    for phase, item, owner, _ in input_collectives(costs, index, sharding_of, samples, gpu_type):
        if not cost_of(owner).contains(item):
            seconds[phase != FORWARD_PHASE] += _alone_s(costs, item)
    for phase, item in cost.internal:
        if not cost.contains(item):
            seconds[phase != FORWARD_PHASE] += _alone_s(costs, item)
    values[FORWARD], values[BACKWARD] = seconds
    values[GRADIENT] = cost.num_parameter_elements
    values[EXTRA_FORWARD], values[EXTRA_BACKWARD] = _working_bytes(cost)
    near, far = 0.0, 0.0
    own = dict(saved_tensors(workload, index, cost))
    values[OWN] = sum(size for name, size in own.items() if "/" in name)
    near += values[OWN]
    for name in workload.operators[index].outputs:
        # A tensor that any reader keeps stays, whoever made it; its bytes are those it has as the reader sees it.
        sizes = {index: own.get(name, 0.0)}
        for reader in workload.consumers.get(name, ())[:READERS]:
            sizes[reader] = dict(saved_tensors(workload, reader, cost_of(reader))).get(name, 0.0)
        size = max(sizes.values())
        if any(found and reader > index + 1 for reader, found in sizes.items()):
            far += size
        else:
            near += size
    values[KEPT], values[FAR], values[LISTED] = near, far, near
    values[ENTRY] = sum(
        size
        for name, size in zip(workload.operators[index].inputs, cost.input_bytes, strict=True)
        if name in workload.producer and not _is_kept(costs, name, sharding_of, samples, gpu_type)
    )
    produced[0] = sum(cost.output_bytes)


def _reach(costs: CostTables, samples: int) -> NDArray[np.int32]:
    """Return per operator the last one that keeps an output of it: int32[num_operators]."""
    workload, gpu_type = costs.problem.workload, costs.problem.gpu_types[0]
    kept = [
        {name for name, _ in saved_tensors(workload, index, costs.operator(index, (), samples, gpu_type))}
        for index in range(len(workload))
    ]
    found = np.arange(len(workload), dtype=np.int32)
    for index, op in enumerate(workload.operators):
        for name in op.outputs:
            readers = [reader for reader in workload.consumers.get(name, ())[:READERS] if name in kept[reader]]
            found[index] = max(found[index], *readers, index)
    return found


def _is_kept(
    costs: CostTables, name: str, sharding_of: Callable[[int], Sharding], samples: int, gpu_type: str
) -> bool:
    """Return whether the maker or a reader of a tensor keeps it for backward."""
    workload = costs.problem.workload
    users = (workload.producer[name], *workload.consumers[name][:READERS])
    return any(
        name in dict(saved_tensors(workload, user, costs.operator(user, sharding_of(user), samples, gpu_type)))
        for user in users
    )


def _working_bytes(cost) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """Return what is alive only while an operator works: its tensors, their gradients, buffers."""
    tensors = sum(cost.input_bytes) + sum(cost.output_bytes)
    return tensors + cost.workspace_forward_bytes, 2 * tensors + cost.workspace_backward_bytes


def _alone_s(costs: CostTables, item: MeshCollective) -> float:
    return slowest_s(costs.problem, item.collective, item.num_bytes, groups(item.sizes, item.axes)[0])
