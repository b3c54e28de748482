"""Parameter counts: closed forms, and the shapes' tables where they are at hand."""

import csv
from pathlib import Path

import pytest

from tests.workloads.graphs import SHARED_DATA
from workloads import build_workload
from workloads.models.gpt import GPTSpec
from workloads.registry import build_from_spec, model_spec

MODEL_CONFIGS = SHARED_DATA / "model_configs.csv"
GALVATRON_MODELS = SHARED_DATA / "galvatron" / "models_table1.csv"

GALVATRON_NAMES = {
    "BERT-Huge-32": "bert-huge-32",
    "BERT-Huge-48": "bert-huge-48",
    "BERT-xHuge": "bert-xhuge",
    "ViT-Huge-32": "vit-huge-32",
    "ViT-Huge-48": "vit-huge-48",
    "ViT-xHuge": "vit-xhuge",
    "T5-Large-32": "t5-large-32",
    "T5-Large-48": "t5-large-48",
    "T5-512/4-32": "t5-512-4-32",
    "T5-512/4-48": "t5-512-4-48",
    "GPT3-15B": "galvatron-gpt3-15b",
    "GPT3-39B": "galvatron-gpt3-39b",
    "GPT3-65B": "galvatron-gpt3-65b",
}


def rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        pytest.skip(f"{path} is not here: the shapes' tables are not part of the repository")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("layers", "h", "v", "s"), [(24, 2048, 51200, 2048), (3, 64, 256, 16)])
def test_gpt_has_12_l_h2_and_its_tables(layers: int, h: int, v: int, s: int) -> None:
    """12 L h^2 (1 + 13 / (12 h)) + V h + S h, plus the last norm's 2 h: Narayanan et al. 2021, Equation 2."""
    spec = GPTSpec(name="x", layers=layers, hidden=h, heads=8, seq_len=s, vocab=v)
    assert build_from_spec(spec).num_parameters == layers * (12 * h * h + 13 * h) + v * h + s * h + 2 * h


def test_untied_embeddings_add_one_matrix() -> None:
    tied = build_workload("alpa-gpt-1.3b", overrides={"tied_embeddings": True})
    assert build_workload("alpa-gpt-1.3b").num_parameters - tied.num_parameters == 51200 * 2048


def test_bert_has_pooler_masked_word_head_and_next_sentence_head() -> None:
    h, layers, v = 1280, 32, 30592  # 30,522 rounded up to a multiple of 128
    blocks = layers * (12 * h * h + 13 * h)
    embedding = (v + 512 + 2) * h + 2 * h
    head = (h * h + h) + (2 * h + 2) + (h * h + h + 2 * h + v)
    assert build_workload("bert-huge-32").num_parameters == blocks + embedding + head


def test_vit_has_patches_class_token_and_classes() -> None:
    h, layers = 1280, 32
    ends = 3 * 16 * 16 * h + h + 197 * h + h + 2 * h + 1000 * (h + 1)
    assert build_workload("vit-huge-32").num_parameters == layers * (12 * h * h + 13 * h) + ends


def test_t5_has_no_biases_and_two_relative_tables() -> None:
    h, layers = 1024, 16
    encoder, decoder = layers * (12 * h * h + 2 * h), layers * (16 * h * h + 3 * h)
    assert build_workload("t5-large-32").num_parameters == encoder + decoder + 32128 * h + 2 * h + 2 * 32 * 16


@pytest.mark.parametrize(
    ("name", "released"),
    # Parameter counts of the released checkpoints.
    [
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
    ],
)
def test_llama_has_exactly_the_released_number_of_parameters(name: str, released: int) -> None:
    assert build_workload(name).num_parameters == released


@pytest.mark.parametrize(
    ("name", "released"),
    [
        # torchvision 0.20: vgg16, vgg19, vit_l_16.
        ("vgg-16", 138_357_544),
        ("vgg-19", 143_667_240),
        ("vit-large", 304_326_632),
        # transformers 4.40: BertForPreTraining with 70 words of padding; XLNetLMHeadModel without the one vector that
        # stands for masked words in its two-stream pretraining.
        ("bert-large", 336_226_108 + 70 * (1024 + 1)),
        ("xlnet-large", 360_300_800 - 1024),
    ],
)
def test_models_have_the_parameters_of_their_released_code(name: str, released: int) -> None:
    assert build_workload(name).num_parameters == released


def test_gnmt_has_the_tables_layers_and_activations_of_dapples_profile() -> None:
    """Layers of four gates, the first both ways; 64 samples of 35 and 36 tokens of 1,024 fp32 features."""
    h, v = 1024, 36560

    def lstm(wide: int) -> int:
        return 4 * h * (wide + h + 2)

    encoder = 2 * lstm(h) + lstm(2 * h) + 6 * lstm(h)
    decoder = lstm(h) + (2 * h * h + h) + 7 * lstm(2 * h)
    workload = build_workload("gnmt-16")
    assert workload.num_parameters == 2 * v * h + encoder + decoder + v * (h + 1)
    lengths = [workload.input_shapes(index, 64)[0] for index, op in enumerate(workload.operators)
               if op.kind == "embedding"]  # fmt: skip
    assert [4 * samples * tokens * h for samples, tokens in lengths] == [9_175_040, 9_437_184]


def test_t5_512_4_decodes_four_tokens_and_t5_large_as_many_as_it_reads() -> None:
    """Galvatron (VLDB 2023), Table I."""
    for name, decoded in (("t5-large-32", 512), ("t5-512-4-32", 4), ("t5-large-48", 512), ("t5-512-4-48", 4)):
        spec = model_spec(name).model_dump()
        assert (spec["seq_len"], spec["decoder_seq_len"]) == (512, decoded)


def test_dapples_bert_48_has_the_parameters_of_its_released_profile_and_a_span_head() -> None:
    """All but the pooler, which SQuAD does not use; 640 million in the paper. 30,522 words are padded to 30,592."""
    embedding, layer, head = 127_131_648 // 4, 12 * 1024 * 1024 + 13 * 1024, 2 * 1024 + 2
    found = build_workload("bert-48").num_parameters
    assert found == embedding + 70 * 1024 + 48 * layer + head
    assert round(found / 1e7) == 64


@pytest.mark.parametrize(
    ("size", "billions"),
    [("1.7b", 1.7), ("3.6b", 3.6), ("7.5b", 7.5), ("18b", 18.4), ("39b", 39.1), ("76b", 76.1),
     ("145b", 145.6), ("310b", 310.1), ("530b", 529.6), ("1t", 1008.0)],
)  # fmt: skip
def test_megatrons_table_1_prints_our_counts(size: str, billions: float) -> None:
    """Narayanan et al. 2021, Table 1, to its printed digits."""
    count = build_workload(f"megatron-gpt-{size}").num_parameters / 1e9
    assert count == pytest.approx(billions, abs=0.051)


def _name_of(row: dict[str, str]) -> str | None:
    size = row["size"].lower()
    if row["family"] == "GPT" and row["source"].startswith("alpa main"):
        return f"alpa-gpt-{size}"
    if row["family"] == "GPT" and row["source"] == "Aceso paper set":
        return f"gpt3-{size}"
    if row["family"] == "GPT" and row["source"] == "Aceso scaling":
        return f"gpt-scale-{size.removeprefix('scale-').removesuffix('layers')}"
    if row["family"] == "T5":
        return f"t5-{size}"
    if row["family"] == "BERT":
        return f"arena-bert-{size}"
    return {"MPE (inferred from its counts)": "gpt2-1.5b", "AMP": "amp-gpt2"}.get(row["source"])


def test_presets_have_the_shapes_of_the_collected_table() -> None:
    checked = counted = 0
    for row in rows(MODEL_CONFIGS):
        name = _name_of(row)
        if name is None or row["family"] not in ("GPT", "GPT-2", "BERT", "T5"):
            continue
        spec = model_spec(name).model_dump()
        for column in ("layers", "hidden", "heads", "seq_len", "vocab", "dec_seq_len"):
            field = {"dec_seq_len": "decoder_seq_len"}.get(column, column)
            if row[column]:
                assert spec[field] == int(row[column]), (name, column)
        if row["ffn"]:
            assert (spec["ffn"] or 4 * spec["hidden"]) == int(row["ffn"]), name
        checked += 1
        if row["params_B"]:
            # The table counts neither positions nor the untied output matrix.
            overrides = {"tied_embeddings": True}
            count = (
                build_workload(name, overrides=overrides).num_parameters - spec["seq_len"] * spec["hidden"]
            )
            assert count / 1e9 == pytest.approx(float(row["params_B"]), rel=0.005), name
            counted += 1
    assert (checked, counted) == (35, 22)


def test_galvatrons_models_have_its_parameter_counts() -> None:
    checked = 0
    for row in rows(GALVATRON_MODELS):
        name = GALVATRON_NAMES.get(row["model"])
        if name is not None:
            millions = build_workload(name).num_parameters / 1e6
            assert millions == pytest.approx(float(row["params_derived_M"]), rel=0.005), name
            assert millions == pytest.approx(float(row["params_paper_M"]), rel=0.005), name
            checked += 1
    assert checked == 13
