"""FLOPs of one iteration, for MFU (no recomputation) and HFU (with it)."""

from __future__ import annotations

from simulator.costs import CostTables
from simulator.lowering.lower import stage_views
from simulator.lowering.recompute import recomputed_operators
from simulator.plan import Plan
from simulator.problem import Problem
from workloads.kernels import FlashAttention, MemoryBound
from workloads.kinds.base import FORWARD
from workloads.local import localize


def operator_forward_flop(problem: Problem) -> list[float]:
    """Return per operator the forward matmul FLOPs of one sample, attention unmasked: float[num_operators]."""
    workload = problem.workload
    per_signature = []
    for index in workload.signature_examples:
        op = workload.operators[index]
        local = localize(
            op.definition, op.attributes, workload.input_shapes(index, 1), [], problem.runtime.implementation
        )
        total = 0.0
        for kernel in op.definition.kernels(FORWARD, local):
            if isinstance(kernel, MemoryBound):
                continue
            unmasked = 2.0 if isinstance(kernel, FlashAttention) and kernel.causal else 1.0
            total += kernel.flop * unmasked
        per_signature.append(total)
    return [per_signature[signature] for signature in workload.signatures]


def model_and_hardware_flop(plan: Plan, problem: Problem, costs: CostTables) -> tuple[float, float]:
    """Return FLOPs of one iteration without and with recomputation: backward is twice forward.

    What recomputation leaves out where it stops early is not counted.
    """
    forward = operator_forward_flop(problem)
    once = sum(forward)
    again = sum(
        forward[index]
        for view in stage_views(plan, costs)
        for start, stop in view.stage.recompute
        for index in recomputed_operators(view, start, stop)
    )
    return 3.0 * once * problem.global_batch, (3.0 * once + again) * problem.global_batch
