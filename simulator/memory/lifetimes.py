"""Which tensors of a stage outlive a pass, and which operators' backward passes need them until when."""

from __future__ import annotations

from collections.abc import Callable

from simulator.lowering.program import StageView
from simulator.memory.events import RECEIVED, SAVED, SEGMENT, STAGE_OUTPUT
from simulator.operator_cost import OperatorCost
from simulator.saved import ends_at_parting, is_private, saved_tensors
from simulator.schedules.registry import schedule_named


def instance(name: str, again: bool) -> str:
    """Return the name of a tensor as it is first made, or as it is made again in the backward pass of its segment."""
    return f"{name}@again" if again else name


class Lifetimes:
    """What outlives a pass of a stage on one representative.

    Args:
        view: The stage.
        cost_of: Operator index to its cost on the representative.

    Attributes:
        segment_of: By operator, the recompute segment that it is in: its first operator, and the first behind it.
        savers: By tensor, the operators that save it.
        saves: By operator, names and bytes of what it saves.
        ends: By the first operator of a segment, what the segment makes for others, if that is held.
        kept: Tensors that outlive the forward pass, with their category.
    """

    def __init__(self, view: StageView, cost_of: Callable[[int], OperatorCost]) -> None:
        self.view = view
        self.cost_of = cost_of
        self.workload = view.costs.problem.workload
        self.segment_of = {
            index: (start, stop) for start, stop in view.stage.recompute for index in range(start, stop)
        }
        self._readers: dict[str, list[int]] = {}
        for index in view.operators:
            for tensor in dict.fromkeys(self.workload.operators[index].inputs):
                self._readers.setdefault(tensor, []).append(index)
        self.savers: dict[str, list[int]] = {}
        self.saves: dict[int, list[tuple[str, float]]] = {}
        for index in view.operators:
            self.saves[index] = list(self._saved(index).items())
            for name, _ in self.saves[index]:
                self.savers.setdefault(name, []).append(index)
        self.ends = self._held_ends()
        self.kept = self._kept_tensors()
        self._users = self._all_users()

    def _saved(self, index: int) -> dict[str, float]:
        """Return names and bytes of what an operator saves; of an input, the part that it copies."""
        saved = dict(saved_tensors(self.workload, index, self.cost_of(index)))
        inputs, segment = self.workload.operators[index].inputs, self.segment_of.get(index)
        for position, part in self.view.sliced_inputs(index).items():
            if inputs[position] in saved:
                saved[part if segment is None else f"{part} in {segment}"] = saved.pop(inputs[position])
        return saved

    def _held_ends(self) -> dict[int, list[str]]:
        """Return what segments make for others, by where they start, if it is held (``recompute_holds_ends``).

        Not between the halves of a backward pass, which such checkpointing knows nothing of.
        """
        held: dict[int, list[str]] = {}
        splits = schedule_named(self.view.plan.schedule).splits_backward
        if self.view.costs.problem.runtime.recompute_holds_ends and not splits:
            for start, stop in self.view.stage.recompute:
                for name in (name for index in range(start, stop) for name in self.workload.operators[index].outputs):
                    readers = self._readers.get(name, ())
                    if name in self.view.leaving or any(not start <= reader < stop for reader in readers):
                        held.setdefault(start, []).append(name)
        return held

    def _kept_tensors(self) -> dict[str, str]:
        """Return tensors that outlive the forward pass, with their category."""
        kept: dict[str, str] = {}
        for name, savers in self.savers.items():
            producer = self.workload.producer.get(name)
            for saver in savers:
                segment = self.segment_of.get(saver)
                if segment is None:
                    if not self.view.saves_gathered(saver, name):
                        kept[name] = SAVED
                elif not is_private(name) and (producer is None or not segment[0] <= producer < segment[1]):
                    kept.setdefault(name, SEGMENT)
        for index in self.view.operators:
            segment = self.segment_of.get(index)
            if segment is None:
                continue
            for name in self.workload.operators[index].inputs:
                producer = self.workload.producer.get(name)
                if producer is not None and not segment[0] <= producer < segment[1]:
                    kept.setdefault(name, SEGMENT)
        for name in self.view.leaving:
            kept.setdefault(name, STAGE_OUTPUT)
        for name in self.view.arrivals:
            kept.setdefault(name, RECEIVED)
        return kept

    def releases(self, with_inputs: bool, with_weights: bool) -> dict[int, list[str]]:
        """Return, per operator, the tensors that nothing needs after its backward pass; -1 for the end of it.

        A kept tensor is needed by every saver outside segments and by the segments that read it; a recomputed
        one by its savers in the segment. Weight gradients need what operators with parameters saved.
        """
        found: dict[int, list[str]] = {}
        needs_later = {} if with_inputs and with_weights else self._users_for_weights()
        for name, users in self._users.items():
            weighted = needs_later.get(name, ())
            if with_inputs and not weighted:
                found.setdefault(min(users, default=-1), []).append(name)
            elif weighted and not with_inputs:
                found.setdefault(min(weighted), []).append(name)
        return found

    def _all_users(self) -> dict[str, list[int]]:
        """Return, per instance of a tensor that outlives a pass, the operators whose backward pass needs it."""
        users: dict[str, list[int]] = {name: [] for name in self.kept}
        for name in self.kept:
            users[name] += [
                saver
                for saver in self.savers.get(name, ())
                if saver not in self.segment_of and not self.view.saves_gathered(saver, name)
            ]
            producer = self.workload.producer.get(name)
            for reader in self._readers.get(name, ()):
                segment = self.segment_of.get(reader)
                if segment is not None and not (producer is not None and segment[0] <= producer < segment[1]):
                    users[name].append(segment[0])  # Checkpointing has its arguments to the end of its backward pass.
        for name, savers in self.savers.items():
            for saver in savers:
                segment = self.segment_of.get(saver)
                producer = self.workload.producer.get(name)
                if is_private(name):
                    users.setdefault(name, []).append(saver)
                elif segment is not None and producer is not None and segment[0] <= producer < segment[1]:
                    users.setdefault(instance(name, True), []).append(saver)
        return users

    def _users_for_weights(self) -> dict[str, list[int]]:
        """Return, per instance of a tensor, the operators whose weight gradients need it, in a segment or not."""
        users: dict[str, list[int]] = {}
        for name, savers in self.savers.items():
            for saver in savers:
                if not self.cost_of(saver).parameters or ends_at_parting(self.workload, saver, name):
                    continue
                segment = range(*self.segment_of.get(saver, (0, 0)))
                again = self.workload.producer.get(name, -1) in segment
                if again or not self.view.saves_gathered(saver, name):
                    users.setdefault(instance(name, again), []).append(saver)
        return users
