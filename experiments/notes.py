"""Notes beside results, on standard error: what is simulated all the same, but should not be read over."""

from __future__ import annotations

from collections.abc import Iterable

from datafiles.words import counted
from experiments.console import messages


def show_notes(notes: Iterable[str]) -> None:
    """Print each note once."""
    for words in dict.fromkeys(notes):
        messages().print(f"note: {words}", markup=False, soft_wrap=True)


def show_notes_of_runs(notes: Iterable[Iterable[str]]) -> None:
    """Print each note once, with the number of runs that have it."""
    found: dict[str, int] = {}
    for of_run in notes:
        for words in of_run:
            found[words] = found.get(words, 0) + 1
    show_notes(f"{counted(count, 'run')}: {words}" for words, count in found.items())


def left_out_of(cluster: str, profile: str | None) -> tuple[str, ...]:
    """Return what a calibration holds that is of other hardware than a cluster, in sentences."""
    from hardware_models.calibration_file import load_calibration
    from hardware_models.cluster import parse_cluster

    return load_calibration(profile).hardware(parse_cluster(cluster)).left_out if profile else ()
