"""What operators cost at one cell of Aceso's tables, from the shared cost tables: seconds, states, what is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hardware_models.gpus import DtypeError
from searchers.aceso.arrays import (
    BACKWARD,
    ENTRY,
    EXTRA_BACKWARD,
    EXTRA_FORWARD,
    FAR,
    FORWARD,
    GRADIENT,
    INPUT,
    KEPT,
    LISTED,
    NUM_COLUMNS,
    OUTPUT,
    OWN,
    STATE,
    STEP,
    TIED_GRADIENT,
    TIED_STATE,
    TIED_STEP,
    WEIGHT,
)
from searchers.aceso.links import slowest_s
from simulator.closed_forms.operator_needs import saved_bytes, working_bytes
from simulator.costs import CostTables
from simulator.lowering.edges import input_collectives
from simulator.lowering.mesh import MeshCollective, groups, parameter_layout
from simulator.plan import Sharding, resolve
from simulator.saved import is_private, saved_tensors
from simulator.segments import Segment
from workloads.kinds.base import FORWARD as FORWARD_PHASE
from workloads.operators import Workload

READERS = 8
"""Readers of a tensor that are looked at; T5's decoder layers all read one."""


def operator_classes(workload: Workload) -> tuple[NDArray[np.int64], list[int]]:
    """Return a class per operator (same kind, makers and readers of its tensors) and an operator of each class."""
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
        for name in op.outputs:  # who keeps what it makes, and whether that is the next operator
            readers = consumers.get(name, ())[:READERS]
            around.append(tuple((signatures[reader], reader == index + 1) for reader in readers))
        key = tuple(around)
        if key not in ids:
            ids[key] = len(ids)
            examples.append(index)
        found[index] = ids[key]
    return found, examples


@dataclass(frozen=True)
class Spans:
    """Where each tensor is made and last read: int64[num_tensors] each; ``number`` among its maker's outputs."""

    maker: NDArray[np.int64]
    number: NDArray[np.int64]
    last_reader: NDArray[np.int64]


def tensor_spans(workload: Workload) -> Spans:
    rows = [
        (index, number, workload.consumers[name][-1])
        for index, op in enumerate(workload.operators)
        for number, name in enumerate(op.outputs)
        if name in workload.consumers
    ]
    table = np.array(rows, np.int64).reshape(-1, 3)
    return Spans(table[:, 0], table[:, 1], table[:, 2])


def fill(
    columns: NDArray[np.float64],
    costs: CostTables,
    sharding: Sharding,
    samples: int,
    classes: tuple[NDArray[np.int64], list[int]],
    spans: Spans,
) -> None:
    """Write one cell of the tables; it stays infinite where an operator cannot be split so."""
    problem = costs.problem
    workload, runtime = problem.workload, problem.runtime
    gpu_type = problem.gpu_types[0]
    of_class, examples = classes
    values = np.zeros((NUM_COLUMNS, len(examples)))
    produced = np.zeros((max(len(op.outputs) for op in workload.operators), len(examples)))
    try:
        for place, index in enumerate(examples):
            _fill_class(values[:, place], produced[:, place], costs, sharding, samples, gpu_type, index)
    except DtypeError:
        raise
    except ValueError:  # this degree does not divide the model
        return
    per_parameter = runtime.state_bytes_per_parameter
    values[STATE] = values[GRADIENT] * per_parameter
    values[WEIGHT] = values[GRADIENT] * runtime.parameter_bytes
    values[STEP] = values[GRADIENT] * runtime.optimizer_workspace_bytes
    values[GRADIENT] *= runtime.travelling_gradient_bytes
    columns[:] = values[:, of_class]
    sizes = produced[spans.number, of_class[spans.maker]]
    change = np.zeros(len(workload) + 1)
    np.add.at(change, spans.maker, sizes)
    np.add.at(change, spans.last_reader, -sizes)
    open_bytes = np.maximum(np.cumsum(change)[:-1], 0.0)
    columns[OUTPUT] = open_bytes
    columns[INPUT] = np.concatenate([[0.0], open_bytes[:-1]])


def tied_before(workload: Workload) -> dict[int, list[tuple[int, str]]]:
    """Return for operators with a shared weight who had it before, and its tie; the first has none."""
    last: dict[str, int] = {}
    found: dict[int, list[tuple[int, str]]] = {}
    for index in range(len(workload)):
        for parameter in workload.parameters(index):
            if parameter.tie is not None:
                if parameter.tie in last:
                    found.setdefault(index, []).append((last[parameter.tie], parameter.tie))
                last[parameter.tie] = index
    return found


def fill_tied(
    columns: NDArray[np.float64],
    costs: CostTables,
    sharding: Sharding,
    samples: int,
    tied: Mapping[int, Sequence[tuple[int, str]]],
) -> None:
    """Write what is held once though two operators of a stage have it: weights in the same layout."""
    runtime, workload = costs.problem.runtime, costs.problem.workload

    def layouts(which: int) -> dict[str, tuple[object, int]]:
        own = resolve(sharding, workload.operators[which])
        splits = costs.splits(which, own)
        parameters = costs.operator(which, own, samples, costs.problem.gpu_types[0]).parameters
        return {
            parameter.tie: (parameter_layout(own, splits, number), elements)
            for number, (parameter, elements) in enumerate(parameters)
            if parameter.tie is not None
        }

    columns[[TIED_STATE, TIED_STEP, TIED_GRADIENT]] = 0.0
    for index, shared in tied.items():
        own = layouts(index)
        elements = sum(own[tie][1] for before, tie in shared if layouts(before)[tie] == own[tie])
        columns[TIED_STATE, index] = elements * runtime.state_bytes_per_parameter
        columns[TIED_STEP, index] = elements * runtime.optimizer_workspace_bytes
        if not runtime.reduces_ties_by_use:
            columns[TIED_GRADIENT, index] = elements * runtime.travelling_gradient_bytes


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
    moves = [
        (phase, item)
        for phase, item, owner, _ in input_collectives(costs, index, sharding_of, samples, gpu_type)
        if not cost_of(owner).contains(item)
    ]
    moves += [(phase, item) for phase, item in cost.internal if not cost.contains(item)]
    for column, of_pass in ((FORWARD, "forward"), (BACKWARD, "backward")):
        items = [item for phase, item in moves if (phase == FORWARD_PHASE) == (column == FORWARD)]
        # A stage may lie anywhere: it is as slow as on the slowest type of GPU.
        values[column] = max(
            _looped_s(costs, getattr(costs.operator(index, sharding_of(index), samples, each), of_pass), items, each)
            for each in dict.fromkeys(costs.problem.gpu_types)
        )
    values[GRADIENT] = cost.num_parameter_elements
    tensors = sum(cost.input_bytes) + sum(cost.output_bytes)
    values[EXTRA_FORWARD] = tensors + cost.workspace_forward_bytes
    values[EXTRA_BACKWARD] = working_bytes(index, cost, costs.problem)
    near, far = 0.0, 0.0
    own = dict(saved_tensors(workload, index, cost))
    values[OWN] = sum(size for name, size in own.items() if is_private(name))
    near += values[OWN]
    for name, made in zip(workload.operators[index].outputs, cost.output_bytes, strict=True):
        # A tensor that any reader keeps stays, whoever made it, as it was made or, if gathered, as the reader sees it.
        sizes = {index: own.get(name, 0.0)}
        keeps_made = name in own or costs.problem.runtime.keeps_gathered_shards
        for reader in workload.consumers.get(name, ())[:READERS]:
            read = dict(saved_tensors(workload, reader, cost_of(reader))).get(name, 0.0)
            sizes[reader] = saved_bytes(made, read, regathers=False, keeps_made=keeps_made, in_segment=False)
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
    produced[: len(cost.output_bytes)] = cost.output_bytes


def reach(costs: CostTables, samples: int) -> NDArray[np.int32]:
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


def _looped_s(costs: CostTables, segment: Segment, items: Sequence[MeshCollective], gpu_type: str) -> float:
    """Return what a loop over an operator's pass takes a turn, as Aceso's profiler times it.

    Its device, with the collectives around the pass, or its host, which launches them too, if that takes longer.
    """
    launches_s = (
        costs.launch_s(gpu_type) + costs.collective_host_s(groups(item.sizes, item.axes)[0]) for item in items
    )
    device_s = segment.device_s + sum(_alone_s(costs, item) for item in items)
    return max(device_s, segment.host_s + sum(launches_s))


def _alone_s(costs: CostTables, item: MeshCollective) -> float:
    members = groups(item.sizes, item.axes)[0]
    return costs.problem.runtime.handover_s + slowest_s(costs.problem, item.collective, item.num_bytes, members)


def tied_operators(workload: Workload) -> tuple[int, ...]:
    """Return the operators that share a weight with another."""
    holders: dict[str, list[int]] = {}
    for index in range(len(workload)):
        for parameter in workload.parameters(index):
            if parameter.tie is not None:
                holders.setdefault(parameter.tie, []).append(index)
    return tuple(sorted({index for found in holders.values() if len(found) > 1 for index in found}))
