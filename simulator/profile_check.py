"""Whether a measured operator table is of the model that it is to price."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from hardware_models.calibrated import Calibration
from hardware_models.profile import OperatorProfile, ProfileRow
from hardware_models.runtime import Runtime
from workloads.kinds.base import DTYPE_BYTES
from workloads.operators import Workload

WEIGHT_BYTES = (2, 4)
"""Of an element of what trains: 16 or 32 bits."""
TOLERANCE = 0.05
"""Of sizes: published tables are rounded, and pad a vocabulary in other ways."""
ROUNDING_BYTES = 4096
"""Of sizes too, such as of norms in tables in MiB."""


def check_profile(
    calibration: Calibration, profile: OperatorProfile | None, workload: Workload, runtime: Runtime
) -> None:
    """Refuse a calibration whose operators are another model's, or that has nothing but operators nothing here uses.

    Args:
        calibration: What was loaded.
        profile: Its operators, where they are of the cluster's GPUs.
        workload: What is trained.
        runtime: Whose number format must be the operators'.

    Raises:
        ValueError: If weights or sequences of the rows are not the model's, or the rows are of other operators or of
            another number format and nothing else was calibrated.
    """
    if profile is None:
        return
    others = calibration.collectives or calibration.gpus or calibration.links or calibration.networks
    known = {op.role for op in workload.operators}.union(workload.profile_roles) & set(profile.roles)
    dtype = runtime.implementation.dtype
    if not others and not known:
        raise ValueError(
            f"the profile must be of operators of {workload.name} ({_some(op.role for op in workload.operators)}), got "
            f"{_some(profile.roles)}; profile this model, or leave --profile out"
        )
    if not others and profile.dtype != dtype:
        raise ValueError(
            f"the profile must be in the number format that {runtime.name} trains in, {dtype}, got {profile.dtype}; "
            "profile with this runtime, name another, or leave --profile out"
        )
    if profile.dtype == dtype:
        _check_sizes(profile, workload)


def _check_sizes(profile: OperatorProfile, workload: Workload) -> None:
    elements: dict[str, set[int]] = {}
    outputs: dict[str, set[int]] = {}
    for index, op in enumerate(workload.operators):
        for role in {op.role, workload.profile_roles[index]}:
            elements.setdefault(role, set()).add(sum(prod(each.shape) for each in workload.parameters(index)))
            outputs.setdefault(role, set()).add(sum(prod(workload.tensors[name]) for name in op.outputs))
    # What tensor parallelism leaves of an operator is its own matter.
    whole = [row for row in profile.rows if row.tensor_size == 1 and row.split == "default" and row.role in elements]
    for row in whole:
        wanted = [count * width for count in elements[row.role] for width in WEIGHT_BYTES]
        if row.parameter_bytes > 0 and not any(_alike(row.parameter_bytes, size) for size in wanted):
            raise ValueError(
                f"the profile must be of {workload.name}, whose {row.role} has {max(elements[row.role]):,} weights of "
                f"{' or '.join(map(str, WEIGHT_BYTES))} bytes, got {row.parameter_bytes:,.0f} bytes of weights "
                f"(a profile of {profile.model}); profile this model, or leave --profile out"
            )
    # Tensors that are only passed through count in some tables; what an operator makes itself is never less, and in
    # some operator it is all.
    ratio = min((_ratio(row, outputs[row.role], profile.dtype) for row in whole if row.output_bytes > 0), default=1.0)
    if not 1 / 1.2 < ratio < 1.2:
        raise ValueError(
            f"the profile must be of {workload.name} with samples of {workload.tokens_per_sample:,} tokens, got one "
            f"whose tensors are {ratio:.3g} times those (a profile of {profile.model}): its sequences have another "
            "length; profile this model, or leave --profile out"
        )


def _alike(size: float, wanted: int) -> bool:
    return abs(size - wanted) <= TOLERANCE * wanted + ROUNDING_BYTES


def _ratio(row: ProfileRow, outputs: Iterable[int], dtype: str) -> float:
    """Return an operator's outputs over the model's."""
    return min(row.output_bytes / row.samples / (count * DTYPE_BYTES[dtype]) for count in outputs if count)


def _some(names: Iterable[str]) -> str:
    few = list(dict.fromkeys(names))
    return ", ".join(few[:3]) + (", ..." if len(few) > 3 else "") if few else "none"
