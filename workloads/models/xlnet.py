"""XLNet: Transformer layers with relative positions and segments, norms after the residual sums."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from workloads.graph_builder import GraphBuilder
from workloads.models.fields import Layers, Length, ModelSpec, Probability, Width, head_dim_of
from workloads.operators import Workload


class XLNetSpec(ModelSpec):
    """Shape of an XLNet (content stream only, as in fine-tuning).

    Attributes:
        layers, hidden, heads: Transformer layers, width, attention heads.
        seq_len: Tokens per sample.
        vocab: Tokens known.
        head: ``words`` predicts words, tied to the embedding; ``span`` where an answer begins and ends, as for SQuAD,
            by two classes a token.
        ffn: Width inside the MLP; four times ``hidden`` if not given.
        dropout: Behind attention and MLP.
        attention_dropout: Of attention probabilities.
    """

    family_name: ClassVar[str] = "xlnet"

    family: Literal["xlnet"] = "xlnet"
    layers: Layers
    hidden: Width
    heads: Width
    seq_len: Length = 512
    vocab: Width = 32000
    ffn: Width | None = None
    dropout: Probability = 0.1
    attention_dropout: Probability = 0.1
    head: Literal["words", "span"] = "words"

    @model_validator(mode="after")
    def _check(self) -> XLNetSpec:
        head_dim_of(self.hidden, self.heads)
        return self


def build(spec: XLNetSpec, attention: str) -> Workload:
    """Return the operator graph of one training iteration.

    Raises:
        ValueError: If the attention is fused: scores have terms that flash attention does not know.
    """
    if attention != "plain":
        raise ValueError(
            f"model {spec.name!r} adds relative positions and segments to its scores, which {attention} attention "
            "does not know; use a runtime with plain attention"
        )
    graph = GraphBuilder(name=spec.name, family="xlnet", tokens_per_sample=spec.seq_len)
    hidden, heads, dim = spec.hidden, spec.heads, head_dim_of(spec.hidden, spec.heads)
    ffn, inner = spec.ffn or 4 * spec.hidden, heads * dim
    ties = {"weight": "word_embeddings"}
    norm = {"hidden": hidden}
    residual = {"probability": spec.dropout}
    packed = {"in": hidden, "out": 3 * inner, "bias": False, "groups": heads}
    score = {"heads": heads, "head_dim": dim, "hidden": hidden}
    own = {"heads": heads, "head_dim": dim, "causal": False}
    dense = {"in": inner, "out": hidden, "bias": False, "in_groups": heads}
    up = {"in": hidden, "out": ffn, "bias": True, "groups": ffn, "defer_bias": True}
    down = {"in": ffn, "out": hidden, "bias": True, "defer_bias": True}
    dropping = {"probability": spec.attention_dropout, "scores": True, "heads": heads}
    tokens, labels = graph.input("tokens", (spec.seq_len,)), graph.input("labels", (spec.seq_len,))
    graph.layer("embedding")
    embedding = {"vocab": spec.vocab, "hidden": hidden, "positions": 0, "segments": 0, "dropout": 0.0}
    x = graph.add("embedding", "embedding", [tokens], embedding, tensor="vocab", ties=ties)
    if spec.dropout > 0:
        x = graph.add("embedding_dropout", "dropout", [x], residual, sequence="sequence")
    for index in range(1, spec.layers + 1):
        graph.layer(f"layer{index}")
        qkv = graph.add("attention_qkv", "linear", [x], packed, tensor="column", alternative="row")
        scores = graph.add("attention_score", "relative_score", [qkv], score, tensor="head")
        scores = graph.add("attention_softmax", "softmax", [scores], {"heads": heads}, tensor="head")
        if spec.attention_dropout > 0:
            scores = graph.add("attention_dropout", "dropout", [scores], dropping, tensor="head")
        context = graph.add("attention_context", "attention_context", [scores, qkv], own, tensor="head")
        out = graph.add("attention_dense", "linear", [context], dense, tensor="row", alternative="column")
        unbiased = {**residual, "bias": False}
        x = graph.add("post_attention_dropout", "dropout_add", [out, x], unbiased, sequence="sequence")
        x = graph.add("norm_1", "layer_norm", [x], norm, sequence="sequence")
        y = graph.add("mlp_linear_1", "linear", [x], up, tensor="column", alternative="row")
        y = graph.add("mlp_activation", "gelu", [y], {"groups": ffn}, tensor="column")
        if spec.dropout > 0:
            y = graph.add("mlp_dropout", "dropout", [y], {**residual, "groups": ffn}, tensor="column")
        y = graph.add(
            "mlp_linear_2", "linear", [y], down, tensor="row", alternative="column", sequence="row_sequence"
        )
        x = graph.add("post_mlp_dropout", "dropout_add", [y, x], residual, sequence="sequence")
        x = graph.add("norm_2", "layer_norm", [x], norm, sequence="sequence")
    graph.layer("head")
    if spec.head == "span":
        graph.add("span_loss", "lm_loss", [x, labels], {"vocab": 2, "hidden": hidden, "bias": True})
    else:
        head = {"vocab": spec.vocab, "hidden": hidden, "bias": True}
        graph.add("lm_loss", "lm_loss", [x, labels], head, tensor="vocab", ties=ties)
    return graph.build()


PRESETS = {
    spec.name: spec
    for spec in (
        # Yang et al., NeurIPS 2019, Section 3.1.
        XLNetSpec(name="xlnet-large", layers=24, hidden=1024, heads=16),
        # DAPPLE (PPoPP 2021), Table 1: 36 layers of that width; its runs are of SQuAD 2.0 (Section 6.1).
        XLNetSpec(name="xlnet-36", layers=36, hidden=1024, heads=16, head="span"),
    )
}
