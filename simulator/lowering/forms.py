"""What makes stages alike: operators of the same kind, fed and read in the same way, wherever they stand."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.uniform import repeated_layers
from workloads.operators import Workload

Ints = NDArray[np.int64]


def operator_forms(workload: Workload) -> Ints:
    """Return a number for each operator: int64[num_operators].

    Two ranges of operators with the same numbers, one by one, are alike but for the names in them: signatures (kind,
    role, attributes, shapes, ties), distances to the makers of inputs and to the readers of outputs, and where layers
    begin. Graph inputs count by name.
    """
    repeated = {workload.operators[first].layer for first, _ in repeated_layers(workload)}
    ids: dict[object, int] = {}
    forms = np.empty(len(workload), dtype=np.int64)
    layer = 0
    for index, op in enumerate(workload.operators):
        inputs: list[object] = []
        for name in op.inputs:
            maker = workload.producer.get(name)
            inputs.append(name if maker is None else (index - maker, workload.operators[maker].outputs.index(name)))
        readers = tuple(
            tuple(reader - index for reader in workload.consumers.get(name, ())) for name in op.outputs
        )
        key = (workload.signatures[index], tuple(inputs), readers, op.layer - layer, op.layer in repeated)
        forms[index] = ids.setdefault(key, len(ids))
        layer = op.layer
    return forms
