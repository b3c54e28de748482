"""Matrix products with a weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from workloads.kernels import Kernel, Matmul, MemoryBound
from workloads.kinds.attributes import flag, integer, require_rank, size_bytes
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
from workloads.placements import PARTIAL, REPLICATE, Shard


@register
class Linear(Kind):
    """``(B, S, in) -> (B, S, out)`` with a weight ``(out, in)``.

    Attributes of the operator: ``in``, ``out``, ``bias``; ``groups``, what a column split must divide (heads
    for the query-key-value projection; default ``out``); ``in_groups``, what a row split must divide (heads
    for the projection after attention; default ``in``); ``defer_bias``, the next operator can add the bias
    in its own kernel (where the implementation fuses so).

    ``row_sequence`` is a row split whose sum is scattered along the sequence before the bias is added (Megatron-LM,
    RowParallelLinear under sequence parallelism): each rank adds it to its part, and has the gradient of that.
    """

    name = "linear"

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        shape = inputs[0]
        require_rank(self.name, shape, 3, "(samples, tokens, features)")
        if shape[-1] != integer(attributes, "in"):
            raise ValueError(f"linear has in={attributes['in']} features, got an input of shape {shape}")
        return ((*shape[:-1], integer(attributes, "out")),)

    def parameters(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Parameter, ...]:
        out = integer(attributes, "out")
        weight = Parameter("weight", (out, integer(attributes, "in")))
        return (weight, Parameter("bias", (out,))) if flag(attributes, "bias", True) else (weight,)

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        bias = flag(attributes, "bias", True)
        return SplitTable(
            num_inputs=1,
            num_outputs=1,
            num_parameters=2 if bias else 1,
            own={
                "column": Split((REPLICATE,), (Shard(2),), (Shard(0), Shard(0))[: 1 + bias]),
                "row": Split(
                    (Shard(2),), (PARTIAL,), (Shard(1), REPLICATE)[: 1 + bias], whole_gradients=(1,)
                ),
                "sequence": Split((Shard(1),), (Shard(1),), (REPLICATE, REPLICATE)[: 1 + bias]),
                "row_sequence": Split(
                    (Shard(2),), (PARTIAL,), (Shard(1), REPLICATE)[: 1 + bias], part_gradients=(1,)
                ),
            },
        ).build()

    def split_limit(self, attributes: Attributes, split: str) -> int | None:
        if split == "column":
            return integer(attributes, "groups", integer(attributes, "out"))
        if split in ("row", "row_sequence"):
            return integer(attributes, "in_groups", integer(attributes, "in"))
        return None

    def saved(self, local: Local) -> tuple[Saved, ...]:
        return (Saved("input:0"),)

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        rows = prod(local.inputs[0][:-1])
        num_in, num_out = local.inputs[0][-1], local.outputs[0][-1]
        out_bytes = size_bytes(local, local.outputs) / local.degree("row_sequence")
        bias = flag(local.attributes, "bias", True)
        if phase == FORWARD:
            found: list[Kernel] = [Matmul(m=rows, n=num_out, k=num_in)]
            deferred = flag(local.attributes, "defer_bias") and local.implementation.fused_bias_activation
            if bias and not deferred and not local.implementation.bias_in_matmul:
                found.append(MemoryBound(out_bytes, out_bytes))
            return found
        if phase == BACKWARD_INPUT:
            return [Matmul(m=rows, n=num_in, k=num_out, role="data_gradient")]
        found = [Matmul(m=num_out, n=num_in, k=rows, role="weight_gradient")]
        if bias:
            found.append(MemoryBound(out_bytes, float(num_out * local.element_bytes), "reduction"))
        return found


@register
class CrossProjection(Kind):
    """Queries of one stream, keys and values of another, as one operator (Aceso's ``dec-attention-qkv-2``).

    Inputs ``(x (B, Sq, H), memory (B, Sk, H))``, outputs ``(queries (B, Sq, A D), pairs (B, Sk, 2 G D))``.

    Attributes of the operator: ``in``, ``query_out``, ``key_value_out``, ``bias``, ``groups``.
    """

    name = "cross_projection"
    num_inputs = 2

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        for shape in inputs:
            require_rank(self.name, shape, 3, "(samples, tokens, features)")
            if shape[-1] != integer(attributes, "in"):
                raise ValueError(
                    f"cross_projection has in={attributes['in']} features, got an input of {shape}"
                )
        return (
            (*inputs[0][:-1], integer(attributes, "query_out")),
            (*inputs[1][:-1], integer(attributes, "key_value_out")),
        )

    def parameters(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Parameter, ...]:
        num_in, outs = integer(attributes, "in"), ("query", "key_value")
        sizes = {name: integer(attributes, f"{name}_out") for name in outs}
        weights = tuple(Parameter(f"{name}_weight", (sizes[name], num_in)) for name in outs)
        if not flag(attributes, "bias", True):
            return weights
        return (*weights, *(Parameter(f"{name}_bias", (sizes[name],)) for name in outs))

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        count = 4 if flag(attributes, "bias", True) else 2
        biases = (REPLICATE,) * (count - 2)
        own = {
            "column": Split((REPLICATE,) * 2, (Shard(2),) * 2, (Shard(0),) * count),
            "row": Split(
                (Shard(2),) * 2, (PARTIAL,) * 2, (Shard(1), Shard(1), *biases), whole_gradients=(2, 3)
            ),
            "sequence": Split((Shard(1),) * 2, (Shard(1),) * 2, (REPLICATE,) * count),
        }
        return SplitTable(2, 2, count, own).build()

    def split_limit(self, attributes: Attributes, split: str) -> int | None:
        if split == "column":
            return integer(attributes, "groups", integer(attributes, "query_out"))
        return integer(attributes, "in") if split == "row" else None

    def saved(self, local: Local) -> tuple[Saved, ...]:
        return Saved("input:0"), Saved("input:1")

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        bias = flag(local.attributes, "bias", True)
        found: list[Kernel] = []
        for source, target in zip(local.inputs, local.outputs, strict=True):
            rows, num_in, num_out = prod(source[:-1]), source[-1], target[-1]
            out_bytes = size_bytes(local, (target,))
            if phase == FORWARD:
                found.append(Matmul(m=rows, n=num_out, k=num_in))
                if bias and not local.implementation.bias_in_matmul:
                    found.append(MemoryBound(out_bytes, out_bytes))
            elif phase == BACKWARD_INPUT:
                found.append(Matmul(m=rows, n=num_in, k=num_out, role="data_gradient"))
            else:
                found.append(Matmul(m=num_out, n=num_in, k=rows, role="weight_gradient"))
                if bias:
                    found.append(MemoryBound(out_bytes, float(num_out * local.element_bytes), "reduction"))
        return [*found, *self.gradient_sums(local)] if phase == BACKWARD_INPUT else found

    def gradient_sums(self, local: Local) -> list[Kernel]:
        # Every decoder layer adds its gradient of the memory to the others'.
        memory = size_bytes(local, local.inputs[1:])
        return [MemoryBound(2 * memory, memory)]


@register
class Pooler(Kind):
    """The first token through a square linear and tanh: ``(B, S, H) -> (B, H)`` (BERT).

    Attributes of the operator: ``hidden``.
    """

    name = "pooler"
    parts_late = True

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        require_rank(self.name, inputs[0], 3, "(samples, tokens, features)")
        return ((inputs[0][0], inputs[0][2]),)

    def parameters(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Parameter, ...]:
        hidden = integer(attributes, "hidden")
        return Parameter("weight", (hidden, hidden)), Parameter("bias", (hidden,))

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        return SplitTable(num_inputs=1, num_outputs=1, num_parameters=2).build()

    def workspace(self, phase: str, local: Local) -> tuple[tuple[Shape, str], ...]:
        return () if phase == FORWARD else ((local.outputs[0], "activation"),)

    def saved(self, local: Local) -> tuple[Saved, ...]:
        # The linear keeps a view of the first token, hence the whole input.
        return Saved("input:0"), Saved("output:0")

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        samples, hidden = local.outputs[0]
        pooled = size_bytes(local, local.outputs)
        if phase == FORWARD:
            return [
                Matmul(m=samples, n=hidden, k=hidden),
                MemoryBound(pooled, pooled),
                MemoryBound(pooled, pooled),
            ]
        if phase == BACKWARD_INPUT:
            # tanh, the product, and the gradient of the untouched tokens set to zero.
            return [
                MemoryBound(2 * pooled, pooled),
                Matmul(m=samples, n=hidden, k=hidden, role="data_gradient"),
                MemoryBound(pooled, size_bytes(local, local.inputs)),
            ]
        return [
            Matmul(m=hidden, n=hidden, k=samples, role="weight_gradient"),
            MemoryBound(pooled, float(hidden * local.element_bytes), "reduction"),
        ]
