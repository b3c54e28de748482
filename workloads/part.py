"""A run of operators as a workload of its own: what one pipeline stage computes."""

from __future__ import annotations

from dataclasses import replace

from workloads.operators import Workload


def part_of(workload: Workload, start: int, stop: int) -> Workload:
    """Return operators ``[start, stop)`` as a workload; tensors made before them are its inputs.

    Raises:
        ValueError: If the range is empty or outside the workload.
    """
    if not 0 <= start < stop <= len(workload):
        raise ValueError(f"a part must lie in 0 to {len(workload)} and not be empty, got {start} to {stop}")
    operators = workload.operators[start:stop]
    first_layer = operators[0].layer
    made = {name for op in operators for name in op.outputs}
    read = {name for op in operators for name in op.inputs}
    return Workload(
        name=f"{workload.name}[{start}:{stop}]",
        family=workload.family,
        operators=tuple(replace(op, layer=op.layer - first_layer) for op in operators),
        tensors={name: workload.tensors[name] for name in sorted(made | read)},
        input_names=frozenset(read - made),
        tokens_per_sample=workload.tokens_per_sample,
        layer_names=workload.layer_names[first_layer : operators[-1].layer + 1],
    )
