"""Factors of parts from sums of parts: Bayesian ridge regression around 1, with parts that are alike tied together.

A run's time is a sum over parts, so its relative residual is linear in the factors' deviations from 1: ``r = S x + e``,
where ``S`` holds each part's share of each run. A deviation is a sum of independent normal terms, one per *level* of a
hierarchy (what all parts of a block have in common, what those of one sharding, the part's own), so two parts covary by
the levels that they share: ``K[a, b] = sum of width**2 over levels on which a and b agree``. With noise of a stated
standard deviation the estimate is the posterior mean ``K S' (S K S' + noise**2)^-1 r``: a part that no run has gets
what its relatives have, and 0, the prior's mean, where it has none. Leaving runs ``g`` out needs no second fit: their
residuals are then ``((G^-1)_gg)^-1 (G^-1 r)_g``, with ``G`` the matrix in brackets.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from experiments.calibrate.inferred_parts import Part

Matrix = NDArray[np.float64]
Level = Callable[[Part], Hashable]

LEVELS: Mapping[str, Level] = {
    "block": lambda part: part.block,
    "sharding": lambda part: (part.block, part.shape, part.tensor_size),
    "samples": lambda part: (part.block, part.shape, part.samples),
    "shapes": lambda part: (part.block, part.tensor_size, part.samples),
    "part": lambda part: part,
}
"""What parts may have in common; a level is named by what its members share beside their block."""
WIDTHS, NOISE = (0.0, 0.05, 0.2), 0.01
"""Of the priors to choose among: a term is absent, or a twentieth or a fifth wide; runs repeat to a hundredth."""


@dataclass(frozen=True)
class Prior:
    """What is believed of factors before any run is seen.

    Attributes:
        widths: Standard deviation of each level's term, by name in ``LEVELS``; a level that is not named has none.
        noise: Standard deviation of a run's relative residual that no factor explains.
    """

    widths: Mapping[str, float]
    noise: float

    def __post_init__(self) -> None:
        unknown = sorted(set(self.widths) - set(LEVELS))
        if unknown:
            raise ValueError(f"levels of a prior must be among {', '.join(LEVELS)}, got {unknown[0]!r}")
        if self.noise <= 0 or min(self.widths.values(), default=0.0) < 0:
            raise ValueError(f"noise must be above 0 and widths not below, got {self.noise}, {dict(self.widths)}")

    def covariance(self, rows: Sequence[Part], columns: Sequence[Part]) -> Matrix:
        """Return how the deviations of two lists of parts covary: float64[rows, columns]."""
        found = np.zeros((len(rows), len(columns)))
        for name, width in self.widths.items():
            level = LEVELS[name]
            of_columns = [level(part) for part in columns]
            found += width**2 * np.array([[level(part) == other for other in of_columns] for part in rows])
        return found


@dataclass(frozen=True)
class Sums:
    """Runs as sums of parts.

    Attributes:
        parts: Columns.
        shares: What a factor of 1 + x instead of 1 adds to a run, over x and the measured time: float64[runs, parts].
        residuals: ``(measured - time at factors of 1) / measured``: float64[runs].
    """

    parts: tuple[Part, ...]
    shares: Matrix
    residuals: Matrix

    def estimate(self, prior: Prior, wanted: Iterable[Part]) -> dict[Part, float]:
        """Return the factors of some parts: those of the runs, or others, by what they have in common with them."""
        asked = list(wanted)
        weights = np.linalg.solve(self._spread(prior), self.residuals)
        deviations = prior.covariance(asked, self.parts) @ self.shares.T @ weights
        return {part: 1.0 + float(x) for part, x in zip(asked, deviations, strict=True)}

    def left_out(self, prior: Prior, groups: Sequence[Hashable] | None = None) -> Matrix:
        """Return each run's residual, of measured time, under factors estimated from the others: float64[runs].

        Args:
            prior: Under which.
            groups: A word for each run; runs of one word are left out together. None leaves each out alone.
        """
        inverse = np.linalg.inv(self._spread(prior))
        weights = inverse @ self.residuals
        found = np.zeros(len(weights))
        words = list(groups) if groups is not None else list(range(len(weights)))
        for word in dict.fromkeys(words):
            (own,) = np.nonzero([other == word for other in words])
            found[own] = np.linalg.solve(inverse[np.ix_(own, own)], weights[own])
        return found

    def _spread(self, prior: Prior) -> Matrix:
        covariance = prior.covariance(self.parts, self.parts)
        spread = self.shares @ covariance @ self.shares.T + prior.noise**2 * np.eye(len(self.residuals))
        return np.asarray(spread, dtype=np.float64)


def priors() -> Iterator[Prior]:
    """Yield the priors to choose among: every level none, narrow or wide.

    The noise is stated, since widths over noise are all that the estimate depends on.
    """
    for widths in product(WIDTHS, repeat=len(LEVELS)):
        yield Prior(dict(zip(LEVELS, widths, strict=True)), NOISE)


def choose(sums: Sums, priors: Iterable[Prior], groups: Sequence[Hashable] | None = None) -> Prior:
    """Return the prior with the least mean absolute residual of runs left out, of equals the first.

    A part takes some time: where that one says otherwise, the next that has factors and does not is taken.

    Args:
        sums: Runs.
        priors: To choose among.
        groups: See `Sums.left_out`.
    """
    candidates = list(priors)
    if not candidates:
        raise ValueError("at least one prior must be given to choose among, got none")
    ranked = sorted(candidates, key=lambda prior: float(np.abs(sums.left_out(prior, groups)).mean()))
    some = [prior for prior in ranked if any(prior.widths.values())]
    possible = (prior for prior in (ranked[0], *some) if min(sums.estimate(prior, sums.parts).values()) > 0)
    return next(possible, ranked[0])
