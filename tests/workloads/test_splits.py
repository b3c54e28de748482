"""Every split of every kind: work is shared, parameters are cut, placements fit shapes."""

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.kernels import MemoryBound
from workloads.kinds import all_kinds, kind_named
from workloads.kinds.base import BACKWARD_WEIGHT, PHASES, Attributes, Implementation, Shape
from workloads.local import localize, matmul_flop, saved_tensors, splits_of, workspace_bytes
from workloads.placements import PARTIAL, REPLICATE, Replicate, Shard

HALF = Implementation(dtype="fp16")


def example(
    kind: str, *, samples: int, tokens: int, heads: int, width: int
) -> tuple[Attributes, list[Shape]]:
    """Return attributes and global input shapes of a kind; all sizes are divisible by 4."""
    hidden, dim = heads * width, width
    packed = 3 * heads * dim
    attention = {"heads": heads, "head_dim": dim, "causal": True}
    features: Shape = (samples, tokens, hidden)
    scores: Shape = (samples, heads, tokens, tokens)
    ids: Shape = (samples, tokens)
    found: dict[str, tuple[Attributes, list[Shape]]] = {
        "linear": ({"in": hidden, "out": 4 * hidden, "bias": True}, [features]),
        "cross_projection": (
            {"in": hidden, "query_out": hidden, "key_value_out": 2 * hidden, "groups": heads},
            [features, (samples, 2 * tokens, hidden)],
        ),
        "pooler": ({"hidden": hidden}, [features]),
        "layer_norm": ({"hidden": hidden}, [features]),
        "rms_norm": ({"hidden": hidden}, [features]),
        "gelu": ({}, [features]),
        "relu": ({}, [features]),
        "swiglu": ({}, [(samples, tokens, 2 * hidden)]),
        "dropout": ({"probability": 0.1}, [features]),
        "add": ({}, [features, features]),
        "dropout_add": ({"probability": 0.1}, [features, features]),
        "attention_score": (attention, [(samples, tokens, packed)] * 2),
        "softmax": ({"heads": heads, "position_buckets": 32}, [scores]),
        "attention_context": (attention, [scores, (samples, tokens, packed)]),
        "flash_attention": (attention, [(samples, tokens, packed)] * 2),
        "rotary": (attention, [(samples, tokens, packed)]),
        "embedding": (
            {"vocab": 64, "hidden": hidden, "positions": tokens, "segments": 4, "dropout": 0.1},
            [ids],
        ),
        "patch_embedding": (
            {"patch": 4, "image": 16, "channels": 3, "hidden": hidden, "class_token": True},
            [(samples, 3, 16, 16)],
        ),
        "lm_loss": ({"vocab": 64, "hidden": hidden, "bias": True}, [features, ids]),
        "classifier_loss": ({"hidden": hidden, "classes": 10}, [features, (samples,)]),
        "loss_sum": ({}, [(samples,), (samples,)]),
        "conv2d": (
            {"in": hidden, "out": 2 * hidden, "kernel": 3, "stride": 2, "padding": 1, "bias": True},
            [(samples, hidden, tokens, tokens)],
        ),
        "batch_norm": ({"channels": hidden, "relu": True}, [(samples, hidden, tokens, tokens)]),
        "shortcut": (
            {"in": hidden, "out": 2 * hidden, "stride": 2},
            [(samples, 2 * hidden, tokens // 2, tokens // 2), (samples, hidden, tokens, tokens)],
        ),
        "max_pool": ({"kernel": 2, "stride": 2, "channels": hidden}, [(samples, hidden, tokens, tokens)]),
        "global_average_pool": ({"channels": hidden}, [(samples, hidden, tokens, tokens)]),
        "flatten": ({"channels": hidden}, [(samples, hidden, tokens, tokens)]),
        "lstm": ({"in": hidden, "hidden": 2 * hidden, "bidirectional": True}, [features]),
        "additive_attention": ({"hidden": hidden}, [features, (samples, 2 * tokens, hidden)]),
        "concat": ({}, [features, (samples, tokens, 3 * hidden)]),
        "relative_score": (
            {"heads": heads, "head_dim": dim, "hidden": hidden},
            [(samples, tokens, packed)],
        ),
        "window_order": ({"side": 4, "window": 2, "shift": 1, "reverse": True}, [(samples, 16, hidden)]),
        "patch_merge": ({"side": 4}, [(samples, 16, hidden)]),
        "token_mean": ({}, [features]),
        "opaque": (
            {
                "forward_s": 1e-3,
                "backward_s": 2e-3,
                "output_bytes": 12,
                "saved_bytes": 5,
                "num_parameters": 7,
            },
            [(samples, 9)],
        ),
    }
    return found[kind]


sizes = st.sampled_from([4, 8, 12])


@settings(max_examples=15, deadline=None)
@given(samples=sizes, tokens=sizes, heads=sizes, width=sizes, ways=st.sampled_from([2, 4]))
@pytest.mark.parametrize("name", sorted(all_kinds()))
def test_splits_share_the_work_and_cut_what_they_say(
    name: str, samples: int, tokens: int, heads: int, width: int, ways: int
) -> None:
    kind = kind_named(name)
    attributes, shapes = example(name, samples=samples, tokens=tokens, heads=heads, width=width)
    whole = localize(kind, attributes, shapes, [], HALF)
    for split, entry in splits_of(kind, attributes).items():
        local = localize(kind, attributes, shapes, [(split, ways)], HALF)
        share = ways if entry.shares_work else 1
        for phase in PHASES:
            one = matmul_flop(kind.kernels(phase, local))
            assert one * share == pytest.approx(matmul_flop(kind.kernels(phase, whole))), (split, phase)
            # What an embedding sums over ranks is its whole output: a tensor of its own where a part of it goes on.
            passed_on = prod(whole.outputs[0]) * whole.element_bytes if split == "vocab_sequence" else 0
            assert workspace_bytes(kind, phase, local) <= workspace_bytes(kind, phase, whole) + passed_on
            stated = kind.stated_time_s(phase, whole)
            if stated is not None:
                assert kind.stated_time_s(phase, local) == pytest.approx(stated / share)
        for cut, full, placement in zip(local.parameters, whole.parameters, entry.parameters, strict=True):
            assert _size(cut) * (ways if isinstance(placement, Shard) else 1) == _size(full)
        for saved, uncut in zip(saved_tensors(kind, local), saved_tensors(kind, whole), strict=True):
            assert saved.ref == uncut.ref
            assert saved.size_bytes in (uncut.size_bytes, uncut.size_bytes // ways), (split, saved.ref)


def _size(shape: Shape) -> int:
    product = 1
    for extent in shape:
        product *= extent
    return product


@pytest.mark.parametrize("name", sorted(all_kinds()))
def test_gradients_are_partial_exactly_where_ranks_share_the_work(name: str) -> None:
    kind = kind_named(name)
    attributes, shapes = example(name, samples=4, tokens=8, heads=4, width=4)
    for split, entry in splits_of(kind, attributes).items():
        for index in range(len(shapes)):
            gradient = entry.input_gradient(index)
            if isinstance(entry.inputs[index], Shard):
                assert gradient == entry.inputs[index]
            else:
                assert gradient == (REPLICATE if split == "replicate" else PARTIAL)
        assert not any(isinstance(placement, Replicate) for placement in entry.inputs) or split not in (
            "batch",
            "sequence",
            "head",
        )


@pytest.mark.parametrize("name", sorted(all_kinds()))
def test_a_split_cuts_the_dimension_that_it_is_named_after(name: str) -> None:
    """Samples come first, then tokens or channels; heads are in the features, or come second where there are scores."""
    kind = kind_named(name)
    attributes, shapes = example(name, samples=4, tokens=8, heads=4, width=4)
    outputs = localize(kind, attributes, shapes, [], HALF).outputs
    second = ("sequence", "vocab_sequence", "channel", "out_channel", "in_channel")
    last = ("column", "row", "row_sequence")
    for split, entry in splits_of(kind, attributes).items():
        for shape, placement in zip((*shapes, *outputs), (*entry.inputs, *entry.outputs), strict=True):
            if not isinstance(placement, Shard):
                continue
            if split == "batch":
                assert placement.dim == 0
            elif split in second:
                assert placement.dim == (1 if len(shape) != 3 or "channel" not in split else 2)
            elif split in last:
                assert placement.dim == len(shape) - 1
            else:
                assert split == "head" and placement.dim == (1 if len(shape) == 4 else 2)


def test_a_bias_of_a_row_split_needs_no_reduction() -> None:
    """It is added after the all-reduce, so every rank has its whole gradient; not so a norm's gain."""
    row = splits_of(kind_named("linear"), {"in": 8, "out": 8, "bias": True})["row"]
    assert row.parameter_gradient(1) == REPLICATE
    sequence = splits_of(kind_named("layer_norm"), {"hidden": 8})["sequence"]
    assert sequence.parameter_gradient(0) == PARTIAL
    vocab = splits_of(kind_named("embedding"), {"vocab": 8, "hidden": 8, "positions": 4})["vocab"]
    assert [vocab.parameter_gradient(index) for index in range(2)] == [Shard(0), REPLICATE]


@pytest.mark.parametrize(
    ("kind", "attributes", "split", "late"),
    [
        ("linear", {"in": 8, "out": 8}, "row", (1,)),
        ("cross_projection", {"in": 8, "query_out": 8, "key_value_out": 16}, "row", (2, 3)),
        ("conv2d", {"in": 8, "out": 8, "kernel": 1, "bias": True}, "in_channel", (1,)),
        *(
            ("embedding", {"vocab": 8, "hidden": 8, "positions": 4, "segments": 2}, split, (1, 2))
            for split in ("vocab", "vocab_sequence")
        ),
    ],
)
def test_what_is_added_after_the_sum_over_ranks_has_its_whole_gradient_on_each(
    kind: str, attributes: Attributes, split: str, late: tuple[int, ...]
) -> None:
    """Biases, positions and segments; weights of which a rank has a part have that part's."""
    entry = splits_of(kind_named(kind), attributes)[split]
    for index, placement in enumerate(entry.parameters):
        assert entry.parameter_gradient(index) == (REPLICATE if index in late else placement)
        assert isinstance(placement, Shard) == (index not in late)


def test_a_bias_of_a_row_split_under_sequence_parallelism_has_the_gradient_of_its_tokens() -> None:
    """Megatron-LM adds it to a shard: its gradient reads b s h / t numbers and is summed over ranks as norms' are."""
    kind, attributes = kind_named("linear"), {"in": 8, "out": 8, "bias": True}
    table = splits_of(kind, attributes)
    assert table["row_sequence"].parameter_gradient(0) == table["row"].parameter_gradient(0) == Shard(1)
    assert table["row_sequence"].parameter_gradient(1) == PARTIAL
    batch, tokens, hidden, ways = 4, 16, 8, 4

    def read_bytes(split: str) -> float:
        local = localize(kind, attributes, [(batch, tokens, hidden)], [(split, ways)], HALF)
        (gradient,) = [one for one in kind.kernels(BACKWARD_WEIGHT, local) if isinstance(one, MemoryBound)]
        return gradient.read_bytes

    assert read_bytes("row") == 2 * batch * tokens * hidden
    assert read_bytes("row_sequence") == 2 * batch * tokens * hidden / ways
    twice = localize(kind, attributes, [(batch, tokens, hidden)], [("row_sequence", 2), ("row_sequence", 4)], HALF)
    (gradient,) = [one for one in kind.kernels(BACKWARD_WEIGHT, twice) if isinstance(one, MemoryBound)]
    assert gradient.read_bytes == 2 * batch * tokens * hidden / 8


def test_two_axes_cut_twice() -> None:
    """Alpa's two-axis splits: column and row of one matrix."""
    attributes: Attributes = {"in": 64, "out": 96, "bias": True}
    local = localize(
        kind_named("linear"), attributes, [(8, 16, 64)], [("batch", 2), ("column", 4), ("row", 2)], HALF
    )
    assert local.inputs == ((4, 16, 32),)
    assert local.outputs == ((4, 16, 24),)
    assert local.parameters == ((24, 32), (24,))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ([("column", 3)], r"operator 'layer1.attention_qkv': a column split must divide 8, got 3; try 2"),
        ([("column", 2), ("column", 8)], r"a column split must divide 8, got 16; try 8"),
        ([("head", 2)], r"cannot be split by 'head'; use one of batch, replicate, column, row, sequence"),
        ([("batch", 3)], r"samples must be divisible by 3, got 4; try 2"),
        ([("sequence", 5)], r"dimension 1 must be divisible by 5, got 16; try 4"),
        ([("column", 0)], r"an axis must have size >= 1, got column 0"),
    ],
)
def test_a_split_that_does_not_fit_is_named(axes: list[tuple[str, int]], message: str) -> None:
    attributes: Attributes = {"in": 64, "out": 192, "groups": 8}
    with pytest.raises(ValueError, match=message):
        localize(kind_named("linear"), attributes, [(4, 16, 64)], axes, HALF, operator="layer1.attention_qkv")


@pytest.mark.parametrize(
    ("kind", "limits"),
    [
        # 4 heads of 8 features; the first extent of what is cut that 64 ways do not divide.
        *((name, {"head": 4}) for name in ("attention_score", "softmax", "attention_context", "flash_attention")),
        *((name, {"head": 4}) for name in ("rotary", "relative_score")),
        *((name, {"channel": 32}) for name in ("batch_norm", "max_pool", "global_average_pool", "flatten")),
        ("conv2d", {"out_channel": 64, "in_channel": 32}),
        ("shortcut", {"out_channel": 64}),
        ("linear", {"column": 128, "row": 32, "row_sequence": 32}),
        ("cross_projection", {"column": 4, "row": 32}),
        ("embedding", {"vocab": 64, "vocab_sequence": 64, "column": 32}),
        ("patch_embedding", {"column": 32}),
        ("lm_loss", {"vocab": 64}),
    ],
)
def test_a_kind_is_split_as_far_as_its_heads_channels_or_features_go(kind: str, limits: dict[str, int]) -> None:
    attributes, shapes = example(kind, samples=256, tokens=256, heads=4, width=8)
    splits = splits_of(kind_named(kind), attributes)
    assert {*limits} == {*splits} - {"batch", "replicate", "sequence"}
    for split, limit in limits.items():
        with pytest.raises(ValueError, match=f"a {split} split must divide {limit}, got 256; try {limit}"):
            localize(kind_named(kind), attributes, shapes, [(split, 256)], HALF)
        assert localize(kind_named(kind), attributes, shapes, [(split, limit)], HALF).outputs
    assert localize(kind_named(kind), attributes, shapes, [("batch", 256)], HALF).outputs[0][0] == 1


def test_an_axis_of_size_one_changes_nothing() -> None:
    attributes: Attributes = {"in": 64, "out": 192}
    kind = kind_named("linear")
    assert localize(kind, attributes, [(4, 16, 64)], [("row", 1)], HALF) == localize(
        kind, attributes, [(4, 16, 64)], [], HALF
    )


def test_loss_of_a_vocabulary_split_has_three_small_all_reduces() -> None:
    kind = kind_named("lm_loss")
    local = localize(kind, {"vocab": 64, "hidden": 16}, [(2, 8, 16), (2, 8)], [("vocab", 4)], HALF)
    found = kind.internal_collectives("forward", "vocab", local)
    assert [(c.collective, c.shape, c.dtype) for c in found] == [("all_reduce", (2, 8), "fp32")] * 3
    assert kind.internal_collectives("forward", "batch", local) == ()
    assert kind.internal_collectives("backward_input", "vocab", local) == ()


def test_an_embedding_under_sequence_parallelism_keeps_the_mask_of_its_part() -> None:
    """Korthikanti et al. 2022, Section 4.3: embedding dropout is cut along the sequence too (s b h p / t)."""
    kind = kind_named("embedding")
    attributes: Attributes = {"vocab": 64, "hidden": 16, "positions": 8, "dropout": 0.1}
    local = localize(kind, attributes, [(2, 8)], [("vocab_sequence", 4)], HALF)
    assert local.outputs == ((2, 2, 16),) and local.parameters == ((16, 16), (8, 16))
    assert [item.shape for item in kind.saved(local) if item.ref == "mask"] == [(2, 2, 16)]
    found = [(phase, item) for phase in PHASES for item in kind.internal_collectives(phase, "vocab_sequence", local)]
    assert [(phase, item.collective, item.shape) for phase, item in found] == [
        ("forward", "all_reduce", (2, 8, 16)),
        ("backward_input", "all_gather", (2, 8, 16)),
    ]
    assert kind.internal_collectives("forward", "vocab", local) == ()


def test_logits_of_tf32_products_are_fp32_already() -> None:
    """No cast and no second copy: TF32 rounds what a product reads, and keeps nothing."""
    kind, attributes = kind_named("lm_loss"), {"vocab": 64, "hidden": 16}
    same = {}
    for dtype in ("fp32", "tf32", "bf16"):
        implementation = Implementation(dtype=dtype, fused_loss=True, loss_keeps_logits=True)
        local = localize(kind, attributes, [(2, 8, 16), (2, 8)], [], implementation)
        same[dtype] = [
            (kind.kernels(phase, local), workspace_bytes(kind, phase, local), kind.num_calls(phase, local))
            for phase in PHASES
        ]
    assert same["tf32"] == same["fp32"]
    assert len(same["bf16"][0][0]) == len(same["fp32"][0][0]) + 1
