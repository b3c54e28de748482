"""Carries out conversions between layouts: the collectives of tensor parallelism and resharding."""

from __future__ import annotations

from math import prod

import torch

from simulator.lowering.mesh import settled
from simulator.lowering.transfers import Region, regions
from validation.execution.groups import GroupKey, StageGroups, group_keys
from validation.execution.layouts import Conversion, Layout, Step
from validation.kinds.operator_context import Box, box_of, box_shape, coordinates_of
from workloads.kinds.base import Shape


def conversion_groups(conversion: Conversion, ranks: tuple[int, ...]) -> list[GroupKey]:
    """Return the communicators that a conversion needs on a stage's ranks."""
    found = [
        key
        for step in conversion.steps
        if step.collective != "slice"
        for key in group_keys("tensor", ranks, conversion.sizes, step.axes)
    ]
    return [*found, ("tensor", tuple(sorted(ranks)))] if conversion.whole else found


class Converter:
    """Runs conversions on one rank of one stage."""

    def __init__(self, groups: StageGroups) -> None:
        self.groups = groups

    def run(self, conversion: Conversion, tensor: torch.Tensor, shape: Shape, *, keep: bool) -> torch.Tensor:
        """Return this rank's part of the tensor under the target layout.

        Args:
            conversion: What to do.
            tensor: This rank's part under the source layout.
            shape: Of the whole tensor.
            keep: The source is still needed, so reductions must not be in place.
        """
        source = tensor
        for step in conversion.steps:
            tensor = self._step(conversion, step, tensor, keep=keep and tensor is source)
        return self._through_whole(conversion, tensor, shape) if conversion.whole else tensor

    def _step(self, conversion: Conversion, step: Step, tensor: torch.Tensor, *, keep: bool) -> torch.Tensor:
        sizes, axes = conversion.sizes, step.axes
        if step.collective == "slice":
            return self._slice(sizes, axes, tensor, step.target_dim)
        group = self.groups.along("tensor", sizes, axes)
        if step.collective == "all_reduce":
            reduced = tensor.clone(memory_format=torch.contiguous_format) if keep else tensor.contiguous()
            group.all_reduce(reduced)
            return reduced
        if step.collective == "all_gather":
            gathered, _ = group.all_gather(tensor.contiguous())
            return joined(gathered, step.source_dim)
        parts = torch.stack(tensor.chunk(group.size, dim=step.target_dim))
        if step.collective == "reduce_scatter":
            return group.reduce_scatter(parts)[0]
        assert step.collective == "all_to_all", step
        return joined(group.all_to_all(parts), step.source_dim)

    def _slice(self, sizes: tuple[int, ...], axes: tuple[int, ...], tensor: torch.Tensor, dim: int) -> torch.Tensor:
        coordinates = coordinates_of(sizes, self.groups.local_rank)
        index = 0
        for axis in axes:
            index = index * sizes[axis] + coordinates[axis]
        length = tensor.shape[dim] // prod(sizes[axis] for axis in axes)
        return tensor.narrow(dim, index * length, length).clone(memory_format=torch.contiguous_format)

    def _through_whole(self, conversion: Conversion, tensor: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Gather every rank's part, padded to the largest, put the tensor together, cut the target's part."""
        source = conversion.source[0], settled(conversion.source[1])
        held = [box_of(region, shape) for region in _regions(source, shape)]
        wanted = box_of(_regions(conversion.target, shape)[self.groups.local_rank], shape)
        longest = max(prod(box_shape(box)) for box in held)
        flat = tensor.new_zeros(longest)
        flat[: tensor.numel()] = tensor.reshape(-1)
        gathered, _ = self.groups.pool.group("tensor", self.groups.ranks).all_gather(flat)
        whole = tensor.new_empty(shape)
        done: list[Box] = []
        for box, part in zip(held, gathered, strict=True):
            if box not in done:
                whole[box] = part[: prod(box_shape(box))].view(box_shape(box))
                done.append(box)
        return whole[wanted].clone(memory_format=torch.contiguous_format)


def _regions(layout: Layout, shape: Shape) -> list[Region]:
    return regions(layout[0], layout[1], shape[0])


def joined(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """Return ``(size, ...)`` with the parts one after the other along ``dim``."""
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(0), dim=dim)
