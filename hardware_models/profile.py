"""Measured operator tables: what an operator takes, keeps and reserves, by split and microbatch size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Literal

Split = Literal["default", "alternative"]
SPLITS: tuple[Split, ...] = ("default", "alternative")

Key = tuple[str, int, str]


@dataclass(frozen=True)
class ProfileRow:
    """One operator as measured.

    Attributes:
        role: Profile role of the operator, e.g. ``attention_qkv`` (``Workload.profile_roles``).
        samples: Samples per device in one microbatch.
        tensor_size: Tensor-parallel ranks.
        split: ``default`` (Megatron's) or ``alternative`` (Aceso's other one).
        forward_s, backward_s: Seconds; backward holds both input and weight gradients.
        saved_bytes: What forward leaves allocated for backward.
        forward_workspace_bytes, backward_workspace_bytes: Allocator growth beyond that during the phase.
        input_bytes, output_bytes: Boundary tensors, passed-through ones included.
        parameter_bytes: Weights on this device in their training type.
        includes_collectives: The operator's own tensor-parallel collectives are inside the times.
        num_groups: Groups that ran at once on the machine while this was measured.
        source: Where the row comes from.
        forward_host_s, backward_host_s: What the host takes to launch either pass, whatever the device does; None where
            it was not measured, and the model's stands for it.
        recomputed_host_s: What recomputation adds to both: the second forward pass, and what keeping and finding its
            tensors costs. None: what a forward pass takes.
        forward_taken_bytes, backward_taken_bytes: What the allocator held at most while the pass ran, beyond what it
            held before: results, and what they are made in. None where it was not measured.
    """

    role: str
    samples: int
    tensor_size: int
    split: Split
    forward_s: float
    backward_s: float
    saved_bytes: float
    forward_workspace_bytes: float
    backward_workspace_bytes: float
    input_bytes: float
    output_bytes: float
    parameter_bytes: float
    includes_collectives: bool
    num_groups: int
    source: str
    forward_host_s: float | None = None
    backward_host_s: float | None = None
    recomputed_host_s: float | None = None
    forward_taken_bytes: float | None = None
    backward_taken_bytes: float | None = None

    def __post_init__(self) -> None:
        where = f"profile row {self.role!r} ({self.source})"
        if self.split not in SPLITS:
            raise ValueError(f"{where}: split must be one of {', '.join(SPLITS)}, got {self.split!r}")
        if min(self.samples, self.tensor_size, self.num_groups) < 1:
            raise ValueError(
                f"{where}: samples, tensor_size and num_groups must be at least 1, got "
                f"{self.samples}, {self.tensor_size}, {self.num_groups}"
            )
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not 0 <= value < float("inf"):
                raise ValueError(f"{where}: {item.name} must be finite and not negative, got {value}")


@dataclass(frozen=True)
class ProfileLookup:
    """An answer of the table: the row, and whether it was ``"measured"`` or ``"interpolated"``.

    Also ``"modelled"``: the nearest row, grown as the model has it.
    """

    row: ProfileRow
    source: Literal["measured", "interpolated", "modelled"]


HOST = ("forward_host_s", "backward_host_s", "recomputed_host_s")
"""Columns of the host."""
TAKEN = ("forward_taken_bytes", "backward_taken_bytes")
"""Columns of the allocator."""
OPTIONAL = (*HOST, *TAKEN)
"""Columns that need not be there."""

INTERPOLATED = (
    "forward_s", "backward_s", "saved_bytes", "forward_workspace_bytes", "backward_workspace_bytes",
    "input_bytes", "output_bytes", *OPTIONAL,
)  # fmt: skip
"""Columns that depend on the number of samples."""


@dataclass(frozen=True)
class OperatorProfile:
    """All rows of one model on one GPU type.

    Attributes:
        model: Model the rows describe, in the source's words.
        gpu_type: GPU type they were measured on; the cost tables use them on no other.
        dtype: Type of activations.
        rows: In file order.
        source: Repository, file, date.
        kernels_only: Times are those of an operator's kernels, however long its host takes; else they are of the
            operator by itself, which takes no less than its host.
    """

    model: str
    gpu_type: str
    dtype: str
    rows: tuple[ProfileRow, ...]
    source: str
    kernels_only: bool = False

    def __post_init__(self) -> None:
        seen: set[tuple[str, int, int, str]] = set()
        for row in self.rows:
            key = (row.role, row.samples, row.tensor_size, row.split)
            if key in seen:
                raise ValueError(
                    f"profile of {self.model}: each (role, samples, tensor_size, split) must appear "
                    f"once, got {key} twice; keep one"
                )
            seen.add(key)

    @cached_property
    def _series(self) -> Mapping[Key, Mapping[int, ProfileRow]]:
        table: dict[Key, dict[int, ProfileRow]] = {}
        for row in self.rows:
            table.setdefault((row.role, row.tensor_size, row.split), {})[row.samples] = row
        return {key: dict(sorted(series.items())) for key, series in table.items()}

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """Roles the table knows, in order of first appearance."""
        return tuple(dict.fromkeys(row.role for row in self.rows))

    def lookup(
        self, role: str, samples: int, tensor_size: int, split: str = "default"
    ) -> ProfileLookup | None:
        """Return the measured row, or one interpolated linearly in samples between measured neighbours.

        Returns:
            None where the role, degree or split is unknown or ``samples`` lies outside the measured range.
        """
        series = self._series.get((role, tensor_size, split))
        if series is None:
            return None
        if samples in series:
            return ProfileLookup(series[samples], "measured")
        below = max((count for count in series if count < samples), default=None)
        above = min((count for count in series if count > samples), default=None)
        if below is None or above is None:
            return None
        part = (samples - below) / (above - below)
        low, high = series[below], series[above]
        values = {item.name: getattr(low, item.name) for item in fields(ProfileRow)}
        for name in INTERPOLATED:
            ends = getattr(low, name), getattr(high, name)
            values[name] = None if None in ends else ends[0] * (1 - part) + ends[1] * part
        values["samples"] = samples
        return ProfileLookup(ProfileRow(**values), "interpolated")

    def nearest(self, role: str, samples: int, tensor_size: int, split: str = "default") -> ProfileRow | None:
        """Return the measured row of the nearest number of samples; None where the role, degree or split is unknown."""
        series = self._series.get((role, tensor_size, split))
        return series[min(series, key=lambda count: abs(count - samples))] if series else None

    def nearest_degree(self, role: str, tensor_size: int, split: Split = "default") -> tuple[int, Split] | None:
        """Return the nearest degree and split with rows of a role that hold no collectives.

        Of the same split, else of the default one; the largest degree that is not above, else the smallest above.
        """
        for word in dict.fromkeys((split, SPLITS[0])):
            sizes = [
                size
                for (name, size, own), series in self._series.items()
                if (name, own) == (role, word) and not any(row.includes_collectives for row in series.values())
            ]
            below = max((size for size in sizes if size <= tensor_size), default=None)
            if sizes:
                return below or min(sizes), word
        return None

    def save(self, path: str | Path) -> None:
        """Write the profile in the native format (``.yaml`` or ``.json``)."""
        from hardware_models.profile_file import save_profile

        save_profile(self, path)

    @staticmethod
    def load(path: str | Path) -> OperatorProfile:
        """Read a profile in the native format."""
        from hardware_models.profile_file import load_profile

        return load_profile(path)
