"""How long a GPT layer takes forward and backward on a V100, beside Aceso's operator profile.

A layer is the sum of its thirteen operators, as Aceso profiled them one by one; at tensor-parallel degrees above 1 its
rows contain the all-reduces. Each operator takes the longer of its kernels and their launches. Constants were fitted on
350M and 2.6B at tensor-parallel 1 and 2 (``fit_v100``); the other sizes, and degrees 4 and 8, are reported.

Run: ``python -m hardware_models.calibration.check_layers --data DIR``
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import fmean

from hardware_models.calibration.aceso_rows import SIZES
from hardware_models.import_aceso import import_table
from hardware_models.model import HardwareModel
from hardware_models.runtime_files import load_runtime
from workloads.kernels import Kernel
from workloads.kinds.base import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from workloads.local import localize
from workloads.registry import build_workload

CLUSTER, RUNTIME, DTYPE, ELEMENT_BYTES = "v100-32g-ndv2:1x8", "megatron-lm-2021", "fp16", 2
FITTED_SIZES, FITTED_DEGREES = ("350M", "2_6B"), (1, 2)
SAMPLES = DEGREES = (1, 2, 4, 8)
REDUCED_FORWARD, REDUCED_BACKWARD = ("attention_dense", "mlp_linear_2"), ("attention_qkv", "mlp_linear_1")


@dataclass(frozen=True)
class Layer:
    """One layer at one microbatch and degree: predicted and measured seconds, forward and backward together."""

    size: str
    samples: int
    tensor_size: int
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Signed relative error."""
        return self.predicted_s / self.measured_s - 1

    @property
    def is_fitted(self) -> bool:
        """Whether constants were fitted on its operators."""
        return self.size in FITTED_SIZES and self.tensor_size in FITTED_DEGREES


def layers(table: Path) -> Iterator[Layer]:
    """Yield every layer of ``ops.csv.gz`` (database eurosys, default split)."""
    hardware = HardwareModel.from_name(CLUSTER)
    implementation = load_runtime(RUNTIME).implementation
    for size, name in SIZES.items():
        workload = build_workload(name)
        rows = {
            (row.role, row.samples, row.tensor_size): row
            for row in import_table(table, model="gpt", size=size, database="eurosys").rows
            if row.split == "default"
        }
        first = next(op.layer for op in workload.operators if op.role == "attention_qkv")
        operators = [(index, op) for index, op in enumerate(workload.operators) if op.layer == first]
        for samples in SAMPLES:
            for degree in DEGREES:
                predicted = measured = 0.0
                for index, op in operators:
                    shapes = workload.input_shapes(index, samples)
                    local = localize(
                        op.definition, op.attributes, shapes, [(op.tensor_split, degree)], implementation
                    )
                    forward = _operator_s(hardware, op.definition.kernels(FORWARD, local))
                    backward = _operator_s(
                        hardware,
                        op.definition.kernels(BACKWARD_INPUT, local) + op.definition.kernels(BACKWARD_WEIGHT, local),
                    )
                    if op.role in REDUCED_FORWARD:
                        forward += _reduce_s(hardware, prod(local.outputs[0]), degree)
                    if op.role in REDUCED_BACKWARD:
                        backward += _reduce_s(hardware, prod(local.inputs[0]), degree)
                    row = rows[op.role, samples, degree]
                    predicted += forward + backward
                    measured += row.forward_s + row.backward_s
                yield Layer(size, samples, degree, predicted, measured)


def _operator_s(hardware: HardwareModel, kernels: Iterable[Kernel]) -> float:
    gpu_type = hardware.gpu_type(0)
    launched = ended = 0.0
    for kernel in kernels:
        launched += hardware.launch_s(gpu_type)
        ended = max(ended, launched) + hardware.kernel_time_s(gpu_type, kernel, DTYPE)
    return ended


def _reduce_s(hardware: HardwareModel, elements: int, degree: int) -> float:
    if degree == 1:
        return 0.0
    alone_s = hardware.collective("all_reduce", elements * ELEMENT_BYTES, range(degree)).alone_s
    return load_runtime(RUNTIME).handover_s + alone_s


def mean_absolute(found: Sequence[Layer]) -> float:
    """Return the mean absolute relative error."""
    return fmean(abs(layer.error) for layer in found)


def markdown(data: Path) -> list[str]:
    """Return the errors by size and degree, and the figure over all layers that are reported."""
    found = list(layers(data / "aceso_v100" / "ops.csv.gz"))
    lines = ["| size | tp 1 | tp 2 | tp 4 | tp 8 |", "|---|---|---|---|---|"]
    for size in SIZES:
        cells = []
        for degree in DEGREES:
            group = [layer for layer in found if (layer.size, layer.tensor_size) == (size, degree)]
            mark = " fitted" if group[0].is_fitted else ""
            cells.append(f"{mean_absolute(group):.1%} ({fmean(layer.error for layer in group):+.1%}){mark}")
        lines.append(f"| {size} | {' | '.join(cells)} |")
    reported = [layer for layer in found if not layer.is_fitted]
    return [*lines, "", f"{len(reported)} layers reported, mean absolute error {mean_absolute(reported):.1%}."]


def main() -> None:
    """Print the errors by size and degree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds aceso_v100/ops.csv.gz")
    print("\n".join(markdown(parser.parse_args().data)))


if __name__ == "__main__":
    main()
