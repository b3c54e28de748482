"""AMP: every mix of degrees and microbatches, layers cut by dynamic programming, ranked by a formula.

Source: Li et al., "AMP: Automatically Finding Model Parallel Strategies with Heterogeneity Awareness", NeurIPS 2022.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from math import prod
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from datafiles.words import counted
from searchers.amp_cuts import best_cuts
from searchers.base import CandidateSearcher, Ledger, check_least
from searchers.layers import LayerTables, blocks
from searchers.scores import Objective, Score, estimated
from simulator.costs import cost_tables
from simulator.divisors import divisors
from simulator.lowering.mesh import groups
from simulator.plan import Axis, Plan, Sharding, Stage, resolve
from simulator.problem import Problem
from simulator.uniform import recompute_segments


class Amp(CandidateSearcher):
    """AMP's enumeration on the shared cost tables.

    Layer times are averaged over the GPU types of the cluster; links are those of the devices that talk, placed in
    order. It has no model of memory: whether a plan fits is the shared estimate's word.

    Args:
        max_microbatch: Largest microbatch in samples per replica.
        recompute: ``none`` or ``full`` for all layers.
        objective: See `searchers.base.Searcher`.
        keep: How many of the best plans to return.
    """

    name = "amp"
    paper = "Li et al., NeurIPS 2022"

    def __init__(
        self,
        *,
        max_microbatch: int = 64,
        recompute: tuple[str, ...] = ("none", "full"),
        objective: str | Objective = "paper",
        keep: int = 5,
    ) -> None:
        super().__init__(objective=objective, keep=keep)
        check_least(1, max_microbatch=max_microbatch)
        self.max_microbatch = max_microbatch
        self.recompute = recompute

    def candidates(self, problem: Problem, random: np.random.Generator, ledger: Ledger) -> Iterator[Plan]:
        """Yield the best cuts of every (tp, dp, microbatch)."""
        devices = problem.num_devices
        smallest = min(node.num_devices for node in problem.hardware.cluster.nodes)
        layers = len(blocks(problem.workload))
        for tp in divisors(smallest):
            if devices % tp:
                continue
            for dp in divisors(devices // tp):
                pp = devices // (tp * dp)
                if pp > layers:
                    ledger.refuse(
                        f"pp must be at most the {counted(layers, 'layer')} of {problem.workload.name}, got {pp}"
                    )
                    continue
                if problem.global_batch % dp:
                    ledger.refuse(f"global_batch must be a multiple of dp, got {problem.global_batch} with dp={dp}")
                    continue
                for microbatch in divisors(problem.global_batch // dp):
                    if microbatch > self.max_microbatch:
                        continue
                    for recompute in self.recompute:
                        try:
                            yield self.plan(problem, tp, dp, pp, microbatch, recompute)
                        except ValueError as error:
                            ledger.refuse(error)

    def plan(self, problem: Problem, tp: int, dp: int, pp: int, microbatch: int, recompute: str) -> Plan:
        """Return the plan whose layers are cut best for the formula.

        Raises:
            ValueError: If an operator cannot be split so.
        """
        spans = blocks(problem.workload)
        sharding = (Axis("batch", dp), Axis("tensor", tp))
        again = recompute_segments(problem.workload, 0, len(problem.workload), recompute)
        seconds, leaving = layer_costs(problem, spans, sharding, microbatch, again)
        ranks = [tuple(range(stage * tp * dp, (stage + 1) * tp * dp)) for stage in range(pp)]
        crossing = np.array(
            [
                [crossing_s(problem, num_bytes, ranks[stage], ranks[stage + 1], tp) for num_bytes in leaving]
                for stage in range(pp - 1)
            ]
        ).reshape(pp - 1, len(spans))
        count = problem.global_batch // (microbatch * dp)
        cuts = best_cuts(seconds, crossing, count)
        stages = []
        for stage, (first, last) in enumerate(cuts):
            start, stop = spans[first][0], spans[last - 1][1]
            stages.append(
                Stage(
                    operators=((start, stop),),
                    devices=ranks[stage],
                    shardings=((stop - start, sharding),),
                    recompute=recompute_segments(problem.workload, start, stop, recompute),
                )
            )
        return Plan(
            stages=tuple(stages),
            microbatch_size=microbatch * dp,
            num_microbatches=count,
            overlap_gradient_sync=problem.runtime.overlap_gradient_sync,
        )

    def paper_objective(self, plan: Plan, problem: Problem) -> Score:
        """Score by the sum over layers and cuts, the pipeline's (B - 1) max, and the slowest gradient sync."""
        score = estimated(plan, problem)
        return Score(formula_s(plan, problem), score.fits, score.peak_bytes, score.capacity_bytes, score.where)


def layer_costs(
    problem: Problem,
    spans: tuple[tuple[int, int], ...],
    sharding: Sharding,
    samples: int,
    again: Sequence[tuple[int, int]] = (),
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return seconds of each layer, averaged over devices, and bytes that leave it on one replica.

    Operators in ``again`` run forward twice.
    """
    costs = cost_tables(problem)
    tables = LayerTables(costs, spans)
    types = list(problem.gpu_types)
    seconds = np.zeros(len(spans))
    leaving = np.zeros(len(spans))
    for gpu_type in dict.fromkeys(types):
        found = tables.layers(sharding, samples, gpu_type)
        share = types.count(gpu_type) / len(types)
        seconds += share * (found.forward_s + found.backward_s)
        table = costs.table(sharding, samples, gpu_type)
        for start, stop in again:
            layer = bisect_right(spans, start, key=itemgetter(0)) - 1
            forward_s = max(table.forward_s[start:stop].sum(), table.forward_host_s[start:stop].sum())
            seconds[layer] += share * float(forward_s)
        leaving = found.boundary_bytes
    return seconds, leaving


def crossing_s(
    problem: Problem, num_bytes: float, source: Sequence[int], target: Sequence[int], tp: int
) -> float:
    """Return seconds to send a layer's output on, and its gradient back: the mean over pairs of replicas."""
    pairs = list(zip(source[::tp], target[::tp], strict=True))
    hardware = problem.hardware
    return 2 * sum(hardware.transfer(num_bytes, a, b).alone_s for a, b in pairs) / len(pairs)


def formula_s(plan: Plan, problem: Problem) -> float:
    """Return AMP's prediction for a uniform plan: one sharding, consecutive stages of whole layers.

    Raises:
        ValueError: If no layer begins in a stage.
    """
    spans = blocks(problem.workload)
    sharding = next(iter(plan.stages[0].sharding_per_operator()))
    tp = prod(axis.size for axis in sharding if axis.split != "batch")
    dp = prod(axis.size for axis in sharding if axis.split == "batch")
    again = [segment for stage in plan.stages for segment in stage.recompute]
    seconds, leaving = layer_costs(problem, spans, sharding, plan.microbatch_size // dp, again)
    starts = np.array([start for start, _ in spans])
    stage_s, crossing = [], 0.0
    for number, stage in enumerate(plan.stages):
        begin, stop = stage.operators[0][0], stage.operators[-1][1]
        own = (starts >= begin) & (starts < stop)
        if not own.any():
            raise ValueError(f"AMP's formula is of whole layers, but stage {number} begins none; cut between layers")
        stage_s.append(float(seconds[own].sum()))
        if number + 1 < len(plan.stages):
            last = int(np.flatnonzero(own)[-1])
            crossing += crossing_s(
                problem, float(leaving[last]), stage.devices, plan.stages[number + 1].devices, tp
            )
    sync = max(_sync_s(problem, stage, sharding, dp, plan.microbatch_size // dp) for stage in plan.stages)
    return sum(stage_s) + crossing + (plan.num_microbatches - 1) * max(stage_s) + sync


def _sync_s(problem: Problem, stage: Stage, sharding: Sharding, dp: int, samples: int) -> float:
    if dp == 1:
        return 0.0
    costs, gpu_type = cost_tables(problem), problem.gpu_types[0]
    elements, seen = 0.0, set[str]()
    for index in stage.indices():
        cost = costs.operator(index, resolve(sharding, problem.workload.operators[index]), samples, gpu_type)
        elements += sum(count for parameter, count in cost.parameters if parameter.tie not in seen)
        if not problem.runtime.reduces_ties_by_use:  # A weight that the stage has twice travels once.
            seen.update(parameter.tie for parameter, _ in cost.parameters if parameter.tie is not None)
    sizes = tuple(axis.size for axis in sharding)
    axes = tuple(number for number, axis in enumerate(sharding) if axis.split == "batch")
    num_bytes = elements * problem.runtime.travelling_gradient_bytes
    return max(
        problem.hardware.collective("all_reduce", num_bytes, [stage.devices[local] for local in group]).alone_s
        for group in groups(sizes, axes)
    )
