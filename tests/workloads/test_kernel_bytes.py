"""Bytes that memory-bound kernels move and work in, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from hardware_models.runtime_files import load_runtime
from tests.workloads.graphs import MEGATRON, local_operator
from workloads import build_workload
from workloads.kernels import FlashAttention, MemoryBound
from workloads.kinds.base import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, PHASES, Attributes, Implementation
from workloads.kinds.registry import kind_named
from workloads.local import lasting_buffer_bytes, localize, matmul_flop, saved_bytes, workspace_bytes

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


CROSS: Attributes = {"heads": 4, "head_dim": 8, "cross": True}
FAR = 24
ENDS = [(SAMPLES, TOKENS, 4 * 8), (SAMPLES, FAR, 2 * 4 * 8)]
QUERIES, PAIRS = SAMPLES * TOKENS * 4 * 8, SAMPLES * FAR * 2 * 4 * 8
"""Eight queries on 24 keys: elements of the queries, of keys and values together."""


def test_fused_attention_on_a_longer_memory_has_its_keys() -> None:
    """Two products of 2 B A S_q S_k D each, five backward; the half that a causal mask leaves unless it is not left out
    (FlashAttention-2, Section 3.1); heads of five features are computed as eight."""
    kind, how = kind_named("flash_attention"), Implementation(dtype="bf16")
    one = 2 * SAMPLES * 4 * TOKENS * FAR * 8
    for attributes, choice, products in (
        (CROSS, how, 2),
        ({**CROSS, "causal": True}, how, 1),
        ({**CROSS, "causal": True}, replace(how, flash_causal_skip=False), 2),
    ):
        local = localize(kind, attributes, ENDS, [], choice)
        found = [matmul_flop(kind.kernels(phase, local)) for phase in PHASES]
        assert found == [products * one, 2.5 * products * one, 0]
    narrow = [(SAMPLES, TOKENS, 4 * 5), (SAMPLES, FAR, 2 * 4 * 5)]
    assert matmul_flop(kind.kernels(FORWARD, localize(kind, {**CROSS, "head_dim": 5}, narrow, [], how))) == 2 * one


@pytest.mark.parametrize("generation", [1, 2])
def test_fused_attention_is_of_the_runtimes_generation(generation: int) -> None:
    kind, how = kind_named("flash_attention"), Implementation(dtype="bf16", flash_generation=generation)
    local = localize(kind, CROSS, ENDS, [], how)
    for phase in (FORWARD, BACKWARD_INPUT):
        (kernel,) = [each for each in kind.kernels(phase, local) if isinstance(each, FlashAttention)]
        assert (kernel.generation, kernel.backward) == (generation, phase == BACKWARD_INPUT)


@pytest.mark.parametrize("phase", [FORWARD, BACKWARD_INPUT])
def test_with_the_sequence_first_both_sources_of_a_cross_attention_are_copied(phase: str) -> None:
    """Queries, keys and values, and what is made of the queries: read and written, two bytes each."""
    plain, copied = (
        moved("flash_attention", CROSS, list(ENDS), phase, Implementation(dtype="bf16", sequence_first=first))
        for first in (False, True)
    )
    assert copied - plain == 2 * 2 * (QUERIES + PAIRS + QUERIES)


def test_queries_that_were_copied_with_the_rest_are_not_copied_once_more() -> None:
    attributes: Attributes = {"heads": 8, "kv_heads": 2, "head_dim": 8}
    shapes = [(SAMPLES, TOKENS, (8 + 2 * 2) * 8)] * 2
    once, both = (
        moved("flash_attention", attributes, shapes, FORWARD, replace(Implementation(sequence_first=True), **own))
        for own in ({}, {"copies_groups": True})
    )
    assert both == once


def test_grouped_gradients_are_made_for_every_query_head_at_each_key_unless_keys_were_repeated() -> None:
    """FlashAttention-2's mha_bwd: dk_expanded, dv_expanded, of the keys' length; dq_accum of the queries'."""
    kind, how = kind_named("flash_attention"), Implementation(dtype="bf16")
    grouped: Attributes = {**CROSS, "kv_heads": 2}
    local = localize(kind, grouped, [ENDS[0], (SAMPLES, FAR, 2 * 2 * 8)], [], how)
    assert workspace_bytes(kind, BACKWARD_INPUT, local) == 4 * QUERIES + 2 * PAIRS
    alone: Attributes = {"heads": 4, "kv_heads": 2, "head_dim": 8}
    packed = (SAMPLES, TOKENS, (4 + 2 * 2) * 8)
    local = localize(kind, alone, [packed, packed], [], replace(how, repeats_groups=True))
    assert workspace_bytes(kind, BACKWARD_INPUT, local) == 4 * QUERIES


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)])
def test_rotated_queries_and_keys_are_kept_beside_the_packed_tensor(heads: int, kv_heads: int) -> None:
    kind, how = kind_named("rotary"), Implementation(dtype="bf16", packed_rotary=True)
    packed = (SAMPLES, TOKENS, (heads + 2 * kv_heads) * DIM)
    local = localize(kind, {"heads": heads, "kv_heads": kv_heads, "head_dim": DIM}, [packed], [], how)
    assert saved_bytes(kind, local) == 2 * SAMPLES * TOKENS * (heads + kv_heads) * DIM


def test_where_each_operation_is_a_kernel_heads_are_copied_to_where_products_read_them() -> None:
    """BERT's ``transpose_for_scores`` of queries, keys and values, and their gradients; read and written, in fp32.

    What comes out goes from heads to tokens everywhere: a copy that is there in any case.
    """
    chains, torch = Implementation(dtype="fp32", elementary=True), Implementation(dtype="fp32")
    scores = (SAMPLES, 4, TOKENS, FAR)
    for kind, shapes, forward, backward in (
        ("attention_score", ENDS, QUERIES + PAIRS // 2, QUERIES + PAIRS // 2),
        ("attention_context", [scores, ENDS[1]], PAIRS // 2, QUERIES + PAIRS // 2),
    ):
        for phase, elements in ((FORWARD, forward), (BACKWARD_INPUT, backward)):
            more = moved(kind, CROSS, list(shapes), phase, chains) - moved(kind, CROSS, list(shapes), phase, torch)
            assert more == 2 * 4 * elements, (kind, phase)


def test_a_buffer_that_products_of_queries_and_keys_are_added_to_is_as_large_as_the_scores() -> None:
    kind = kind_named("attention_score")
    for keeps, elements in ((True, SAMPLES * 4 * TOKENS * FAR), (False, 0)):
        how = Implementation(dtype="bf16", keeps_score_buffer=keeps)
        assert lasting_buffer_bytes(kind, localize(kind, CROSS, list(ENDS), [], how)) == 2 * elements


def test_a_softmax_in_windows_has_the_bias_of_one_window() -> None:
    """Two windows of four tokens: a bias of 4 x 4 for each head, looked up, added to all, and summed from all."""
    attributes: Attributes = {"heads": 3, "window": 4, "position_buckets": 49}
    scores, bias = 2 * SAMPLES * 3 * TOKENS * 4, 2 * 3 * 4 * 4
    found = [moved("softmax", attributes, [(SAMPLES, 3, TOKENS, 4)], phase, MEGATRON) for phase in PHASES]
    assert found == [2 * bias + (2 * scores + bias) + 2 * scores, 3 * scores, (scores + bias) + 2 * bias]


@pytest.mark.parametrize(("dtype", "calls"), [("bf16", 5), ("fp32", 3)])
def test_a_softmax_in_separate_operations_is_called_for_each(dtype: str, calls: int) -> None:
    """To fp32, scale, mask, softmax, and back, with a node each in backward (Megatron's forward_torch_softmax)."""
    kind, how = kind_named("softmax"), Implementation(dtype=dtype, fused_softmax=False)
    local = localize(kind, {"heads": 3}, [(SAMPLES, 3, TOKENS, TOKENS)], [], how)
    assert [kind.num_calls(phase, local) for phase in PHASES] == [calls, calls, 0]


IDS = (SAMPLES, TOKENS)
TABLES: Attributes = {"vocab": 64, "hidden": DIM, "positions": TOKENS, "segments": 2, "dropout": 0.1}
ROWS, FOUND = 8 * SAMPLES * TOKENS, 2 * SAMPLES * TOKENS * DIM
"""Bytes of token ids, and of what is looked up for them."""


def test_segments_are_looked_up_like_tokens_and_dropout_comes_last() -> None:
    """Two look-ups, a sum and dropout with its mask; back the mask, then a table of zeros and a scatter, and a sum."""
    attributes: Attributes = {**TABLES, "positions": 0}
    mask, tables = FOUND // 2, 2 * DIM * (64 + 2)
    found = [moved("embedding", attributes, [IDS], phase, MEGATRON) for phase in PHASES]
    assert found == [
        2 * (2 * FOUND + ROWS) + 3 * FOUND + (2 * FOUND + mask),
        2 * FOUND + mask,
        tables + (2 * FOUND + ROWS) + (FOUND + ROWS),
    ]


def test_an_embedding_that_goes_on_with_a_part_of_the_sequence_copies_that_and_drops_in_it() -> None:
    kind, attributes = kind_named("embedding"), {"vocab": 64, "hidden": DIM, "dropout": 0.1}
    local = localize(kind, attributes, [IDS], [("vocab_sequence", 4)], MEGATRON)
    part, mask = FOUND // 4, FOUND // 8
    found = [sum(each.total_bytes for each in kind.kernels(phase, local)) for phase in PHASES]  # type: ignore[union-attr]
    assert found[:2] == [(2 * FOUND + ROWS) + 2 * part + (2 * part + mask), 2 * part + mask]


def test_an_embedding_is_called_for_each_look_up_sum_and_table() -> None:
    """Three look-ups, two sums and dropout; back dropout, and a node for each table."""
    kind = kind_named("embedding")
    local = localize(kind, TABLES, [IDS], [], MEGATRON)
    assert [kind.num_calls(phase, local) for phase in PHASES] == [6, 1, 3]


def test_patches_without_a_class_token_and_positions_are_a_product_and_a_bias() -> None:
    """16 patches of 3 x 2 x 2 pixels; dropout draws for each feature of each, and its mask is read back."""
    attributes: Attributes = {"patch": 2, "image": 8, "channels": 3, "hidden": DIM}
    images = (SAMPLES, 3, 8, 8)
    size, pixels = 2 * SAMPLES * 16 * DIM, 2 * prod(images)
    bare: Attributes = {**attributes, "class_token": False, "positions": False, "dropout": 0.1}
    found = [moved("patch_embedding", bare, [images], phase, MEGATRON) for phase in PHASES]
    assert found == [2 * pixels + 2 * size + size // 2, 2 * size + size // 2, size + 2 * DIM]
    kind = kind_named("patch_embedding")
    for own in (bare, attributes):  # a class token is no patch: nothing is multiplied for it
        local = localize(kind, own, [images], [], MEGATRON)
        flop = 2 * SAMPLES * 16 * DIM * (3 * 2 * 2)
        assert [matmul_flop(kind.kernels(phase, local)) for phase in PHASES] == [flop, 0, flop]


@pytest.mark.parametrize(("queries", "keys", "fused"), [(132, 256, True), (197, 256, False), (256, 197, False)])
def test_queries_on_another_sequence_come_in_fours_too_for_megatrons_fused_softmax(
    queries: int, keys: int, fused: bool
) -> None:
    how = Implementation(dtype="bf16", fused_softmax_longest=4096)
    local = localize(kind_named("softmax"), {"heads": 4}, [(1, 4, queries, keys)], [], how)
    assert (len(kind_named("softmax").kernels(FORWARD, local)) == 1) == fused


@pytest.mark.parametrize(("kind", "weights", "statistics"), [("layer_norm", 2, 2), ("rms_norm", 1, 1)])
def test_gradients_of_a_persistent_norm_take_one_pass(kind: str, weights: int, statistics: int) -> None:
    """Input and gradient read, the gradient of the input written, and a row of fp32 sums for each of 108 blocks."""
    tokens, hidden = 256, 64
    shapes, size = [(SAMPLES, tokens, hidden)], 2 * SAMPLES * tokens * hidden
    sums, kept = 4 * 108 * weights * hidden, 4 * statistics * SAMPLES * tokens
    persistent = Implementation(dtype="bf16", persistent_norms=("layer_norm", "rms_norm"))
    found = [moved(kind, {"hidden": hidden}, shapes, phase, persistent) for phase in PHASES]
    assert found == [2 * size + kept, 3 * size + kept + sums, sums + 2 * weights * hidden]
    usual = [moved(kind, {"hidden": hidden}, shapes, phase, Implementation(dtype="bf16")) for phase in PHASES]
    assert usual[0] == found[0] and sum(usual[1:]) > 7 * size


@pytest.mark.parametrize(
    ("samples", "hidden", "sums"),
    [(1, 1024, "column_sum"), (256, 1024, "column_sum"), (257, 2048, "reduction"), (257, 2112, "column_sum")],
)
def test_norms_by_blocks_read_once_and_sum_columns_over_all_rows_unless_there_are_very_many(
    samples: int, hidden: int, sums: str
) -> None:
    """256 tokens a sample: 256 samples are the 65,536 rows from which on sums take two steps."""
    tokens = 256
    size, weights = 2 * samples * tokens * hidden, 2 * 2 * hidden
    definition = kind_named("layer_norm")
    how = Implementation(dtype="bf16", norms_by_blocks=True)
    local = localize(definition, {"hidden": hidden}, [(samples, tokens, hidden)], [], how)
    (forward,), (inputs,), (columns,) = (definition.kernels(phase, local) for phase in PHASES)
    kept = 4 * 2 * samples * tokens
    assert forward == MemoryBound(size, size + kept, "row_norm", samples * tokens)
    assert inputs == MemoryBound(2 * size + kept, size, "reduction")
    rows = samples * tokens if sums == "column_sum" else 0
    assert columns == MemoryBound(2 * size + kept, weights, sums, rows)


@pytest.mark.parametrize("runtime", ["windtunnel-executor", "megatron-lm-2021", "dapple-tensorflow"])
@pytest.mark.parametrize(
    ("model", "attention"),
    [
        ("bert-large", "plain"),
        ("gpt3-350m", "plain"),
        ("gpt3-350m", "flash"),
        ("t5-large-32", "plain"),
        ("resnet-50", "plain"),
        ("xlnet-large", "plain"),
    ],
)
def test_sums_of_gradients_are_the_last_kernels_of_the_inputs_gradients(
    model: str, attention: str, runtime: str
) -> None:
    how = load_runtime(runtime).implementation
    workload = build_workload(model, attention=attention)
    found = set()
    for index, op in enumerate(workload.operators):
        local = localize(op.definition, op.attributes, workload.input_shapes(index, SAMPLES), [], how)
        sums = op.definition.gradient_sums(local)
        kernels = op.definition.kernels(BACKWARD_INPUT, local)
        assert kernels[len(kernels) - len(sums) :] == sums
        found |= {op.kind} if sums else set()
    assert found
