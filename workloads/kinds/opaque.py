"""A row of somebody's profile: times and sizes without a definition. Simulates, does not execute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workloads.kernels import Kernel
from workloads.kinds.attributes import integer, real
from workloads.kinds.base import (
    BACKWARD_INPUT,
    FORWARD,
    Attributes,
    Kind,
    Local,
    Parameter,
    Saved,
    Shape,
    Split,
    SplitTable,
)
from workloads.kinds.registry import register


@register
class Opaque(Kind):
    """Stated times and sizes, all per sample, on the device of the profile.

    Attributes of the operator: ``forward_s``, ``backward_s``; ``output_bytes``, ``saved_bytes`` (activations
    kept, own output and inputs excluded); ``num_parameters`` (elements); ``num_inputs`` (1 if not given).
    Tensors are counted in bytes. Backward is stated as one piece: its time is charged to the input gradient.
    """

    name = "opaque"

    def arity(self, attributes: Attributes) -> int:
        return integer(attributes, "num_inputs", 1)

    def input_dtype(self, index: int) -> str:
        return "mask"  # one byte an element

    def output_dtype(self, index: int) -> str:
        return "mask"

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        return ((inputs[0][0], integer(attributes, "output_bytes")),)

    def parameters(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Parameter, ...]:
        count = integer(attributes, "num_parameters", 0)
        return (Parameter("weights", (count,)),) if count else ()

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        num_parameters = 1 if integer(attributes, "num_parameters", 0) else 0
        return SplitTable(self.arity(attributes), 1, num_parameters).build()

    def saved(self, local: Local) -> tuple[Saved, ...]:
        size = integer(local.attributes, "saved_bytes", 0)
        return (Saved("state", (local.inputs[0][0], size), "mask"),) if size else ()

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        return []

    def stated_time_s(self, phase: str, local: Local) -> float | None:
        samples = local.inputs[0][0]
        if phase == FORWARD:
            return real(local.attributes, "forward_s") * samples
        return real(local.attributes, "backward_s") * samples if phase == BACKWARD_INPUT else 0.0
