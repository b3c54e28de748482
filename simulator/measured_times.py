"""Whether measured times can be seconds: far off what the model says of the same work, they are in another unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from datafiles.words import counted
from hardware_models.collective_table import TRANSFERS
from hardware_models.group_shapes import full_nodes, groups_at_once
from hardware_models.model import HardwareModel

if TYPE_CHECKING:
    from simulator.problem import Problem

FAR_OFF = 100.0
"""Times over the model's, or below them, that no machine explains. In the median over their rows, the profiles behind
the accuracy groups are at 0.76 to 1.4 and their collectives at 1.2 to 3.1; milliseconds are at a thousand."""
MOST_ROWS = 64
"""Rows of a table of collectives that are looked at, spread over it: a median needs no more of thousands."""


def check_times(problem: Problem, shipped: HardwareModel, file: str) -> None:
    """Refuse measured operators and collectives whose times cannot be seconds.

    Args:
        problem: With what was measured.
        shipped: The hardware without: constants that come with the times may be fitted to them.
        file: Where it is from, for the message.

    Raises:
        ValueError: If operators that have work take no time, or times are in the median over rows further than a factor
            of ``FAR_OFF`` from the model's.
    """
    for what, ratios in (
        ("operators", list(_operators(problem, shipped, file))),
        ("collectives", list(_collectives(problem.hardware, shipped))),
    ):
        ratio = median(ratios) if ratios else 1.0
        if not 1 / FAR_OFF < ratio < FAR_OFF:
            raise ValueError(
                f"{file}: times of {what} must be seconds, got {ratio:.3g} times what the model says of them in the "
                "median; convert them to seconds, check whose GPU and cluster they are, or leave --profile out"
            )


def _operators(problem: Problem, shipped: HardwareModel, file: str) -> Iterator[float]:
    """Yield times of rows over the model's, of the lowest tensor-parallel degree that there is."""
    from simulator.costs import CostTables

    profile = problem.hardware.operator_profile
    if profile is None or profile.dtype != problem.runtime.implementation.dtype:
        return
    workload = problem.workload
    first = {op.role: index for index, op in reversed(list(enumerate(workload.operators)))}
    first |= {role: index for index, role in reversed(list(enumerate(workload.profile_roles)))}
    rows = [row for row in profile.rows if row.role in first]
    lowest = min((row.tensor_size for row in rows), default=1)
    costs = CostTables(replace(problem, hardware=shipped))
    for row in rows:
        whole = costs.operator(first[row.role], (), row.samples, profile.gpu_type)
        passes = (whole.forward, whole.backward_alone)
        if not sum(each.device_s for each in passes):
            continue
        seconds = row.forward_s + row.backward_s
        if not seconds > 0:
            raise ValueError(
                f"{file}: times of operators with work must be above 0 s, got 0 for {row.role} with "
                f"{counted(row.samples, 'sample')} on {counted(row.tensor_size, 'tensor-parallel rank')}; "
                "measure it, or remove the row"
            )
        if row.tensor_size == lowest:
            yield seconds / sum(
                each.device_s if profile.kernels_only else max(each.device_s, each.host_s) for each in passes
            )


def _collectives(hardware: HardwareModel, shipped: HardwareModel) -> Iterator[float]:
    """Yield times of a table's rows over the link model's, of groups that fit on the nodes."""
    if hardware.collective_table is None:
        return
    whole = full_nodes(hardware.cluster)
    measured, modelled = replace(hardware, cluster=whole), replace(shipped, cluster=full_nodes(shipped.cluster))
    rows = list(hardware.collective_table.rows())
    for kind, shape, num_bytes, _ in rows[:: -(-len(rows) // MOST_ROWS)]:
        if shape.num_nodes > len(whole.nodes):
            continue
        for group in groups_at_once(whole, range(shape.num_nodes), replace(shape, groups_per_node=1)):
            found, expected = (
                each.transfer(num_bytes, *group) if kind in TRANSFERS else each.collective(kind, num_bytes, group)
                for each in (measured, modelled)
            )
            if found.source == "measured":
                yield found.alone_s / expected.alone_s
