"""Models given as a Hugging Face ``config.json``; the ``transformers`` package is not needed.

Read: gpt2, gpt_neox, llama, mistral, qwen2, bert, roberta, vit and t5, with the heads that they are pre-trained
with; other heads, experts and what else is not modelled are refused. Keys that do not change shapes are ignored, absent
keys take the defaults of ``transformers``, but for the sizes of llama, mistral and qwen2. Vocabularies are not padded,
as there, unless ``vocab_multiple`` is added to the file: splits of the vocabulary may need it. The sequence length is
the longest the model has positions for, unless ``seq_len`` (of T5 ``decoder_seq_len`` too) is added. Attention is
counted in full where a model has a sliding window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from datafiles.errors import DataFileError
from datafiles.names import nearest
from datafiles.schema import validated
from workloads.models.families import FAMILIES
from workloads.models.fields import ModelSpec

_ABSENT = object()


class _Read(NamedTuple):
    """What a field of a specification has, and the key that it was read from, which errors name."""

    key: str
    value: Any


class _Config:
    """A config.json with typed, defaulted access and messages that name the key."""

    def __init__(self, mapping: Mapping[str, Any], source: str) -> None:
        self._mapping = mapping
        self._source = source

    def get(self, key: str, default: Any = _ABSENT) -> Any:
        """Return the value of ``key``; an absent or null one is the default."""
        value = self._mapping.get(key)
        if value is not None:
            return value
        if default is _ABSENT:
            raise DataFileError(self._source, f"{key}: is required of a {self.model_type} model, but missing")
        return default

    def read(self, key: str, default: Any = _ABSENT) -> _Read:
        """Return the value of ``key`` with its key; see `get`."""
        return _Read(key, self.get(key, default))

    def is_null(self, key: str) -> bool:
        """Return whether ``key`` is there without a value."""
        return key in self._mapping and self._mapping[key] is None

    def dropout(self, key: str, default: float) -> _Read:
        """Return a probability with its key; ``0`` and ``0.0`` mean the same."""
        value = self.get(key, default)
        return _Read(key, float(value) if type(value) is int else value)

    @property
    def model_type(self) -> Any:
        """The kind of model it describes."""
        return self._mapping.get("model_type")

    def refuse(self, key: str, value: object, why: str) -> None:
        """Raise if ``key`` has ``value``."""
        if self._mapping.get(key) == value:
            raise DataFileError(self._source, f"{key}: {why}, got {value!r}")

    def refuse_experts(self) -> None:
        """Raise if it has several experts in a layer."""
        for key in _EXPERTS:
            value = self._mapping.get(key)
            if value is not None and value != 1:
                raise DataFileError(self._source, f"{key}: mixtures of experts are not supported, got {value!r}")

    def refuse_other_heads(self, heads: Sequence[str]) -> None:
        """Raise if it names a model class whose name does not end in one of ``heads``; it need not name any."""
        for name in self.architectures.split():
            if not name.endswith(tuple(heads)):
                raise DataFileError(
                    self._source,
                    f"architectures: the head must be one of {', '.join(heads)}, got {name!r}; write one of these "
                    "if its cost is as good as that of your model's",
                )

    @property
    def architectures(self) -> str:
        """Names of the model classes, joined."""
        found = self._mapping.get("architectures")
        return " ".join(map(str, found)) if isinstance(found, list) else ""


def _gpt2(config: _Config) -> dict[str, Any]:
    return {
        "family": "gpt",
        "layers": config.read("n_layer", 12),
        "hidden": config.read("n_embd", 768),
        "heads": config.read("n_head", 12),
        "seq_len": config.read("n_positions", 1024),
        "num_positions": config.read("n_positions", 1024),
        "vocab": config.read("vocab_size", 50257),
        "ffn": config.read("n_inner", None),
        "dropout": config.dropout("resid_pdrop", 0.1),
        "attention_dropout": config.dropout("attn_pdrop", 0.1),
        "tied_embeddings": config.read("tie_word_embeddings", True),
    }


def _gpt_neox(config: _Config) -> dict[str, Any]:
    config.refuse("attention_bias", False, "attention without biases is not supported")
    return {
        "family": "gpt",
        "layers": config.read("num_hidden_layers", 44),
        "hidden": config.read("hidden_size", 6144),
        "heads": config.read("num_attention_heads", 64),
        "seq_len": config.read("max_position_embeddings", 2048),
        "vocab": config.read("vocab_size", 50432),
        "ffn": config.read("intermediate_size", 24576),
        "positions": "rotary",
        "parallel_residual": config.read("use_parallel_residual", True),
        "dropout": config.dropout("hidden_dropout", 0.0),
        "attention_dropout": config.dropout("attention_dropout", 0.0),
        "tied_embeddings": config.read("tie_word_embeddings", False),
    }


def _llama(config: _Config) -> dict[str, Any]:
    config.refuse("mlp_bias", True, "biases in the MLP are not supported")
    # Null is as many as heads for all of them; so is an absent key of llama.
    absent_kv_heads = {"mistral": 8, "qwen2": 32}.get(str(config.model_type))
    kv_heads = None if config.is_null("num_key_value_heads") else config.get("num_key_value_heads", absent_kv_heads)
    return {
        "family": "llama",
        "layers": config.read("num_hidden_layers"),
        "hidden": config.read("hidden_size"),
        "heads": config.read("num_attention_heads"),
        "kv_heads": _Read("num_key_value_heads", kv_heads),
        "head_dim": config.read("head_dim", None),
        "ffn": config.read("intermediate_size"),
        "seq_len": config.read("max_position_embeddings" if config.get("seq_len", None) is None else "seq_len"),
        "vocab": config.read("vocab_size"),
        "qkv_bias": config.read("attention_bias", config.model_type == "qwen2"),
        "output_bias": config.read("attention_bias", False),
        "tied_embeddings": config.read("tie_word_embeddings", False),
        "attention_dropout": config.dropout("attention_dropout", 0.0),
    }


def _bert(config: _Config) -> dict[str, Any]:
    config.refuse("tie_word_embeddings", False, "a head with a matrix of its own is not supported")
    roberta = config.model_type == "roberta"
    positions = config.get("max_position_embeddings", 514 if roberta else 512)
    # RoBERTa's positions begin after the padding index: two rows are never used.
    length = positions - 2 if roberta and isinstance(positions, int) else positions
    if roberta and positions in (1, 2):
        config.refuse("max_position_embeddings", positions, "two come before the first token, so it must be 3 or more")
    return {
        "family": "bert",
        "layers": config.read("num_hidden_layers", 12),
        "hidden": config.read("hidden_size", 768),
        "heads": config.read("num_attention_heads", 12),
        "ffn": config.read("intermediate_size", 3072),
        "seq_len": _Read("max_position_embeddings", length),
        "num_positions": _Read("max_position_embeddings", positions),
        "vocab": config.read("vocab_size", 50265 if roberta else 30522),
        "segments": config.read("type_vocab_size", 2),
        "next_sentence": "ForPreTraining" in config.architectures,
        "dropout": config.dropout("hidden_dropout_prob", 0.1),
        "attention_dropout": config.dropout("attention_probs_dropout_prob", 0.1),
    }


def _vit(config: _Config) -> dict[str, Any]:
    config.refuse("qkv_bias", False, "attention without biases is not supported")
    labels = config.get("id2label", None)
    return {
        "family": "vit",
        "layers": config.read("num_hidden_layers", 12),
        "hidden": config.read("hidden_size", 768),
        "heads": config.read("num_attention_heads", 12),
        "ffn": config.read("intermediate_size", 3072),
        "image": config.read("image_size", 224),
        "patch": config.read("patch_size", 16),
        "channels": config.read("num_channels", 3),
        "classes": config.read("num_labels", len(labels) if isinstance(labels, Mapping) and labels else 1000),
        "dropout": config.dropout("hidden_dropout_prob", 0.0),
        "attention_dropout": config.dropout("attention_probs_dropout_prob", 0.0),
    }


def _t5(config: _Config) -> dict[str, Any]:
    projection = str(config.get("feed_forward_proj", "relu"))
    if not projection.startswith("gated-") and projection not in ("relu", "gelu"):
        config.refuse("feed_forward_proj", config.get("feed_forward_proj"), "must be relu, gelu or gated-...")
    length = config.read("n_positions", 512)
    return {
        "family": "t5",
        "layers": config.read("num_layers", 6),
        "decoder_layers": config.read("num_decoder_layers", None),
        "hidden": config.read("d_model", 512),
        "heads": config.read("num_heads", 8),
        "head_dim": config.read("d_kv", 64),
        "ffn": config.read("d_ff", 2048),
        "seq_len": length,
        "decoder_seq_len": length,
        "vocab": config.read("vocab_size", 32128),
        "activation": "swiglu" if projection.startswith("gated-") else projection,
        "position_buckets": config.read("relative_attention_num_buckets", 32),
        "tied_embeddings": config.read("tie_word_embeddings", True),
        "dropout": config.dropout("dropout_rate", 0.1),
        "attention_dropout": config.dropout("dropout_rate", 0.1),
    }


_LANGUAGE_HEADS = ("LMHeadModel", "ForCausalLM")
_HEADS: Mapping[str, tuple[str, ...]] = {
    "bert": ("ForMaskedLM", "ForPreTraining", *_LANGUAGE_HEADS),
    "roberta": ("ForMaskedLM", *_LANGUAGE_HEADS),
    "vit": ("ForImageClassification",),
    "t5": ("ForConditionalGeneration",),
}
"""How the names of model classes end whose head is modelled; of others ``_LANGUAGE_HEADS``."""

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")

_READERS: Mapping[str, Callable[[_Config], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "bert": _bert,
    "roberta": _bert,
    "vit": _vit,
    "t5": _t5,
}


def spec_from_config(mapping: Mapping[str, Any], source: str) -> ModelSpec:
    """Return the specification of the model that a ``config.json`` describes.

    Args:
        mapping: The file's content.
        source: Its path, for messages; its folder (or stem) is the model's name if the file gives none.

    Raises:
        DataFileError: If the model type is not one of those above, or a value is missing or out of range.

    >>> spec_from_config({"model_type": "gpt2", "_name_or_path": "gpt2"}, "config.json").layers
    12
    """
    config = _Config(mapping, source)
    model_type = config.model_type
    if not isinstance(model_type, str):
        raise DataFileError(source, "model_type: is required of a Hugging Face config.json, but missing")
    config.refuse_experts()
    if model_type not in _READERS:
        raise DataFileError(
            source, f"model_type: {model_type!r} is not supported, {nearest(model_type, _READERS)}"
        )
    config.refuse_other_heads(_HEADS.get(model_type, _LANGUAGE_HEADS))
    config.refuse("add_cross_attention", True, "cross-attention is not supported")
    fields = _READERS[model_type](config)
    fields["name"] = str(config.get("_name_or_path", None) or _name_from(source))[:200]
    spec = FAMILIES[fields["family"]].spec
    if "vocab_multiple" in spec.model_fields:
        fields["vocab_multiple"] = config.read("vocab_multiple", 1)
    for added in ("seq_len", "decoder_seq_len"):
        if added in fields and config.get(added, None) is not None:
            fields[added] = config.read(added)
    names = {field: found.key for field, found in fields.items() if isinstance(found, _Read)}
    values = {field: found.value if isinstance(found, _Read) else found for field, found in fields.items()}
    given = {field: value for field, value in values.items() if value is not None}
    return validated(spec, given, source, names=names)


def _name_from(source: str) -> str:
    path = Path(source)
    named_after = path.parent.name if path.name == "config.json" else path.name.split(".")[0]
    return named_after or "model"
