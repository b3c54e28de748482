"""Field types and the base class of model specifications."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

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


def head_dim_of(hidden: int, heads: int) -> int:
    """Return features per head.

    Raises:
        ValueError: If the heads do not divide the hidden size.
    """
    if hidden % heads:
        raise ValueError(f"heads must divide hidden={hidden}, got heads={heads}; or give head_dim")
    return hidden // heads


def padded_vocab(vocab: int, multiple: int) -> int:
    """Return ``vocab`` rounded up to a multiple, as frameworks do so that ranks share the table evenly.

    Source:
        Megatron-LM ``tokenizer.py``, ``make-vocab-size-divisible-by`` (128).

    >>> padded_vocab(50257, 128)
    50304
    """
    return -(-vocab // multiple) * multiple
