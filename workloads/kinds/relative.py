"""Attention scores with relative positions and segments, as in Transformer-XL and XLNet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workloads.kernels import Kernel, Matmul, MemoryBound
from workloads.kinds.attributes import integer, require_rank, size_bytes
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
from workloads.kinds.heads import packed_sum, slice_gradients
from workloads.kinds.registry import register
from workloads.placements import Shard

SEGMENTS = 2


@register
class RelativeScore(Kind):
    """Scores of packed queries, keys and values ``(B, S, 3 A D) -> (B, A, S, S)``.

    ``(q + u) . k + (q + v) . (W r) + (q + w) . s``: content, relative position r (a fixed sinusoid, shifted) and
    whether two tokens are in the same segment. Heads can be split. Positions are projected for each sample anew, as the
    authors' code has it, though they are alike; our executor's kernels are in ``_views``.

    Attributes of the operator: ``heads`` (A), ``head_dim`` (D), ``hidden`` (of the sinusoid).

    Source: Dai et al., ACL 2019, Section 3.3; Yang et al., NeurIPS 2019, Section 2.5; transformers 4.40.0,
    modeling_xlnet.py (``relative_positional_encoding``, ``rel_attn_core``).
    """

    name = "relative_score"

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        require_rank(self.name, inputs[0], 3, "(samples, tokens, packed features)")
        heads, dim = integer(attributes, "heads"), integer(attributes, "head_dim")
        if inputs[0][2] != 3 * heads * dim:
            raise ValueError(
                f"relative_score with heads={heads}, head_dim={dim} needs {3 * heads * dim} packed features, got "
                f"{inputs[0]}"
            )
        return ((inputs[0][0], heads, inputs[0][1], inputs[0][1]),)

    def parameters(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Parameter, ...]:
        width = integer(attributes, "heads") * integer(attributes, "head_dim")
        return (
            Parameter("position", (width, integer(attributes, "hidden"))),
            Parameter("content_bias", (width,)),
            Parameter("position_bias", (width,)),
            Parameter("segment_bias", (width,)),
            Parameter("segment", (SEGMENTS, width)),
        )

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        first = Shard(0)
        own = {"head": Split((Shard(2),), (Shard(1),), (first, first, first, first, Shard(1)))}
        return SplitTable(1, 1, 5, own).build()

    def split_limit(self, attributes: Attributes, split: str) -> int | None:
        return integer(attributes, "heads") if split == "head" else None

    def saved(self, local: Local) -> tuple[Saved, ...]:
        samples, heads, tokens, _ = local.outputs[0]
        width = heads * integer(local.attributes, "head_dim")
        far = 2 * tokens - 1
        # The samples' sinusoids are one, until their product copies it (torch; TensorFlow 1 tiles it for all layers).
        encodings = [] if local.implementation.elementary else [(samples, far, integer(local.attributes, "hidden"))]
        return (
            Saved("input:0"),
            Saved("queries", (3, samples, tokens, width)),
            Saved("positions", (samples, far, width)),
            *(Saved("encodings", shape) for shape in encodings),
        )

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        if local.implementation.slices_packed:
            return self._views(phase, local)
        samples, heads, tokens, _ = local.outputs[0]
        dim, hidden = integer(local.attributes, "head_dim"), integer(local.attributes, "hidden")
        far, batch = 2 * tokens - 1, samples * heads
        scores = size_bytes(local, local.outputs)
        queries = float(local.element_bytes * samples * tokens * heads * dim)
        if phase == FORWARD:
            return [
                *[MemoryBound(queries, queries)] * 3,
                Matmul(m=samples * far, n=heads * dim, k=hidden),
                Matmul(m=tokens, n=tokens, k=dim, batch=batch),
                Matmul(m=tokens, n=far, k=dim, batch=batch),
                Matmul(m=tokens, n=SEGMENTS, k=dim, batch=batch),
                MemoryBound(2 * scores, scores, "gather"),
                MemoryBound(scores, scores, "gather"),
                *[MemoryBound(2 * scores, scores)] * 2,
            ]
        if phase == BACKWARD_INPUT:
            return [
                MemoryBound(scores, 2 * scores, "gather"),
                *[Matmul(m=tokens, n=dim, k=tokens, batch=batch, role="data_gradient")] * 2,
                Matmul(m=tokens, n=dim, k=far, batch=batch, role="data_gradient"),
                MemoryBound(3 * queries, queries),
            ]
        return [
            Matmul(m=far, n=dim, k=tokens, batch=batch, role="weight_gradient"),
            Matmul(m=heads * dim, n=hidden, k=samples * far, role="weight_gradient"),
            *[MemoryBound(queries, 0.0, "reduction")] * 3,
            MemoryBound(scores, 0.0, "reduction"),
        ]

    @staticmethod
    def _views(phase: str, local: Local) -> list[Kernel]:
        """Return the kernels of our executor (``validation.kinds.recurrent``), whose terms are views of packed tensors.

        Positions are shifted by strides alone, and the term of two segments is one of two numbers a query.
        """
        samples, heads, tokens, _ = local.outputs[0]
        dim, hidden = integer(local.attributes, "head_dim"), integer(local.attributes, "hidden")
        far, batch, size = 2 * tokens - 1, samples * heads, local.element_bytes
        scores = size_bytes(local, local.outputs)
        queries, places = float(size * batch * tokens * dim), float(size * batch * far * dim)
        encodings = float(size * far * hidden)
        if phase == FORWARD:
            return [
                *[MemoryBound(queries, queries), MemoryBound(queries, queries, "strided")] * 3,
                MemoryBound(queries, queries, "strided"),
                MemoryBound(encodings, samples * encodings),
                Matmul(m=samples * far, n=heads * dim, k=hidden),
                MemoryBound(places, places, "strided"),
                Matmul(m=tokens, n=tokens, k=dim, batch=batch),
                Matmul(m=tokens, n=far, k=dim, batch=batch),
                Matmul(m=tokens, n=SEGMENTS, k=dim, batch=batch),
                MemoryBound(2 * scores, scores, "strided"),
                MemoryBound(0.0, scores, "strided"),
                MemoryBound(2 * scores, scores),
            ]
        if phase == BACKWARD_INPUT:
            return [
                *[MemoryBound(scores, scores, "strided"), MemoryBound(scores, 0.0, "reduction")] * SEGMENTS,
                MemoryBound(0.0, scores / tokens * far),
                MemoryBound(scores, scores, "strided"),
                *[Matmul(m=tokens, n=dim, k=tokens, batch=batch, role="data_gradient")] * 2,
                Matmul(m=tokens, n=dim, k=far, batch=batch, role="data_gradient"),
                Matmul(m=tokens, n=dim, k=SEGMENTS, batch=batch, role="data_gradient"),
                *[MemoryBound(2 * queries, queries)] * 2,
                *slice_gradients(local, [heads * dim] * 2),
                *packed_sum(local),
            ]
        return [
            Matmul(m=far, n=dim, k=tokens, batch=batch, role="weight_gradient"),
            Matmul(m=SEGMENTS, n=dim, k=tokens, batch=batch, role="weight_gradient"),
            MemoryBound(places, places, "strided"),
            Matmul(m=heads * dim, n=hidden, k=samples * far, role="weight_gradient"),
            *[MemoryBound(queries, 0.0, "reduction")] * 3,
        ]
