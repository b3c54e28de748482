"""The graphs of the families: operators, layers, collectives, floating point operations."""

from collections import Counter

import pytest

from tests.benchmarks.measuring import yardsticks
from tests.workloads.graphs import EAGER_FP32, MEGATRON, local_operator
from workloads import Workload, build_workload, model_names
from workloads.kinds.base import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from workloads.local import check_workload, matmul_flop, splits_of
from workloads.placements import Placement, collective_between

GPT_LAYER = (
    "norm_1", "attention_qkv", "attention_score", "attention_softmax", "attention_dropout",
    "attention_context", "attention_dense", "post_attention_dropout", "norm_2", "mlp_linear_1",
    "mlp_activation", "mlp_linear_2", "post_mlp_dropout",
)  # fmt: skip


@pytest.mark.parametrize("name", model_names())
def test_presets_agree_with_their_kinds(name: str) -> None:
    workload = build_workload(name)
    check_workload(workload, MEGATRON)
    check_workload(workload, EAGER_FP32)
    assert len(workload.layers) == len(workload.layer_names)
    assert [workload.operators[start].layer for start, _ in workload.layers] == list(
        range(len(workload.layers))
    )
    unread = [t for op in workload.operators for t in op.outputs if t not in workload.consumers]
    assert len(unread) == 1  # the loss


PLAIN_ONLY = ("t5-large", "t5-512", "xlnet", "swin")
"""Families whose attention no flash kernel computes."""


@pytest.mark.parametrize("name", [name for name in model_names() if not name.startswith(PLAIN_ONLY)])
def test_presets_build_with_flash_attention(name: str) -> None:
    workload = build_workload(name, attention="flash")
    check_workload(workload, MEGATRON)
    assert not any("score" in op.role for op in workload.operators)


def test_gpt_layers_are_acesos_thirteen_operators() -> None:
    workload = build_workload("gpt3-1.3b")
    assert len(workload) == 1 + 13 * 24 + 2
    assert tuple(op.role for op in workload.operators if op.layer == 7) == GPT_LAYER
    assert [op.role for op in workload.operators if op.layer == 0] == ["embedding"]
    assert [op.role for op in workload.operators if op.layer == 25] == ["final_norm", "lm_loss"]
    assert workload.operators[14].name == "layer2.norm_1"
    assert workload.layer_names[0] == "embedding" and workload.layer_names[-1] == "head"


def test_flash_attention_is_one_operator() -> None:
    workload = build_workload("gpt3-1.3b", attention="flash")
    assert [op.role for op in workload.operators if op.layer == 1] == [
        *GPT_LAYER[:2], "attention_flash", *GPT_LAYER[6:]
    ]  # fmt: skip


@pytest.mark.parametrize(("size", "count"), [("770m", 821), ("11b", 821), ("22b", 1637)])
def test_t5_has_as_many_operators_as_aceso_counts(size: str, count: int) -> None:
    workload = build_workload(f"t5-{size}")
    assert len(workload) == count
    decoder = [op for op in workload.operators if workload.layer_names[op.layer] == "decoder3"]
    assert len(decoder) == 21
    memory = "decoder_embedding.encoder_final_norm"
    assert len(workload.consumers[memory]) == (48 if size == "22b" else 24)


def test_bert_normalises_after_the_sums() -> None:
    roles = [op.role for op in build_workload("bert-large").operators if op.layer == 1]
    assert roles[0] == "attention_qkv" and roles[7:9] == ["norm_1", "mlp_linear_1"] and roles[-1] == "norm_2"


@pytest.mark.parametrize(
    ("name", "attention", "causal"),
    [
        *(("gpt3-350m", attention, {"attention"}) for attention in ("plain", "flash")),
        *(("llama2-7b", attention, {"attention"}) for attention in ("plain", "flash")),
        *(("bert-large", attention, set()) for attention in ("plain", "flash")),
        ("vit-large", "plain", set()),
        ("t5-large-32", "plain", {"decoder_attention"}),  # across to the encoder and inside it, all words are seen
    ],
)
def test_words_see_only_those_before_them_where_a_model_writes_text(
    name: str, attention: str, causal: set[str]
) -> None:
    found = {
        op.role
        for op in build_workload(name, attention=attention).operators
        if op.kind in ("softmax", "flash_attention") and op.attributes.get("causal")
    }
    assert {role.removesuffix("_softmax").removesuffix("_flash") for role in found} == causal, found


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("gpt3-350m", 2048),
        ("llama2-7b", 4096),
        ("bert-large", 512),
        ("vit-large", 14 * 14 + 1),  # patches of 16 in images of 224, and the class token
        ("gnmt-16", 35 + 36),
    ],
)
def test_a_sample_has_the_tokens_of_its_paper(name: str, tokens: int) -> None:
    assert build_workload(name).tokens_per_sample == tokens


def test_a_fingerprint_tells_graphs_apart_that_differ_in_shapes_alone() -> None:
    """BERT has its 512 positions however short its samples are: no attribute changes."""
    short, long = (build_workload("bert-large", overrides={"seq_len": length}) for length in (128, 256))
    assert [op.attributes for op in short.operators] == [op.attributes for op in long.operators]
    assert short.fingerprint != long.fingerprint
    assert short.fingerprint == build_workload("bert-large", overrides={"seq_len": 128}).fingerprint


def test_deep_models_have_a_dozen_signatures() -> None:
    assert len(build_workload("gpt-scale-1024").signature_examples) == 16


@pytest.mark.measured
@pytest.mark.parametrize(("name", "operators"), [("gpt-scale-1024", 13315), ("mt-nlg-530b", 1368)])
def test_large_graphs_build_in_about_a_second(name: str, operators: int) -> None:
    def build() -> None:
        # Another sequence length, so that no cache has it.
        workload = build_workload(name, overrides={"seq_len": 2000})
        assert len(workload) == operators
        assert len(workload.signature_examples) == 16 and workload.num_parameters and workload.fingerprint

    assert yardsticks(build, repeats=1) < 15  # 6 when written


def _placements(
    workload: Workload, split: str
) -> list[tuple[str, str, Placement, Placement, Placement, Placement]]:
    """Per edge: roles of its ends; placement made and wanted forward; made and wanted backward."""
    found = []
    for op in workload.operators:
        reader = splits_of(op.definition, op.attributes)[getattr(op, split)]
        for position, tensor in enumerate(op.inputs):
            if tensor in workload.input_names or tensor in op.inputs[:position]:
                continue
            maker = workload.operators[workload.producer[tensor]]
            output = maker.outputs.index(tensor)
            entry = splits_of(maker.definition, maker.attributes)[getattr(maker, split)]
            found.append(
                (
                    maker.role,
                    op.role,
                    entry.outputs[output],
                    reader.inputs[position],
                    reader.input_gradient(position),
                    entry.output_gradient(output),
                )
            )
    return found


def test_megatrons_four_all_reduces_per_layer_follow_from_the_placements() -> None:
    """Two forward, after the row splits; two backward, before the column splits."""
    workload = build_workload("gpt3-1.3b")
    edges = _placements(workload, "tensor_split")
    forward = [(a, b, collective_between(made, wanted)) for a, b, made, wanted, _, _ in edges]
    backward = [(b, a, collective_between(made, wanted)) for a, b, _, _, made, wanted in edges]
    layers = 24
    assert Counter(item for item in forward if item[2]) == {
        ("attention_dense", "post_attention_dropout", "all_reduce"): layers,
        ("mlp_linear_2", "post_mlp_dropout", "all_reduce"): layers,
        ("embedding", "norm_1", "all_reduce"): 1,  # one collective, two readers
        ("embedding", "post_attention_dropout", "all_reduce"): 1,
    }
    assert Counter(item for item in backward if item[2]) == {
        ("attention_qkv", "norm_1", "all_reduce"): layers,
        ("mlp_linear_1", "norm_2", "all_reduce"): layers,
        ("lm_loss", "final_norm", "all_reduce"): 1,
    }


def test_sequence_parallelism_gathers_and_scatters_instead() -> None:
    """All-gather before column splits, reduce-scatter after row splits; backward the other way round.

    The embedding sums and scatters inside itself.
    """
    edges = _placements(build_workload("gpt3-1.3b"), "sequence_split")
    forward = Counter(collective_between(made, wanted) for _, _, made, wanted, _, _ in edges)
    backward = Counter(collective_between(made, wanted) for _, _, _, _, made, wanted in edges)
    assert forward["all_gather"] == 2 * 24 + 1 and forward["reduce_scatter"] == 2 * 24
    assert backward["reduce_scatter"] == 2 * 24 + 1 and backward["all_gather"] == 2 * 24
    assert forward["all_reduce"] == backward["all_reduce"] == 0


def test_the_alternative_split_swaps_column_and_row() -> None:
    for op in build_workload("gpt3-1.3b").operators:
        swapped = {"column": "row", "row": "column"}
        if op.kind == "linear":
            assert op.alternative_split == swapped[op.tensor_split]
        else:
            assert op.alternative_split == op.tensor_split


def _flop(workload: Workload, phase: str, samples: int, ways: int = 1) -> float:
    return sum(
        matmul_flop(
            op.definition.kernels(
                phase, local_operator(workload, index, MEGATRON, samples=samples, ways=ways)
            )
        )
        for index, op in enumerate(workload.operators)
    )


@pytest.mark.parametrize("name", ["gpt3-1.3b", "gpt-scale-16"])
@pytest.mark.parametrize("ways", [1, 4])
def test_gpt_forward_flops_are_24_b_s_l_h2(name: str, ways: int) -> None:
    """F = 24 B S L h^2 (1 + S / (6 h)) + 2 B S h V forward, twice that backward.

    Narayanan et al. 2021, appendix.
    """
    workload = build_workload(name)
    samples, s, v = 3, 2048, 51200
    layers, h = {"gpt3-1.3b": (24, 2048), "gpt-scale-16": (16, 512)}[name]
    forward = 24 * samples * s * layers * h * h * (1 + s / (6 * h)) + 2 * samples * s * h * v
    assert _flop(workload, FORWARD, samples, ways) * ways == pytest.approx(forward, rel=1e-12)
    backward = _flop(workload, BACKWARD_INPUT, samples, ways) + _flop(
        workload, BACKWARD_WEIGHT, samples, ways
    )
    assert backward * ways == pytest.approx(2 * forward, rel=1e-12)


def test_grouped_queries_shrink_the_projection_and_limit_the_heads() -> None:
    workload = build_workload("llama2-70b")
    qkv = next(op for op in workload.operators if op.role == "attention_qkv")
    assert qkv.attributes["out"] == (64 + 2 * 8) * 128
    with pytest.raises(ValueError, match="a column split must divide 8, got 16; try 8"):
        local_operator(workload, workload.operators.index(qkv), MEGATRON, ways=16)


def test_bert_drops_embeddings_behind_their_norm() -> None:
    """google-research/bert, modeling.py: ``layer_norm_and_dropout`` ends ``embedding_postprocessor``."""
    roles = [op.role for op in build_workload("bert-large").operators]
    assert roles[:3] == ["embedding", "embedding_norm", "embedding_dropout"]


def test_no_dropout_means_no_dropout_operator() -> None:
    workload = build_workload("gpt3-1.3b", overrides={"dropout": 0.0, "attention_dropout": 0.0})
    assert "attention_dropout" not in {op.role for op in workload.operators}
    kinds_saving = {op.kind for op in workload.operators if op.definition.has_dropout_state}
    assert kinds_saving == {"embedding", "dropout_add"}


@pytest.mark.parametrize("name", ["gpt3-350m", "t5-large-32", "bert-large", "wide-resnet-500m", "xlnet-large"])
def test_operators_whose_role_says_what_they_do_have_no_number_in_profiles(name: str) -> None:
    workload = build_workload(name)
    assert list(workload.profile_roles) == [op.role for op in workload.operators]


@pytest.mark.parametrize("name", ["swin-huge-32", "vgg-16", "gnmt-8"])
def test_operators_of_one_profile_role_do_the_same_work(name: str) -> None:
    workload = build_workload(name)
    work: dict[str, set[object]] = {}
    for index, (role, op) in enumerate(zip(workload.profile_roles, workload.operators, strict=True)):
        assert role == op.role or role.rpartition(".")[0] == op.role
        attributes = tuple(sorted(op.attributes.items()))
        work.setdefault(role, set()).add((op.kind, attributes, workload.input_shapes(index, 1)))
    assert all(len(kinds) == 1 for kinds in work.values())
    assert len(work) > len({op.role for op in workload.operators})
    assert max(map(len, work)) < 40


def test_numbers_of_profile_roles_are_in_order_of_appearance() -> None:
    workload = build_workload("swin-huge-32")
    norms = [role for role, op in zip(workload.profile_roles, workload.operators, strict=True) if op.role == "norm_1"]
    assert list(dict.fromkeys(norms)) == [f"norm_1.{stage}" for stage in (1, 2, 3, 4)]
    assert norms.count("norm_1.3") == 26
