"""A device that is not there: a process group that answers at once, and what tensors without data hold on CUDA.

Two operations hold on CUDA what they do not on the CPU. RMS norm is one kernel that keeps its input and statistics
(here); softmax's backward multiplies gradient and result into a tensor of its own (``StorageTracer``;
aten/native/cuda/SoftMax.cu).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from validation.kinds.shared_tensors import forget_shared

_Function: Any = torch.autograd.Function


@contextmanager
def fake_processes(rank: int, world_size: int, *, alone: bool = False) -> Iterator[str | None]:
    """Make this process one rank of a process group in which every collective is done at once.

    Args:
        rank: Which.
        world_size: How many; one needs no process group.
        alone: Make it all the same.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("memory is traced in a process without a process group, but there is one; use another process")
    is_group = alone or world_size > 1
    forget_shared()
    try:
        if is_group:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        yield "fake" if is_group else None
    finally:
        forget_shared()
        if is_group:
            dist.destroy_process_group()


class _RmsNormOfCuda(_Function):  # type: ignore[misc]
    """What ``aten::_fused_rms_norm`` makes and keeps on CUDA; tensors without data."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        statistics = torch.empty(*source.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(source, weight, statistics)
        return torch.empty_like(source)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, torch.Tensor]:
        source, weight, _ = ctx.saved_tensors
        return torch.empty_like(source), torch.empty_like(weight)


def _norm_as_on_cuda(source: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float) -> torch.Tensor:
    found: torch.Tensor = _RmsNormOfCuda.apply(source, weight)
    return found


class _Sent:
    """A send that has arrived; the fake process group's never say so."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def norms_as_on_cuda() -> Iterator[None]:
    """Norms keep what they do on CUDA."""
    with patch.object(F, "rms_norm", _norm_as_on_cuda):
        yield


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Norms keep what they do on CUDA, and what is sent has arrived."""
    with norms_as_on_cuda(), patch.object(dist, "isend", lambda *_, **__: _Sent()):
        yield
