"""What torch keeps for the backward of one operator, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.autograd.graph import saved_tensors_hooks

from hardware_models.runtime_files import load_runtime
from tests.validation.tiny import SPECS
from validation.kinds.operator_context import DTYPES, OperatorContext, make_context
from validation.kinds.torch_kinds import build
from workloads.graph_builder import GraphBuilder
from workloads.kinds.base import Implementation
from workloads.local import saved_tensors, splits_of
from workloads.operators import Workload
from workloads.registry import build_from_spec

SAMPLES = 2


@dataclass(frozen=True)
class Example:
    """One operator under one split.

    Attributes:
        workload, index: The operator.
        split: Over two ranks; ``replicate`` over one.
    """

    workload: Workload
    index: int
    split: str

    def __str__(self) -> str:
        return f"{self.workload.name} {self.workload.operators[self.index].role} {self.split}"


def workloads() -> Iterator[Workload]:
    """Yield the tiny models, with dropout, plain and flash."""
    for name, spec in SPECS.items():
        if spec.family_name == "resnet":
            yield build_from_spec(spec, "plain")
            continue
        fields = {"dropout": 0.1, "attention_dropout": 0.1} if hasattr(spec, "attention_dropout") else {"dropout": 0.1}
        yield build_from_spec(spec.model_copy(update={**fields, "name": f"{spec.name}-dropout"}), "plain")
        yield build_from_spec(spec, "plain" if name in ("t5", "xlnet", "swin") else "flash")
    yield flattening_network()


def flattening_network() -> Workload:
    """Return a convolution with a bias and what no model file here has: an image flattened for a linear."""
    graph = GraphBuilder(name="flattening", family="example", tokens_per_sample=0)
    images, labels = graph.input("images", (3, 8, 8)), graph.input("labels", ())
    graph.layer("features")
    conv = {"in": 3, "out": 4, "kernel": 3, "padding": 1, "bias": True, "reads_data": True}
    x = graph.add("conv1", "conv2d", [images], conv)
    inner = {"in": 4, "out": 4, "kernel": 3, "padding": 1, "bias": True}
    x = graph.add("relu", "relu", [graph.add("conv2", "conv2d", [x], inner)], {"image": True, "groups": 4})
    x = graph.add("pool", "max_pool", [x], {"kernel": 2, "stride": 2, "channels": 4})
    graph.layer("classifier")
    x = graph.add("flatten", "flatten", [x], {"channels": 4})
    x = graph.add("linear", "linear", [x], {"in": 64, "out": 8, "bias": True})
    graph.add("loss", "classifier_loss", [x, labels], {"hidden": 8, "classes": 4})
    return graph.build()


def examples() -> list[Example]:
    """Return every distinct operator of the tiny models under every split of its kind."""
    found: dict[object, Example] = {}
    for workload in workloads():
        for index, op in enumerate(workload.operators):
            for split in splits_of(op.definition, op.attributes):
                limit = op.definition.split_limit(op.attributes, split)
                shapes = [tuple(workload.tensors[name]) for name in op.inputs]
                divisible = "sequence" not in split or all(shape[0] % 2 == 0 for shape in shapes)
                key = (op.kind, tuple(sorted(op.attributes.items())), tuple(shapes), split)
                if divisible and (limit is None or limit % 2 == 0):
                    found.setdefault(key, Example(workload, index, split))
    return list(found.values())


def context_of(example: Example, implementation: Implementation, *, rank: int = 0) -> OperatorContext:
    """Return the operator as one of two ranks sees it (or the only one)."""
    ways = 1 if example.split == "replicate" else 2
    return make_context(
        example.workload,
        example.index,
        [(example.split, ways)],
        local_rank=rank,
        samples=SAMPLES,
        local_samples=SAMPLES // ways if example.split == "batch" else SAMPLES,
        implementation=implementation,
        device=torch.device("cpu"),
        reduce=lambda tensor, operation, split: tensor,
        gather=lambda tensor, split, dim: torch.cat([tensor] * ways, dim),
    )


def made_inputs(context: OperatorContext) -> list[torch.Tensor]:
    """Return inputs of the local shapes."""
    kind = context.operator.definition
    found: list[torch.Tensor] = []
    for position, shape in enumerate(context.local.inputs):
        first = context.operator.inputs.index(context.operator.inputs[position])
        if first < position:
            found.append(found[first])
            continue
        word = kind.input_dtype(position)
        if word == "index":
            found.append(torch.randint(2, shape))
        else:
            dtype = context.dtype if word == "activation" else DTYPES[word]
            graph_input = context.producers[position] is None
            found.append(torch.randn(shape, dtype=dtype).requires_grad_(not graph_input))
    return found


@dataclass(frozen=True)
class Kept:
    """What one forward kept.

    Attributes:
        num_bytes: Tables left out.
        outputs: Shapes.
        gradients: Shapes of the parameters' gradients.
    """

    num_bytes: int
    outputs: tuple[tuple[int, ...], ...]
    gradients: tuple[tuple[int, ...], ...]


def run_example(context: OperatorContext) -> Kept:
    """Run an operator forward and backward and count what it kept, parameters left out, storages once."""
    forward = build(context)
    parameters = [torch.randn(shape, dtype=context.dtype).requires_grad_() for shape in context.local.parameters]
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    rounds = []
    alive = []
    for _ in range(2):
        seen: dict[int, int] = {}

        def pack(tensor: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        inputs = made_inputs(context)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = forward(inputs, parameters)
        rounds.append(seen)
        alive.append((inputs, outputs))
    # What both rounds share are tables: they are made once.
    num_bytes = sum(size for pointer, size in rounds[1].items() if pointer not in rounds[0])
    outputs = alive[1][1]
    ones = [torch.ones_like(x) for x in outputs]
    gradients = torch.autograd.grad(outputs, parameters, ones, allow_unused=True) if parameters else ()
    return Kept(
        num_bytes,
        tuple(tuple(output.shape) for output in outputs),
        tuple(tuple(gradient.shape) for gradient in gradients if gradient is not None),
    )


def stated_bytes(context: OperatorContext) -> int:
    """Return what the kind says; an input read twice counts once."""
    op = context.operator
    found = {}
    for saved in saved_tensors(op.definition, context.local):
        side, number = saved.tensor or ("", 0)
        name = op.inputs[number] if side == "input" else saved.ref
        found[name] = saved.size_bytes
    return sum(found.values())


def executor_implementation(dtype: str) -> Implementation:
    """Return the choices of windtunnel's own executor."""
    return replace(load_runtime("windtunnel-executor").implementation, dtype=dtype)


def layer_kept_bytes(workload: Workload, operators: range, implementation: Implementation) -> int:
    """Return what a run of operators keeps together, storages once, parameters and tables left out."""
    state = {name: torch.randn(SAMPLES, *workload.tensors[name], dtype=DTYPES[implementation.dtype])
             for name in workload.operators[operators.start].inputs}  # fmt: skip
    left_out: set[int] = set()
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in left_out:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    state = {name: value.requires_grad_() for name, value in state.items()}
    alive = []
    for index in operators:
        context = context_of(Example(workload, index, "replicate"), implementation)
        parameters = [torch.randn(shape, dtype=context.dtype).requires_grad_() for shape in context.local.parameters]
        left_out |= {parameter.untyped_storage().data_ptr() for parameter in parameters}
        op = workload.operators[index]
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = build(context)([state[name] for name in op.inputs], parameters)
        state.update(zip(op.outputs, outputs, strict=True))
        alive.append((parameters, outputs))
    return sum(seen.values())
