"""Which GPU a table of runs says, in its own words: compared with the cluster's, never taken from there."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hardware_models.gpus import gpu_names


def family_of(gpu: str) -> str:
    """Return the first part of a GPU type's name, which tables of runs write too.

    >>> family_of("a100-sxm4-80gb")
    'a100'
    """
    return gpu.split("-")[0]


def families_said(text: str) -> frozenset[str]:
    """Return the families of known GPU types that a text names.

    >>> sorted(families_said("8x NVIDIA A100-SXM4-80GB")), sorted(families_said("L40S"))
    (['a100'], [])
    """
    words = _lower(text)
    families = {family_of(name) for name in gpu_names()}
    return frozenset(each for each in families if re.search(rf"(?<![a-wyz0-9]){each}(?![0-9])", words))


def check_gpu(text: str, types: Sequence[str]) -> None:
    """Refuse a run on another GPU than the cluster has: one table may hold several machines.

    Args:
        text: What the table says; nothing known refuses nothing (``run_remarks.unknown_gpus``).
        types: The cluster's.

    Raises:
        ValueError: If it says another one, or another size of memory.
    """
    said = families_said(text)
    of_type = {name: set(re.findall(r"(\d+)gb", name)) for name in gpu_names()}
    # Other sizes than GPUs have are of a node.
    sizes = set(re.findall(r"(\d+) ?gb(?![/p])", _lower(text))) & set().union(*of_type.values()) if said else set()
    own = set().union(*(of_type[name] for name in types))
    if (said and not said & {family_of(name) for name in types}) or (sizes and own and not sizes & own):
        raise ValueError(
            f"gpu must be one of the cluster's, {', '.join(types)}, got {text}; name its cluster in a column "
            "(windtunnel list clusters), or leave the column gpu out"
        )


def _lower(text: str) -> str:
    return re.sub(r"rtx[ _-]*3090", "rtx3090", text.lower())
