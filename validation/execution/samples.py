"""This rank's part of the training data, on its device before anything is timed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from validation.execution.parameters import InputSpec, make_samples
from validation.execution.wiring import GRAPH, StageWiring
from validation.kinds.operator_context import OperatorContext


def load_samples(
    wiring: StageWiring,
    contexts: Mapping[int, OperatorContext],
    local_rank: int,
    inputs: Mapping[str, InputSpec],
    device: torch.device,
    microbatches: Mapping[int, int],
) -> dict[tuple[int, int, int], torch.Tensor]:
    """Return training data by operator, input position and microbatch.

    Args:
        wiring: Edges of the stage.
        contexts: Per operator, what this rank sees.
        local_rank: Which device of the stage this is.
        inputs: Graph inputs of the workload.
        device: Where tensors live.
        microbatches: Those wanted, each with the number of its first sample.
    """
    plan = wiring.view.plan
    found: dict[tuple[int, int, int], torch.Tensor] = {}
    wanted = [
        (index, position, wire.tensor)
        for index, wires in wiring.wires.items()
        for position, wire in enumerate(wires)
        if wire.source == GRAPH
    ]
    for microbatch, start in microbatches.items():
        if not wanted or not wiring.works_on(local_rank, microbatch):
            continue
        made: dict[tuple[str, int, int], torch.Tensor] = {}
        for index, position, tensor in wanted:
            samples, *rest = contexts[index].input_boxes[position]
            if plan.rotates:
                samples = slice(0, plan.microbatch_size)
            key = tensor, samples.start, samples.stop
            if key not in made:
                numbers = range(start + samples.start, start + samples.stop)
                made[key] = make_samples(inputs[tensor], numbers, contexts[index].dtype)
            local = made[key][(slice(None), *rest)].contiguous()
            found[index, position, microbatch] = local.to(device)
    return found
