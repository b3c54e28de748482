"""What a plan makes of measured operator times: how much its devices disturb each other, and what a pass costs more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hardware_models.profile import HOST, OperatorProfile


@dataclass(frozen=True)
class ProfileScaling:
    """Times of a plan's operators as a linear function of profiled ones.

    Attributes:
        factor: On both phases.
        backward_factors: On the backward phase besides, by role; 1 where a role is not named.
        extra_forward_s, extra_backward_s: Added to every operator; below 0 in cases that earlier versions wrote.
        host_factor: On what the host takes, where a row says.
    """

    factor: float = 1.0
    backward_factors: Mapping[str, float] = field(default_factory=dict)
    extra_forward_s: float = 0.0
    extra_backward_s: float = 0.0
    host_factor: float = 1.0

    def apply(self, profile: OperatorProfile) -> OperatorProfile:
        """Return the profile with scaled times; none is below zero."""
        rows = tuple(
            replace(
                row,
                forward_s=max(0.0, row.forward_s * self.factor + self.extra_forward_s),
                backward_s=max(
                    0.0,
                    row.backward_s * self.factor * self.backward_factors.get(row.role, 1.0) + self.extra_backward_s,
                ),
                **{name: getattr(row, name) * self.host_factor for name in HOST if getattr(row, name) is not None},
            )
            for row in profile.rows
        )
        return replace(profile, rows=rows)
