"""A plan in a few words, for tables and messages."""

from __future__ import annotations

from math import prod

from simulator.plan import Plan, Sharding, Stage, resolve
from simulator.uniform import even_layer_cuts, repeated_layers
from workloads.operators import Workload

FULL_SHARE = 0.9
"""From here on a stage counts as recomputed in full: embedding and loss never are."""

MAX_STAGES_NAMED = 8
"""Where there are more, only the smallest and largest number of layers are told."""


def describe_plan(plan: Plan, workload: Workload | None = None) -> str:
    """Return what the plan does, short enough for a table cell: the same for all spellings of a plan.

    Args:
        plan: The plan.
        workload: Its model; then uneven pipelines say how many of the repeated layers each stage has.

    >>> from simulator.plan import Axis
    >>> stages = [Stage(((i, i + 1),), (i,), ((1, (Axis("batch", 1),)),)) for i in range(4)]
    >>> describe_plan(Plan(tuple(stages), microbatch_size=2, num_microbatches=8))
    'pp 4, microbatch 2 x 8'
    >>> describe_plan(Plan(tuple(stages), microbatch_size=2, num_microbatches=8, last_microbatch_size=1))
    'pp 4, microbatch 2 x 7 and 1'
    >>> describe_plan(Plan(tuple(stages[:1]), microbatch_size=2, num_microbatches=8, schedule="zb-h1"))
    '1 device, microbatch 2 x 8, zb-h1'
    >>> spelled = Stage(((0, 2),), (0,), ((1, (Axis("batch", 1, 3), Axis("tensor", 1))), (1, (Axis("replicate", 1),))))
    >>> describe_plan(Plan((spelled, *stages[2:]), microbatch_size=2, num_microbatches=8))
    'pp 3, microbatch 2 x 8'
    >>> sharded = Stage(((0, 2),), (0, 1), ((2, (Axis("batch", 2, 3),)),))
    >>> replicated = Stage(((2, 4),), (2, 3), ((2, (Axis("batch", 2),)),))
    >>> describe_plan(Plan((sharded, replicated), microbatch_size=2, num_microbatches=8))
    'pp 2 (tp x dp 1x2 ZeRO-3|1x2), microbatch 2 x 8'
    """
    degrees = list(dict.fromkeys(stage_degrees(stage) for stage in plan.stages))
    num_ranks = len(set(plan.rank_of_stage))
    words = []
    if len(degrees) == 1:
        tp, dp, zero = degrees[0]
        words += [f"tp {tp}"] if tp > 1 else []
        words += [f"pp {num_ranks}"] if num_ranks > 1 else []
        words += [f"dp {dp}" + (f" ZeRO-{zero}" if zero else "")] if dp > 1 else []
    else:
        levels = len({zero for _, _, zero in degrees}) > 1
        shapes = "|".join(
            f"{tp}x{dp}" + (f" ZeRO-{zero}" if levels and zero else "")
            for tp, dp, zero in map(stage_degrees, plan.stages)
        )
        words.append(f"pp {num_ranks} (tp x dp {shapes})")
    if workload is not None:
        words += _layers_words(plan, workload)
    if not words:
        words.append("1 device")
    if not plan.reshard_after_forward and any(zero == 3 for _, _, zero in degrees):
        words.append("parameters stay gathered")
    if any(len(_layouts(stage)) > 1 for stage in plan.stages):
        words.append("mixed by operator")
    elif any(len(_zero_levels(stage)) > 1 for stage in plan.stages):
        words.append("ZeRO mixed by operator")
    if len(plan.stages) > num_ranks:
        words.append(f"{len(plan.stages) // num_ranks} chunks")
    last = plan.last_microbatch_size
    count = plan.num_microbatches if last is None else f"{plan.num_microbatches - 1} and {last}"
    words.append(f"microbatch {plan.microbatch_size} x {count}")
    if plan.schedule != "1f1b":
        words.append(plan.schedule)
    words += _recompute_words(plan)
    return ", ".join(words)


def stage_degrees(stage: Stage) -> tuple[int, int, int]:
    """Return the tensor degree, data degree and ZeRO level that most of a stage's operators have."""
    counts: dict[tuple[int, int, int], int] = {}
    for count, spelled in stage.shardings:
        sharding = _merged(spelled)
        tp = prod(axis.size for axis in sharding if axis.split != "batch")
        dp = prod(axis.size for axis in sharding if axis.split == "batch")
        degrees = tp, dp, max((axis.zero for axis in sharding), default=0)
        counts[degrees] = counts.get(degrees, 0) + count
    return max(counts, key=lambda degrees: counts[degrees])


def _layouts(stage: Stage) -> set[tuple[tuple[bool, int], ...]]:
    """Return how operators of a stage lie over its devices."""
    return {tuple((axis.split == "batch", axis.size) for axis in _merged(axes)) for _, axes in stage.shardings}


def _zero_levels(stage: Stage) -> set[int]:
    """Return how far operators of a stage shard their states."""
    return {max((axis.zero for axis in _merged(axes)), default=0) for _, axes in stage.shardings}


def _merged(sharding: Sharding) -> Sharding:
    """Return a sharding without what makes no difference: axes of one rank, and neighbours that are one axis."""
    return resolve(sharding, None)


def _layers_words(plan: Plan, workload: Workload) -> list[str]:
    """Return how many repeated layers each stage has, where that is not as even as ``uniform_plan`` cuts them."""
    layers = repeated_layers(workload)
    if not 1 < len(plan.stages) <= len(layers):
        return []
    if [stage.operators for stage in plan.stages] == [(cut,) for cut in even_layer_cuts(workload, len(plan.stages))]:
        return []
    counts = []
    for stage in plan.stages:
        held = [sum(map(stage.holds, range(start, stop))) / (stop - start) for start, stop in layers]
        counts.append(round(sum(held), 1))
    if len(counts) > MAX_STAGES_NAMED:
        return [f"{min(counts):g} to {max(counts):g} layers a stage"]
    return ["layers " + "|".join(f"{count:g}" for count in counts)]


def _recompute_words(plan: Plan) -> list[str]:
    """Return how much of the stages is recomputed: whole stages, in full (by layer), or what share."""
    if not any(stage.recompute for stage in plan.stages):
        return []
    if all(stage.recompute == stage.operators for stage in plan.stages):
        return ["recompute whole stages"]
    shares = [
        sum(stop - start for start, stop in stage.recompute) / max(1, stage.num_operators())
        for stage in plan.stages
    ]
    if min(shares) > FULL_SHARE:
        return ["recompute full"]
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return [f"recompute {low}" if low == high else f"recompute {low}-{high}"]
