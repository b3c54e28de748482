"""VGG: convolutions of 3x3 in groups, each group halved by pooling, and three large linear layers."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from workloads.graph_builder import GraphBuilder
from workloads.models.fields import Length, ModelSpec, Probability, Width
from workloads.operators import Workload

Group = Annotated[tuple[Width, ...], Field(min_length=1, max_length=8)]


class VggSpec(ModelSpec):
    """Shape of a VGG.

    Attributes:
        groups: Output channels of the convolutions, group by group.
        image, image_channels: Side in pixels, colour channels.
        linear: Width of the two hidden linear layers.
        classes: Classes of the output layer.
        dropout: Behind the hidden linear layers.
    """

    family_name: ClassVar[str] = "vgg"

    family: Literal["vgg"] = "vgg"
    groups: Annotated[tuple[Group, ...], Field(min_length=1, max_length=8)]
    image: Length = 224
    image_channels: Width = 3
    linear: Width = 4096
    classes: Width = 1000
    dropout: Probability = 0.5

    @model_validator(mode="after")
    def _check(self) -> VggSpec:
        if self.image % 2 ** len(self.groups):
            raise ValueError(f"image must be a multiple of {2 ** len(self.groups)}, got {self.image}")
        return self


def build(spec: VggSpec, attention: str) -> Workload:
    """Return the operator graph of one training iteration; ``attention`` does not matter.

    Every convolution (with its ReLU, and the pooling behind the last of a group) and every linear layer is a layer.
    """
    graph = GraphBuilder(name=spec.name, family="vgg", tokens_per_sample=0)
    x = graph.input("images", (spec.image_channels, spec.image, spec.image))
    labels = graph.input("labels", ())
    channels = spec.image_channels
    for number, group in enumerate(spec.groups, start=1):
        for position, out in enumerate(group, start=1):
            graph.layer(f"conv{number}_{position}")
            reads_data = number == position == 1
            conv = {"in": channels, "out": out, "kernel": 3, "padding": 1, "bias": True, "reads_data": reads_data}
            alternative = "out_channel" if reads_data else "in_channel"
            x = graph.add("conv", "conv2d", [x], conv, tensor="out_channel", alternative=alternative)
            x = graph.add("relu", "relu", [x], {"image": True, "groups": out})
            channels = out
        x = graph.add("pool", "max_pool", [x], {"kernel": 2, "stride": 2, "channels": channels})
    side = spec.image // 2 ** len(spec.groups)
    features = channels * side * side
    for number in (1, 2):
        graph.layer(f"fc{number}")
        if number == 1:
            x = graph.add("flatten", "flatten", [x], {"channels": channels})
        linear = {"in": features, "out": spec.linear, "bias": True}
        x = graph.add("linear", "linear", [x], linear, tensor="column", alternative="row")
        x = graph.add("relu", "relu", [x], {"groups": spec.linear})
        if spec.dropout > 0:
            x = graph.add("dropout", "dropout", [x], {"probability": spec.dropout, "groups": spec.linear})
        features = spec.linear
    graph.layer("prediction")
    graph.add("loss", "classifier_loss", [x, labels], {"hidden": features, "classes": spec.classes})
    return graph.build()


# Simonyan and Zisserman, ICLR 2015, Table 1, configurations D and E.
PRESETS = {
    name: VggSpec(name=name, groups=((64,) * 2, (128,) * 2, (256,) * count, (512,) * count, (512,) * count))
    for name, count in (("vgg-16", 3), ("vgg-19", 4))
}
