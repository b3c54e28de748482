"""All sources of cases."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from experiments.cases import (
    aceso,
    aceso_t5,
    aceso_wide_resnet,
    alpa,
    amp,
    campaigns,
    dapple_table5,
    galvatron_memory,
    galvatron_plans,
    galvatron_table2,
    llm_foundry,
    machine_fitted,
    megatron_dgx2,
    megatron_sc21,
    vtrain,
    vtrain_inferred,
)
from experiments.cases.case import Case, CaseSource, Skipped

SOURCES: tuple[CaseSource, ...] = (
    galvatron_table2.cases,
    galvatron_plans.cases,
    galvatron_memory.cases,
    megatron_sc21.cases,
    dapple_table5.cases,
    aceso.cases,
    aceso_t5.cases,
    aceso_wide_resnet.cases,
    vtrain.cases,
    vtrain_inferred.cases,
    llm_foundry.cases,
    megatron_dgx2.cases,
    alpa.cases,
    amp.cases,
    machine_fitted.cases,
    campaigns.cases,
)
ENVIRONMENT = "WINDTUNNEL_DATA"
BESIDE_REPOSITORY = Path(__file__).resolve().parents[3] / "shared" / "data"


def data_folder(given: Path | None) -> Path | None:
    """Return the folder of public sets: as given, else $WINDTUNNEL_DATA, else one beside the repository.

    Raises:
        ValueError: If a folder is named that does not exist.
    """
    named = given or (Path(os.environ[ENVIRONMENT]) if os.environ.get(ENVIRONMENT) else None)
    if named is None:
        return BESIDE_REPOSITORY if BESIDE_REPOSITORY.is_dir() else None
    if not named.is_dir():
        raise ValueError(
            f"the data folder must exist, got {named}; leave --data and {ENVIRONMENT} out to skip its cases"
        )
    return named


def all_cases(data: Path | None) -> Iterator[Case | Skipped]:
    """Yield the cases of every source."""
    for source in SOURCES:
        yield from source(data)
