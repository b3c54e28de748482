"""DAPPLE's planner: partition, replication and placement that minimise the pipeline latency."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from searchers.dapple.chain import Chain
from searchers.dapple.communication import CommunicationCosts
from searchers.dapple.compiled_planner import plan as fill_table
from searchers.dapple.formula import ExpandedStage, check_rule, pipeline_latency_s, pivot_stage
from searchers.dapple.placement import POLICIES, PlacementGraph, devices_between, reachable

WARMUPS = ("p_a", "p_b")


@dataclass(frozen=True)
class PlannerOptions:
    """Named choices of the planner.

    Attributes:
        pivot, ending: ``printed`` or ``corrected`` rule (`searchers.dapple.formula`).
        policies: Placement policies whose compositions are tried.
        scatter: Which machines Scatter First takes from: ``used`` (the paper) or ``all`` (its released planner).
        whole_samples: A replica takes whole samples, the largest slice counts; else slices are taken as even,
            15 replicas of 32 samples included, as in the paper.
        executable: No more replicas than samples in a microbatch; else slices below one sample count too.
        check_memory: Stages must fit their GPUs' memory.
        warmup: Microbatches in flight that memory is checked for: ``p_a`` or ``p_b``.
        one_stage: Data parallelism, a pipeline of one stage, competes with the others.
        max_stages: Stages at most; 0 for no limit.
        max_replicas: Replicas of a stage at most; 0 for no limit, 1 for straight pipelines.
    """

    pivot: str = "corrected"
    ending: str = "corrected"
    policies: tuple[str, ...] = POLICIES
    scatter: str = "used"
    whole_samples: bool = False
    executable: bool = True
    check_memory: bool = True
    warmup: str = "p_a"
    one_stage: bool = True
    max_stages: int = 0
    max_replicas: int = 0

    def __post_init__(self) -> None:
        check_rule("pivot", self.pivot)
        check_rule("ending", self.ending)
        if self.warmup not in WARMUPS:
            raise ValueError(f"warmup must be one of {', '.join(WARMUPS)}, got {self.warmup!r}")


@dataclass(frozen=True)
class PipelinePlan:
    """Stages of layers on devices.

    Attributes:
        cuts: Layers at which stages begin, and the number of layers.
        devices: GPU ids of each stage.
        microbatch: Samples per microbatch.
        num_microbatches: M.
        recompute: Only what enters a stage is kept.
        latency_s: L by the formula; infinity if unknown.
    """

    cuts: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    microbatch: int
    num_microbatches: int
    recompute: bool = False
    latency_s: float = float("inf")

    @property
    def num_stages(self) -> int:
        """Stages."""
        return len(self.devices)

    @property
    def words(self) -> str:
        """``DP``, ``straight`` or replicas stage by stage, as in the paper's Table 4."""
        if self.num_stages == 1:
            return "DP" if len(self.devices[0]) > 1 else "single device"
        replicas = [len(devices) for devices in self.devices]
        return "straight" if max(replicas) == 1 else ":".join(str(count) for count in replicas)


@dataclass(frozen=True)
class Planner:
    """Everything about a problem that the formula needs.

    Attributes:
        chain: The model.
        communication: The cluster.
        gradient_bytes: Per parameter, as it travels.
        state_bytes: Per parameter, on the device.
        capacity_bytes: Of the smallest device.
        options: Choices.
        recompute_factor: Backward time of a recomputed stage grows by this share of its forward time.
    """

    chain: Chain
    communication: CommunicationCosts
    gradient_bytes: float
    state_bytes: float
    capacity_bytes: float
    options: PlannerOptions = PlannerOptions()
    recompute_factor: float = 1.0

    def expanded(self, plan: PipelinePlan) -> list[ExpandedStage]:
        """Return the computation stages of a plan with the transfers between them."""
        chain, found = self.chain, []
        backward = self._backward(plan.recompute)
        for position, devices in enumerate(plan.devices):
            low, high = plan.cuts[position], plan.cuts[position + 1]
            if position > 0:
                size = float(chain.boundary_bytes[low]) * plan.microbatch
                transfer = self.communication.transfer_s(size, plan.devices[position - 1], devices)
                found.append(ExpandedStage(transfer, transfer))
            part = self._slice(plan.microbatch, len(devices))
            elements = float(chain.parameters[high] - chain.parameters[low]) - chain.tied_parameters(low, high)
            gradients = self.gradient_bytes * elements
            found.append(
                ExpandedStage(
                    forward_s=float(chain.forward_s[high] - chain.forward_s[low]) * part,
                    backward_s=float(backward[high] - backward[low]) * part,
                    all_reduce_s=self.communication.all_reduce_s(gradients, devices),
                )
            )
        return found

    def held_bytes(self, plan: PipelinePlan) -> float:
        """Return what the fullest stage holds, as memory is checked."""
        chain, held = self.chain, []
        for position, devices in enumerate(plan.devices):
            low, high = plan.cuts[position], plan.cuts[position + 1]
            part = self._slice(plan.microbatch, len(devices))
            behind = plan.num_stages - position
            in_flight = min(plan.num_microbatches, 2 * behind - 1 if self.options.warmup == "p_b" else behind)
            states = self.state_bytes * float(chain.parameters[high] - chain.parameters[low])
            saved = part * float(chain.saved_bytes[high] - chain.saved_bytes[low])
            entering = in_flight * part * float(chain.boundary_bytes[low])
            held.append(states + entering + (saved if plan.recompute else in_flight * saved))
        return max(held)

    def _slice(self, microbatch: int, replicas: int) -> float:
        return float(-(-microbatch // replicas)) if self.options.whole_samples else microbatch / replicas

    def latency_s(self, plan: PipelinePlan) -> float:
        """Return L of a plan by the formula."""
        return pipeline_latency_s(self.expanded(plan), plan.num_microbatches, self.options.pivot, self.options.ending)

    def pivot(self, plan: PipelinePlan) -> int:
        """Return the pivot among the expanded stages of a plan."""
        return pivot_stage(self.expanded(plan), plan.num_microbatches, self.options.pivot)

    def best(
        self, microbatch: int, num_microbatches: int, *, recompute: bool = False, bound_s: float = float("inf")
    ) -> PipelinePlan | None:
        """Return the best plan for one microbatch size, by dynamic programming.

        Args:
            microbatch: Samples per microbatch.
            num_microbatches: M.
            recompute: Keep only what enters a stage.
            bound_s: Latency to beat.

        Returns:
            The plan, or None if none fits (and beats the bound).
        """
        options, chain = self.options, self.chain
        total = sum(self.communication.sizes)
        most = min(microbatch if options.executable else total, options.max_replicas or total, total)
        graph = _placements(self.communication.sizes, options.policies, options.scatter, 1 if most == 1 else total)
        taken, rest = _lines(self.communication, graph)
        zeros = np.zeros_like(chain.saved_bytes)
        saved, kept = (chain.saved_bytes, zeros) if recompute else (zeros, chain.saved_bytes)
        _, layer, state, _, from_layer, from_state, _ = fill_table(
            chain.forward_s,
            self._backward(recompute),
            chain.parameters * self.gradient_bytes,
            chain.parameters * self.state_bytes,
            saved,
            kept,
            chain.boundary_bytes,
            microbatch,
            num_microbatches,
            options.whole_samples,
            most,
            np.array(graph.states, dtype=np.int64),
            np.cumsum([0, *(len(found) for found in graph.successors)]).astype(np.int64),
            np.array([after for found in graph.successors for after, _ in found], dtype=np.int64),
            taken,
            rest,
            np.array(graph.sizes, dtype=np.int64),
            self.communication.rates,
            self.capacity_bytes if options.check_memory else float("inf"),
            options.warmup == "p_b",
            options.pivot == "corrected",
            options.ending == "corrected",
            options.one_stage,
            options.max_stages or total,
            bound_s,
        )
        if layer < 0:
            return None
        chosen = [(layer, state)]
        while chosen[-1][0] > 0:
            chosen.append((int(from_layer[chosen[-1]]), int(from_state[chosen[-1]])))
        chosen.reverse()
        cuts = (*(int(cut) for cut, _ in chosen), chain.num_layers)
        used = [*(graph.states[place] for _, place in chosen), graph.sizes]
        devices = tuple(devices_between(before, after, graph.sizes) for before, after in pairwise(used))
        found = PipelinePlan(cuts, devices, microbatch, num_microbatches, recompute)
        return replace(found, latency_s=self.latency_s(found))

    def _backward(self, recompute: bool) -> np.ndarray:
        again = self.recompute_factor if recompute else 0.0
        return self.chain.backward_s + again * self.chain.forward_s


@lru_cache(maxsize=16)
def _placements(sizes: tuple[int, ...], policies: tuple[str, ...], scatter: str, largest: int) -> PlacementGraph:
    return reachable(sizes, policies, scatter, largest)


@lru_cache(maxsize=16)
def _lines(communication: CommunicationCosts, graph: PlacementGraph) -> tuple[np.ndarray, np.ndarray]:
    """Return all-reduce lines of the GPUs taken per step and of those left per state."""
    taken = [
        communication.all_reduce_line(devices_between(graph.states[before], graph.states[after], graph.sizes))
        for before, found in enumerate(graph.successors)
        for after, _ in found
    ]
    rest = [communication.all_reduce_line(devices_between(state, graph.sizes, graph.sizes)) for state in graph.states]
    return np.array(taken, dtype=np.float64).reshape(-1, 2), np.array(rest, dtype=np.float64)
