"""LLaMA: decoder-only, RMS norm first, rotary positions, grouped key-value heads, SwiGLU, no biases."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from workloads.graph_builder import GraphBuilder
from workloads.models.blocks import Blocks
from workloads.models.fields import (
    Layers,
    Length,
    ModelSpec,
    Probability,
    Width,
    check_rotary,
    head_dim_of,
    padded_vocab,
)
from workloads.operators import Workload


class LlamaSpec(ModelSpec):
    """Shape of a LLaMA (or Mistral, or Qwen2).

    Attributes:
        layers, hidden, heads: Transformer layers, width, query heads.
        kv_heads: Key-value heads; ``heads`` if not given.
        head_dim: Features per head; ``hidden / heads`` if not given.
        ffn: Width inside the MLP (of gate and of up each).
        seq_len: Tokens per sample.
        vocab: Tokens known, rounded up to ``vocab_multiple``.
        qkv_bias: The query-key-value projection has a bias (Qwen2).
        output_bias: The projection after attention has one.
        tied_embeddings: Output layer and embedding are one matrix.
        dropout, attention_dropout: Probabilities.
    """

    family_name: ClassVar[str] = "llama"

    family: Literal["llama"] = "llama"
    layers: Layers
    hidden: Width
    heads: Width
    kv_heads: Width | None = None
    head_dim: Width | None = None
    ffn: Width
    seq_len: Length
    vocab: Width
    qkv_bias: bool = False
    output_bias: bool = False
    tied_embeddings: bool = False
    dropout: Probability = 0.0
    attention_dropout: Probability = 0.0
    vocab_multiple: int = Field(default=128, ge=1, le=2**20)

    @model_validator(mode="after")
    def _check(self) -> LlamaSpec:
        check_rotary(self.head_dim or head_dim_of(self.hidden, self.heads, or_given=True))
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads={self.heads}, got kv_heads={self.kv_heads}")
        return self


def build(spec: LlamaSpec, attention: str) -> Workload:
    """Return the operator graph of one training iteration."""
    vocab = padded_vocab(spec.vocab, spec.vocab_multiple)
    graph = GraphBuilder(name=spec.name, family="llama", tokens_per_sample=spec.seq_len)
    blocks = Blocks(
        graph=graph,
        hidden=spec.hidden,
        heads=spec.heads,
        head_dim=spec.head_dim or head_dim_of(spec.hidden, spec.heads),
        ffn=spec.ffn,
        kv_heads=spec.kv_heads or spec.heads,
        norm="rms_norm",
        activation="swiglu",
        attention=attention,
        bias=False,
        qkv_bias=spec.qkv_bias,
        output_bias=spec.output_bias,
        dropout=spec.dropout,
        attention_dropout=spec.attention_dropout,
        rotary=True,
        residual_role="dropout" if spec.dropout > 0 else "add",
    )
    ties = {"weight": "word_embeddings"} if spec.tied_embeddings else {}
    tokens = graph.input("tokens", (spec.seq_len,))
    labels = graph.input("labels", (spec.seq_len,))
    graph.layer("embedding")
    table = {"vocab": vocab, "hidden": spec.hidden, "dropout": spec.dropout}
    x = graph.add("embedding", "embedding", [tokens], table, tensor="vocab", ties=ties)
    for index in range(1, spec.layers + 1):
        graph.layer(f"layer{index}")
        x = blocks.add_pre_norm_layer(x, causal=True)
    graph.layer("head")
    x = blocks.add_norm("final_norm", x)
    graph.add(
        "lm_loss", "lm_loss", [x, labels], {"vocab": vocab, "hidden": spec.hidden}, tensor="vocab", ties=ties
    )
    return graph.build()


def _spec(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, length: int, vocab: int
) -> LlamaSpec:
    return LlamaSpec(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        seq_len=length,
        vocab=vocab,
    )


# Touvron et al. 2023 (LLaMA 2, 4,096 tokens) and Llama Team 2024 (LLaMA 3, 8,192 tokens); shapes as released.
PRESETS = {
    spec.name: spec
    for spec in (
        _spec("llama2-7b", 32, 4096, 32, 32, 11008, 4096, 32000),
        _spec("llama2-13b", 40, 5120, 40, 40, 13824, 4096, 32000),
        _spec("llama2-70b", 80, 8192, 64, 8, 28672, 4096, 32000),
        _spec("llama3-8b", 32, 4096, 32, 8, 14336, 8192, 128256),
        _spec("llama3-70b", 80, 8192, 64, 8, 28672, 8192, 128256),
    )
}
