"""A machine's constants times a factor each: what whole iterations can say of a machine that nobody profiled.

Every factor stands for one thing that a calibration file can hold, and moves nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from datafiles.names import nearest
from hardware_models.calibrated import Calibration, GpuConstants
from hardware_models.cluster import Cluster
from hardware_models.gpus import EfficiencyCurves, GpuType, curves_of
from hardware_models.links import LinkType, NetworkType

FACTORS: Mapping[str, str] = MappingProxyType(
    {
        "products": "rate of matrix products, convolutions and fused attention",
        "memory": "rate of kernels bound by memory, the optimizer's too",
        "host": "host seconds: of launches, and of the framework per operator, pass and collective",
        "links": "rate of the links inside a node",
        "network": "rate of the network between nodes",
        "overlap": "what computation and communication lose while both run (the slowdown less 1)",
    }
)
"""By name, what is multiplied."""


def named(words: str) -> tuple[str, ...]:
    """Return the factors that a list of words names; ``all`` names all.

    Raises:
        ValueError: If there is none of a name.

    >>> named("links, overlap")
    ('links', 'overlap')
    """
    if words.strip() == "all":
        return tuple(FACTORS)
    found = tuple(word.strip() for word in words.split(","))
    for word in found:
        if word not in FACTORS:
            raise ValueError(f"a constant must be all or one of {', '.join(FACTORS)}, got {word!r}; "
                             f"{nearest(word, tuple(FACTORS))}")  # fmt: skip
    return tuple(dict.fromkeys(found))


def with_factors(cluster: Cluster, factors: Mapping[str, float], source: str) -> Calibration:
    """Return a calibration that holds the cluster's own constants times factors; what has factor 1 is left out.

    Shares of a peak end at 1: beyond it a factor moves nothing.

    Args:
        cluster: Any.
        factors: Above 0, by a name of FACTORS.
        source: Of the factors, in words.
    """
    moved = {name: factor for name, factor in factors.items() if factor != 1}
    unknown = sorted(set(moved) - set(FACTORS))
    if unknown or not all(factor > 0 for factor in moved.values()):
        raise ValueError(f"factors must be above 0 and of {', '.join(FACTORS)}, got {dict(factors)}")
    gpus = {node.gpu.name: _gpu(node.gpu, moved, source) for node in cluster.nodes}
    links = {node.preset: _links(node.links, moved["links"], source) for node in cluster.nodes if "links" in moved}
    networks = {
        node.preset: _network(node.network, moved["network"], source) for node in cluster.nodes if "network" in moved
    }
    return Calibration(
        source=source,
        gpus={name: constants for name, constants in gpus.items() if constants.given()},
        links=links,
        networks=networks,
    )


def _gpu(gpu: GpuType, factors: Mapping[str, float], source: str) -> GpuConstants:
    memory, overlap = factors.get("memory", 1.0), factors.get("overlap", 1.0)
    lost = (gpu.overlap_slowdown_computation - 1, gpu.overlap_slowdown_communication - 1)
    return GpuConstants(
        curves=_curves(curves_of(gpu), factors, source) if {"products", "memory"} & set(factors) else None,
        host_factor=gpu.host_factor * factors["host"] if "host" in factors else None,
        optimizer_bandwidth_fraction=min(1.0, gpu.optimizer_bandwidth_fraction * memory) if memory != 1 else None,
        overlap_slowdown_computation=1 + overlap * lost[0] if overlap != 1 else None,
        overlap_slowdown_communication=1 + overlap * lost[1] if overlap != 1 else None,
    )


def _curves(curves: EfficiencyCurves, factors: Mapping[str, float], source: str) -> EfficiencyCurves:
    products, memory = factors.get("products", 1.0), factors.get("memory", 1.0)
    attention = {
        name: min(1.0, getattr(curves.attention, name) * products) for name in ("forward", "backward")
    }
    return EfficiencyCurves(
        matmul={
            dtype: curve.model_copy(
                update={
                    "limit": {role: min(1.0, share * products) for role, share in curve.limit.items()},
                    "bandwidth_fraction": min(1.0, curve.bandwidth_fraction * memory),
                    "source": source,
                }
            )
            for dtype, curve in curves.matmul.items()
        },
        memory=curves.memory.model_copy(
            update={
                "fraction": {pattern: min(1.0, share * memory) for pattern, share in curves.memory.fraction.items()},
                "source": source,
            }
        ),
        attention=curves.attention.model_copy(update={**attention, "source": source}),
        convolutions=curves.convolutions,
        power=curves.power,
    )


def _links(links: LinkType, factor: float, source: str) -> LinkType:
    rates = ("link_bytes_per_s", "point_to_point_bytes_per_s", "fallback_bytes_per_s", "bridge_bytes_per_s")
    scaled = {name: getattr(links, name) * factor for name in rates}
    local = {collective: rate * factor for collective, rate in links.local_bytes_per_s.items()}
    return links.model_copy(update={**scaled, "local_bytes_per_s": local, "source": source})


def _network(network: NetworkType, factor: float, source: str) -> NetworkType:
    return network.model_copy(
        update={"nominal_bytes_per_s": network.nominal_bytes_per_s * factor, "source": source}
    )
