"""Plans that treat every layer alike: what Megatron-LM's and DeepSpeed's command lines can say."""

from __future__ import annotations

import itertools
from collections import Counter

from datafiles.words import counted
from simulator.divisors import largest_divisor
from simulator.plan import Axis, Plan, Stage
from simulator.problem import Problem
from workloads.operators import Operator, Workload

RECOMPUTE = ("none", "selective", "full")
ATTENTION_CORE = ("attention_score", "attention_softmax", "attention_dropout", "attention_context", "attention_flash")


def uniform_plan(
    problem: Problem,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    microbatch: int = 1,
    recompute: str = "none",
    zero: int = 0,
    sequence_parallel: bool = False,
    schedule: str = "1f1b",
    chunks: int = 1,
    gradient_reduction: str | None = None,
    overlap_gradient_sync: bool | None = None,
    smaller_last: bool = False,
) -> Plan:
    """Return the plan with the same degrees everywhere; tensor-parallel ranks are neighbours.

    Args:
        problem: What to plan for.
        tp, pp, dp: Degrees; their product must not exceed the cluster. Devices beyond it are left idle (the command
            line's ``plan`` takes all that are left for data parallelism).
        microbatch: Samples per replica and microbatch.
        recompute: ``none``, ``selective`` (the attention core of each layer) or ``full`` (each layer).
        zero: ZeRO level over the data-parallel axis. 2 under a runtime that keeps FSDP's root unit gathered
            (``keeps_root_gathered``: ``pytorch-fsdp2``, ``composer-fsdp``) is 3 whose parameters stay gathered, as FSDP
            has it (SHARD_GRAD_OP, ``reshard_after_forward=False``).
        sequence_parallel: Split norms and dropouts along the sequence over the tensor axis.
        schedule: Pipeline schedule.
        chunks: Virtual stages per device: above 1 with ``interleaved``, which with one is 1F1B; else 1.
        gradient_reduction: ``every`` microbatch or the ``last``. None: every one from ZeRO-2 on over replicas, so that
            no device keeps whole gradients; else the runtime's default.
        overlap_gradient_sync: None for the runtime's default.
        smaller_last: The last microbatch takes what is left of a batch that the others do not divide.

    Raises:
        ValueError: If the degrees do not fit cluster, batch or number of layers; says what would. Whether the
            operators can be split so is for ``simulator.validate`` to say.
    """
    for name, value in (("tp", tp), ("pp", pp), ("dp", dp), ("microbatch", microbatch), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, got {recompute!r}")
    if not 0 <= zero <= 3:
        raise ValueError(f"zero must be 0, 1, 2 or 3, got {zero}")
    devices = tp * pp * dp
    if devices > problem.num_devices:
        raise ValueError(
            f"tp * pp * dp must be at most the cluster's {counted(problem.num_devices, 'device')}, got {tp} * {pp} * "
            f"{dp} = {devices}; use smaller degrees or a larger cluster than {problem.hardware.cluster.name}"
        )
    count, left = divmod(problem.global_batch, microbatch * dp)
    if smaller_last and count == 0:
        smaller = f"microbatch {problem.global_batch // dp}"
        remedy = smaller if problem.global_batch >= dp else f"dp {problem.global_batch} or less"
        raise ValueError(
            f"the global batch must hold at least one whole microbatch, dp * microbatch samples, got batch "
            f"{problem.global_batch} and {dp} * {microbatch} = {dp * microbatch}; try {remedy} or a larger batch"
        )
    if left and not smaller_last:
        per_replica, uneven = divmod(problem.global_batch, dp)
        fitting = 1 if uneven else largest_divisor(per_replica, microbatch)
        raise ValueError(
            f"dp * microbatch must divide the global batch {problem.global_batch}, got {dp} * {microbatch} = "
            f"{dp * microbatch}; try microbatch {fitting}"
            + (f" and a dp that divides {problem.global_batch}" if uneven else "")
            + (", or a smaller last microbatch (smaller_last)" if count and left >= dp else "")
        )
    if chunks > 1 and schedule != "interleaved":
        raise ValueError(f"chunks above 1 need schedule interleaved, got schedule {schedule} with {chunks} chunks")
    if chunks == 1 and schedule == "interleaved":
        raise ValueError(
            "schedule interleaved needs chunks (stages per device) above 1, got 1; give 2 or more, or schedule 1f1b"
        )
    stays_gathered = zero == 2 and problem.runtime.keeps_root_gathered
    tensor_split = "tensor_sequence" if sequence_parallel else "tensor"
    sharding = (Axis("batch", dp, 3 if stays_gathered else zero), Axis(tensor_split, tp))
    stages = []
    for position, (start, stop) in enumerate(even_layer_cuts(problem.workload, pp * chunks)):
        rank = position % pp
        stages.append(
            Stage(
                operators=((start, stop),),
                devices=tuple(range(rank * tp * dp, (rank + 1) * tp * dp)),
                shardings=((stop - start, sharding),),
                recompute=recompute_segments(problem.workload, start, stop, recompute),
            )
        )
    return Plan(
        stages=tuple(stages),
        microbatch_size=microbatch * dp,
        num_microbatches=count + (left > 0),
        schedule=schedule,
        gradient_reduction=gradient_reduction
        or ("every" if zero >= 2 and dp > 1 else problem.runtime.reduce_gradients),
        overlap_gradient_sync=(
            problem.runtime.overlap_gradient_sync if overlap_gradient_sync is None else overlap_gradient_sync
        ),
        last_microbatch_size=left or None,
        reshard_after_forward=not stays_gathered,
    )


def repeated_layers(workload: Workload) -> list[tuple[int, int]]:
    """Return the operator ranges of the layers that repeat: all but those before the first and after the last.

    A layer repeats if its operators' roles occur in another layer too, or if it lies between such layers and has all
    that one of them has (Swin's layers after a single patch merging); a workload without repeats gives all.
    """
    ranges = list(workload.layers)
    shapes = [tuple(workload.operators[index].role for index in range(*bounds)) for bounds in ranges]
    counts = Counter(shapes)
    found = [place for place, shape in enumerate(shapes) if counts[shape] > 1]
    if not found:
        return ranges
    repeated = [Counter(shape) for shape in dict.fromkeys(shapes[place] for place in found)]
    return [
        ranges[place]
        for place in range(found[0], found[-1] + 1)
        if counts[shapes[place]] > 1 or any(Counter(shapes[place]) >= shape for shape in repeated)
    ]


def even_layer_cuts(workload: Workload, num_stages: int) -> list[tuple[int, int]]:
    """Return operator ranges of ``num_stages`` stages with equal numbers of repeated layers.

    What comes before the first repeated layer goes to the first stage, what comes after the last to the last
    one; a remainder goes to the stages in the middle, one each, later ones first.

    Raises:
        ValueError: If there are more stages than repeated layers.
    """
    layers = repeated_layers(workload)
    if num_stages > len(layers):
        raise ValueError(
            f"pp * chunks must be at most the {counted(len(layers), 'repeated layer')} of {workload.name}, got "
            f"{num_stages}"
        )
    base, extra = divmod(len(layers), num_stages)
    order = sorted(range(num_stages), key=lambda stage: (stage in (0, num_stages - 1), -stage))
    counts = [base + (stage in order[:extra]) for stage in range(num_stages)]
    cuts = [0]
    taken = 0
    for count in counts[:-1]:
        taken += count
        cuts.append(layers[taken][0])
    cuts.append(len(workload))
    return list(itertools.pairwise(cuts))


def recompute_segments(workload: Workload, start: int, stop: int, recompute: str) -> tuple[tuple[int, int], ...]:
    """Return the recompute segments of operators ``[start, stop)``: per repeated layer, or its attention core."""
    if recompute == "none":
        return ()
    found = []
    for first, last in repeated_layers(workload):
        first, last = max(first, start), min(last, stop)
        if first >= last:
            continue
        if recompute == "full":
            found.append((first, last))
            continue
        core = [index for index in range(first, last) if _is_attention_core(workload.operators[index])]
        begin = None
        for index in [*core, -1]:
            if begin is None:
                begin = previous = index
            elif index != previous + 1:
                if begin >= 0:
                    found.append((begin, previous + 1))
                begin = index
            previous = index
    return tuple(found)


def _is_attention_core(operator: Operator) -> bool:
    # Dropout of what attention adds to its input (post_attention_dropout) is no part of it.
    return operator.role.endswith(ATTENTION_CORE) and operator.kind != "dropout_add"
