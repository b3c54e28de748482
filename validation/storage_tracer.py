"""Storages of torch's tensors, from the operation that makes them to their end, and what of them is live and reserved.

What is sharded holds its own part (``DTensor``'s local tensor), and what FSDP gathered gives its storage back without
ending: a storage that is resized ends, and another begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves

from simulator.memory.allocator import UNLIMITED_BYTES, replay
from simulator.memory.events import ACTIVATIONS, GRADIENTS, OPTIMIZER_STATES, PARAMETERS

_Mode: Any = _python_dispatch.TorchDispatchMode

BLOCK_BYTES = 512
"""The caching allocator's rounding, so that sums compare with its ``allocated``."""


@dataclass
class Event:
    """A storage begins, or ends where bytes are below 0.

    Attributes:
        storage: Its serial number.
        num_bytes: In whole blocks.
        where: What ran: the kind of action as a letter's number (0 at the start), stage, microbatch.
    """

    storage: int
    num_bytes: int
    where: tuple[int, int, int]


@dataclass
class _Held:
    """A storage that is there: its serial number, and its bytes."""

    number: int
    num_bytes: int


class StorageTracer(_Mode):  # type: ignore[misc]
    """Counts the storages that operations make, from their first sight to their end.

    Attributes:
        events: In order.
        where: Noted with each event.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.where: Any = (0, 0, 0)
        self._held_of: dict[int, _Held] = {}
        self._count = 0
        self._resizing: Any = None

    def __enter__(self) -> Any:
        resize, tracer = torch.UntypedStorage.resize_, self

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            held = tracer._see(storage)
            result = resize(storage, size)
            tracer._resized(held, size)
            return result

        self._resizing = patch.object(torch.UntypedStorage, "resize_", resized)
        self._resizing.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._resizing.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # Two of three calls; fake tensors would take long to say it.
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.see(result)
        else:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.see(leaf)
        if func is torch.ops.aten._softmax_backward_data.default:
            self.see(torch.empty_like(args[1]))
        return result

    @property
    def live_bytes(self) -> int:
        """Bytes of the storages that are there now."""
        return sum(event.num_bytes for event in self.events)

    def see(self, tensor: torch.Tensor) -> int:
        """Return the serial number of a tensor's storage, counted from now on if it is new."""
        own: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
        return self._see(own.untyped_storage()).number

    def _see(self, storage: torch.UntypedStorage) -> _Held:
        key = int(storage._cdata)
        if key not in self._held_of:
            held = self._held_of[key] = _Held(0, 0)
            self._begin(held, storage.nbytes())
            weakref.finalize(storage, self._ended, key, held).atexit = False
        return self._held_of[key]

    def _begin(self, held: _Held, num_bytes: int) -> None:
        self._count += 1
        held.number, held.num_bytes = self._count, -(-int(num_bytes) // BLOCK_BYTES) * BLOCK_BYTES
        self.events.append(Event(held.number, held.num_bytes, tuple(self.where)))

    def _resized(self, held: _Held, num_bytes: int) -> None:
        if held.num_bytes:
            self.events.append(Event(held.number, -held.num_bytes, tuple(self.where)))
            held.num_bytes = 0
        if num_bytes:
            self._begin(held, num_bytes)

    def _ended(self, key: int, held: _Held) -> None:
        self.events.append(Event(held.number, -held.num_bytes, tuple(self.where)))
        if self._held_of.get(key) is held:
            del self._held_of[key]


@dataclass(frozen=True)
class TracedMemory:
    """Live bytes of one rank over an iteration after the first.

    Attributes:
        device: Device id of the plan.
        peak_bytes: Largest sum of live storages, in 512-byte blocks.
        consumers: Of that, parameters, gradients, optimizer states, and the rest (activations).
        peak_where: What ran then.
        num_events: Storages made and ended.
        reserved_bytes: What the simulator's caching allocator holds for the storages of both iterations, in the order
            in which torch made them, beside those that were there before (of which it counts bytes, not segments).
    """

    device: int
    peak_bytes: int
    consumers: dict[str, int]
    peak_where: str
    num_events: int
    reserved_bytes: int


@dataclass
class Marks:
    """Storages whose use is known, by serial number."""

    parameters: set[int] = field(default_factory=set)
    gradients: set[int] = field(default_factory=set)
    optimizer: set[int] = field(default_factory=set)


def summary(events: Sequence[Event], begun: int, first: int, marks: Marks, device: int) -> TracedMemory:
    """Return the peak of an iteration, and what the allocator holds.

    Args:
        events: All that was traced.
        begun: How many came before the first iteration.
        first: How many came before the one that is summed up, the second.
        marks: What is known of storages.
        device: Device id.
    """
    live: dict[int, int] = {}
    total = peak = 0
    at = first
    for number, event in enumerate(events):
        total += event.num_bytes
        if number >= first and total > peak:
            peak, at = total, number
    for event in events[: at + 1]:
        if event.num_bytes > 0:
            live[event.storage] = event.num_bytes
        else:
            live.pop(event.storage, None)
    consumers = {PARAMETERS: 0, GRADIENTS: 0, OPTIMIZER_STATES: 0, ACTIVATIONS: 0}
    for storage, size in live.items():
        if storage in marks.parameters:
            consumers[PARAMETERS] += size
        elif storage in marks.optimizer:
            consumers[OPTIMIZER_STATES] += size
        elif storage in marks.gradients:
            consumers[GRADIENTS] += size
        else:
            consumers[ACTIVATIONS] += size
    kind, stage, microbatch = events[at].where
    where = f"stage {stage}, {chr(kind)} of microbatch {microbatch}" if kind else "start"
    return TracedMemory(device, peak, consumers, where, len(events) - first, _reserved_bytes(events, begun))


def _reserved_bytes(events: Sequence[Event], begun: int) -> int:
    """Return what a caching allocator reserves that begins with nothing free (``execute`` empties it)."""
    there: dict[int, int] = {}
    for event in events[:begun]:
        there[event.storage] = there.get(event.storage, 0) + event.num_bytes
    held = {storage for storage, size in there.items() if size > 0}
    listed = [event for event in events[begun:] if event.num_bytes and event.storage not in held]
    replayed = replay(
        np.array([max(event.num_bytes, 0) for event in listed], dtype=np.int64),
        np.array([event.storage for event in listed], dtype=np.int32),
        np.array([event.num_bytes > 0 for event in listed], dtype=np.bool_),
        UNLIMITED_BYTES,
    )
    return sum(there.values()) + replayed.reserved_peak_bytes
