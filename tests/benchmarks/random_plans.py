"""Random plans in array form, every one different: what a searcher that knows nothing would ask for."""

from __future__ import annotations

import numpy as np

from simulator.fast.estimate import FastEstimator, PlanArrays, StageColumns
from simulator.fast.plans import SCHEDULES
from simulator.plan import Axis


class RandomPlans:
    """Draws plans: 1 to 8 stages of equal devices, cuts at any operator, one to three strategies in each stage
    (tensor and data parallel, with and without sequence parallelism and ZeRO-1), recomputed layers, microbatches.

    Args:
        estimator: Whose numbers to use.
        seed: Of the draw.
    """

    def __init__(self, estimator: FastEstimator, seed: int = 0) -> None:
        self.estimator = estimator
        self.problem = estimator.problem
        self.random = np.random.default_rng(seed)
        self._strategies: dict[int, list[int]] = {}

    def strategies(self, num_devices: int) -> list[int]:
        """Return the numbers of all strategies over so many devices."""
        if num_devices not in self._strategies:
            self._strategies[num_devices] = [
                self.estimator.strategy((Axis("batch", num_devices // tp, zero), Axis(word, tp)))
                for tp in (1, 2, 4, 8)
                if num_devices % tp == 0
                for word in (("tensor", "tensor_sequence") if tp > 1 else ("tensor",))
                for zero in ((0, 1) if num_devices > tp else (0,))
            ]
        return self._strategies[num_devices]

    def one(self) -> tuple[list[StageColumns], int, int, str]:
        """Return one plan, as ``PlanArrays.of`` takes it."""
        problem, random = self.problem, self.random
        count = len(problem.workload)
        num_stages = 2 ** int(random.integers(0, 4))
        each = problem.num_devices // num_stages
        cuts = sorted(random.choice(np.arange(1, count), num_stages - 1, replace=False).tolist())
        stages = []
        for position, (first, stop) in enumerate(zip([0, *cuts], [*cuts, count], strict=True)):
            inner = {int(cut) for cut in random.integers(first + 1, stop + 1, int(random.integers(0, 3))) if cut < stop}
            stops = [*sorted(inner), stop]
            choices = self.strategies(each)
            strategies = [choices[int(random.integers(len(choices)))] for _ in stops]
            segments = []
            if random.integers(2):
                bounds = [(max(a, first), min(b, stop)) for a, b in problem.workload.layers]
                segments = [(a, b) for a, b in bounds if a < b and random.random() < 0.7]
            devices = self.estimator.placement(range(position * each, (position + 1) * each))
            stages.append(StageColumns(devices, stops, strategies, segments))
        size = max(problem.num_devices, each * 2 ** int(random.integers(0, 3)))
        return stages, size, problem.global_batch // size, ("1f1b", "gpipe")[int(random.integers(2))]

    def many(self, count: int) -> PlanArrays:
        """Return many plans."""
        drawn = [self.one() for _ in range(count)]
        stages = [stage for one, *_ in drawn for stage in one]

        def ints(values) -> np.ndarray:  # type: ignore[no-untyped-def]
            return np.array(list(values), dtype=np.int64)

        def offsets(counts) -> np.ndarray:  # type: ignore[no-untyped-def]
            return np.concatenate([[0], np.cumsum(ints(counts))])

        return PlanArrays(
            stage_offsets=offsets(len(one) for one, *_ in drawn),
            placements=ints(stage.placement for stage in stages),
            warmups=np.zeros(len(stages), dtype=np.int64),
            run_offsets=offsets(len(stage.stops) for stage in stages),
            run_stops=ints(stop for stage in stages for stop in stage.stops),
            strategies=ints(strategy for stage in stages for strategy in stage.strategies),
            segment_offsets=offsets(len(stage.segments) for stage in stages),
            segment_firsts=ints(first for stage in stages for first, _ in stage.segments),
            segment_stops=ints(stop for stage in stages for _, stop in stage.segments),
            microbatch_size=ints(size for _, size, _, _ in drawn),
            num_microbatches=ints(number for _, _, number, _ in drawn),
            schedule=ints(SCHEDULES[schedule] for *_, schedule in drawn),
            reduces_every=np.zeros(count, dtype=np.int64),
            reshards=np.ones(count, dtype=np.int64),
            overlaps=np.ones(count, dtype=np.int64),
        )

    def operators(self, count: int) -> tuple[np.ndarray, ...]:
        """Return many plans operator by operator, as ``PlanArrays.from_operators`` takes them."""
        size = len(self.problem.workload)
        stage, strategy, segment = (np.zeros((count, size), dtype=np.int8) for _ in range(3))
        drawn = [self.one() for _ in range(count)]
        for row, (stages, *_) in enumerate(drawn):
            first = 0
            for position, one in enumerate(stages):
                stage[row, first : one.stops[-1]] = position
                for stop, number in zip(one.stops, one.strategies, strict=True):
                    strategy[row, first:stop] = number
                    first = stop
                for number, (start, stop) in enumerate(one.segments):
                    segment[row, start:stop] = number + 1
        return (
            stage,
            strategy,
            segment,
            np.array([one.placement for stages, *_ in drawn for one in stages]),
            np.array([size for _, size, _, _ in drawn]),
            np.array([number for _, _, number, _ in drawn]),
            np.array([SCHEDULES[schedule] for *_, schedule in drawn]),
        )
