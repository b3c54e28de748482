"""Runs of kernels as the engine needs them: device time, host time and the bound that joins them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of kernels launched one after another.

    Attributes:
        device_s: D, sum of kernel durations in seconds.
        host_s: H, sum of launch times in seconds.
        bound_s: L = max over j of (launches up to j + kernels from j on): no end before host start + L.
        lead_s: Launch time of the first kernel, and of whatever is launched before it.
        recorded: Seconds of ``device_s`` by origin: measured, interpolated, modelled.
    """

    device_s: float = 0.0
    host_s: float = 0.0
    bound_s: float = 0.0
    lead_s: float = 0.0
    recorded: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def then(self, other: Segment) -> Segment:
        """Return the two segments launched one after the other: exact, and associative."""
        return Segment(
            device_s=self.device_s + other.device_s,
            host_s=self.host_s + other.host_s,
            bound_s=max(self.bound_s + other.device_s, self.host_s + other.bound_s),
            lead_s=self.lead_s if self.device_s > 0 else self.host_s + other.lead_s,
            recorded=(
                self.recorded[0] + other.recorded[0],
                self.recorded[1] + other.recorded[1],
                self.recorded[2] + other.recorded[2],
            ),
        )

    @staticmethod
    def launch(host_s: float) -> Segment:
        """Return a pure host action: launching something that runs elsewhere."""
        return Segment(host_s=host_s, bound_s=host_s, lead_s=host_s)


EMPTY = Segment()
SOURCES = ("measured", "interpolated", "modelled")
"""Where a duration comes from, in the order of ``Segment.recorded``."""
