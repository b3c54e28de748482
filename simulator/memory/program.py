"""Allocations and frees of one stage for one microbatch, in host program order.

A tensor lives from the operator that makes it to its last reader, or, if something saves it, to the
backward pass of its last saver. Who saves what it has gathered does not need the shard as well. Inside
a recompute segment only what enters it is kept; the rest lives again during the backward pass of the
segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from simulator.lowering.program import StageView
from simulator.lowering.recompute import recomputed_operators
from simulator.memory.events import (
    GATHERED_INPUT,
    GRADIENT,
    LOGITS,
    RECEIVED,
    RECOMPUTED,
    SAVED,
    SEGMENT,
    STAGE_OUTPUT,
    TEMPORARY,
    WORKSPACE,
    Events,
    Pass,
)
from simulator.memory.whole_units import WholeUnits
from simulator.operator_cost import OperatorCost
from simulator.saved import ends_at_parting, is_private, saved_tensors
from simulator.schedules.registry import schedule_named
from workloads.operators import Operator


class StageMemory:
    """The forward, backward and weight-gradient passes of a stage on one representative, as events.

    Args:
        view: The stage.
        cost_of: Operator index to its cost on the representative.
        reshards: ZeRO-3 parameters are freed after use.
        sharded_gradients: Gradients of ZeRO-2 and 3 are reduced in every backward pass.
        gradients_anew: Bytes of gradients by unit that the first backward pass makes.
    """

    def __init__(
        self,
        view: StageView,
        cost_of: Callable[[int], OperatorCost],
        *,
        reshards: bool,
        sharded_gradients: bool,
        gradients_anew: Mapping[int, int] | None = None,
    ) -> None:
        self.view = view
        self.cost_of = cost_of
        self.workload = view.costs.problem.workload
        self.table = Events()
        runtime = view.costs.problem.runtime
        self._gradient_bytes = runtime.implementation.activation_bytes
        self._keeps_outputs = runtime.keeps_stage_outputs
        self._units = view.costs.unit_parts
        self._whole = WholeUnits(
            view, reshards=reshards, sharded_gradients=sharded_gradients, anew=gradients_anew or {}
        )
        self._own = set(view.operators)
        self._gathered = {index: view.gathered_inputs(index) for index in view.operators}
        self._segment_of = {
            index: (start, stop) for start, stop in view.stage.recompute for index in range(start, stop)
        }
        self._readers: dict[str, list[int]] = {}
        for index in view.operators:
            for tensor in dict.fromkeys(self.workload.operators[index].inputs):
                self._readers.setdefault(tensor, []).append(index)
        self._savers: dict[str, list[int]] = {}
        self._saves: dict[int, list[tuple[str, float]]] = {}
        for index in view.operators:
            self._saves[index] = list(dict(saved_tensors(self.workload, index, cost_of(index))).items())
            for name, _ in self._saves[index]:
                self._savers.setdefault(name, []).append(index)
        self._ends = self._held_ends()
        self._held = {name for names in self._ends.values() for name in names}
        self._scattered = {index: view.scattered_inputs(index) for index in view.operators}
        self._kept = self._kept_tensors()
        self._users = self._all_users()

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
        for name, savers in self._savers.items():
            producer = self.workload.producer.get(name)
            for saver in savers:
                segment = self._segment_of.get(saver)
                if segment is None:
                    if not self.view.saves_gathered(saver, name):
                        kept[name] = SAVED
                elif not is_private(name) and (producer is None or not segment[0] <= producer < segment[1]):
                    kept.setdefault(name, SEGMENT)
        for index in self.view.operators:
            segment = self._segment_of.get(index)
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

    # One pass each

    def forward(self) -> tuple[list[int], list[bool]]:
        """Return (tensor numbers, is allocation) of the forward pass."""
        events = Pass(self.table)
        for name, arrival in self.view.arrivals.items():
            size = arrival.arriving_bytes(self.cost_of(arrival.reader[0]))
            events.allocate(name, size, self._kept[name])
        self._run(self.view.operators, events, recomputing=False)
        if not self._keeps_outputs:
            for name in self.view.leaving:
                if self._kept[name] == STAGE_OUTPUT:
                    self._release(name, events)
        return events.tensors, events.is_alloc

    def _run(self, operators: Iterable[int], events: Pass, *, recomputing: bool) -> None:
        operators = list(operators)
        inside = set(operators)
        left: dict[str, int] = {}
        for index in operators:
            for name in dict.fromkeys(self.workload.operators[index].inputs):
                left[name] = left.get(name, 0) + 1
        unit = None
        for index in operators:
            op = self.workload.operators[index]
            cost = self.cost_of(index)
            if not recomputing and self._units[index] != unit:
                self._whole.gather(unit, self._units[index], events)
                unit = self._units[index]
            in_segment = not recomputing and index in self._segment_of
            for position, item in self._gathered[index]:
                events.allocate(f"{op.name}/gathered input {position}", item.num_bytes, GATHERED_INPUT)
            for position, size in self._scattered[index]:
                name = op.inputs[position]
                if not recomputing or self.workload.producer[name] in inside:
                    instance = self._instance(name, recomputing)
                    events.allocate(f"{instance}@shard", size, self._kept.get(name, TEMPORARY))
                    events.free(instance)
            events.allocate(f"{op.name}/workspace", cost.workspace_forward_bytes, WORKSPACE)
            for name, size in zip(op.outputs, cost.output_bytes, strict=True):
                category = RECOMPUTED if recomputing else self._kept.get(name, TEMPORARY)
                events.allocate(self._instance(name, recomputing), size, category)
            for name, size in self._saves[index]:
                if is_private(name) and not in_segment:
                    category = LOGITS if op.kind == "lm_loss" else RECOMPUTED if recomputing else SAVED
                    events.allocate(name, size, category)
                elif name in self.workload.input_names and not recomputing:
                    events.allocate(name, size, self._kept[name])
            events.free(f"{op.name}/workspace")
            for position, _ in self._gathered[index]:
                if recomputing or in_segment or self.view.gathers_again(index, position):
                    events.free(f"{op.name}/gathered input {position}")
            for name in dict.fromkeys(op.inputs):
                left[name] -= 1
                if left[name] == 0 and name not in self.workload.input_names:
                    self._free_if_done(name, inside, events, recomputing)
            for name in op.outputs:
                if not left.get(name):
                    self._free_if_done(name, inside, events, recomputing)
        if not recomputing:
            self._whole.gather(unit, None, events)

    def _free_if_done(self, name: str, inside: set[int], events: Pass, recomputing: bool) -> None:
        producer = self.workload.producer.get(name)
        if recomputing:
            own = self._segment_of[producer] if producer in inside and name not in self._held else None
            if own and not any(self._segment_of.get(saver) == own for saver in self._savers.get(name, ())):
                self._release(self._instance(name, True), events)
        elif name not in self._kept:
            self._release(name, events)

    @staticmethod
    def _instance(name: str, recomputing: bool) -> str:
        return f"{name}@again" if recomputing else name

    def backward(self, *, with_inputs: bool = True, with_weights: bool = True) -> tuple[list[int], list[bool]]:
        """Return (tensor numbers, is allocation) of a backward pass.

        Args:
            with_inputs: Computes input gradients.
            with_weights: Computes weight gradients; if not, what they need stays.
        """
        events = Pass(self.table)
        if with_inputs:
            for name in self.view.leaving:
                events.allocate(f"{name}/gradient", self._output_bytes(name), GRADIENT)
        if with_weights:
            self._whole.begin(events)
        segment_ends = {stop - 1: (start, stop) for start, stop in self.view.stage.recompute}
        releases = self._releases(with_inputs, with_weights)
        held = {self._instance(name, True) for name in self._held}
        works = {"gathers": with_inputs, "scatters": with_weights}
        unit, ended = None, list[str]()
        for index in self.view.operators[::-1]:
            op = self.workload.operators[index]
            cost = self.cost_of(index)
            entering = self._units[index]
            if entering != unit:
                self._whole.leave(unit, events, is_last=False, **works)
            for name in ended:
                self._release(name, events)
            if entering != unit and with_inputs:
                self._whole.hold(unit, entering, events, "backward")
            unit = entering
            if with_inputs and index in segment_ends:
                start, stop = segment_ends[index]
                self._run(recomputed_operators(self.view, start, stop), events, recomputing=True)
            if with_inputs or cost.parameters:
                self._backward_operator(index, op, cost, events, with_inputs, with_weights)
            ended = self._ends_of_segment(index) if with_inputs else []
            for name in releases.get(index, ()):
                if ended and self._kept.get(name) == SEGMENT:
                    ended.append(name)
                elif name not in held:
                    self._release(name, events)
        self._whole.leave(unit, events, is_last=True, **works)
        for name in ended:
            self._release(name, events)
        if with_inputs:
            for name in self.view.arrivals:
                events.free(f"{name}/gradient")
            for name in releases.get(-1, ()):
                self._release(name, events)
        return events.tensors, events.is_alloc

    def _ends_of_segment(self, start: int) -> list[str]:
        """Return what is held until the backward pass of the segment that begins with an operator is through."""
        made = self._ends.get(start, ())
        return [instance for name in made for instance in (self._instance(name, True), f"{name}/gradient")]

    def _releases(self, with_inputs: bool, with_weights: bool) -> dict[int, list[str]]:
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
        users: dict[str, list[int]] = {name: [] for name in self._kept}
        for name in self._kept:
            users[name] += [
                saver
                for saver in self._savers.get(name, ())
                if saver not in self._segment_of and not self.view.saves_gathered(saver, name)
            ]
            producer = self.workload.producer.get(name)
            for reader in self._readers.get(name, ()):
                segment = self._segment_of.get(reader)
                if segment is not None and not (producer is not None and segment[0] <= producer < segment[1]):
                    users[name].append(segment[0])  # Checkpointing has its arguments to the end of its backward pass.
        for name, savers in self._savers.items():
            for saver in savers:
                segment = self._segment_of.get(saver)
                producer = self.workload.producer.get(name)
                if is_private(name):
                    users.setdefault(name, []).append(saver)
                elif segment is not None and producer is not None and segment[0] <= producer < segment[1]:
                    users.setdefault(self._instance(name, True), []).append(saver)
        return users

    def _users_for_weights(self) -> dict[str, list[int]]:
        """Return, per instance of a tensor, the operators whose weight gradients need it, in a segment or not."""
        users: dict[str, list[int]] = {}
        for name, savers in self._savers.items():
            for saver in savers:
                if not self.cost_of(saver).parameters or ends_at_parting(self.workload, saver, name):
                    continue
                segment = range(*self._segment_of.get(saver, (0, 0)))
                again = self.workload.producer.get(name, -1) in segment
                if again or not self.view.saves_gathered(saver, name):
                    users.setdefault(self._instance(name, again), []).append(saver)
        return users

    def _release(self, name: str, events: Pass) -> None:
        events.free(name)
        events.free(f"{name}@shard")

    def _backward_operator(
        self, index: int, op: Operator, cost: OperatorCost, events: Pass, with_inputs: bool, with_weights: bool
    ) -> None:
        before, at_product = cost.backward_temporaries_bytes(
            self._gradient_bytes, inputs=with_inputs, weights=with_weights
        )
        parted = f"{op.name}/gradient at its product"
        if with_weights and not with_inputs:
            events.free(parted)
        if with_weights and cost.parameters:
            self._whole.enter(self._units[index], events)
        parts = with_inputs and with_weights and op.definition.parts_late
        events.allocate(f"{op.name}/workspace backward", before if parts else max(before, at_product), WORKSPACE)
        for position, item in self._gathered[index]:
            events.allocate(f"{op.name}/gathered input {position}", item.num_bytes, GATHERED_INPUT)
        if with_inputs:
            for name, size in zip(op.inputs, cost.input_bytes, strict=True):
                if name not in self.workload.input_names:
                    events.allocate(f"{name}/gradient", size, GRADIENT)
        events.free(f"{op.name}/workspace backward")
        if parts:
            self._reach_product(index, op, at_product, events)
        if not with_weights and cost.parameters and op.definition.parts_late:
            events.allocate(parted, cost.workspace_weight_bytes, GRADIENT)
        if with_weights:
            self._whole.wait(index, events)
        if cost.parameters and not with_weights:
            return
        for position, _ in self._gathered[index]:
            events.free(f"{op.name}/gathered input {position}")
        for name in op.outputs:
            if name not in self._held:
                events.free(f"{name}/gradient")

    def _reach_product(self, index: int, op: Operator, num_bytes: float, events: Pass) -> None:
        """Give back what the work before an operator's product was done from, and take what the product works in."""
        for name, _ in self._saves[index]:
            if ends_at_parting(self.workload, index, name):
                self._release(name, events)
        events.allocate(f"{op.name}/workspace of its product", num_bytes, WORKSPACE)
        events.free(f"{op.name}/workspace of its product")

    # Sizes

    def lasting_buffer_bytes(self) -> int:
        """Return the bytes of the buffer that the stage's operators share and never give back."""
        return int(max(self.cost_of(index).lasting_buffer_bytes for index in self.view.operators))

    def _output_bytes(self, tensor: str) -> float:
        producer = self.workload.producer[tensor]
        op = self.workload.operators[producer]
        return self.cost_of(producer).output_bytes[op.outputs.index(tensor)]
