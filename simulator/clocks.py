"""What the power limit of a GPU costs a problem's products, whatever the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hardware_models.gpus import curves_of
from hardware_models.power import clock_slowdown
from simulator.problem import Problem
from workloads.kernels import Kernel
from workloads.kinds.base import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from workloads.local import localize


def clock_slowdown_of(problem: Problem, gpu_type: str) -> float:
    """Return what the power limit of a device type costs products, attention and convolutions: at least 1.

    Of one pass of the whole model, forward and backward, on one device with its share of the batch: what tensor
    parallelism, communication and bubbles leave of a device's work draws less.
    """
    gpu, dtype = problem.hardware.gpu(gpu_type), problem.runtime.implementation.dtype
    curves = curves_of(gpu)
    if curves.power is None:
        return 1.0
    return clock_slowdown(
        gpu,
        curves,
        dtype,
        _kernels(problem, max(1, problem.global_batch // problem.num_devices)),
        lambda kernel: problem.hardware.kernel_time_s(gpu_type, kernel, dtype),
    )


def _kernels(problem: Problem, samples: int) -> Iterator[tuple[Kernel, int]]:
    workload = problem.workload
    first = {signature: index for index, signature in reversed(list(enumerate(workload.signatures)))}
    for signature, count in Counter(workload.signatures).items():
        index = first[signature]
        op, inputs = workload.operators[index], workload.input_shapes(index, samples)
        local = localize(op.definition, op.attributes, inputs, [], problem.runtime.implementation)
        for phase in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT):
            yield from ((kernel, count) for kernel in op.definition.kernels(phase, local))
