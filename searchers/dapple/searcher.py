"""DAPPLE's planner as a searcher, and the two data-parallel baselines that its paper compares it with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

from datafiles.words import counted
from searchers.base import Ledger, Searcher, SearchResult, check_least, check_one_of
from searchers.budget import Budget
from searchers.dapple.baselines import WINDOWS, data_parallel
from searchers.dapple.chain import GRANULARITIES, build_chain, cuts_of, layer_spans
from searchers.dapple.communication import COMMUNICATION, CommunicationCosts
from searchers.dapple.planner import PipelinePlan, Planner, PlannerOptions
from searchers.scores import Objective, Score, estimated
from simulator.closed_forms.stage_prices import tied_s
from simulator.costs import cost_tables
from simulator.divisors import divisors
from simulator.lowering.lower import stage_views
from simulator.plan import Axis, Plan, Stage, batch_replicas
from simulator.problem import Problem
from simulator.schedules.one_f_one_b import warmup_p_a, warmup_p_b

SPACES = ("full", "reported")
WARMUPS = ("p_a", "p_b", "acr")
RECOMPUTE = ("never", "if-needed", "always")
ACR_OF_P_B = 0.1
"""Activation communication ratio from which P_B is used: GNMT-16 has 0.10 and gains, BERT-48 0.06 and does not."""
LESS = 0.01
"""Of what a plan that does not fit holds by the planner's account: by so much less, at least, the next one holds."""


class Dapple(Searcher):
    """DAPPLE: hybrid of pipelines and data parallelism on any devices, by dynamic programming on its latency formula.

    Every microbatch size is planned for on its own. Plain data parallelism with overlap and gradient accumulation
    competes with the pipelines. With ``space="reported"`` only what its Table 4 reports competes: data
    parallelism, two stages and straight pipelines, as in the released planner's exhaustive bipartition.

    Args:
        space: ``full`` or ``reported``.
        microbatch: Samples per microbatch (all replicas); None tries every divisor of the global batch.
        profile_samples: Samples at which layers are profiled; times are taken as linear in the samples. None for what
            a replica gets in the mean: of a plan's stages, or of as few as a space has (1, 2, all).
        granularity: What counts as a layer: ``layers``, ``blocks`` or ``operators``.
        communication: ``hardware`` or ``released``: see `searchers.dapple.communication`.
        warmup: ``p_a``, ``p_b``, or ``acr``: P_B where transfers take at least 0.1 of a stage.
        recompute: ``never``, ``if-needed`` (only if nothing fits without) or ``always``: whole stages.
        window: See `searchers.dapple.baselines`.
        options: Rules of formula and placement; memory is always checked.
        replica_assignment: ``slice`` or ``round_robin``.
        objective: See `searchers.base.Searcher`.
        keep: How many of the best plans to return.
    """

    name = "dapple"
    paper = "Fan et al., PPoPP 2021"

    def __init__(
        self,
        *,
        space: str = "full",
        microbatch: int | None = None,
        profile_samples: int | None = None,
        granularity: str = "layers",
        communication: str = "hardware",
        warmup: str = "acr",
        recompute: str = "if-needed",
        window: str = "device",
        options: PlannerOptions | None = None,
        replica_assignment: str = "slice",
        objective: str | Objective = "paper",
        keep: int = 5,
    ) -> None:
        super().__init__(objective=objective, keep=keep)
        check_least(1, microbatch=microbatch, profile_samples=profile_samples)
        for name, value, allowed in (
            ("space", space, SPACES),
            ("granularity", granularity, GRANULARITIES),
            ("communication", communication, COMMUNICATION),
            ("warmup", warmup, WARMUPS),
            ("recompute", recompute, RECOMPUTE),
            ("window", window, WINDOWS),
            ("replica_assignment", replica_assignment, ("slice", "round_robin")),
        ):
            check_one_of(allowed, **{name: value})
        self.space = space
        self.microbatch = microbatch
        self.profile_samples = profile_samples
        self.granularity = granularity
        self.communication = communication
        self.warmup = warmup
        self.recompute = recompute
        self.window = window
        self.options = replace(options or PlannerOptions(), check_memory=True)
        self.replica_assignment = replica_assignment

    def search(self, problem: Problem, budget: Budget | None = None, seed: int = 0) -> SearchResult:
        """Plan for every microbatch size; nothing is random."""
        ledger = Ledger(self, problem, budget or Budget(), seed)
        for recompute in {"never": (False,), "if-needed": (False, True), "always": (True,)}[self.recompute]:
            found = False
            for plan in self._plans(problem, recompute, ledger):
                if ledger.spent:
                    break
                if ledger.is_legal(plan):
                    found |= ledger.evaluate(plan).fits
            if found or ledger.spent:
                break
        if not ledger.clock.evaluations and not ledger.spent:
            layers, most = len(layer_spans(problem, self.granularity)), self.microbatch or problem.global_batch
            ledger.refuse(
                f"no stages of {counted(layers, 'layer')} that use all {counted(problem.num_devices, 'device')}, at "
                f"most {most} of them each, fit in memory"
            )
        return ledger.result()

    def paper_objective(self, plan: Plan, problem: Problem) -> Score:
        """Score by formulas 1 to 3 (one stage that overlaps: by the closed form of data parallelism)."""
        planner = self.planner(problem, plan.microbatch_size, len(plan.stages))
        form = pipeline_plan(planner, plan)
        costs = cost_tables(problem)
        latency = planner.latency_s(form) + tied_s(costs, stage_views(plan.canonical(problem.workload), costs))
        if form.num_stages == 1 and plan.overlap_gradient_sync:
            step = max(1, plan.microbatch_size // len(form.devices[0]))
            time = data_parallel(planner, plan.global_batch, window=self.window, samples_per_step=step)
            again = float(planner.chain.forward_s[-1]) * plan.global_batch / len(form.devices[0])
            latency = time.latency_s + (again if form.recompute else 0.0)
        return replace(estimated(plan, problem), objective=latency)

    def planner(self, problem: Problem, microbatch: int, num_stages: int = 1) -> Planner:
        """Return the formula's view of a problem, with layers profiled for replicas of such microbatches and stages."""
        samples = self.profile_samples or max(1, microbatch * num_stages // problem.num_devices)
        return _planner(problem, samples, self.granularity, self.communication, self.options)

    def to_plan(self, problem: Problem, form: PipelinePlan) -> Plan:
        """Return the executable plan of a planner's result."""
        planner = self.planner(problem, form.microbatch, form.num_stages)
        warmup = None
        if form.num_stages > 1 and self.replica_assignment == "slice":
            deep = self.warmup == "p_b" or (self.warmup == "acr" and communication_ratio(planner, form) >= ACR_OF_P_B)
            depths = warmup_p_b if deep else warmup_p_a
            warmup = depths(form.num_stages, form.num_microbatches)
        stages = []
        for position, devices in enumerate(form.devices):
            start, stop = planner.chain.operators(form.cuts[position], form.cuts[position + 1])
            stages.append(
                Stage(
                    operators=((start, stop),),
                    devices=devices,
                    shardings=((stop - start, (Axis("batch", len(devices)),)),),
                    recompute=((start, stop),) if form.recompute else (),
                )
            )
        return Plan(
            stages=tuple(stages),
            microbatch_size=form.microbatch,
            num_microbatches=form.num_microbatches,
            schedule="1f1b",
            warmup=warmup,
            overlap_gradient_sync=form.num_stages == 1,
            replica_assignment=self.replica_assignment if form.num_stages > 1 else "slice",
        )

    def _plans(self, problem: Problem, recompute: bool, ledger: Ledger) -> Iterator[Plan]:
        batch, total = problem.global_batch, problem.num_devices
        everything = tuple(range(total))
        sizes = divisors(batch) if self.microbatch is None else [self.microbatch]
        num_layers = len(layer_spans(problem, self.granularity))
        whole = (0, num_layers)
        # Data parallelism takes as few accumulation steps as fit, whatever the pipelines' microbatch.
        for size in reversed([size for size in divisors(batch) if size >= total]):
            plan = self.to_plan(problem, PipelinePlan(whole, (everything,), size, batch // size, recompute))
            yield plan
            if estimated(plan, problem).fits:
                break
        for size in sizes:
            if batch % size:
                ledger.refuse(f"microbatch must divide the global batch {batch}, got {size}")
                continue
            for options in self._spaces():
                yield from self._pipelines(problem, size, options, recompute, ledger)
        if total <= num_layers and (self.microbatch or 1) * total <= batch:
            # What needs least memory, so that a model too large for all is told how far it is from fitting.
            cuts = tuple(round(stage * num_layers / total) for stage in range(total + 1))
            size = self.microbatch or 1
            straight = PipelinePlan(cuts, tuple((device,) for device in everything), size, batch // size, recompute)
            if batch % size == 0:
                yield self.to_plan(problem, straight)

    def _pipelines(
        self, problem: Problem, size: int, options: PlannerOptions, recompute: bool, ledger: Ledger
    ) -> Iterator[Plan]:
        """Yield the planner's pipeline; while it does not fit, the one within less memory than it holds.

        The planner's own account leaves out work space and, with P_B, microbatches; less are the bytes by which the
        closed form exceeds the memory.
        """
        total, count = problem.num_devices, problem.global_batch // size
        planner = self.planner(problem, size, total if options.max_replicas == 1 else options.max_stages or 1)
        planner = replace(planner, options=options)
        while not ledger.spent:
            ledger.count("tables")
            form = planner.best(size, count, recompute=recompute)
            if form is None:
                return
            plan = self.to_plan(problem, form)
            yield plan
            score = estimated(plan, problem)
            if score.fits:
                return
            held = planner.held_bytes(form)
            planner = replace(planner, capacity_bytes=held - max(score.peak_bytes - score.capacity_bytes, LESS * held))

    def _spaces(self) -> tuple[PlannerOptions, ...]:
        # The program keeps one prefix per state, so that special cases can be lost in the whole space: they are
        # planned for on their own too. One stage is data parallelism, which is judged on its own: here its layers would
        # be profiled at other samples than a pipeline's, and where each launch counts it would hide better pipelines.
        pipelines = replace(self.options, one_stage=False)
        special = replace(pipelines, max_stages=2), replace(pipelines, max_replicas=1)
        return (pipelines, *special) if self.space == "full" else special


def communication_ratio(planner: Planner, form: PipelinePlan) -> float:
    """Return DAPPLE's ACR: mean one-way transfer time over mean stage time, forward and backward."""
    expanded = planner.expanded(form)
    stages, transfers = expanded[::2], expanded[1::2]
    if not transfers:
        return 0.0
    mean_stage = sum(stage.total_s for stage in stages) / len(stages)
    return sum(transfer.forward_s for transfer in transfers) / len(transfers) / mean_stage


def pipeline_plan(planner: Planner, plan: Plan) -> PipelinePlan:
    """Return a plan as DAPPLE's formula sees it.

    Raises:
        ValueError: If stages are not consecutive ranges of whole layers, or are split otherwise than by batch.
    """
    ranges = []
    for stage in plan.stages:
        if len(stage.operators) != 1 or batch_replicas(stage) != len(stage.devices):
            raise ValueError("DAPPLE's formula needs stages of one range each, split by batch only")
        ranges.append(stage.operators[0])
    return PipelinePlan(
        cuts=cuts_of(planner.chain, ranges),
        devices=tuple(stage.devices for stage in plan.stages),
        microbatch=plan.microbatch_size,
        num_microbatches=plan.num_microbatches,
        recompute=any(stage.recompute for stage in plan.stages),
    )


@lru_cache(maxsize=64)
def _planner(
    problem: Problem, profile_samples: int, granularity: str, communication: str, options: PlannerOptions
) -> Planner:
    return make_planner(problem, profile_samples, granularity, communication, options)


def make_planner(
    problem: Problem,
    profile_samples: int = 4,
    granularity: str = "layers",
    communication: str = "hardware",
    options: PlannerOptions | None = None,
) -> Planner:
    """Return the formula's view of a problem; see `Dapple` for the arguments."""
    spans = layer_spans(problem, granularity)
    return Planner(
        chain=build_chain(cost_tables(problem), spans, min(profile_samples, problem.global_batch)),
        communication=CommunicationCosts(problem.hardware, communication),
        gradient_bytes=float(problem.runtime.travelling_gradient_bytes),
        state_bytes=problem.runtime.state_bytes_per_parameter,
        capacity_bytes=float(min(problem.capacity_bytes(device) for device in range(problem.num_devices))),
        options=options or PlannerOptions(),
    )


class DataParallelNoOverlap(Searcher):
    """Data parallelism with gradient accumulation; gradients are reduced after the last backward pass.

    As few accumulation steps as fit; whole-model recomputation only where nothing fits without.

    Args:
        profile_samples: See `Dapple`.
        objective: See `searchers.base.Searcher`.
        keep: How many of the best plans to return.
    """

    name = "dp-no-overlap"
    paper = "Fan et al., PPoPP 2021, Section 6.3"
    overlaps: ClassVar[bool] = False

    def __init__(
        self, *, profile_samples: int | None = None, objective: str | Objective = "paper", keep: int = 5
    ) -> None:
        super().__init__(objective=objective, keep=keep)
        check_least(1, profile_samples=profile_samples)
        self.profile_samples = profile_samples

    def search(self, problem: Problem, budget: Budget | None = None, seed: int = 0) -> SearchResult:
        """Score the largest accumulation step that fits."""
        ledger = Ledger(self, problem, budget or Budget(), seed)
        total, count = problem.num_devices, len(problem.workload)
        sizes = [size for size in divisors(problem.global_batch) if size >= total]
        if not sizes:
            ledger.refuse(f"global_batch must be at least the {counted(total, 'device')}, got {problem.global_batch}")
        for recompute in ((), ((0, count),)):
            for size in reversed(sizes):
                if ledger.spent:
                    return ledger.result()
                stage = Stage(((0, count),), tuple(range(total)), ((count, (Axis("batch", total),)),), recompute)
                plan = Plan((stage,), size, problem.global_batch // size, overlap_gradient_sync=self.overlaps)
                if ledger.is_legal(plan) and ledger.evaluate(plan).fits:
                    return ledger.result()
        return ledger.result()

    def paper_objective(self, plan: Plan, problem: Problem) -> Score:
        """Score by the closed form of the baseline."""
        step = max(1, plan.microbatch_size // problem.num_devices)
        planner = _planner(problem, self.profile_samples or step, "layers", "hardware", PlannerOptions())
        overlap = "backward" if self.overlaps else "none"
        time = data_parallel(planner, plan.global_batch, overlap=overlap, samples_per_step=step)
        again = float(planner.chain.forward_s[-1]) * plan.global_batch / problem.num_devices
        latency = time.latency_s + (again if plan.stages[0].recompute else 0.0)
        return replace(estimated(plan, problem), objective=latency)


class DataParallelOverlap(DataParallelNoOverlap):
    """Data parallelism with gradient accumulation; gradients are reduced while the last backward pass runs.

    As few accumulation steps as fit; whole-model recomputation only where nothing fits without.

    Args:
        profile_samples: See `Dapple`.
        objective: See `searchers.base.Searcher`.
        keep: How many of the best plans to return.
    """

    name = "dp-overlap"
    overlaps = True
