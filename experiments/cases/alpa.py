"""Alpa's OSDI 2022 artifact: GPT rows on p3.16xlarge whose plan is stated, of Megatron and of Alpa."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from datafiles.loader import parse_mapping
from datafiles.schema import validated
from datafiles.tables import load_table
from experiments.cases.case import (
    Case,
    Measured,
    Skipped,
    cluster_string,
    data_file,
    problem_of,
    uniform,
)
from searchers.alpa.import_plan import StatedPlan, plan_of
from simulator.plan import Plan
from simulator.problem import Problem

GROUPS = ("alpa-p3-gpt",)
TABLE = "measured_runs/alpa_p3_gpt.csv"


def cases(data: Path | None) -> Iterator[Case | Skipped]:
    """Yield the rows whose stages, meshes and microbatches are stated."""
    path = data_file(data, TABLE, GROUPS)
    if isinstance(path, Skipped):
        yield path
        return
    unstated = 0
    table = load_table(path, floats=("iter_time_derived_s",), integers=("gpus", "global_batch"))
    for number, row in enumerate(table):
        plan = _stated_plan(row)
        if plan is None:
            unstated += 1
            continue
        size = row["config"].split()[0].removeprefix("GPT-")
        yield Case(
            row_id=f"{TABLE}#{number}",
            groups=GROUPS,
            problem=problem_of(
                model=f"alpa-gpt-{size.lower()}",
                cluster=cluster_string("p3.16xlarge", row["gpus"], 8),
                runtime="megatron-lm-2021" if row["method"] == "megatron" else "alpa",
                global_batch=row["global_batch"],
            ),
            plan=plan,
            measured=Measured(iteration_time_s=row["iter_time_derived_s"], out_of_memory=False),
            source=row["source"],
            features={"method": row["method"], "model": size, "gpus": row["gpus"]},
        )
    yield Skipped(GROUPS, unstated, "the artifact states no complete plan")


def _stated_plan(row: dict[str, Any]) -> Callable[[Problem], Plan] | None:
    """Return the plan of a row, None where microbatches, stages or splits are not stated."""
    if row["method"] == "megatron":
        return _megatron_plan(row)
    if row["method"] == "alpa.auto" and row["microbatches"].isdigit():
        return _alpa_plan(row)
    return None


def _megatron_plan(row: dict[str, Any]) -> Callable[[Problem], Plan] | None:
    degrees = {name: int(value) for name, value in re.findall(r"(dp|tp|pp)(\d+)", row["plan"])}
    # The one-GPU row says "B=128": Alpa's word for the number of microbatches.
    stated = re.search(r"B=(\d+)", row["plan"])
    count = int(stated[1]) if stated else int(row["microbatches"] or 0)
    if len(degrees) != 3 or count == 0:
        return None
    microbatch = row["global_batch"] // count // degrees["dp"]
    return uniform(tp=degrees["tp"], pp=degrees["pp"], dp=degrees["dp"], microbatch=microbatch, recompute="full")


def _alpa_plan(row: dict[str, Any]) -> Callable[[Problem], Plan] | None:
    stated = validated(StatedPlan, parse_mapping(row["plan"], source=row["config"], format="json"), row["config"])
    return partial(plan_of, stated, num_microbatches=int(row["microbatches"])) if stated.is_complete else None
