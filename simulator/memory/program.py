"""Allocations and frees of one stage for one microbatch, in host program order.

A tensor lives from the operator that makes it to its last reader, or, if something saves it, to the
backward pass of its last saver. Who saves what it has gathered does not need the shard as well. Inside
a recompute segment only what enters it is kept; the rest lives again during the backward pass of the
segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from simulator.lowering.program import StageView
from simulator.lowering.recompute import recomputed_operators
from simulator.memory.events import (
    GATHERED_INPUT,
    GRADIENT,
    LOGITS,
    RECOMPUTED,
    SAVED,
    SEGMENT,
    STAGE_OUTPUT,
    TEMPORARY,
    WORKSPACE,
    Events,
    Pass,
)
from simulator.memory.lifetimes import Lifetimes, instance
from simulator.memory.tied_gradients import tied_gradients
from simulator.memory.whole_units import Anew, WholeUnits
from simulator.operator_cost import OperatorCost
from simulator.saved import ends_at_parting, is_private
from workloads.kinds.base import GRADIENTS, KEPT, RESULTS
from workloads.operators import Operator


class StageMemory:
    """The forward, backward and weight-gradient passes of a stage on one representative, as events.

    Args:
        view: The stage.
        cost_of: Operator index to its cost on the representative.
        reshards: ZeRO-3 parameters are freed after use, else in the last backward pass (``WholeUnits``).
        sharded_gradients: Gradients of ZeRO-2 and 3 are reduced in every backward pass.
        gradients_anew: By unit, bytes of gradients that the first backward pass makes.
    """

    def __init__(
        self,
        view: StageView,
        cost_of: Callable[[int], OperatorCost],
        *,
        reshards: bool,
        sharded_gradients: bool,
        gradients_anew: Anew | None = None,
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
        self._gathered = {index: view.gathered_inputs(index) for index in view.operators}
        lives = Lifetimes(view, cost_of)
        self._lives, self._saves, self._savers, self._segment_of = lives, lives.saves, lives.savers, lives.segment_of
        self._ends, self._kept = lives.ends, lives.kept
        self._tied = tied_gradients(view)
        self._held = {name for names in lives.ends.values() for name in names}
        self._scattered = {index: view.scattered_inputs(index) for index in view.operators}
        self.begins: dict[int, int] = {}
        """By operator, how many events of the last backward pass came before its own."""
        self.at_last: list[int] = []
        """Of the pass that was asked for last, events of an iteration's last such pass alone (``Pass.at_last``)."""

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
        self.at_last = events.at_last
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
                    made = instance(name, recomputing)
                    events.allocate(f"{made}@shard", size, self._kept.get(name, TEMPORARY))
                    events.free(made)
            for name, size in cost.steps_forward:
                if name == RESULTS:
                    self._make_outputs(op, cost, events, recomputing)
                elif name == KEPT:
                    self._keep(index, size, events, recomputing, in_segment)
                else:
                    events.take_or_give(f"{op.name}/{name} forward", size, WORKSPACE)
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

    def _make_outputs(self, op: Operator, cost: OperatorCost, events: Pass, recomputing: bool) -> None:
        for name, size in zip(op.outputs, cost.output_bytes, strict=True):
            category = RECOMPUTED if recomputing else self._kept.get(name, TEMPORARY)
            events.allocate(instance(name, recomputing), size, category)

    def _keep(self, index: int, step: int, events: Pass, recomputing: bool, in_segment: bool) -> None:
        """Take what an operator keeps of its own, or, below 0, give back what is made again in a segment."""
        is_loss = self.workload.operators[index].kind == "lm_loss"
        for name, size in self._saves[index]:
            if is_private(name) and in_segment:
                events.take_or_give(f"{name} passing", int(size) if step == 0 else -1, TEMPORARY)
            elif step < 0:
                continue
            elif is_private(name):
                events.allocate(name, size, LOGITS if is_loss else RECOMPUTED if recomputing else SAVED)
            elif name in self.workload.input_names and not recomputing:
                events.allocate(name, size, self._kept[name])

    def _free_if_done(self, name: str, inside: set[int], events: Pass, recomputing: bool) -> None:
        producer = self.workload.producer.get(name)
        if recomputing:
            own = self._segment_of[producer] if producer in inside and name not in self._held else None
            if own and not any(self._segment_of.get(saver) == own for saver in self._savers.get(name, ())):
                self._release(instance(name, True), events)
        elif name not in self._kept:
            self._release(name, events)

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
        releases = self._lives.releases(with_inputs, with_weights)
        held = {instance(name, True) for name in self._held}
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
        self.at_last = events.at_last
        return events.tensors, events.is_alloc

    def _ends_of_segment(self, start: int) -> list[str]:
        """Return what is held until the backward pass of the segment that begins with an operator is through."""
        made = self._ends.get(start, ())
        return [each for name in made for each in (instance(name, True), f"{name}/gradient")]

    def _release(self, name: str, events: Pass) -> None:
        events.free(name)
        events.free(f"{name}@shard")

    def _backward_operator(
        self, index: int, op: Operator, cost: OperatorCost, events: Pass, with_inputs: bool, with_weights: bool
    ) -> None:
        self.begins[index] = len(events.tensors)
        parted = f"{op.name}/gradient at its product"
        if with_weights and not with_inputs:
            events.free(parted)
        if with_weights and cost.parameters:
            self._whole.enter(self._units[index], events)
        for position, item in self._gathered[index]:
            events.allocate(f"{op.name}/gathered input {position}", item.num_bytes, GATHERED_INPUT)
        for step, step_bytes in cost.steps_backward if with_inputs else ():
            if step == GRADIENTS:
                self._free_gradients(op, events)
                continue
            if step != RESULTS:
                events.take_or_give(f"{op.name}/{step} backward", step_bytes, WORKSPACE)
                continue
            for name, size in zip(op.inputs, cost.input_bytes, strict=True):
                if name not in self.workload.input_names:
                    events.allocate(f"{name}/gradient", size, GRADIENT)
        if with_inputs and with_weights and op.definition.parts_late:
            for name, _ in self._saves[index]:
                if ends_at_parting(self.workload, index, name):
                    self._release(name, events)
        made = cost.product_temporaries(self._gradient_bytes) if with_weights else ()
        count = len(cost.workspace_weight)
        events.allocate_each(_product(op), made[:count], WORKSPACE)
        for step, _ in cost.steps_backward if with_inputs else ():
            events.free(f"{op.name}/{step} backward")
        events.allocate_each(_product(op), made, WORKSPACE)
        events.free_each(_product(op), made)
        if with_weights:
            self._let_ties_wait(index, events)
        if not with_weights and cost.parameters and op.definition.parts_late:
            events.allocate(parted, cost.workspace_weight_bytes, GRADIENT)
        if with_weights:
            self._whole.wait(index, events)
        if cost.parameters and not with_weights:
            return
        for position, _ in self._gathered[index]:
            events.free(f"{op.name}/gathered input {position}")
        self._free_gradients(op, events)

    def _let_ties_wait(self, index: int, events: Pass) -> None:
        for number, tied in enumerate(self._tied):
            if index == tied.last:
                events.allocate(f"tied gradient {number}", tied.num_bytes, GRADIENT)
            elif index == tied.first:
                events.free(f"tied gradient {number}")

    def _free_gradients(self, op: Operator, events: Pass) -> None:
        for name in op.outputs:
            if name not in self._held:
                events.free(f"{name}/gradient")

    def handed_gradients(self, handed: Iterable[tuple[int, int]]) -> dict[int, int]:
        """Return the numbers of gradients, as products make them, that stay as they are, with their operators.

        Args:
            handed: Operator and elements of each (``StaticBytes.handed``); after ``backward``.
        """
        found: dict[int, int] = {}
        for index, elements in handed:
            cost, name = self.cost_of(index), _product(self.workload.operators[index])
            first = len(cost.workspace_weight)
            numbers = [
                self.table.names[f"{name} {first + place}"]
                for place, count in enumerate(cost.gradients_apart)
                if count == elements
            ]
            found[next(number for number in numbers if number not in found)] = index
        return found

    # Sizes

    def lasting_buffer_bytes(self) -> int:
        """Return the bytes of the buffer that the stage's operators share and never give back."""
        return int(max(self.cost_of(index).lasting_buffer_bytes for index in self.view.operators))

    def _output_bytes(self, tensor: str) -> float:
        producer = self.workload.producer[tensor]
        op = self.workload.operators[producer]
        return self.cost_of(producer).output_bytes[op.outputs.index(tensor)]


def _product(op: Operator) -> str:
    """Return the name of what an operator's weight gradients are made in, and of these as they are made."""
    return f"{op.name}/workspace of its product"
