"""Fit the link constants of a machine type to published collectives: at most a dozen, whatever the group's shape.

Rows used: Alpa's p3.16xlarge and A100 databases, f16, every even power of two from 16 KiB a rank; f32 and other sizes
are reported. All-reduce, all-gather and reduce-scatter have most constants; all-to-alls of p3 inside a node, from
64 MiB, two of their own. ``collectives_measured.csv``: vTrain V100 (2..8 GPUs without 5, which holds no ring) and A100
(2..8), Vidur H100 DGX (1 MiB and more). ``check_collectives`` reports all other rows. H100s' steps over nodes:
SimAI's rows of 4, 16 and 64 nodes; those of 8, 32 and 128 are reported by a test.

Run: ``python -m hardware_models.calibration.fit_collectives --data DIR``
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from hardware_models.calibration.collective_rows import (
    ALPA_A100,
    ALPA_P3,
    MIB,
    SIMAI,
    CollectiveRow,
    Predictor,
    alpa_rows,
    clusters_of,
    measured_rows,
    relative_errors,
    simai_rows,
)
from hardware_models.cluster import Cluster, parse_cluster
from hardware_models.links import LinkType, NetworkType, Protocol

Vector = npt.NDArray[np.float64]
Values = Mapping[str, float]
RINGS = ("all_reduce", "all_gather", "reduce_scatter")
MIN_BYTES = 2**14
ALL_TO_ALL = "all_to_all"
LARGE_BYTES = 64 * MIB
"""All-to-alls from here on have no launches to speak of."""
QUICK_LAUNCH_S = 8e-6
"""Launch of the quick protocol, measured apart: Vidur, two GPUs, 2 KiB, 7 us (H100) and 10 us (A100)."""


@dataclass(frozen=True)
class Constant:
    """One number to fit: its place, a start value and bounds."""

    place: str
    start: float
    low: float
    high: float


LINKS = (
    Constant("low_latency.step_s", 1e-6, 0.0, 20e-6),
    Constant("low_latency.bandwidth_fraction", 0.2, 0.02, 0.95),
    Constant("simple.launch_s", 30e-6, 0.0, 200e-6),
    Constant("simple.step_s", 4e-6, 0.0, 40e-6),
)
ALPA_HARNESS = Constant("launch_per_rank_s", 20e-6, 0.0, 60e-6)
V100 = (
    ALPA_HARNESS,
    Constant("link_bytes_per_s", 22.7e9, 18e9, 25e9),
    *LINKS,
    Constant("local.all_gather", 300e9, 50e9, 2e12),
    Constant("local.reduce_scatter", 110e9, 30e9, 1e12),
)
ETHERNET = (
    Constant("collective_fraction", 0.88, 0.5, 1.0),
    Constant("network.step_s", 130e-6, 10e-6, 400e-6),
    Constant("network.low_latency.bandwidth_fraction", 0.45, 0.05, 0.9),
    Constant("tree_fill_bytes", 8e6, 0.0, 60e6),
)
A100 = (
    ALPA_HARNESS,
    Constant("link_bytes_per_s", 228e9, 180e9, 260e9),
    *LINKS,
    Constant("local.all_reduce", 900e9, 100e9, 5e12),
    Constant("local.all_gather", 620e9, 100e9, 5e12),
    Constant("local.reduce_scatter", 830e9, 100e9, 5e12),
)
MESH_ALL_TO_ALL = (
    Constant("efficiency.all_to_all", 0.6, 0.1, 1.0),
    Constant("bridge_bytes_per_s", 26e9, 5e9, 100e9),
)
# Small messages alone would extrapolate beyond the hardware: the rate stays within 10 % of the file's.
H100 = (
    Constant("link_bytes_per_s", 395e9, 300e9, 395e9),
    Constant("simple.launch_s", 30e-6, 0.0, 200e-6),
    Constant("simple.step_s", 4e-6, 0.0, 40e-6),
    Constant("local.all_reduce", 1500e9, 100e9, 1e13),
)
OVER_NODES = (Constant("step_over_nodes_s", 3e-6, 0.0, 20e-6),)
FITTED_NODES, REPORTED_NODES = (4, 16, 64), (8, 32, 128)
"""Of SimAI's rows."""

Build = Callable[[Sequence[CollectiveRow], Values], Predictor]


def main() -> None:
    """Fit the machine types; print constants and the errors of the rows used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds alpa_v100/ and gpu_efficiency/")
    data = parser.parse_args().data
    table = data / "gpu_efficiency" / "collectives_measured.csv"
    v100 = [row for row in measured_rows(table, "V100", "vTrain", "p3.16xlarge") if len(row.groups[0]) != 5]
    h100 = [row for row in measured_rows(table, "H100 DGX", "Vidur", "h100-dgx") if row.num_bytes >= MIB]
    p3 = [*filter(is_fitted, alpa_rows(data / "alpa_v100" / ALPA_P3, "p3.16xlarge"))]
    a100 = [*filter(is_fitted, alpa_rows(data / "alpa_v100" / ALPA_A100, "a100-80g-dgx"))]
    jobs: dict[str, tuple[tuple[Constant, ...], list[CollectiveRow], Build]] = {
        "p3.16xlarge": (
            (*V100, *ETHERNET),
            [*v100, *(row for row in p3 if row.kind in RINGS)],
            _predictor,
        ),
        "a100-80g-dgx": (
            A100,
            [
                *measured_rows(table, "A100", "vTrain", "a100-80g-dgx"),
                *(row for row in a100 if row.kind in RINGS),
            ],
            _predictor,
        ),
        "h100-dgx": (H100, h100, _predictor),
        "h100-dgx, over nodes": (
            OVER_NODES,
            simai_rows(data / "gpu_efficiency" / SIMAI, "h100-dgx", FITTED_NODES),
            _over_nodes_predictor,
        ),
        "p3.16xlarge, all-to-all": (MESH_ALL_TO_ALL, [row for row in p3 if _is_large(row)], _all_to_all_predictor),
    }
    for name, (constants, rows, build) in jobs.items():
        values = fit(constants, rows, build)
        errors = np.array(relative_errors(build(rows, values), rows))
        print(f"{name}: {len(rows)} rows, {len(constants)} constants")
        for place, value in values.items():
            print(f"  {place}: {value:.4g}")
        print(f"  mean absolute {np.mean(np.abs(errors)):.1%}, bias {np.mean(errors):+.1%}")


def is_fitted(row: CollectiveRow) -> bool:
    """Return whether constants may be fitted on one of Alpa's rows: it is then never reported."""
    kinds = (*RINGS, ALL_TO_ALL)
    return row.kind in kinds and row.dtype == "f16" and row.size_exponent % 2 == 0 and row.num_bytes >= MIN_BYTES


def _is_large(row: CollectiveRow) -> bool:
    """Return whether a row is an all-to-all inside a node whose data take all of its time."""
    return row.kind == ALL_TO_ALL and ":1x" in row.cluster and row.num_bytes >= LARGE_BYTES


def fit(
    constants: Sequence[Constant], rows: Sequence[CollectiveRow], build: Build | None = None
) -> dict[str, float]:
    """Return the constants that fit ``rows`` best, by place; ``build`` puts values into a predictor."""
    build = build or _predictor
    measured = np.log([row.seconds for row in rows])
    start = [constant.start for constant in constants]

    def values_of(vector: Vector) -> dict[str, float]:
        return {constant.place: float(value) for constant, value in zip(constants, vector, strict=True)}

    def residuals(vector: Vector) -> Vector:
        predictor = build(rows, values_of(vector))
        return np.asarray(np.log([predictor.seconds(row) for row in rows]) - measured, dtype=np.float64)

    found = least_squares(
        residuals,
        start,
        bounds=([constant.low for constant in constants], [constant.high for constant in constants]),
        x_scale=start,
        loss="soft_l1",
        f_scale=0.1,
        max_nfev=40,
    )
    return values_of(found.x)


def _predictor(rows: Sequence[CollectiveRow], values: Values) -> Predictor:
    clusters = {}
    for name in clusters_of(rows):
        cluster = parse_cluster(name)
        nodes = tuple(
            replace(node, links=_links(node.links, values), network=_network(node.network, values))
            for node in cluster.nodes
        )
        clusters[name] = Cluster(name=name, nodes=nodes)
    return Predictor(clusters, values.get("launch_per_rank_s", 0.0))


def _all_to_all_predictor(rows: Sequence[CollectiveRow], values: Values) -> Predictor:
    clusters = {}
    for name in clusters_of(rows):
        nodes = []
        for node in parse_cluster(name).nodes:
            efficiency = {**node.links.efficiency, ALL_TO_ALL: values["efficiency.all_to_all"]}
            update = {"efficiency": efficiency, "bridge_bytes_per_s": values["bridge_bytes_per_s"]}
            nodes.append(replace(node, links=node.links.model_copy(update=update)))
        clusters[name] = Cluster(name=name, nodes=tuple(nodes))
    return Predictor(clusters, 0.0)


def _over_nodes_predictor(rows: Sequence[CollectiveRow], values: Values) -> Predictor:
    clusters = {}
    for name in clusters_of(rows):
        nodes = parse_cluster(name).nodes
        links = nodes[0].links.model_copy(update=dict(values))
        clusters[name] = Cluster(name=name, nodes=tuple(replace(node, links=links) for node in nodes))
    return Predictor(clusters, 0.0)


def _links(base: LinkType, values: Values) -> LinkType:
    return base.model_copy(
        update={
            "link_bytes_per_s": values["link_bytes_per_s"],
            "pair_fraction": 1.0,
            "efficiency": {**base.efficiency, **dict.fromkeys(RINGS, 1.0)},
            "local_bytes_per_s": {
                kind: values[f"local.{kind}"] for kind in RINGS if f"local.{kind}" in values
            },
            "protocols": tuple(
                Protocol(
                    name=name,
                    launch_s=values.get(f"{name}.launch_s", QUICK_LAUNCH_S),
                    step_s=values[f"{name}.step_s"],
                    bandwidth_fraction=values.get(f"{name}.bandwidth_fraction", 1.0),
                )
                for name in ("low_latency", "simple")
                if f"{name}.step_s" in values
            ),
        }
    )


def _network(base: NetworkType, values: Values) -> NetworkType:
    if "collective_fraction" not in values:
        return base
    return base.model_copy(
        update={
            "collective_fraction": values["collective_fraction"],
            "tree_fill_bytes": values["tree_fill_bytes"],
            "efficiency": {**base.efficiency, **dict.fromkeys(RINGS, 1.0)},
            "protocols": tuple(
                Protocol(
                    name=name,
                    launch_s=values.get(f"{name}.launch_s", QUICK_LAUNCH_S),
                    step_s=values["network.step_s"],
                    bandwidth_fraction=values.get(f"network.{name}.bandwidth_fraction", 1.0),
                )
                for name in ("low_latency", "simple")
            ),
        }
    )


if __name__ == "__main__":
    main()
