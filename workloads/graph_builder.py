"""Wires operators by tensor name and infers shapes; model families are written with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workloads.kinds.base import Attributes, Shape
from workloads.kinds.registry import kind_named
from workloads.operators import Operator, Workload

_NO_TIES: Mapping[str, str] = {}


class GraphBuilder:
    """Collects operators in topological order.

    A layer is opened with :meth:`layer`; every operator added after belongs to it, and is called
    ``<layer>.<role>``, and so is its output.

    >>> graph = GraphBuilder(name="one", family="example", tokens_per_sample=8)
    >>> x = graph.input("features", (8, 16))
    >>> graph.layer("only")
    >>> y = graph.add("projection", "linear", [x], {"in": 16, "out": 32}, tensor="column")
    >>> graph.build().tensors[y]
    (8, 32)
    """

    def __init__(self, *, name: str, family: str, tokens_per_sample: int) -> None:
        self._name = name
        self._family = family
        self._tokens_per_sample = tokens_per_sample
        self._operators: list[Operator] = []
        self._tensors: dict[str, Shape] = {}
        self._input_names: list[str] = []
        self._layer_names: list[str] = []
        self._operator_names: set[str] = set()
        self._shapes: dict[tuple[str, int, tuple[Shape, ...]], tuple[Attributes, tuple[Shape, ...]]] = {}

    def input(self, name: str, shape: Shape) -> str:
        """Declare a graph input with the shape of one sample; return its name."""
        self._define(name, tuple(shape))
        self._input_names.append(name)
        return name

    def layer(self, name: str) -> None:
        """Open a layer."""
        self._layer_names.append(name)

    def add(
        self,
        role: str,
        kind: str,
        inputs: Sequence[str],
        attributes: Attributes,
        *,
        tensor: str = "replicate",
        alternative: str | None = None,
        sequence: str | None = None,
        ties: Mapping[str, str] = _NO_TIES,
    ) -> str:
        """Append an operator with one output, and return that tensor's name.

        Args:
            role: Name without its layer.
            kind: Name of its kind.
            inputs: Tensor names; graph inputs or earlier outputs.
            attributes: Shared, not copied: pass one mapping for equal operators.
            tensor: Split under Megatron's tensor parallelism.
            alternative: The opposite split; ``tensor`` if None.
            sequence: Split under Megatron's sequence parallelism; ``tensor`` if None.
            ties: Parameter name to tie key.

        Raises:
            ValueError: If an input is unknown, the name is taken, or the kind refuses the shapes.
        """
        (output,) = self.add_with_outputs(
            role,
            kind,
            inputs,
            attributes,
            tensor=tensor,
            alternative=alternative,
            sequence=sequence,
            ties=ties,
        )
        return output

    def add_with_outputs(
        self,
        role: str,
        kind: str,
        inputs: Sequence[str],
        attributes: Attributes,
        *,
        tensor: str = "replicate",
        alternative: str | None = None,
        sequence: str | None = None,
        ties: Mapping[str, str] = _NO_TIES,
    ) -> tuple[str, ...]:
        """Append an operator and return the names of its outputs; arguments as for :meth:`add`.

        A single output is called like the operator, several get ``.0``, ``.1``, ... appended.
        """
        if not self._layer_names:
            raise ValueError(f"operator {role!r} needs a layer; call layer() first")
        name = f"{self._layer_names[-1]}.{role}"
        if name in self._operator_names:
            raise ValueError(f"operator {name!r} is defined twice")
        self._operator_names.add(name)
        shapes = self._output_shapes(name, kind, inputs, attributes)
        outputs = (name,) if len(shapes) == 1 else tuple(f"{name}.{index}" for index in range(len(shapes)))
        for output, shape in zip(outputs, shapes, strict=True):
            self._define(output, shape)
        self._operators.append(
            Operator(
                name=name,
                role=role,
                kind=kind,
                attributes=attributes,
                inputs=tuple(inputs),
                outputs=outputs,
                layer=len(self._layer_names) - 1,
                tensor_split=tensor,
                alternative_split=tensor if alternative is None else alternative,
                sequence_split=tensor if sequence is None else sequence,
                ties=ties,
            )
        )
        return outputs

    def _define(self, tensor: str, shape: Shape) -> None:
        if tensor in self._tensors:
            raise ValueError(f"tensor {tensor!r} is defined twice")
        self._tensors[tensor] = shape

    def _output_shapes(
        self, operator: str, kind: str, inputs: Sequence[str], attributes: Attributes
    ) -> tuple[Shape, ...]:
        for tensor in inputs:
            if tensor not in self._tensors:
                raise ValueError(f"operator {operator!r} reads tensor {tensor!r}, which no earlier one makes")
        definition = kind_named(kind)
        arity = definition.arity(attributes)
        if len(inputs) != arity:
            raise ValueError(f"operator {operator!r} of kind {kind} needs {arity} inputs, got {inputs}")
        shapes = tuple(self._tensors[tensor] for tensor in inputs)
        # The mapping is kept in the key's value, so that its id is not used again.
        found = self._shapes.get((kind, id(attributes), shapes))
        if found is None:
            try:
                outputs = definition.outputs(attributes, tuple((1, *shape) for shape in shapes))
            except ValueError as error:
                raise ValueError(f"operator {operator!r}: {error}") from None
            found = attributes, tuple(shape[1:] for shape in outputs)
            self._shapes[kind, id(attributes), shapes] = found
        return found[1]

    def build(self) -> Workload:
        """Return the workload.

        Raises:
            ValueError: If there is no operator.
        """
        if not self._operators:
            raise ValueError(f"model {self._name!r} has no operators")
        return Workload(
            name=self._name,
            family=self._family,
            operators=tuple(self._operators),
            tensors=dict(self._tensors),
            input_names=frozenset(self._input_names),
            tokens_per_sample=self._tokens_per_sample,
            layer_names=tuple(self._layer_names),
        )
