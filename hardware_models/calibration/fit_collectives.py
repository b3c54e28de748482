"""Fit link rates and the two NCCL protocols of a link type to measured single-node all-reduces.

Rows used: ``collectives_measured.csv``, all-reduce inside one node: vTrain V100 (2..8 GPUs without 5, which
holds no ring), vTrain A100 (2..8), Vidur H100 DGX (2..8, 1 MiB and more). Report: Vidur A100 DGX, and V100
with 5 GPUs.

Run: ``python -m hardware_models.calibration.fit_collectives --data DIR``
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from datafiles.tables import load_table
from hardware_models.cluster import Cluster, parse_cluster
from hardware_models.collectives import collective_flows
from hardware_models.links import LinkType, Protocol

Vector = npt.NDArray[np.float64]
START = (25e-6, 2.5e-6, 0.4, 40e-6, 5e-6)
LOW = (0.0, 0.0, 0.05, 0.0, 0.0)
HIGH = (200e-6, 30e-6, 0.95, 300e-6, 60e-6)
MAX_RATE_FACTOR = 1.1
"""Rates stay within 10 % above the file's: small messages alone would extrapolate beyond the hardware."""


@dataclass(frozen=True)
class CollectiveRow:
    """One measured all-reduce inside a node."""

    num_gpus: int
    num_bytes: float
    seconds: float


def main() -> None:
    """Fit the three link types and print constants and residuals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds gpu_efficiency/")
    path = parser.parse_args().data / "gpu_efficiency" / "collectives_measured.csv"
    v100 = _rows(path, "V100", "vTrain")
    jobs = {
        "v100-32g-dgx1:1x8": (
            [row for row in v100 if row.num_gpus != 5],
            [row for row in v100 if row.num_gpus == 5],
        ),
        "a100-40g-dgx:1x8": (_rows(path, "A100", "vTrain"), _rows(path, "A100 DGX", "Vidur")),
        "h100-dgx:1x8": ([row for row in _rows(path, "H100 DGX", "Vidur") if row.num_bytes >= 2**20], []),
    }
    for name, (fit_rows, report_rows) in jobs.items():
        cluster = parse_cluster(name)
        links = fit(cluster, fit_rows)
        low, simple = links.protocols
        print(f"{name}: link {links.link_bytes_per_s:.4g} B/s, pair {links.pair_fraction:.3f}")
        for protocol in (low, simple):
            print(
                f"  {protocol.name}: launch {protocol.launch_s:.3g} s, step {protocol.step_s:.3g} s, "
                f"fraction {protocol.bandwidth_fraction:.3f}"
            )
        for title, rows in (("fit", fit_rows), ("report", report_rows)):
            if rows:
                error = np.exp(_log_errors(_with_links(cluster, links), rows)) - 1
                print(
                    f"  {title}: {len(rows)} rows, mean absolute {np.mean(np.abs(error)):.1%}, "
                    f"bias {np.mean(error):+.1%}, worst {error[np.argmax(np.abs(error))]:+.1%}"
                )


def fit(cluster: Cluster, rows: Sequence[CollectiveRow]) -> LinkType:
    """Return the cluster's link type with rate, pair fraction and both protocols fitted to ``rows``."""
    base = cluster.nodes[0].links
    scale = base.link_bytes_per_s

    def links_of(vector: Vector) -> LinkType:
        low, high = (
            Protocol(name=name, launch_s=float(a), step_s=float(b), bandwidth_fraction=float(c))
            for name, a, b, c in (("low_latency", *vector[:3]), ("simple", vector[3], vector[4], 1.0))
        )
        return base.model_copy(
            update={
                "protocols": (low, high),
                "link_bytes_per_s": float(vector[5]) * scale,
                "pair_fraction": float(vector[6]) if base.kind != "mesh" else 1.0,
            }
        )

    def residuals(vector: Vector) -> Vector:
        return _log_errors(_with_links(cluster, links_of(vector)), rows)

    found = least_squares(
        residuals,
        [*START, 1.0, 0.9],
        bounds=([*LOW, 0.5, 0.5], [*HIGH, MAX_RATE_FACTOR, 1.0]),
        x_scale=[*START, 1.0, 1.0],
        loss="soft_l1",
        f_scale=0.1,
        max_nfev=80,
    )
    return links_of(found.x)


def _with_links(cluster: Cluster, links: LinkType) -> Cluster:
    return Cluster(name=cluster.name, nodes=tuple(replace(node, links=links) for node in cluster.nodes))


def _log_errors(cluster: Cluster, rows: Sequence[CollectiveRow]) -> Vector:
    flows = {
        n: collective_flows(cluster, "all_reduce", tuple(range(n))) for n in {row.num_gpus for row in rows}
    }
    predicted = [min(flow.price(row.num_bytes).alone_s for flow in flows[row.num_gpus]) for row in rows]
    return np.asarray(np.log(np.array(predicted) / np.array([row.seconds for row in rows])), dtype=np.float64)


def _rows(path: Path, gpu: str, source: str) -> list[CollectiveRow]:
    table = load_table(path, floats=("time_ms",), integers=("num_gpus", "gpus_per_node", "bytes"))
    return [
        CollectiveRow(row["num_gpus"], float(row["bytes"]), row["time_ms"] / 1e3)
        for row in table
        if row["gpu"] == gpu
        and row["source"].startswith(source)
        and row["op"] == "all_reduce"
        and row["num_gpus"] == row["gpus_per_node"]
    ]


if __name__ == "__main__":
    main()
