"""Bytes that follow a framework's choices, and what composite operators keep and work in, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workloads.kernels import MemoryBound
from workloads.kinds import kind_named
from workloads.kinds.base import PHASES, Attributes, Implementation, Shape
from workloads.local import localize, saved_bytes, workspace_bytes

HALF = Implementation(dtype="fp16")
B, S, H, A, D = 2, 8, 12, 3, 4
X = 2 * B * S * H
MASK = X // 2
FEATURES: Shape = (B, S, H)


def moved(kind: str, attributes: Attributes, shapes: list[Shape], how: Implementation) -> list[float]:
    """Return bytes that the passes of each phase read and write."""
    local = localize(kind_named(kind), attributes, shapes, [], how)
    found = [kind_named(kind).kernels(phase, local) for phase in PHASES]
    return [sum(each.total_bytes for each in phase if isinstance(each, MemoryBound)) for phase in found]


SEPARATE = replace(HALF, fused_bias_activation=False, fused_bias_dropout=False)


@pytest.mark.parametrize(
    ("probability", "how", "forward", "backward"),
    [
        (0.1, SEPARATE, (2 * X + MASK) + 3 * X, (2 * X + MASK) + 3 * X),
        # The residual and the sum in fp32, what is dropped in 16 bits; back two fp32 gradients are added.
        (0.1, replace(SEPARATE, autocast=True), (2 * X + MASK) + (X + 2 * X + 2 * X), (2 * X + MASK) + 3 * 2 * X),
        (0.0, SEPARATE, 3 * X, 3 * X),
        (0.0, HALF, 3 * X, 3 * X),
        # A draw, a shift, a round, a scaling, a product; back a product and a scaling (tf.nn.dropout).
        (0.1, replace(SEPARATE, elementary=True), X + 3 * 2 * X + 3 * X + 3 * X, 3 * X + 2 * X + 3 * X),
    ],
    ids=["in separate kernels", "autocast", "nothing dropped", "nothing dropped, fused", "as chains"],
)
def test_dropout_and_a_residual_move_what_each_is_kept_in(
    probability: float, how: Implementation, forward: int, backward: int
) -> None:
    found = moved("dropout_add", {"probability": probability}, [FEATURES] * 2, how)
    assert found == [forward, backward, 0]


def test_only_a_bias_that_was_left_for_it_is_added_beside_dropout() -> None:
    """Where the linear before adds its own, there is none to add."""
    deferred = replace(HALF, fused_bias_dropout=False)
    own, left = (moved("dropout_add", {"probability": 0.1}, [FEATURES] * 2, how) for how in (SEPARATE, deferred))
    assert [more - less for more, less in zip(left, own, strict=True)] == [2 * X, 0, 0]


@pytest.mark.parametrize(
    ("kind", "attributes", "shapes", "outputs"),
    [
        ("linear", {"in": H, "out": 20}, [FEATURES], B * S * 20),
        (
            "cross_projection",
            {"in": H, "query_out": 20, "key_value_out": 28},
            [FEATURES, (B, 5, H)],
            B * (S * 20 + 5 * 28),
        ),
    ],
)
def test_a_bias_that_the_matmul_library_adds_is_no_pass_forward(
    kind: str, attributes: Attributes, shapes: list[Shape], outputs: int
) -> None:
    """cublasLt's epilogue; its gradient is a sum all the same."""
    apart, inside = (moved(kind, attributes, shapes, replace(HALF, bias_in_matmul=one)) for one in (False, True))
    assert [more - less for more, less in zip(apart, inside, strict=True)] == [2 * 2 * outputs, 0, 0]


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 0),
        ({"fused_gate": False}, 0),
        ({"holds_operands": True}, 0),
        ({"holds_operands": True, "fused_gate": False}, 2 * X),
        ({"holds_operands": True, "fused_bias_activation": False}, 2 * X),
    ],
)
def test_gradients_of_gate_and_up_lie_beside_what_is_held_where_they_are_put_together(
    changes: dict[str, bool], size: int
) -> None:
    kind = kind_named("swiglu")
    local = localize(kind, {}, [(B, S, 2 * H)], [], replace(HALF, **changes))
    assert [workspace_bytes(kind, phase, local) for phase in PHASES] == [0, size, 0]


@pytest.mark.parametrize("elementary", [False, True])
def test_relative_scores_keep_three_sums_of_queries_and_a_position_for_each_distance(elementary: bool) -> None:
    """Queries with each bias, distances from -(S - 1) to S - 1 projected, and the sinusoid, where it is copied."""
    kind, hidden, how = kind_named("relative_score"), 20, replace(HALF, elementary=elementary)
    local = localize(kind, {"heads": A, "head_dim": D, "hidden": hidden}, [(B, S, 3 * A * D)], [], how)
    far, width = 2 * S - 1, A * D
    sinusoid = 0 if elementary else B * far * hidden
    assert saved_bytes(kind, local) == 2 * (B * S * 3 * width + 3 * B * S * width + B * far * width + sinusoid)


def test_a_shortcut_keeps_the_residual_and_its_projection_and_works_in_another() -> None:
    """What is normalised before the sum; back its gradient. Statistics: two fp32 numbers a channel. Besides, what is
    strided is copied into tensor cores' layout, eight channels each."""
    kind = kind_named("shortcut")
    local = localize(kind, {"in": 3, "out": 6, "stride": 2}, [(B, 6, 4, 4), (B, 3, 8, 8)], [], HALF)
    projected, residual = 2 * B * 6 * 4 * 4, 2 * B * 3 * 8 * 8
    assert saved_bytes(kind, local) == residual + projected + 4 * 2 * 6
    copies = 2 * B * 8 * (8 * 8 + 4 * 4)
    assert [workspace_bytes(kind, phase, local) for phase in PHASES] == [projected + copies, projected + copies, copies]


@pytest.mark.parametrize("relu", [False, True])
def test_a_batch_norm_keeps_its_input_and_what_a_relu_after_it_made(relu: bool) -> None:
    kind, size = kind_named("batch_norm"), 2 * B * 3 * 8 * 8
    local = localize(kind, {"channels": 3, "relu": relu}, [(B, 3, 8, 8)], [], HALF)
    assert saved_bytes(kind, local) == size * (1 + relu) + 4 * 2 * 3


@pytest.mark.parametrize("kind", ["attention_score", "flash_attention", "rotary"])
def test_heads_are_split_as_far_as_those_of_keys_and_values_go(kind: str) -> None:
    """Eight heads in two groups: a rank has whole groups."""
    attributes: Attributes = {"heads": 8, "kv_heads": 2, "head_dim": D}
    shapes: list[Shape] = [(B, S, (8 + 2 * 2) * D)] * kind_named(kind).num_inputs
    assert localize(kind_named(kind), attributes, shapes, [("head", 2)], HALF).inputs[0] == (B, S, (4 + 2) * D)
    with pytest.raises(ValueError, match="a head split must divide 2, got 4; try 2"):
        localize(kind_named(kind), attributes, shapes, [("head", 4)], HALF)


@pytest.mark.parametrize(
    ("split", "attributes", "shape"), [("column", {}, (B, S, H)), ("channel", {"image": True}, (B, H, 4, 4))]
)
def test_activations_are_cut_where_their_producer_can_be(split: str, attributes: Attributes, shape: Shape) -> None:
    """Features in three heads' worth, or channels in three groups."""
    with pytest.raises(ValueError, match=f"a {split} split must divide 3, got 2"):
        localize(kind_named("relu"), {**attributes, "groups": 3}, [shape], [(split, 2)], HALF)
    assert localize(kind_named("relu"), {**attributes, "groups": 3}, [shape], [(split, 3)], HALF)


@pytest.mark.parametrize(("split", "word"), [("column", "groups"), ("row", "in_groups"), ("row_sequence", "in_groups")])
def test_a_linear_is_cut_by_whole_heads_where_it_has_them(split: str, word: str) -> None:
    """Three heads of four features before and after: two ways would cut the second."""
    attributes: Attributes = {"in": H, "out": H, word: A}
    with pytest.raises(ValueError, match=f"a {split} split must divide 3, got 2"):
        localize(kind_named("linear"), attributes, [FEATURES], [(split, 2)], HALF)
    assert localize(kind_named("linear"), attributes, [FEATURES], [(split, 3)], HALF)


def test_a_maximum_is_kept_by_its_place() -> None:
    """An int64 for each window (torch's max_pool2d), and the image."""
    local = localize(kind_named("max_pool"), {"kernel": 2, "stride": 2}, [(B, 3, 8, 8)], [], HALF)
    assert saved_bytes(kind_named("max_pool"), local) == 2 * B * 3 * 64 + 8 * B * 3 * 16


def test_a_row_of_a_profile_takes_what_it_states_for_each_sample_and_its_backward_in_one_piece() -> None:
    kind, stated = kind_named("opaque"), {"forward_s": 1e-3, "backward_s": 2.5e-3, "output_bytes": 12, "saved_bytes": 5}
    local = localize(kind, stated, [(B, 9)], [], HALF)
    assert [kind.stated_time_s(phase, local) for phase in PHASES] == [B * 1e-3, B * 2.5e-3, 0]
    assert (local.outputs, saved_bytes(kind, local)) == (((B, 12),), B * 5)
