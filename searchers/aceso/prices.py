"""What Aceso's performance model says of a configuration and of its stages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StagePrice:
    """One stage of a configuration.

    Attributes:
        forward_s, backward_s, recompute_s, transfer_s, reshard_s: Seconds per microbatch.
        sync_s: Seconds per iteration.
        memory_bytes: Peak on one GPU.
        flags: A byte per operator: recomputed or not.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    transfer_s: float
    reshard_s: float
    sync_s: float
    memory_bytes: float
    flags: bytes

    @property
    def time_s(self) -> float:
        """Seconds per microbatch."""
        return self.forward_s + self.backward_s + self.recompute_s + self.transfer_s + self.reshard_s


@dataclass(frozen=True)
class Price:
    """A whole configuration.

    Attributes:
        iteration_s: Predicted iteration time; infinite if a stage cannot run as configured.
        stages: Its stages.
        limit_bytes: What memory must not exceed.
    """

    iteration_s: float
    stages: tuple[StagePrice, ...]
    limit_bytes: float

    @property
    def memory_bytes(self) -> float:
        """Peak of the fullest stage."""
        return max(stage.memory_bytes for stage in self.stages)

    @property
    def fits(self) -> bool:
        """No stage needs more than the limit."""
        return self.memory_bytes <= self.limit_bytes

    @property
    def flags(self) -> bytes:
        """Recomputed operators of the model."""
        return b"".join(stage.flags for stage in self.stages)

    @property
    def slowest(self) -> float:
        """Seconds per microbatch of the slowest stage."""
        return max(stage.time_s for stage in self.stages)

    def better_than(self, other: Price) -> bool:
        """Feasible before infeasible, then faster; of two that do not fit, the one that needs less."""
        if self.fits != other.fits:
            return self.fits
        if not self.fits:
            return self.memory_bytes < other.memory_bytes
        return self.iteration_s < other.iteration_s
