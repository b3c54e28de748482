"""The order in which kinds take memory: well formed, and no more at once than workspaces say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.workloads.test_splits import example
from workloads.kinds.base import BACKWARD_INPUT, FORWARD, GRADIENTS, KEPT, RESULTS, Implementation
from workloads.kinds.registry import all_kinds, kind_named
from workloads.local import input_bytes, localize, memory_steps, output_bytes, saved_tensors, workspace_bytes

NARROW = Implementation(dtype="bf16", fused_softmax=False, adds_mask=True, fused_loss=True, logits_dtype="fp32")
APART = replace(NARROW, fused_bias_activation=False, fused_bias_dropout=False, fused_rotary=False)
HOWS = {
    "bf16": NARROW, "fp32": replace(NARROW, dtype="fp32"), "apart": APART, "megatron": Implementation(dtype="fp16"),
}  # fmt: skip


@pytest.mark.parametrize("how", list(HOWS))
@pytest.mark.parametrize("name", sorted(all_kinds()))
def test_what_is_taken_is_given_back_and_never_more_than_the_workspace(name: str, how: str) -> None:
    attributes, shapes = example(name, samples=2, tokens=4, heads=4, width=4)
    kind = kind_named(name)
    local = localize(kind, attributes, shapes, [], HOWS[how])
    private = sum(each.size_bytes for each in saved_tensors(kind, local) if each.tensor is None)
    outputs = sum(output_bytes(kind, local))
    for phase, made, given in ((FORWARD, outputs, 0), (BACKWARD_INPUT, sum(input_bytes(kind, local)), outputs)):
        live = {GRADIENTS: given}
        most = 0
        for step, size in memory_steps(kind, phase, local):
            if size < 0:
                del live[step]
                continue
            assert step not in live
            live[step] = {RESULTS: made, KEPT: private}.get(step, size)
            most = max(most, sum(live.values()))
        assert RESULTS in live
        kept = private if phase == FORWARD else 0
        assert most <= workspace_bytes(kind, phase, local) + made + kept + given
        left = set(live) - {RESULTS, GRADIENTS}
        assert not left or (phase == BACKWARD_INPUT and kind.parts_late)


def test_a_softmax_in_torchs_operations_has_two_wide_tensors_beside_scores_and_result() -> None:
    """Scale, mask, cast to fp32, softmax, cast back: scores 2 bytes an element, masked 2, cast 4, softmax 4."""
    attributes, shapes = example("softmax", samples=2, tokens=4, heads=4, width=4)
    local = localize(kind_named("softmax"), attributes, shapes, [], NARROW)
    elements = output_bytes(kind_named("softmax"), local)[0] // 2
    taken = [(name, size // elements) for name, size in memory_steps(kind_named("softmax"), FORWARD, local) if size > 0]
    assert taken == [("scaled", 2), ("masked", 2), ("cast", 4)]
    back = [(name, size // elements) for name, size in memory_steps(kind_named("softmax"), BACKWARD_INPUT, local)]
    # Autograd lets go of what it was given once that is cast; an operator that holds its operands holds it to the end.
    assert back.pop(1) == (GRADIENTS, -1)
    held = localize(kind_named("softmax"), attributes, shapes, [], replace(NARROW, holds_operands=True))
    as_held = [(name, size // elements) for name, size in memory_steps(kind_named("softmax"), BACKWARD_INPUT, held)]
    assert back == as_held
    assert back == [
        ("cast", 4), ("unscaled", 4), ("product", 4), ("product", -1), ("cast", -1), ("back", 2), ("unscaled", -1),
        (RESULTS, 0), ("back", -1),
    ]  # fmt: skip


def test_megatrons_fused_softmax_works_in_place_backward() -> None:
    """scaled_upper_triang_masked_softmax.h writes the gradient of the scores over that of the result."""
    attributes, shapes = example("softmax", samples=2, tokens=4, heads=4, width=4)
    local = localize(kind_named("softmax"), attributes, shapes, [], HOWS["megatron"])
    assert memory_steps(kind_named("softmax"), BACKWARD_INPUT, local) == ((GRADIENTS, -1), (RESULTS, 0))


def test_megatrons_unfused_softmax_goes_through_fp32_one_operation_after_the_other() -> None:
    """Cast, softmax (torch multiplies into a tensor of its own), masked, scaled, cast back: at most three in fp32."""
    attributes, shapes = example("softmax", samples=2, tokens=4, heads=4, width=4)
    local = localize(kind_named("softmax"), attributes, shapes, [], replace(HOWS["megatron"], fused_softmax=False))
    elements = output_bytes(kind_named("softmax"), local)[0] // 2
    back = [(name, size // elements) for name, size in memory_steps(kind_named("softmax"), BACKWARD_INPUT, local)]
    assert back == [
        ("cast", 4), (GRADIENTS, -1), ("unscaled", 4), ("product", 4), ("product", -1), ("cast", -1), ("masked", 4),
        ("unscaled", -1), (RESULTS, 0), ("masked", -1),
    ]  # fmt: skip


def test_logits_are_gone_when_their_log_softmax_is_made_and_its_gradient_waits_for_the_product() -> None:
    attributes, shapes = example("lm_loss", samples=2, tokens=4, heads=4, width=4)
    local = localize(kind_named("lm_loss"), attributes, shapes, [], NARROW)
    forward = [name for name, _ in memory_steps(kind_named("lm_loss"), FORWARD, local)]
    assert forward == ["logits", "cast", "logits", KEPT, RESULTS, "cast", KEPT]
    steps = memory_steps(kind_named("lm_loss"), BACKWARD_INPUT, local)
    assert [name for name, size in steps if size < 0] == ["of log-softmax"]


def test_dropout_before_a_residual_is_a_tensor_of_its_own_unless_one_kernel_does_both() -> None:
    """Torch: native_dropout makes result and mask, the sum is new, and what was dropped out goes behind it."""
    attributes, shapes = example("dropout_add", samples=2, tokens=4, heads=4, width=4)
    kind, attributes = kind_named("dropout_add"), {**attributes, "probability": 0.1}
    local = localize(kind, attributes, shapes, [], APART)
    size = int(output_bytes(kind, local)[0])
    assert memory_steps(kind, FORWARD, local) == (
        ("dropped", size), (KEPT, 0), (KEPT, -1), (RESULTS, 0), ("dropped", -1),
    )  # fmt: skip
    assert workspace_bytes(kind, FORWARD, local) == size
    for other, how in (({"probability": 0.1}, NARROW), ({"probability": 0.0}, APART)):
        local = localize(kind, {**attributes, **other}, shapes, [], how)
        assert memory_steps(kind, FORWARD, local) == ((RESULTS, 0), (KEPT, 0), (KEPT, -1))


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("phase", [FORWARD, BACKWARD_INPUT])
def test_rotary_positions_in_plain_operations_are_turned_in_fp32(phase: str, slices: bool) -> None:
    """``float()`` and the complex product, four bytes an element each: of the packed tensor, or of its third."""
    attributes, shapes = example("rotary", samples=2, tokens=4, heads=4, width=4)
    kind, how = kind_named("rotary"), replace(APART, slices_packed=slices)
    local = localize(kind, attributes, shapes, [], how)
    elements = input_bytes(kind, local)[0] // 2 // (1 if slices else 3)
    assert [size for _, size in memory_steps(kind, phase, local) if size > 0] == [4 * elements] * 2
    fused = localize(kind, attributes, shapes, [], replace(how, fused_rotary=True))
    assert workspace_bytes(kind, phase, fused) == 0
