"""GPT: decoder-only, norms first, learned positions, GELU; 1 + 13 L + 2 operators."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from workloads.graph_builder import GraphBuilder
from workloads.models.blocks import Blocks
from workloads.models.fields import TextSpec, check_rotary, head_dim_of, padded_vocab
from workloads.operators import Workload


class GPTSpec(TextSpec):
    """Shape of a GPT.

    Attributes:
        layers, hidden, heads: Transformer layers, width, attention heads.
        seq_len: Tokens per sample.
        vocab: Tokens known, rounded up to ``vocab_multiple``.
        ffn: Width inside the MLP; four times ``hidden`` if not given.
        positions: ``learned`` table, or ``rotary`` (GPT-NeoX).
        num_positions: Rows of the table; ``seq_len`` if not given.
        parallel_residual: MLP beside attention instead of after it (GPT-NeoX).
        tied_embeddings: Output layer and embedding are one matrix.
        dropout, attention_dropout: Probabilities.
    """

    family_name: ClassVar[str] = "gpt"

    family: Literal["gpt"] = "gpt"
    positions: Literal["learned", "rotary"] = "learned"
    parallel_residual: bool = False
    tied_embeddings: bool = True

    @model_validator(mode="after")
    def _check_rotary(self) -> Self:
        if self.positions == "rotary":
            check_rotary(head_dim_of(self.hidden, self.heads))
        return self


def build(spec: GPTSpec, attention: str) -> Workload:
    """Return the operator graph of one training iteration."""
    vocab = padded_vocab(spec.vocab, spec.vocab_multiple)
    graph = GraphBuilder(name=spec.name, family="gpt", tokens_per_sample=spec.seq_len)
    blocks = Blocks.of(spec, graph, attention, rotary=spec.positions == "rotary")
    ties = {"weight": "word_embeddings"} if spec.tied_embeddings else {}
    tokens = graph.input("tokens", (spec.seq_len,))
    labels = graph.input("labels", (spec.seq_len,))
    graph.layer("embedding")
    x = graph.add(
        "embedding",
        "embedding",
        [tokens],
        {
            "vocab": vocab,
            "hidden": spec.hidden,
            "positions": (spec.num_positions or spec.seq_len) if spec.positions == "learned" else 0,
            "dropout": spec.dropout,
        },
        tensor="vocab",
        sequence="vocab_sequence",
        ties=ties,
    )
    for index in range(1, spec.layers + 1):
        graph.layer(f"layer{index}")
        x = blocks.add_pre_norm_layer(x, causal=True, parallel=spec.parallel_residual)
    graph.layer("head")
    x = blocks.add_norm("final_norm", x)
    graph.add(
        "lm_loss", "lm_loss", [x, labels], {"vocab": vocab, "hidden": spec.hidden}, tensor="vocab", ties=ties
    )
    return graph.build()


def _spec(
    name: str, layers: int, hidden: int, heads: int, seq_len: int, vocab: int, **more: object
) -> GPTSpec:
    return GPTSpec.model_validate(
        {
            "name": name,
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "seq_len": seq_len,
            "vocab": vocab,
            **more,
        }
    )


def _presets() -> dict[str, GPTSpec]:
    found: list[GPTSpec] = []
    # Layers, hidden size, heads. Aceso (EuroSys 2024), model_size_config of its artifact; 2,048 tokens.
    aceso = {
        "350m": (24, 1024, 16),
        "1.3b": (24, 2048, 32),
        "2.6b": (32, 2560, 32),
        "6.7b": (32, 4096, 32),
        "13b": (40, 5120, 40),
        # Brown et al. 2020, Table 2.1: the model the series is named after.
        "175b": (96, 12288, 96),
    }
    found += [_spec(f"gpt3-{size}", *shape, 2048, 51200) for size, shape in aceso.items()]
    # Alpa (OSDI 2022), benchmark/alpa/suite_manual_gpt.py; 1,024 tokens; embeddings untied in its comparison.
    alpa = {
        "125m": (12, 768, 12),
        **{size: aceso[size] for size in ("350m",)},
        "760m": (24, 1536, 16),
        **{size: aceso[size] for size in ("1.3b", "2.6b", "6.7b")},
        "15b": (48, 5120, 40),
        "39b": (48, 8192, 64),
        "76b": (60, 10240, 80),
    }
    found += [
        _spec(f"alpa-gpt-{size}", *shape, 1024, 51200, tied_embeddings=False) for size, shape in alpa.items()
    ]
    # Megatron-LM (SC 2021), Table 1; 2,048 tokens, vocabulary 51,200.
    megatron = {
        "1.7b": (24, 2304, 24),
        "3.6b": (30, 3072, 32),
        "7.5b": (36, 4096, 32),
        "18b": (40, 6144, 48),
        "39b": (48, 8192, 64),
        "76b": (60, 10240, 80),
        "145b": (80, 12288, 96),
        "310b": (96, 16384, 128),
        "530b": (105, 20480, 128),
        "1t": (128, 25600, 160),
    }
    found += [_spec(f"megatron-gpt-{size}", *shape, 2048, 51200) for size, shape in megatron.items()]
    # Smith et al. 2022, Section 3.
    found.append(_spec("mt-nlg-530b", 105, 20480, 128, 2048, 51200))
    # Radford et al. 2019: 48 layers of 1,600 with 25 heads.
    found.append(_spec("gpt2-1.5b", 48, 1600, 25, 1024, 50257))
    # AMP (NeurIPS 2022): its GPT-2.
    found.append(_spec("amp-gpt2", 24, 1024, 16, 1024, 52256))
    # Galvatron-BMW (TKDE), Table I; heads and length inferred, and from the printed activations that scores have no
    # dropout: they leave room for one 16-bit score tensor a head.
    galvatron = {"15b": (48, 5120, 32), "39b": (48, 8192, 64), "65b": (80, 8192, 64)}
    found += [
        _spec(f"galvatron-gpt3-{size}", *shape, 2048, 50257, attention_dropout=0.0) for size, shape in galvatron.items()
    ]
    # Aceso, Section 5.3: deep narrow models.
    found += [
        _spec(f"gpt-scale-{depth}", depth, 512, 8, 2048, 51200)
        for depth in (2**power for power in range(3, 11))
    ]
    return {spec.name: spec for spec in found}


PRESETS = _presets()
