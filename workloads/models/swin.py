"""Swin Transformer: four stages of growing width and shrinking image, attention in shifted windows."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from workloads.graph_builder import GraphBuilder
from workloads.models.blocks import Blocks
from workloads.models.fields import Layers, Length, ModelSpec, Probability, Width, head_dim_of
from workloads.operators import Workload

Depths = Annotated[tuple[Layers, ...], Field(min_length=1, max_length=8)]
Heads = Annotated[tuple[Width, ...], Field(min_length=1, max_length=8)]


class SwinSpec(ModelSpec):
    """Shape of a Swin Transformer.

    Attributes:
        depths: Layers of each stage; every second layer's windows are shifted by half a window.
        hidden: Width of the first stage; each stage doubles it and halves the image's sides.
        heads: Attention heads of each stage.
        ffn_multiple: Width inside the MLP over the stage's width.
        image, patch, window, channels: Sides in pixels, pixels and tokens; colour channels.
        classes: Classes of the output layer.
        dropout, attention_dropout: Probabilities.
    """

    family_name: ClassVar[str] = "swin"

    family: Literal["swin"] = "swin"
    depths: Depths
    hidden: Width
    heads: Heads
    ffn_multiple: Width = 4
    image: Length = 224
    patch: Length = 4
    window: Length = 7
    channels: Length = 3
    classes: Width = 1000
    dropout: Probability = 0.0
    attention_dropout: Probability = 0.0

    @model_validator(mode="after")
    def _check(self) -> SwinSpec:
        if len(self.heads) != len(self.depths):
            raise ValueError(f"heads must name one number per stage ({len(self.depths)}), got {len(self.heads)}")
        if self.image % self.patch:
            raise ValueError(f"patch must divide image={self.image}, got patch={self.patch}")
        side = self.image // self.patch
        for stage, heads in enumerate(self.heads):
            head_dim_of(self.hidden << stage, heads)
            if side % self.window:
                raise ValueError(
                    f"window must divide the side of every stage, got window={self.window} and {side} tokens in "
                    f"stage {stage + 1}"
                )
            if side % 2 and stage + 1 < len(self.depths):
                raise ValueError(f"stage {stage + 1} has an odd side of {side} tokens, which cannot be halved")
            side //= 2
        return self


def build(spec: SwinSpec, attention: str) -> Workload:
    """Return the operator graph of one training iteration.

    Raises:
        ValueError: If attention is not plain: fused kernels have no relative position bias.
    """
    if attention != "plain":
        raise ValueError(
            f"swin adds a relative position bias to its scores, which {attention} attention cannot; use a "
            "runtime with plain attention"
        )
    side = spec.image // spec.patch
    graph = GraphBuilder(name=spec.name, family="swin", tokens_per_sample=side * side)
    images = graph.input("images", (spec.channels, spec.image, spec.image))
    labels = graph.input("labels", ())
    graph.layer("embedding")
    patches = {
        "patch": spec.patch,
        "channels": spec.channels,
        "image": spec.image,
        "hidden": spec.hidden,
        "class_token": False,
        "positions": False,
        "dropout": spec.dropout,
    }
    x = graph.add("embedding", "patch_embedding", [images], patches)
    x = graph.add("embedding_norm", "layer_norm", [x], {"hidden": spec.hidden})
    number = 0
    for stage, depth in enumerate(spec.depths):
        width = spec.hidden << stage
        layers = _Layers(spec, graph, stage, side)
        for layer in range(depth):
            number += 1
            graph.layer(f"layer{number}")
            if stage and not layer:
                x = _add_merge(graph, x, width // 2, 2 * side)
            x = layers.add(x, shifted=bool(layer % 2))
        side //= 2
    graph.layer("head")
    x = graph.add("final_norm", "layer_norm", [x], {"hidden": width})
    x = graph.add("pooling", "token_mean", [x], {})
    graph.add("loss", "classifier_loss", [x, labels], {"hidden": width, "classes": spec.classes})
    return graph.build()


def _add_merge(graph: GraphBuilder, x: str, width: int, side: int) -> str:
    """Add what joins four tokens into one of twice the width."""
    x = graph.add("merge", "patch_merge", [x], {"side": side})
    x = graph.add("merge_norm", "layer_norm", [x], {"hidden": 4 * width})
    return graph.add("merge_linear", "linear", [x], {"in": 4 * width, "out": 2 * width, "bias": False})


class _Layers:
    """Adds the layers of one stage."""

    def __init__(self, spec: SwinSpec, graph: GraphBuilder, stage: int, side: int) -> None:
        width, heads = spec.hidden << stage, spec.heads[stage]
        self.graph = graph
        self.blocks = Blocks(
            graph=graph,
            hidden=width,
            heads=heads,
            head_dim=head_dim_of(width, heads),
            ffn=spec.ffn_multiple * width,
            kv_heads=heads,
            dropout=spec.dropout,
            attention_dropout=spec.attention_dropout,
            residual_role="dropout" if spec.dropout > 0 else "add",
        )
        # A stage of one window has nothing to shift.
        self.shift = spec.window // 2 if side > spec.window else 0
        self.order = {
            (shift, reverse): {"side": side, "window": spec.window, "shift": shift, "reverse": reverse}
            for shift in {0, self.shift}
            for reverse in (False, True)
        }
        area = spec.window**2
        self.attention = {
            "heads": heads, "kv_heads": heads, "head_dim": head_dim_of(width, heads), "causal": False, "window": area
        }  # fmt: skip
        self.softmax = {
            shift: {
                "heads": heads, "position_buckets": (2 * spec.window - 1) ** 2, "window": area, "side": side,
                "shift": shift,
            }
            for shift in {0, self.shift}
        }  # fmt: skip
        self.qkv = {"in": width, "out": 3 * width, "bias": True, "groups": heads}
        self.dense = {"in": width, "out": width, "bias": True, "in_groups": heads, "defer_bias": True}
        self.scores_dropout = {"probability": spec.attention_dropout, "scores": True, "heads": heads}

    def add(self, x: str, *, shifted: bool) -> str:
        """Add one layer; return its output."""
        graph, blocks = self.graph, self.blocks
        shift = self.shift if shifted else 0
        attended = graph.add(
            "window_partition", "window_order", [blocks.add_norm("norm_1", x)], self.order[shift, False]
        )
        qkv = graph.add("attention_qkv", "linear", [attended], self.qkv, tensor="column", alternative="row")
        scores = graph.add("attention_score", "attention_score", [qkv, qkv], self.attention, tensor="head")
        scores = graph.add("attention_softmax", "softmax", [scores], self.softmax[shift], tensor="head")
        if blocks.attention_dropout > 0:
            scores = graph.add("attention_dropout", "dropout", [scores], self.scores_dropout, tensor="head")
        context = graph.add("attention_context", "attention_context", [scores, qkv], self.attention, tensor="head")
        attended = graph.add("attention_dense", "linear", [context], self.dense, tensor="row", alternative="column")
        attended = graph.add("window_reverse", "window_order", [attended], self.order[shift, True])
        middle = blocks.add_residual("attention", attended, x)
        return blocks.add_residual("mlp", blocks.add_mlp(blocks.add_norm("norm_2", middle)), middle)


# Galvatron-BMW (TKDE 2024), Table I; heads from its released training script.
PRESETS = {
    spec.name: spec
    for spec in (
        SwinSpec(name="swin-huge-32", depths=(2, 2, 26, 2), hidden=320, heads=(8, 16, 32, 64)),
        SwinSpec(name="swin-huge-48", depths=(2, 2, 42, 2), hidden=320, heads=(8, 16, 32, 64)),
    )
}
