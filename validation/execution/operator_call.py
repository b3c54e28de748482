"""One operator in an autograd graph of its own, so that the executor decides when what is computed and kept.

The graph between operators is the executor's: it hands gradients from one to the next, with the collectives
in between. What an operator saves for backward goes through hooks where it must not be kept as it is:
gathered parameters (ZeRO-3), gathered inputs, and everything inside a recompute segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from validation.kinds.operator_context import Forward
from validation.kinds.shared_tensors import shared

Fetch = Callable[[], torch.Tensor]
"""Returns a tensor that was let go after forward and is there again."""


@shared
def _empty(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, device=device, dtype=dtype)


def enter(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of ``tensor`` at which gradients can be taken, and whose edge does not hold its data.

    A leaf's edge would: the leaf is emptied once a view of it holds the storage.
    """
    leaf = tensor.detach().requires_grad_()
    view = leaf.view_as(leaf)
    leaf.data = _empty(tensor.device, tensor.dtype)
    return view


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tells a tensor's storage from all others alive, whether or not it holds data."""
    return int(tensor.untyped_storage()._cdata)


class EnoughError(Exception):
    """Everything that backward needs is back: recomputation can stop."""


@dataclass
class Slots:
    """What the operators of a recompute segment save: dropped in forward, filled when computed again."""

    values: list[torch.Tensor | None] = field(default_factory=list)
    filled: int = 0
    stops_early: bool = True

    @property
    def is_full(self) -> bool:
        """Whether the segment has been computed again."""
        return self.filled == len(self.values)

    def add(self) -> int:
        """Return a new slot."""
        self.values.append(None)
        return len(self.values) - 1

    def fill(self, tensor: torch.Tensor) -> None:
        """Fill the next slot.

        Raises:
            EnoughError: If it was the last, and recomputation may stop.
        """
        self.values[self.filled] = tensor.detach()
        self.filled += 1
        if self.stops_early and self.is_full:
            raise EnoughError

    def release(self, start: int, stop: int) -> None:
        """Let go of the slots of an operator whose backward is done."""
        self.values[start:stop] = [None] * (stop - start)


@dataclass(frozen=True)
class _Absent:
    """Stands for a saved tensor that shares storage with one that was let go."""

    fetch: Fetch
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Slot:
    slots: Slots
    number: int


@dataclass
class Call:
    """One operator's forward, waiting for its backward.

    Attributes:
        outputs: Edges of its outputs.
        inputs: Per input the edge at which its gradient is taken, or None (indices, graph inputs).
        parameters: Per parameter the leaf, or the edge of a gathered one.
        gradients: Gradients of the outputs, kept between the two halves of a split backward.
        slots: The recompute segment it is in.
        own_slots: Its part of the segment's slots.
        partings: Where a split backward goes on for the weights; None where it starts again at the outputs.
    """

    outputs: tuple[GradientEdge, ...]
    inputs: tuple[GradientEdge | None, ...]
    parameters: tuple[torch.Tensor | GradientEdge, ...]
    gradients: tuple[torch.Tensor, ...] | None = None
    slots: Slots | None = None
    own_slots: tuple[int, int] = (0, 0)
    partings: list[Parting] | None = None

    def release(self) -> None:
        """Let go of what was kept for backward outside the graph."""
        for parting in self.partings or ():
            parting.release()
        self.gradients = self.partings = None
        if self.slots is not None:
            self.slots.release(*self.own_slots)

    def backward(
        self, gradients: Sequence[torch.Tensor], *, inputs: bool, weights: bool, shares: bool = False
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Return gradients of inputs and of parameters, None where not asked for or not needed.

        Args:
            gradients: One per output.
            inputs, weights: Which gradients to compute. Without ``weights`` the graph stays for them.
            shares: Work before inputs and weights part (a loss before its projection) is not repeated for the
                second half of a split backward.
        """
        if self.partings and weights and not inputs:
            return [None] * len(self.inputs), self._from_partings(self.partings)
        edges = [edge for edge in self.inputs if edge is not None] if inputs else []
        leaves = list(self.parameters) if weights else []
        wanted = [*edges, *leaves]
        if not wanted:
            return [None] * len(self.inputs), [None] * len(self.parameters)
        keeps = inputs and not weights and bool(self.parameters)
        if keeps and shares:
            self.partings = find_partings(self.outputs, edges, self.parameters)
        grad: Any = torch.autograd.grad  # its annotation knows no edges
        found = grad(self.outputs, wanted, gradients, retain_graph=keeps, allow_unused=True)
        if self.partings:
            self.outputs = ()  # what the nodes above the partings have saved is not needed again
        of_edges = iter(found[: len(edges)])
        of_inputs = [None if edge is None or not inputs else next(of_edges) for edge in self.inputs]
        return of_inputs, list(found[len(edges) :]) if weights else [None] * len(self.parameters)

    def _from_partings(self, partings: Sequence[Parting]) -> list[torch.Tensor | None]:
        grad: Any = torch.autograd.grad
        found: list[torch.Tensor | None] = [None] * len(self.parameters)
        for parting in partings:
            edges = [GradientEdge(parting.node, number) for number in parting.gradients]
            wanted = [self.parameters[number] for number in parting.parameters]
            given = grad(edges, wanted, list(parting.gradients.values()), allow_unused=True)
            for number, gradient in zip(parting.parameters, given, strict=True):
                found[number] = gradient
        return found


Reached = dict[Any, tuple[bool, frozenset[int]]]
"""By node, whether it leads to an input, and to which parameters."""


@dataclass
class Parting:
    """A node of the graph behind which the gradients of inputs and of weights part.

    Attributes:
        node: Of autograd.
        parameters: Numbers of the parameters whose gradients leave it.
        gradients: What reached it in the first half, by output.
        hook: What keeps them.
    """

    node: Any
    parameters: list[int]
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    hook: Any = None

    def keep(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Keep what reaches the node; a hook of it."""
        self.gradients = {number: gradient for number, gradient in enumerate(gradients) if gradient is not None}

    def release(self) -> None:
        """Let go of node and gradients: node, hook and parting hold each other until the garbage collector comes."""
        self.hook.remove()
        self.node = self.hook = None
        self.gradients = {}


def find_partings(
    outputs: Sequence[GradientEdge], inputs: Sequence[GradientEdge], parameters: Sequence[torch.Tensor | GradientEdge]
) -> list[Parting] | None:
    """Return where inputs and parameters part, with hooks that keep what arrives; None if a parameter is reached
    otherwise, and the second half must start at the outputs."""
    goals = [x.node if isinstance(x, GradientEdge) else get_gradient_edge(x).node for x in parameters]
    reached: Reached = {}
    for edge in outputs:
        _reach(edge.node, {edge.node for edge in inputs}, goals, reached)
    partings = []
    for node, (to_inputs, _) in reached.items():
        children = [reached[child] for child, _ in node.next_functions if child is not None]
        own = sorted({number for to, numbers in children if not to for number in numbers})
        if to_inputs and own:
            partings.append(Parting(node, own))
    numbers = sorted(number for parting in partings for number in parting.parameters)
    if numbers != list(range(len(parameters))):
        return None
    for parting in partings:
        parting.hook = parting.node.register_prehook(parting.keep)
    return partings


def _reach(node: Any, ends: set[Any], goals: Sequence[Any], reached: Reached) -> tuple[bool, frozenset[int]]:
    """Return what is behind a node, and note it for all nodes there.

    No closure: one that calls itself would hold the graph until the garbage collector comes.
    """
    if node not in reached:
        below = [_reach(child, ends, goals, reached) for child, _ in node.next_functions if child is not None]
        own = frozenset(number for number, goal in enumerate(goals) if goal is node)
        reached[node] = node in ends or any(to for to, _ in below), own.union(*(numbers for _, numbers in below))
    return reached[node]


def call(
    forward: Forward,
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    *,
    needs_gradient: Sequence[bool],
    gathered: Sequence[Fetch | None] = (),
    absent: Mapping[int, Fetch] | None = None,
    slots: Slots | None = None,
    filling: bool = False,
) -> tuple[tuple[torch.Tensor, ...], Call]:
    """Run an operator forward under autograd.

    Args:
        forward: From ``torch_kinds.build``.
        inputs, parameters: This rank's parts.
        needs_gradient: Per input.
        gathered: Per parameter how to get it again if it is let go after forward; None if it stays.
        absent: Input position to how to get it again, for inputs that are let go.
        slots: The recompute segment it is in.
        filling: The segment is being computed again.

    Returns:
        Detached outputs, and what backward needs.
    """
    entered = [enter(x) if wanted else x for x, wanted in zip(inputs, needs_gradient, strict=True)]
    absences: dict[int, tuple[torch.Tensor, Fetch]] = {}
    own = list(parameters)
    for number, fetch in enumerate(gathered):
        if fetch is not None:
            own[number] = enter(parameters[number])
            absences[storage_key(parameters[number])] = (parameters[number], fetch)
    for position, fetch in (absent or {}).items():
        absences[storage_key(inputs[position])] = (inputs[position], fetch)
    staying = {storage_key(parameter) for parameter in own}
    first_slot = len(slots.values) if slots is not None else 0
    with torch.enable_grad():
        if absences or slots is not None:
            with saved_tensors_hooks(_packer(absences, staying, slots, filling=filling), _unpack):
                outputs = forward(entered, own)
            absences.clear()  # autograd holds the hook, which would hold what is let go
        else:
            outputs = forward(entered, own)
    record = Call(
        outputs=tuple(get_gradient_edge(output) for output in outputs),
        inputs=tuple(
            get_gradient_edge(x) if wanted else None for x, wanted in zip(entered, needs_gradient, strict=True)
        ),
        parameters=tuple(
            get_gradient_edge(parameter) if number < len(gathered) and gathered[number] is not None else parameter
            for number, parameter in enumerate(own)
        ),
        slots=slots,
        own_slots=(first_slot, len(slots.values)) if slots is not None else (0, 0),
    )
    return tuple(output.detach() for output in outputs), record


def _packer(
    absences: Mapping[int, tuple[torch.Tensor, Fetch]], staying: set[int], slots: Slots | None, *, filling: bool
) -> Callable[[torch.Tensor], Any]:
    def pack(tensor: torch.Tensor) -> Any:
        storage = storage_key(tensor)
        found = absences.get(storage)
        if found is not None:
            base, fetch = found
            offset = int(tensor.storage_offset()) - int(base.storage_offset())
            return _Absent(fetch, tuple(tensor.size()), tuple(tensor.stride()), offset)
        if slots is None or storage in staying:
            return tensor.detach()  # as it is, an output would hold the node that holds it: never freed
        if filling:
            slots.fill(tensor)
            return None  # this graph is not gone back through
        return _Slot(slots, slots.add())

    return pack


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, _Absent):
        base = packed.fetch()
        if base.dim() == 0:
            # Weight gradients do not read weights; autograd unpacks them all the same.
            return base.expand(packed.size)
        return torch.as_strided(base, packed.size, packed.stride, packed.offset + int(base.storage_offset()))
    if isinstance(packed, _Slot):
        value = packed.slots.values[packed.number]
        assert value is not None, "backward reached an operator whose segment was not computed again"
        return value
    assert isinstance(packed, torch.Tensor)
    return packed
