"""What a layer holds, from walking its operators as the shared closed form of memory walks a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from simulator.closed_forms.operator_needs import held_ends, held_ends_bytes, never_given_back_bytes, working_bytes
from simulator.costs import CostTables
from simulator.operator_cost import OperatorCost
from simulator.saved import is_private, saved_tensors


class LayerMemory(NamedTuple):
    """One layer for one microbatch on one rank, in bytes.

    Attributes:
        saved_bytes: Kept for backward, the input included.
        input_bytes: Of that, the layer's input.
        core_saved_bytes: Of that, what checkpointing lets go: the core's, without the input.
        core_input_bytes: What the core keeps of its input.
        core_unkept_bytes: What enters the core and nobody keeps (Swin's patch merging needs its shape alone), which
            checkpointing does.
        peak_bytes: The most that its backward pass needs, of what is kept what is there by then.
        waiting_peak_bytes: The same with weight gradients of the operators behind, as they wait where those of a layer
            are joined before they are scattered (``Runtime.waiting_gradient_share``).
        again_peak_bytes, again_waiting_peak_bytes: Both where the core is computed again.
        early_peak_bytes, again_early_peak_bytes: The most of operators before the last one that has a tied parameter.
        output_bytes: What leaves the layer.
        unkept_output_bytes: All that later layers read and nothing here keeps.
        far_input_bytes: What it reads of layers before the one before it (an encoder's output). The first layer that
            reads it keeps it for all; a stage that begins behind that one holds it, too.
        buffer_bytes: What operators take once and never give back, as all of a device share.
    """

    saved_bytes: float
    input_bytes: float
    core_saved_bytes: float
    core_input_bytes: float
    core_unkept_bytes: float
    peak_bytes: float
    waiting_peak_bytes: float
    again_peak_bytes: float
    again_waiting_peak_bytes: float
    early_peak_bytes: float
    again_early_peak_bytes: float
    output_bytes: float
    unkept_output_bytes: float
    far_input_bytes: float
    buffer_bytes: float

    @property
    def checkpointed_bytes(self) -> float:
        """What is kept where the core is computed again."""
        return self.saved_bytes - self.core_saved_bytes + self.core_unkept_bytes


class LayerWalk:
    """Walks the operators of a layer.

    Args:
        costs: Cost tables.
        span, core: Of the layer, where checkpointing computes the core again.
        before: First operator of the layer before; that of this one for the first.
        cost_of: What an operator costs.
    """

    def __init__(
        self,
        costs: CostTables,
        span: tuple[int, int],
        core: tuple[int, int],
        before: int,
        cost_of: Callable[[int], OperatorCost],
    ) -> None:
        self.costs = costs
        self.workload = costs.problem.workload
        self.start, self.stop = span
        self.core = core
        self.before = before
        self.operators = range(*span)
        self.cost = {index: cost_of(index) for index in self.operators}
        self.kept, self.entered = self._tensors()

    def memory(self) -> LayerMemory:
        """Return what the layer holds."""
        core_input = {
            name
            for name in self.kept
            if not is_private(name) and self.workload.producer.get(name, -1) < self.core[0]
        }
        inside = {name: size for name, (size, index) in self.kept.items() if self._in_core(index)}
        outputs = [self.cost[index].output_bytes for index in self.operators if self.cost[index].output_bytes]
        return LayerMemory(
            saved_bytes=sum(size for size, _ in self.kept.values()),
            input_bytes=sum(size for name, (size, _) in self.kept.items() if self._comes_from(name) == "before"),
            core_saved_bytes=sum(size for name, size in inside.items() if name not in core_input),
            core_input_bytes=sum(size for name, size in inside.items() if name in core_input),
            core_unkept_bytes=sum(self.entered.values()),
            **self._peaks(core_input),
            output_bytes=outputs[-1][0] if outputs else 0.0,
            unkept_output_bytes=sum(self._unkept_outputs()),
            far_input_bytes=sum(size for name, size in self.received().items() if self._comes_from(name) == "far"),
            buffer_bytes=max(never_given_back_bytes(cost, self.costs.problem) for cost in self.cost.values()),
        )

    def received(self) -> dict[str, float]:
        """Return bytes by name of what other layers make and this one reads, as it reads it first."""
        found: dict[str, float] = {}
        for index in self.operators:
            for name, size in zip(self.workload.operators[index].inputs, self.cost[index].input_bytes, strict=True):
                if self.workload.producer.get(name, self.start) < self.start:
                    found.setdefault(name, size)
        return found

    def _unkept_outputs(self) -> Iterator[float]:
        for index in self.operators:
            for name, size in zip(self.workload.operators[index].outputs, self.cost[index].output_bytes, strict=True):
                if name not in self.kept and self.workload.consumers.get(name, (0,))[-1] >= self.stop:
                    yield size

    def _in_core(self, index: int) -> bool:
        return self.core[0] <= index < self.core[1]

    def _comes_from(self, name: str) -> str:
        """Return whether a tensor is made in the layer, in the one before, or far away (an encoder's output).

        What a far layer makes is held once for all that read it; graph inputs count as made here.
        """
        producer = self.workload.producer.get(name, self.start)
        return "here" if producer >= self.start else "before" if producer >= self.before else "far"

    def _tensors(self) -> tuple[dict[str, tuple[float, int]], dict[str, float]]:
        """Return what is kept, with who keeps it first, and what enters the core and nobody keeps."""
        saved: dict[str, tuple[float, int]] = {}
        entered: dict[str, float] = {}
        for index in self.operators:
            for name, size in saved_tensors(self.workload, index, self.cost[index]):
                saved.setdefault(name, (size, index))
            if self._in_core(index):
                for name, size in zip(self.workload.operators[index].inputs, self.cost[index].input_bytes, strict=True):
                    if self.workload.producer.get(name, index) < self.core[0]:
                        entered[name] = size
        unkept = {
            name: size for name, size in entered.items() if name not in saved and self._comes_from(name) != "far"
        }
        return {name: value for name, value in saved.items() if self._comes_from(name) != "far"}, unkept

    def _peaks(self, core_input: set[str]) -> dict[str, float]:
        needed = self._needed()
        plain, outside, inside = (dict.fromkeys(self.operators, 0.0) for _ in range(3))
        for name, (size, index) in self.kept.items():
            plain[index] += size
            in_segment = self._in_core(index) and name not in core_input
            (inside if in_segment else outside)[index] += size
        ends = held_ends(self.core, self.cost.__getitem__, self.costs.problem)
        # What the core is computed again from stays to its end.
        outside[self.core[0]] += sum(self.entered.values())
        outside[self.core[0]] += sum(outside[index] for index in range(self.core[0] + 1, self.core[1]))
        held = again_held = again = 0.0
        peaks, again_peaks = {}, {}
        made_again: dict[str, float] = {}
        saved_by: dict[int, dict[str, float]] = {}
        for name, (size, saver) in self.kept.items():
            saved_by.setdefault(saver, {})[name] = size
        for index in self.operators:
            held, again = held + plain[index], again + inside[index]
            made_again.update(saved_by.get(index, {}))
            peaks[index] = held + needed[index]
            if not self._in_core(index):
                again_held += outside[index]
                again_peaks[index] = again_held + needed[index]
                continue
            again_held += outside[index] if index == self.core[0] else 0.0
            again_peaks[index] = again_held + again + needed[index] + held_ends_bytes(ends, index, made_again)
            if any(end.maker == index for end in ends):
                again_peaks[index] += self.cost[index].given_back_bytes
        tied = [i for i in self.operators if any(p.tie is not None for p in self.workload.parameters(i))]
        early = range(self.start, tied[-1]) if tied else ()
        return {
            "peak_bytes": max(peaks.values()),
            "waiting_peak_bytes": self._with_waiting(peaks),
            "again_peak_bytes": max(again_peaks.values()),
            "again_waiting_peak_bytes": self._with_waiting(again_peaks),
            "early_peak_bytes": max((peaks[index] for index in early), default=0.0),
            "again_early_peak_bytes": max((again_peaks[index] for index in early), default=0.0),
        }

    def _needed(self) -> dict[int, float]:
        """Return by operator what it works in, and gradients that wait for others."""
        waiting, found = self.received(), {}
        for index in self.operators:
            op, cost = self.workload.operators[index], self.cost[index]
            for name in op.inputs:
                if name in waiting and self.workload.consumers[name][-1] == index:
                    del waiting[name]
            found[index] = working_bytes(index, cost, self.costs.problem, alone=False) + sum(waiting.values())
            sizes = zip(op.outputs, cost.output_bytes, strict=True)
            waiting.update({name: size for name, size in sizes if name in self.workload.consumers})
        return found

    def _with_waiting(self, peaks: dict[int, float]) -> float:
        """Return the largest of peaks with the weight gradients that operators behind have made by then.

        Those of a head are gone where what is scattered is freed once that is launched (the first FSDP), unless they
        are the root's, which wait to the end.
        """
        runtime, units = self.costs.problem.runtime, self.costs.units
        share = (runtime.waiting_gradient_share or 0.0) * runtime.travelling_gradient_bytes
        highest = behind = 0.0
        for index in self.operators:
            made = share * sum(elements for _, elements in self.cost[index].parameters)
            lets_go = runtime.flattens_sharded and units[index] not in self.costs.root_units
            if index < self.core[1] or units[index] == units[self.core[0]] or not lets_go:
                highest = max(highest + made, peaks[index])
            else:
                behind = max(behind + made, peaks[index])
        return max(highest, behind)
