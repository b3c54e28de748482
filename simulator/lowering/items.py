"""Items: what one stage does for one microbatch, and what each thing waits for.

Items are computation (a run of operator phases) and collectives. Most are *chained*: each waits for the
one before. Gathers of sharded parameters and reductions of gradients are not: they have streams of their
own and are tied to the chain by ``after`` alone. Nor are copies of reduced gradients out of their buckets, for which
nothing waits that leaves the stage, nor collectives that a runtime lets travel beside the gradients
of one operator; these keep to the stream of their chained likes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import prod

from hardware_models.runtime import Runtime
from simulator.fidelity import Fidelity
from simulator.lowering.mesh import MeshCollective
from simulator.lowering.view import StageView
from simulator.operator_cost import BACKWARD_WEIGHT_ALONE
from simulator.segments import Segment
from workloads.kinds.base import BACKWARD_INPUT, BACKWARD_WEIGHT

Part = tuple[int, str]
"""An operator index and a phase."""

GRADIENTS = (BACKWARD_INPUT, BACKWARD_WEIGHT)
OF_OPERATORS = ("tensor parallel", "resharding")
"""Causes of collectives inside and between operators."""


def stream_role(role: str, runtime: Runtime) -> str:
    """Return what the stream is for that carries a collective; ``data`` is both gathers and reductions."""
    return "data" if runtime.one_communicator and role in ("gather", "reduce") else role


@dataclass
class Item:
    """One task of a stage's program.

    Attributes:
        cause: What its time is spent on.
        parts: Operator phases computed (or copies), in order; empty for collectives.
        collective: What is communicated; None for computation.
        role: What a collective is for: ``tensor``, ``gather`` or ``reduce``; each has a stream (`stream_role`).
        chained: The next chained item waits for it.
        after: Positions of further items that must have ended.
        early: Without such it was begun before the pass (``has_head_start``).
        operator: First operator concerned, for names.
        num_calls: Of a collective: its latency and what it costs the host count so often.
        num_entries: Of a collective: tensors, each of one rank, that the host lists for each call.
        waits: No work; the host goes on when all before it has ended.
        owner: Of a collective: the operator whose duration contains it on some device types; -1 if it is on none.
        held: Of a collective: the operator whose pass waits for it; -1 for none of the stage.
        holds_backward: That pass is backward.
        made_by: Of a gather of shards of the sequence: the operator and phase that has just made them.
    """

    cause: str
    parts: list[Part] = field(default_factory=list)
    collective: MeshCollective | None = None
    role: str = "tensor"
    chained: bool = True
    after: tuple[int, ...] = ()
    early: bool = False
    operator: int = -1
    num_calls: int = 1
    num_entries: int = 0
    waits: bool = False
    owner: int = -1
    held: int = -1
    holds_backward: bool = False
    made_by: Part | None = None

    @property
    def has_head_start(self) -> bool:
        """Whether it waits for nothing: neither for its device, nor as its host does for what the pass receives."""
        return self.early and not self.after

    @property
    def hands_over(self) -> bool:
        """Whether it is a collective that the computation of operators stands still for (``Runtime.handover_s``)."""
        return self.collective is not None and self.chained and self.cause in OF_OPERATORS


@dataclass(frozen=True)
class Program:
    """What one stage does for one microbatch, and every other stage of its form.

    Attributes:
        items: In order.
        first: First operator of the stage that the items name operators of.
        segments: Work of the items, by what it depends on (``StagePlacement.segments``).
    """

    items: list[Item]
    first: int
    segments: dict[Hashable, list[Segment]] = field(default_factory=dict)


@dataclass
class ItemList:
    """A list of items in the making.

    Attributes:
        view, fidelity: Of the stage, and what is simulated.
        items: So far.
    """

    view: StageView
    fidelity: Fidelity
    items: list[Item] = field(default_factory=list)
    _handed_over: frozenset[int] = frozenset()  # Operators whose gradients the pass adds to none.
    _pending_after: tuple[int, ...] = ()  # What the next item waits for beside the chain.

    def _compute(self, cause: str, index: int, phases: tuple[str, ...]) -> None:
        alone = index in self._handed_over
        parts = [(index, BACKWARD_WEIGHT_ALONE if alone and phase == BACKWARD_WEIGHT else phase) for phase in phases]
        last = self.items[-1] if self.items else None
        if (
            self.fidelity.merge
            and last is not None
            and last.collective is None
            and last.cause == cause
            and not self._pending_after
        ):
            last.parts += parts
            return
        self.items.append(Item(cause=cause, parts=parts, after=self._take_pending(), operator=index))

    def _collective(
        self,
        item: MeshCollective,
        index: int,
        owner: int = -1,
        held: int = -1,
        *,
        holds_backward: bool = False,
        made_by: Part | None = None,
    ) -> None:
        """Add a collective, unless the durations of its owner contain it."""
        if owner >= 0 and self.view.contains(owner, item):
            return
        types = self.view.gpu_types
        contained = owner >= 0 and len(types) > 1 and any(self.view.contains(owner, item, [each]) for each in types)
        cause = "resharding" if item.moves_batch else "tensor parallel"
        enabled = self.fidelity.resharding if item.moves_batch else self.fidelity.tensor_parallel
        if enabled:
            self.items.append(
                Item(
                    cause=cause,
                    collective=item,
                    after=self._take_pending(),
                    operator=index,
                    owner=owner if contained else -1,
                    held=held,
                    holds_backward=holds_backward,
                    made_by=made_by,
                )
            )

    def _beside(self, item: MeshCollective, index: int) -> int:
        """Add a collective that starts after what is there and that nothing waits for yet; return its position."""
        last = self._last_chained()
        after = self._pending_after if last is None else (last, *self._pending_after)
        self.items.append(Item(cause="tensor parallel", collective=item, chained=False, after=after, operator=index))
        return len(self.items) - 1

    def _take_pending(self) -> tuple[int, ...]:
        pending, self._pending_after = self._pending_after, ()
        return pending

    def _last_chained(self) -> int | None:
        for position in range(len(self.items) - 1, -1, -1):
            if self.items[position].chained:
                return position
        return None

    def _num_entries(self, collective: MeshCollective) -> int:
        """Return how many tensors, each of one rank, the host lists for a call of ZeRO-3."""
        if self.view.costs.problem.runtime.parameter_calls_above is None:
            return 0
        return prod(collective.sizes[axis] for axis in collective.axes)
