"""Which effects a simulation contains. Each can be switched off by name, so each is an ablation."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from datafiles.names import nearest


@dataclass(frozen=True)
class Fidelity:
    """Switches, all on by default.

    Attributes:
        host: Hosts launch kernels at a finite rate.
        overlap_slowdown: Computation and communication slow each other while both run on a device.
        power_limit: Products are slower where a GPU would draw more than its power limit.
        contention: Tasks share links and NICs.
        tensor_parallel: Collectives inside and between operators over tensor axes.
        resharding: Collectives where neighbouring operators want other layouts.
        handover: Devices stand still around collectives between operators (``Runtime.handover_s``).
        gradient_sync: Data-parallel reduction of gradients, tied weights included.
        parameter_gather: ZeRO gathering of sharded parameters.
        transfers: Sending activations and gradients between stages takes time.
        recompute: Recomputed segments take time.
        optimizer: Optimizer step and gradient norm.
        allocator: Replay the caching allocator; else ``fits`` compares live bytes.
        merge: Operators between which nothing can start or end are one task (no effect on times but where a
            launch-bound run meets a wait or an overlap: up to 2 % less, or 0.1 % more).
        symmetry: Devices that behave alike are simulated once (no effect on times).
    """

    host: bool = True
    overlap_slowdown: bool = True
    power_limit: bool = True
    contention: bool = True
    tensor_parallel: bool = True
    resharding: bool = True
    handover: bool = True
    gradient_sync: bool = True
    parameter_gather: bool = True
    transfers: bool = True
    recompute: bool = True
    optimizer: bool = True
    allocator: bool = True
    merge: bool = True
    symmetry: bool = True

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the switches as the command line spells them (``overlap-slowdown``)."""
        return tuple(field.name.replace("_", "-") for field in fields(Fidelity))

    def without(self, *names: str) -> Fidelity:
        """Return a copy with the named effects off.

        Raises:
            ValueError: If a name is unknown; the message lists the nearest.
        """
        known = self.names()
        for name in names:
            if name.replace("_", "-") not in known:
                raise ValueError(f"unknown effect {name!r} to switch off; {nearest(name, known)}")
        return replace(self, **{name.replace("-", "_"): False for name in names})

    @staticmethod
    def ideal() -> Fidelity:
        """Return computation alone: every effect off that the closed forms of pipelines leave out."""
        effects = [field.name for field in fields(Fidelity) if field.name not in ("merge", "symmetry", "recompute")]
        return Fidelity().without(*effects)
