"""Residual networks of bottleneck blocks: ResNet-50 and its wide relatives."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from workloads.graph_builder import GraphBuilder
from workloads.kinds.base import Attributes
from workloads.models.fields import Layers, Length, ModelSpec, Width
from workloads.operators import Workload

EXPANSION = 4
"""Output channels of a block per base channel: He et al. 2016, Table 1."""
STRIDED = 2
Blocks = Annotated[tuple[Layers, ...], Field(min_length=1, max_length=8)]


class ResNetSpec(ModelSpec):
    """Shape of a residual network.

    Attributes:
        blocks: Bottleneck blocks of each group; the groups halve the image and double the channels.
        channels: After the first convolution.
        width_factor: Channels inside a block after its 3x3 convolution, per base channel.
        image, image_channels: Side in pixels, colour channels.
        classes: Classes of the output layer.
        style: ``standard``: convolution, norm and ReLU are operators, and a block's 1x1 convolution has the inner
            width already. ``aceso``: its eight operators a block, where the shortcut's convolution, norm and sum
            are one and the two inner norms have no ReLU behind them (their profiled times leave no room for one:
            three passes over memory forward, five backward).
    """

    family_name: ClassVar[str] = "resnet"

    family: Literal["resnet"] = "resnet"
    blocks: Blocks
    channels: Width
    width_factor: Width = 1
    image: Length = 224
    image_channels: Width = 3
    classes: Width = 1000
    style: Literal["standard", "aceso"] = "standard"

    @model_validator(mode="after")
    def _check(self) -> ResNetSpec:
        smallest = 4 * STRIDED ** (len(self.blocks) - 1)
        if self.image % smallest:
            raise ValueError(f"image must be a multiple of {smallest} ({len(self.blocks)} groups), got {self.image}")
        return self


def build(spec: ResNetSpec, attention: str) -> Workload:
    """Return the operator graph of one training iteration; ``attention`` does not matter.

    The style ``aceso`` has 6 operators and 8 per block: 134 with 50 layers, 270 with 101.
    """
    return _Builder(spec).build()


class _Builder:
    """Adds convolutions, norms and blocks to a graph.

    Operators' roles are Aceso's names (``block-1-0-conv2``), which are the keys of its profile.
    """

    def __init__(self, spec: ResNetSpec) -> None:
        self.spec = spec
        self.graph = GraphBuilder(name=spec.name, family="resnet", tokens_per_sample=0)
        self.graph_input = self.graph.input("images", (spec.image_channels, spec.image, spec.image))
        self._attributes: dict[object, Attributes] = {}

    def _shared(self, **attributes: int | bool) -> Attributes:
        """Return one mapping for equal attributes, as the graph's shape cache wants it."""
        return self._attributes.setdefault(tuple(attributes.items()), attributes)

    def build(self) -> Workload:
        spec, graph = self.spec, self.graph
        images = self.graph_input
        labels = graph.input("labels", ())
        graph.layer("stem")
        x = self._conv("conv1", images, spec.image_channels, spec.channels, kernel=7, stride=STRIDED)
        x = self._relu("relu1", self._norm("bn1", x, spec.channels), spec.channels)
        pool = self._shared(kernel=3, stride=STRIDED, padding=1, channels=spec.channels)
        x = graph.add("maxpool", "max_pool", [x], pool)
        channels = spec.channels
        for group, count in enumerate(spec.blocks):
            base = spec.channels * STRIDED**group
            for number in range(count):
                graph.layer(f"block-{group}-{number}")
                stride = STRIDED if group and not number else 1
                x = self._block(f"block-{group}-{number}", x, channels, base, stride)
                channels = base * EXPANSION
        graph.layer("head")
        x = graph.add("avgpool", "global_average_pool", [x], self._shared(channels=channels))
        graph.add("fc", "classifier_loss", [x, labels], {"hidden": channels, "classes": spec.classes})
        return graph.build()

    def _block(self, name: str, x: str, channels: int, base: int, stride: int) -> str:
        """Add a bottleneck block: 1x1, 3x3 with the stride, 1x1, and the shortcut."""
        inner, out = base * self.spec.width_factor, base * EXPANSION
        standard = self.spec.style == "standard"
        first = inner if standard else base
        residual = x
        x = self._norm(f"{name}-bn1", self._conv(f"{name}-conv1", x, channels, first), first)
        x = self._relu(f"{name}-relu1", x, first) if standard else x
        x = self._conv(f"{name}-conv2", x, first, inner, kernel=3, stride=stride)
        x = self._norm(f"{name}-bn2", x, inner)
        x = self._relu(f"{name}-relu2", x, inner) if standard else x
        x = self._norm(f"{name}-bn3", self._conv(f"{name}-conv3", x, inner, out), out)
        changes = stride > 1 or channels != out
        if changes and not standard:
            role, shape = f"{name}-downsample", {"in": channels, "out": out, "stride": stride}
            x = self.graph.add(role, "shortcut", [x, residual], shape, tensor="out_channel")
        else:
            if changes:
                residual = self._conv(f"{name}-downsample-conv", residual, channels, out, stride=stride)
                residual = self._norm(f"{name}-downsample-bn", residual, out)
            role = f"{name}-add" if standard else f"{name}-downsample"
            x = self.graph.add(role, "add", [x, residual], self._shared(image=True, groups=out))
        return self._relu(f"{name}-relu", x, out)

    def _conv(self, role: str, x: str, channels: int, out: int, *, kernel: int = 1, stride: int = 1) -> str:
        reads_data = self.graph_input == x
        attributes = self._shared(
            **{"in": channels, "out": out, "kernel": kernel, "stride": stride, "padding": kernel // 2},
            reads_data=reads_data,
        )
        alternative = "out_channel" if reads_data else "in_channel"  # too few colours to cut
        return self.graph.add(role, "conv2d", [x], attributes, tensor="out_channel", alternative=alternative)

    def _norm(self, role: str, x: str, channels: int) -> str:
        return self.graph.add(role, "batch_norm", [x], self._shared(channels=channels))

    def _relu(self, role: str, x: str, channels: int) -> str:
        return self.graph.add(role, "relu", [x], self._shared(image=True, groups=channels))


def _presets() -> dict[str, ResNetSpec]:
    found = [ResNetSpec(name="resnet-50", blocks=(3, 4, 6, 3), channels=64)]
    # Aceso (EuroSys 2024), Table 2, after Alpa (OSDI 2022): channels, width factor, layers; 1,024 classes.
    wide = {
        "500m": (224, 2, 50),
        "1b": (320, 2, 50),
        "2b": (448, 2, 50),
        "4b": (640, 2, 50),
        "6.8b": (320, 16, 50),
        "13b": (320, 16, 101),
    }
    blocks = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
    for size, (channels, factor, layers) in wide.items():
        found.append(
            ResNetSpec(
                name=f"wide-resnet-{size}", blocks=blocks[layers], channels=channels, width_factor=factor,
                classes=1024, style="aceso",
            )
        )  # fmt: skip
    return {spec.name: spec for spec in found}


PRESETS = _presets()
