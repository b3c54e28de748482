"""What the public code computes with: a profile's rows, sizes included, and its roundings (``compat="release"``)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hardware_models.group_shapes import GroupShape
from hardware_models.profile import ProfileRow, Split
from searchers.aceso.arrays import (
    BACKWARD,
    ENTERS,
    EXTRA_BACKWARD,
    EXTRA_FORWARD,
    FORWARD,
    GRADIENT,
    INPUT,
    KEPT,
    LEAVES,
    LISTED,
    NUM_COLUMNS,
    OUTPUT,
    STATE,
    WEIGHT,
    Arrays,
)
from searchers.aceso.links import latency_and_slope
from searchers.aceso.tables import Space, Tables, block_role, operator_marks, powers_of_two
from simulator.problem import Problem
from simulator.profiled_costs import profile_role
from workloads.operators import Workload

GIB_AS_1000_MIB = 1.024
"""The public code divides MiB by 1000 times the measured GiB/s."""


def release_arrays(problem: Problem) -> Tables:
    """Return what the public code computes with: a profile's rows, 16 bytes a parameter, bandwidth by size class.

    Raises:
        ValueError: If the hardware has no profile with sizes, or no measured transfers.
    """
    hardware, workload = problem.hardware, problem.workload
    profile = hardware.operator_profile
    if profile is None or hardware.collective_table is None:
        raise ValueError(
            "the release's model reads Aceso's profile of operators and collectives, got hardware without; give both "
            "(hardware_models.import_aceso), or use the paper's model"
        )
    rows = {(row.role, row.samples, row.tensor_size, row.split): row for row in profile.rows}
    degrees = tuple(
        degree
        for degree in sorted({row.tensor_size for row in profile.rows})
        if degree <= hardware.cluster.devices_per_node
    )
    samples = tuple(
        sorted({row.samples for row in profile.rows if problem.global_batch % row.samples == 0})
    )
    both = any(row.split == "alternative" for row in profile.rows)
    flexible = np.array([op.kind == "conv2d" and both for op in workload.operators])
    space = Space(degrees, samples, 2 if both else 1, flexible)
    per_byte = problem.runtime.state_bytes_per_parameter / problem.runtime.parameter_bytes
    columns = np.full((space.num_cells, NUM_COLUMNS, len(workload)), np.inf)
    splits: tuple[Split, ...] = ("default", "alternative")
    roles = [profile_role(profile, workload, index) for index in range(len(workload))]
    for degree in degrees:
        for count in samples:
            for partition in range(space.partitions):
                cell = space.cell(degree, count, partition)
                known: dict[str, list[float]] = {}
                for index, role in enumerate(roles):
                    if role not in known:
                        row = rows.get((role, count, degree, splits[partition]))
                        known[role] = [np.inf] * NUM_COLUMNS if row is None else _release_row(row, per_byte)
                    columns[cell, :, index] = known[role]
    table = hardware.collective_table
    knots = np.array([float(2**power) for power in range(20, 31)])
    seconds = []
    for num_nodes, kind in enumerate(("transfer_intra_node", "transfer_inter_node"), start=1):
        measured = dict(table.series.get((kind, GroupShape(2, num_nodes)), ()))
        if any(size not in measured for size in knots):
            raise ValueError(f"the release's model needs {kind} for 1 MiB to 1 GiB in powers of two; import comm.csv")
        seconds.append([measured[size] * GIB_AS_1000_MIB for size in knots])
    num_degrees = len(powers_of_two(hardware.cluster.devices_per_node))
    gather = np.zeros((num_degrees, 2))
    for shift in range(1, num_degrees):
        latency, slope = latency_and_slope(problem, "all_gather", range(2**shift))
        gather[shift] = latency, slope * 2**shift  # what enters is looked up as each rank's part, not as the whole
    group, layer, may_free = operator_marks(workload)
    arrays = Arrays(
        columns,
        group,
        _recomputed_layers(workload, layer),
        may_free,
        np.arange(len(workload), dtype=np.int32),
        np.array([knots, knots]),
        np.repeat(np.array(seconds)[:, np.newaxis], num_degrees, axis=1),
        np.zeros((num_degrees, problem.num_devices.bit_length(), 2)),
        gather,
        space.degree_table(),
        np.array([1, 1, 1], np.int64),
        np.full(len(workload), -1, np.int32),
    )
    return Tables(arrays, space)


def _recomputed_layers(workload: Workload, layer: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return what a recomputed run does not go beyond.

    The public code counts a layer's operators from the model's second on and leaves the last two apart, as GPT has
    them. In Wide-ResNet, where four come before the first block, its layers so end at the blocks' third convolution.
    """
    blocks = [op.layer for op in workload.operators if op.role.startswith("block-")]
    if not blocks:
        return layer
    size = blocks.count(blocks[0])
    places = np.arange(len(workload))
    found = np.maximum(places - 1, 0) // size
    found[-2:] = found[-1] + 1
    return found.astype(np.int32)


def _release_row(row: ProfileRow, per_byte: float) -> list[float]:
    values = [0.0] * NUM_COLUMNS
    values[FORWARD], values[BACKWARD] = row.forward_s, row.backward_s
    values[INPUT] = values[ENTERS] = row.input_bytes
    values[OUTPUT] = values[LEAVES] = row.output_bytes
    values[STATE], values[WEIGHT] = row.parameter_bytes * per_byte, row.parameter_bytes
    values[KEPT], values[LISTED] = row.saved_bytes * _kept_share(row), row.saved_bytes
    values[EXTRA_FORWARD], values[EXTRA_BACKWARD] = row.forward_workspace_bytes, row.backward_workspace_bytes
    values[GRADIENT] = row.parameter_bytes
    return values


def _kept_share(row: ProfileRow) -> float:
    """Return the part of a row's saved bytes that counts: some operators are overwritten in place by the next.

    Only the names of GPT's operators are met, so T5's decoder, whose names carry a number, counts as listed. The
    shortcut of a block without a convolution of its own is the sum that the ReLU overwrites.
    """
    if row.role == "attention_softmax":
        return 0.0
    if row.role == "attention_dropout":
        return 1.5
    if row.role.startswith("block-"):
        role = block_role(row.role)
        if role in ("bn1", "bn3") or (role == "downsample" and row.parameter_bytes == 0.0):
            return 0.0
    return 1.0
