"""What a kind's torch builder is told about one operator on one rank, and the table of builders."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd, prod
from typing import Any

import torch

from simulator.lowering.transfers import Region, regions
from workloads.kinds.base import Implementation, Local, Shape, Split
from workloads.local import localize, splits_of
from workloads.operators import Operator, Workload
from workloads.placements import Placement

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "index": torch.int64,
    "mask": torch.bool,
}

Tensors = Sequence[torch.Tensor]
Forward = Callable[[Tensors, Tensors], tuple[torch.Tensor, ...]]
"""``(inputs, parameters) -> outputs`` of one operator on one rank, differentiable by autograd."""

Reduce = Callable[[torch.Tensor, str, str], torch.Tensor]
"""``(tensor, "sum" or "max", split) -> tensor`` reduced over the axes of that split, in place."""

Gather = Callable[[torch.Tensor, str, int], torch.Tensor]
"""``(tensor, split, dim) -> tensor``: the parts of all ranks of that split one after the other along a dimension."""

Box = tuple[slice, ...]
"""One interval per dimension of a global tensor."""


@dataclass
class RunState:
    """Where the run is, for dropout: equal draws on replicas and when a segment is computed again."""

    iteration: int = 0
    microbatch: int = 0


def _no_group(tensor: torch.Tensor, operation: str, split: str) -> torch.Tensor:
    raise AssertionError(f"{operation} over the {split} axes needs a process group")


def _no_parts(tensor: torch.Tensor, split: str, dim: int) -> torch.Tensor:
    raise AssertionError(f"a gather over the {split} axes needs a process group")


@dataclass(frozen=True)
class OperatorContext:
    """One operator on one rank.

    Attributes:
        index: Index of the operator in the workload.
        operator: The operator.
        local: Local shapes, attributes, implementation.
        input_shapes, output_shapes, parameter_shapes: Global; samples are those of the microbatch.
        splits: One Split per mesh axis.
        axes: ``(split, size, coordinate of this rank)`` per mesh axis.
        input_boxes, output_boxes, parameter_boxes: What this rank holds of the global tensors.
        producers: The operator that makes each input; None for graph inputs.
        device: Where tensors live.
        run: Progress of the run.
        reduce, gather: Collectives inside the operator.
    """

    index: int
    operator: Operator
    local: Local
    input_shapes: tuple[Shape, ...]
    output_shapes: tuple[Shape, ...]
    parameter_shapes: tuple[Shape, ...]
    splits: tuple[Split, ...]
    axes: tuple[tuple[str, int, int], ...]
    input_boxes: tuple[Box, ...]
    output_boxes: tuple[Box, ...]
    parameter_boxes: tuple[Box, ...]
    producers: tuple[Operator | None, ...]
    device: torch.device
    run: RunState = field(default_factory=RunState)
    reduce: Reduce = _no_group
    gather: Gather = _no_parts

    @cached_property
    def dtype(self) -> torch.dtype:
        """Type of activations."""
        return DTYPES[self.local.implementation.dtype]

    @cached_property
    def logits_dtype(self) -> torch.dtype:
        """Type in which the loss is computed."""
        return DTYPES[self.local.implementation.logits_dtype]

    def degree(self, split: str) -> int:
        """Return the product of the axes with ``split``."""
        return prod(size for name, size, _ in self.axes if name == split)

    def coordinate(self, split: str) -> int:
        """Return this rank's number along the axes with ``split``."""
        number = 0
        for name, size, coordinate in self.axes:
            if name == split:
                number = number * size + coordinate
        return number

    def applies(self, parameter: int) -> bool:
        """Return whether this rank adds a parameter that must be added once to a partial sum."""
        return all(
            coordinate == 0
            for split, (_, _, coordinate) in zip(self.splits, self.axes, strict=False)
            if parameter in (*split.whole_gradients, *split.part_gradients)
        )

    def seed(self) -> int:
        """Return a seed for dropout: the same for replicas and for recomputation."""
        boxes = tuple((part.start, part.stop) for box in self.output_boxes[:1] for part in box)
        return zlib.crc32(repr((self.run.iteration, self.run.microbatch, self.index, boxes)).encode())


Builder = Callable[[OperatorContext], Forward]
BUILDERS: dict[str, Builder] = {}


def builds(kind: str) -> Callable[[Builder], Builder]:
    """Return a decorator that makes a builder known for a kind."""

    def register(builder: Builder) -> Builder:
        assert kind not in BUILDERS, kind
        BUILDERS[kind] = builder
        return builder

    return register


def box_of(region: Region, shape: Shape) -> Box:
    """Return a region of a tensor as slices."""
    bounds = {dim: (int(low * shape[dim]), int(high * shape[dim])) for dim, low, high in region}
    return tuple(slice(*bounds.get(dim, (0, size))) for dim, size in enumerate(shape))


def rank_box(sizes: tuple[int, ...], placements: Sequence[Placement], shape: Shape, local_rank: int) -> Box:
    """Return what local device ``local_rank`` of a mesh holds of a tensor of ``shape``."""
    samples = shape[0] if shape else 1
    return box_of(regions(sizes, placements, samples)[local_rank], shape)


def box_shape(box: Box) -> Shape:
    """Return the shape of a box."""
    return tuple(part.stop - part.start for part in box)


def coordinates_of(sizes: Sequence[int], local_rank: int) -> tuple[int, ...]:
    """Return the mesh coordinates of a local device."""
    found = []
    for size in reversed(sizes):
        local_rank, coordinate = divmod(local_rank, size)
        found.append(coordinate)
    return tuple(reversed(found))


def make_context(
    workload: Workload,
    index: int,
    axes: Sequence[tuple[str, int]],
    *,
    local_rank: int,
    samples: int,
    local_samples: int,
    implementation: Implementation,
    device: torch.device,
    run: RunState | None = None,
    reduce: Reduce = _no_group,
    gather: Gather = _no_parts,
) -> OperatorContext:
    """Return the context of operator ``index`` on one rank.

    Args:
        workload: The graph.
        index: The operator.
        axes: ``(split, size)`` per mesh axis; empty on one device.
        local_rank: Position in the mesh.
        samples: Samples of the microbatch over all replicas.
        local_samples: Samples of this rank.
        implementation: Of the runtime.
        device: Where tensors live.
        run: Progress of the run, shared by all operators of a rank.
        reduce, gather: Collectives inside the operator.
    """
    op = workload.operators[index]
    kind = op.definition
    table = splits_of(kind, op.attributes)
    axes = tuple(axes) or (("replicate", 1),)
    splits = tuple(table[split] for split, _ in axes)
    sizes = tuple(size for _, size in axes)
    degree = prod(size for split, size in axes if split == "batch")
    local = localize(
        kind,
        op.attributes,
        workload.input_shapes(index, local_samples * degree),
        axes,
        implementation,
        operator=op.name,
    )
    input_shapes = workload.input_shapes(index, samples)
    output_shapes = kind.outputs(op.attributes, input_shapes)
    parameter_shapes = tuple(parameter.shape for parameter in workload.parameters(index))

    def boxes(shapes: Sequence[Shape], which: str) -> tuple[Box, ...]:
        return tuple(
            rank_box(sizes, [getattr(split, which)[number] for split in splits], shape, local_rank)
            for number, shape in enumerate(shapes)
        )

    makers = (workload.producer.get(name) for name in op.inputs)
    return OperatorContext(
        index=index,
        operator=op,
        local=local,
        input_shapes=input_shapes,
        output_shapes=output_shapes,
        parameter_shapes=parameter_shapes,
        splits=splits,
        axes=tuple(
            (split, size, coordinate)
            for (split, size), coordinate in zip(axes, coordinates_of(sizes, local_rank), strict=True)
        ),
        input_boxes=boxes(input_shapes, "inputs"),
        output_boxes=boxes(output_shapes, "outputs"),
        parameter_boxes=boxes(parameter_shapes, "parameters"),
        producers=tuple(None if maker is None else workload.operators[maker] for maker in makers),
        device=device,
        run=run or RunState(),
        reduce=reduce,
        gather=gather,
    )


def unpacked(tensor: torch.Tensor, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return a view with dimension ``dim`` in several; one of ``sizes`` may be -1."""
    view: Any = tensor.unflatten  # untyped in torch
    found: torch.Tensor = view(dim, sizes)
    return found


def interleaving(features: int) -> int:
    """Return in how many blocks gate and up of a SwiGLU alternate: what a column split must divide.

    >>> interleaving(11008), interleaving(13824)
    (64, 192)
    """
    return gcd(features, 192)
