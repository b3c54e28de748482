"""Tiny models of every family on four processes, and words to make plans of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from hardware_models.cluster import parse_cluster
from hardware_models.model import HardwareModel
from hardware_models.runtime_files import load_runtime
from simulator.plan import Axis, Plan, Sharding, Stage, run_lengths
from simulator.problem import Problem
from workloads.models.bert import BertSpec
from workloads.models.fields import ModelSpec
from workloads.models.gnmt import GnmtSpec
from workloads.models.gpt import GPTSpec
from workloads.models.llama import LlamaSpec
from workloads.models.resnet import ResNetSpec
from workloads.models.swin import SwinSpec
from workloads.models.t5 import T5Spec
from workloads.models.vgg import VggSpec
from workloads.models.vit import ViTSpec
from workloads.models.xlnet import XLNetSpec
from workloads.operators import Workload
from workloads.registry import build_from_spec

COMMON = {"layers": 2, "hidden": 32, "heads": 4, "dropout": 0.0, "attention_dropout": 0.0}
TEXT = {**COMMON, "seq_len": 8, "vocab": 64, "vocab_multiple": 8}
SPECS: dict[str, ModelSpec] = {
    "gpt": GPTSpec.model_validate({**TEXT, "name": "tiny-gpt", "layers": 4}),
    "gpt-neox": GPTSpec.model_validate(
        {**TEXT, "name": "tiny-neox", "positions": "rotary", "parallel_residual": True, "tied_embeddings": False}
    ),
    "bert": BertSpec.model_validate({**TEXT, "name": "tiny-bert", "num_positions": 16}),
    "llama": LlamaSpec.model_validate({**TEXT, "name": "tiny-llama", "kv_heads": 2, "ffn": 48}),
    "t5": T5Spec.model_validate({**TEXT, "name": "tiny-t5", "decoder_seq_len": 4, "position_buckets": 8}),
    "t5-megatron": T5Spec.model_validate(
        {**TEXT, "name": "tiny-t5-megatron", "decoder_seq_len": 4, "style": "megatron", "activation": "gelu"}
    ),
    "t5-megatron-3": T5Spec.model_validate(
        {**TEXT, "name": "tiny-t5-megatron-3", "layers": 3, "decoder_seq_len": 4, "style": "megatron",
         "activation": "gelu"}
    ),
    "swin": SwinSpec.model_validate(
        {"name": "tiny-swin", "depths": (2, 2), "hidden": 16, "heads": (2, 4), "image": 16, "patch": 2, "window": 4,
         "classes": 10}
    ),
    "vit": ViTSpec.model_validate({**COMMON, "name": "tiny-vit", "image": 12, "patch": 4, "classes": 10}),
    "vgg": VggSpec(name="tiny-vgg", groups=((4,), (8, 8)), image=8, linear=16, classes=10, dropout=0.0),
    "gnmt": GnmtSpec(
        name="tiny-gnmt", encoder_layers=3, decoder_layers=3, hidden=16, vocab=64, seq_len=5, decoder_seq_len=6,
        dropout=0.0,
    ),
    "xlnet": XLNetSpec.model_validate(
        {**COMMON, "name": "tiny-xlnet", "seq_len": 8, "vocab": 64}
    ),
    "resnet": ResNetSpec(name="tiny-resnet", blocks=(1, 1), channels=8, image=16, classes=10),
    "resnet-wide": ResNetSpec(
        name="tiny-wide-resnet", blocks=(2, 1), channels=8, width_factor=2, image=16, classes=10, style="aceso"
    ),
}
ACESO_PLANS = Path(__file__).parent / "aceso_plans.json"
"""What Aceso's search returns for the tiny GPT under tight memory; ``tests/searchers/aceso`` searches them again."""
BUCKET_BYTES = 20_000
"""Small, so that a tiny model has several buckets."""


@cache
def problem(model: str, *, global_batch: int = 8, attention: str = "plain", **runtime: object) -> Problem:
    """Return a problem on four processes of this machine."""
    chosen = replace(load_runtime("windtunnel-executor-fp32"), gradient_bucket_bytes=BUCKET_BYTES)
    return Problem(
        workload=build_from_spec(SPECS[model], attention),
        hardware=HardwareModel(cluster=parse_cluster("local-cpu:1x4")),
        runtime=replace(chosen, attention=attention, **runtime),  # type: ignore[arg-type]
        global_batch=global_batch,
    )


@dataclass(frozen=True)
class Case:
    """A plan to check.

    Attributes:
        name: Says which features it covers.
        problem, plan: What is run.
    """

    name: str
    problem: Problem
    plan: Plan


def axes(*words: tuple[str, int] | tuple[str, int, int]) -> Sharding:
    """Return a sharding from tuples."""
    return tuple(Axis(*word) for word in words)


def stage(
    operators: tuple[int, int],
    devices: Sequence[int],
    sharding: Sharding | Callable[[int], Sharding],
    recompute: Sequence[tuple[int, int]] = (),
) -> Stage:
    """Return a stage whose sharding may depend on the operator."""
    chosen = [sharding(index) if callable(sharding) else sharding for index in range(*operators)]
    return Stage((operators,), tuple(devices), run_lengths(chosen), tuple(recompute))


def pipeline(
    of: Problem,
    parts: Sequence[tuple[int, Sequence[int], Sharding]],
    *,
    microbatch: int,
    **options: object,
) -> Plan:
    """Return a plan of stages ``(stop operator, devices, sharding)``; a stop of -1 is the end."""
    stages, start = [], 0
    for stop, devices, sharding in parts:
        stop = len(of.workload) if stop < 0 else stop
        stages.append(stage((start, stop), devices, sharding))
        start = stop
    return Plan(tuple(stages), microbatch, of.global_batch // microbatch, **options)  # type: ignore[arg-type]


def cut(workload: Workload, role: str, layer: int) -> int:
    """Return the index after the operator with ``role`` in ``layer``."""
    for index, op in enumerate(workload.operators):
        if op.role == role and op.layer == layer:
            return index + 1
    raise KeyError(role)


def by_layer(workload: Workload, shardings: Sequence[Sharding]) -> Callable[[int], Sharding]:
    """Return a sharding per operator that changes from layer to layer, in turn."""
    return lambda index: shardings[workload.operators[index].layer % len(shardings)]
