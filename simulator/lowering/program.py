"""The passes of one stage for one microbatch, as lists of items; devices and microbatches come later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from simulator.lowering.copies import GRADIENT_COPY
from simulator.lowering.crossing import gathers_shards
from simulator.lowering.edges import reduced_beside
from simulator.lowering.items import GRADIENTS, Item
from simulator.lowering.mesh import REDUCTIONS, MeshCollective, mesh_sizes, reshard, settled
from simulator.lowering.parameter_gathers import ParameterGathers
from simulator.lowering.recompute import recomputed_operators
from simulator.lowering.synchronisation import GradientBucket, gradient_buckets, handed_over
from simulator.lowering.view import StageView as StageView
from simulator.operator_cost import RECOMPUTED, OperatorCost
from simulator.schedules.registry import schedule_named
from workloads.kinds.base import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from workloads.placements import PARTIAL


@dataclass
class ProgramBuilder(ParameterGathers):
    """Builds the item lists of one stage."""

    def forward(self, *, gather: bool, received: Sequence[MeshCollective] = ()) -> list[Item]:
        """Return the forward pass of one microbatch.

        Args:
            gather: Gather parameters before each unit.
            received: Gathers that make whole what arrived in parts.
        """
        self.items, self._pass_cause = self._made_whole(received), "forward"
        gathers = self._gathers(self.view.operators) if gather else {}
        for unit in self._units:
            if unit in self.view.costs.root_units:
                self._emit_gather(unit, gathers, None)
        self._run_forward(self.view.operators, "forward", gathers)
        for tensor in self.view.leaving:
            self._settle_output(tensor)
        return self.items

    def _made_whole(self, received: Sequence[MeshCollective]) -> list[Item]:
        wanted = received if self.fidelity.transfers else ()
        return [Item(cause="transfer", collective=item, operator=self.view.operators[0]) for item in wanted]

    def backward(
        self,
        phases: tuple[str, ...],
        *,
        gather: bool,
        sync: bool,
        received: Sequence[MeshCollective] = (),
        first: bool = False,
    ) -> list[Item]:
        """Return the backward pass of one microbatch.

        Args:
            phases: BACKWARD_INPUT, BACKWARD_WEIGHT or both.
            gather: Gather ZeRO-3 parameters before each unit.
            sync: Reduce gradients as they become complete; waited for, unless the plan overlaps them.
            received: Gathers that make whole what arrived in parts.
            first: It is of the stage's first microbatch.
        """
        self.items = self._made_whole(received)
        self._handed_over = handed_over(self.view, first=first)
        order = self.view.operators[::-1]
        gathers = self._gathers(order) if gather else {}
        for unit in self.view.costs.root_units:
            gathers.pop(unit, None)
        buckets = self._buckets_by_last_operator() if sync else {}
        copies = {
            operator: bucket.passes for found in buckets.values() for bucket in found for operator in bucket.copied
        }
        self._reduced = []
        segment_ends = {stop - 1: (start, stop) for start, stop in self.view.stage.recompute}
        cause = {GRADIENTS: "backward", (BACKWARD_INPUT,): "backward input"}.get(phases, "backward weight")
        self._pass_cause = cause
        with_inputs = BACKWARD_INPUT in phases
        for index in order:
            if with_inputs and index in segment_ends and self.fidelity.recompute:
                start, stop = segment_ends[index]
                self._start_unit(index, gathers)
                self._run_forward(recomputed_operators(self.view, start, stop), "recompute", gathers)
                if self.view.costs.problem.runtime.regathers_recomputed:
                    self._release(start, stop)
            self._start_unit(index, gathers)
            self._gradients(cause, index, phases)
            if index in copies:
                self._compute(cause, index, (GRADIENT_COPY,) * copies[index])
            for bucket in buckets.get(index, ()):
                self._reduce(bucket)
        self._copy_back(cause)
        return self.items

    def operator_alone(self, index: int) -> tuple[list[Item], list[Item], dict[int, list[Item]]]:
        """Return what one operator adds to the passes of its stage.

        Returns:
            Items of its forward pass; of its backward pass; and, by input, those of the forward pass that a
            segment which the input enters from outside does not run again.
        """
        self.items = []
        self._run_forward([index], "forward", {})
        forward, self.items = self.items, []
        self._gradients("backward", index, GRADIENTS)
        self._take_pending()
        backward, entering = self.items, dict[int, list[Item]]()
        view = self.view
        for phase, item, owner, position in view.input_collectives(index):
            if phase == FORWARD and item.collective in REDUCTIONS:
                self.items = []
                self._forward_collective(item, index, owner, position)
                entering.setdefault(position, []).extend(self.items)
        return forward, backward, entering

    def _run_forward(self, operators: list[int], cause: str, gathers: dict[int, list[MeshCollective]]) -> None:
        inside = set(operators) if cause == "recompute" else None
        for index in operators:
            self._start_unit(index, gathers)
            for item, owner, position in self._forward_collectives(index, inside):
                self._forward_collective(item, index, owner, position)
            self._compute(cause, index, (FORWARD if inside is None else RECOMPUTED,))
            for phase, item in self._cost(index).internal:
                if phase == FORWARD:
                    self._collective(item, index, index)

    def _gradients(self, cause: str, index: int, phases: tuple[str, ...]) -> None:
        """Add the backward pass of an operator with its collectives."""
        if BACKWARD_INPUT not in phases:
            self._compute(cause, index, phases)
            return
        view = self.view
        gathers = [
            (position, item) for position, item in view.gathered_inputs(index) if view.gathers_again(index, position)
        ]
        beside = self._reductions_beside_weights(index) if phases == GRADIENTS else []
        if not beside:
            for position, item in gathers:
                self._collective(item, index, held=self._held(index, position), holds_backward=True)
            self._compute(cause, index, phases)
            self._backward_collectives(index)
            return
        gathered = tuple(self._beside(item, index) for _, item in gathers)
        self._compute(cause, index, (BACKWARD_INPUT,))
        self._pending_after = gathered
        reduced = tuple(self._beside(item, index) for item, _ in beside)
        self._compute(cause, index, (BACKWARD_WEIGHT,))
        self._pending_after = reduced
        self._backward_collectives(index, without=beside)

    def _reductions_beside_weights(self, index: int) -> list[tuple[MeshCollective, int]]:
        """Return reductions of input gradients that travel while the operator's weight gradients are made, by input.

        Those towards an earlier operator of the stage alone: what leaves the stage is waited for. None where weight
        gradients come later.
        """
        view = self.view
        inputs = view.costs.problem.workload.operators[index].inputs
        if (
            not self.fidelity.tensor_parallel
            or schedule_named(view.plan.schedule).splits_backward
            or any(view.cost_on(index, gpu_type).includes_collectives for gpu_type in view.gpu_types)
        ):
            return []
        found = reduced_beside(view.costs, self._cost(index), index, view.input_collectives(index))
        return [(item, position) for item, position in found if inputs[position] not in view.arrivals]

    def _cost(self, index: int) -> OperatorCost:
        return self.view.cost(index)

    def _forward_collectives(
        self, index: int, recomputed: set[int] | None
    ) -> Iterator[tuple[MeshCollective, int, int]]:
        """Yield the collectives before an operator, with owner and input; what entered a segment reduced stays so."""
        view = self.view
        for phase, item, owner, position in view.input_collectives(index):
            kept = recomputed is not None and owner not in recomputed and item.collective in REDUCTIONS
            if phase == FORWARD and not kept:
                yield item, owner, position

    def _held(self, index: int, position: int, *, backward: bool = False) -> int:
        """Return which operator's pass waits for a collective at an input: forward its reader's, backward its maker's.

        Inside a layer of the stage alone: so all operators of a role wait alike, and a profile can say for what.
        """
        workload = self.view.costs.problem.workload
        reader = workload.operators[index]
        maker = workload.producer.get(reader.inputs[position], -1)
        if maker not in self.view.shardings or workload.operators[maker].layer != reader.layer:
            return -1
        return maker if backward else index

    def _forward_collective(self, item: MeshCollective, index: int, owner: int, position: int) -> None:
        """Add a collective at an input."""
        workload = self.view.costs.problem.workload
        maker = workload.producer.get(workload.operators[index].inputs[position], -1)
        just_made = maker == index - 1 and gathers_shards(item, self.view.shardings.get(maker))
        made_by = (maker, FORWARD) if just_made else None
        self._collective(item, index, owner, self._held(index, position), made_by=made_by)

    def _backward_collectives(self, index: int, without: Sequence[tuple[MeshCollective, int]] = ()) -> None:
        view = self.view
        cost = self._cost(index)
        for phase, item in cost.internal:
            if phase == BACKWARD_INPUT:
                self._collective(item, index, index)
        for phase, item, owner, position in view.input_collectives(index):
            done = (item, position) in without
            if phase == BACKWARD_INPUT and not done:
                held = self._held(index, position, backward=True)
                made_by = (index, BACKWARD_INPUT) if gathers_shards(item, view.shardings[index]) else None
                self._collective(item, index, owner, held, holds_backward=True, made_by=made_by)

    def output_settled(self, tensor: str) -> list[Item]:
        """Return what makes a tensor whole that leaves the stage and that nothing in it reads."""
        self.items = []
        self._settle_output(tensor)
        return self.items

    def _settle_output(self, tensor: str) -> None:
        view = self.view
        workload = view.costs.problem.workload
        producer = workload.producer[tensor]
        cost = self._cost(producer)
        number = workload.operators[producer].outputs.index(tensor)
        have = tuple(split.outputs[number] for split in view.costs.splits(producer, view.shardings[producer]))
        reduced_here = any(reader in view.shardings for reader in workload.consumers[tensor])
        if PARTIAL in have and not reduced_here:
            sizes = mesh_sizes(view.shardings[producer])
            for item in reshard(sizes, have, sizes, settled(have), cost.output_bytes[number]):
                self._collective(item, producer, producer)

    # Reductions of gradients within the backward pass.

    _reduced: list[tuple[GradientBucket, tuple[int, ...]]] = field(default_factory=list)

    def _buckets_by_last_operator(self) -> dict[int, list[GradientBucket]]:
        found: dict[int, list[GradientBucket]] = {}
        if self.fidelity.gradient_sync:
            for bucket in gradient_buckets(self.view, merged=False):
                found.setdefault(bucket.last_operator, []).append(bucket)
        return found

    def _reduce(self, bucket: GradientBucket) -> None:
        last = self._last_chained()
        assert last is not None, "a bucket follows the backward pass that fills it"
        if bucket.copied_back:
            first = len(self.items)
            self._reduced.append((bucket, tuple(range(first, first + len(bucket.collectives)))))
        for collective in bucket.collectives:
            after, last = last, len(self.items)  # shards are summed over replicas once they are scattered
            self.items.append(
                Item(
                    cause="gradient sync",
                    collective=collective,
                    role="reduce",
                    num_calls=bucket.num_calls,
                    num_entries=self._num_entries(collective) if bucket.listed else 0,
                    chained=not self.view.plan.overlap_gradient_sync,
                    after=(after,),
                    operator=bucket.last_operator,
                )
            )

    def _copy_back(self, cause: str) -> None:
        """Copy gradients back from each bucket once it is reduced, after the rest of the pass."""
        last = self._last_chained()
        for bucket, reductions in self._reduced:
            assert last is not None, "reduced gradients have been computed"
            self.items.append(
                Item(
                    cause=cause,
                    parts=[(operator, GRADIENT_COPY) for operator in bucket.copied],
                    chained=False,
                    after=(last, *reductions),
                    operator=bucket.last_operator,
                )
            )
