"""Models by name, by YAML file, or by Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from datafiles.loader import load_mapping
from datafiles.names import nearest
from datafiles.schema import validated
from workloads.huggingface import spec_from_config
from workloads.layer_profile import (
    LayerProfile,
    is_piper_mapping,
    is_profile_name,
    load_layer_profile,
    piper_layer_profile,
)
from workloads.model_file import spec_from_mapping
from workloads.models.blocks import check_attention
from workloads.models.families import FAMILIES
from workloads.models.fields import ModelSpec
from workloads.operators import Workload

FILE_SUFFIXES = (".yaml", ".yml", ".json", ".yaml.gz", ".yml.gz", ".json.gz")


def model_names() -> tuple[str, ...]:
    """Return the names of all preset models, family by family."""
    return tuple(name for family in FAMILIES.values() for name in family.presets)


def model_spec(name: str) -> ModelSpec:
    """Return the specification of a model.

    Args:
        name: A preset name; the path of a model file (see ``workloads/model_file.py``) or of a Hugging Face
            ``config.json`` (it has a ``model_type``); or a folder that holds one of the latter.

    Raises:
        ValueError: If there is no such model; the message has the nearest names. If the file breaks a rule.
    """
    for family in FAMILIES.values():
        if name in family.presets:
            return family.presets[name]
    path = Path(name)
    if name.lower().endswith(FILE_SUFFIXES):
        return _spec_from_file(path)
    if name.strip() and "\0" not in name and (path / "config.json").is_file():
        return _spec_from_file(path / "config.json")
    raise ValueError(f"unknown model {name!r}: {nearest(name, model_names())}; or give a .yaml or .json file")


def _spec_from_file(path: Path) -> ModelSpec:
    mapping = load_mapping(path)
    read = spec_from_config if "model_type" in mapping else spec_from_mapping
    return read(mapping, str(path))


def build_workload(
    name: str, *, attention: str = "plain", overrides: Mapping[str, object] | None = None
) -> Workload:
    """Return the workload of a model.

    Args:
        name: See :func:`model_spec`; or a layer profile (see ``workloads/layer_profile.py``): ``vgg19_b32.csv``,
            ``alexnet.csv@256``, or one of Piper's JSON inputs.
        attention: ``"plain"`` (score, softmax, dropout and context are operators) or ``"flash"`` (one).
        overrides: Fields of the model's specification to replace (``layers``, ``seq_len``, ...).

    Returns:
        The workload; the same object for the same arguments (it is immutable).

    Raises:
        ValueError: If the name, a field or the attention is unknown, or the shapes do not fit.

    >>> len(build_workload("gpt3-1.3b")), len(build_workload("gpt3-1.3b", overrides={"layers": 2}))
    (315, 29)
    """
    check_attention(attention)
    if profile := _profile_workload(name):
        return profile
    spec = model_spec(name)
    if overrides:
        spec = validated(type(spec), {**spec.model_dump(), **overrides}, f"model {name}")
    return build_from_spec(spec, attention)


def _profile_workload(name: str) -> Workload | None:
    """Return the workload of a layer profile, or None if the name is not that of one."""
    if is_profile_name(name):
        return _workload_of_profile(load_layer_profile(name))
    if name.lower().endswith((".json", ".json.gz")) and Path(name).is_file():
        mapping = load_mapping(name)
        return _workload_of_profile(piper_layer_profile(mapping, name)) if is_piper_mapping(mapping) else None
    return None


@lru_cache(maxsize=32)
def _workload_of_profile(profile: LayerProfile) -> Workload:
    return profile.workload()


@lru_cache(maxsize=32)
def build_from_spec(spec: ModelSpec, attention: str = "plain") -> Workload:
    """Return the workload of a specification (cached)."""
    return FAMILIES[spec.family_name].build(spec, attention)
