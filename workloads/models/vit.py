"""ViT: image patches through a norms-first encoder, classified by the first token."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from workloads.graph_builder import GraphBuilder
from workloads.models.blocks import Blocks
from workloads.models.fields import Length, Probability, TransformerSpec, Width
from workloads.operators import Workload


class ViTSpec(TransformerSpec):
    """Shape of a ViT.

    Attributes:
        layers, hidden, heads: Transformer layers, width, attention heads.
        ffn: Width inside the MLP; four times ``hidden`` if not given.
        image, patch, channels: Sides in pixels, colour channels.
        classes: Classes of the output layer.
        dropout, attention_dropout: Probabilities.
    """

    family_name: ClassVar[str] = "vit"

    family: Literal["vit"] = "vit"
    image: Length = 224
    patch: Length = 16
    channels: Length = 3
    classes: Width = 1000
    dropout: Probability = 0.0
    attention_dropout: Probability = 0.0

    @model_validator(mode="after")
    def _check(self) -> ViTSpec:
        if self.image % self.patch:
            raise ValueError(f"patch must divide image={self.image}, got patch={self.patch}")
        return self


def build(spec: ViTSpec, attention: str) -> Workload:
    """Return the operator graph of one training iteration."""
    graph = GraphBuilder(name=spec.name, family="vit", tokens_per_sample=(spec.image // spec.patch) ** 2 + 1)
    blocks = Blocks.of(spec, graph, attention, residual_role="dropout" if spec.dropout > 0 else "add")
    images = graph.input("images", (spec.channels, spec.image, spec.image))
    labels = graph.input("labels", ())
    graph.layer("embedding")
    patches = {
        "patch": spec.patch,
        "channels": spec.channels,
        "image": spec.image,
        "hidden": spec.hidden,
        "class_token": True,
        "dropout": spec.dropout,
    }
    x = graph.add("embedding", "patch_embedding", [images], patches)
    for index in range(1, spec.layers + 1):
        graph.layer(f"layer{index}")
        x = blocks.add_pre_norm_layer(x, causal=False)
    graph.layer("head")
    x = blocks.add_norm("final_norm", x)
    graph.add("loss", "classifier_loss", [x, labels], {"hidden": spec.hidden, "classes": spec.classes})
    return graph.build()


# Galvatron (VLDB 2023), Table I, and its released scripts; "large" and "huge" of Dosovitskiy et al. 2021.
PRESETS = {
    spec.name: spec
    for spec in (
        ViTSpec(name="vit-large", layers=24, hidden=1024, heads=16),
        ViTSpec(name="vit-huge-32", layers=32, hidden=1280, heads=16),
        ViTSpec(name="vit-huge-48", layers=48, hidden=1280, heads=16),
        ViTSpec(name="vit-xhuge", layers=128, hidden=2560, heads=32),
    )
}
