"""Histories of torch's caching allocator, as campaigns record them on GPUs, through the simulator's allocator.

Prints the most that was reserved in each, recorded and replayed. Histories that had more events than the recorder
keeps have lost their beginning and are left out.

Run: ``python -m validation.replay_histories out/validate-single-gpu/memory``
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from datafiles.errors import DataFileError
from datafiles.loader import load_mapping
from datafiles.words import counted
from simulator.memory.allocator import UNLIMITED_BYTES

MAX_BYTES = 256 << 20


def replayed(paths: Iterable[Path]) -> Iterator[tuple[str, int, int]]:
    """Yield name, recorded and replayed bytes of every whole history.

    Raises:
        DataFileError: If a file is no history.
    """
    from validation.execution.memory_history import FORMAT, MAX_EVENTS, history_peaks, replay_history

    for path in paths:
        history = load_mapping(path, max_bytes=MAX_BYTES)
        if history.get("format") != FORMAT:
            raise DataFileError(path, f"must be an allocator's history ({FORMAT}), got {history.get('format')!r}")
        if len(history["events"]) < MAX_EVENTS:
            peak = history_peaks(history).reserved_bytes
            yield path.name.removesuffix(".json.gz"), peak, replay_history(history, UNLIMITED_BYTES).reserved_peak_bytes


def main() -> None:
    """Print every history, and how far replays are off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what a campaign has written under memory/")
    folder = parser.parse_args().folder
    paths = sorted(folder.glob("*.json.gz"))
    if not paths:
        parser.error(f"{folder} must hold histories (*.json.gz) that a campaign on a GPU wrote; give another folder")
    try:
        found = list(replayed(track(paths, "histories", console=Console(stderr=True))))
    except DataFileError as error:
        parser.error(str(error))
    for name, recorded, own in found:
        print(f"{name}: {recorded / 2**30:.2f} GiB recorded, {own / 2**30:.2f} replayed, {own / recorded - 1:+.1%}")
    errors = np.array([own / recorded - 1 for _, recorded, own in found])
    print(
        f"{counted(len(found), 'history', 'histories')}, {len(paths) - len(found)} without their beginning left out: "
        f"reserved peaks {np.abs(errors).mean():.1%} off ({errors.min():+.1%} to {errors.max():+.1%})"
        if found
        else f"none of {counted(len(paths), 'history', 'histories')} has its beginning"
    )


if __name__ == "__main__":
    main()
