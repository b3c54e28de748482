"""The CUDA caching allocator's own history as plain data, and what our allocator makes of the same requests.

``torch.cuda.memory._snapshot()`` holds stack frames and is usually pickled; here it becomes JSON where it is
recorded: segments with their blocks, and the trace of one device's events without frames.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from simulator.memory.allocator import AllocatorResult, replay
from validation.kinds.shared_tensors import forget_shared

FORMAT = "windtunnel-allocator-history-1"
MAX_EVENTS = 200_000
"""Events that the recorder keeps: some iterations of a large model; a small file once packed."""

ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "snapshot", "oom", "user_defined",
)  # fmt: skip
_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_REQUESTS = {"alloc": 1, "free_requested": -1}


@dataclass(frozen=True)
class HistoryPeaks:
    """Peaks of a history, above what there was before its first event.

    Attributes:
        requested_bytes: Tensors alive, as asked for.
        reserved_bytes: Segments held.
    """

    requested_bytes: int
    reserved_bytes: int


def history_mapping(snapshot: Mapping[str, Any], device: int = 0) -> dict[str, Any]:
    """Return one device's part of a snapshot as plain data: numbers and words only.

    Args:
        snapshot: What ``torch.cuda.memory._snapshot()`` returns.
        device: Index of the GPU.

    Returns:
        ``segments``: address, sizes in bytes, stream, pool and ``[address, bytes, requested bytes, state]`` of each
        block; ``events``: ``[action, address, bytes, stream]`` in order.

    Raises:
        ValueError: If the snapshot is not what torch 2 writes.
    """
    try:
        segments = [_segment(each) for each in snapshot["segments"] if int(each.get("device", device)) == device]
        traces = snapshot["device_traces"]
        events = [_event(each) for each in (traces[device] if device < len(traces) else [])]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"an allocator snapshot must have segments and device_traces as torch 2 writes them, got {error!r}"
        ) from None
    return {"format": FORMAT, "device": device, "segments": segments, "events": events}


def _segment(segment: Mapping[str, Any]) -> dict[str, Any]:
    blocks, address = [], int(segment["address"])
    for block in segment["blocks"]:
        start = int(block.get("address", address))  # torch before 2.2 gives sizes only
        size = int(block["size"])
        blocks.append([start, size, int(block.get("requested_size", size)), str(block["state"])])
        address = start + size
    return {
        "address": int(segment["address"]),
        "total_bytes": int(segment["total_size"]),
        "allocated_bytes": int(segment["allocated_size"]),
        "active_bytes": int(segment["active_size"]),
        "stream": int(segment["stream"]),
        "pool": str(segment["segment_type"]),
        "blocks": blocks,
    }


def _event(event: Mapping[str, Any]) -> list[Any]:
    action = str(event["action"])
    if action not in ACTIONS:
        raise ValueError(f"an allocator event must be one of {', '.join(ACTIONS)}, got {action!r}")
    # An out-of-memory event names what was free instead of an address.
    return [action, int(event.get("addr", 0)), int(event["size"]), int(event.get("stream", 0))]


def history_peaks(history: Mapping[str, Any]) -> HistoryPeaks:
    """Return the peaks of a history's events."""
    requested = reserved = requested_peak = reserved_peak = 0
    for action, _, size, _ in history["events"]:
        requested += _REQUESTS.get(action, 0) * size
        reserved += _RESERVES.get(action, 0) * size
        requested_peak, reserved_peak = max(requested_peak, requested), max(reserved_peak, reserved)
    return HistoryPeaks(requested_peak, reserved_peak)


def replay_history(history: Mapping[str, Any], capacity_bytes: int) -> AllocatorResult:
    """Return what the simulator's allocator makes of a history's requests, for comparison with its segments.

    Frees of what was allocated before the history began are left out.
    """
    sizes: list[int] = []
    tensors: list[int] = []
    allocates: list[bool] = []
    alive: dict[int, int] = {}
    for action, address, size, _ in history["events"]:
        if action == "alloc":
            alive[address] = len(sizes)
            tensors.append(alive[address])
        elif action == "free_completed" and address in alive:
            tensors.append(alive.pop(address))
        else:
            continue
        sizes.append(size)
        allocates.append(action == "alloc")
    return replay(
        np.array(sizes, dtype=np.int64),
        np.array(tensors, dtype=np.int32),
        np.array(allocates, dtype=np.bool_),
        capacity_bytes,
    )


def release_cuda_memory() -> None:
    """Give back what earlier runs of this process left in the allocator, so that peaks are this run's."""
    gc.collect()
    forget_shared()
    torch.cuda.synchronize()
    clear_workspaces: Any = torch._C._cuda_clearCublasWorkspaces
    clear_workspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@contextmanager
def recorded_history(device: torch.device) -> Iterator[Callable[[], dict[str, Any]]]:
    """Record the allocator's events while the block runs; yields a function that returns them so far."""
    memory: Any = torch.cuda.memory  # private functions
    memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=MAX_EVENTS)
    try:
        yield lambda: history_mapping(memory._snapshot(), device.index or 0)
    finally:
        memory._record_memory_history(enabled=None)
