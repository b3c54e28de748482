"""One stage on one rank: forward, backward whole or in two halves, recomputation, of one microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from simulator.lowering.mesh import mesh_sizes
from validation.conversions import Converter
from validation.gradients import Gradients
from validation.groups import StageGroups
from validation.measurement import OperatorTimes
from validation.operator_call import Call, EnoughError, Fetch, Slots, call
from validation.operator_context import DTYPES, OperatorContext, RunState, make_context
from validation.parameters import InputSpec, make_samples
from validation.stage_parameters import Held, LayerGathers, StageParameters
from validation.torch_kinds import build
from validation.wiring import GRAPH, StageWiring, internal_axes
from workloads.kinds.base import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from workloads.placements import Replicate

Values = dict[str, torch.Tensor]
Segment = tuple[int, int]

_UNTIMED: AbstractContextManager[None] = nullcontext()


@dataclass
class InFlight:
    """What a microbatch keeps between its forward and its backward.

    Attributes:
        calls: Operators waiting for their backward.
        kept: Inputs of recompute segments, and sources of inputs that are gathered again.
        slots: What the operators of each segment save.
        regathered: Inputs gathered again for the backward of an operator.
    """

    calls: dict[int, Call] = field(default_factory=dict)
    kept: dict[object, Values] = field(default_factory=dict)
    slots: dict[Segment, Slots] = field(default_factory=dict)
    regathered: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)


class StageRunner:
    """Runs one stage.

    Args:
        wiring: Edges of the stage.
        groups: Communicators, and which rank this is.
        inputs: Graph inputs of the workload.
        losses: Tensors whose mean over the global batch is the loss.
        device: Where tensors live.
        run: Progress of the run.
        times: Where operator times go, if they are wanted.
    """

    def __init__(
        self,
        wiring: StageWiring,
        groups: StageGroups,
        *,
        inputs: Mapping[str, InputSpec],
        losses: tuple[str, ...],
        device: torch.device,
        run: RunState,
        times: OperatorTimes | None = None,
    ) -> None:
        self.wiring, self.groups, self.device, self.run, self.times = wiring, groups, device, run, times
        self.view = wiring.view
        self.workload = wiring.workload
        self.problem = self.view.costs.problem
        runtime = self.problem.runtime
        self.dtype = DTYPES[runtime.implementation.dtype]
        self.contexts = {index: self._context(index) for index in self.view.operators}
        self.forwards = {index: build(context) for index, context in self.contexts.items()}
        self.parameters = StageParameters(self.view, self.contexts, groups, device=device, dtype=self.dtype)
        sums = torch.float32 if runtime.gradient_accumulation_bytes == 4 else self.dtype
        self.gradients = Gradients(self.view, self.parameters, groups, sums)
        self.converter = Converter(groups)
        self.losses = {tensor for tensor in losses if self.workload.producer[tensor] in self.view.shardings}
        self.loss_total: torch.Tensor = torch.zeros((), device=device)
        self.layers = list(dict.fromkeys(self.workload.operators[index].layer for index in self.view.operators))
        self.segment_of = {
            index: (start, stop) for start, stop in self.view.stage.recompute for index in range(start, stop)
        }
        own = set(self.view.operators)
        self.segments = {
            (start, stop): [index for index in range(start, stop) if index in own]
            for start, stop in self.view.stage.recompute
        }
        self.entering = {segment: self._entering(members) for segment, members in self.segments.items()}
        self.pinned = {*self.view.leaving, *(name for names in self.entering.values() for name in names)}
        self.readers: dict[str, int] = {}
        for wires in wiring.wires.values():
            for wire in wires:
                self.readers[wire.tensor] = self.readers.get(wire.tensor, 0) + 1
        self.data = self._load(inputs)

    def _context(self, index: int) -> OperatorContext:
        sharding = self.view.shardings[index]
        axes = internal_axes(self.workload.operators[index].kind, sharding)

        def reduce(tensor: torch.Tensor, operation: str, split: str) -> torch.Tensor:
            self.groups.along("tensor", mesh_sizes(sharding), axes).all_reduce(tensor, operation)
            return tensor

        return make_context(
            self.workload,
            index,
            [(axis.split, axis.size) for axis in sharding],
            local_rank=self.groups.local_rank,
            samples=self.view.plan.microbatch_size,
            local_samples=self.wiring.local_samples(index, self.groups.local_rank),
            implementation=self.problem.runtime.implementation,
            device=self.device,
            run=self.run,
            reduce=reduce,
        )

    def _entering(self, members: list[int]) -> list[str]:
        inside = {name for index in members for name in self.workload.operators[index].outputs}
        wires = [wire for index in members for wire in self.wiring.wires[index]]
        return list(dict.fromkeys(wire.tensor for wire in wires if wire.source != GRAPH and wire.tensor not in inside))

    def _load(self, inputs: Mapping[str, InputSpec]) -> dict[tuple[int, int, int], torch.Tensor]:
        """Return training data by operator, input position and microbatch."""
        plan, found = self.view.plan, {}
        wanted = [
            (index, position, wire.tensor)
            for index, wires in self.wiring.wires.items()
            for position, wire in enumerate(wires)
            if wire.source == GRAPH
        ]
        for microbatch in range(plan.num_microbatches):
            if not wanted or not self.wiring.works_on(self.groups.local_rank, microbatch):
                continue
            start = microbatch * plan.microbatch_size
            made: dict[tuple[str, int, int], torch.Tensor] = {}
            for index, position, tensor in wanted:
                samples, *rest = self.contexts[index].input_boxes[position]
                if plan.rotates:
                    samples = slice(0, plan.microbatch_size)
                key = tensor, samples.start, samples.stop
                if key not in made:
                    numbers = range(start + samples.start, start + samples.stop)
                    made[key] = make_samples(inputs[tensor], numbers, self.dtype)
                local = made[key][(slice(None), *rest)].contiguous()
                found[index, position, microbatch] = local.to(self.device)
        return found

    # Forward

    def forward(self, microbatch: int, arrivals: Values) -> tuple[Values, InFlight]:
        """Return what leaves the stage, and what the microbatch keeps."""
        state = InFlight()
        values, left = dict(arrivals), dict(self.readers)
        gathers = LayerGathers(self.parameters, self.layers, releases=self.view.plan.reshard_after_forward)
        for index in self.view.operators:
            gathers.enter(self.workload.operators[index].layer)
            segment = self.segment_of.get(index)
            if segment is not None and segment not in state.slots:
                state.slots[segment] = Slots(stops_early=self.problem.runtime.recompute_stops_early)
                state.kept[segment] = {name: values[name] for name in self.entering[segment]}
            outputs = self._run(index, microbatch, values, left, state)
            values.update(zip(self.workload.operators[index].outputs, outputs, strict=True))
            del outputs
            self._count_loss(index, values)
            self._forget(index, values, left)
        gathers.end()
        leaving = {}
        for tensor, settling in self.wiring.leaving.items():
            whole = values.pop(tensor)
            if settling is not None:
                keep = any(tensor in names for names in self.entering.values())
                whole = self.converter.run(settling, whole, self.wiring.shape(tensor), keep=keep)
            leaving[tensor] = whole
        return leaving, state

    def _forget(self, index: int, values: Values, left: dict[str, int]) -> None:
        op = self.workload.operators[index]
        for name in op.inputs:
            if name in values:
                left[name] -= 1
        for name in (*op.inputs, *op.outputs):
            if not left.get(name) and name in values and name not in self.wiring.leaving:
                del values[name]

    def _inputs(self, index: int, microbatch: int, values: Values, left: Mapping[str, int]) -> list[torch.Tensor]:
        found = []
        for position, wire in enumerate(self.wiring.wires[index]):
            if wire.source == GRAPH:
                found.append(self.data[index, position, microbatch])
                continue
            value = values[wire.tensor]
            if wire.forward is not None:
                keep = wire.tensor in self.pinned or left.get(wire.tensor, 2) > 1
                value = self.converter.run(wire.forward, value, self.wiring.shape(wire.tensor), keep=keep)
            found.append(value)
        return found

    def _run(
        self,
        index: int,
        microbatch: int,
        values: Values,
        left: Mapping[str, int],
        state: InFlight,
        *,
        filling: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        inputs = self._inputs(index, microbatch, values, left)
        held = self.parameters.of_operator(index)
        segment = self.segment_of.get(index)
        with self._timed("recompute" if filling else FORWARD, index):
            outputs, record = call(
                self.forwards[index],
                inputs,
                [_present(each) for each in held],
                needs_gradient=[wire.source != GRAPH for wire in self.wiring.wires[index]],
                gathered=[each.fetch if each.placed.is_gathered else None for each in held],
                absent=self._absent(index, values, state) if segment is None else None,
                slots=None if segment is None else state.slots[segment],
                filling=filling,
            )
        if not filling:
            state.calls[index] = record
        return outputs

    def _absent(self, index: int, values: Values, state: InFlight) -> dict[int, Fetch]:
        """Return inputs that are gathered again in backward, where the runtime does not keep them."""
        if self.problem.runtime.keeps_gathered_inputs:
            return {}
        found: dict[int, Fetch] = {}
        for position, wire in enumerate(self.wiring.wires[index]):
            if wire.gathers:
                state.kept.setdefault(index, {})[wire.tensor] = values[wire.tensor]
                found[position] = lambda key=(index, position): state.regathered[key]  # type: ignore[misc]
        return found

    def _count_loss(self, index: int, values: Values) -> None:
        for tensor in self.workload.operators[index].outputs:
            if tensor in self.losses:
                # Replicas of one loss count once; the first of them speaks.
                axes = self.contexts[index].axes
                number = self.workload.operators[index].outputs.index(tensor)
                speaks = all(
                    coordinate == 0
                    for split, (_, _, coordinate) in zip(self.contexts[index].splits, axes, strict=True)
                    if isinstance(split.outputs[number], Replicate)
                )
                if speaks:
                    self.loss_total += values[tensor].sum() / self.problem.global_batch

    # Backward

    def backward(
        self, microbatch: int, state: InFlight, gradients: Values, *, inputs: bool, weights: bool, sync: bool
    ) -> Values:
        """Return the gradients of what arrived.

        Args:
            microbatch: Which.
            state: From its forward.
            gradients: Of what left the stage, or passes through it.
            inputs, weights: Which gradients to compute: both, or one half of a split backward.
            sync: Reduce weight gradients as buckets complete.
        """
        gathers = LayerGathers(self.parameters, self.layers[::-1], releases=self.view.plan.reshard_after_forward)
        for index in reversed(self.view.operators):
            if inputs:
                gathers.enter(self.workload.operators[index].layer)
                segment = self.segment_of.get(index)
                if segment is not None and index == self.segments[segment][-1]:
                    self._recompute(segment, microbatch, state, gathers)
                self._regather(index, microbatch, state)
            if index in state.calls:
                self._backward_operator(index, state, gradients, inputs=inputs, weights=weights)
            if weights and sync:
                self.gradients.operator_done(index)
        if inputs:
            gathers.end()
        return gradients

    def _backward_operator(
        self, index: int, state: InFlight, gradients: Values, *, inputs: bool, weights: bool
    ) -> None:
        record, op = state.calls[index], self.workload.operators[index]
        held = self.parameters.of_operator(index)
        if inputs:
            of_outputs = tuple(self._output_gradient(index, name, gradients) for name in op.outputs)
        else:
            assert record.gradients is not None
            of_outputs = record.gradients
        phase = BACKWARD_INPUT if inputs and not weights else BACKWARD_WEIGHT if weights and not inputs else "backward"
        if weights:
            for parameter in held:
                self.gradients.make_room(parameter)
        with self._timed(phase, index):
            of_inputs, of_parameters = record.backward(of_outputs, inputs=inputs, weights=weights)
        if inputs and not weights and held:
            record.gradients = of_outputs
        else:
            record.release()
            del state.calls[index]
        del of_outputs, record
        for parameter, gradient in zip(held, of_parameters, strict=True):
            if gradient is not None:
                self.gradients.add(parameter, gradient)
        for wire, gradient in zip(self.wiring.wires[index], of_inputs, strict=True):
            if gradient is None:
                continue
            if wire.backward is not None:
                gradient = self.converter.run(wire.backward, gradient, self.wiring.shape(wire.tensor), keep=False)
            earlier = gradients.get(wire.tensor)
            gradients[wire.tensor] = gradient if earlier is None else earlier + gradient
        if index not in state.calls:
            for position in range(len(self.wiring.wires[index])):
                state.regathered.pop((index, position), None)

    def _output_gradient(self, index: int, name: str, gradients: Values) -> torch.Tensor:
        context = self.contexts[index]
        number = self.workload.operators[index].outputs.index(name)
        shape = context.local.outputs[number]
        if name in self.losses:
            return torch.full(shape, 1.0 / self.problem.global_batch, device=self.device)
        found = gradients.pop(name, None)
        if found is None:
            found = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return found

    def _recompute(self, segment: Segment, microbatch: int, state: InFlight, gathers: LayerGathers) -> None:
        """Run a segment's forward again to fill what its operators saved."""
        slots = state.slots[segment]
        values = state.kept.pop(segment)
        if slots.is_full:
            return
        try:
            for index in self.segments[segment]:
                gathers.also(self.workload.operators[index].layer)
                outputs = self._run(index, microbatch, values, {}, state, filling=True)
                values.update(zip(self.workload.operators[index].outputs, outputs, strict=True))
        except EnoughError:
            pass
        assert slots.is_full, f"segment {segment} saved {len(slots.values)} tensors, then {slots.filled}"

    def _regather(self, index: int, microbatch: int, state: InFlight) -> None:
        values = state.kept.pop(index, None)
        if values is None:
            return
        for position, wire in enumerate(self.wiring.wires[index]):
            if wire.tensor in values and wire.forward is not None:
                state.regathered[index, position] = self.converter.run(
                    wire.forward, values[wire.tensor], self.wiring.shape(wire.tensor), keep=True
                )

    def _timed(self, phase: str, index: int) -> AbstractContextManager[None]:
        return _UNTIMED if self.times is None else self.times.measure(phase, index)


def _present(held: Held) -> torch.Tensor:
    assert held.whole is not None, f"{held.placed.key} is not gathered"
    return held.whole
