"""One stage on one rank: forward, backward whole or in two halves, recomputation, of one microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from simulator.lowering.mesh import mesh_sizes
from validation.execution.conversions import Converter, joined
from validation.execution.gradients import Gradients
from validation.execution.groups import StageGroups
from validation.execution.in_flight import InFlight, Kept, Pass, Segment, Values
from validation.execution.layouts import Conversion
from validation.execution.operator_call import EnoughError, Slots, call
from validation.execution.parameters import InputSpec
from validation.execution.samples import load_samples
from validation.execution.stage_inputs import StageInputs
from validation.execution.stage_parameters import Held, LayerGathers, StageParameters
from validation.execution.wiring import GRAPH, ShareKey, StageWiring, internal_axes
from validation.kinds.operator_context import DTYPES, OperatorContext, RunState, make_context
from validation.kinds.torch_kinds import build
from validation.measurement import BACKWARD, RECOMPUTE
from validation.timers import OperatorTimes
from workloads.kinds.base import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from workloads.placements import Replicate

_UNTIMED: AbstractContextManager[None] = nullcontext()


class StageRunner:
    """Runs one stage.

    Args:
        wiring: Edges of the stage.
        groups: Communicators, and which rank this is.
        inputs: Graph inputs of the workload.
        losses: Tensors whose mean over the global batch is the loss.
        device: Where tensors live.
        run: Progress of the run.
        microbatches: Those it runs, each with the number of its first sample.
        times: Where operator times go, if they are wanted.
        like: Runs the stage's microbatches of another size: parameters, gradients and loss are the same.
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
        microbatches: Mapping[int, int],
        times: OperatorTimes | None = None,
        like: StageRunner | None = None,
    ) -> None:
        self.wiring, self.groups, self.device, self.run, self.times = wiring, groups, device, run, times
        self.view, self.workload = wiring.view, wiring.workload
        self.problem = self.view.costs.problem
        self.dtype = DTYPES[self.problem.runtime.implementation.dtype]
        self.contexts = {index: self._context(index) for index in self.view.operators}
        self.forwards = {index: build(context) for index, context in self.contexts.items()}
        if like is None:
            self.parameters = StageParameters(self.view, self.contexts, groups, device=device, dtype=self.dtype)
            sums = torch.float32 if self.problem.runtime.gradient_accumulation_bytes == 4 else self.dtype
            self.gradients = Gradients(self.view, self.parameters, groups, sums)
            self.loss_total = torch.zeros((), device=device)
        else:
            self.parameters, self.gradients, self.loss_total = like.parameters, like.gradients, like.loss_total
        self.converter = Converter(groups)
        self.losses = {tensor for tensor in losses if self.workload.producer[tensor] in self.view.shardings}
        self.layers = list(dict.fromkeys(self.workload.operators[index].layer for index in self.view.operators))
        recompute = self.view.stage.recompute
        self.segment_of = {index: (start, stop) for start, stop in recompute for index in range(start, stop)}
        self.inputs = StageInputs(wiring, self.converter, self.segment_of)
        self.segments = {(a, b): [index for index in range(a, b) if index in self.contexts] for a, b in recompute}
        self.data = load_samples(wiring, self.contexts, groups.local_rank, inputs, device, microbatches)

    def _context(self, index: int) -> OperatorContext:
        sharding = self.view.shardings[index]
        axes = internal_axes(self.workload.operators[index].kind, sharding)

        def reduce(tensor: torch.Tensor, operation: str, split: str) -> torch.Tensor:
            self.groups.along("tensor", mesh_sizes(sharding), axes).all_reduce(tensor, operation)
            return tensor

        def gather(tensor: torch.Tensor, split: str, dim: int) -> torch.Tensor:
            group = self.groups.along("tensor", mesh_sizes(sharding), axes)
            return joined(group.all_gather(tensor.contiguous())[0], dim)

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
            gather=gather,
        )

    # Forward

    def forward(self, microbatch: int, arrivals: Values) -> tuple[Values, InFlight]:
        """Return what leaves the stage, and what the microbatch keeps."""
        state, uses = InFlight(), self.wiring.uses(self.view.operators)
        for tensor in self.view.leaving:
            copy = self.wiring.leaving_copy(tensor)
            if copy is None:
                uses.sources[tensor] = uses.sources.get(tensor, 0) + 1
            else:
                uses.copies[copy] += 1
        at_hand = Pass({name: value for name, value in arrivals.items() if name in uses.sources}, uses)
        gathers = self._gathers(self.layers)
        for index in self.view.operators:
            gathers.enter(self.workload.operators[index].layer)
            segment = self.segment_of.get(index)
            if segment is not None and segment not in state.slots:
                state.slots[segment] = Slots(stops_early=self.problem.runtime.recompute_stops_early)
                state.kept[segment] = Kept()
            outputs = self._run(index, microbatch, at_hand, state)
            self._count_loss(index, outputs)
            for name, output in zip(self.workload.operators[index].outputs, outputs, strict=True):
                at_hand.add(name, output)
            del outputs
        gathers.end()
        return {
            tensor: self._leave(tensor, settling, at_hand) for tensor, settling in self.wiring.leaving.items()
        }, state

    def _leave(self, tensor: str, settling: Conversion | None, at_hand: Pass) -> torch.Tensor:
        copy = self.wiring.leaving_copy(tensor)
        if copy is not None:
            return at_hand.read_copy(copy)
        value = at_hand.read(tensor)
        if settling is None:
            return value
        return self.converter.run(settling, value, self.wiring.shape(tensor), keep=tensor in at_hand.pinned)

    def _gathers(self, layers: list[int]) -> LayerGathers:
        return LayerGathers(
            self.parameters,
            layers,
            releases=self.view.plan.reshard_after_forward,
            prefetches=self.problem.runtime.prefetches_gathers,
        )

    def _run(
        self, index: int, microbatch: int, at_hand: Pass, state: InFlight, *, filling: bool = False
    ) -> tuple[torch.Tensor, ...]:
        wires = self.wiring.wires[index]
        segment = self.segment_of.get(index)
        kept = None if segment is None or filling else state.kept[segment]
        absent = {} if segment is not None else self.inputs.absent(index, at_hand, state)
        inputs = [
            self.data[index, position, microbatch]
            if wire.source == GRAPH
            else self.inputs.read(index, wire, at_hand, kept)
            for position, wire in enumerate(wires)
        ]
        held = self.parameters.of_operator(index)
        with self._timed(RECOMPUTE if filling else FORWARD, index):
            outputs, record = call(
                self.forwards[index],
                inputs,
                [_present(each) for each in held],
                needs_gradient=[wire.source != GRAPH for wire in wires],
                gathered=[each.fetch if each.placed.is_gathered else None for each in held],
                absent=absent,
                slots=None if segment is None else state.slots[segment],
                filling=filling,
            )
        if not filling:
            state.calls[index] = record
        return outputs

    def _count_loss(self, index: int, outputs: tuple[torch.Tensor, ...]) -> None:
        for number, tensor in enumerate(self.workload.operators[index].outputs):
            if tensor in self.losses:
                # Replicas of one loss count once; the first of them speaks.
                axes = self.contexts[index].axes
                speaks = all(
                    coordinate == 0
                    for split, (_, _, coordinate) in zip(self.contexts[index].splits, axes, strict=True)
                    if isinstance(split.outputs[number], Replicate)
                )
                if speaks:
                    self.loss_total += outputs[number].sum() / self.problem.global_batch

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
        gathers = self._gathers(self.layers[::-1])
        sums: dict[ShareKey, torch.Tensor] = {}
        for index in reversed(self.view.operators):
            if inputs:
                gathers.enter(self.workload.operators[index].layer)
                segment = self.segment_of.get(index)
                if segment is not None and index == self.segments[segment][-1]:
                    self._recompute(segment, microbatch, state, gathers)
                self.inputs.regather(index, state)
            if index in state.calls:
                self._backward_operator(index, state, gradients, sums, inputs=inputs, weights=weights)
            if weights and sync:
                self.gradients.operator_done(index)
        if inputs:
            gathers.end()
        return gradients

    def _backward_operator(
        self,
        index: int,
        state: InFlight,
        gradients: Values,
        sums: dict[ShareKey, torch.Tensor],
        *,
        inputs: bool,
        weights: bool,
    ) -> None:
        record, op = state.calls[index], self.workload.operators[index]
        held = self.parameters.of_operator(index)
        if inputs:
            of_outputs = tuple(self._output_gradient(index, name, gradients) for name in op.outputs)
        else:
            assert record.gradients is not None
            of_outputs = record.gradients
        phase = BACKWARD_INPUT if inputs and not weights else BACKWARD_WEIGHT if weights and not inputs else BACKWARD
        if weights:
            for parameter in held:
                self.gradients.make_room(parameter)
        with self._timed(phase, index):
            of_inputs, of_parameters = record.backward(
                of_outputs, inputs=inputs, weights=weights, shares=op.definition.parts_late
            )
        if inputs and not weights and held:
            record.gradients = of_outputs
        else:
            record.release()
            del state.calls[index]
        del of_outputs, record
        for parameter, gradient in zip(held, of_parameters, strict=True):
            if gradient is not None:
                self.gradients.add(parameter, gradient)
        if inputs:
            for position, gradient in enumerate(of_inputs):
                self._hand_back(index, position, gradient, gradients, sums)
        if index not in state.calls:
            self.inputs.forget_gathered(index, state)

    def _hand_back(
        self,
        index: int,
        position: int,
        gradient: torch.Tensor | None,
        gradients: Values,
        sums: dict[ShareKey, torch.Tensor],
    ) -> None:
        """Add an input's gradient to its tensor's, moved to the producer's layout with those like it."""
        wire = self.wiring.wires[index][position]
        key = wire.share
        if key is not None and wire.backward is not None:
            if gradient is not None:
                sums[key] = sums[key] + gradient if key in sums else gradient
            gradient = None
            if (index, position) in self.wiring.moving and key in sums:
                gradient = self.converter.run(wire.backward, sums.pop(key), self.wiring.shape(wire.tensor), keep=False)
        if gradient is not None:
            earlier = gradients.get(wire.tensor)
            gradients[wire.tensor] = gradient if earlier is None else earlier + gradient

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
        slots, kept = state.slots[segment], state.kept.pop(segment)
        if slots.is_full:
            return
        members = self.segments[segment]
        at_hand = Pass(dict(kept.sources), self.wiring.uses(members), kept.copies, kept.reduced, set(kept.sources))
        try:
            for index in members:
                gathers.also(self.workload.operators[index].layer)
                outputs = self._run(index, microbatch, at_hand, state, filling=True)
                for name, output in zip(self.workload.operators[index].outputs, outputs, strict=True):
                    at_hand.add(name, output)
        except EnoughError:
            pass
        assert slots.is_full, f"segment {segment} saved {len(slots.values)} tensors, then {slots.filled}"

    def _timed(self, phase: str, index: int) -> AbstractContextManager[None]:
        return _UNTIMED if self.times is None else self.times.measure(phase, index)


def _present(held: Held) -> torch.Tensor:
    assert held.whole is not None, f"{held.placed.key} is not gathered"
    return held.whole
