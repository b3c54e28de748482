"""What memory analysis says of one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one representative device over an iteration.

    Attributes:
        device: Index into ``TaskGraph.device_members``.
        peak_allocated_bytes: Largest sum of live tensors, in the allocator's 512-byte blocks.
        peak_reserved_bytes: Largest sum of segments the caching allocator took from the device.
        capacity_bytes: Limit less context and communication buffers.
        fits: The allocator replay ended without failure within the capacity.
        peak_time_s: When the live peak occurs (label from the timeline).
        peak_where: What ran then, in words ("stage 0, forward of microbatch 3").
        consumers: Bytes live at that moment by what they are, largest first (``parameters``,
            ``gradients``, ``optimizer states``, ``saved activations``, ``segment inputs``, ``logits``,
            ``workspace``, ``received tensors``, ...).
        failed_request_bytes: Size of the allocation that failed; None if all succeeded.
    """

    device: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    capacity_bytes: int
    fits: bool
    peak_time_s: float
    peak_where: str
    consumers: Mapping[str, int]
    failed_request_bytes: int | None = None


@dataclass(frozen=True)
class LiveBytes:
    """Live bytes of one representative device over an iteration, for plots and traces.

    Attributes:
        times_s: float64[E], ascending. When something was allocated or freed.
        live_bytes: float64[E]. What is live from then on.
    """

    times_s: NDArray[np.float64]
    live_bytes: NDArray[np.float64]
