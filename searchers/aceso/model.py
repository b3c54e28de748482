"""Aceso's performance model of a whole configuration, and what its search asks of one stage.

Time, Equation 2: a stage's iteration is warm-up (one forward through all stages), steady state (N microbatches of
its own) and cool-down (one backward through all), so ``T_i = (N - 1) t_i + sum_j t_j``, plus its gradients' sum over
replicas; the slowest stage is the iteration. Memory, Equation 1: model states, activations of as many microbatches
as stages are behind, the largest recomputed run, and what the allocator holds besides.

Stages are priced one by one and remembered, so that a change of two stages costs two stages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from searchers.aceso.arrays import (
    MEMORY,
    NEIGHBOUR_BITS,
    NUM_FIGURES,
    TIME_BACKWARD,
    TIME_FORWARD,
    TIME_RECOMPUTE,
    TIME_RESHARD,
    TIME_SYNC,
    TIME_TRANSFER,
)
from searchers.aceso.border_kernels import CELLS, GPUS, OPERATORS, Known, nothing_known
from searchers.aceso.configuration import Configuration, StageChoice, prefix_gpus, to_plan
from searchers.aceso.narrow_borders import narrow_borders
from searchers.aceso.operator_columns import tied_operators
from searchers.aceso.prices import Price, StagePrice
from searchers.aceso.release_tables import release_arrays
from searchers.aceso.stage_kernels import stage_figures
from searchers.aceso.tables import Tables, cost_arrays
from simulator.closed_forms.stage_prices import tied_s
from simulator.costs import CostTables, cost_tables
from simulator.lowering.lower import stage_views
from simulator.problem import Problem

COMPATIBILITIES = ("paper", "release")
GIVEN, LARGEST_FIRST, WORTH_FIRST, CHEAPEST, RELEASED = range(5)
LARGE = 4000
"""Operators from which on a price is taken more cheaply: one order of recomputation, no polishing of borders."""
RECOMPUTE_ORDERS = {"largest": LARGEST_FIRST, "worth": WORTH_FIRST, "cheapest": CHEAPEST, "release": RELEASED}


class PerformanceModel:
    """Prices configurations.

    Args:
        problem: What is planned for.
        tables: Its arrays.
        compat: ``paper`` or ``release``.
        recompute: How recomputed operators are chosen: ``largest`` activation first (the paper's words), ``worth``:
            most bytes freed per second first, ``cheapest``: whichever takes less time, stage by stage, ``release``:
            as the public code does, which recomputes more than is needed.
    """

    def __init__(self, problem: Problem, tables: Tables, *, compat: str = "paper", recompute: str = "cheapest") -> None:
        self.problem = problem
        self.tables = tables
        self.space = tables.space
        if self.space.num_cells > CELLS:
            sizes = f"{len(self.space.degrees)} * {len(self.space.samples)} * {self.space.partitions}"
            raise ValueError(
                f"tensor degrees * numbers of samples per GPU * partitions must be at most {CELLS} for Aceso, got "
                f"{sizes}; lower largest_samples"
            )
        self.compat = compat
        self.order = RECOMPUTE_ORDERS[recompute]
        self.num_operators = len(problem.workload)
        self.is_large = self.num_operators > LARGE
        if self.is_large and self.order == CHEAPEST:
            self.order = WORTH_FIRST
        self.narrow = narrow_borders(problem.workload)
        cluster = problem.hardware.cluster
        self.num_devices = problem.num_devices
        self.per_node = min(cluster.devices_per_node, problem.num_devices)
        if compat == "release":
            limit = cluster.memory_bytes(0) if problem.memory_limit_bytes is None else problem.memory_limit_bytes
            self.limit_bytes = float(limit)
        else:
            self.limit_bytes = float(min(problem.capacity_bytes(device) for device in range(self.num_devices)))
        self.evaluations = 0
        self.stages_priced = 0
        self.last_evaluation: int | None = None
        passes = tables.arrays.columns[:, :2, :].sum(axis=(1, 2))
        self._whole_s = [float(seconds) for seconds in passes]
        self._known: dict[tuple[object, ...], StagePrice] = {}
        self._cells: dict[tuple[object, ...], NDArray[np.int32]] = {}
        self._borders: tuple[tuple[float, int], Known] | None = None
        self._tied = tied_operators(problem.workload)
        self._tied_s: dict[tuple[tuple[int, int, int], ...], float] = {}

    def __getstate__(self) -> dict[str, object]:
        """Return what another process needs: the arrays, without what was remembered."""
        return {**self.__dict__, "_known": {}, "_cells": {}, "_borders": None, "_tied_s": {}}

    @classmethod
    def of(
        cls,
        problem: Problem,
        costs: CostTables,
        *,
        compat: str = "paper",
        recompute: str = "cheapest",
        samples: int = 8,
    ) -> PerformanceModel:
        """Return the model of a problem.

        Args:
            problem: What is planned for.
            costs: Shared cost tables (the paper's model).
            compat: ``paper`` or ``release``.
            recompute: See the class.
            samples: Largest samples per GPU and microbatch (the paper's model; the release takes the profile's).

        Raises:
            ValueError: If ``compat`` is neither, or the release's model lacks its profile.
        """
        if compat not in COMPATIBILITIES:
            raise ValueError(f"compat must be one of {', '.join(COMPATIBILITIES)}, got {compat!r}")
        if recompute not in RECOMPUTE_ORDERS:
            raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE_ORDERS)}, got {recompute!r}")
        tables = release_arrays(problem) if compat == "release" else cost_arrays(problem, costs, samples)
        return cls(problem, tables, compat=compat, recompute=recompute)

    def known_stages(self) -> Known:
        """Return what ``balanced_cuts`` remembers; an empty table where limit or recomputation have changed."""
        rules = (float(self.limit_bytes), self.order)
        if self._borders is None or self._borders[0] != rules:
            assert self.per_node < GPUS, "keys have room for no more"
            if self.num_operators >= OPERATORS:
                raise ValueError(
                    f"Aceso's search must have fewer than {OPERATORS:,} operators, got {self.num_operators:,}; "
                    "search a model of fewer layers"
                )
            self._borders = (rules, nothing_known())
        return self._borders[1]

    def microbatches(self, configuration: Configuration) -> int:
        """Return how many microbatches an iteration has."""
        return self.problem.global_batch // configuration.microbatch

    def allows(self, gpus: int, tp: int, microbatch: int) -> bool:
        """Return whether the tables have what a stage of ``gpus`` GPUs with tensor degree ``tp`` would cost."""
        replicas = gpus // tp
        return (
            tp in self.space.degrees
            and gpus % tp == 0
            and microbatch % replicas == 0
            and microbatch // replicas in self.space.samples
            and self.problem.global_batch % microbatch == 0
        )

    def cells(self, stage: StageChoice, microbatch: int) -> NDArray[np.int32] | None:
        """Return the row of the tables for each operator of a stage; None if one has none."""
        key = (stage, microbatch)
        found = self._cells.get(key)
        if found is None:
            parts = []
            for run in stage.runs:
                if not self.allows(stage.gpus, run.tp, microbatch):
                    return None
                cell = self.space.cell(run.tp, microbatch // (stage.gpus // run.tp), run.partition)
                parts.append(np.full(run.count, cell, np.int32))
            found = np.concatenate(parts)
            if len(self._cells) > 50_000:
                self._cells.clear()
            self._cells[key] = found
        return found

    def around(self, stages: Sequence[StageChoice], position: int, microbatch: int) -> int:
        """Return what stands at the borders of a stage, as bits; the release takes it to be as the stage itself."""
        if self.compat == "release":
            return 0
        before = self._neighbour(stages[position - 1], -1, microbatch) if position else 0
        after = self._neighbour(stages[position + 1], 0, microbatch) if position + 1 < len(stages) else 0
        return before | after << NEIGHBOUR_BITS

    def _neighbour(self, choice: StageChoice, run: int, microbatch: int) -> int:
        """Return a neighbour as ``stage_kernels.border_time`` reads it; 0 where its tables have no such cell."""
        tp, partition = choice.runs[run].tp, choice.runs[run].partition
        if not self.allows(choice.gpus, tp, microbatch):
            return 0
        cell = self.space.cell(tp, microbatch // (choice.gpus // tp), partition)
        return 1 | (choice.gpus - 1).bit_length() << 1 | cell << 5

    def links(self, position: int, num_stages: int, first_gpu: int, gpus: int, around: int = 0) -> int:
        """Return which neighbours a stage has, whether they are on other nodes, and what they are, as bits."""
        bits = (position > 0) | (position + 1 < num_stages) << 1 | around << 4
        bits |= (first_gpu % self.per_node == 0) << 2 | ((first_gpu + gpus) % self.per_node == 0) << 3
        return bits

    def stage(
        self,
        choice: StageChoice,
        start: int,
        position: int,
        num_stages: int,
        first_gpu: int,
        microbatch: int,
        flags: bytes | None = None,
        around: int = 0,
    ) -> StagePrice:
        """Return the price of a stage.

        Args:
            choice: The stage.
            start: Its first operator.
            position, num_stages: Where it is in the pipeline.
            first_gpu: GPUs before it.
            microbatch: Samples over all its replicas.
            flags: Recomputed operators; None to choose them.
            around: What stands at its borders, see the method; 0 where that is as the stage itself.
        """
        links = self.links(position, num_stages, first_gpu, choice.gpus, around)
        in_flight = num_stages - position
        if self.compat == "paper":
            in_flight = min(in_flight, self.problem.global_batch // microbatch)
        key = (choice, start, links, in_flight, microbatch, flags)
        found = self._known.get(key)
        if found is None:
            found = self._priced(choice, start, links, in_flight, microbatch, flags)
            if len(self._known) > 400_000:
                self._known.clear()
            self._known[key] = found
        return found

    def _priced(
        self, choice: StageChoice, start: int, links: int, in_flight: int, microbatch: int, given: bytes | None
    ) -> StagePrice:
        self.stages_priced += 1
        cells = self.cells(choice, microbatch)
        if cells is None:
            inf = float("inf")
            return StagePrice(inf, inf, 0.0, 0.0, 0.0, 0.0, inf, bytes(choice.count))
        figures = np.zeros(NUM_FIGURES)
        flags = np.zeros(choice.count, np.uint8)
        if given is not None:
            flags[:] = np.frombuffer(given, np.uint8)
        stage_figures(
            self.tables.arrays, cells, start, start + choice.count, choice.gpus, in_flight, links, self.limit_bytes,
            GIVEN if given is not None else self.order, flags, figures,
        )  # fmt: skip
        return StagePrice(
            forward_s=float(figures[TIME_FORWARD]),
            backward_s=float(figures[TIME_BACKWARD]),
            recompute_s=float(figures[TIME_RECOMPUTE]),
            transfer_s=float(figures[TIME_TRANSFER]),
            reshard_s=float(figures[TIME_RESHARD]),
            sync_s=float(figures[TIME_SYNC]),
            memory_bytes=float(figures[MEMORY]),
            flags=flags.tobytes(),
        )

    def price(self, configuration: Configuration) -> Price:
        """Return the price of a configuration (counted as one evaluation)."""
        self.evaluations += 1
        cuts, first = configuration.cuts, prefix_gpus(configuration)
        given = configuration.recompute
        stages = tuple(
            self.stage(
                choice, cuts[position], position, len(configuration.stages), first[position], configuration.microbatch,
                None if given is None else given[cuts[position] : cuts[position + 1]],
                self.around(configuration.stages, position, configuration.microbatch),
            )
            for position, choice in enumerate(configuration.stages)
        )  # fmt: skip
        iteration_s = self.iteration_s(stages, self.microbatches(configuration))
        if iteration_s < np.inf:
            iteration_s += self.tied_s(configuration)
        return Price(iteration_s, stages, self.limit_bytes)

    def tied_s(self, configuration: Configuration) -> float:
        """Return seconds of reducing weights that stages share, once per iteration (the release has none).

        Where one stage has them all, its gradients hold what it reduces.
        """
        if self.compat == "release" or not self._tied or len(configuration.stages) == 1:
            return 0.0
        cuts, first = configuration.cuts, prefix_gpus(configuration)
        places = [bisect_right(cuts, index) - 1 for index in self._tied]
        key = tuple(
            self._holder(configuration, first, place, index - cuts[place])
            for place, index in zip(places, self._tied, strict=True)
        )
        if len(set(places)) > 1 and key not in self._tied_s:
            plan = to_plan(configuration, bytes(self.num_operators), self.problem).canonical(self.problem.workload)
            costs = cost_tables(self.problem)
            self._tied_s[key] = tied_s(costs, stage_views(plan, costs))
        return self._tied_s.get(key, 0.0)

    @staticmethod
    def _holder(configuration: Configuration, first: Sequence[int], place: int, offset: int) -> tuple[int, int, int]:
        """Return what the layout of a weight depends on: the stage's devices, and the tensor degree of its operator."""
        stage = configuration.stages[place]
        ends = accumulate(run.count for run in stage.runs)
        run = next(run for run, end in zip(stage.runs, ends, strict=True) if offset < end)
        return first[place], stage.gpus, run.tp

    def may_price(self) -> bool:
        """Return whether the search that uses the model may price another configuration."""
        return self.last_evaluation is None or self.evaluations < self.last_evaluation

    @staticmethod
    def iteration_s(stages: Sequence[StagePrice], num_microbatches: int) -> float:
        """Return the iteration time of stages, Equation 2; infinite if one cannot run."""
        fill = sum(stage.time_s for stage in stages)
        if fill == np.inf:  # which no, or one, microbatch would multiply by -1, or by 0
            return fill
        return max((num_microbatches - 1) * stage.time_s + stage.sync_s for stage in stages) + fill

    def rough_s(self, configuration: Configuration) -> float:
        """Return a quick lower estimate: every stage works at the speed it would have on the whole model.

        Infinite where no stage can: an operator that the degree does not divide, such as 25 heads.
        """
        rate = 0.0
        for stage in configuration.stages:
            run = stage.runs[0]
            samples = configuration.microbatch // (stage.gpus // run.tp)
            rate += 1.0 / self._whole_s[self.space.cell(run.tp, samples, run.partition)]
        return self.microbatches(configuration) / rate if rate > 0 else np.inf

    def ideal_s(self, choice: StageChoice, start: int, microbatch: int) -> float:
        """Return what a stage would take if its GPUs shared the work of one without loss."""
        samples = self.space.samples[0]
        cell = self.space.cell(1, samples)
        columns = self.tables.arrays.columns[cell]
        stop = start + choice.count
        single = float(columns[0, start:stop].sum() + columns[1, start:stop].sum())
        return single * microbatch / samples / choice.gpus
