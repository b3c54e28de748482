"""Speed of the allocator replay; the target is 0.4 million events per second on one core."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simulator.memory.allocator import AllocatorSettings, replay

MIB = 2**20


def pipeline_events(
    num_layers: int = 24, num_microbatches: int = 48, in_flight: int = 8
) -> tuple[Any, Any, Any]:
    """A stage under 1F1B: parameters, saved and temporary tensors, gradients (about 110,000 events)."""
    saved_mib = [16, 48, 48, 16, 16, 64, 64, 16, 5, 2, 0.01, 0.01]
    sizes: list[int] = []
    ids: list[int] = []
    allocates: list[bool] = []
    microbatches: list[list[int]] = []

    def allocate(mib: float) -> int:
        sizes.append(int(mib * MIB) + 1)
        ids.append(len(ids))
        allocates.append(True)
        return ids[-1]

    def free(tensor: int) -> None:
        sizes.append(0)
        ids.append(tensor)
        allocates.append(False)

    def forward() -> None:
        saved = []
        for mib in saved_mib * num_layers:
            temporary = allocate(mib)
            saved.append(allocate(mib))
            free(temporary)
        microbatches.append(saved)

    def backward() -> None:
        for tensor in reversed(microbatches.pop(0)):
            gradient, workspace = allocate(16), allocate(3.3)
            free(tensor)
            free(gradient)
            free(workspace)

    for _ in range(12 * num_layers):
        allocate(20)
    for _ in range(in_flight):
        forward()
    for _ in range(num_microbatches - in_flight):
        forward()
        backward()
    while microbatches:
        backward()
    return np.array(sizes, dtype=np.int64), np.array(ids, dtype=np.int32), np.array(allocates, dtype=np.bool_)


@pytest.mark.parametrize("expandable", [False, True])
def test_replay_speed(benchmark: Any, expandable: bool) -> None:
    events = pipeline_events()
    settings = AllocatorSettings(expandable_segments=expandable)
    result = benchmark(replay, *events, 2**40, settings)
    benchmark.extra_info["events"] = len(events[0])
    assert result.failure is None
    assert result.requested_peak_bytes < result.allocated_peak_bytes < result.reserved_peak_bytes
