"""Megatron-LM: a grid over its five global options.

Source: Aceso (EuroSys 2024), section 5 "Baseline systems": tp, dp, pp, microbatch size and recomputation
on or off, each the same for the whole model, every combination scored by a performance model and the best
taken. Megatron-LM itself: Narayanan et al., SC 2021.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from searchers.base import CandidateSearcher, Ledger, check_least
from searchers.degrees import largest_profiled, microbatch_sizes
from searchers.scores import Objective
from simulator.divisors import divisors
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.uniform import uniform_plan


class MegatronGrid(CandidateSearcher):
    """All combinations of tp, dp, pp, microbatch and recomputation that use every device.

    Tensor parallelism stays inside a node (Narayanan et al., takeaway 1). Microbatches are those that cut a replica's
    share of the batch evenly. The order is that of growing pp, tp, microbatch, without recomputation first, so the
    first of equals is the simplest.

    Args:
        max_microbatch: Largest microbatch in samples per replica; None for the largest that Aceso profiled: 8 of text,
            64 of images.
        powers_of_two: Only such microbatches, as in Aceso's profiles.
        recompute: Recomputation modes in the grid.
        tensor_across_nodes: Allow tp larger than a node.
        sequence_parallel: Split what tensor parallelism would replicate (later Megatron-LM).
        objective: See `searchers.base.Searcher`.
        keep: How many of the best plans to return.
    """

    name = "megatron-grid"
    paper = "Narayanan et al., SC 2021; grid of Aceso, EuroSys 2024, section 5"

    def __init__(
        self,
        *,
        max_microbatch: int | None = None,
        powers_of_two: bool = False,
        recompute: tuple[str, ...] = ("none", "full"),
        tensor_across_nodes: bool = False,
        sequence_parallel: bool = False,
        objective: str | Objective = "paper",
        keep: int = 5,
    ) -> None:
        super().__init__(objective=objective, keep=keep)
        check_least(1, max_microbatch=max_microbatch)
        self.max_microbatch = max_microbatch
        self.powers_of_two = powers_of_two
        self.recompute = recompute
        self.tensor_across_nodes = tensor_across_nodes
        self.sequence_parallel = sequence_parallel

    def candidates(self, problem: Problem, random: np.random.Generator, ledger: Ledger) -> Iterator[Plan]:
        """Yield the legal combinations."""
        num_devices = problem.num_devices
        largest = self.max_microbatch or largest_profiled(problem.workload)
        max_tp = num_devices if self.tensor_across_nodes else problem.hardware.cluster.devices_per_node
        for pp in divisors(num_devices):
            for tp in divisors(num_devices // pp):
                if tp > max_tp:
                    continue
                dp = num_devices // (pp * tp)
                sizes = microbatch_sizes(problem.global_batch, dp, largest, powers_of_two=self.powers_of_two)
                for microbatch in sizes:
                    for recompute in self.recompute:
                        try:
                            plan = uniform_plan(
                                problem,
                                tp=tp,
                                pp=pp,
                                dp=dp,
                                microbatch=microbatch,
                                recompute=recompute,
                                sequence_parallel=self.sequence_parallel and tp > 1,
                            )
                        except ValueError as error:  # this combination is not legal for the model
                            ledger.refuse(error)
                            continue
                        yield plan
