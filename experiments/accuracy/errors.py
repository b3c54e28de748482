"""Errors of predictions against measurements, and whether plans are ranked right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np

DISTINGUISHABLE = 0.05
"""Plans whose measured times differ by less are not asked to be ranked: runs repeat no better."""


@dataclass(frozen=True)
class ErrorReport:
    """Signed relative errors ``(predicted - measured) / measured`` by label.

    Attributes:
        errors: At least one.
    """

    errors: Mapping[str, float]

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, float, float]]) -> ErrorReport | None:
        """Return the report of ``(label, predicted, measured)``, None if there are none.

        >>> report = ErrorReport.of([("a", 1.1, 1.0), ("b", 1.8, 2.0)])
        >>> round(report.mean_absolute, 3), round(report.bias, 3), report.worst[0]
        (0.1, 0.0, 'a')
        """
        errors = {label: (predicted - measured) / measured for label, predicted, measured in pairs}
        return cls(errors) if errors else None

    @property
    def num_cases(self) -> int:
        """Cases compared."""
        return len(self.errors)

    @cached_property
    def mean_absolute(self) -> float:
        """Mean of the absolute errors."""
        return float(np.mean(np.abs(list(self.errors.values()))))

    @cached_property
    def median_absolute(self) -> float:
        """Median of the absolute errors."""
        return float(np.median(np.abs(list(self.errors.values()))))

    @cached_property
    def bias(self) -> float:
        """Mean of the signed errors."""
        return float(np.mean(list(self.errors.values())))

    @cached_property
    def worst(self) -> tuple[str, float]:
        """Label and signed error of the case furthest off; of several the first by label."""
        return max(sorted(self.errors.items()), key=lambda item: round(abs(item[1]), 12))


@dataclass(frozen=True)
class RankReport:
    """How plans for one problem are ordered, over all pairs that measurably differ.

    Attributes:
        num_pairs: Pairs whose measured times differ by more than `DISTINGUISHABLE`.
        num_agreeing: Of them, those predicted in the same order.
        spearman: Spearman's rank correlation, mean over the sets of rivals weighted by their size.
    """

    num_pairs: int
    num_agreeing: int
    spearman: float

    @property
    def correlation(self) -> float:
        """(agreeing - others) / pairs: Kendall's correlation over pairs that differ; those predicted alike disagree."""
        return (2 * self.num_agreeing - self.num_pairs) / self.num_pairs


def rank_report(rivals: Mapping[str, Sequence[tuple[float, float]]]) -> RankReport | None:
    """Return how ``(predicted, measured)`` of each set of rivals are ranked, None without a pair.

    >>> rank_report({"gpt": [(1.0, 2.0), (1.5, 3.0), (1.2, 4.0)]})
    RankReport(num_pairs=3, num_agreeing=2, spearman=0.5)
    """
    num_pairs = num_agreeing = 0
    total = weight = 0.0
    for plans in rivals.values():
        for (predicted_a, measured_a), (predicted_b, measured_b) in combinations(plans, 2):
            if abs(measured_a - measured_b) > DISTINGUISHABLE * min(measured_a, measured_b):
                num_pairs += 1
                num_agreeing += (predicted_a - predicted_b) * (measured_a - measured_b) > 0
        if len(plans) > 2:
            total += len(plans) * _spearman(plans)
            weight += len(plans)
    if num_pairs == 0:
        return None
    correlation = total / weight if weight else (2 * num_agreeing - num_pairs) / num_pairs
    return RankReport(num_pairs, num_agreeing, correlation)


def _spearman(plans: Sequence[tuple[float, float]]) -> float:
    from scipy.stats import rankdata

    predicted, measured = (rankdata(column) for column in zip(*plans, strict=True))
    if np.ptp(predicted) == 0 or np.ptp(measured) == 0:
        return 0.0
    return float(np.corrcoef(predicted, measured)[0, 1])
