"""The price of one collective or transfer when it runs alone, and what it uses of each link."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Communication:
    """A collective or transfer alone on an idle cluster; only the engine lets them share.

    Attributes:
        latency_s: Seconds before data flow at full rate (launch, protocol, ring steps).
        work_s: Seconds of data flow alone.
        shares: ``(resource, fraction)``: fraction in (0, 1] of that resource's capacity used while data
            flow. Resources are named strings such as ``node0/nic0/out`` or ``node0/nvlink/0-1``.
        source: ``"measured"``, ``"interpolated"`` or ``"modelled"``.
    """

    latency_s: float
    work_s: float
    shares: tuple[tuple[str, float], ...] = ()
    source: str = "modelled"

    @property
    def alone_s(self) -> float:
        """Seconds from start to end on an idle cluster."""
        return self.latency_s + self.work_s
