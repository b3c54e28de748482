"""Can a plan be executed? What cannot is refused by name, before any process starts."""

from __future__ import annotations

from datafiles.words import counted
from simulator.costs import CostTables
from simulator.lowering.lower import stage_views
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.validate import validate
from validation.execution.parameters import input_specs
from validation.execution.reference import terminal_tensors
from validation.execution.wiring import StageWiring
from validation.kinds.torch_kinds import BUILDERS, why_not

UNSUPPORTED = (
    "gradient_clipping", "loss_scaling", "scatters_transfers", "sends_attention_mask", "overlaps_input_reductions",
    "casts_gradients", "reduced_gradient_bytes", "refreshes_in_forward",
)  # fmt: skip

DTYPES_BY_DEVICE = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "tf32", "bf16")}

# What the executor's operators do, whatever a runtime says.
OWN_IMPLEMENTATION = {
    "fused_softmax": False,
    "fused_bias_activation": False,
    "fused_bias_dropout": False,
    "bias_in_matmul": True,
    "fused_loss": True,
}


def check_executable(plan: Plan, problem: Problem, *, device: str, num_processes: int | None = None) -> Plan:
    """Check that the executor can run a plan and return its canonical form.

    Args:
        plan: The plan.
        problem: What it is for.
        device: ``cpu`` or ``cuda``.
        num_processes: Processes there are; None if as many as needed will be started.

    Raises:
        ValueError: If the plan is not legal, or names something that only simulates; says what, and in which
            stage or operator.
    """
    canonical = validate(plan, problem)
    refused = [*_runtime(problem, device), *_kinds(problem)]
    needed = len(canonical.devices)
    if num_processes is not None and num_processes < needed:
        refused.append(
            f"the plan uses {counted(needed, 'device')}, but there are "
            f"{counted(num_processes, 'process', 'processes')}; start {needed}, or use a plan for fewer devices"
        )
    if not refused:
        refused += [*_stages(canonical, problem), *_embeddings(canonical, problem)]
    if refused:
        raise ValueError("the plan cannot be executed:\n  " + "\n  ".join(refused))
    return canonical


def _runtime(problem: Problem, device: str) -> list[str]:
    runtime = problem.runtime
    choice = runtime.implementation
    refused = []
    if device not in DTYPES_BY_DEVICE:
        raise ValueError(f"device must be one of {', '.join(DTYPES_BY_DEVICE)}, got {device!r}")
    if choice.dtype not in DTYPES_BY_DEVICE[device]:
        words = ", ".join(DTYPES_BY_DEVICE[device])
        refused.append(f"runtime {runtime.name}: dtype {choice.dtype} on {device} (there are {words})")
    for name, own in OWN_IMPLEMENTATION.items():
        if getattr(choice, name) != own:
            refused.append(f"runtime {runtime.name}: implementation.{name} {getattr(choice, name)}")
    if choice.logits_dtype != "fp32":
        refused.append(f"runtime {runtime.name}: implementation.logits_dtype {choice.logits_dtype}")
    for name in UNSUPPORTED:
        if getattr(runtime, name):
            refused.append(f"runtime {runtime.name}: {name}")
    if runtime.transfer_mode != "overlapped":
        refused.append(f"runtime {runtime.name}: transfer_mode {runtime.transfer_mode}")
    if runtime.host_waits:
        refused.append(f"runtime {runtime.name}: host_waits {', '.join(runtime.host_waits)}")
    working = choice.activation_bytes
    for name in ("parameter_bytes", "gradient_bytes", "gradient_accumulation_bytes"):
        if getattr(runtime, name) != working:
            refused.append(
                f"runtime {runtime.name}: {name} {getattr(runtime, name)} beside activations of {working} bytes "
                "(mixed precision with master weights)"
            )
    if refused:
        refused.append("make the plan for windtunnel-executor or windtunnel-executor-fp32 (windtunnel plan --runtime)")
    return refused


def _kinds(problem: Problem) -> list[str]:
    found: dict[str, str] = {}
    for op in problem.workload.operators:
        if op.kind not in BUILDERS:
            found.setdefault(op.kind, f"operator {op.name!r} of kind {op.kind}: {why_not(op.kind)}")
    if not found:
        for check in (terminal_tensors, input_specs):
            try:
                check(problem.workload)
            except ValueError as error:
                found[str(error)] = str(error)
    return list(found.values())


def _stages(plan: Plan, problem: Problem) -> list[str]:
    return [
        message
        for view in stage_views(plan, CostTables(problem))
        for message in _rotation(StageWiring(view, tuple(range(len(view.stage.devices)))))
    ]


def _embeddings(plan: Plan, problem: Problem) -> list[str]:
    """An embedding that goes on with its part of the sequence adds positions once it is whole: nothing else cuts it."""
    refused = []
    for stage in plan.stages:
        for index, sharding in zip(stage.indices(), stage.sharding_per_operator(), strict=True):
            words = {axis.split for axis in sharding} - {"batch", "replicate"}
            if "vocab_sequence" in words and len(words) > 1:
                refused.append(
                    f"operator {problem.workload.operators[index].name!r}: split by {' and '.join(sorted(words))}; use "
                    "one of them"
                )
    return refused


def _rotation(wiring: StageWiring) -> list[str]:
    """Replicas that take turns cannot exchange samples, nor can a mesh put them elsewhere."""
    view = wiring.view
    if view.num_turns == 1:
        return []
    moves = any(
        conversion.whole or any(0 in (step.source_dim, step.target_dim) for step in conversion.steps)
        for conversion in wiring.conversions()
    )
    if not moves:
        return []
    return [
        f"stage {view.position}: replica_assignment round_robin with operators whose batch axes lie differently in "
        "the mesh; put the batch axes first everywhere in the stage"
    ]
