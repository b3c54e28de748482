"""What a rank of Megatron-Core makes and sends: storages, and every call of its process groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from validation.simulated_calls import TRANSFER, Call
from validation.storage_tracer import StorageTracer

COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
}
"""Names in ``simulator.lowering.mesh`` of torch's operations."""


class CallTracer(StorageTracer):
    """Counts storages, and what is sent.

    Attributes:
        calls: How often each was made. Of a group of one rank none is, as in NCCL.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Call] = Counter()
        self._within = 0

    def as_one(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function as one kernel: storages that it makes on its way are not counted."""
        self._within += 1
        try:
            result = function(*args, **kwargs)
        finally:
            self._within -= 1
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return result

    def transfers(self, operations: Sequence[Any]) -> None:
        """Note what ``batch_isend_irecv`` sends and receives."""
        for each in operations:
            self.calls[Call(TRANSFER, 2, each.tensor.numel() * each.tensor.element_size())] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._called(func, args)
        if self._within:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _called(self, func: Any, args: Any) -> None:
        handles = [each for each in args if isinstance(each, torch.ScriptObject)]
        sizes = [dist.ProcessGroup.unbox(each).size() for each in handles if "ProcessGroup" in str(each._type())]
        tensors = [each for each in tree_leaves(list(args)) if isinstance(each, torch.Tensor)]
        largest = max(each.numel() * each.element_size() for each in tensors)
        if sizes[0] > 1:
            self.calls[Call(COLLECTIVES[func.overloadpacket.__name__], sizes[0], largest)] += 1
