"""T5: encoder and decoder; the original (RMS norm, no biases, relative positions) and Megatron's."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from workloads.graph_builder import GraphBuilder
from workloads.models.blocks import Blocks
from workloads.models.fields import (
    Count,
    Layers,
    Length,
    ModelSpec,
    Probability,
    Width,
    head_dim_of,
    padded_vocab,
)
from workloads.operators import Workload


class T5Spec(ModelSpec):
    """Shape of a T5.

    Attributes:
        layers, decoder_layers: Encoder layers, and decoder layers (as many if not given).
        hidden, heads: Width, attention heads.
        head_dim: Features per head; ``hidden / heads`` if not given.
        ffn: Width inside the MLP; four times ``hidden`` if not given.
        seq_len, decoder_seq_len: Tokens per sample of the two halves.
        vocab: Tokens known, rounded up to ``vocab_multiple``.
        style: ``original``: RMS norm, no biases, relative position bias, dropout inside the MLP.
            ``megatron``: layer norm, biases, learned positions.
        activation: ``relu``, ``gelu``, or ``swiglu`` for the gated kinds (two inner matrices).
        position_buckets: Buckets of the relative position bias (original only).
        tied_embeddings: Output layer is the embedding matrix.
        dropout, attention_dropout: Probabilities.
    """

    family_name: ClassVar[str] = "t5"

    family: Literal["t5"] = "t5"
    layers: Layers
    decoder_layers: Layers | None = None
    hidden: Width
    heads: Width
    head_dim: Width | None = None
    ffn: Width | None = None
    seq_len: Length
    decoder_seq_len: Length
    vocab: Width
    style: Literal["original", "megatron"] = "original"
    activation: Literal["relu", "gelu", "swiglu"] = "relu"
    position_buckets: Count = 32
    tied_embeddings: bool = True
    dropout: Probability = 0.1
    attention_dropout: Probability = 0.1
    vocab_multiple: int = Field(default=128, ge=1, le=2**20)

    @model_validator(mode="after")
    def _check(self) -> T5Spec:
        if self.head_dim is None:
            head_dim_of(self.hidden, self.heads, or_given=True)
        return self


def build(spec: T5Spec, attention: str) -> Workload:
    """Return the operator graph of one training iteration: 5 + 13 L + 21 L' operators (no MLP dropout).

    Raises:
        ValueError: If flash attention is asked of the original style, whose scores have a learned bias.
    """
    megatron = spec.style == "megatron"
    if attention == "flash" and not megatron and spec.position_buckets:
        raise ValueError(
            f"model {spec.name!r} adds a learned relative position bias to its attention scores, which flash "
            "attention kernels do not take; use a runtime with plain attention"
        )
    vocab = padded_vocab(spec.vocab, spec.vocab_multiple)
    graph = GraphBuilder(name=spec.name, family="t5", tokens_per_sample=spec.seq_len + spec.decoder_seq_len)
    blocks = Blocks(
        graph=graph,
        hidden=spec.hidden,
        heads=spec.heads,
        head_dim=spec.head_dim or head_dim_of(spec.hidden, spec.heads),
        ffn=spec.ffn or 4 * spec.hidden,
        kv_heads=spec.heads,
        norm="layer_norm" if megatron else "rms_norm",
        activation=spec.activation,
        attention=attention,
        bias=megatron,
        qkv_bias=megatron,
        dropout=spec.dropout,
        attention_dropout=spec.attention_dropout,
        mlp_dropout=not megatron,
        position_buckets=0 if megatron else spec.position_buckets,
    )
    tie = {"weight": "word_embeddings"}
    embedding = {
        "vocab": vocab,
        "hidden": spec.hidden,
        "positions": max(spec.seq_len, spec.decoder_seq_len) if megatron else 0,
        "dropout": spec.dropout,
    }
    # Megatron's decoder shares the position table as well.
    embedding_ties = {**tie, "positions": "position_embeddings"} if megatron else tie
    tokens = graph.input("tokens", (spec.seq_len,))
    decoder_tokens = graph.input("decoder_tokens", (spec.decoder_seq_len,))
    labels = graph.input("labels", (spec.decoder_seq_len,))
    graph.layer("embedding")
    splits = {"tensor": "vocab", "sequence": "vocab_sequence"}
    x = graph.add("embedding", "embedding", [tokens], embedding, **splits, ties=embedding_ties)
    for index in range(1, spec.layers + 1):
        graph.layer(f"encoder{index}")
        x = blocks.add_pre_norm_layer(x, causal=False, tie="encoder.relative_bias")
    graph.layer("decoder_embedding")
    memory = blocks.add_norm("encoder_final_norm", x)
    x = graph.add("decoder_embedding", "embedding", [decoder_tokens], embedding, **splits, ties=embedding_ties)
    decoder = replace(blocks, prefix="decoder_")
    for index in range(1, (spec.decoder_layers or spec.layers) + 1):
        graph.layer(f"decoder{index}")
        x = decoder.add_decoder_layer(x, memory, tie="decoder.relative_bias")
    graph.layer("head")
    x = blocks.add_norm("final_norm", x)
    head = {"vocab": vocab, "hidden": spec.hidden, "bias": megatron}
    graph.add(
        "lm_loss", "lm_loss", [x, labels], head, tensor="vocab", ties=tie if spec.tied_embeddings else {}
    )
    return graph.build()


def _presets() -> dict[str, T5Spec]:
    found: list[T5Spec] = []
    # Aceso (EuroSys 2024): layers of each half, heads, features per head, MLP width; width 1,024 throughout.
    aceso = {
        "770m": (24, 16, 64, 4096),
        "3b": (24, 32, 128, 16384),
        "6b": (24, 64, 128, 32768),
        "11b": (24, 128, 128, 65536),
        "22b": (48, 128, 128, 65536),
    }
    for size, (layers, heads, head_dim, ffn) in aceso.items():
        found.append(
            T5Spec(
                name=f"t5-{size}", layers=layers, hidden=1024, heads=heads, head_dim=head_dim, ffn=ffn,
                seq_len=2048, decoder_seq_len=512, vocab=30592, style="megatron", activation="gelu",
            )
        )  # fmt: skip
    # Galvatron (VLDB 2023), Table I: total layers in the name; T5-512/4 decodes four tokens.
    for layers in (16, 24):
        for name, length in (("t5-large", 512), ("t5-512-4", 4)):
            found.append(
                T5Spec(
                    name=f"{name}-{2 * layers}", layers=layers, hidden=1024, heads=16, ffn=4096, seq_len=512,
                    decoder_seq_len=length, vocab=32128,
                )
            )  # fmt: skip
    return {spec.name: spec for spec in found}


PRESETS = _presets()
