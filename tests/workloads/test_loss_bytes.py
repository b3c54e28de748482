"""What output layers move, keep and call: Megatron's chain of kernels and torch's own cross entropy, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workloads.kernels import MemoryBound
from workloads.kinds import kind_named
from workloads.kinds.base import PHASES, Attributes, Implementation, Local
from workloads.local import localize, saved_bytes, splits_of, workspace_bytes
from workloads.placements import PARTIAL, REPLICATE, Shard

B, S, H, V = 2, 8, 12, 64
KIND = kind_named("lm_loss")
CHAIN = Implementation(dtype="bf16")
TORCH = Implementation(dtype="bf16", fused_loss=True)
ROWS = B * S
LOW, HIGH, ROW = 2 * ROWS * V, 4 * ROWS * V, 4 * ROWS
"""Bytes of the logits as the product leaves them and in fp32, and of a number a token."""


def loss(how: Implementation, **more: bool) -> Local:
    attributes: Attributes = {"vocab": V, "hidden": H, **more}
    return localize(KIND, attributes, [(B, S, H), (B, S)], [], how)


def moved(local: Local) -> list[float]:
    """Return bytes that the passes of each phase read and write."""
    found = [[each for each in KIND.kernels(phase, local) if isinstance(each, MemoryBound)] for phase in PHASES]
    return [sum(each.total_bytes for each in phase) for phase in found]


@pytest.mark.parametrize(
    ("how", "forward", "backward"),
    [
        # Cast; maximum, subtraction, target's logit, exponential, sum, quotient. Back: one entry a row, times the
        # gradient that came, and cast.
        (CHAIN, LOW + 9 * HIGH + 4 * ROW, 2 * ROW + 3 * HIGH + LOW),
        # On a copy of the logits.
        (replace(CHAIN, loss_clones_logits=True), LOW + 11 * HIGH + 4 * ROW, 2 * ROW + 3 * HIGH + LOW),
        # Without casts, where logits are wanted as they are.
        (replace(CHAIN, logits_dtype="bf16"), 8 * LOW + 4 * ROW, 2 * ROW + 2 * LOW),
        # Cast, log-softmax, an entry a row. Back: zeros, an entry a row, gradient and log-softmax in and gradient out.
        (TORCH, LOW + 3 * HIGH + 2 * ROW, HIGH + 2 * ROW + 3 * HIGH + HIGH + LOW),
        (replace(TORCH, loss_temporaries=1), LOW + 3 * HIGH + 2 * ROW, 2 * ROW + 2 * HIGH + HIGH + LOW),
    ],
    ids=["Megatron's", "on a copy", "in bf16", "torch's", "one kernel back"],
)
def test_passes_over_logits_are_those_of_the_loss(how: Implementation, forward: int, backward: int) -> None:
    assert moved(loss(how)) == [forward, backward, 0]
    # A bias is read and written, and its gradient a sum over tokens.
    assert moved(loss(how, bias=True)) == [forward + 2 * LOW, backward, LOW + 2 * V]


@pytest.mark.parametrize(("vocab", "reads"), [(12_255, 1), (12_256, 2)], ids=["shared", "longer"])
def test_rows_that_no_block_can_share_are_read_for_maximum_sum_and_result(vocab: int, reads: int) -> None:
    local = localize(KIND, {"vocab": vocab, "hidden": H}, [(B, S, H), (B, S)], [], TORCH)
    low, high = 2 * ROWS * vocab, 4 * ROWS * vocab
    assert moved(local)[0] == (low + high) + (reads + 1) * high + 2 * ROW


@pytest.mark.parametrize(
    ("changes", "logits"),
    [({}, 0), ({"loss_keeps_logits": True}, LOW), ({"loss_clones_logits": True}, HIGH)],
    ids=["gone", "an output of the model", "beside their copy"],
)
@pytest.mark.parametrize("how", [CHAIN, TORCH], ids=["Megatron's", "torch's"])
def test_a_loss_keeps_its_softmax_and_the_logits_where_they_outlive_it(
    how: Implementation, changes: dict[str, bool], logits: int
) -> None:
    """Besides the states and the labels."""
    assert saved_bytes(KIND, loss(replace(how, **changes))) == 2 * ROWS * H + 8 * ROWS + HIGH + logits


@pytest.mark.parametrize(
    ("how", "bytes_of_phases"),
    [
        (replace(CHAIN, loss_clones_logits=True), (HIGH, LOW, LOW)),
        (TORCH, (LOW + HIGH, 2 * HIGH, LOW)),
        (replace(TORCH, loss_keeps_logits=True), (HIGH, 2 * HIGH, LOW)),
        (replace(TORCH, loss_temporaries=3), (LOW + HIGH, 3 * HIGH, LOW)),
    ],
    ids=["a copy", "torch's", "logits kept", "a third temporary"],
)
def test_a_loss_works_in_what_it_does_not_keep(how: Implementation, bytes_of_phases: tuple[int, int, int]) -> None:
    assert tuple(workspace_bytes(KIND, phase, loss(how)) for phase in PHASES) == bytes_of_phases


def test_every_step_of_a_loss_is_a_call() -> None:
    """Product and seven passes, or product, cast, log-softmax and entries; back as many nodes as kernels."""
    assert [KIND.num_calls(phase, loss(CHAIN)) for phase in PHASES] == [8, 4, 0]
    assert [KIND.num_calls(phase, loss(TORCH)) for phase in PHASES] == [4, 5, 0]


@pytest.mark.parametrize("metrics", [1, 2])
@pytest.mark.parametrize(("dtype", "casts"), [("fp32", 0), ("bf16", LOW + HIGH)])
def test_metrics_are_cross_entropies_in_fp32_whatever_the_logits_are(metrics: int, dtype: str, casts: int) -> None:
    """Of logits as the loss has them: those of fp32 are there, others are cast for each metric."""
    how = replace(TORCH, logits_dtype=dtype)
    more, less = (moved(loss(replace(how, loss_metrics=count)))[1] for count in (metrics, 0))
    assert more - less == metrics * (casts + 2 * HIGH + 2 * ROW)


def test_a_loss_over_a_part_of_the_tokens_is_a_part_of_the_sum() -> None:
    """Over a part of the vocabulary every rank has all of it: sums go over ranks inside (mpu/cross_entropy.py)."""
    table = splits_of(KIND, {"vocab": V, "hidden": H})
    assert (table["sequence"].outputs, table["vocab"].outputs) == ((PARTIAL,), (REPLICATE,))
    assert table["batch"].outputs == (Shard(0),)


def test_a_classifiers_log_softmax_is_kept_in_the_type_of_its_loss() -> None:
    kind = kind_named("classifier_loss")
    for dtype, size in (("fp32", 4), ("bf16", 2)):
        how = replace(TORCH, logits_dtype=dtype)
        local = localize(kind, {"hidden": H, "classes": 10}, [(B, H), (B,)], [], how)
        assert saved_bytes(kind, local) == 2 * B * H + 8 * B + size * B * 10
