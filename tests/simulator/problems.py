"""Small problems and hand-made workloads for tests of lowering, memory and plans."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from hardware_models.model import HardwareModel
from hardware_models.runtime_files import load_runtime
from simulator.problem import Problem
from workloads.graph_builder import GraphBuilder
from workloads.operators import Workload
from workloads.registry import build_workload

SMALL = {
    "gpt": ("gpt3-350m", {"layers": 4}),
    "bert": ("bert-large", {"layers": 4}),
    "llama": ("llama2-7b", {"layers": 4}),
    "vit": ("vit-large", {"layers": 4}),
    "t5": ("t5-770m", {"layers": 2}),
}
"""One short model of every family that is made of layers alike."""
SHORT = {**SMALL, "resnet": ("resnet-50", {"blocks": (1, 2, 1, 1)})}
"""The same, and one of convolutions: their inputs are gathered where channels are split."""


@lru_cache
def small_problem(
    family: str = "gpt",
    *,
    cluster: str = "v100-32g-dgx1:1x4",
    runtime: str = "megatron-lm-2021",
    global_batch: int = 16,
) -> Problem:
    """Return a short model of a family on a small cluster."""
    name, overrides = SHORT[family]
    chosen = load_runtime(runtime)
    return Problem(
        workload=build_workload(name, attention=chosen.attention, overrides=overrides),
        hardware=HardwareModel.from_name(cluster),
        runtime=chosen,
        global_batch=global_batch,
    )


def chain_of_opaque(num_operators: int, forward_s: float, backward_s: float, output_bytes: int = 1) -> Workload:
    """Return equal operators in a row, each a layer of its own, with stated times per sample."""
    builder = GraphBuilder(name="chain", family="opaque", tokens_per_sample=0)
    tensor = builder.input("x", (output_bytes,))
    row = {"forward_s": forward_s, "backward_s": backward_s, "output_bytes": output_bytes}
    for number in range(num_operators):
        builder.layer(f"layer{number}")
        tensor = builder.add("row", "opaque", [tensor], row)
    return builder.build()


def chain_problem(workload: Workload, *, num_devices: int, global_batch: int, has_norm: bool = True) -> Problem:
    """Return a problem on single-GPU nodes; without the norm its step takes no time where nothing is learnt."""
    runtime = load_runtime("megatron-lm-2021")
    if not has_norm:
        runtime = replace(runtime, gradient_clipping=False, loss_scaling=False, gradient_pass_bytes=None)
    return Problem(
        workload=workload,
        hardware=HardwareModel.from_name(f"v100-1gpu-25g:{num_devices}x1"),
        runtime=runtime,
        global_batch=global_batch,
    )
