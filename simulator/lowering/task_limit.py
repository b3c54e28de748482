"""How many tasks a plan may come to."""

from __future__ import annotations

from dataclasses import replace

from datafiles.words import counted
from simulator.plan import Plan

MAX_TASKS = 20_000_000
"""4 to 6 GB: simulations were measured to take 180 to 200 bytes a task (GPT-3 6.7B on 32 GPUs; tp, pp, dp, ZeRO-3,
zb-h1, interleaved), and 290 to 320 where a pass has two or three (eight layers: 8 stages, 2.2 M; two stages, 8 M)."""
FEW_MICROBATCHES = 1_000
"""So many tell how many tasks any number comes to, to less than a percent."""


def with_few_microbatches(plan: Plan) -> Plan:
    """Return the plan, or the same with few microbatches where it has many: a multiple of the pipeline's ranks."""
    ranks = max(plan.rank_of_stage) + 1
    few = -(-FEW_MICROBATCHES // ranks) * ranks
    if plan.num_microbatches <= few:
        return plan
    warmup = plan.warmup if plan.warmup is None else tuple(min(few, depth) for depth in plan.warmup)
    return replace(plan, num_microbatches=few, warmup=warmup)


def check_num_tasks(num_tasks: int, plan: Plan) -> None:
    """Raise ValueError if a plan comes to more tasks than fit."""
    if num_tasks > MAX_TASKS:
        raise ValueError(
            f"a plan that is simulated in full must come to at most {MAX_TASKS:,} tasks, got {num_tasks:,} for "
            f"{counted(plan.num_microbatches, 'microbatch', 'microbatches')} in {counted(len(plan.stages), 'stage')}; "
            "use fewer, larger microbatches, or leave out what repeats itself, as searches do (in Python, simulate "
            "with leave_out_periods=True)"
        )
