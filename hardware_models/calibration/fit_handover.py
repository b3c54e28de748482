"""Fit how long a device stands still around an all-reduce between operators, to Aceso's operators on V100s.

Aceso timed each operator of a GPT in a loop, at tensor-parallel 2 to 8 with its all-reduce in it, and the all-reduces
by themselves on the same machine. What is left of a linear layer when its products and that all-reduce are taken out is
what a run has besides: computation hands over to the communicator's stream and is handed back, and waits for the
slowest rank. Products are the curve's, scaled so that they meet the same layer unsplit.

Rows used: 350M and 2.6B at tensor-parallel 2, as for the V100's curves (``fit_v100``); reported: the other sizes, and
degrees 4 and 8. The figure goes into ``handover_s`` of the runtimes whose collectives have streams of their own.

Run: ``python -m hardware_models.calibration.fit_handover --data DIR``
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median

from hardware_models.calibration.aceso_rows import SIZES
from hardware_models.calibration.check_layers import (
    CLUSTER,
    DTYPE,
    ELEMENT_BYTES,
    FITTED_SIZES,
    REDUCED_BACKWARD,
    REDUCED_FORWARD,
    RUNTIME,
    SAMPLES,
)
from hardware_models.import_aceso import import_collectives, import_table
from hardware_models.model import HardwareModel
from hardware_models.runtime_files import load_runtime
from workloads.kinds.base import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from workloads.local import localize
from workloads.registry import build_workload

DEGREES, FITTED_DEGREE = (2, 4, 8), 2


@dataclass(frozen=True)
class Remainder:
    """What is left of one linear layer, forward or backward, when its products and its all-reduce are taken out."""

    size: str
    tensor_size: int
    samples: int
    role: str
    seconds: float

    @property
    def is_fitted(self) -> bool:
        """Whether the figure is fitted on it."""
        return self.size in FITTED_SIZES and self.tensor_size == FITTED_DEGREE


def remainders(folder: Path) -> Iterator[Remainder]:
    """Yield every linear layer that reduces what it makes, of a folder with ``ops.csv.gz`` and ``comm.csv``."""
    hardware = HardwareModel.from_name(CLUSTER)
    gpu_type = hardware.gpu_type(0)
    reductions = import_collectives(folder / "comm.csv")
    implementation = load_runtime(RUNTIME).implementation
    for size, name in SIZES.items():
        workload = build_workload(name)
        rows = {
            (row.role, row.samples, row.tensor_size): row
            for row in import_table(folder / "ops.csv.gz", model="gpt", size=size).rows
            if row.split == "default"
        }
        first = next(op.layer for op in workload.operators if op.role == "attention_qkv")
        for index, op in enumerate(workload.operators):
            if op.layer != first or op.role not in (*REDUCED_FORWARD, *REDUCED_BACKWARD):
                continue
            phases = (FORWARD,) if op.role in REDUCED_FORWARD else (BACKWARD_INPUT, BACKWARD_WEIGHT)
            for samples in SAMPLES:
                shapes = workload.input_shapes(index, samples)
                products, measured = {}, {}
                for degree in (1, *DEGREES):
                    local = localize(op.definition, op.attributes, shapes, [(op.tensor_split, degree)], implementation)
                    products[degree] = sum(
                        hardware.kernel_time_s(gpu_type, kernel, DTYPE)
                        for phase in phases
                        for kernel in op.definition.kernels(phase, local)
                    )
                    row = rows[op.role, samples, degree]
                    measured[degree] = row.forward_s if FORWARD in phases else row.backward_s
                reduced = prod(local.outputs[0]) if FORWARD in phases else prod(local.inputs[0])
                for degree in DEGREES:
                    alone = reductions.lookup("all_reduce", degree, float(reduced * ELEMENT_BYTES))
                    assert alone is not None, "Aceso measured all-reduces among 2, 4 and 8"
                    left_s = measured[degree] - products[degree] * measured[1] / products[1] - alone[0]
                    yield Remainder(size, degree, samples, op.role, left_s)


def main() -> None:
    """Print the figure, and what is left elsewhere, by size and degree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds aceso_v100/")
    found = list(remainders(parser.parse_args().data / "aceso_v100"))
    fitted = [each.seconds for each in found if each.is_fitted]
    reported = [each.seconds for each in found if not each.is_fitted]
    print(f"handover_s: {median(fitted):.3g}, median of {len(fitted)}; of {len(reported)} more {median(reported):.3g}")
    for size in SIZES:
        cells = []
        for degree in DEGREES:
            for name, roles in (("forward", REDUCED_FORWARD), ("backward", REDUCED_BACKWARD)):
                own = [
                    1e6 * each.seconds
                    for each in found
                    if (each.size, each.tensor_size) == (size, degree) and each.role in roles
                ]
                cells.append(f"tp {degree} {name} {median(own):.0f}")
        print(f"  {size}, us: {', '.join(cells)}")


if __name__ == "__main__":
    main()
