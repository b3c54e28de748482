"""Aceso's released plan files (JSON) as plans.

Two spellings are read: the public search's output, with one list per stage (``model_parallel_size_of_each_op``,
...), and the compact one of collected plans (``stages`` with run lengths ``VALUExCOUNT``).

Source:
    microsoft/SuperScaler, branch Aceso, the configuration files that ``aceso_search.py`` writes and the runtime reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datafiles.errors import DataFileError
from datafiles.loader import load_mapping
from datafiles.values import described
from datafiles.words import counted
from searchers.aceso.configuration import Configuration, StageChoice, runs_of, to_plan
from searchers.aceso.tables import PARTITIONS
from simulator.plan import Plan
from simulator.problem import Problem

MAX_RUN = 100_000
_RUN = re.compile(r"[0-9]{1,9}x[0-9]{1,9}")
TENSOR_KEYS = ("model_parallel_size_of_each_op", "tensor_parallel_size_of_each_op")
BATCH_KEYS = ("global_batch", "global_batch_size")
PUBLIC_KEYS = ("micro_batch_size", TENSOR_KEYS[0], "data_parallel_size_of_each_op")


def import_plan(path: str | Path, problem: Problem) -> Plan:
    """Read a plan of Aceso.

    Args:
        path: The JSON file.
        problem: What it was made for; operators are counted as in its workload.

    Raises:
        DataFileError: If a key is missing or the lists do not agree with each other or the problem.
    """
    content = load_mapping(Path(path))
    if "stages" in content:
        microbatch, stages = _compact(content, path)
    elif any(key in content for key in TENSOR_KEYS) and all(key in content for key in PUBLIC_KEYS[::2]):
        microbatch, stages = _public(content, path)
    else:
        raise DataFileError(
            path, f"an Aceso plan must have {', '.join(PUBLIC_KEYS)}, or stages; got {', '.join(sorted(content)[:12])}"
        )
    total = sum(len(stage["tp"]) for stage in stages)
    if total != len(problem.workload):
        raise DataFileError(
            path,
            f"the plan must have the {counted(len(problem.workload), 'operator')} of {problem.workload.name}, got "
            f"{total}",
        )
    own_batch = next((content[key] for key in BATCH_KEYS if key in content), problem.global_batch)
    if own_batch != problem.global_batch:
        raise DataFileError(
            path, f"the file's batch is {own_batch!r:.60}, which must be the batch, got {problem.global_batch}"
        )
    if type(microbatch) is not int or microbatch < 1 or problem.global_batch % microbatch:
        raise DataFileError(
            path, f"the microbatch must divide the global batch {problem.global_batch}, got {microbatch!r:.60}"
        )
    choices, flags = [], bytearray()
    for number, stage in enumerate(stages):
        sizes = {tp * dp for tp, dp in zip(stage["tp"], stage["dp"], strict=True)}
        if len(sizes) != 1 or min(sizes) < 1:
            raise DataFileError(path, f"stage {number}: tp x dp must be equal for all operators, got {sorted(sizes)}")
        choices.append(StageChoice(sizes.pop(), runs_of(zip(stage["tp"], stage["algo"], strict=True))))
        flags += bytes(stage["recompute"])
    num_devices = sum(choice.gpus for choice in choices)
    if num_devices > problem.num_devices:
        raise DataFileError(
            path, f"the cluster must have the {counted(num_devices, 'device')} of the plan, got {problem.num_devices}"
        )
    return to_plan(Configuration(microbatch, tuple(choices)), bytes(flags), problem)


def _compact(content: Mapping[str, Any], path: str | Path) -> tuple[Any, list[dict[str, list[int]]]]:
    stages: list[dict[str, list[int]]] = []
    entries = _listed(content["stages"], "stages", path)
    for number, stage in enumerate(entries):
        if not isinstance(stage, dict):
            raise DataFileError(path, f"stage {number} must be a mapping, got {described(stage)}")
        found: dict[str, list[int]] = {}
        for name in ("tp", "dp", "algo", "recompute"):
            if name not in stage:
                raise DataFileError(path, f"stage {number} must have tp, dp, algo and recompute, {name} is missing")
            found[name] = decoded(str(stage[name]), path)
        _check_lengths(found, number, path)
        stages.append(found)
        if sum(len(each["tp"]) for each in stages) > MAX_RUN:
            raise DataFileError(path, f"a plan must have at most {MAX_RUN} operators, got more in {number + 1} stages")
    return content.get("aggregate_micro_batch"), stages


def _public(content: Mapping[str, Any], path: str | Path) -> tuple[Any, list[dict[str, list[int]]]]:
    tensor_key = next(key for key in TENSOR_KEYS if key in content)
    tp = _lists(content, tensor_key, path)
    dp = _lists(content, "data_parallel_size_of_each_op", path)
    zeros = [[0] * len(stage) for stage in tp]
    algorithms = _lists(content, "algo_of_each_op", path, zeros)
    recompute = _lists(content, "recompute_ops", path, zeros)
    if not len(tp) == len(dp) == len(algorithms) == len(recompute):
        raise DataFileError(path, f"every list must have one entry per stage, got {len(tp)} and {len(dp)}")
    stages = []
    for number, columns in enumerate(zip(tp, dp, algorithms, recompute, strict=True)):
        found = dict(zip(("tp", "dp", "algo", "recompute"), columns, strict=True))
        _check_lengths(found, number, path)
        stages.append(found)
    return content["micro_batch_size"], stages


def _lists(
    content: Mapping[str, Any], key: str, path: str | Path, otherwise: Sequence[list[int]] | None = None
) -> list[list[int]]:
    """Return the list of every stage."""
    if key not in content and otherwise is not None:
        return list(otherwise)
    stages = _listed(content[key], key, path)
    return [_listed(stage, f"{key}, stage {number}", path) for number, stage in enumerate(stages)]


def _listed(value: Any, where: str, path: str | Path) -> list[Any]:
    if not isinstance(value, list):
        raise DataFileError(path, f"{where} must be a list, got {described(value)}")
    return value


def _check_lengths(columns: Mapping[str, Sequence[int]], number: int, path: str | Path) -> None:
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) != 1:
        raise DataFileError(path, f"stage {number}: all lists must have one entry per operator, got {lengths}")
    if not all(type(value) is int and value >= 0 for values in columns.values() for value in values):
        raise DataFileError(path, f"stage {number}: entries must be whole numbers from 0 on")
    if any(value >= len(PARTITIONS) for value in columns["algo"]):
        raise DataFileError(
            path, f"stage {number}: algo must be a number below {len(PARTITIONS)}, got {max(columns['algo'])}"
        )
    if any(value > 1 for value in columns["recompute"]):
        raise DataFileError(path, f"stage {number}: recompute must be 0 or 1, got {max(columns['recompute'])}")


def decoded(text: str, path: str | Path) -> list[int]:
    """Return the values of ``VALUExCOUNT`` runs.

    >>> decoded("0x3 1x2", "plan.json")
    [0, 0, 0, 1, 1]
    """
    values: list[int] = []
    for run in text.split():
        value, _, count = run.partition("x")
        if not _RUN.fullmatch(run) or len(values) + int(count) > MAX_RUN:
            raise DataFileError(path, f"a list must be runs VALUExCOUNT of at most {MAX_RUN} entries, got {run[:40]!r}")
        values += [int(value)] * int(count)
    return values
