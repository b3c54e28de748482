"""GNMT: LSTM encoder, first layer both ways, and LSTM decoder that attends to it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from workloads.graph_builder import GraphBuilder
from workloads.models.fields import Length, ModelSpec, Probability, Width
from workloads.operators import Workload

Depth = Annotated[int, Field(ge=2, le=1024)]


class GnmtSpec(ModelSpec):
    """Shape of a GNMT.

    Attributes:
        encoder_layers, decoder_layers: LSTM layers.
        hidden: Their width, and that of the embeddings.
        vocab: Tokens known, of both languages; embeddings and classifier are not tied.
        seq_len, decoder_seq_len: Tokens per sample, padding included.
        dropout: Before every LSTM layer but the first of the decoder.
    """

    family_name: ClassVar[str] = "gnmt"

    family: Literal["gnmt"] = "gnmt"
    encoder_layers: Depth
    decoder_layers: Depth
    hidden: Width = 1024
    vocab: Width = 36560
    seq_len: Length = 35
    decoder_seq_len: Length = 36
    dropout: Probability = 0.2


def build(spec: GnmtSpec, attention: str) -> Workload:
    """Return the operator graph of one training iteration; ``attention`` does not matter.

    Every LSTM layer is a layer; embeddings belong to the first ones, the classifier to itself.
    """
    graph = GraphBuilder(name=spec.name, family="gnmt", tokens_per_sample=spec.seq_len + spec.decoder_seq_len)
    hidden = spec.hidden
    embedding = {"vocab": spec.vocab, "hidden": hidden, "positions": 0, "segments": 0, "dropout": 0.0}

    def lstm(role: str, x: str, wide: int, *, bidirectional: bool = False) -> str:
        if spec.dropout > 0:
            x = graph.add(f"{role}_dropout", "dropout", [x], {"probability": spec.dropout})
        shape = {"in": wide, "hidden": hidden, "bidirectional": bidirectional}
        return graph.add(role, "lstm", [x], shape)

    source = graph.input("source", (spec.seq_len,))
    target = graph.input("target", (spec.decoder_seq_len,))
    labels = graph.input("labels", (spec.decoder_seq_len,))
    graph.layer("enc1")
    x = graph.add("embedding", "embedding", [source], embedding, tensor="vocab")
    x = graph.add("lstm", "lstm", [x], {"in": hidden, "hidden": hidden, "bidirectional": True})
    for number in range(2, spec.encoder_layers + 1):
        graph.layer(f"enc{number}")
        made = lstm("lstm", x, 2 * hidden if number == 2 else hidden)
        x = made if number == 2 else graph.add("residual", "add", [made, x], {})
    memory = x
    graph.layer("dec1")
    y = graph.add("embedding", "embedding", [target], embedding, tensor="vocab")
    y = graph.add("lstm", "lstm", [y], {"in": hidden, "hidden": hidden, "bidirectional": False})
    context = graph.add("attention", "additive_attention", [y, memory], {"hidden": hidden})
    for number in range(2, spec.decoder_layers + 1):
        graph.layer(f"dec{number}")
        joined = graph.add("concat", "concat", [y, context], {})
        made = lstm("lstm", joined, 2 * hidden)
        y = made if number == 2 else graph.add("residual", "add", [made, y], {})
    graph.layer("classifier")
    graph.add("loss", "lm_loss", [y, labels], {"vocab": spec.vocab, "hidden": hidden, "bias": True}, tensor="vocab")
    return graph.build()


# Wu et al. 2016 with 8 + 8 layers; vocabulary and lengths of DAPPLE's released profile (PPoPP 2021): embeddings of
# 36,560 words, activations of 9,175,040 and 9,437,184 bytes of 64 samples (35 and 36 tokens).
PRESETS = {
    "gnmt-16": GnmtSpec(name="gnmt-16", encoder_layers=8, decoder_layers=8),
    "gnmt-8": GnmtSpec(name="gnmt-8", encoder_layers=4, decoder_layers=4, vocab=32320),
}
