"""What a table of runs says that was not taken from it, and rows that it has twice, in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from datafiles.tables import load_table
from datafiles.words import counted
from experiments.cases.case import Case
from experiments.run_gpus import families_said

DTYPES = {
    "fp8": r"fp8|float8",
    "int8": r"int8",
    "bf16": r"bf16|bfloat16",
    "fp16": r"fp16|float16|half",
    "tf32": r"tf32",
    "fp32": r"fp32|float32",
}
"""Number formats, and how tables write them; the first that a text names is what was computed in."""


def rows_twice(table: Path) -> list[str]:
    """Return which rows say what an earlier one says, in words: each is simulated and counts again."""
    first: dict[tuple[str, ...], int] = {}
    found = []
    for number, row in enumerate(load_table(table), start=1):
        same = first.setdefault(tuple(text.strip() for text in row.values()), number)
        if same != number:
            found.append(f"row {number} is row {same} again: it counts twice; leave one out unless it ran twice")
    return found


def other_dtypes(cases: Iterable[Case]) -> list[str]:
    """Return what rows say of number formats that are not those of their runtimes, in words."""
    found: dict[tuple[str, str], int] = {}
    for case in cases:
        text, own = str(case.features.get("dtype", "")), case.problem().runtime.implementation.dtype
        said = next((name for name, words in DTYPES.items() if re.search(words, text.lower())), own)
        if said != own:
            found[text, own] = found.get((text, own), 0) + 1
    return [
        f"{counted(count, 'row')} of dtype {text}: simulated in {own}, as their runtime trains"
        for (text, own), count in found.items()
    ]


def unknown_gpus(cases: Iterable[Case]) -> list[str]:
    """Return which GPUs rows name that are no type known here, in words: they were simulated as the cluster's."""
    found = Counter(
        (str(case.features.get("gpu", "")), ", ".join(sorted(set(case.problem().hardware.cluster.gpu_types))))
        for case in cases
    )
    return [
        f"{counted(count, 'row')} of gpu {text}, which is none of windtunnel list gpus: simulated on {own}"
        for (text, own), count in found.items()
        if text and not families_said(text)
    ]
