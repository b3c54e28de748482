"""The host's share of Megatron-DeepSpeed and the rate of unaligned products, as vTrain's rows are fitted with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from experiments.cases.vtrain import CLUSTER, RUNTIME
from hardware_models.cluster import parse_cluster
from hardware_models.gpus import curves_of
from hardware_models.model import HardwareModel
from hardware_models.runtime import Runtime
from hardware_models.runtime_files import load_runtime

LAUNCH_S = 5e-6
TIMED, WHOLE = "timed", "whole"
"""Readings of the table, see `experiments.fit_host`."""


def runtime_with(reading: str, values: Mapping[str, float]) -> Runtime:
    """Return the runtime of a reading under given constants."""
    if reading == WHOLE:
        return replace(
            load_runtime("megatron-deepspeed"),
            host_seconds_per_kernel=LAUNCH_S,
            host_seconds_per_operator=(values["operator_s"], values["operator_s"]),
            host_seconds_per_pass=values["pass_s"],
        )
    return replace(
        load_runtime(RUNTIME),
        host_seconds_per_kernel=values["kernel_s"],
        host_seconds_per_operator=(values["forward_s"], values["backward_s"]),
        host_seconds_per_pass=values["pass_s"],
        host_seconds_per_collective=(values["collective_s"], 0.0),
    )


@lru_cache(maxsize=4)
def hardware_with(misaligned: float | None) -> HardwareModel:
    """Return the node with another ``misaligned_fraction``, or as it is shipped."""
    cluster = parse_cluster(CLUSTER)
    if misaligned is None:
        return HardwareModel(cluster=cluster)
    node = cluster.nodes[0]
    curves = curves_of(node.gpu)
    matmul = curves.matmul["fp16"].model_copy(update={"misaligned_fraction": misaligned})
    changed = curves.model_copy(update={"matmul": {**curves.matmul, "fp16": matmul}})
    gpu = node.gpu.model_copy(update={"calibrated_curves": changed})
    return HardwareModel(cluster=replace(cluster, nodes=(replace(node, gpu=gpu),)))
