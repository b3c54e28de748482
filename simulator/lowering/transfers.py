"""Who sends what to whom between two consecutive stages, for any two meshes (split and concat included).

A tensor on a mesh is cut into regions: one interval per sharded dimension. A receiving rank needs its own
region; for every distinct region of the sender that meets it, that of the ranks that hold that region sends
which has sent least so far, so that replicas share the sending.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import product
from math import prod

from simulator.lowering.mesh import MeshCollective, MeshSizes, batch_coordinate
from simulator.lowering.program import StageView
from simulator.plan import Sharding
from workloads.local import dtype_bytes
from workloads.placements import Placement, Replicate, Shard

Region = tuple[tuple[int, Fraction, Fraction], ...]
"""Intervals ``(dim, from, to)`` as fractions of the whole; dimensions left out are whole."""


@dataclass(frozen=True)
class Transfer:
    """Bytes one device sends another over one stage boundary, per microbatch.

    Attributes:
        source, target: Physical device ids.
        num_bytes: All tensors together.
    """

    source: int
    target: int
    num_bytes: float


@lru_cache(maxsize=1024)
def replica_bounds(num_samples: int, num_replicas: int) -> list[Fraction]:
    """Return where the slices of a microbatch end, as fractions: the first replicas get one sample more.

    >>> [str(bound) for bound in replica_bounds(5, 2)]
    ['0', '3/5', '1']
    """
    base, extra = divmod(num_samples, num_replicas)
    bounds = [0]
    for replica in range(num_replicas):
        bounds.append(bounds[-1] + base + (replica < extra))
    return [Fraction(bound, num_samples) for bound in bounds]


def regions(sizes: MeshSizes, placements: Sequence[Placement], num_samples: int) -> list[Region]:
    """Return the region of every local device of a mesh, in device order."""
    found = []
    for coordinates in product(*(range(size) for size in sizes)):
        parts: dict[int, tuple[int, int]] = {}
        for size, coordinate, placement in zip(sizes, coordinates, placements, strict=True):
            if isinstance(placement, Shard):
                index, count = parts.get(placement.dim, (0, 1))
                parts[placement.dim] = (index * size + coordinate, count * size)
        region = []
        for dim, (index, count) in sorted(parts.items()):
            if dim == 0:
                bounds = replica_bounds(num_samples, count)
                region.append((dim, bounds[index], bounds[index + 1]))
            else:
                region.append((dim, Fraction(index, count), Fraction(index + 1, count)))
        found.append(tuple(region))
    return found


def overlap(a: Region, b: Region) -> Fraction:
    """Return the share of the whole tensor that lies in both regions."""
    share = Fraction(1)
    bounds = {dim: (low, high) for dim, low, high in a}
    for dim, low, high in b:
        other_low, other_high = bounds.pop(dim, (Fraction(0), Fraction(1)))
        low, high = max(low, other_low), min(high, other_high)
        if high <= low:
            return Fraction(0)
        share *= high - low
    for low, high in bounds.values():
        share *= high - low
    return share


def route(
    sender: Mapping[int, Region], receiver: Mapping[int, Region], num_parts: int = 1
) -> list[tuple[int, int, Fraction]]:
    """Return ``(sending rank, receiving rank, share of the tensor)`` so that every receiver has its region.

    Args:
        sender, receiver: Regions by rank.
        num_parts: Each receiver gets this fraction of its region, and the rest from its equals afterwards.
    """
    holders: dict[Region, list[int]] = {}
    for rank, region in sender.items():
        holders.setdefault(region, []).append(rank)
    sent = dict.fromkeys(sender, Fraction(0))
    shares: dict[Region, list[tuple[list[int], Fraction]]] = {}
    found = []
    for rank, region in receiver.items():
        if region not in shares:
            met = ((held, overlap(held, region)) for held in holders)
            shares[region] = [(holders[held], share) for held, share in met if share]
        for ranks, share in shares[region]:
            source = min(ranks, key=sent.__getitem__)
            sent[source] += share / num_parts
            found.append((source, rank, share / num_parts))
    return found


@dataclass(frozen=True, eq=False)
class _Layout:
    """The region of every local device that takes part. Equal ones are one object: hashing fractions takes long."""

    regions: tuple[tuple[int, Region], ...]


@lru_cache(maxsize=4096)
def _route(sender: _Layout, receiver: _Layout, num_parts: int) -> tuple[tuple[int, int, float], ...]:
    found = route(dict(sender.regions), dict(receiver.regions), num_parts)
    return tuple((source, target, float(share)) for source, target, share in found)


def boundary(
    first: StageView, second: StageView, relayed: Sequence[str], turn: int = 0
) -> tuple[list[Transfer], list[Transfer]]:
    """Return the transfers of one microbatch between two consecutive stages.

    Args:
        first, second: The stages.
        relayed: Names of the tensors that cross.
        turn: Which replicas have their turn, where whole microbatches rotate.

    Returns:
        Activations from first to second, and gradients from second to first. Gradients of a tensor lie as
        the tensor does. Ranks that are the same device need no transfer.
    """
    key = ("boundary", second.stage, tuple(relayed), turn)
    if key not in first.kept:
        first.kept[key] = _boundary(first, second, relayed, turn)
    forward, backward = first.kept[key]
    return list(forward), list(backward)


def _boundary(
    first: StageView, second: StageView, relayed: Sequence[str], turn: int
) -> tuple[list[Transfer], list[Transfer]]:
    forward: dict[tuple[int, int], float] = {}
    backward: dict[tuple[int, int], float] = {}
    for tensor in relayed:
        sender, size = _layout(first, tensor, turn)
        receiver, _ = _layout(second, tensor, turn)
        parts = _num_parts(first, second, tensor)
        for source, target, share in _route(sender, receiver, parts):
            forward[source, target] = forward.get((source, target), 0.0) + share * size
        for source, target, share in _route(receiver, sender, parts):
            backward[source, target] = backward.get((source, target), 0.0) + share * size
    _add_mask(forward, first, second)
    return _transfers(forward, first, second), _transfers(backward, second, first)


def _add_mask(forward: dict[tuple[int, int], float], first: StageView, second: StageView) -> None:
    """Send the attention mask, the same for all samples, along with what each receiver gets first, where it is sent."""
    problem = first.costs.problem
    if not problem.runtime.sends_attention_mask:
        return
    scores = next((op.outputs[0] for op in problem.workload.operators if op.kind == "softmax"), None)
    if scores is None:
        return
    mask = float(prod(problem.workload.tensors[scores][-2:])) * problem.runtime.implementation.activation_bytes
    served = set()
    for source, target in sorted(forward):
        if target not in served:
            served.add(target)
            forward[source, target] += mask


def _transfers(found: dict[tuple[int, int], float], sender: StageView, receiver: StageView) -> list[Transfer]:
    """Return what crosses between devices, in the order of the meshes: ids of devices decide nothing."""
    pairs = (
        (sender.stage.devices[source], receiver.stage.devices[target], size)
        for (source, target), size in sorted(found.items())
    )
    return [Transfer(source, target, size) for source, target, size in pairs if source != target]


def _num_parts(first: StageView, second: StageView, tensor: str) -> int:
    """Return in how many parts a tensor crosses: its equal holders on both sides, where the runtime scatters."""
    if not first.costs.problem.runtime.scatters_transfers:
        return 1
    _, axes_first = _holders(first, tensor)
    sizes, axes = _holders(second, tensor)
    count = prod(sizes[axis] for axis in axes)
    return count if count == prod(_holders(first, tensor)[0][axis] for axis in axes_first) else 1


def _holders(view: StageView, tensor: str) -> tuple[MeshSizes, tuple[int, ...]]:
    """Return the mesh of a tensor and the axes along which ranks hold the same of it."""
    held = view.crossing(tensor)
    return held.sizes, tuple(
        axis
        for axis, placement in enumerate(held.placements)
        if isinstance(placement, Replicate) and not (held.sharding and held.sharding[axis].split == "batch")
    )


def received_gathers(receiver: StageView, sender: StageView, tensors: Sequence[str]) -> list[MeshCollective]:
    """Return the all-gathers that make tensors whole which crossed in parts.

    Args:
        receiver, sender: The stages, in the direction of the transfer.
        tensors: What crosses.
    """
    key = ("received gathers", sender.stage, tuple(tensors))
    if key not in receiver.kept:
        receiver.kept[key] = _received_gathers(receiver, sender, tensors)
    return list(receiver.kept[key])


def _received_gathers(receiver: StageView, sender: StageView, tensors: Sequence[str]) -> list[MeshCollective]:
    totals: dict[tuple[MeshSizes, tuple[int, ...]], float] = {}
    for tensor in tensors:
        if _num_parts(sender, receiver, tensor) > 1:
            sizes, axes = _holders(receiver, tensor)
            region, size = _layout(receiver, tensor, 0)
            share = region.regions[0][1]
            local = size * float(prod((high - low for _, low, high in share), start=Fraction(1)))
            totals[sizes, axes] = totals.get((sizes, axes), 0.0) + local
    return [MeshCollective("all_gather", sizes, axes, num_bytes) for (sizes, axes), num_bytes in totals.items()]


def _layout(view: StageView, tensor: str, turn: int) -> tuple[_Layout, float]:
    """Return where ``tensor`` lies, and the bytes of the whole of it."""
    workload = view.costs.problem.workload
    samples = view.plan.microbatch_size
    producer = workload.producer[tensor]
    maker = workload.operators[producer]
    dtype = maker.definition.output_dtype(maker.outputs.index(tensor))
    size = prod(workload.tensors[tensor]) * samples * dtype_bytes(dtype, view.costs.problem.runtime.implementation)
    held = view.crossing(tensor)
    replica = turn % view.num_turns if view.num_turns > 1 else -1
    sharding = held.sharding if replica >= 0 else ()
    return _laid_out(held.sizes, held.placements, sharding, samples, replica), float(size)


@lru_cache(maxsize=4096)
def _laid_out(
    sizes: MeshSizes, placements: tuple[Placement, ...], sharding: Sharding, num_samples: int, replica: int
) -> _Layout:
    """Return the regions of a mesh; of one replica, with whole microbatches, unless that is -1."""
    if replica < 0:
        return _Layout(tuple(enumerate(regions(sizes, placements, num_samples))))
    whole = tuple(
        Replicate() if axis.split == "batch" else placement
        for axis, placement in zip(sharding, placements, strict=True)
    )
    numbered = enumerate(regions(sizes, whole, num_samples))
    return _Layout(tuple(one for one in numbered if batch_coordinate(sharding, one[0]) == replica))


def crossing_tensors(views: Sequence[StageView]) -> list[list[str]]:
    """Return, for every boundary between stages i and i+1, the tensors that cross it.

    A tensor read several stages later crosses every boundary between.
    """
    if len(views) < 2:
        return []
    workload = views[0].costs.problem.workload
    stage_of = {index: view.position for view in views for index in view.operators}
    crossing: list[list[str]] = [[] for _ in views[1:]]
    for view in views:
        for tensor in view.leaving:
            last = max(stage_of[reader] for reader in workload.consumers[tensor])
            for position in range(view.position, last):
                crossing[position].append(tensor)
    return crossing
