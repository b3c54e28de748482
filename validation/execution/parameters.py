"""Deterministic parameters and samples, so that any plan of a problem computes the same function.

But for batch norms, whose statistics are those of a rank's samples of a microbatch, as under DistributedDataParallel.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from validation.kinds.operator_context import DTYPES, Box
from workloads.kinds.attributes import integer
from workloads.kinds.base import Parameter, Shape
from workloads.operators import Workload

NORMS = ("layer_norm", "rms_norm", "batch_norm", "shortcut")
SPREAD = 0.02
"""Standard deviation of weights: Radford et al. 2019 and most models after."""


def parameter_key(workload: Workload, index: int, parameter: Parameter) -> str:
    """Return the name of a trainable tensor: its tie key, or operator and parameter."""
    return parameter.tie or f"{workload.operators[index].name}/{parameter.name}"


def full_parameter(key: str, shape: Shape, *, is_gain: bool, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the whole tensor called ``key``; equal keys give equal values on one sort of device."""
    made = torch.empty(shape, dtype=dtype, device=device)  # first: not in a block that the others leave
    generator = torch.Generator(device).manual_seed(zlib.crc32(key.encode()))
    values = torch.randn(shape, generator=generator, device=device) * SPREAD
    return made.copy_(values + 1.0 if is_gain else values)


def initial_parameter(
    workload: Workload, index: int, number: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[str, torch.Tensor]:
    """Return key and whole tensor of parameter ``number`` of operator ``index``."""
    parameter = workload.parameters(index)[number]
    key = parameter_key(workload, index, parameter)
    is_gain = workload.operators[index].kind in NORMS and parameter.name == "weight"
    return key, full_parameter(key, parameter.shape, is_gain=is_gain, dtype=dtype, device=device)


@dataclass(frozen=True)
class InputSpec:
    """A graph input.

    Attributes:
        name: Tensor name.
        shape: Of one sample.
        dtype: Key of DTYPES; ``activation`` is the working type.
        limit: Values of an index lie below; 0 for images.
    """

    name: str
    shape: Shape
    dtype: str
    limit: int


def input_specs(workload: Workload) -> Mapping[str, InputSpec]:
    """Return the graph inputs; what bounds an index follows from the operator that reads it.

    Raises:
        ValueError: If an input is read by a kind whose data the executor cannot make up.
    """
    found: dict[str, InputSpec] = {}
    for op in workload.operators:
        for position, name in enumerate(op.inputs):
            if name not in workload.input_names or name in found:
                continue
            dtype = op.definition.input_dtype(position)
            limit = 0
            if dtype == "index":
                words = {"embedding": "vocab", "lm_loss": "vocab", "classifier_loss": "classes"}
                if op.kind not in words:
                    raise ValueError(f"operator {op.name!r}: the executor cannot make up indices for kind {op.kind}")
                limit = integer(op.attributes, words[op.kind])
            found[name] = InputSpec(name, workload.tensors[name], dtype, limit)
    return found


def make_samples(spec: InputSpec, samples: Sequence[int] | range, dtype: torch.dtype) -> torch.Tensor:
    """Return samples by their number in the global batch, on the CPU."""
    made = []
    for sample in samples:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{spec.name}/{sample}".encode()))
        if spec.limit:
            made.append(torch.randint(spec.limit, spec.shape, generator=generator))
        else:
            made.append(torch.randn(spec.shape, generator=generator).to(dtype))
    return torch.stack(made) if made else torch.empty((0, *spec.shape), dtype=DTYPES.get(spec.dtype, dtype))


def boxed(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the part of a whole tensor that a rank holds, as a tensor that holds nothing else."""
    part = tensor[box]
    return tensor if part.shape == tensor.shape else part.clone(memory_format=torch.contiguous_format)
