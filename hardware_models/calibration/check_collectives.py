"""How far the shipped link constants are from published collectives that they were not fitted on.

Rows: Alpa's two databases, all but those of the fit (odd powers of two, f32), and, from machines that no
rate inside a node was fitted on, Vidur's A100 DGX, Galvatron's eight A100s and Aceso's V100 servers. Groups of a shape
that ran at once share links as in the engine: the fullest link slows all of them.

Run: ``python -m hardware_models.calibration.check_collectives --data DIR`` (``--shapes`` for every group shape)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from hardware_models.calibration.collective_rows import (
    ALPA_A100,
    ALPA_P3,
    MIB,
    CollectiveRow,
    Predictor,
    aceso_rows,
    alpa_rows,
    clusters_of,
    galvatron_rows,
    measured_rows,
    relative_errors,
)
from hardware_models.calibration.fit_collectives import RINGS, is_fitted
from hardware_models.cluster import parse_cluster

LAUNCH_PER_RANK_S = {"p3.16xlarge": 23.7e-6, "a100-80g-dgx": 21.4e-6}
"""Alpa's own launch of one of several ranks, by preset: calibration.fit_collectives."""

LARGE, MIDDLE, SMALL = ">= 4 MB", "64 KB to 4 MB", "4 KB to 64 KB"
MIN_BYTES = 2**12


@dataclass(frozen=True)
class Check:
    """Rows of one source that are reported."""

    title: str
    preset: str
    rows: tuple[CollectiveRow, ...]

    def errors(self) -> list[tuple[CollectiveRow, float]]:
        """Return every row with its signed relative error."""
        clusters = {name: parse_cluster(name) for name in clusters_of(self.rows)}
        predictor = Predictor(clusters, LAUNCH_PER_RANK_S.get(self.preset, 0.0))
        return list(zip(self.rows, relative_errors(predictor, self.rows), strict=True))


def checks(data: Path) -> Iterator[Check]:
    """Yield the sources below a folder of public sets."""
    alpa, table = data / "alpa_v100", data / "gpu_efficiency" / "collectives_measured.csv"
    for title, preset, file in (
        ("Alpa, p3.16xlarge, 1 to 4 nodes", "p3.16xlarge", ALPA_P3),
        ("Alpa, 8 A100", "a100-80g-dgx", ALPA_A100),
    ):
        rows = (row for row in alpa_rows(alpa / file, preset) if not is_fitted(row))
        yield Check(title, preset, tuple(row for row in rows if row.num_bytes >= MIN_BYTES))
    vidur = measured_rows(table, "A100 DGX", "Vidur", "a100-80g-dgx")
    yield Check("Vidur, DGX A100, all-reduce", "", tuple(row for row in vidur if row.num_bytes >= MIN_BYTES))
    galvatron = galvatron_rows(data / "galvatron" / "a100" / "collective_time_by_size.csv", "a100-40g-dgx")
    yield Check("Galvatron, 8 A100-SXM4-40GB", "", tuple(galvatron))
    aceso = aceso_rows(data / "aceso_v100" / "comm.csv", "eurosys", "v100-32g-ndv2")
    yield Check("Aceso, 8 V100, all-reduce", "", tuple(aceso))


def band(row: CollectiveRow) -> str:
    """Return the band of sizes a row falls into."""
    if row.num_bytes >= 4 * MIB:
        return LARGE
    return MIDDLE if row.num_bytes >= 2**16 else SMALL


def shape(row: CollectiveRow) -> str:
    """Return the shape of a row's groups in words: nodes x GPUs a node, and how many ran at once."""
    cluster = parse_cluster(row.cluster)
    nodes = len({cluster.node_of(device) for device in row.groups[0]})
    size, stride = len(row.groups[0]), row.groups[0][1] - row.groups[0][0]
    return f"{nodes} x {size // nodes} stride {stride}, {len(row.groups)} at once"


def tabulate(
    errors: Sequence[tuple[CollectiveRow, float]], key: Callable[[CollectiveRow], str]
) -> Mapping[tuple[str, str], tuple[int, float, float]]:
    """Return ``(rows, median absolute error, bias)`` by key and band."""
    found: dict[tuple[str, str], list[float]] = {}
    for row, error in errors:
        found.setdefault((key(row), band(row)), []).append(error)
    return {
        place: (len(values), median(map(abs, values)), fmean(values)) for place, values in sorted(found.items())
    }


def markdown(data: Path, *, shapes: bool) -> list[str]:
    """Return one table per source: median absolute error, and bias in brackets.

    Args:
        data: Folder of public sets.
        shapes: Also one line per shape of the groups.
    """
    lines = []
    for check in checks(data):
        errors = check.errors()
        lines += ["", f"**{check.title}** ({len(errors)} rows)", ""]
        lines += [f"| | {LARGE} | {MIDDLE} | {SMALL} |", "|---|---|---|---|"]
        rings = [(row, error) for row, error in errors if row.kind in RINGS]
        lines += _rows(tabulate(rings, lambda _: "the three ring collectives"))
        lines += _rows(tabulate(errors, lambda row: row.kind))
        if shapes:
            lines += _rows(tabulate(errors, lambda row: f"{row.kind}, {shape(row)}"))
    return lines


def _rows(table: Mapping[tuple[str, str], tuple[int, float, float]]) -> list[str]:
    lines = []
    for name in dict.fromkeys(name for name, _ in table):
        cells = (table.get((name, size)) for size in (LARGE, MIDDLE, SMALL))
        words = (f"{cell[1]:.1%} ({cell[2]:+.1%})" if cell else "" for cell in cells)
        lines.append(f"| {name} | {' | '.join(words)} |")
    return lines


def main() -> None:
    """Print one Markdown table per source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds alpa_v100/ and others")
    parser.add_argument("--shapes", action="store_true", help="one line per shape of the groups")
    arguments = parser.parse_args()
    print("\n".join(markdown(arguments.data, shapes=arguments.shapes)))


if __name__ == "__main__":
    main()
