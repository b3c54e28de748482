"""Aceso's measured GPT and Wide-ResNet operators beside the kernels that our operator kinds say they run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from hardware_models.calibration.kernel_fit import KernelRow
from hardware_models.import_aceso import import_table
from hardware_models.runtime_files import load_runtime
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


RESNET_SIZES = {
    "500M": "wide-resnet-500m",
    "2B": "wide-resnet-2b",
    "4B": "wide-resnet-4b",
    "6_8B": "wide-resnet-6.8b",
    "13B": "wide-resnet-13b",
}


def convolution_rows(table: Path, *, size: str, database: str = "eurosys") -> Iterator[KernelRow]:
    """Yield forward and backward rows of Wide-ResNet's convolutions on one GPU, without what else its operators do.

    The default split gathers channels forward and the alternative one backward. One GPU does so too, in three copies:
    default rows are longer forward by 2.6 to 3.2 times what reading and writing the output takes, alternative ones
    backward by as much of the input. So forward rows are the alternative's, backward rows the default's.

    Args:
        table: ``ops.csv.gz``.
        size: Key of RESNET_SIZES.
        database: ``eurosys`` or ``miniset``.
    """
    implementation = load_runtime("megatron-lm-2021-fp32").implementation
    workload = build_workload(RESNET_SIZES[size])
    operators = {op.role: index for index, op in enumerate(workload.operators) if op.kind == "conv2d"}
    for row in import_table(table, model="resnet", size=size, database=database).rows:
        if row.tensor_size > 1 or row.role not in operators:
            continue
        index = operators[row.role]
        op = workload.operators[index]
        local = localize(
            op.definition, op.attributes, workload.input_shapes(index, row.samples), [], implementation
        )
        side, stride = op.attributes["kernel"], op.attributes["stride"]
        group = f"{side}x{side} stride {stride} {local.outputs[0][2]} pixels a side"
        phases, seconds, word = (
            ((BACKWARD_INPUT, BACKWARD_WEIGHT), row.backward_s, "backward")
            if row.split == "default"
            else ((FORWARD,), row.forward_s, "forward")
        )
        if seconds > LAUNCH_BOUND_S:
            kernels = tuple(kernel for phase in phases for kernel in op.definition.kernels(phase, local))
            yield KernelRow(f"{group} {word}", kernels, seconds, row.source)
