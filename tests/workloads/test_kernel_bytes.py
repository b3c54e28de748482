"""Bytes that memory-bound kernels move and work in, counted by hand."""

from __future__ import annotations

from math import prod

import pytest

from tests.workloads.graphs import MEGATRON, local_operator
from workloads import build_workload
from workloads.kernels import MemoryBound
from workloads.kinds.base import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Attributes, Implementation
from workloads.kinds.registry import kind_named
from workloads.local import localize, workspace_bytes

SAMPLES, TOKENS, DIM = 2, 8, 4


def moved(kind: str, attributes: Attributes, shapes: list[tuple[int, ...]], phase: str, how: Implementation) -> float:
    """Return the bytes that an operator's kernels read and write."""
    local = localize(kind_named(kind), attributes, shapes, [], how)
    found = kind_named(kind).kernels(phase, local)
    return sum(kernel.total_bytes for kernel in found if isinstance(kernel, MemoryBound))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)])
@pytest.mark.parametrize(("fused", "per_element"), [(True, 2 + 2), (False, (2 + 4) + (4 + 4) + (4 + 2))])
def test_rotary_positions_go_over_queries_and_keys(heads: int, kv_heads: int, fused: bool, per_element: int) -> None:
    """Not over values. In plain operations they go to fp32 and back (torchtitan 0.3.0, models/common/rope.py)."""
    attributes: Attributes = {"heads": heads, "kv_heads": kv_heads, "head_dim": DIM}
    shapes = [(SAMPLES, TOKENS, (heads + 2 * kv_heads) * DIM)]
    turned = SAMPLES * TOKENS * (heads + kv_heads) * DIM
    how = Implementation(dtype="bf16", fused_rotary=fused)
    for phase in (FORWARD, BACKWARD_INPUT):
        assert moved("rotary", attributes, shapes, phase, how) == pytest.approx(turned * per_element)
    assert moved("rotary", attributes, shapes, BACKWARD_WEIGHT, how) == 0


@pytest.mark.parametrize("phase", [FORWARD, BACKWARD_INPUT])
def test_keys_and_values_are_repeated_for_eight_heads_and_their_gradients_added(phase: str) -> None:
    """Two tensors of two heads each become two of eight, or the other way; two bytes an element."""
    attributes: Attributes = {"heads": 8, "kv_heads": 2, "head_dim": DIM}
    shapes = [(SAMPLES, TOKENS, (8 + 2 * 2) * DIM)]
    how = Implementation(dtype="bf16")
    apart = moved("rotary", {**attributes, "repeats": True}, shapes, phase, how)
    assert apart - moved("rotary", attributes, shapes, phase, how) == 2 * 2 * SAMPLES * TOKENS * (2 + 8) * DIM


@pytest.mark.parametrize("phase", [FORWARD, BACKWARD_INPUT])
@pytest.mark.parametrize("samples", [1, 2])
def test_flash_attention_with_the_sequence_first_copies_what_it_takes_and_makes(phase: str, samples: int) -> None:
    """Queries, keys and values (12 heads), and the output of several samples (8): read and written, two bytes each."""
    attributes: Attributes = {"heads": 8, "kv_heads": 2, "head_dim": DIM}
    shapes = [(samples, TOKENS, (8 + 2 * 2) * DIM)] * 2
    plain, copied = (
        moved("flash_attention", attributes, shapes, phase, Implementation(dtype="bf16", sequence_first=first))
        for first in (False, True)
    )
    assert copied - plain == 2 * 2 * samples * TOKENS * DIM * (12 + (8 if samples > 1 else 0))


@pytest.mark.parametrize("phase", [FORWARD, BACKWARD_INPUT])
def test_flash_attention_repeats_groups_where_the_framework_does(phase: str) -> None:
    """Keys and values of two heads become eight, or their gradients are added up."""
    attributes: Attributes = {"heads": 8, "kv_heads": 2, "head_dim": 8}
    shapes = [(SAMPLES, TOKENS, (8 + 2 * 2) * 8)] * 2
    grouped, repeated = (
        moved("flash_attention", attributes, shapes, phase, Implementation(dtype="bf16", repeats_groups=repeats))
        for repeats in (False, True)
    )
    assert repeated - grouped == 2 * SAMPLES * TOKENS * 8 * 2 * (2 + 8)


@pytest.mark.parametrize("phase", [FORWARD, BACKWARD_INPUT])
def test_flash_attention_pads_heads_to_eight_features(phase: str) -> None:
    """Twelve heads of 5 features grow to 8, the output's eight are cut back: what is read and what is written."""
    attributes: Attributes = {"heads": 4, "head_dim": 5}
    shapes = [(SAMPLES, TOKENS, 12 * 5)] * 2
    row_sums = 0 if phase == FORWARD else 2 * 2 * 4 * 5 + 4 * 4
    found = moved("flash_attention", attributes, shapes, phase, Implementation(dtype="bf16"))
    assert found == SAMPLES * TOKENS * (2 * (12 * 5 + 12 * 8) + 2 * 2 * 4 * 5 + row_sums)


@pytest.mark.parametrize(("kv_heads", "expanded"), [(8, 0), (2, 2)])
def test_flash_attention_adds_gradients_up_in_fp32(kv_heads: int, expanded: int) -> None:
    """One fp32 tensor of the queries' size; grouped keys and values have gradients for every query head first."""
    attributes: Attributes = {"heads": 8, "kv_heads": kv_heads, "head_dim": DIM}
    packed = (SAMPLES, TOKENS, (8 + 2 * kv_heads) * DIM)
    how = Implementation(dtype="bf16")
    local = localize(kind_named("flash_attention"), attributes, [packed, packed], [], how)
    elements = SAMPLES * TOKENS * 8 * DIM
    assert workspace_bytes(kind_named("flash_attention"), BACKWARD_INPUT, local) == elements * (4 + 2 * expanded)
    assert workspace_bytes(kind_named("flash_attention"), FORWARD, local) == 0


def test_where_a_residual_branches_off_two_gradients_are_added() -> None:
    """Sixteen blocks of ResNet-50, each the size of its output: two reads and a write."""
    workload = build_workload("resnet-50")
    sums = [index for index, op in enumerate(workload.operators) if op.kind == "add"]
    assert len(sums) == 16
    for index in sums:
        local = local_operator(workload, index, MEGATRON, samples=SAMPLES)
        (kernel,) = workload.operators[index].definition.kernels(BACKWARD_INPUT, local)
        assert isinstance(kernel, MemoryBound)
        size = MEGATRON.activation_bytes * prod(local.outputs[0])
        assert (kernel.read_bytes, kernel.write_bytes) == (2 * size, size)


def test_no_bias_is_added_beside_dropout_where_the_linear_before_has_none() -> None:
    how = Implementation(fused_bias_activation=True, fused_bias_dropout=False)
    shapes = [(SAMPLES, TOKENS, DIM)] * 2
    size = 2 * SAMPLES * TOKENS * DIM
    with_bias, without = (
        moved("dropout_add", {"probability": 0.1, **bias}, shapes, FORWARD, how) for bias in ({}, {"bias": False})
    )
    assert with_bias - without == 2 * size


def test_xlnet_drops_inside_its_mlp() -> None:
    """As its paper's code (positionwise_ffn, drop_1) and Hugging Face's."""
    roles = [op.role for op in build_workload("xlnet-36").operators]
    assert roles.count("mlp_dropout") == 36
    assert roles.index("mlp_dropout") == roles.index("mlp_activation") + 1


@pytest.mark.parametrize(
    ("samples", "heads", "keys", "longest", "fused"),
    [
        (1, 4, 2048, 2048, True),
        (1, 4, 4096, 2048, False),
        (1, 4, 4096, 4096, True),
        (1, 4, 8192, 4096, False),
        (4, 16, 197, 4096, False),
        (4, 16, 16, 4096, False),
        (4, 16, 132, 4096, True),
        (1, 2, 2048, 2048, False),
        (1, 4, 8192, None, True),
        (1, 4, 197, None, True),
    ],
)
def test_megatrons_fused_softmax_takes_what_its_kernels_take(
    samples: int, heads: int, keys: int, longest: int | None, fused: bool
) -> None:
    """17 to 2,048 (by 2023 4,096) keys, queries and keys in fours, samples x heads too (``is_kernel_available``)."""
    how = Implementation(dtype="bf16", fused_softmax_multiple=4, fused_softmax_longest=longest)
    scores = (samples, heads, keys, keys)
    local = localize(kind_named("softmax"), {"heads": heads}, [scores], [], how)
    assert (len(kind_named("softmax").kernels(FORWARD, local)) == 1) == fused


@pytest.mark.parametrize(
    ("how", "forward", "backward", "product"),
    [
        (Implementation(dtype="bf16", loss_subtracts_anew=True), 2 + 4, 2, 2),
        (Implementation(dtype="fp32", loss_subtracts_anew=True), 4, 0, 4),
        (Implementation(dtype="bf16", logits_dtype="bf16", loss_subtracts_anew=True), 2, 0, 2),
        (Implementation(dtype="bf16"), 2, 2, 2),
        (Implementation(dtype="bf16", fused_loss=True), 2 + 4, 4 + 4, 2),
    ],
    ids=["Megatron's core", "in fp32", "of bf16 logits", "in place", "torch"],
)
def test_what_a_loss_works_in_beside_the_softmax_that_it_keeps(
    how: Implementation, forward: int, backward: int, product: int
) -> None:
    """Bytes a logit, as torch's profiler counts the same lines on a CPU.

    Megatron's makes its gradient in the softmax, which counts as gone when it is multiplied: as the gradient instead.
    """
    vocab, hidden = 64, 16
    local = localize(
        kind_named("lm_loss"),
        {"vocab": vocab, "hidden": hidden},
        [(SAMPLES, TOKENS, hidden), (SAMPLES, TOKENS)],
        [],
        how,
    )
    logits = SAMPLES * TOKENS * vocab
    assert workspace_bytes(kind_named("lm_loss"), FORWARD, local) == forward * logits
    assert workspace_bytes(kind_named("lm_loss"), BACKWARD_INPUT, local) == backward * logits
    assert workspace_bytes(kind_named("lm_loss"), BACKWARD_WEIGHT, local) == product * logits


def test_torchs_loss_writes_zeros_before_it_has_a_gradient() -> None:
    """Zeros, then the gradient and the log-softmax read and a gradient written, then cast; entries of rows."""
    vocab, hidden = 4096, 16
    shapes = [(SAMPLES, TOKENS, hidden), (SAMPLES, TOKENS)]
    how = Implementation(dtype="bf16", fused_loss=True)
    logits = SAMPLES * TOKENS * vocab
    found = moved("lm_loss", {"vocab": vocab, "hidden": hidden}, shapes, BACKWARD_INPUT, how)
    assert found == pytest.approx(logits * (4 + 3 * 4 + 4 + 2), rel=1e-3)
