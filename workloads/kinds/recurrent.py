"""Recurrent layers, the additive attention that goes with them, and concatenation of features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from workloads.kernels import Kernel, Matmul, MemoryBound
from workloads.kinds.attributes import flag, integer, require_rank, size_bytes
from workloads.kinds.base import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
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

GATES = 4
WORDS = "(samples, tokens, features)"


@register
class Lstm(Kind):
    """A layer of long short-term memory over the tokens: ``(B, T, in) -> (B, T, H)``, both ways ``2 H``.

    The product with the inputs is one for all tokens; the product with the state before is one a token, so that a
    layer is a chain of T small kernels each way. Replicas only; it has no tensor split.

    Attributes of the operator: ``in``, ``hidden`` (H), ``bidirectional`` (false).

    Source: cuDNN's layer: two weights, two biases of four gates a direction; kept for backward are the gates and
    the cell of every token.
    """

    name = "lstm"
    takes_library_memory = True

    @staticmethod
    def _directions(attributes: Attributes) -> int:
        return 2 if flag(attributes, "bidirectional") else 1

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        require_rank(self.name, inputs[0], 3, WORDS)
        if inputs[0][2] != integer(attributes, "in"):
            raise ValueError(f"lstm has in={attributes['in']} features, got an input of shape {inputs[0]}")
        return ((*inputs[0][:2], integer(attributes, "hidden") * self._directions(attributes)),)

    def parameters(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Parameter, ...]:
        hidden = integer(attributes, "hidden")
        found = []
        for suffix in ("", "_reverse")[: self._directions(attributes)]:
            found += [
                Parameter(f"weight_input{suffix}", (GATES * hidden, integer(attributes, "in"))),
                Parameter(f"weight_hidden{suffix}", (GATES * hidden, hidden)),
                Parameter(f"bias_input{suffix}", (GATES * hidden,)),
                Parameter(f"bias_hidden{suffix}", (GATES * hidden,)),
            ]
        return tuple(found)

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        return SplitTable(1, 1, 4 * self._directions(attributes)).build()

    def saved(self, local: Local) -> tuple[Saved, ...]:
        samples, tokens, width = local.outputs[0]
        return Saved("input:0"), Saved("output:0"), Saved("gates", (samples, tokens, (GATES + 1) * width))

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        samples, tokens, wide = local.inputs[0]
        hidden = integer(local.attributes, "hidden")
        step = float(local.element_bytes * samples * hidden)
        found: list[Kernel] = []
        for _ in range(self._directions(local.attributes)):
            if phase == FORWARD:
                found.append(Matmul(m=samples * tokens, n=GATES * hidden, k=wide))
                pointwise = MemoryBound(2 * GATES * step, (GATES + 2) * step)
                found += [Matmul(m=samples, n=GATES * hidden, k=hidden), pointwise] * tokens
            elif phase == BACKWARD_INPUT:
                pointwise = MemoryBound((GATES + 3) * step, GATES * step)
                back = Matmul(m=samples, n=hidden, k=GATES * hidden, role="data_gradient")
                found += [pointwise, back] * tokens
                found.append(Matmul(m=samples * tokens, n=wide, k=GATES * hidden, role="data_gradient"))
            elif phase == BACKWARD_WEIGHT:
                for columns in (wide, hidden):
                    found.append(Matmul(m=GATES * hidden, n=columns, k=samples * tokens, role="weight_gradient"))
                biases = float(local.element_bytes * GATES * hidden)
                found.append(MemoryBound(GATES * step * tokens, biases, "reduction"))
        return found


@register
class AdditiveAttention(Kind):
    """Attention whose scores come from a small network: inputs queries ``(B, T, H)``, memory ``(B, S, H)``.

    ``score = v . tanh(W q + U k)`` for every pair, softmax over the memory, output the weighted memory. The sum of
    every pair, ``(B, T, S, H)``, is made and kept, which is most of its memory and time. Replicas only.

    Attributes of the operator: ``hidden`` (H).

    Source: Bahdanau et al., ICLR 2015, as in GNMT's public PyTorch training (without its score normalisation).
    """

    name = "additive_attention"
    num_inputs = 2

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        hidden = integer(attributes, "hidden")
        for shape in inputs:
            require_rank(self.name, shape, 3, WORDS)
            if shape[2] != hidden:
                raise ValueError(f"additive_attention has hidden={hidden}, got inputs of {list(inputs)}")
        return (inputs[0],)

    def parameters(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Parameter, ...]:
        hidden = integer(attributes, "hidden")
        return (
            Parameter("query", (hidden, hidden)),
            Parameter("key", (hidden, hidden)),
            Parameter("score", (hidden,)),
        )

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        return SplitTable(2, 1, 3).build()

    def saved(self, local: Local) -> tuple[Saved, ...]:
        (samples, queries, hidden), (_, keys, _) = local.inputs
        return (
            Saved("input:0"),
            Saved("input:1"),
            Saved("pairs", (samples, queries, keys, hidden)),
            Saved("weights", (samples, queries, keys)),
        )

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        (samples, queries, hidden), (_, keys, _) = local.inputs
        ends = size_bytes(local, local.inputs)
        pairs = float(local.element_bytes * samples * queries * keys * hidden)
        scores = pairs / hidden
        if phase == FORWARD:
            return [
                Matmul(m=samples * queries, n=hidden, k=hidden),
                Matmul(m=samples * keys, n=hidden, k=hidden),
                MemoryBound(ends, pairs),
                MemoryBound(pairs, pairs),
                MemoryBound(pairs, scores, "reduction"),
                MemoryBound(scores, scores, "reduction"),
                Matmul(m=queries, n=hidden, k=keys, batch=samples),
            ]
        if phase == BACKWARD_INPUT:
            return [
                Matmul(m=queries, n=keys, k=hidden, batch=samples, role="data_gradient"),
                Matmul(m=keys, n=hidden, k=queries, batch=samples, role="data_gradient"),
                MemoryBound(2 * scores, scores, "reduction"),
                MemoryBound(scores, pairs),
                MemoryBound(2 * pairs, pairs),
                MemoryBound(2 * pairs, ends, "reduction"),
                Matmul(m=samples * queries, n=hidden, k=hidden, role="data_gradient"),
                Matmul(m=samples * keys, n=hidden, k=hidden, role="data_gradient"),
            ]
        return [
            Matmul(m=hidden, n=hidden, k=samples * queries, role="weight_gradient"),
            Matmul(m=hidden, n=hidden, k=samples * keys, role="weight_gradient"),
            MemoryBound(pairs + scores, float(local.element_bytes * hidden), "reduction"),
        ]


@register
class Concat(Kind):
    """Two inputs side by side: ``(B, T, A), (B, T, C) -> (B, T, A + C)``. Replicas only."""

    name = "concat"
    num_inputs = 2

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        if inputs[0][:-1] != inputs[1][:-1]:
            raise ValueError(f"concat needs inputs that agree in all but the last dimension, got {list(inputs)}")
        return ((*inputs[0][:-1], inputs[0][-1] + inputs[1][-1]),)

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        return SplitTable(2, 1, 0).build()

    def saved(self, local: Local) -> tuple[Saved, ...]:
        return ()

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        size = float(local.element_bytes * sum(prod(shape) for shape in local.inputs))
        return [MemoryBound(size, size)] if phase in (FORWARD, BACKWARD_INPUT) else []
