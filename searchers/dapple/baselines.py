"""Data parallelism in closed form: without overlap, and with gradients reduced while the backward pass runs.

Both accumulate gradients over as many steps as memory asks for, and synchronise once. With overlap, the
gradients of a layer can travel once its backward pass of the last step is done, last layers first; what is not
done when that pass ends is exposed.

The released planner compares the memory of one GPU with the global batch instead of a GPU's part of it, so its
last step may hold more samples than a GPU ever works on: ``window="released"``.

Source:
    Fan et al., "DAPPLE", PPoPP 2021, Section 6.3, and the planner in its public repository.
"""

from __future__ import annotations

from dataclasses import dataclass

from searchers.dapple.planner import Planner

OVERLAPS = ("none", "backward")
WINDOWS = ("device", "released")


@dataclass(frozen=True)
class DataParallelTime:
    """One iteration of plain data parallelism.

    Attributes:
        compute_s: Forward and backward of a GPU's samples.
        all_reduce_s: All gradients, alone.
        exposed_s: What of that is not hidden.
        samples_per_step: Samples of one accumulation step on one GPU.
        fits: Even one sample does.
    """

    compute_s: float
    all_reduce_s: float
    exposed_s: float
    samples_per_step: int
    fits: bool

    @property
    def latency_s(self) -> float:
        """Iteration time."""
        return self.compute_s + self.exposed_s


def data_parallel(
    planner: Planner,
    global_batch: int,
    *,
    overlap: str = "backward",
    window: str = "device",
    samples_per_step: int | None = None,
) -> DataParallelTime:
    """Return the time of data parallelism over all GPUs.

    Args:
        planner: Chain, cluster and memory.
        global_batch: Samples per iteration.
        overlap: ``none`` or ``backward``.
        window: Samples of the last step that hide the reduction: those of the ``device``, or as ``released``.
        samples_per_step: Samples of one accumulation step on one GPU; None takes as many as fit.

    Raises:
        ValueError: If a name is unknown.
    """
    if overlap not in OVERLAPS or window not in WINDOWS:
        raise ValueError(f"overlap must be one of {OVERLAPS} and window one of {WINDOWS}, got {overlap}, {window}")
    chain = planner.chain
    devices = tuple(range(sum(planner.communication.sizes)))
    per_device = global_batch / len(devices)
    free = planner.capacity_bytes - planner.state_bytes * float(chain.parameters[-1])
    fitting = int(free // max(1.0, float(chain.saved_bytes[-1]))) if free > 0 else 0
    largest = global_batch if window == "released" else max(1, int(per_device))
    step = samples_per_step or max(
        (size for size in range(1, largest + 1) if size <= fitting and largest % size == 0), default=1
    )
    compute = float(chain.forward_s[-1] + chain.backward_s[-1]) * per_device
    latency, slope = planner.communication.all_reduce_line(devices)
    elements = float(chain.parameters[-1]) - chain.tied_parameters(0, chain.num_layers)
    total = latency + slope * planner.gradient_bytes * elements
    if overlap == "none":
        return DataParallelTime(compute, total, total, step, fitting >= 1)
    ready = sent = 0.0
    for layer in range(chain.num_layers - 1, -1, -1):
        ready += float(chain.backward_s[layer + 1] - chain.backward_s[layer]) * step
        size = planner.gradient_bytes * float(chain.parameters[layer + 1] - chain.parameters[layer])
        sent = max(sent, ready) + slope * size
    # No more than all of it: a weight that two layers share travels once.
    return DataParallelTime(compute, total, min(total, max(0.0, sent - ready) + latency), step, fitting >= 1)
