"""Infer a profile from runs: what each part of a plan takes, from whole iterations that were measured.

A user has logs of iterations, not of operators. Runs of some plans are simulated, each part's share of an iteration is
found by making it a little longer, and the factors on the cost tables' times that explain the logs best are estimated
(`experiments.calibrate.inferred_ridge`). Other plans are then simulated on the profile that the factors make
(`experiments.calibrate.inferred_parts`). What no factor can change stays the model's: collectives, transfers, gradient
reductions, the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from datafiles.words import counted
from experiments.calibrate.inferred_parts import AFTER, BEFORE, LAYER, Factors, Part, corrected, parts_of
from experiments.calibrate.inferred_ridge import Prior, Sums, choose
from experiments.calibrate.measured_run import MeasuredRun

STEP = 0.05
"""How much longer a part is made to see its share."""
WORDS = {BEFORE: "before", LAYER: "in", AFTER: "after"}
MAX_ROUNDS, SETTLED = 5, 1e-3
"""Shares are taken again at the estimate until the sums say what the simulator does, to this share of a run."""


@dataclass(frozen=True)
class LayersRun(MeasuredRun):
    """A measured iteration of a model of repeated layers.

    Attributes:
        shape: What the layers are, in words; runs of one shape share parts.
    """

    shape: str

    def predicted_s(self, factors: Factors) -> float:
        """Return the simulated iteration time with factors on parts."""
        own = corrected(self.problem, self.plan, self.shape, factors, f"inferred for {self.name}")
        return self.simulated_s(own)

    def parts(self) -> set[Part]:
        """Return the parts of the run."""
        return parts_of(self.problem, self.plan, self.shape)


@dataclass(frozen=True)
class Inferred:
    """Factors inferred from runs.

    Attributes:
        factors: By part; of all parts that were asked for.
        prior: That was chosen.
        errors: Signed relative errors of the runs themselves: float64[runs].
        left_out_errors: Likewise, each predicted from all others under the prior.
        unsettled: Largest difference left between what the sums and the simulator say of a run, as a share of it.
    """

    factors: Factors
    prior: Prior
    errors: NDArray[np.float64]
    left_out_errors: NDArray[np.float64]
    unsettled: float


def sums_of(runs: Sequence[LayersRun], around: Factors) -> Sums:
    """Return runs as sums of their parts, with shares as they are around given factors (1 where none is given)."""
    parts = tuple(sorted({part for run in runs for part in run.parts()}))
    column = {part: number for number, part in enumerate(parts)}
    shares, residuals = np.zeros((len(runs), len(parts))), np.zeros(len(runs))
    for line, run in enumerate(runs):
        own = {part: around.get(part, 1.0) for part in run.parts()}
        base = run.predicted_s(own)
        at_one = base
        for part, factor in own.items():
            longer = run.predicted_s({**own, part: factor + STEP})
            slope = (longer - base) / STEP
            shares[line, column[part]] = slope / run.seconds
            at_one -= slope * (factor - 1)
        residuals[line] = 1 - at_one / run.seconds
    return Sums(parts, shares, residuals)


def infer(runs: Sequence[LayersRun], priors: Iterable[Prior], wanted: Iterable[Part] = ()) -> Inferred:
    """Return the factors that explain runs, under the prior that predicts left-out runs best.

    Args:
        runs: At least two.
        priors: To choose among.
        wanted: More parts to give factors to than those of the runs.
    """
    if len(runs) < 2:
        raise ValueError(f"at least two runs must be given to infer from, got {len(runs)}")
    candidates, factors, extra = list(priors), dict[Part, float](), set(wanted)
    for _ in range(MAX_ROUNDS):
        sums = sums_of(runs, factors)
        prior = choose(sums, candidates)
        factors = sums.estimate(prior, sorted(extra | set(sums.parts)))
        if min(factors.values()) <= 0:
            worst = min(factors, key=lambda part: factors[part])
            ratio = float(np.median([run.seconds / run.predicted_s({}) for run in runs]))
            raise ValueError(
                f"factors must be above 0, got {factors[worst]:.3g} for what is {WORDS[worst.block]} the layers, "
                f"{counted(worst.samples, 'sample')} on {counted(worst.tensor_size, 'tensor-parallel rank')}; the runs "
                f"take {ratio:.2f} of what the model says in the median: check the measured times, and the GPU type "
                "and runtime of the plans"
            )
        deviations = np.array([factors[part] - 1 for part in sums.parts])
        summed = sums.shares @ deviations - sums.residuals
        errors = np.array([run.predicted_s(factors) / run.seconds - 1 for run in runs])
        unsettled = float(np.abs(summed - errors).max())
        if unsettled < SETTLED:
            break
    return Inferred(factors, prior, errors, -sums.left_out(prior), unsettled)
