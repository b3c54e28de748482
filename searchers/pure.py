"""The fixed strategies that Galvatron compares itself with: one kind of parallelism each, and a fixed mix.

Source: Galvatron-BMW (TKDE 2024), section VI-A and Table II: PyTorch DDP, Megatron (tensor parallel),
PyTorch GPipe (pipeline), FairScale FSDP / ZeRO-3, and DeepSpeed 3D, which combines two-way tensor and
pipeline parallelism with data parallelism over the rest. Degrees are fixed, so the only choices left are
the microbatch and, where the model would not fit otherwise, recomputation.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from searchers.base import Ledger, Searcher, SearchResult
from searchers.budget import Budget
from searchers.degrees import microbatch_sizes
from searchers.scores import Objective
from simulator.plan import Plan, Stage
from simulator.problem import Problem
from simulator.uniform import uniform_plan

RECOMPUTE_RULES = ("if-needed", "never")


class PureStrategy(Searcher):
    """A strategy whose degrees follow from the number of devices.

    Microbatches are those that cut a replica's share of the batch evenly. With ``recompute="if-needed"`` each level of
    recomputation is tried only if no microbatch fits with less. ``"never"`` gives the rows of Galvatron's tables, where
    such a model is out of memory.

    Args:
        recompute: ``"if-needed"`` or ``"never"``.
        objective: See `searchers.base.Searcher`.
        keep: How many of the best plans to return.
    """

    paper = "Galvatron-BMW, TKDE 2024, section VI-A"
    recompute_levels: ClassVar[tuple[str, ...]] = ("none", "full")
    takes_largest: ClassVar[bool] = True

    def __init__(
        self, *, recompute: str = "if-needed", objective: str | Objective = "paper", keep: int = 5
    ) -> None:
        super().__init__(objective=objective, keep=keep)
        if recompute not in RECOMPUTE_RULES:
            raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE_RULES)}, got {recompute!r}")
        self.recompute = recompute

    @abstractmethod
    def degrees(self, num_devices: int) -> dict[str, Any]:
        """Return the arguments of `simulator.uniform.uniform_plan` that make the strategy."""

    def build(self, problem: Problem, microbatch: int, recompute: str) -> Plan:
        """Return the strategy's plan for one microbatch (samples per replica)."""
        degrees = self.degrees(problem.num_devices)
        return uniform_plan(problem, microbatch=microbatch, recompute=recompute, **degrees)

    def search(self, problem: Problem, budget: Budget | None = None, seed: int = 0) -> SearchResult:
        """Choose the microbatch by the strategy's rule, with as little recomputation as fits."""
        ledger = Ledger(self, problem, budget or Budget(), seed)
        dp = self.degrees(problem.num_devices).get("dp", 1)
        sizes = microbatch_sizes(problem.global_batch, dp)
        if not sizes:
            ledger.refuse(f"global_batch must be a multiple of dp, got {problem.global_batch} with dp={dp}")
        levels = self.recompute_levels if self.recompute == "if-needed" else ("none",)
        for level in levels:
            if self._try_level(problem, ledger, sizes, level):
                break
        return ledger.result()

    def _try_level(self, problem: Problem, ledger: Ledger, sizes: Sequence[int], level: str) -> bool:
        """Score microbatches from small to large until one does not fit; return whether any fits."""
        fitting: Plan | None = None
        for size in sizes:
            if ledger.spent:
                break
            try:
                plan = self.build(problem, size, level)
            except ValueError as error:  # these degrees are not legal for the model
                ledger.refuse(error)
                continue
            if not ledger.is_legal(plan):
                continue
            if not ledger.evaluate(plan).fits:
                break
            fitting = plan
        if fitting is not None and self.takes_largest:
            ledger.choose(fitting)
        return fitting is not None


class DistributedDataParallel(PureStrategy):
    """PyTorch DDP: a full replica per device.

    Microbatch rule: the largest that fits, as in Galvatron's tables, where the whole local batch goes
    through at once unless memory forbids it.
    """

    name = "ddp"

    def degrees(self, num_devices: int) -> dict[str, Any]:
        """Return dp = all devices, gradients reduced while the last backward pass runs."""
        return {"dp": num_devices, "overlap_gradient_sync": True}


class MegatronTensorParallel(PureStrategy):
    """Megatron tensor parallelism over all devices, node borders or not.

    Microbatch rule: the largest that fits.
    """

    name = "megatron-tp"

    def degrees(self, num_devices: int) -> dict[str, Any]:
        """Return tp = all devices."""
        return {"tp": num_devices}


class FullyShardedDataParallel(PureStrategy):
    """FSDP / ZeRO-3: parameters, gradients and optimizer states sharded over all devices.

    Every backward pass scatters its gradients at once, so that they never lie whole on a device.
    Microbatch rule: the largest that fits.
    """

    name = "fsdp"

    def degrees(self, num_devices: int) -> dict[str, Any]:
        """Return dp = all devices, ZeRO level 3, which reduces gradients in every microbatch."""
        return {"dp": num_devices, "zero": 3, "overlap_gradient_sync": True}


class GPipe(PureStrategy):
    """GPipe: a pipeline over all devices; all forwards of an iteration run before its first backward.

    Microbatch rule: of those that fit, the one with the best objective, since Galvatron's authors "tune
    the number of micro-batches to minimize the bubbles". All microbatches are stored, so with a large batch
    it needs GPipe's own re-materialisation (Huang et al., NeurIPS 2019, section 2.3): the stage is one
    recomputed segment that keeps its inputs only.
    """

    name = "gpipe"
    recompute_levels = ("none", "stage")
    takes_largest = False

    def degrees(self, num_devices: int) -> dict[str, Any]:
        """Return pp = all devices under the GPipe schedule."""
        return {"pp": num_devices, "schedule": "gpipe"}

    def build(self, problem: Problem, microbatch: int, recompute: str) -> Plan:
        """Return the plan; ``"stage"`` makes each stage one recomputed segment."""
        if recompute != "stage":
            return super().build(problem, microbatch, recompute)
        plan = super().build(problem, microbatch, "none")
        stages = tuple(_recomputed_whole(stage) for stage in plan.stages)
        return replace(plan, stages=stages)


class DeepSpeed3D(PureStrategy):
    """DeepSpeed 3D: tp 2, pp 2, dp N / 4, the officially suggested mix.

    Microbatch rule: of those that fit, the one with the best objective (a large microbatch saves launches,
    a small one bubbles).
    """

    name = "deepspeed-3d"
    takes_largest = False

    def degrees(self, num_devices: int) -> dict[str, Any]:
        """Return tp 2, pp 2 and dp over the rest."""
        if num_devices % 4:
            raise ValueError(
                f"deepspeed-3d (tp 2, pp 2, dp N/4) needs a multiple of 4 devices, got {num_devices}; "
                f"choose a cluster with {max(4, num_devices // 4 * 4)}"
            )
        return {"tp": 2, "pp": 2, "dp": num_devices // 4}


def _recomputed_whole(stage: Stage) -> Stage:
    return replace(stage, recompute=stage.operators)
