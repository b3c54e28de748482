"""A model of one's own in one YAML file: a family and its shape.

Example::

    family: gpt
    name: my-gpt
    layers: 12
    hidden: 768
    heads: 12
    seq_len: 1024
    vocab: 50257

Fields of each family are those of ``GPTSpec``, ``BertSpec``, ``T5Spec``, ``ViTSpec``, ``SwinSpec``, ``LlamaSpec``,
``ResNetSpec``, ``VggSpec``, ``GnmtSpec`` and ``XLNetSpec`` in ``workloads/models``; unknown ones are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datafiles.errors import DataFileError
from datafiles.names import nearest
from datafiles.schema import validated
from workloads.models.families import FAMILIES
from workloads.models.fields import ModelSpec


def spec_from_mapping(mapping: Mapping[str, Any], source: str) -> ModelSpec:
    """Return the specification that a model file's content describes.

    Args:
        mapping: The file's top level.
        source: Its path, for messages; its stem is the model's name if the file gives none.

    Raises:
        DataFileError: If the family or a key is unknown, or a value is out of range.

    >>> shape = {"family": "vit", "layers": 2, "hidden": 64, "heads": 4}
    >>> spec_from_mapping(shape, "small.yaml").name
    'small'
    """
    family = mapping.get("family")
    if not isinstance(family, str):
        known = ", ".join(FAMILIES)
        raise DataFileError(source, f"family must be one of {known}, got {family!r}; a model file needs it")
    if family not in FAMILIES:
        raise DataFileError(source, f"unknown family {family!r}, {nearest(family, FAMILIES)}")
    named = {"name": Path(source).name.split(".")[0] or "model", **mapping}
    return validated(FAMILIES[family].spec, named, source)
