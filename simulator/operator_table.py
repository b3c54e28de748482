"""Every operator of a workload under one sharding word, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class OperatorTable:
    """Every operator of the workload under one sharding word, as arrays; what searchers work on.

    Arrays are float64[num_operators] unless said otherwise. Times include the tensor-parallel collectives
    that lie between equal shardings, alone. Prefix sums have one element more.

    Attributes:
        forward_s, backward_s: Seconds per microbatch on one rank.
        parameter_elements: Local parameter elements.
        saved_bytes: Kept from forward to backward.
        boundary_bytes: Bytes one microbatch sends over a cut behind the operator (all pass-through
            tensors included), summed over one replica group.
    """

    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    parameter_elements: NDArray[np.float64]
    saved_bytes: NDArray[np.float64]
    boundary_bytes: NDArray[np.float64]

    @cached_property
    def prefix(self) -> dict[str, NDArray[np.float64]]:
        """Prefix sums of every additive column: float64[num_operators + 1]."""
        columns = ("forward_s", "backward_s", "parameter_elements", "saved_bytes")
        return {name: np.concatenate([[0.0], np.cumsum(getattr(self, name))]) for name in columns}
