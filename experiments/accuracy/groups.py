"""Groups of accuracy cases: targets, tolerances and what peers reach, from one data file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from datafiles.loader import load_mapping
from datafiles.schema import FileModel, validated

FILE = Path(__file__).parent.parent / "accuracy_data" / "groups.yaml"
CAMPAIGN_GROUP = "campaign-"
MODELLED = "-modelled"
"""Ends the name of a campaign's group whose machine is not asked: plans as the model has them, without a profile."""
IMPORTED = "-imported"
"""Ends that of one predicted with another machine's profile: that of the group's ``lender``."""
RESERVED = "-reserved"
"""Ends that of one whose peaks are of what the allocator held; without times, which are its campaign's own."""
Share = Annotated[float, Field(ge=0, le=10)]
Text = Annotated[str, Field(min_length=1, max_length=600)]


class Peer(FileModel):
    """What somebody else reaches on the same runs.

    Attributes:
        name: Simulator or paper.
        mean_absolute_error: Of time, as a share.
        note: Under which conditions, and who says so.
    """

    name: Text
    mean_absolute_error: Share
    note: Text


class Group(FileModel):
    """One group of cases.

    Attributes:
        title: For tables.
        needs_data: Its rows are not committed; a clean clone skips them.
        target_time, target_memory: Mean absolute errors aimed at.
        target_memory_agreement: Share of cases whose "out of memory" is predicted right.
        target_rank: Rank correlation aimed at.
        lender: Campaign whose cases hold the profile that predicts, where it is another machine's.
        tolerance: How far a mean absolute error may worsen before the gate fails.
        peers: Beside ours in the report.
        note: What a reader must know about the rows.
    """

    title: Text
    needs_data: bool
    target_time: Share | None = None
    target_memory: Share | None = None
    target_memory_agreement: Share | None = None
    target_rank: Share | None = None
    lender: Text | None = None
    tolerance: Share = 0.002
    peers: tuple[Peer, ...] = ()
    note: Text


class GroupsFile(FileModel):
    """The file's top level."""

    groups: Mapping[str, Group]

    @model_validator(mode="after")
    def _check(self) -> GroupsFile:
        for name, group in self.groups.items():
            if name.endswith(IMPORTED) != (group.lender is not None):
                raise ValueError(f"{name}: lender must be named where a group ends in {IMPORTED}, and nowhere else")
        return self


@cache
def groups() -> Mapping[str, Group]:
    """Return all groups by name, in file order; those of campaigns where a measured file of theirs is committed."""
    found = validated(GroupsFile, load_mapping(FILE), "groups.yaml").groups
    return {name: group for name, group in found.items() if _is_there(name)}


def _is_there(name: str) -> bool:
    campaign = name.removeprefix(CAMPAIGN_GROUP).removesuffix(MODELLED).removesuffix(RESERVED).removesuffix(IMPORTED)
    return not name.startswith(CAMPAIGN_GROUP) or (FILE.parent / "campaigns" / f"{campaign}.yaml").is_file()
