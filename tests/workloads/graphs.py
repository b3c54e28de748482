"""Helpers of the workload tests: what one rank of a tensor-parallel group holds of a layer."""

from __future__ import annotations

import os
from pathlib import Path

from workloads.kinds.base import Implementation, Local
from workloads.local import localize, range_saved_bytes
from workloads.operators import Workload

SHARED_DATA = Path(os.environ.get("WINDTUNNEL_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))

MEGATRON = Implementation(dtype="fp16")
EAGER_FP32 = Implementation(
    dtype="fp32", fused_softmax=False, fused_bias_activation=False, fused_norm=False, keeps_scores=True
)
"""PyTorch of 2022, operation by operation."""


def local_operator(
    workload: Workload,
    index: int,
    implementation: Implementation,
    *,
    samples: int = 1,
    ways: int = 1,
    split: str = "tensor_split",
) -> Local:
    """Return what a rank sees of an operator under ``ways``-way parallelism of one sort."""
    op = workload.operators[index]
    shapes = workload.input_shapes(index, samples)
    axes = [(getattr(op, split), ways)]
    return localize(op.definition, op.attributes, shapes, axes, implementation, operator=op.name)


def layer_saved(
    workload: Workload,
    layer: int,
    implementation: Implementation,
    *,
    samples: int = 1,
    ways: int = 1,
    split: str = "tensor_split",
) -> tuple[int, int]:
    """Return bytes a layer keeps, each tensor once: (features and masks, statistics of the norms)."""
    start, stop = workload.layers[layer]
    found = range_saved_bytes(
        workload,
        {
            index: local_operator(workload, index, implementation, samples=samples, ways=ways, split=split)
            for index in range(start, stop)
        },
    )
    statistics = sum(size for name, size in found.items() if name.endswith("/statistics"))
    return sum(found.values()) - statistics, statistics
