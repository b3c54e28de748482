"""What an operator costs at every tensor degree, microbatch size and partition choice, as arrays.

From the shared cost tables (profile rows where the hardware has them, kernels otherwise): the model of the paper. What
the public code reads from its profile is in ``release_tables``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from searchers.aceso.arrays import (
    ENTERS,
    INPUT,
    LEAVES,
    NUM_COLUMNS,
    OUTPUT,
    STATE,
    Arrays,
)
from searchers.aceso.links import KNOTS_BYTES, latency_and_slope, per_node_of, transfer_seconds
from searchers.aceso.operator_columns import fill, fill_tied, operator_classes, reach, tensor_spans, tied_before
from searchers.degrees import microbatch_sizes
from simulator.costs import CostTables
from simulator.plan import Axis
from simulator.problem import Problem
from workloads.operators import Workload

PARTITIONS = ("tensor", "tensor_alternative")
NEVER_RECOMPUTED = ("embedding", "patch_embedding", "lm_loss", "classifier_loss", "loss_sum", "relu")
"""Kinds with which no recomputed run begins: Aceso's public code names embedding, logits, first convolution, ReLU."""


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
    samples = tuple(microbatch_sizes(problem.global_batch, largest=largest_samples, powers_of_two=True))
    flexible = np.array([op.kind == "conv2d" and op.tensor_split != op.alternative_split for op in workload.operators])
    space = Space(degrees, samples, 2 if flexible.any() else 1, flexible)
    columns = np.full((space.num_cells, NUM_COLUMNS, len(workload)), np.inf)
    kinds = operator_classes(workload)
    tensors = tensor_spans(workload)
    tied = tied_before(workload)
    for degree in degrees:
        for count in samples:
            for partition in range(space.partitions):
                sharding = (Axis(PARTITIONS[partition], degree),)
                cell = columns[space.cell(degree, count, partition)]
                fill(cell, costs, sharding, count, kinds, tensors)
                if np.isfinite(cell[STATE]).all():
                    fill_tied(cell, costs, sharding, count, tied)
    num_degrees = len(degrees)
    gather, sync = np.zeros((num_degrees, 2)), np.zeros((num_degrees, problem.num_devices.bit_length(), 2))
    for shift in range(1, num_degrees):
        gather[shift] = latency_and_slope(problem, "all_gather", range(2**shift))
        gather[shift, 0] += problem.runtime.handover_s
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
        reach(costs, samples[0]),
        np.array([KNOTS_BYTES, KNOTS_BYTES]),
        transfer_seconds(problem, degrees),
        sync,
        gather,
        space.degree_table(),
        np.array([0, 0, 0], np.int64),
        np.array([min((before for before, _ in tied.get(i, ())), default=-1) for i in range(len(workload))], np.int32),
    )
    return Tables(arrays, space)
