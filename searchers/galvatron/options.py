"""What the variants of Galvatron differ in."""

from __future__ import annotations

from dataclasses import dataclass

from searchers.galvatron.microbatches import RULES
from searchers.galvatron.strategies import DATA, LEVELS

PARTITIONS = ("base", "memory", "time", "bi-objective")
SCHEDULES = ("gpipe", "1f1b")
MEMORY_MODELS = ("shapes", "released")
TIME_MODELS = ("tables", "released")
OUTSIDE = ("layers", "data")


@dataclass(frozen=True)
class Options:
    """Choices of one variant.

    Attributes:
        kinds: Kinds of parallelism inside a stage.
        pipeline: Whether more than one stage is tried.
        checkpoint: Whether activation checkpointing is a dimension.
        mix_data_and_sharded: Whether DP and SDP may meet in one tree (takeaway 3 says no).
        partition: ``base`` (the release's memory-balanced filling), ``memory`` (p_m), ``time`` (p_t) or
            ``bi-objective`` (Algorithm 2).
        schedule: ``gpipe`` or ``1f1b``.
        microbatches: Rule of `searchers.galvatron.microbatches`.
        unequal_microbatches: Where microbatches do not divide the batch the last is smaller, as PyTorch cuts it.
        memory: ``shapes`` (Eq. 2 on the shared cost tables) or ``released`` (the first releases' coarser model).
        time: ``tables`` (the shared cost tables and Eq. 9) or ``released`` (the first release's coarser model; GPipe).
        outside: Embedding and head are cut as the layers next to them (``layers``), or whole on every device of their
            stage, which shares their samples (``data``, as in the first releases); the estimator counts them with
            their layers all the same.
        granularity_bytes: Memory step of the dynamic programming.
        fused_layers: Consecutive equal layers that share a strategy (section IV-A3); 1: every layer alone.
        overlap_slowdown: Whether overlap slows both sides.
        paper: Eq. 4 and Algorithm 3 as printed, the sum of Eq. 9 as printed, and the batch stops at the first
            that does not fit.
    """

    kinds: tuple[str, ...] = LEVELS
    pipeline: bool = True
    checkpoint: bool = True
    mix_data_and_sharded: bool = False
    partition: str = "bi-objective"
    schedule: str = "1f1b"
    microbatches: str = "released"
    unequal_microbatches: bool = False
    memory: str = "shapes"
    time: str = "tables"
    outside: str = "layers"
    granularity_bytes: int = 16 << 20
    fused_layers: int = 1
    overlap_slowdown: bool = True
    paper: bool = False

    def __post_init__(self) -> None:
        choices = (
            ("partition", PARTITIONS), ("schedule", SCHEDULES), ("microbatches", RULES), ("memory", MEMORY_MODELS),
            ("time", TIME_MODELS), ("outside", OUTSIDE),
        )  # fmt: skip
        for name, allowed in choices:
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        if self.time == "released" and self.schedule != "gpipe":
            raise ValueError(f"time 'released' is of releases that ran gpipe, got schedule {self.schedule!r}")
        if self.time == "released" and self.microbatches not in ("released", "table"):
            raise ValueError(f"time 'released' goes with microbatches released or table, got {self.microbatches!r}")
        if not self.kinds or DATA not in self.kinds or set(self.kinds) - set(LEVELS):
            raise ValueError(f"kinds must be of {', '.join(LEVELS)}, dp among them, got {self.kinds}")
        for name in ("granularity_bytes", "fused_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
