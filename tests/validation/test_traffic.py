"""Bytes that kernels of the executor move, as the model counts them, against the operations that torch runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from hardware_models.cluster import parse_cluster  # noqa: E402
from hardware_models.model import HardwareModel  # noqa: E402
from hardware_models.runtime_files import load_runtime  # noqa: E402
from simulator.problem import Problem  # noqa: E402
from simulator.uniform import uniform_plan  # noqa: E402
from simulator.validate import validate  # noqa: E402
from validation.execution.groups import GroupPool  # noqa: E402
from validation.execution.launch import Worker  # noqa: E402
from validation.execution.plan_executor import PlanExecutor  # noqa: E402
from validation.timers import Clock, OperatorTimes  # noqa: E402
from workloads.kernels import MemoryBound  # noqa: E402
from workloads.kinds.base import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD  # noqa: E402
from workloads.local import localize  # noqa: E402
from workloads.model_file import spec_from_mapping  # noqa: E402
from workloads.registry import build_from_spec  # noqa: E402

SAMPLES = 2
TEXT = {"layers": 1, "hidden": 64, "heads": 4, "seq_len": 48, "vocab": 256}
CALM = {"dropout": 0.0, "attention_dropout": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt", **TEXT, **CALM},
    "bert": {"family": "bert", **TEXT, **CALM},
    "llama": {"family": "llama", **TEXT, "kv_heads": 2, "ffn": 128},
    "vit": {"family": "vit", "layers": 1, "hidden": 64, "heads": 4, "image": 56, "patch": 8, "classes": 10, **CALM},
    "t5": {"family": "t5", **TEXT, "decoder_seq_len": 32, "position_buckets": 8, **CALM},
}
SWIN = {
    "family": "swin", "depths": (2, 2), "hidden": 32, "heads": (2, 4), "image": 64, "patch": 4, "window": 4,
    "classes": 10, **CALM,
}  # fmt: skip
XLNET = {"family": "xlnet", **TEXT, **CALM}
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::convolution", "aten::convolution_backward")
IN_VIEWS = ("aten::slice_backward", "aten::select_backward")
"""Zeros as large as the whole, then a copy into it."""
ROLL = "aten::roll"
"""One dimension after the other, inside (aten/native/TensorTransformations.h, ``roll_common``)."""
OF_SOFTMAX = "aten::_softmax_backward_data"
"""On GPUs the product of gradient and result first (aten/native/cuda/SoftMax.cu)."""


def _bytes(tensor: torch.Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _storages(tensors: list[torch.Tensor]) -> set[int]:
    return {each.untyped_storage()._cdata for each in tensors}


class Traffic(TorchDispatchMode):
    """Adds up what operations read and write, by operator and pass."""

    def __init__(self) -> None:
        super().__init__()
        self.place: tuple[str, int] | None = None
        self.moved: dict[tuple[str, int], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read, written = (
            [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)] for tree in ((args, kwargs), out)
        )
        is_view = not func._schema.is_mutable and _storages(written) <= _storages(read)
        name = func.name().split(".")[0]
        if self.place is None or is_view or name.startswith(("aten::_scaled_dot", *PRODUCTS)):
            return out
        size = sum(map(_bytes, written)) + (2 if name in IN_VIEWS else 1) * sum(map(_bytes, read))
        if name == OF_SOFTMAX:
            size *= 2
        if name == ROLL:
            size *= len(args[2])
        self.moved[self.place] = self.moved.get(self.place, 0) + size
        return out


class Watch(OperatorTimes):
    """Tells the traffic whose it is; what follows an operator counts with it."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__(Clock(torch.device("cpu")))
        self.traffic = traffic

    @contextmanager
    def measure(self, phase: str, index: int) -> Iterator[None]:
        self.traffic.place = phase, index
        yield


@cache
def moved(model: str, runtime: str, attention: str) -> dict[tuple[str, str], tuple[float, float]]:
    """Return traced and modelled bytes by role and pass."""
    spec = spec_from_mapping({"name": model, **{**MODELS, "swin": SWIN, "xlnet": XLNET}[model]}, model)
    chosen = replace(load_runtime(runtime), attention=attention)
    workload = build_from_spec(spec, attention)
    of = Problem(workload, HardwareModel(parse_cluster("h100-dgx:1x1")), chosen, SAMPLES)
    worker = Worker(0, 1, GroupPool(rank=0, world_size=1, backend=None), torch.device("cpu"))
    executor = PlanExecutor(validate(uniform_plan(of, microbatch=SAMPLES), of), of, worker)
    executor.run_iteration(0)
    traffic = Traffic()
    for runner in executor.runners.values():
        runner.times = Watch(traffic)
    with torch.autograd.set_multithreading_enabled(False), traffic:
        executor.run_iteration(1)
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for index, op in enumerate(workload.operators):
        local = localize(op.definition, op.attributes, workload.input_shapes(index, SAMPLES), [], chosen.implementation)
        for word, phases in ((FORWARD, (FORWARD,)), ("backward", (BACKWARD_INPUT, BACKWARD_WEIGHT))):
            kernels = [kernel for phase in phases for kernel in op.definition.kernels(phase, local)]
            modelled = sum(each.total_bytes for each in kernels if isinstance(each, MemoryBound))
            before = found.get((op.role, word), (0.0, 0.0))
            found[op.role, word] = before[0] + traffic.moved.get((word, index), 0), before[1] + modelled
    return found


def together(found: dict[tuple[str, str], tuple[float, float]], roles: str, word: str) -> tuple[float, float]:
    """Return the sums over roles, whichever stack they are of."""
    chosen = [sums for (role, own), sums in found.items() if own == word and role.endswith(tuple(roles.split()))]
    assert chosen, (roles, word)
    traced, modelled = map(sum, zip(*chosen, strict=True))
    return traced, modelled


MASK = ("attention_softmax", FORWARD)
"""Torch reads it as well; it is as large for any batch."""
PLAIN = [
    MASK,
    ("attention_softmax", "backward"),
    ("attention_score attention_context", FORWARD),
    ("attention_score attention_context", "backward"),
]


@pytest.mark.parametrize("runtime", ["windtunnel-executor", "windtunnel-executor-fp32"])
@pytest.mark.parametrize("model", [name for name in MODELS if name != "t5"])
@pytest.mark.parametrize(("roles", "word"), PLAIN)
def test_plain_attention_moves_what_torch_moves(model: str, runtime: str, roles: str, word: str) -> None:
    """Gradients of views are added behind one or the other of the two that read the packed tensor."""
    traced, modelled = together(moved(model, runtime, "plain"), roles, word)
    if (roles, word) == MASK:
        assert modelled < traced <= 1.03 * modelled
    else:
        assert modelled == traced


@pytest.mark.parametrize(
    ("roles", "word"),
    [("attention_softmax", FORWARD), ("attention_score attention_context", FORWARD),
     ("attention_score attention_context", "backward")],
)  # fmt: skip
def test_so_does_attention_to_another_stack_and_with_learned_positions(roles: str, word: str) -> None:
    traced, modelled = together(moved("t5", "windtunnel-executor", "plain"), roles, word)
    assert modelled == pytest.approx(traced, rel=0.02)


@pytest.mark.parametrize("model", [name for name in MODELS if name != "t5"])
def test_fused_attention_moves_what_torch_moves_around_it(model: str) -> None:
    """Beside the row sums of gradient times output, a kernel inside torch's operation."""
    found = moved(model, "windtunnel-executor", "flash")
    traced, modelled = together(found, "attention_flash", FORWARD)
    assert modelled == traced
    traced, modelled = together(found, "attention_flash", "backward")
    tokens = SAMPLES * (56 // 8) ** 2 + SAMPLES if model == "vit" else SAMPLES * 48
    assert modelled - traced == 2 * tokens * 64 * 2 + tokens * 4 * 4


@pytest.mark.parametrize("runtime", ["windtunnel-executor", "windtunnel-executor-fp32"])
@pytest.mark.parametrize("attention", ["plain", "flash"])
def test_rotary_positions_turn_the_packed_tensor(runtime: str, attention: str) -> None:
    """Beside it torch reads the table of factors, and in backward makes its conjugate: as large for any batch."""
    tokens, groups_of, dim = 48, 2 + 2, 16
    table = tokens * groups_of * dim // 2 * 8
    for word, times in ((FORWARD, 1), ("backward", 3)):
        traced, modelled = together(moved("llama", runtime, attention), "attention_rotary", word)
        assert traced - modelled == times * table


@pytest.mark.parametrize("model", list(MODELS))
def test_activations_move_what_torch_moves(model: str) -> None:
    for word in (FORWARD, "backward"):
        traced, modelled = together(moved(model, "windtunnel-executor", "plain"), "mlp_activation", word)
        assert modelled == traced > 0


def test_windows_move_what_torch_moves() -> None:
    """One copy, and where they are shifted a roll over either dimension of the image first, or last."""
    for word in (FORWARD, "backward"):
        found = moved("swin", "windtunnel-executor", "plain")
        traced, modelled = together(found, "window_partition window_reverse", word)
        assert modelled == traced > 0


def test_scores_of_relative_positions_move_what_torch_moves() -> None:
    """Beside it torch reads which tokens are of one segment, as large for any batch; zeros count what they are like."""
    found = moved("xlnet", "windtunnel-executor", "plain")
    traced, modelled = together(found, "attention_score", FORWARD)
    assert modelled == pytest.approx(traced, rel=0.03)
    traced, modelled = together(found, "attention_score attention_context", "backward")
    scores, table = SAMPLES * 4 * 48 * 48 * 2, 48 * 48 * 2
    assert modelled == pytest.approx(traced - 2 * scores - 10 * table, rel=0.02)
