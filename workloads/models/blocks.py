"""The parts of a transformer layer that the model families share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from workloads.graph_builder import GraphBuilder
from workloads.kinds.base import Attributes
from workloads.models.fields import TransformerSpec, head_dim_of

ATTENTIONS = ("plain", "flash")
SOFTMAX_OF = {
    "cross": "softmax_cross", "self_causal": "softmax_causal", "self_causal_repeated": "softmax_causal"
}  # fmt: skip
"""Attributes of the softmax by those of the attention around it; ``softmax`` for others."""


def check_attention(attention: str) -> None:
    """Raise ValueError unless ``attention`` is one of ATTENTIONS."""
    if attention not in ATTENTIONS:
        raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)}, got {attention!r}")


@dataclass(frozen=True)
class Blocks:
    """Adds attention, MLP, norms and residuals of one width to a graph.

    Splits are Megatron's: query-key-value and first MLP projection by column, the projections after them by
    row, attention by head, norms and residuals replicated (cut along the sequence under sequence
    parallelism). The alternative swaps column and row (Aceso's second algorithm).

    Attributes:
        graph: Where operators go.
        hidden, heads, head_dim, ffn: Shape; the attention is ``heads * head_dim`` wide.
        kv_heads: Key-value heads.
        norm: Kind of the norms.
        activation: Kind of the activation; ``swiglu`` doubles the first projection.
        attention: ``"plain"`` or ``"flash"``.
        bias: Linears have a bias.
        qkv_bias: The query-key-value projection has one.
        output_bias: The projection after attention has one, where others have none.
        dropout: Probability after attention, after the MLP (and inside it where ``mlp_dropout``).
        attention_dropout: Probability on attention probabilities; 0: no such operator.
        mlp_dropout: Dropout after the activation (T5).
        position_buckets: Buckets of a learned relative position bias (T5), 0: none.
        rotary: Rotary position embedding.
        residual_role: Word for the residual operators: ``post_attention_<word>``.
        prefix: Put before every role, where two stacks of one model differ in shape (T5's decoder).
    """

    graph: GraphBuilder
    hidden: int
    heads: int
    head_dim: int
    ffn: int
    kv_heads: int
    norm: str = "layer_norm"
    activation: str = "gelu"
    attention: str = "plain"
    bias: bool = True
    qkv_bias: bool = True
    output_bias: bool = False
    dropout: float = 0.1
    attention_dropout: float = 0.1
    mlp_dropout: bool = False
    position_buckets: int = 0
    rotary: bool = False
    residual_role: str = "dropout"
    prefix: str = ""

    @classmethod
    def of(cls, spec: TransformerSpec, graph: GraphBuilder, attention: str, **more: Any) -> Self:
        """Return the blocks of a specification; ``more`` holds further fields."""
        return cls(
            graph=graph,
            hidden=spec.hidden,
            heads=spec.heads,
            head_dim=head_dim_of(spec.hidden, spec.heads),
            ffn=spec.ffn or 4 * spec.hidden,
            kv_heads=spec.heads,
            attention=attention,
            dropout=spec.dropout,
            attention_dropout=spec.attention_dropout,
            **more,
        )

    @cached_property
    def _attributes(self) -> dict[str, Attributes]:
        """One mapping per sort of operator, shared by all layers."""
        hidden, inner = self.hidden, self.heads * self.head_dim
        packed = (self.heads + 2 * self.kv_heads) * self.head_dim
        first = 2 * self.ffn if self.activation == "swiglu" else self.ffn
        attention: dict[str, int | float | bool | str] = {
            "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim
        }  # fmt: skip
        softmax: dict[str, int | float | bool | str] = {"heads": self.heads}
        if self.position_buckets:
            softmax["position_buckets"] = self.position_buckets
        return {
            "norm": {"hidden": hidden},
            "qkv": {"in": hidden, "out": packed, "bias": self.qkv_bias, "groups": self.kv_heads},
            "cross_qkv": {
                "in": hidden,
                "query_out": inner,
                "key_value_out": 2 * self.kv_heads * self.head_dim,
                "bias": self.qkv_bias,
                "groups": self.kv_heads,
            },
            "self": {**attention, "causal": False},
            "self_causal": {**attention, "causal": True},
            "self_repeats": {**attention, "causal": False, "repeats": True},
            "self_causal_repeats": {**attention, "causal": True, "repeats": True},
            "self_repeated": {**attention, "kv_heads": self.heads, "causal": False},
            "self_causal_repeated": {**attention, "kv_heads": self.heads, "causal": True},
            "cross": {**attention, "causal": False, "cross": True},
            "softmax": softmax,
            "softmax_causal": {**softmax, "causal": True},
            "softmax_cross": {"heads": self.heads},
            "attention_dropout": {"probability": self.attention_dropout, "scores": True, "heads": self.heads},
            "dense": {
                "in": inner,
                "out": hidden,
                "bias": self.bias or self.output_bias,
                "in_groups": self.kv_heads,
                "defer_bias": True,
            },
            "residual": {"probability": self.dropout, **({} if self.bias else {"bias": False})},
            "linear_1": {
                "in": hidden,
                "out": first,
                "bias": self.bias,
                "groups": self.ffn,
                "defer_bias": True,
            },
            "activation": {"groups": self.ffn},
            "mlp_dropout": {"probability": self.dropout, "groups": self.ffn},
            "linear_2": {"in": self.ffn, "out": hidden, "bias": self.bias, "defer_bias": True},
        }

    def add_norm(self, role: str, x: str) -> str:
        """Add a norm of ``x``."""
        return self.graph.add(self.prefix + role, self.norm, [x], self._attributes["norm"], sequence="sequence")

    def add_residual(self, role: str, x: str, residual: str) -> str:
        """Add dropout of ``x`` and its sum with ``residual``; ``role`` is ``attention`` or ``mlp``."""
        return self.graph.add(
            f"{self.prefix}post_{role}_{self.residual_role}",
            "dropout_add",
            [x, residual],
            self._attributes["residual"],
            sequence="sequence",
        )

    def add_self_attention(self, x: str, *, causal: bool, tie: str | None = None) -> str:
        """Add self attention, query-key-value projection to output projection.

        Args:
            x: Input features.
            causal: Later tokens are masked.
            tie: Tie key of the relative position bias, if the model has one.
        """
        qkv = self._add_column("attention_qkv", "qkv", x)
        which = "self_causal" if causal else "self"
        if self.rotary:
            repeats = self.attention == "plain" and self.kv_heads < self.heads
            attributes = self._attributes[f"{which}_repeats" if repeats else which]
            qkv = self.graph.add(f"{self.prefix}attention_rotary", "rotary", [qkv], attributes, tensor="head")
            which = f"{which}_repeated" if repeats else which
        return self._add_attention("attention", qkv, qkv, which, tie)

    def add_cross_attention(self, x: str, memory: str) -> str:
        """Add attention of ``x`` to ``memory`` (an encoder's output)."""
        query, key_value = self.graph.add_with_outputs(
            f"{self.prefix}cross_attention_qkv",
            "cross_projection",
            [x, memory],
            self._attributes["cross_qkv"],
            tensor="column",
            alternative="row",
        )
        return self._add_attention("cross_attention", query, key_value, "cross", None)

    def _add_column(self, role: str, key: str, x: str) -> str:
        attributes = self._attributes[key]
        return self.graph.add(self.prefix + role, "linear", [x], attributes, tensor="column", alternative="row")

    def _add_row(self, role: str, key: str, x: str) -> str:
        attributes = self._attributes[key]
        sequence = "row_sequence" if self.bias else "row"
        return self.graph.add(
            role, "linear", [x], attributes, tensor="row", alternative="column", sequence=sequence
        )

    def _add_attention(self, prefix: str, query: str, key: str, which: str, tie: str | None) -> str:
        graph, attributes = self.graph, self._attributes
        prefix = self.prefix + prefix
        if self.attention == "flash":
            context = graph.add(
                f"{prefix}_flash", "flash_attention", [query, key], attributes[which], tensor="head"
            )
        else:
            scores = graph.add(
                f"{prefix}_score", "attention_score", [query, key], attributes[which], tensor="head"
            )
            ties: Mapping[str, str] = {"relative_bias": tie} if tie and self.position_buckets else {}
            softmax = attributes[SOFTMAX_OF.get(which, "softmax")]
            scores = graph.add(f"{prefix}_softmax", "softmax", [scores], softmax, tensor="head", ties=ties)
            if self.attention_dropout > 0:
                scores = graph.add(
                    f"{prefix}_dropout", "dropout", [scores], attributes["attention_dropout"], tensor="head"
                )
            context = graph.add(
                f"{prefix}_context", "attention_context", [scores, key], attributes[which], tensor="head"
            )
        return self._add_row(f"{prefix}_dense", "dense", context)

    def add_mlp(self, x: str) -> str:
        """Add projection, activation (dropout) and projection back."""
        graph, attributes = self.graph, self._attributes
        x = self._add_column("mlp_linear_1", "linear_1", x)
        x = graph.add(f"{self.prefix}mlp_activation", self.activation, [x], attributes["activation"], tensor="column")
        if self.mlp_dropout and self.dropout > 0:
            x = graph.add(f"{self.prefix}mlp_dropout", "dropout", [x], attributes["mlp_dropout"], tensor="column")
        return self._add_row(f"{self.prefix}mlp_linear_2", "linear_2", x)

    def add_pre_norm_layer(
        self, x: str, *, causal: bool, parallel: bool = False, tie: str | None = None
    ) -> str:
        """Add a layer whose norms come first (GPT, ViT, T5, LLaMA).

        Args:
            x: The residual stream.
            causal: Later tokens are masked.
            parallel: The MLP reads the layer's input, not the attention's sum (GPT-NeoX).
            tie: See :meth:`add_self_attention`.
        """
        attended = self.add_self_attention(self.add_norm("norm_1", x), causal=causal, tie=tie)
        middle = self.add_residual("attention", attended, x)
        changed = self.add_mlp(self.add_norm("norm_2", x if parallel else middle))
        return self.add_residual("mlp", changed, middle)

    def add_post_norm_layer(self, x: str) -> str:
        """Add a bidirectional layer whose norms follow the residual sums (BERT)."""
        attended = self.add_self_attention(x, causal=False)
        x = self.add_norm("norm_1", self.add_residual("attention", attended, x))
        return self.add_norm("norm_2", self.add_residual("mlp", self.add_mlp(x), x))

    def add_decoder_layer(self, x: str, memory: str, *, tie: str | None = None) -> str:
        """Add a causal layer with cross attention to ``memory`` (T5)."""
        attended = self.add_self_attention(self.add_norm("norm_1", x), causal=True, tie=tie)
        x = self.add_residual("attention", attended, x)
        attended = self.add_cross_attention(self.add_norm("norm_2", x), memory)
        x = self.add_residual("cross_attention", attended, x)
        return self.add_residual("mlp", self.add_mlp(self.add_norm("norm_3", x)), x)
