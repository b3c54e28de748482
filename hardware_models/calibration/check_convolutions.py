"""How long Wide-ResNet's convolutions take on a V100, beside Aceso's operator profile.

Factors were fitted on the 0.5B (``fit_convolutions``); the other sizes are reported. Rows that gather channels
besides, on one GPU too, are not here: see `aceso_rows.convolution_rows`.

Run: ``python -m hardware_models.calibration.check_convolutions --data DIR``
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from hardware_models.calibration.aceso_rows import RESNET_SIZES, convolution_rows
from hardware_models.calibration.fit_convolutions import FITTED, predicted_s, shipped_factors


@dataclass(frozen=True)
class Errors:
    """Of one size and phase: signed relative errors of the rows, and of the sum of their times."""

    size: str
    phase: str
    rows: tuple[float, ...]
    total: float

    @property
    def is_fitted(self) -> bool:
        """Whether factors were fitted on these rows."""
        return self.size == FITTED

    @property
    def mean_absolute(self) -> float:
        """Mean absolute error of a row."""
        return fmean(abs(error) for error in self.rows)


def errors(table: Path) -> list[Errors]:
    """Return the errors of every size of ``ops.csv.gz`` (database eurosys), forward and backward."""
    found = []
    for size in RESNET_SIZES:
        rows = list(convolution_rows(table, size=size))
        for phase in ("forward", "backward"):
            own = [row for row in rows if row.group.endswith(phase)]
            predicted = predicted_s(own, shipped_factors()).tolist()
            signed = tuple(seconds / row.seconds - 1 for seconds, row in zip(predicted, own, strict=True))
            found.append(Errors(size, phase, signed, sum(predicted) / sum(row.seconds for row in own) - 1))
    return found


def markdown(data: Path) -> list[str]:
    """Return the errors by size and phase."""
    found = errors(data / "aceso_v100" / "ops.csv.gz")
    head = "mean absolute (signed) | median absolute | sum of all times"
    lines = [f"| size | rows | {head} |", "|---|---|---|---|---|"]
    for each in found:
        mark = " fitted" if each.is_fitted else ""
        cells = (
            f"{each.mean_absolute:.1%} ({fmean(each.rows):+.1%}){mark}",
            f"{median(map(abs, each.rows)):.1%}",
            f"{each.total:+.1%}",
        )
        lines.append(f"| {each.size}, {each.phase} | {len(each.rows)} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Print the errors by size and phase."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds aceso_v100/ops.csv.gz")
    print("\n".join(markdown(parser.parse_args().data)))


if __name__ == "__main__":
    main()
