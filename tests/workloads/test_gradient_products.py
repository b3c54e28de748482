"""Which products and which passes a phase has: gradients by the chain rule, passes by what they do with memory."""

from __future__ import annotations

from collections import Counter

import pytest

from workloads.kernels import Convolution, Kernel, Matmul, MemoryBound
from workloads.kinds import kind_named
from workloads.kinds.base import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, PHASES, Attributes, Implementation, Shape
from workloads.local import localize

HALF = Implementation(dtype="fp16")
B, S, FAR, H, A, D = 2, 6, 10, 12, 3, 4
ATTENTION: Attributes = {"heads": A, "head_dim": D, "cross": True}
PAIRS: Shape = (B, FAR, 2 * A * D)
Example = tuple[str, Attributes, list[Shape]]
Product = tuple[tuple[int, int], int, int]


def kernels(example: Example, phase: str, how: Implementation = HALF) -> list[Kernel]:
    kind, attributes, shapes = example
    return kind_named(kind).kernels(phase, localize(kind_named(kind), attributes, shapes, [], how))


def product(m: int, n: int, k: int, batch: int = 1) -> Product:
    """Return a product as it is counted: either of the result and its transpose may be made."""
    return (min(m, n), max(m, n)), k, batch


def products(example: Example, phase: str) -> Counter[Product]:
    found = [kernel for kernel in kernels(example, phase) if isinstance(kernel, Matmul)]
    return Counter(product(each.m, each.n, each.k, each.batch) for each in found)


@pytest.mark.parametrize(
    "example",
    [
        ("linear", {"in": H, "out": 20}, [(B, S, H)]),
        ("cross_projection", {"in": H, "query_out": 20, "key_value_out": 28}, [(B, S, H), (B, FAR, H)]),
        ("pooler", {"hidden": H}, [(B, S, H)]),
        ("attention_score", ATTENTION, [(B, S, A * D), PAIRS]),
        ("attention_context", ATTENTION, [(B, A, S, FAR), PAIRS]),
        ("lm_loss", {"vocab": 32, "hidden": H}, [(B, S, H), (B, S)]),
        ("classifier_loss", {"hidden": H, "classes": 10}, [(B, S, H), (B,)]),
        ("additive_attention", {"hidden": H}, [(B, S, H), (B, FAR, H)]),
    ],
    ids=lambda example: example[0],
)
def test_gradients_of_a_product_are_those_of_the_chain_rule(example: Example) -> None:
    """``Y = A B`` has ``dA = dY B^T``, which sums over Y's columns, and ``dB = A^T dY``, which sums over its rows."""
    wanted: Counter[Product] = Counter()
    for kernel in kernels(example, FORWARD):
        if isinstance(kernel, Matmul):
            wanted[product(kernel.m, kernel.k, kernel.n, kernel.batch)] += 1
            wanted[product(kernel.k, kernel.n, kernel.m, kernel.batch)] += 1
    assert products(example, BACKWARD_INPUT) + products(example, BACKWARD_WEIGHT) == wanted


def test_an_lstm_goes_through_its_tokens_one_by_one_but_for_the_products_with_all_inputs() -> None:
    """cuDNN's layer: inputs at once, states token by token, forward and back; weights at once over all tokens."""
    hidden, example = 20, ("lstm", {"in": H, "hidden": 20}, [(B, S, H)])
    gates = 4 * hidden
    assert products(example, FORWARD) == {product(B * S, gates, H): 1, product(B, gates, hidden): S}
    assert products(example, BACKWARD_INPUT) == {product(B * S, H, gates): 1, product(B, hidden, gates): S}
    assert products(example, BACKWARD_WEIGHT) == {product(gates, H, B * S): 1, product(gates, hidden, B * S): 1}


def test_relative_scores_have_gradients_of_queries_keys_and_positions() -> None:
    """S keys and 2 S - 1 distances; the gradient of a distance sums over queries, that of its projection over all."""
    example: Example = ("relative_score", {"heads": A, "head_dim": D, "hidden": H}, [(B, S, 3 * A * D)])
    distances, pairs = 2 * S - 1, B * A
    assert products(example, BACKWARD_INPUT) == {
        product(S, D, S, pairs): 2, product(S, D, distances, pairs): 1
    }  # fmt: skip
    assert products(example, BACKWARD_WEIGHT) == {
        product(distances, D, S, pairs): 1, product(A * D, H, B * distances): 1
    }  # fmt: skip


@pytest.mark.parametrize(
    "example",
    [
        ("linear", {"in": H, "out": 20}, [(B, S, H)]),
        ("cross_projection", {"in": H, "query_out": 20, "key_value_out": 28}, [(B, S, H), (B, FAR, H)]),
        ("pooler", {"hidden": H}, [(B, S, H)]),
        ("lm_loss", {"vocab": 32, "hidden": H}, [(B, S, H), (B, S)]),
        ("classifier_loss", {"hidden": H, "classes": 10}, [(B, H), (B,)]),
        ("lstm", {"in": H, "hidden": 20}, [(B, S, H)]),
        ("additive_attention", {"hidden": H}, [(B, S, H), (B, FAR, H)]),
        ("relative_score", {"heads": A, "head_dim": D, "hidden": H}, [(B, S, 3 * A * D)]),
        ("conv2d", {"in": 3, "out": 5, "kernel": 3, "padding": 1}, [(B, 3, 8, 8)]),
        ("shortcut", {"in": 3, "out": 6, "stride": 2}, [(B, 6, 4, 4), (B, 3, 8, 8)]),
    ],
    ids=lambda example: example[0],
)
def test_products_of_a_phase_are_in_its_role(example: Example) -> None:
    """Roles are layouts of operands (``Matmul.role``): forward, of an input's gradient, of a weight's."""
    for phase, role in zip(PHASES, ("forward", "data_gradient", "weight_gradient"), strict=True):
        found = [each for each in kernels(example, phase) if not isinstance(each, MemoryBound)]
        assert found and {getattr(each, "role", None) for each in found} == {role}, phase


def test_gradients_of_two_activations_are_both_data_gradients() -> None:
    for example in (
        ("attention_score", ATTENTION, [(B, S, A * D), PAIRS]),
        ("attention_context", ATTENTION, [(B, A, S, FAR), PAIRS]),
    ):
        found = kernels(example, BACKWARD_INPUT)
        assert [each.role for each in found if isinstance(each, Matmul)] == ["data_gradient"] * 2


def test_a_convolution_knows_its_pixels_before_and_after() -> None:
    """8 x 6 pixels, a window of 3 in steps of 2: (8 + 2 - 3) // 2 + 1 = 4 rows, (6 + 2 - 3) // 2 + 1 = 3 columns."""
    example: Example = ("conv2d", {"in": 3, "out": 5, "kernel": 3, "stride": 2, "padding": 1}, [(B, 3, 8, 6)])
    for phase in PHASES:
        (found,) = kernels(example, phase)
        assert isinstance(found, Convolution)
        assert (found.in_pixels, found.out_pixels, found.kernel, found.stride) == (8 * 6, 4 * 3, 3, 2)
        assert (found.samples, found.in_channels, found.out_channels) == (B, 3, 5)


def test_training_data_need_no_gradient() -> None:
    example: Example = ("conv2d", {"in": 3, "out": 5, "kernel": 3, "reads_data": True}, [(B, 3, 8, 8)])
    assert [len(kernels(example, phase)) for phase in PHASES] == [1, 0, 1]


ELEMENTWISE, REDUCTION, RANDOM, GATHER = "elementwise", "reduction", "random", "gather"


@pytest.mark.parametrize(
    ("example", "forward", "inputs", "weights"),
    [
        (("linear", {"in": H, "out": 20}, [(B, S, H)]), [ELEMENTWISE], [], [REDUCTION]),
        (("layer_norm", {"hidden": H}, [(B, S, H)]), [REDUCTION], [REDUCTION], [REDUCTION] * 2),
        (("softmax", {"heads": A}, [(B, A, S, S)]), [REDUCTION], [REDUCTION], []),
        (
            ("softmax", {"heads": A, "position_buckets": 8}, [(B, A, S, S)]),
            [GATHER, ELEMENTWISE, REDUCTION],
            [REDUCTION],
            [REDUCTION, GATHER],
        ),
        (("gelu", {}, [(B, S, H)]), [ELEMENTWISE], [ELEMENTWISE], []),
        (("dropout", {"probability": 0.1}, [(B, S, H)]), [RANDOM], [ELEMENTWISE], []),
        (("dropout_add", {"probability": 0.1}, [(B, S, H)] * 2), [RANDOM], [ELEMENTWISE] * 2, []),
        # Look-ups of tokens, positions and segments, the last two added; scattered and summed back.
        (
            ("embedding", {"vocab": 64, "hidden": H, "positions": S, "segments": 2, "dropout": 0.1}, [(B, S)]),
            [GATHER, GATHER, ELEMENTWISE, GATHER, ELEMENTWISE, RANDOM],
            [ELEMENTWISE],
            [ELEMENTWISE, GATHER, REDUCTION, ELEMENTWISE, REDUCTION],
        ),
        # Cast, maximum, subtraction, target's logit, exponential, sum, quotient (Megatron's mpu/cross_entropy.py).
        (
            ("lm_loss", {"vocab": 64, "hidden": H}, [(B, S, H), (B, S)]),
            [ELEMENTWISE, REDUCTION, ELEMENTWISE, GATHER, ELEMENTWISE, REDUCTION, ELEMENTWISE],
            [GATHER, ELEMENTWISE, ELEMENTWISE],
            [],
        ),
        (("batch_norm", {"channels": 3}, [(B, 3, 8, 8)]), [REDUCTION], [REDUCTION], []),
        (("max_pool", {"kernel": 2, "stride": 2}, [(B, 3, 8, 8)]), [ELEMENTWISE], [ELEMENTWISE, ELEMENTWISE], []),
        (("global_average_pool", {}, [(B, 3, 8, 8)]), [REDUCTION], [ELEMENTWISE], []),
        (("token_mean", {}, [(B, S, H)]), [REDUCTION], [ELEMENTWISE], []),
        # Pairs summed and passed through tanh, scored, softmax; pairs' gradients summed over the other side.
        (
            ("additive_attention", {"hidden": H}, [(B, S, H), (B, FAR, H)]),
            [ELEMENTWISE, ELEMENTWISE, REDUCTION, REDUCTION],
            [REDUCTION, ELEMENTWISE, ELEMENTWISE, REDUCTION],
            [REDUCTION],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_pass_is_of_the_sort_that_it_is_priced_as(
    example: Example, forward: list[str], inputs: list[str], weights: list[str]
) -> None:
    """As ``MemoryBound.pattern`` has it: sums reduce, dropout draws, look-ups gather, all else is elementwise."""
    found = [[each.pattern for each in kernels(example, phase) if isinstance(each, MemoryBound)] for phase in PHASES]
    assert found == [forward, inputs, weights]
