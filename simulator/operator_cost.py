"""What one operator costs on one rank, for one microbatch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from simulator.lowering.mesh import REDUCTIONS, MeshCollective
from simulator.segments import Segment
from workloads.kinds.base import Parameter

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
        gradient_elements: Local elements of weight gradients that are tensors of their own before they are added.
        workspace_forward_bytes, workspace_backward_bytes: Live only during the forward pass, and while input
            gradients are made.
        workspace_weight_bytes: Live only while weight gradients are made.
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
    gradient_elements: int
    workspace_forward_bytes: float
    workspace_backward_bytes: float
    workspace_weight_bytes: float
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

    def backward_temporaries_bytes(self, bytes_per_element: int, *, inputs: bool, weights: bool) -> tuple[float, float]:
        """Return what lives only while gradients are made, beside input gradients: at first, and at the last product.

        Weight gradients come last; they are new tensors before they are added to those of earlier microbatches.

        Args:
            bytes_per_element: Of weight gradients as they are made.
            inputs, weights: Which gradients are made.
        """
        made = self.workspace_weight_bytes + self.gradient_elements * bytes_per_element
        return self.workspace_backward_bytes if inputs else 0.0, made if weights and self.parameters else 0.0

    def contains(self, item: MeshCollective) -> bool:
        """Return whether the durations contain a collective that the operator owns.

        Those measured with the operator's own collectives do, but for what lays samples out for another mesh.
        """
        return self.includes_collectives and (item.collective in REDUCTIONS or not item.moves_batch)

    @property
    def num_parameter_elements(self) -> int:
        """Local parameter elements."""
        return sum(count for _, count in self.parameters)
