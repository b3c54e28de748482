"""Torch builders agree with the kinds they build: shapes, parameters, and what backward keeps."""

from __future__ import annotations

from math import prod

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from tests.validation.saving import (  # noqa: E402
    SAMPLES,
    Example,
    context_of,
    examples,
    executor_implementation,
    layer_kept_bytes,
    run_example,
    stated_bytes,
)
from tests.validation.tiny import SPECS  # noqa: E402
from validation.kinds.elementwise import drop  # noqa: E402
from validation.kinds.operator_context import OperatorContext, box_shape  # noqa: E402
from validation.kinds.torch_kinds import BUILDERS, NOT_EXECUTABLE, build  # noqa: E402
from workloads.kinds import all_kinds  # noqa: E402
from workloads.local import localize, range_saved_bytes  # noqa: E402
from workloads.registry import build_from_spec  # noqa: E402

EXAMPLES = examples()


def test_every_kind_has_a_builder_or_is_refused_by_name() -> None:
    assert set(BUILDERS) == set(all_kinds()) - set(NOT_EXECUTABLE)


def test_the_examples_cover_every_builder_and_split() -> None:
    assert {example.workload.operators[example.index].kind for example in EXAMPLES} >= set(BUILDERS) - {"add"}
    assert {example.split for example in EXAMPLES} == {
        "batch", "replicate", "column", "row", "row_sequence", "head", "sequence", "vocab", "vocab_sequence",
        "in_channel", "out_channel", "channel",
    }  # fmt: skip


def ranks(example: Example) -> range:
    return range(1 if example.split == "replicate" else 2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_outputs_and_parameters_have_the_shapes_that_the_kind_states(dtype: str) -> None:
    for example in EXAMPLES:
        for rank in ranks(example):
            context = context_of(example, executor_implementation(dtype), rank=rank)
            kept = run_example(context)
            assert kept.outputs == context.local.outputs, str(example)
            assert kept.gradients == context.local.parameters, str(example)
            boxes = tuple(box_shape(box) for box in context.parameter_boxes)
            assert boxes == context.local.parameters, str(example)


def test_dropout_draws_what_torch_draws_from_the_operators_seed() -> None:
    """Whatever was drawn before, so that a recomputed pass has the mask of the first."""
    (example, *_) = (each for each in EXAMPLES if each.workload.operators[each.index].kind == "dropout")
    context = context_of(example, executor_implementation("fp32"), rank=0)
    torch.manual_seed(context.seed())
    expected, _ = torch.native_dropout(torch.ones(64, 64), 0.3, True)
    for drawn in range(2):
        torch.rand(drawn)
        assert torch.equal(drop(context, torch.ones(64, 64), 0.3), expected)


def tokens(context: OperatorContext) -> int:
    return prod(context.local.inputs[0][:2])


def allowed(context: OperatorContext, example: Example, dtype: str) -> tuple[int, int]:
    """Return the smallest and largest bytes that torch may keep beside what the kind states, and say why."""
    stated = stated_bytes(context)
    kind = context.operator.kind
    if kind in ("lm_loss", "classifier_loss") and example.split != "vocab":
        return stated + 4, stated + 4  # nll_loss keeps the sum of weights, one number
    if kind in ("embedding", "lm_loss") and example.split in ("vocab", "vocab_sequence"):
        # A byte per token: is its row on another rank? The loss counts rows, not labels, twice.
        return stated + tokens(context), stated + tokens(context)
    if kind in ("attention_score", "attention_context"):
        # Batched products copy queries, keys and values out of the packed tensor, which itself is let go: see the
        # test of a whole layer for the sum.
        return 0, stated
    if kind == "lstm":
        # cuDNN's layer is what the kind states; the CPU's library keeps packed weights and a workspace in pages.
        ends = context.local.element_bytes * (prod(context.local.inputs[0]) + prod(context.local.outputs[0]))
        weights = context.local.element_bytes * sum(prod(shape) for shape in context.local.parameters)
        return ends, stated + 4 * weights + 65_536
    if kind == "relative_score":
        return stated // 2, 2 * stated  # batched products copy keys; the sinusoid and the indices of distances are kept
    if kind == "rms_norm":
        return stated, 4 * stated  # a chain of kernels on the CPU; one kernel on CUDA
    if kind in ("batch_norm", "shortcut") and dtype == "bf16":
        return stated - 4 * context.local.outputs[0][1], stated  # as layer_norm's
    if kind == "layer_norm" and dtype == "bf16":
        return stated - 4 * tokens(context), stated  # statistics are bf16 on the CPU, fp32 on CUDA
    return stated, stated


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_torch_keeps_the_bytes_that_the_kind_states(dtype: str) -> None:
    for example in EXAMPLES:
        for rank in ranks(example):
            context = context_of(example, executor_implementation(dtype), rank=rank)
            low, high = allowed(context, example, dtype)
            kept = run_example(context).num_bytes
            assert low <= kept <= high, f"{example}: kept {kept}, stated {stated_bytes(context)}"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["gpt", "bert", "vit"])
def test_a_layer_as_a_whole_keeps_what_its_kinds_state(model: str, dtype: str) -> None:
    implementation = executor_implementation(dtype)
    workload = build_from_spec(SPECS[model], "plain")
    start, stop = workload.layers[2]
    locals_by_operator = {
        index: localize(
            workload.operators[index].definition,
            workload.operators[index].attributes,
            workload.input_shapes(index, SAMPLES),
            (),
            implementation,
        )
        for index in range(start, stop)
    }
    stated = sum(range_saved_bytes(workload, locals_by_operator).values())
    positions = workload.tensors[workload.operators[start].inputs[0]][0]
    # bf16 norms keep their statistics in bf16 on the CPU.
    expected = stated - (0 if dtype == "fp32" else 2 * 2 * 2 * SAMPLES * positions)
    assert layer_kept_bytes(workload, range(start, stop), implementation) == expected


def test_an_operator_of_a_profile_is_refused_by_name() -> None:
    workload = build_from_spec(SPECS["gpt"], "plain")
    context = context_of(Example(workload, 1, "replicate"), executor_implementation("fp32"))
    opaque = type(context)(**{**context.__dict__, "operator": type(context.operator)(
        **{**context.operator.__dict__, "kind": "opaque"})})  # fmt: skip
    with pytest.raises(ValueError, match=r"of kind opaque cannot be executed: .*profile"):
        build(opaque)
