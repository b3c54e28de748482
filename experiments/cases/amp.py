"""AMP's trials: GPT-2 with every mix of degrees on 16 T4s in four servers, partitions of its planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from datafiles.loader import parse_mapping
from datafiles.tables import load_table
from experiments.cases.case import Case, Measured, Skipped, data_file, problem_of, stages_of_layers
from simulator.plan import Axis, Plan
from simulator.problem import Problem

GROUPS = ("amp-homogeneous",)
TABLE = "measured_runs/amp_homogeneous.csv"
FIRST_LAYER, NUM_LAYERS = 3, 24
"""Of its 30 pipeline items, the first three and the last three are not transformer layers (Megatron-DeepSpeed's
GPT2ModelPipe: a cast, the embedding and a transpose; a transpose, the last norm and the head)."""


def cases(data: Path | None) -> Iterator[Case | Skipped]:
    """Yield one case per trial; failed ones are reported as out of memory."""
    path = data_file(data, TABLE, GROUPS)
    if isinstance(path, Skipped):
        yield path
        return
    integers = ("global_batch", "micro_batch", "tp", "dp", "pp")
    for number, row in enumerate(load_table(path, floats=("real_s",), integers=integers)):
        ran = row["status"] == "ok"
        layers = layers_per_stage(row["partition"])
        if 0 in layers:
            yield Skipped(GROUPS, 1, "a stage without a transformer layer")
            continue
        yield Case(
            row_id=f"{TABLE}#{number}",
            groups=GROUPS,
            problem=problem_of(
                model="amp-gpt2",
                cluster="g4dn.12xlarge:4x4",
                runtime="megatron-deepspeed",
                global_batch=row["global_batch"],
            ),
            plan=_plan(layers, row["tp"], row["dp"], row["micro_batch"], row["global_batch"]),
            measured=Measured(iteration_time_s=row["real_s"], out_of_memory=not ran),
            source="AMP (NeurIPS 2022) src/results, homogeneous",
            rivals="amp-gpt2" if ran else None,
            features={"tp": row["tp"], "dp": row["dp"], "pp": row["pp"], "microbatch": row["micro_batch"]},
        )


def layers_per_stage(partition: str) -> list[int]:
    """Return transformer layers per stage of a partition of AMP's 30 items.

    >>> layers_per_stage("[0, 9, 15, 21, 30]")
    [6, 6, 6, 6]
    """
    cuts = parse_mapping(f"cuts: {partition}", source="partition")["cuts"]
    inside = [min(max(cut - FIRST_LAYER, 0), NUM_LAYERS) for cut in cuts]
    return [second - first for first, second in pairwise(inside)]


def _plan(layers: list[int], tp: int, dp: int, microbatch: int, batch: int) -> Callable[[Problem], Plan]:
    sharding = (Axis("batch", dp), Axis("tensor", tp))
    return lambda problem: Plan(
        stages=stages_of_layers(problem, layers, [sharding] * len(layers)),
        microbatch_size=microbatch * dp,
        num_microbatches=batch // (microbatch * dp),
        overlap_gradient_sync=False,
    )
