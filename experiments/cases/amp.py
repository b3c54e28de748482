"""AMP's trials: GPT-2 with every mix of degrees on 16 T4s in four servers, partitions of its planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from datafiles.loader import parse_mapping
from datafiles.tables import load_table
from experiments.cases.case import Case, Measured, Skipped, data_file, problem_of
from simulator.plan import Axis, Plan, Stage
from simulator.problem import Problem
from simulator.uniform import repeated_layers
from workloads.operators import Workload

GROUPS = ("amp-homogeneous",)
TABLE = "measured_runs/amp_homogeneous.csv"
RUNTIME = "megatron-deepspeed-2020"
ITEMS_BEFORE_LAYERS = 2
"""Of the 30 pipeline items of Megatron-DeepSpeed's GPT2ModelPipe the first two are the embedding and a transposition,
the last four a transposition, the last norm, the head and a cast to fp32: so the rows of AMP's own layer profile say
(layer_profiles_v100_t4.csv), in which items 2 to 25 take 5 ms each, item 28 3 ms, and item 29 moves 6 bytes a logit."""


def cases(data: Path | None) -> Iterator[Case | Skipped]:
    """Yield one case per trial; failed ones are reported as out of memory."""
    path = data_file(data, TABLE, GROUPS)
    if isinstance(path, Skipped):
        yield path
        return
    integers = ("global_batch", "micro_batch", "tp", "dp", "pp")
    for number, row in enumerate(load_table(path, floats=("real_s",), integers=integers)):
        ran = row["status"] == "ok"
        yield Case(
            row_id=f"{TABLE}#{number}",
            groups=GROUPS,
            problem=problem_of(
                model="amp-gpt2",
                cluster="g4dn.12xlarge:4x4",
                runtime=RUNTIME,
                global_batch=row["global_batch"],
            ),
            plan=_plan(item_cuts(row["partition"]), row["tp"], row["dp"], row["micro_batch"], row["global_batch"]),
            measured=Measured(iteration_time_s=row["real_s"], out_of_memory=not ran),
            source="AMP (NeurIPS 2022) src/results, homogeneous",
            rivals="amp-gpt2" if ran else None,
            features={"tp": row["tp"], "dp": row["dp"], "pp": row["pp"], "microbatch": row["micro_batch"]},
        )


def item_cuts(partition: str) -> list[int]:
    """Return where stages begin and the last one ends, in pipeline items.

    >>> item_cuts("[0, 9, 15, 21, 30]")
    [0, 9, 15, 21, 30]
    """
    return [int(cut) for cut in parse_mapping(f"cuts: {partition}", source="partition")["cuts"]]


def operator_cuts(workload: Workload, cuts: list[int]) -> list[int]:
    """Return the operators at which stages begin, and the end.

    Items that have no operator (transpositions) belong to nobody. A stage that holds nothing but the transposition
    behind the embedding gets the first operator of the first layer, a norm, which costs about as much; the cast goes
    with the head.

    Raises:
        ValueError: If another stage would be left without an operator.
    """
    layers = repeated_layers(workload)
    starts = [start for start, _ in layers]
    norm, head = layers[-1][1], len(workload) - 1
    # Item i begins at operator first[i]: embedding, transposition, layers, transposition, norm, head, cast.
    first = [0, *[starts[0]] * (ITEMS_BEFORE_LAYERS - 1), *starts, norm, norm, head, head, len(workload)]
    found = [first[cut] for cut in cuts]
    if cuts[1:3] == [1, 2]:
        found[2] = starts[0] + 1
    for (begin, end), (item, last) in zip(pairwise(found), pairwise(cuts), strict=True):
        if begin >= end:
            raise ValueError(f"a stage must hold an operator, but items {item} to {last - 1} have none")
    return found


def _plan(cuts: list[int], tp: int, dp: int, microbatch: int, batch: int) -> Callable[[Problem], Plan]:
    sharding = (Axis("batch", dp), Axis("tensor", tp))
    ranks = dp * tp

    def build(problem: Problem) -> Plan:
        spans = pairwise(operator_cuts(problem.workload, cuts))
        return Plan(
            stages=tuple(
                Stage(
                    operators=((start, stop),),
                    devices=tuple(range(number * ranks, (number + 1) * ranks)),
                    shardings=((stop - start, sharding),),
                )
                for number, (start, stop) in enumerate(spans)
            ),
            microbatch_size=microbatch * dp,
            num_microbatches=batch // (microbatch * dp),
            overlap_gradient_sync=False,
        )

    return build
