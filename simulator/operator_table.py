"""Every operator of a workload under one sharding word, as arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simulator.lowering.crossing import gathers_shards, is_sequence_parallel
from simulator.lowering.edges import gathered_inputs, gathers_again, input_collectives, reduced_beside
from simulator.lowering.mesh import MeshCollective, groups
from simulator.plan import Sharding, resolve
from simulator.saved import saved_tensors
from workloads.kinds.base import FORWARD
from workloads.operators import Workload

if TYPE_CHECKING:
    from simulator.costs import CostTables


@dataclass(frozen=True)
class OperatorTable:
    """Every operator of the workload under one sharding word, as arrays; what searchers work on.

    Arrays are float64[num_operators] unless said otherwise. Times include the tensor-parallel collectives
    that lie between equal shardings, alone, on devices that begin with a node of the type. Prefix sums have one element
    more.

    Attributes:
        forward_s, backward_s: Seconds per microbatch on one rank.
        forward_host_s, backward_host_s: Seconds that launching it takes the host.
        parameter_elements: Local parameter elements.
        saved_bytes: Kept from forward to backward.
        boundary_bytes: Bytes one microbatch sends over a cut behind the operator (all pass-through
            tensors included), summed over one replica group.
    """

    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    forward_host_s: NDArray[np.float64]
    backward_host_s: NDArray[np.float64]
    parameter_elements: NDArray[np.float64]
    saved_bytes: NDArray[np.float64]
    boundary_bytes: NDArray[np.float64]

    @cached_property
    def prefix(self) -> dict[str, NDArray[np.float64]]:
        """Prefix sums of every additive column: float64[num_operators + 1]."""
        columns = ("forward_s", "backward_s", "parameter_elements", "saved_bytes")
        return {name: np.concatenate([[0.0], np.cumsum(getattr(self, name))]) for name in columns}


def operator_table(costs: CostTables, sharding: Sharding, samples: int, gpu_type: str) -> OperatorTable:
    """Return all operators under one sharding; equal surroundings are priced once.

    Args:
        costs: Where operators are priced.
        sharding: Applied to every operator; split words allowed.
        samples: Samples one rank works on per microbatch.
        gpu_type: Device type.
    """
    workload = costs.problem.workload
    count = len(workload)
    forward, backward, forward_host, backward_host = (np.zeros(count) for _ in range(4))
    parameters, saved, boundary = (np.zeros(count) for _ in range(3))
    collective_cache: dict[object, tuple[float, float]] = {}
    seen: set[str] = set()
    open_bytes = 0.0
    last_reader = {name: readers[-1] for name, readers in workload.consumers.items()}
    closing: dict[int, float] = {}
    resolved = [resolve(sharding, op) for op in workload.operators]
    for index in range(count):
        cost = costs.operator(index, resolved[index], samples, gpu_type)
        key = (workload.signatures[index], tuple(_neighbour_signatures(workload, index)))
        if key not in collective_cache:
            collective_cache[key] = _collective_seconds(costs, index, resolved, samples, gpu_type)
        forward_comm, backward_comm = collective_cache[key]
        forward[index] = cost.forward.device_s + forward_comm
        backward[index] = cost.backward.device_s + backward_comm
        forward_host[index], backward_host[index] = cost.forward.host_s, cost.backward.host_s
        parameters[index] = cost.num_parameter_elements
        for name, size in saved_tensors(workload, index, cost):
            if name not in seen:
                seen.add(name)
                saved[index] += size
        for tensor, size in zip(workload.operators[index].outputs, cost.output_bytes, strict=True):
            if tensor in last_reader:
                open_bytes += size
                closing[last_reader[tensor]] = closing.get(last_reader[tensor], 0.0) + size
        open_bytes -= closing.get(index, 0.0)
        boundary[index] = max(open_bytes, 0.0)
    return OperatorTable(forward, backward, forward_host, backward_host, parameters, saved, boundary)


def _neighbour_signatures(workload: Workload, index: int) -> Iterable[tuple[int, ...]]:
    """Yield, per input, the signatures of its producer and of its earlier readers."""
    for name in workload.operators[index].inputs:
        producer = workload.producer.get(name)
        earlier = [reader for reader in workload.consumers[name] if reader < index]
        yield (
            -1 if producer is None else workload.signatures[producer],
            *dict.fromkeys(workload.signatures[reader] for reader in earlier),
        )


def _collective_seconds(
    costs: CostTables, index: int, resolved: list[Sharding], samples: int, gpu_type: str
) -> tuple[float, float]:
    """Return seconds of the collectives before operator ``index``, forward and backward, alone."""
    totals = [0.0, 0.0]
    workload = costs.problem.workload
    cost = costs.operator(index, resolved[index], samples, gpu_type)
    moves = input_collectives(costs, index, resolved.__getitem__, samples, gpu_type)
    beside = [] if cost.includes_collectives else reduced_beside(costs, cost, index, moves)
    for phase, item, owner, position in moves:
        if not costs.operator(owner, resolved[owner], samples, gpu_type).contains(item):
            maker, made = index, cost.backward_input
            if phase == FORWARD:
                maker = workload.producer[workload.operators[index].inputs[position]]
                made = costs.operator(maker, resolved[maker], samples, gpu_type).forward
            just_made = maker >= index - 1 and gathers_shards(item, resolved[maker])
            bound_s = made.device_s if just_made and costs.problem.runtime.host_runs_ahead else inf
            if phase != FORWARD and (item, position) in beside:
                bound_s = 0.0
            totals[phase != FORWARD] += _group_s(costs, item, gpu_type, bound_s)
    for position, item in gathered_inputs(cost, moves):
        maker = workload.producer[workload.operators[index].inputs[position]]
        if gathers_again(costs, moves, position, in_shards=is_sequence_parallel(resolved[maker])):
            totals[1] += _group_s(costs, item, gpu_type, 0.0 if beside else inf)
    for phase, item in cost.internal:
        if not cost.contains(item):
            totals[phase != FORWARD] += _group_s(costs, item, gpu_type)
    return totals[0], totals[1]


def _group_s(costs: CostTables, item: MeshCollective, gpu_type: str, bound_s: float = inf) -> float:
    """Return seconds on the first group of a mesh, where it takes longest of the nodes that it may begin on.

    What the device stands still around it is in them, up to a bound (``lowering.handover``): nothing for what travels
    beside gradients.
    """
    members, hardware = groups(item.sizes, item.axes)[0], costs.problem.hardware
    return min(costs.problem.runtime.handover_s, bound_s) + max(
        hardware.collective(item.collective, item.num_bytes, [start + member for member in members]).alone_s
        for start in hardware.cluster.unlike_starts(max(members) + 1, gpu_type)
    )
