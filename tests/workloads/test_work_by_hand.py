"""What operators do in each phase, counted by hand: operations of products, and bytes of passes over memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.workloads.test_splits import example
from workloads.kernels import Matmul, MemoryBound
from workloads.kinds import all_kinds, kind_named
from workloads.kinds.base import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, PHASES, Attributes, Implementation, Shape
from workloads.local import input_bytes, localize, matmul_flop, output_bytes, saved_bytes, workspace_bytes

HALF = Implementation(dtype="fp16")
E, WIDE, INDEX = 2, 4, 8
"""Bytes of an activation, an fp32 number, a token."""

B, S, H, A, D = 2, 8, 12, 3, 4
X = E * B * S * H
SCORES = E * B * A * S * S
BIAS = E * A * S * S
IMAGE: Shape = (B, 3, 8, 8)
PIXELS = E * B * 3 * 8 * 8


def counted(
    kind: str, attributes: Attributes, shapes: list[Shape], how: Implementation = HALF
) -> tuple[list[float], list[float]]:
    """Return operations and moved bytes of the three phases."""
    local = localize(kind_named(kind), attributes, shapes, [], how)
    found = [kind_named(kind).kernels(phase, local) for phase in PHASES]
    return (
        [matmul_flop(kernels) for kernels in found],
        [sum(kernel.total_bytes for kernel in kernels if isinstance(kernel, MemoryBound)) for kernels in found],
    )


def test_the_phases_are_in_the_order_that_these_tables_have() -> None:
    assert PHASES == (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


@pytest.mark.parametrize("name", sorted(all_kinds()))
def test_each_product_comes_back_for_either_operand(name: str) -> None:
    """Once for the gradient of each: backward does twice the operations of forward."""
    flop, _ = counted(name, *example(name, samples=4, tokens=8, heads=4, width=4))
    if name == "flash_attention":  # five products for two: the scores are made again
        assert sum(flop[1:]) == 2.5 * flop[0]
    elif name == "patch_embedding":  # images need no gradient
        assert flop[1:] == [0, flop[0]]
    elif name == "relative_score":  # neither do positions (once); the two columns of segments are counted as a pass
        samples, heads, tokens, dim = 4, 4, 8, 4
        table = 2 * samples * (2 * tokens - 1) * (heads * dim) * (heads * dim)
        segments = 2 * samples * heads * tokens * 2 * dim
        content, position = 2 * samples * heads * tokens * dim * tokens, 2 * samples * heads * tokens * dim * 15
        assert flop[0] == table + segments + content + position
        assert flop[1] == 2 * content + position
    else:
        assert sum(flop[1:]) == 2 * flop[0]


@pytest.mark.parametrize(
    ("kind", "attributes", "shapes", "flop"),
    [
        ("linear", {"in": H, "out": 20}, [(B, S, H)], 2 * B * S * H * 20),
        (
            "cross_projection",
            {"in": H, "query_out": 20, "key_value_out": 28},
            [(B, S, H), (B, 5, H)],
            2 * B * H * (S * 20 + 5 * 28),
        ),
        ("pooler", {"hidden": H}, [(B, S, H)], 2 * B * H * H),
        ("attention_score", {"heads": A, "head_dim": D}, [(B, S, 3 * H)] * 2, 2 * B * A * S * S * D),
        # Windows of four tokens: each token meets four others, not eight.
        ("attention_score", {"heads": A, "head_dim": D, "window": 4}, [(B, S, 3 * H)] * 2, 2 * B * A * S * 4 * D),
        (
            "attention_context",
            {"heads": A, "head_dim": D, "window": 4},
            [(B, A, S, 4), (B, S, 3 * H)],
            2 * B * A * S * 4 * D,
        ),
        ("patch_embedding", {"patch": 2, "image": 8, "channels": 3, "hidden": H}, [IMAGE], 2 * B * 16 * (3 * 4) * H),
        ("lm_loss", {"vocab": 32, "hidden": H}, [(B, S, H), (B, S)], 2 * B * S * H * 32),
        ("classifier_loss", {"hidden": H, "classes": 10}, [(B, S, H), (B,)], 2 * B * H * 10),
        ("conv2d", {"in": 3, "out": 5, "kernel": 3, "stride": 2, "padding": 1}, [IMAGE], 2 * B * 16 * 5 * 3 * 9),
        ("shortcut", {"in": 3, "out": 5, "stride": 2}, [(B, 5, 4, 4), IMAGE], 2 * B * 16 * 5 * 3),
        # Four gates of H from the input and the state of every token, a direction.
        ("lstm", {"in": H, "hidden": 20}, [(B, S, H)], 2 * B * S * 4 * 20 * (H + 20)),
        ("lstm", {"in": H, "hidden": 20, "bidirectional": True}, [(B, S, H)], 2 * 2 * B * S * 4 * 20 * (H + 20)),
        # Both projections, and the weighted memory; the scores are a pass.
        ("additive_attention", {"hidden": H}, [(B, S, H), (B, 5, H)], 2 * B * ((S + 5) * H * H + S * 5 * H)),
    ],
)
def test_operations_of_forward_are_those_of_the_definition(
    kind: str, attributes: Attributes, shapes: list[Shape], flop: float
) -> None:
    assert counted(kind, attributes, shapes)[0][0] == flop


def test_attention_in_windows_is_a_small_product_for_each_window() -> None:
    """Two windows of four tokens for each head and sample."""
    shapes: list[Shape] = [(B, S, 3 * H)] * 2
    local = localize(kind_named("attention_score"), {"heads": A, "head_dim": D, "window": 4}, shapes, [], HALF)
    assert kind_named("attention_score").kernels(FORWARD, local) == [Matmul(m=4, n=4, k=D, batch=B * A * 2)]


@pytest.mark.parametrize(
    ("kind", "attributes", "shapes", "moved"),
    [
        # Bias: read and written; its gradient is a sum over tokens.
        ("linear", {"in": H, "out": 20}, [(B, S, H)], (2 * E * B * S * 20, 0, E * (B * S * 20 + 20))),
        # Two biases; in backward the gradient of the memory is added to that of other layers.
        (
            "cross_projection",
            {"in": H, "query_out": 20, "key_value_out": 28},
            [(B, S, H), (B, 5, H)],
            (2 * E * B * (S * 20 + 5 * 28), 3 * E * B * 5 * H, E * (B * (S * 20 + 5 * 28) + 20 + 28)),
        ),
        # Bias and tanh; its gradient from gradient and output, and zeros beside the first token's.
        ("pooler", {"hidden": H}, [(B, S, H)], (4 * E * B * H, 4 * E * B * H + X, E * (B * H + H))),
        # Gradient and input are read twice. Statistics: two numbers a token, written once and read twice.
        (
            "layer_norm",
            {"hidden": H},
            [(B, S, H)],
            (2 * X + 8 * B * S, 5 * X + 8 * B * S, 2 * X + 8 * B * S + 3 * E * 2 * H),
        ),
        ("gelu", {}, [(B, S, H)], (2 * X, 3 * X, 0)),
        ("relu", {}, [(B, S, H)], (2 * X, 3 * X, 0)),
        # Gate and up in, one out; in backward the gradient as well, and both gradients out.
        ("swiglu", {}, [(B, S, 2 * H)], (3 * X, 5 * X, 0)),
        ("dropout", {"probability": 0.1}, [(B, S, H)], (2 * X + X / E, 2 * X + X / E, 0)),
        ("dropout", {"probability": 0.0}, [(B, S, H)], (0, 0, 0)),
        ("concat", {}, [(B, S, H), (B, S, 3 * H)], (8 * X, 8 * X, 0)),
        # A causal kernel reads half and writes all; a bias is looked up and added, and its gradient summed.
        ("softmax", {"heads": A}, [(B, A, S, S)], (2 * SCORES, 3 * SCORES, 0)),
        ("softmax", {"heads": A, "causal": True}, [(B, A, S, S)], (1.5 * SCORES, 2 * SCORES, 0)),
        (
            "softmax",
            {"heads": A, "position_buckets": 32},
            [(B, A, S, S)],
            (4 * SCORES + 3 * BIAS, 3 * SCORES, SCORES + 3 * BIAS),
        ),
        # Results go from heads to tokens: one copy.
        ("attention_context", {"heads": A, "head_dim": D}, [(B, A, S, S), (B, S, 3 * H)], (2 * X, 0, 0)),
        # A row for each token; its gradient is a table of zeros and a row added for each.
        (
            "embedding",
            {"vocab": 64, "hidden": H},
            [(B, S)],
            (2 * X + INDEX * B * S, 0, E * 64 * H + 2 * X + INDEX * B * S),
        ),
        # One sequence of positions is looked up, and added to all.
        (
            "embedding",
            {"vocab": 64, "hidden": H, "positions": S},
            [(B, S)],
            (4 * X + 3 * X / B + INDEX * B * S, 0, E * 64 * H + 3 * X + 3 * X / B + INDEX * B * S),
        ),
        # Patches gathered; a class token and positions are a pass each, over 17 tokens.
        (
            "patch_embedding",
            {"patch": 2, "image": 8, "channels": 3, "hidden": H},
            [IMAGE],
            (2 * PIXELS + 4 * E * B * 17 * H, 0, E * (B * 17 * H + 17 * H + B * 17 * H + H)),
        ),
        # Cross entropy of logits in fp32: read and written, an entry of each sample looked up.
        (
            "classifier_loss",
            {"hidden": H, "classes": 10},
            [(B, H), (B,)],
            ((E + WIDE) * B * 10 + 2 * WIDE * B, (WIDE + E) * B * 10, E * (B * 10 + 10)),
        ),
        # Of all tokens but the first the gradient is zero.
        (
            "classifier_loss",
            {"hidden": H, "classes": 10, "bias": False},
            [(B, S, H), (B,)],
            ((E + WIDE) * B * 10 + 2 * WIDE * B, (WIDE + E) * B * 10 + X, 0),
        ),
        ("loss_sum", {}, [(B,), (B,)], (3 * WIDE * B, 0, 0)),
        ("conv2d", {"in": 3, "out": 3, "kernel": 1}, [IMAGE], (0, 0, 0)),
        ("conv2d", {"in": 3, "out": 3, "kernel": 1, "bias": True}, [IMAGE], (2 * PIXELS, 0, PIXELS + E * 3)),
        # Read for the statistics and once more; in backward gradient and input, both twice.
        ("batch_norm", {"channels": 3}, [IMAGE], (3 * PIXELS, 5 * PIXELS, 0)),
        ("batch_norm", {"channels": 3, "relu": True}, [IMAGE], (5 * PIXELS, 8 * PIXELS, 0)),
        # A norm and a sum; in backward the gradients of both readers of the residual are added.
        (
            "shortcut",
            {"in": 3, "out": 6, "stride": 2},
            [(B, 6, 4, 4), IMAGE],
            (6 * PIXELS / 2, 5 * PIXELS / 2 + 3 * PIXELS, 0),
        ),
        # Two bytes as slowly as four; a place for each of a quarter of the pixels. In backward zeros, then each pixel
        # reads place and gradient of its window.
        (
            "max_pool",
            {"kernel": 2, "stride": 2},
            [IMAGE],
            (2 * PIXELS * 5 / 4 + INDEX * B * 3 * 16, PIXELS + 2 * 2 * PIXELS + 4 * INDEX * B * 3 * 16, 0),
        ),
        ("global_average_pool", {}, [IMAGE], (PIXELS + E * B * 3, PIXELS + E * B * 3, 0)),
        ("flatten", {}, [IMAGE], (0, 0, 0)),
        # A token: gates of the input and of the state in, the gates, the cell and the state out; in backward the gates,
        # two cells and a gradient in, the gates' gradients out, which are summed for the bias.
        (
            "lstm",
            {"in": H, "hidden": H},
            [(B, S, H)],
            ((4 + 4 + 4 + 2) * X, (4 + 3 + 4) * X, 4 * X + E * 4 * H),
        ),
        # Every pair of a query and a key is made, goes through tanh, and is summed into a score.
        (
            "additive_attention",
            {"hidden": H},
            [(B, S, H), (B, 5, H)],
            (
                E * B * (S + 5) * H + 4 * E * B * S * 5 * H + 3 * E * B * S * 5,
                E * B * (S + 5) * H + 6 * E * B * S * 5 * H + 4 * E * B * S * 5,
                E * B * S * 5 * (H + 1) + E * H,
            ),
        ),
        # Three times queries and a bias; two terms gathered from few columns, with a sum; three terms added.
        (
            "relative_score",
            {"heads": A, "head_dim": D, "hidden": H},
            [(B, S, 3 * H)],
            (6 * X + (3 + 2 + 2 * 3) * SCORES, 4 * X + 3 * SCORES, 3 * X + SCORES),
        ),
        ("window_order", {"side": 4, "window": 2}, [(B, 16, H)], (4 * X, 4 * X, 0)),
        ("window_order", {"side": 4, "window": 2, "shift": 1}, [(B, 16, H)], (12 * X, 12 * X, 0)),
        ("patch_merge", {"side": 4}, [(B, 16, H)], (4 * X, 4 * X, 0)),
        ("token_mean", {}, [(B, S, H)], (X + X / S, X + X / S, 0)),
    ],
)
def test_bytes_are_those_of_the_passes(
    kind: str, attributes: Attributes, shapes: list[Shape], moved: tuple[float, float, float]
) -> None:
    assert counted(kind, attributes, shapes)[1] == pytest.approx(moved)


@pytest.mark.parametrize(
    ("kind", "attributes", "shapes", "how", "moved"),
    [
        # The silu, then the product; in backward the product's two gradients, the silu's, and both side by side.
        ("swiglu", {}, [(B, S, 2 * H)], {"fused_gate": False}, (5 * X, 13 * X, 0)),
        # A pass that leaves a number a token, and three over the tensor.
        (
            "rms_norm",
            {"hidden": H},
            [(B, S, H)],
            {"fused_norm": False},
            (7 * X + WIDE * B * S, 11 * X + WIDE * B * S, 2 * X + WIDE * B * S + 3 * E * H),
        ),
        # Residuals in fp32: the norm is twice as long, and a cast follows (forward) or comes before.
        (
            "layer_norm",
            {"hidden": H},
            [(B, S, H)],
            {"autocast": True},
            (4 * X + 3 * X + 8 * B * S, 3 * X + 10 * X + 8 * B * S, 4 * X + 8 * B * S + 3 * WIDE * 2 * H),
        ),
        # Casts, scale, mask and softmax apart: 18.5 times the tensor, as Aceso's rows of 13B move; backward 1.65 times
        # that, for 1.63 times the seconds.
        ("softmax", {"heads": A}, [(B, A, S, S)], {"fused_softmax": False}, (18.5 * SCORES, 30.5 * SCORES, 0)),
        (
            "softmax",
            {"heads": A},
            [(B, A, S, S)],
            {"fused_softmax": False, "dtype": "fp32"},
            (6 * 2 * SCORES, 10 * 2 * SCORES, 0),
        ),
        # A bias that the next operator adds in its own kernel, if it does.
        ("linear", {"in": H, "out": 20, "defer_bias": True}, [(B, S, H)], {}, (0, 0, E * (B * S * 20 + 20))),
        (
            "linear",
            {"in": H, "out": 20, "defer_bias": True},
            [(B, S, H)],
            {"fused_bias_activation": False},
            (2 * E * B * S * 20, 0, E * (B * S * 20 + 20)),
        ),
        # Bias, mask and sum in one pass, or in three.
        (
            "dropout_add",
            {"probability": 0.1},
            [(B, S, H)] * 2,
            {},
            (3 * X + X / E, 3 * X + 2 * X + X / E, 0),
        ),
        (
            "dropout_add",
            {"probability": 0.1},
            [(B, S, H)] * 2,
            {"fused_bias_dropout": False},
            (2 * X + 2 * X + X / E + 3 * X, 3 * X + 2 * X + X / E, 0),
        ),
    ],
)
def test_bytes_of_what_is_not_one_kernel_are_those_of_its_passes(
    kind: str,
    attributes: Attributes,
    shapes: list[Shape],
    how: dict[str, bool | str],
    moved: tuple[float, float, float],
) -> None:
    how = {"dtype": "fp16", **how}
    assert counted(kind, attributes, shapes, Implementation(**how))[1] == pytest.approx(moved)  # type: ignore[arg-type]


def test_both_gradients_are_one_call_of_the_framework() -> None:
    for kind, attributes, shapes in (
        ("linear", {"in": H, "out": H}, [(B, S, H)]),
        ("softmax", {"heads": A}, [(B, A, S, S)]),
        ("conv2d", {"in": 3, "out": 3, "kernel": 1}, [IMAGE]),
    ):
        local = localize(kind_named(kind), attributes, shapes, [], HALF)
        assert [kind_named(kind).num_calls(phase, local) for phase in PHASES] == [1, 1, 0]


@pytest.mark.parametrize(
    ("kind", "attributes", "shapes", "read", "written"),
    [
        ("embedding", {"vocab": 64, "hidden": H}, [(B, S)], (INDEX * B * S,), (X,)),
        ("lm_loss", {"vocab": 64, "hidden": H}, [(B, S, H), (B, S)], (X, INDEX * B * S), (WIDE * B,)),
        ("classifier_loss", {"hidden": H, "classes": 10}, [(B, S, H), (B,)], (X, INDEX * B), (WIDE * B,)),
        ("loss_sum", {}, [(B,), (B,)], (WIDE * B, WIDE * B), (WIDE * B,)),
        ("gelu", {}, [(B, S, H)], (X,), (X,)),
    ],
)
def test_tokens_and_labels_are_long_and_losses_are_in_fp32(
    kind: str, attributes: Attributes, shapes: list[Shape], read: tuple[int, ...], written: tuple[int, ...]
) -> None:
    local = localize(kind_named(kind), attributes, shapes, [], HALF)
    assert input_bytes(kind_named(kind), local) == read
    assert output_bytes(kind_named(kind), local) == written


def test_a_softmax_in_separate_operations_works_in_fp32() -> None:
    """Masked scores beside what they become; in backward both gradients and a product, of which fp32 needs one."""
    kind = kind_named("softmax")
    for dtype, forward, backward in (("fp16", WIDE, 2 * WIDE + E), ("fp32", WIDE, WIDE)):
        local = localize(
            kind, {"heads": A}, [(B, A, S, S)], [], Implementation(dtype=dtype, fused_softmax=False)
        )  # fmt: skip
        found = [workspace_bytes(kind, phase, local) // (B * A * S * S) for phase in PHASES]
        assert found == [forward, backward, 0]


def test_an_embedding_works_in_a_tensor_of_its_own_where_a_part_of_it_goes_on() -> None:
    """What the rows of all ranks add up to, and the gradient of all of it."""
    kind = kind_named("embedding")
    for axes, bytes_each in (([], 0), ([("vocab", 2)], 0), ([("vocab_sequence", 2)], X)):
        local = localize(kind, {"vocab": 64, "hidden": H}, [(B, S)], axes, HALF)
        assert [workspace_bytes(kind, phase, local) for phase in PHASES] == [bytes_each, 0, bytes_each]


@pytest.mark.parametrize(
    ("kind", "attributes", "shapes", "size"),
    [
        ("pooler", {"hidden": H}, [(B, S, H)], E * B * H),
        ("classifier_loss", {"hidden": H, "classes": 10}, [(B, H), (B,)], E * B * 10),
    ],
)
def test_the_gradient_of_a_product_inside_an_operator_is_there_in_backward_alone(
    kind: str, attributes: Attributes, shapes: list[Shape], size: int
) -> None:
    local = localize(kind_named(kind), attributes, shapes, [], HALF)
    assert [workspace_bytes(kind_named(kind), phase, local) for phase in PHASES] == [0, size, size]


@pytest.mark.parametrize("image", [(B, 3, 2, 8), (B, 3, 8, 2)])
def test_a_window_must_fit_either_side_of_an_image(image: Shape) -> None:
    with pytest.raises(ValueError, match="conv2d needs images of at least its kernel=5"):
        localize(kind_named("conv2d"), {"in": 3, "out": 3, "kernel": 5, "padding": 1}, [image], [], HALF)
    assert localize(kind_named("conv2d"), {"in": 3, "out": 3, "kernel": 4, "padding": 1}, [image], [], HALF).outputs


def test_patches_have_a_class_token_and_positions_unless_told_not_to() -> None:
    """A row of features for the token, and one for each of 16 patches and it."""
    attributes: Attributes = {"patch": 2, "image": 8, "channels": 3, "hidden": H}
    local = localize(kind_named("patch_embedding"), attributes, [IMAGE], [], HALF)
    assert local.parameters == ((H, 3 * 4), (H,), (17, H), (1, H))


def test_an_lstm_keeps_the_gates_and_the_cell_of_every_token() -> None:
    local = localize(kind_named("lstm"), {"in": H, "hidden": 20}, [(B, S, H)], [], HALF)
    assert saved_bytes(kind_named("lstm"), local) == E * B * S * (H + 20 + 5 * 20)


def test_the_loss_of_a_cut_vocabulary_makes_one_gradient_beside_what_it_keeps() -> None:
    """Torch's own makes two, and has narrow logits beside cast ones; a loss whose gradient is one kernel stays that."""
    kind = kind_named("lm_loss")
    torch_loss = Implementation(dtype="bf16", fused_loss=True)
    for axes, implementation, expected in (
        ([], torch_loss, (E + WIDE, 2 * WIDE, E)),
        ([("vocab", 2)], torch_loss, (WIDE, WIDE, E)),
        ([("vocab", 2)], replace(torch_loss, loss_temporaries=1), (E + WIDE, WIDE, E)),
    ):
        local = localize(kind, {"vocab": 64, "hidden": H}, [(B, S, H), (B, S)], axes, implementation)
        logits = B * S * local.parameters[0][0]
        assert [workspace_bytes(kind, phase, local) for phase in PHASES] == [size * logits for size in expected]


@pytest.mark.parametrize(("groups", "copies"), [(4, 0), (2, 1), (1, 0)])  # each its own; several; one, so even
def test_queries_of_several_groups_are_copied_for_fused_attention(groups: int, copies: int) -> None:
    """What it made of them is kept as well as they, instead of its output, a copy that the projection keeps."""
    kind, heads, dim = kind_named("flash_attention"), 4, 8
    attributes: Attributes = {"heads": heads, "head_dim": dim, "kv_heads": groups}
    packed = (B, S, (heads + 2 * groups) * dim)
    as_they_lie, copied = (
        saved_bytes(kind, localize(kind, attributes, [packed, packed], [], how))
        for how in (HALF, replace(HALF, copies_groups=True))
    )
    assert copied - as_they_lie == copies * E * B * S * heads * dim
