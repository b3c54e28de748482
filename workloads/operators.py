"""The operator graph of one training iteration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from workloads.kinds.base import Attributes, Kind, Parameter, Shape
from workloads.kinds.registry import kind_named


@dataclass(frozen=True)
class Operator:
    """One node of the graph.

    Attributes:
        name: Unique, e.g. ``layer3.attention_qkv``.
        role: The name without its layer, e.g. ``attention_qkv``; profiles know it by ``Workload.profile_roles``.
        kind: Name of its kind.
        attributes: The kind's attributes.
        inputs, outputs: Names of tensors.
        layer: Index of the layer it belongs to, counted from 0 over the whole model.
        tensor_split: Split that Megatron-style tensor parallelism uses here.
        alternative_split: The opposite choice (Aceso's second algorithm).
        sequence_split: Split under Megatron's sequence parallelism.
        ties: Parameter name to tie key, for parameters shared with other operators.
    """

    name: str
    role: str
    kind: str
    attributes: Attributes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    layer: int
    tensor_split: str = "replicate"
    alternative_split: str = "replicate"
    sequence_split: str = "replicate"
    ties: Mapping[str, str] = field(default_factory=dict)

    @property
    def definition(self) -> Kind:
        """The operator's kind."""
        return kind_named(self.kind)


@dataclass(frozen=True)
class Workload:
    """One model's training iteration as operators in topological order.

    Shapes leave the batch out: ``tensors`` maps a name to the shape of one sample.

    Attributes:
        name: Model name as users write it.
        family: Model family (``gpt``, ``bert``, ...).
        operators: Topological order.
        tensors: Per-sample shape of every tensor, graph inputs included.
        input_names: Graph inputs (token ids, images, labels): they need no gradient.
        tokens_per_sample: Length counted in "tokens per second" (0 where the word has no sense).
        layer_names: Name of each layer.
    """

    name: str
    family: str
    operators: tuple[Operator, ...]
    tensors: Mapping[str, Shape]
    input_names: frozenset[str]
    tokens_per_sample: int
    layer_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.operators)

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """Tensor name to the index of the operator that makes it; graph inputs are absent."""
        return {tensor: index for index, op in enumerate(self.operators) for tensor in op.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor name to the indices of the operators that read it, ascending."""
        found: dict[str, list[int]] = {}
        for index, op in enumerate(self.operators):
            for tensor in dict.fromkeys(op.inputs):
                found.setdefault(tensor, []).append(index)
        return {name: tuple(readers) for name, readers in found.items()}

    @cached_property
    def signatures(self) -> tuple[int, ...]:
        """Per operator, an id that equal operators (kind, attributes, input shapes) share."""
        ids: dict[object, int] = {}
        return tuple(ids.setdefault(self._signature_key(op), len(ids)) for op in self.operators)

    @cached_property
    def signature_examples(self) -> tuple[int, ...]:
        """Per signature id, the index of the first operator that has it."""
        examples: dict[int, int] = {}
        for index, signature in enumerate(self.signatures):
            examples.setdefault(signature, index)
        return tuple(examples[signature] for signature in range(len(examples)))

    def _signature_key(self, op: Operator) -> object:
        return (
            self.work_key(op),
            op.role,
            (op.tensor_split, op.alternative_split, op.sequence_split),
            tuple(sorted(op.ties.items())),
        )

    @cached_property
    def profile_roles(self) -> tuple[str, ...]:
        """Per operator, its name in profiles: its role, with a number where operators of the role differ in their work.

        Of other kinds, attributes or shapes, numbered from 1 as they first appear: ``norm_1.3`` of a Swin Transformer,
        whose third stage has norms of another width.
        """
        numbers: dict[str, dict[object, int]] = {}
        for op in self.operators:
            own = numbers.setdefault(op.role, {})
            own.setdefault(self.work_key(op), len(own) + 1)
        return tuple(
            f"{op.role}.{own[self.work_key(op)]}" if len(own := numbers[op.role]) > 1 else op.role
            for op in self.operators
        )

    def work_key(self, op: Operator) -> object:
        """Return what operators share that do the same work: kind, attributes, shapes of inputs."""
        return op.kind, tuple(sorted(op.attributes.items())), tuple(self.tensors[name] for name in op.inputs)

    def input_shapes(self, index: int, samples: int) -> tuple[Shape, ...]:
        """Return the global input shapes of operator ``index`` for ``samples`` samples."""
        return tuple((samples, *self.tensors[name]) for name in self.operators[index].inputs)

    def parameters(self, index: int) -> tuple[Parameter, ...]:
        """Return the parameters of operator ``index``, ties filled in."""
        return self._signature_parameters[self.signatures[index]]

    @cached_property
    def _signature_parameters(self) -> tuple[tuple[Parameter, ...], ...]:
        """Per signature id, the parameters of an operator that has it."""
        every = []
        for index in self.signature_examples:
            op = self.operators[index]
            found = op.definition.parameters(op.attributes, self.input_shapes(index, 1))
            every.append(tuple(Parameter(name=p.name, shape=p.shape, tie=op.ties.get(p.name)) for p in found))
        return tuple(every)

    @cached_property
    def num_parameters(self) -> int:
        """Trainable elements of the model; tied tensors count once."""
        total, seen = 0, set()
        for index in range(len(self.operators)):
            for parameter in self.parameters(index):
                if parameter.tie is not None:
                    if parameter.tie in seen:
                        continue
                    seen.add(parameter.tie)
                total += prod(parameter.shape)
        return total

    @cached_property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """Operator range ``[start, stop)`` of each layer, in order."""
        ranges: list[tuple[int, int]] = []
        start = 0
        for index in range(1, len(self.operators) + 1):
            if index == len(self.operators) or self.operators[index].layer != self.operators[start].layer:
                ranges.append((start, index))
                start = index
        return tuple(ranges)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the whole graph, so that a plan file can say which graph its indices mean."""
        text = json.dumps(
            [
                (op.kind, sorted(op.attributes.items()), op.inputs, op.outputs, op.layer, sorted(op.ties.items()))
                for op in self.operators
            ]
            + [sorted((name, list(shape)) for name, shape in self.tensors.items())],
            default=str,
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]
