"""Borders that the fewest elements cross of all in their layer: the ends of layers, and where residuals alone pass."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from workloads.operators import Workload


def narrow_borders(workload: Workload) -> NDArray[np.int32]:
    """Return them, ascending, each the first operator behind it: int32[.]."""
    change = np.zeros(len(workload) + 1, np.int64)
    for name, readers in workload.consumers.items():
        producer = workload.producer.get(name)
        if producer is not None:
            elements = prod(workload.tensors[name])
            change[producer + 1] += elements
            change[readers[-1] + 1] -= elements
    crossing = np.cumsum(change)
    found = []
    for start, stop in workload.layers:
        own = crossing[start + 1 : stop + 1]
        found.append(start + 1 + np.flatnonzero(own == own.min()))
    return np.concatenate(found).astype(np.int32)
