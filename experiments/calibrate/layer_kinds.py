"""The kinds of layers that a model repeats, as profilers of layers number them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from workloads.operators import Workload

Layers = Sequence[Sequence[int]]
"""Operators of each layer of one kind: those that all layers of the kind have."""

Parts = frozenset[tuple[Hashable, int]]
"""What a layer is made of: operators by role and shapes, and how many."""


def layers_by_kind(workload: Workload) -> list[Layers]:
    """Return the layers of each kind that there are several of, kinds in order of appearance.

    Layers are of one kind if their operators have the same roles and shapes, whatever else they are told (every second
    layer of a Swin Transformer shifts its windows). A layer that has more than its neighbour (patch merging before the
    first of a stage, a pooling after the last) is of its kind, unless there are more like it than like the neighbour;
    what it has more lies outside.
    """
    layers = [{index: _shape_key(workload, index) for index in range(*bounds)} for bounds in workload.layers]
    places: dict[Parts, list[int]] = {}
    for place, keys in enumerate(layers):
        counts = Counter(keys.values())
        places.setdefault(frozenset(counts.items()), []).append(place)
    kinds: dict[Parts, list[int]] = {}
    for parts, own in places.items():
        within = [
            other
            for other, theirs in places.items()
            if other <= parts and len(theirs) >= len(own) and any(abs(a - b) <= 1 for a in own for b in theirs)
        ]
        kinds.setdefault(min(within, key=len), []).extend(own)
    return [
        [[index for index, key in layers[place].items() if key in dict(parts)] for place in sorted(own)]
        for parts, own in sorted(kinds.items(), key=lambda item: min(item[1]))
        if len(own) > 1
    ]


def outside_kinds(workload: Workload, kinds: Sequence[Layers]) -> list[int]:
    """Return the operators that no kind has."""
    inside = {index for layers in kinds for members in layers for index in members}
    return [index for index in range(len(workload)) if index not in inside]


def _shape_key(workload: Workload, index: int) -> Hashable:
    op = workload.operators[index]
    return op.role, op.kind, tuple(workload.tensors[name] for name in (*op.inputs, *op.outputs))
