"""What a campaign found: per plan predicted and measured, their split, memory; over plans errors and ranking."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.problem import Problem
from simulator.result import SimulationResult
from simulator.simulate import simulate
from validation.campaigns.definition import Campaign, CampaignPlan
from validation.campaigns.error_split import COLLECTIVES, WAITING, DeviceSplit, split_errors
from validation.campaigns.fit import Calibration
from validation.campaigns.run import RoundResult, fastest_round
from validation.campaigns.work import UnitWork
from validation.measurement import Measurement
from validation.profiling.calibration import ENGINE
from validation.profiling.stage_times import stage_times


@dataclass(frozen=True)
class Quantity:
    """One predicted and measured time.

    Attributes:
        name: What it is.
        predicted_s, measured_s: Seconds.
    """

    name: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Signed: (predicted - measured) / measured."""
        return (self.predicted_s - self.measured_s) / self.measured_s if self.measured_s > 0 else 0.0

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "name": self.name,
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "error": self.error,
        }


@dataclass(frozen=True)
class MemoryPeak:
    """Peak of the fullest device in bytes; measured is None where torch does not count (the CPU)."""

    predicted_allocated: int
    predicted_reserved: int
    measured_allocated: int | None
    measured_reserved: int | None

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data with errors."""
        return {
            "predicted_allocated_bytes": self.predicted_allocated,
            "predicted_reserved_bytes": self.predicted_reserved,
            "measured_allocated_bytes": self.measured_allocated,
            "measured_reserved_bytes": self.measured_reserved,
            "allocated_error": _error(self.predicted_allocated, self.measured_allocated),
            "reserved_error": _error(self.predicted_reserved, self.measured_reserved),
        }


def _error(predicted: float, measured: float | None) -> float | None:
    return (predicted - measured) / measured if measured else None


@dataclass(frozen=True)
class PlanOutcome:
    """One report plan.

    Attributes:
        plan: The plan.
        problem: With the calibration applied.
        result: Its simulation.
        quantities: Iteration time, then forward and backward of every stage; medians over rounds.
        samples_s: Iteration time of each round.
        splits: Per device, the busiest first.
        memory: Peaks.
        measured: Of every round; the first has a traced iteration.
    """

    plan: CampaignPlan
    problem: Problem
    result: SimulationResult
    quantities: tuple[Quantity, ...]
    samples_s: tuple[float, ...]
    splits: tuple[DeviceSplit, ...]
    memory: MemoryPeak
    measured: tuple[Measurement, ...]

    @property
    def out_of_memory(self) -> bool:
        """Whether a run failed for lack of memory."""
        return any(each.out_of_memory for each in self.measured)

    @property
    def iteration(self) -> Quantity:
        """The iteration time."""
        return self.quantities[0]

    @property
    def spread(self) -> float:
        """Largest less smallest iteration time of the rounds, as a share of the median."""
        if not self.samples_s:
            return 0.0
        return (max(self.samples_s) - min(self.samples_s)) / statistics.median(self.samples_s)

    @property
    def disturbance(self) -> float:
        """Median over rounds: passes took so many times their processor time; 1 on a calm machine."""
        return statistics.median(each.disturbance for each in self.measured)

    def part(self, word: str) -> tuple[float, float]:
        """Return predicted and measured seconds of a class on the busiest device."""
        for name, predicted, measured in self.splits[0].by_class() if self.splits else []:
            if name == word:
                return predicted, measured
        return 0.0, 0.0

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data with units in the keys."""
        collectives, waiting = self.part(COLLECTIVES), self.part(WAITING)
        return {
            "plan": self.plan.name,
            "unit": self.plan.unit,
            "plan_hash": self.plan.plan.canonical_hash(self.plan.problem.workload),
            "out_of_memory": self.out_of_memory,
            "predicted_fits": self.result.fits,
            "iteration_time_error": self.iteration.error if not self.out_of_memory else None,
            "quantities": [each.to_mapping() for each in self.quantities],
            "round_samples_s": list(self.samples_s),
            "spread": self.spread,
            "disturbance": self.disturbance,
            "exposed_collectives_s": {"predicted": collectives[0], "measured": collectives[1]},
            "waiting_s": {"predicted": waiting[0], "measured": waiting[1]},
            "memory": self.memory.to_mapping(),
            "devices": [each.to_mapping() for each in self.splits],
            "measured_share": self.result.duration_sources["measured"] + self.result.duration_sources["interpolated"],
            "notes": list(self.measured[0].notes),
        }


@dataclass(frozen=True)
class Ranking:
    """Pairs of one unit whose measured times per sample differ by more than the margin."""

    pairs: int
    right: int
    wrong: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class CampaignResult:
    """What a campaign found.

    Attributes:
        campaign: Which.
        machine: Where.
        date: When its measurement was begun.
        rounds: Finished rounds behind the medians.
        outcomes: Per report plan.
        calibrations: By unit.
        ranking: Of report plans.
        overlap: Kind of communication to the slowdown of computation and of communication; medians over rounds.
    """

    campaign: Campaign
    machine: str
    date: str
    rounds: int
    outcomes: tuple[PlanOutcome, ...]
    calibrations: Mapping[str, Calibration]
    ranking: Ranking
    overlap: Mapping[str, tuple[float, float]]

    def errors(self) -> list[float]:
        """Return signed errors of the iteration time of all plans that ran."""
        return [each.iteration.error for each in self.outcomes if not each.out_of_memory]

    @property
    def median_absolute(self) -> float:
        """Median over plans of the absolute error of the iteration time; infinite if none ran."""
        errors = self.errors()
        return statistics.median(map(abs, errors)) if errors else float("inf")

    @property
    def disturbance(self) -> float:
        """Median over plans: above 1 other load took the processor away, and times say less."""
        return statistics.median(each.disturbance for each in self.outcomes)

    def summary(self) -> dict[str, Any]:
        """Return the figures over all plans."""
        errors = self.errors()
        absolute = [abs(error) for error in errors]
        wrong = [each.plan.name for each in self.outcomes if each.out_of_memory and each.result.fits]
        memory = [each.memory.to_mapping() for each in self.outcomes if not each.out_of_memory]
        found = {
            "campaign": self.campaign.name,
            "machine": self.machine,
            "rounds": self.rounds,
            "plans": len(self.outcomes),
            "median_absolute_error": statistics.median(absolute) if absolute else None,
            "mean_absolute_error": statistics.fmean(absolute) if absolute else None,
            "worst_absolute_error": max(absolute, default=None),
            "bias": statistics.fmean(errors) if errors else None,
            "disturbance": self.disturbance,
            "ranked_pairs": self.ranking.pairs,
            "ranked_right": self.ranking.right,
            "overlap_slowdown": {
                kind: {"computation": computation, "communication": communication}
                for kind, (computation, communication) in self.overlap.items()
            },
            "ranked_wrong": [list(pair) for pair in self.ranking.wrong],
            "out_of_memory": sum(each.out_of_memory for each in self.outcomes),
            "predicted_to_fit_but_did_not": wrong,
        }
        for word in ("allocated_error", "reserved_error"):
            own = [abs(each[word]) for each in memory if each[word] is not None]
            found[f"mean_absolute_{word}"] = statistics.fmean(own) if own else None
        return found


def evaluate(
    campaign: Campaign,
    work: Sequence[UnitWork],
    rounds: Sequence[RoundResult],
    calibrations: Mapping[str, Calibration],
    machine: str,
    date: str,
) -> CampaignResult:
    """Return what finished rounds say of a campaign.

    Args:
        campaign, work: What ran.
        rounds: At least one.
        calibrations: By unit: fitted on the same rounds, or loaded.
        machine, date: Where and when it ran, in words.
    """
    if not rounds:
        raise ValueError("a campaign must have at least one finished round to be evaluated")
    spreads, turns = _samples(work, rounds), list(rounds)
    if campaign.options.statistic == "fastest":
        turns = [fastest_round(rounds)]
    outcomes = []
    for unit in work:
        for position, (plan, job) in enumerate(unit.report, unit.first_report):
            measured = tuple(turn.measured[unit.name][position] for turn in turns)
            assert job.plan == plan.plan
            outcomes.append(_outcome(plan, calibrations[unit.name], measured, spreads[plan.identity]))
    ranking = rank(
        [(each.plan.unit, each.plan.name, *_per_sample(each)) for each in outcomes if not each.out_of_memory],
        campaign.options.ranking_margin,
    )
    return CampaignResult(
        campaign, machine, date, len(rounds), tuple(outcomes), dict(calibrations), ranking, _overlap(rounds)
    )


def _overlap(rounds: Sequence[RoundResult]) -> dict[str, tuple[float, float]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in (row for turn in rounds for row in turn.overlap):
        found.setdefault(row.kind, []).append((row.computation_factor, row.communication_factor))
    return {
        kind: (statistics.median(own for own, _ in pairs), statistics.median(own for _, own in pairs))
        for kind, pairs in found.items()
    }


def _samples(work: Sequence[UnitWork], rounds: Sequence[RoundResult]) -> dict[str, tuple[float, ...]]:
    """Return the iteration time of every report plan in every round."""
    return {
        plan.identity: tuple(turn.measured[unit.name][position].iteration_time_s for turn in rounds)
        for unit in work
        for position, (plan, _) in enumerate(unit.report, unit.first_report)
    }


def _per_sample(outcome: PlanOutcome) -> tuple[float, float]:
    samples = outcome.plan.problem.global_batch
    return outcome.iteration.predicted_s / samples, outcome.iteration.measured_s / samples


def rank(plans: Sequence[tuple[str, str, float, float]], margin: float) -> Ranking:
    """Return how pairs of plans are ordered.

    Args:
        plans: ``(unit, name, predicted, measured)`` times; only plans of one unit are compared.
        margin: Pairs whose measured times differ by no more than this share of the smaller do not count.
    """
    pairs, wrong = 0, []
    for a, b in itertools.combinations(plans, 2):
        if a[0] != b[0] or max(a[3], b[3]) <= (1 + margin) * min(a[3], b[3]):
            continue
        pairs += 1
        if (a[2] - b[2]) * (a[3] - b[3]) <= 0:  # two that are predicted alike are not told apart
            wrong.append((a[1], b[1]))
    return Ranking(pairs, pairs - len(wrong), tuple(wrong))


def _outcome(
    plan: CampaignPlan, calibration: Calibration, measured: tuple[Measurement, ...], samples: tuple[float, ...]
) -> PlanOutcome:
    problem = calibration.apply(plan.problem, plan.plan)
    result = simulate(plan.plan, problem, engine=ENGINE)
    ran = [each for each in measured if not each.out_of_memory]
    on_gpu = any(memory.peak_allocated_bytes for each in ran for memory in each.memory)
    memory = MemoryPeak(
        result.peak_allocated_bytes,
        result.peak_reserved_bytes,
        max(each.peak_allocated_bytes for each in ran) if on_gpu else None,
        max(each.peak_reserved_bytes for each in ran) if on_gpu else None,
    )
    if len(ran) < len(measured):
        nothing = (Quantity("iteration", result.iteration_time_s, 0.0),)
        return PlanOutcome(plan, problem, result, nothing, (), (), memory, measured)
    forward_s, backward_s = stage_times(result, len(plan.plan.stages))
    measured_s = statistics.median(each.iteration_time_s for each in measured)
    quantities = [Quantity("iteration", result.iteration_time_s, measured_s)]
    for stage in range(len(plan.plan.stages)):
        for word, predicted, attribute in (
            ("forward", forward_s, "stage_forward_s"),
            ("backward", backward_s, "stage_backward_s"),
        ):
            taken = statistics.median(getattr(each, attribute)[stage] for each in measured)
            quantities.append(Quantity(f"stage {stage} {word}", predicted[stage], taken))
    splits = split_errors(plan.plan, plan.problem, problem, result, calibration, measured)
    return PlanOutcome(plan, problem, result, tuple(quantities), samples, tuple(splits), memory, measured)
