"""Aceso's measured GPT operators beside the kernels that our operator kinds say they run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from hardware_models.calibration.kernel_fit import KernelRow
from hardware_models.import_aceso import import_table
from hardware_models.runtime import load_runtime
from workloads.kinds.base import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from workloads.local import localize
from workloads.registry import build_workload

SIZES = {
    "350M": "gpt3-350m",
    "1_3B": "gpt3-1.3b",
    "2_6B": "gpt3-2.6b",
    "6_7B": "gpt3-6.7b",
    "13B": "gpt3-13b",
}

LAUNCH_BOUND_S = 100e-6
"""Rows shorter than this are ruled by launches (40-50 us for a small operator), not by the device."""

_FORWARD_COLLECTIVE = ("attention_dense", "mlp_linear_2", "embedding", "lm_loss")
_BACKWARD_COLLECTIVE = ("attention_qkv", "mlp_linear_1", "lm_loss")


def gpt_rows(
    table: Path, *, sizes: Collection[str], tensor_sizes: Collection[int], database: str = "eurosys"
) -> Iterator[KernelRow]:
    """Yield forward and backward rows of the default split without collectives inside.

    Args:
        table: ``ops.csv.gz``.
        sizes: Keys of SIZES.
        tensor_sizes: Tensor-parallel degrees to keep.
        database: ``eurosys`` or ``miniset``.
    """
    implementation = load_runtime("megatron-lm-2021").implementation
    for size in sizes:
        workload = build_workload(SIZES[size])
        operators = {op.role: index for index, op in reversed(list(enumerate(workload.operators)))}
        for row in import_table(table, model="gpt", size=size, database=database).rows:
            if row.tensor_size not in tensor_sizes or row.split != "default" or row.role not in operators:
                continue
            index = operators[row.role]
            op = workload.operators[index]
            shapes = workload.input_shapes(index, row.samples)
            axes = [(op.tensor_split, row.tensor_size)]
            local = localize(op.definition, op.attributes, shapes, axes, implementation)
            parallel = row.tensor_size > 1
            if not (parallel and row.role in _FORWARD_COLLECTIVE) and row.forward_s > LAUNCH_BOUND_S:
                kernels = tuple(op.definition.kernels(FORWARD, local))
                yield KernelRow(f"{row.role} forward", kernels, row.forward_s, row.source)
            if not (parallel and row.role in _BACKWARD_COLLECTIVE) and row.backward_s > LAUNCH_BOUND_S:
                kernels = tuple(
                    op.definition.kernels(BACKWARD_INPUT, local)
                    + op.definition.kernels(BACKWARD_WEIGHT, local)
                )
                yield KernelRow(f"{row.role} backward", kernels, row.backward_s, row.source)
