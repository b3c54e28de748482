"""Field types and the base class of model specifications."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from datafiles.schema import FileModel

Layers = Annotated[int, Field(ge=1, le=16_384)]
Width = Annotated[int, Field(ge=1, le=2**24)]
Length = Annotated[int, Field(ge=1, le=2**24)]
Count = Annotated[int, Field(ge=0, le=2**24)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class ModelSpec(FileModel):
    """Shape of one model: what a model file holds. One subclass per family.

    Attributes:
        name: Model name as users write it.
    """

    family_name: ClassVar[str]

    name: str = Field(min_length=1, max_length=200)


class TransformerSpec(ModelSpec):
    """What specifications of one stack of equal transformer layers share.

    Attributes:
        layers, hidden, heads: Transformer layers, width, attention heads.
        ffn: Width inside the MLP; four times ``hidden`` if not given.
        dropout, attention_dropout: Probabilities.
    """

    layers: Layers
    hidden: Width
    heads: Width
    ffn: Width | None = None
    dropout: Probability = 0.1
    attention_dropout: Probability = 0.1

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        head_dim_of(self.hidden, self.heads)
        return self


class TextSpec(TransformerSpec):
    """The same over text.

    Attributes:
        vocab: Tokens known, rounded up to ``vocab_multiple``.
        seq_len: Tokens per sample.
        num_positions: Rows of a learned position table, at least ``seq_len``.
    """

    vocab: Width
    seq_len: Length
    num_positions: Length | None = None
    vocab_multiple: int = Field(default=128, ge=1, le=2**20)

    @model_validator(mode="after")
    def _check_positions(self) -> Self:
        if self.num_positions is not None and self.num_positions < self.seq_len:
            raise ValueError(f"num_positions={self.num_positions} must be at least seq_len={self.seq_len}")
        return self


def head_dim_of(hidden: int, heads: int, *, or_given: bool = False) -> int:
    """Return features per head.

    Args:
        hidden, heads: Of the model.
        or_given: It may be said apart, as ``head_dim``.

    Raises:
        ValueError: If the heads do not divide the hidden size.
    """
    if hidden % heads:
        instead = "; or give head_dim" if or_given else ""
        raise ValueError(f"heads must divide hidden={hidden}, got heads={heads}{instead}")
    return hidden // heads


def check_rotary(head_dim: int) -> None:
    """Check that rotary positions can turn a head, which they do by pairs of features.

    Raises:
        ValueError: If it has an odd number of features.
    """
    if head_dim % 2:
        raise ValueError(f"features per head must be even where positions are rotary, got {head_dim}")


def padded_vocab(vocab: int, multiple: int) -> int:
    """Return ``vocab`` rounded up to a multiple, as frameworks do so that ranks share the table evenly.

    Source:
        Megatron-LM ``tokenizer.py``, ``make-vocab-size-divisible-by`` (128).

    >>> padded_vocab(50257, 128)
    50304
    """
    return -(-vocab // multiple) * multiple
