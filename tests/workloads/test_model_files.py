"""Models by name, from YAML, and from Hugging Face config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.workloads.graphs import MEGATRON
from workloads import build_workload
from workloads.huggingface import spec_from_config
from workloads.local import check_workload
from workloads.registry import build_from_spec

CONFIGS: dict[str, tuple[dict[str, object], int]] = {
    # config.json of published checkpoints (shape keys only) and their parameter counts.
    "gpt2": ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
              "vocab_size": 50257}, 124_439_808),
    "pythia-1b": ({"model_type": "gpt_neox", "hidden_size": 2048, "num_hidden_layers": 16,
                   "num_attention_heads": 8, "intermediate_size": 8192, "max_position_embeddings": 2048,
                   "vocab_size": 50304, "tie_word_embeddings": False}, 1_011_781_632),
    "mistral-7b": ({"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32,
                    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
                    "max_position_embeddings": 32768, "vocab_size": 32000}, 7_241_732_096),
    "qwen2-0.5b": ({"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24,
                    "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
                    "max_position_embeddings": 32768, "vocab_size": 151936, "tie_word_embeddings": True},
                   494_032_768),
    "tinyllama": ({"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 22,
                   "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 5632,
                   "max_position_embeddings": 2048, "vocab_size": 32000}, 1_100_048_384),
    "bert-base": ({"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 768,
                   "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
                   "vocab_size": 30522}, 109_514_298),
    "roberta-base": ({"model_type": "roberta", "architectures": ["RobertaForMaskedLM"],
                      "max_position_embeddings": 514, "type_vocab_size": 1, "vocab_size": 50265},
                     124_697_433),
    "vit-base": ({"model_type": "vit", "hidden_size": 768}, 86_567_656),
    "t5-small": ({"model_type": "t5", "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6,
                  "num_heads": 8, "vocab_size": 32128}, 60_506_624),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_config_json_gives_the_published_parameter_count(name: str, tmp_path: Path) -> None:
    config, published = CONFIGS[name]
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "float32", **config}))
    workload = build_workload(str(folder))
    check_workload(workload, MEGATRON)
    assert workload.num_parameters == published
    assert workload.name == name
    assert build_workload(str(folder / "config.json")) is workload


@pytest.mark.parametrize(
    ("config", "published", "heads", "dropout"),
    [
        ({"model_type": "gpt2"}, 124_439_808, 12, 0.1),
        ({"model_type": "gpt_neox"}, 20_554_567_680, 64, 0.0),  # GPT-NeoX-20B (Black et al. 2022)
        ({"model_type": "bert", "architectures": ["BertForPreTraining"]}, 110_106_428, 12, 0.1),
        # roberta-base with the two segments of transformers' default.
        ({"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}, 124_697_433 + 768, 12, 0.1),
        ({"model_type": "vit"}, 86_567_656, 12, 0.0),
        ({"model_type": "t5"}, 60_506_624, 8, 0.1),
    ],
)
def test_absent_keys_have_the_values_of_transformers(
    config: dict[str, object], published: int, heads: int, dropout: float
) -> None:
    found = spec(**config)
    assert build_from_spec(found).num_parameters == published
    assert (found.heads, found.dropout, found.attention_dropout) == (heads, dropout, dropout)


def test_a_vit_has_as_many_classes_as_its_labels() -> None:
    labels = {str(number): f"class {number}" for number in range(10)}
    assert spec(model_type="vit", id2label=labels).classes == 10
    assert spec(model_type="vit", id2label={}).classes == 1000


def test_attention_of_llama_may_have_biases_of_all_four_projections(tmp_path: Path) -> None:
    """Twelve layers of 2,048 features, 32 query and 4 key-value heads: q, k, v and the output."""
    sizes = []
    for bias in (False, True):
        path = tmp_path / f"bias-{bias}.json"
        path.write_text(json.dumps({**CONFIGS["tinyllama"][0], "num_hidden_layers": 12, "attention_bias": bias}))
        sizes.append(build_workload(str(path)).num_parameters)
    assert sizes[1] - sizes[0] == 12 * (2048 + 2 * 4 * 64 + 2048)


def test_a_vocabulary_that_tensor_parallelism_splits_is_padded_on_request(tmp_path: Path) -> None:
    sizes = []
    for multiple in (1, 128):
        path = tmp_path / f"padded-{multiple}.json"
        path.write_text(json.dumps({"model_type": "gpt2", "vocab_size": 50257, "vocab_multiple": multiple}))
        sizes.append(build_workload(str(path)).num_parameters)
    assert sizes[1] - sizes[0] == 47 * 768


def spec(**config: object) -> Any:
    return spec_from_config(config, "config.json")


def test_a_sequence_length_beside_the_models_keys_is_what_it_trains_on() -> None:
    short = spec(model_type="gpt2", seq_len=256)
    assert (short.seq_len, short.num_positions) == (256, 1024)
    assert spec(model_type="bert", seq_len=128).num_positions == 512
    assert build_from_spec(short).num_parameters == 124_439_808, "its table is as long as before"
    both = spec(model_type="t5", seq_len=1024, decoder_seq_len=114)
    assert (both.seq_len, both.decoder_seq_len) == (1024, 114)
    with pytest.raises(ValueError, match=r"n_positions=1024 must be at least seq_len=2048"):
        spec(model_type="gpt2", seq_len=2048)


@pytest.mark.parametrize(("family", "absent"), [("llama", None), ("mistral", 8), ("qwen2", 32)])
def test_key_value_heads_that_are_null_are_as_many_as_heads(family: str, absent: int | None) -> None:
    """transformers: a null is ``num_attention_heads``; only an absent key is the class's default."""
    sizes = dict(num_hidden_layers=2, hidden_size=1024, num_attention_heads=64, intermediate_size=64, vocab_size=64)
    assert spec(model_type=family, max_position_embeddings=8, num_key_value_heads=None, **sizes).kv_heads is None
    assert spec(model_type=family, max_position_embeddings=8, **sizes).kv_heads == absent


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt3"}, "model_type: 'gpt3' is not supported, did you mean 'gpt2'"),
        ({"model_type": "llama", "hidden_size": 64}, "num_hidden_layers: is required of a llama model"),
        ({"model_type": "gpt2", "n_layer": -1}, r"json: n_layer: must be greater than or equal to 1"),
        ({"model_type": "gpt2", "n_layer": "heads"}, r"json: n_layer: must be a valid integer, got 'heads'"),
        ({"model_type": "gpt2", "n_head": 7}, "n_head must divide n_embd=768, got n_head=7"),
        ({"model_type": "gpt_neox", "hidden_size": 100}, "num_attention_heads must divide hidden_size=100"),
        ({"model_type": "mistral", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 6, "vocab_size": 9,
          "intermediate_size": 8, "max_position_embeddings": 8},
         "num_attention_heads must divide hidden_size=64, got num_attention_heads=6; or give head_dim"),
        ({"model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 9,
          "intermediate_size": 8, "max_position_embeddings": 8, "num_key_value_heads": 3},
         "num_key_value_heads must divide num_attention_heads=8, got num_key_value_heads=3"),
        ({"model_type": "bert", "hidden_dropout_prob": 1}, r"json: hidden_dropout_prob: must be less than 1"),
        ({"model_type": "roberta", "max_position_embeddings": 2}, "max_position_embeddings: two come before .*, got 2"),
        ({"model_type": "vit", "patch_size": 15}, "patch_size must divide image_size=224, got patch_size=15"),
        ({"model_type": "t5", "n_positions": 0}, r"json: n_positions: must be greater than or equal to 1, got 0$"),
        ({"model_type": "t5", "feed_forward_proj": "tanh"}, "feed_forward_proj: must be relu, gelu or gated-..., got"),
        ({"model_type": "bert", "seq_len": 0}, r"json: seq_len: must be greater than or equal to 1"),
        ({"model_type": 3}, "model_type: is required"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias: biases in the MLP are not supported, got True"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "num_local_experts: mixtures of experts are not supported"),
        ({"model_type": "mistral", "num_experts": 60}, "num_experts: mixtures of experts are not supported, got 60"),
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
         "architectures: the head must be one of ForMaskedLM, ForPreTraining, .* got 'BertForSequenceClassification'"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
         "architectures: the head must be one of LMHeadModel, ForCausalLM, got"),
        ({"model_type": "bert", "tie_word_embeddings": False}, "tie_word_embeddings: a head with a matrix of its own"),
        ({"model_type": "gpt_neox", "attention_bias": False}, "attention_bias: attention without biases"),
        ({"model_type": "vit", "qkv_bias": False}, "qkv_bias: attention without biases is not supported, got False"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention: cross-attention is not supported"),
        ({"model_type": "gpt_neox", "hidden_size": 99, "num_attention_heads": 3},
         "features per head must be even where positions are rotary, got 33"),
    ],
)
def test_a_bad_config_json_says_what_is_wrong(
    config: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        build_workload(str(path))


YAML = """\
family: gpt
layers: 2
hidden: 64
heads: 4
seq_len: 32
vocab: 100
"""


def test_a_model_file_needs_six_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(YAML)
    workload = build_workload(str(path))
    assert workload.name == "mine" and len(workload) == 1 + 26 + 2
    assert workload.num_parameters == 2 * (12 * 64**2 + 13 * 64) + (128 + 32 + 2) * 64
    assert len(build_workload(str(path), overrides={"layers": 3})) == 1 + 39 + 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (YAML + "head: 3\n", "head: unknown key, did you mean 'heads'"),
        (YAML.replace("family: gpt", "family: gtp"), "unknown family 'gtp', did you mean 'gpt'"),
        (YAML.replace("family: gpt\n", ""), "family must be one of gpt, llama, bert, t5, vit"),
        (YAML.replace("hidden: 64", "hidden: 62"), "heads must divide hidden=62, got heads=4"),
        (YAML.replace("layers: 2", "layers: 1e12"), "layers: must be less than or equal to 16384"),
        (YAML + "layers: 3\n", "duplicate key 'layers'"),
    ],
)
def test_a_bad_model_file_says_what_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        build_workload(str(path))


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'gpt3-1.4b': did you mean 'gpt3-1.3b'"):
        build_workload("gpt3-1.4b")
    with pytest.raises(ValueError, match="no such file"):
        build_workload("absent.yaml")


def test_overrides_and_attention_are_checked() -> None:
    with pytest.raises(ValueError, match="layer: unknown key, did you mean 'layers'"):
        build_workload("gpt3-1.3b", overrides={"layer": 3})
    with pytest.raises(ValueError, match="attention must be one of plain, flash, got 'fast'"):
        build_workload("gpt3-1.3b", attention="fast")
    with pytest.raises(ValueError, match="relative position bias"):
        build_workload("t5-large-32", attention="flash")


def test_a_workload_is_built_once() -> None:
    assert build_workload("gpt3-1.3b") is build_workload("gpt3-1.3b")
    assert build_workload("gpt3-1.3b").fingerprint != build_workload("alpa-gpt-1.3b").fingerprint
