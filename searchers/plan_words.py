"""A plan in a few words, for tables and messages."""

from __future__ import annotations

from math import prod

from simulator.plan import Plan, Stage

FULL_SHARE = 0.9
"""From here on a stage counts as recomputed in full: embedding and loss never are."""


def describe_plan(plan: Plan) -> str:
    """Return what the plan does, short enough for a table cell.

    >>> from simulator.plan import Axis
    >>> stages = [Stage(((i, i + 1),), (i,), ((1, (Axis("batch", 1),)),)) for i in range(4)]
    >>> describe_plan(Plan(tuple(stages), microbatch_size=2, num_microbatches=8))
    'pp 4, microbatch 2 x 8'
    >>> describe_plan(Plan(tuple(stages), microbatch_size=2, num_microbatches=8, last_microbatch_size=1))
    'pp 4, microbatch 2 x 7 and 1'
    >>> describe_plan(Plan(tuple(stages[:1]), microbatch_size=2, num_microbatches=8, schedule="zb-h1"))
    '1 device, microbatch 2 x 8, zb-h1'
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
        shapes = "|".join("x".join(map(str, stage_degrees(stage)[:2])) for stage in plan.stages)
        words.append(f"pp {num_ranks} (tp x dp {shapes})")
    if not words:
        words.append("1 device")
    if not plan.reshard_after_forward and any(zero == 3 for _, _, zero in degrees):
        words.append("parameters stay gathered")
    if any(_is_mixed(stage) for stage in plan.stages):
        words.append("mixed by operator")
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
    for count, sharding in stage.shardings:
        tp = prod(axis.size for axis in sharding if axis.split != "batch")
        dp = prod(axis.size for axis in sharding if axis.split == "batch")
        degrees = tp, dp, max((axis.zero for axis in sharding), default=0)
        counts[degrees] = counts.get(degrees, 0) + count
    return max(counts, key=lambda degrees: counts[degrees])


def _is_mixed(stage: Stage) -> bool:
    """Return whether operators of a stage lie differently over its devices."""
    return len({tuple((axis.split == "batch", axis.size) for axis in axes) for _, axes in stage.shardings}) > 1


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
