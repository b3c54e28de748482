"""From a kind, its attributes and the mesh axes to what one rank sees: shapes, bytes, work.

Everything here is derived: a dimension is divided where the split's placement says ``Shard``, and the kind
answers for the local shapes. Nothing is typed in per split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from workloads.kernels import Kernel, MemoryBound
from workloads.kinds.base import (
    BACKWARD_WEIGHT,
    DTYPE_BYTES,
    PHASES,
    Attributes,
    Implementation,
    Kind,
    Local,
    Shape,
    Split,
)
from workloads.operators import Workload
from workloads.placements import Placement, Shard

CAST_WEIGHTS = "cast weights"
"""What a product under autocast saves of its own: its weights in the type it is done in."""

Axis = tuple[str, int]
"""A mesh axis as an operator sees it: the split it means there, and its size."""


@dataclass(frozen=True)
class SavedTensor:
    """A tensor kept for backward, in bytes on one rank.

    Attributes:
        ref: ``"input:0"``, ``"output:0"``, or a private name (kept by nobody else).
        tensor: Index ``("input", 0)`` or ``("output", 0)`` of the operator's tensor, or None if private.
        size_bytes: Bytes.
    """

    ref: str
    tensor: tuple[str, int] | None
    size_bytes: int


def localize(
    kind: Kind,
    attributes: Attributes,
    input_shapes: Sequence[Shape],
    axes: Sequence[Axis],
    implementation: Implementation,
    *,
    operator: str = "",
) -> Local:
    """Return what one rank sees of an operator cut by ``axes``.

    Args:
        kind: The operator's kind.
        attributes: Its attributes.
        input_shapes: Global input shapes, samples first (the samples of all replicas together).
        axes: ``(split, size)`` per mesh axis; ``"batch"`` divides the samples.
        implementation: The framework's choices.
        operator: Name for messages; the kind's name if empty.

    Raises:
        ValueError: If the kind has no such split, the sizes do not divide its limit (heads, vocabulary, ...),
            or a dimension is not divisible.
    """
    who = operator or kind.name
    table = splits_of(kind, attributes)
    chosen = [(table_entry(kind, table, split, who), split, size) for split, size in axes if size != 1]
    _check_limits(kind, attributes, axes, who)
    inputs = tuple(tuple(shape) for shape in input_shapes)
    outputs = kind.outputs(attributes, inputs)
    parameters = tuple(parameter.shape for parameter in kind.parameters(attributes, inputs))
    for entry, split, size in chosen:
        inputs = _cut_all(inputs, entry.inputs, split, size, who, "input")
        outputs = _cut_all(outputs, entry.outputs, split, size, who, "output")
        parameters = _cut_all(parameters, entry.parameters, split, size, who, "parameter")
    cuts = tuple((split, size) for _, split, size in chosen)
    return Local(attributes, inputs, outputs, parameters, implementation, cuts)


def splits_of(kind: Kind, attributes: Attributes) -> Mapping[str, Split]:
    """Return the splits of ``kind`` with these attributes (cached: kinds are stateless)."""
    return _splits_cached(kind, tuple(sorted(attributes.items())))


@lru_cache(maxsize=4096)
def _splits_cached(kind: Kind, items: tuple[tuple[str, int | float | bool | str], ...]) -> Mapping[str, Split]:
    return kind.splits(dict(items))


def table_entry(kind: Kind, table: Mapping[str, Split], split: str, operator: str) -> Split:
    """Return ``table[split]``, or raise a ValueError that lists the splits there are."""
    try:
        return table[split]
    except KeyError:
        raise ValueError(
            f"operator {operator!r} (kind {kind.name}) cannot be split by {split!r}; use one of {', '.join(table)}"
        ) from None


def _check_limits(kind: Kind, attributes: Attributes, axes: Sequence[Axis], operator: str) -> None:
    products: dict[str, int] = {}
    for split, size in axes:
        if size < 1:
            raise ValueError(f"operator {operator!r}: an axis must have size >= 1, got {split} {size}")
        products[split] = products.get(split, 1) * size
    for split, size in products.items():
        limit = kind.split_limit(attributes, split)
        if size > 1 and limit is not None and limit % size:
            raise ValueError(
                f"operator {operator!r}: a {split} split must divide {limit}, got {size}; "
                f"try {_largest_divisor(limit, size)}"
            )


def _largest_divisor(number: int, at_most: int) -> int:
    return next(size for size in range(min(at_most, number), 0, -1) if number % size == 0)


def _cut_all(
    shapes: Sequence[Shape], placements: Sequence[Placement], split: str, size: int, operator: str, what: str
) -> tuple[Shape, ...]:
    assert len(shapes) == len(placements), f"{operator}: {len(shapes)} {what}s, {len(placements)} placements"
    return tuple(
        cut(shape, placement, size, f"operator {operator!r}, {what} {index}, split {split}")
        if isinstance(placement, Shard)
        else shape
        for index, (shape, placement) in enumerate(zip(shapes, placements, strict=True))
    )


def cut(shape: Shape, placement: Placement, size: int, what: str = "tensor") -> Shape:
    """Return the local shape of ``shape`` on an axis of ``size`` ranks.

    Raises:
        ValueError: If the placement shards a dimension that ``size`` does not divide.

    >>> cut((4, 512, 1024), Shard(2), 2)
    (4, 512, 512)
    """
    if not isinstance(placement, Shard):
        return shape
    dim = placement.dim
    if dim >= len(shape):
        raise ValueError(f"{what}: dimension {dim} must exist, got shape {shape}")
    if shape[dim] % size:
        name = "samples" if dim == 0 and "parameter" not in what else f"dimension {dim}"
        fits = _largest_divisor(shape[dim], size)
        whole = "leave it whole (no sequence parallelism)" if "sequence" in what else "leave it whole"
        remedy = f"try {fits}" if fits > 1 else whole
        raise ValueError(f"{what}: {name} must be divisible by {size}, got {shape[dim]}; {remedy}")
    return (*shape[:dim], shape[dim] // size, *shape[dim + 1 :])


def dtype_bytes(dtype: str, implementation: Implementation) -> int:
    """Return bytes per element of ``dtype``, a key of DTYPE_BYTES or ``"activation"``."""
    return implementation.activation_bytes if dtype == "activation" else DTYPE_BYTES[dtype]


def input_bytes(kind: Kind, local: Local) -> tuple[int, ...]:
    """Return bytes of each input on one rank."""
    return tuple(
        prod(shape) * dtype_bytes(kind.input_dtype(index), local.implementation)
        for index, shape in enumerate(local.inputs)
    )


def output_bytes(kind: Kind, local: Local) -> tuple[int, ...]:
    """Return bytes of each output on one rank."""
    return tuple(
        prod(shape) * dtype_bytes(kind.output_dtype(index), local.implementation)
        for index, shape in enumerate(local.outputs)
    )


def cast_weights(kind: Kind, local: Local) -> int:
    """Return how many elements of weights a pass casts for its products (``Implementation.autocast``)."""
    if not local.implementation.autocast or all(
        isinstance(kernel, MemoryBound) for kernel in kind.kernels(BACKWARD_WEIGHT, local)
    ):
        return 0
    return sum(prod(shape) for shape in local.parameters if len(shape) > 1)


def saved_tensors(kind: Kind, local: Local) -> tuple[SavedTensor, ...]:
    """Return what forward keeps, in bytes; references say whose tensor it is, so that it is counted once."""
    found = []
    if cast := cast_weights(kind, local):
        found.append(SavedTensor(CAST_WEIGHTS, None, cast * local.element_bytes))
    for saved in kind.saved(local):
        side, _, index = saved.ref.partition(":")
        if not index:
            size = prod(saved.shape) * dtype_bytes(saved.dtype, local.implementation)
            found.append(SavedTensor(saved.ref, None, size))
            continue
        sizes = input_bytes(kind, local) if side == "input" else output_bytes(kind, local)
        found.append(SavedTensor(saved.ref, (side, int(index)), sizes[int(index)]))
    return tuple(found)


def saved_bytes(kind: Kind, local: Local) -> int:
    """Return bytes one operator alone keeps for backward (shared tensors included)."""
    return sum({saved.ref: saved.size_bytes for saved in saved_tensors(kind, local)}.values())


def workspace_tensors(kind: Kind, phase: str, local: Local) -> tuple[int, ...]:
    """Return the bytes of each buffer that lives only during ``phase``."""
    return _bytes_each(kind.workspace(phase, local), local)


def workspace_bytes(kind: Kind, phase: str, local: Local) -> int:
    """Return bytes of buffers that live only during ``phase``."""
    return sum(workspace_tensors(kind, phase, local))


def memory_steps(kind: Kind, phase: str, local: Local) -> tuple[tuple[str, int], ...]:
    """Return ``Kind.memory_steps`` as names and bytes: above 0 taken, 0 made, below given back."""
    found = []
    for step in kind.memory_steps(phase, local):
        (size,) = _bytes_each((step.tensor,), local) if step.tensor else (0,)
        assert step.tensor is None or size > 0, f"{kind.name} takes an empty buffer {step.name}"
        found.append((step.name, -1 if step.gives else size))
    return tuple(found)


def host_calls(kind: Kind, phase: str, local: Local) -> int:
    """Return how often an operator's phase costs the host a dispatch."""
    calls = kind.num_calls(phase, local)
    return min(1, calls) if local.implementation.operators_are_calls else calls


def lasting_buffer_bytes(kind: Kind, local: Local) -> int:
    """Return bytes of buffers that are never given back."""
    return sum(_bytes_each(kind.lasting_buffer(local), local))


def _bytes_each(tensors: Iterable[tuple[Shape, str]], local: Local) -> tuple[int, ...]:
    return tuple(prod(shape) * dtype_bytes(dtype, local.implementation) for shape, dtype in tensors)


def matmul_flop(kernels: Sequence[Kernel]) -> float:
    """Return floating point operations of the matmuls and fused attention among ``kernels``."""
    return sum(kernel.flop for kernel in kernels if not isinstance(kernel, MemoryBound))


def range_saved_bytes(workload: Workload, locals_by_operator: Mapping[int, Local]) -> dict[str, int]:
    """Return what a set of operators keeps for backward, each tensor once.

    Args:
        workload: The graph.
        locals_by_operator: What one rank sees of each operator of the set.

    Returns:
        Bytes by tensor name; private tensors are called ``<operator>/<ref>``. Graph inputs are left out.
    """
    found: dict[str, int] = {}
    for index, local in locals_by_operator.items():
        op = workload.operators[index]
        for saved in saved_tensors(op.definition, local):
            if saved.tensor is None:
                found[f"{op.name}/{saved.ref}"] = saved.size_bytes
                continue
            side, number = saved.tensor
            tensor = (op.inputs if side == "input" else op.outputs)[number]
            if tensor not in workload.input_names:
                found[tensor] = saved.size_bytes
    return found


def check_workload(workload: Workload, implementation: Implementation) -> None:
    """Check that a graph agrees with its kinds: order, shapes, splits, placements, ties.

    Args:
        workload: The graph.
        implementation: Framework choices, for which kinds are asked for kernels and saved tensors.

    Raises:
        ValueError: At the first operator that does not agree.
    """
    made = set(workload.input_names)
    tied: dict[str, Shape] = {}
    for index, op in enumerate(workload.operators):
        missing = [name for name in op.inputs if name not in made]
        if missing:
            raise ValueError(f"operator {op.name!r} reads {missing[0]!r} before it is made")
        made.update(op.outputs)
        for parameter in workload.parameters(index):
            if parameter.tie and tied.setdefault(parameter.tie, parameter.shape) != parameter.shape:
                raise ValueError(
                    f"operator {op.name!r}: parameters tied as {parameter.tie!r} must have one shape, "
                    f"got {parameter.shape} and {tied[parameter.tie]}"
                )
        unknown = set(op.ties) - {parameter.name for parameter in workload.parameters(index)}
        if unknown:
            raise ValueError(f"operator {op.name!r} ties parameter {min(unknown)!r}, which it does not have")
    for index in workload.signature_examples:
        _check_operator(workload, index, implementation)


def _check_operator(workload: Workload, index: int, implementation: Implementation) -> None:
    op = workload.operators[index]
    kind = op.definition
    local = localize(kind, op.attributes, workload.input_shapes(index, 1), (), implementation, operator=op.name)
    wanted = tuple((1, *workload.tensors[name]) for name in op.outputs)
    if local.outputs != wanted:
        raise ValueError(f"operator {op.name!r} makes {local.outputs}, the graph says {wanted}")
    table = splits_of(kind, op.attributes)
    for split in (op.tensor_split, op.alternative_split, op.sequence_split):
        table_entry(kind, table, split, op.name)
    for split, entry in table.items():
        have = len(entry.inputs), len(entry.outputs), len(entry.parameters)
        need = len(local.inputs), len(local.outputs), len(local.parameters)
        if have != need:
            raise ValueError(
                f"operator {op.name!r}, split {split}: placements of {have} inputs, outputs and parameters, "
                f"the operator has {need}"
            )
    for phase in PHASES:
        kind.kernels(phase, local)
        workspace_bytes(kind, phase, local)
    saved_tensors(kind, local)
