"""BERT: encoder-only, norms after the residual sums, a masked-word or span head, and a next-sentence head."""

from __future__ import annotations

from typing import ClassVar, Literal

from workloads.graph_builder import GraphBuilder
from workloads.models.blocks import Blocks
from workloads.models.fields import Count, Length, TextSpec, Width, padded_vocab
from workloads.operators import Workload


class BertSpec(TextSpec):
    """Shape of a BERT.

    Attributes:
        layers, hidden, heads: Transformer layers, width, attention heads.
        seq_len: Tokens per sample.
        vocab: Tokens known, rounded up to ``vocab_multiple``.
        ffn: Width inside the MLP; four times ``hidden`` if not given.
        num_positions: Rows of the position table; the larger of 512 and ``seq_len`` if not given.
        segments: Rows of the segment table.
        next_sentence: Pooler and next-sentence loss beside that of the head.
        head: ``words`` predicts masked words, tied to the embedding; ``span`` where an answer begins and ends, as for
            SQuAD, by two classes a token.
        dropout, attention_dropout: Probabilities.
    """

    family_name: ClassVar[str] = "bert"

    family: Literal["bert"] = "bert"
    seq_len: Length = 512
    vocab: Width = 30522
    segments: Count = 2
    next_sentence: bool = True
    head: Literal["words", "span"] = "words"


def build(spec: BertSpec, attention: str) -> Workload:
    """Return the operator graph of one training iteration."""
    vocab = padded_vocab(spec.vocab, spec.vocab_multiple)
    graph = GraphBuilder(name=spec.name, family="bert", tokens_per_sample=spec.seq_len)
    blocks = Blocks.of(spec, graph, attention)
    ties = {"weight": "word_embeddings"}
    tokens = graph.input("tokens", (spec.seq_len,))
    labels = graph.input("labels", (spec.seq_len,))
    graph.layer("embedding")
    embedding = {
        "vocab": vocab,
        "hidden": spec.hidden,
        "positions": spec.num_positions or max(512, spec.seq_len),
        "segments": spec.segments,
        "dropout": 0.0,
    }
    x = graph.add("embedding", "embedding", [tokens], embedding, tensor="vocab", ties=ties)
    x = blocks.add_norm("embedding_norm", x)
    if spec.dropout > 0:
        dropout = {"probability": spec.dropout}
        x = graph.add("embedding_dropout", "dropout", [x], dropout, sequence="sequence")
    for index in range(1, spec.layers + 1):
        graph.layer(f"layer{index}")
        x = blocks.add_post_norm_layer(x)
    graph.layer("head")
    sentence_loss = None
    if spec.next_sentence:
        sentence_labels = graph.input("sentence_labels", ())
        pooled = graph.add("pooler", "pooler", [x], {"hidden": spec.hidden})
        sentence_loss = graph.add(
            "sentence_loss",
            "classifier_loss",
            [pooled, sentence_labels],
            {"hidden": spec.hidden, "classes": 2},
        )
    if spec.head == "span":
        loss = graph.add("span_loss", "lm_loss", [x, labels], {"vocab": 2, "hidden": spec.hidden, "bias": True})
    else:
        transform = {"in": spec.hidden, "out": spec.hidden, "bias": True, "defer_bias": True}
        x = graph.add("lm_linear", "linear", [x], transform, sequence="sequence")
        x = graph.add("lm_activation", "gelu", [x], {}, sequence="sequence")
        x = blocks.add_norm("final_norm", x)
        head = {"vocab": vocab, "hidden": spec.hidden, "bias": True}
        loss = graph.add("lm_loss", "lm_loss", [x, labels], head, tensor="vocab", ties=ties)
    if sentence_loss is not None:
        graph.add("total_loss", "loss_sum", [loss, sentence_loss], {})
    return graph.build()


def _spec(name: str, layers: int, hidden: int, heads: int, **more: object) -> BertSpec:
    return BertSpec.model_validate({"name": name, "layers": layers, "hidden": hidden, "heads": heads, **more})


def _presets() -> dict[str, BertSpec]:
    found = [
        # Devlin et al. 2019.
        _spec("bert-large", 24, 1024, 16),
        # DAPPLE (PPoPP 2021), Table 1: BERT-48, 640 M parameters: BERT-Large's width, twice its depth.
        # Its runs are of SQuAD 2.0 (Section 6.1); 384 tokens as in its released profile, which ends in the pooler.
        _spec("bert-48", 48, 1024, 16, seq_len=384, next_sentence=False, head="span"),
        # Galvatron (VLDB 2023), Table I, and its released scripts.
        _spec("bert-huge-32", 32, 1280, 16),
        _spec("bert-huge-48", 48, 1280, 16),
        _spec("bert-xhuge", 128, 2560, 32),
        # MPE's "BERT 5B" has no published shape; ours is xHuge's width to 63 layers: 12 L h^2 + V h = 5.03e9.
        _spec("bert-5b", 63, 2560, 32),
    ]
    # Arena (EuroSys 2026 artifact): GPT's widths as BERT, 1,024 tokens, vocabulary 51,200.
    arena = {
        "350m": (24, 1024, 16),
        "760m": (24, 1536, 16),
        "1.3b": (24, 2048, 32),
        "2.6b": (32, 2560, 32),
        "6.7b": (32, 4096, 32),
        "15b": (48, 5120, 40),
    }
    found += [_spec(f"arena-bert-{size}", *shape, seq_len=1024, vocab=51200) for size, shape in arena.items()]
    return {spec.name: spec for spec in found}


PRESETS = _presets()
