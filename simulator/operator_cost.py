"""What one operator costs on one rank, for one microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from simulator.lowering.mesh import REDUCTIONS, MeshCollective
from simulator.segments import Segment
from workloads.kinds.base import GRADIENTS, RESULTS, Parameter

SizedStep = tuple[str, int]
"""A name, and bytes: above 0 taken, 0 made, below given back."""

BACKWARD_WEIGHT_ALONE = "backward_weight_alone"
RECOMPUTED = "recomputed"
"""Phases of those names of ``OperatorCost``."""


@dataclass(frozen=True)
class OperatorCost:
    """One operator on one rank for one microbatch.

    Attributes:
        forward, backward_input: Work of each phase.
        recomputed: The forward pass once more, with what recomputation costs the host besides.
        backward_weight_alone: The weight phase of a pass whose gradients are added to none.
        later_additions: What others have besides (``Runtime.hands_over_gradients``).
        input_bytes, output_bytes: Local bytes of each input and output.
        saved: ``(reference, bytes)`` of what forward keeps; references name ``input:i``/``output:i``.
        parameters: ``(parameter, local elements)``.
        gradients_apart: Local elements of each weight gradient that is a tensor of its own before it is added.
        workspace_forward, workspace_backward: Bytes of each tensor that lives only during the forward pass, and while
            input gradients are made.
        workspace_weight: Of each that lives only while weight gradients are made.
        steps_forward, steps_backward: In what order memory is taken and given back (``workloads.local.memory_steps``)
            by the forward pass, and while input gradients are made.
        lasting_buffer_bytes: Never given back; operators of one device share the largest.
        matmul_flop: FLOPs of matmuls, forward only.
        internal: Collectives inside the operator, per phase.
        includes_collectives: The durations were measured with the operator's own collectives in them.
        has_waited: They are of the operator measured by itself, host and all, or grown from such.
    """

    forward: Segment
    recomputed: Segment
    backward_input: Segment
    backward_weight_alone: Segment
    later_additions: Segment
    input_bytes: tuple[float, ...]
    output_bytes: tuple[float, ...]
    saved: tuple[tuple[str, float], ...]
    parameters: tuple[tuple[Parameter, int], ...]
    gradients_apart: tuple[int, ...]
    workspace_forward: tuple[int, ...]
    workspace_backward: tuple[int, ...]
    workspace_weight: tuple[int, ...]
    steps_forward: tuple[SizedStep, ...]
    steps_backward: tuple[SizedStep, ...]
    lasting_buffer_bytes: float
    matmul_flop: float
    internal: tuple[tuple[str, MeshCollective], ...]
    includes_collectives: bool
    has_waited: bool

    @cached_property
    def backward_weight(self) -> Segment:
        """The weight phase of any pass but the first."""
        return self.backward_weight_alone.then(self.later_additions)

    @property
    def backward(self) -> Segment:
        """Both gradients."""
        return self.backward_input.then(self.backward_weight)

    @property
    def backward_alone(self) -> Segment:
        """Both gradients, added to none."""
        return self.backward_input.then(self.backward_weight_alone)

    @property
    def workspace_forward_bytes(self) -> int:
        """What lives only during the forward pass."""
        return sum(self.workspace_forward)

    @property
    def workspace_backward_bytes(self) -> int:
        """What lives only while input gradients are made."""
        return sum(self.workspace_backward)

    @property
    def workspace_weight_bytes(self) -> int:
        """What lives only while weight gradients are made."""
        return sum(self.workspace_weight)

    @property
    def gradient_elements(self) -> int:
        """Local elements of weight gradients that are tensors of their own before they are added."""
        return sum(self.gradients_apart)

    def product_temporaries(self, bytes_per_element: int) -> tuple[int, ...]:
        """Return the bytes of each tensor that lives only while weight gradients are made.

        They come last; they are new tensors before they are added to those of earlier microbatches.

        Args:
            bytes_per_element: Of weight gradients as they are made.
        """
        if not self.parameters:
            return ()
        return (*self.workspace_weight, *(count * bytes_per_element for count in self.gradients_apart))

    def beside_input_gradients(self, made_bytes: float, size_of: Callable[[float], float] = float) -> float:
        """Return the most that lives while input gradients are made, beyond these: gradients of outputs, and buffers.

        Args:
            made_bytes: Of input gradients.
            size_of: What a tensor takes of the bytes asked for.
        """
        live: dict[str, float] = {GRADIENTS: sum(map(size_of, self.output_bytes))}
        most = live[GRADIENTS]
        for name, size in self.steps_backward:
            live[name] = made_bytes if name == RESULTS else size_of(max(size, 0))
            most = max(most, sum(live.values()))
        return max(most - made_bytes, 0.0)

    @property
    def given_back_bytes(self) -> float:
        """Of the gradients of outputs, what is given back before backward is through."""
        return sum(self.output_bytes) if any(name == GRADIENTS for name, _ in self.steps_backward) else 0.0

    def contains(self, item: MeshCollective) -> bool:
        """Return whether the durations contain a collective that the operator owns.

        Those measured with the operator's own collectives do, but for what lays samples out for another mesh.
        """
        return self.includes_collectives and (item.collective in REDUCTIONS or not item.moves_batch)

    @property
    def num_parameter_elements(self) -> int:
        """Local parameter elements."""
        return sum(count for _, count in self.parameters)
