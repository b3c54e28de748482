"""DeepSpeed's own engine without a GPU: its ZeRO optimizers train a model as one of many ranks, on fake tensors.

Version 0.5.10, of 2021, whose ``stage_1_and_2.py`` the runtime ``megatron-deepspeed`` names, and whose ``stage3.py`` is
that of 0.5.0 (``deepspeed-zero3-2021``) but for a few names. It is the engine without
pipeline, configured by what DeepSpeed itself takes where a file says nothing; `Adam` is torch's fused one in place of
``FusedAdam``, whose kernel has the same tensors. What CUDA does is done at once, or not: streams, events, generators.
"""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _python_dispatch

from simulator.plan import Plan
from simulator.problem import Problem
from validation.wrapped_model import WholeModel

_Mode: Any = _python_dispatch.TorchDispatchMode
_Function: Any = torch.autograd.Function

VERSION = "0.5.10"
INSTALL = f"DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation deepspeed=={VERSION} hjson tqdm psutil py-cpuinfo"
"""Without what it would pull in (it is never compiled): it needs the torch and numpy that are there."""
GROUPS = ("_MODEL_PARALLEL_GROUP", "_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP")


def load_deepspeed() -> types.ModuleType:
    """Return DeepSpeed, whose imports find what torch and numpy had in 2021.

    Raises:
        ImportError: If it is not there, or of another version; says what to install.
    """
    old = types.ModuleType("torch._six")
    vars(old).update(inf=math.inf, string_classes=(str,), int_classes=(int,))
    with patch.object(np, "BUFSIZE", 8192, create=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.modules[old.__name__] = old  # (`patch.dict` would take back all that is imported meanwhile.)
        try:
            found = import_module("deepspeed")
            for name in ("zero.stage_1_and_2", "zero.stage3", "zero.partition_parameters", "fp16.fused_optimizer"):
                import_module(f"deepspeed.runtime.{name}")
        except ImportError as error:
            raise ImportError(f"DeepSpeed {VERSION} must be there, got: {error}; try `{INSTALL}`") from error
        finally:
            del sys.modules[old.__name__]
    version = found.__version__
    if not version.startswith(VERSION):
        raise ImportError(f"DeepSpeed must be of version {VERSION}, got {version}; try `{INSTALL}`")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return found


class _Done:
    """A stream or an event: what is asked of it has been done."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, other: object) -> None: ...


class _Finite(_Mode):  # type: ignore[misc]
    """Answers what the host reads of tensors without data: nothing has overflowed, and a norm is 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 0
        return func(*args, **(kwargs or {}))


def _name_of_type(tensor: torch.Tensor, *_: object) -> str:
    words = {torch.float16: "Half", torch.float32: "Float", torch.float64: "Double", torch.bfloat16: "BFloat16"}
    return f"torch.cuda.{words[tensor.dtype]}Tensor"


class _OnCpu:
    """Torch with one device."""

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: torch.device("cpu")) if name == "device" else getattr(torch, name)


def _apply_to_each(module: Any, function: Any, back: Any, outputs: Any) -> Any:
    """Do what ``stage3._apply_to_tensors_only`` does, to tensors without data too."""
    if isinstance(outputs, tuple):
        return tuple(_apply_to_each(module, function, back, each) for each in outputs)
    return function.apply(module, back, outputs) if isinstance(outputs, torch.Tensor) else outputs


class _Linear(_Function):  # type: ignore[misc]
    """``LinearFunctionForZeroStage3``, which keeps no view of a weight; that reads the weight's id from a tensor."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(source)
        ctx.weight, ctx.has_bias = weight, bias is not None
        output = source.matmul(weight.t())
        if bias is not None:
            output += bias
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        (source,), (gradient,) = ctx.saved_tensors, gradients
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_source = gradient.matmul(ctx.weight) if ctx.needs_input_grad[0] else None
        of_weight = rows.t().matmul(source.reshape(-1, source.shape[-1]))
        return of_source, of_weight, rows.sum(0) if ctx.has_bias else None


def _linear(source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    found: torch.Tensor = _Linear.apply(source, weight, bias)
    return found


@contextmanager
def as_with_cuda(*, shards_parameters: bool) -> Iterator[None]:
    """Let DeepSpeed find what it looks for on a GPU.

    Args:
        shards_parameters: Under ZeRO-3, for which it has a linear layer of its own.
    """
    deepspeed: Any = load_deepspeed()
    engine, device = deepspeed.runtime.engine, torch.device("cpu")
    flat = types.SimpleNamespace(
        flatten=torch._utils._flatten_dense_tensors, unflatten=torch._utils._unflatten_dense_tensors
    )
    of_cuda: dict[str, Any] = {
        "current_device": lambda: device,
        "set_device": lambda *_: None,
        "Stream": _Done,
        "Event": _Done,
        "stream": lambda _: nullcontext(),
        "current_stream": lambda *_: _Done(),
        "synchronize": lambda *_: None,
        "get_rng_state": lambda *_: None,
        "reset_peak_memory_stats": lambda *_: None,
        "ByteTensor": lambda values: torch.tensor(values, dtype=torch.uint8),
        "FloatTensor": lambda values: torch.tensor(values, dtype=torch.float32),
    }
    checkpointing = deepspeed.runtime.activation_checkpointing.checkpointing
    others: list[tuple[Any, Mapping[str, Any]]] = [
        (torch.cuda, of_cuda),
        (torch, {"get_rng_state": lambda: None, "set_rng_state": lambda _: None}),
        (torch.Tensor, {"cuda": lambda tensor, *_, **__: tensor, "type": _name_of_type}),
        (FakeTensor, {"data_ptr": lambda _: 0}),
        (deepspeed.ops.op_builder.UtilsBuilder, {"load": lambda *_: flat}),
        (deepspeed.utils.groups, dict.fromkeys(GROUPS)),
        (checkpointing, {"_set_cuda_rng_state": lambda *_: None, "mp_rank": None, "cuda_device": None}),
        (engine, {"FusedAdam": torch.optim.AdamW}),
        (deepspeed.runtime.zero.stage3, {"_apply_to_tensors_only": _apply_to_each}),
        (deepspeed.runtime.zero.partition_parameters, {"torch": _OnCpu()}),
        (F, {"linear": _linear} if shards_parameters else {}),
        (engine.DeepSpeedConfig, {"print": lambda *_: None}),
        (engine.DeepSpeedEngine, {"_broadcast_model": lambda _: None}),
    ]
    with ExitStack() as stack:
        for target, replaced in others:
            for name, value in replaced.items():
                stack.enter_context(patch.object(target, name, value))
        stack.enter_context(patch.dict(os.environ, {"LOCAL_RANK": "0"}))
        stack.enter_context(_Finite())
        yield


class DeepSpeedTraining:
    """A model under DeepSpeed's engine.

    Args:
        model: With parameters in fp16.
        problem, plan: What the engine is configured by.
    """

    def __init__(self, model: WholeModel, problem: Problem, plan: Plan) -> None:
        deepspeed: Any = load_deepspeed()
        (_, sharding), *_ = plan.stages[0].shardings
        config = {
            "train_micro_batch_size_per_gpu": plan.microbatch_size // len(plan.devices),
            "gradient_accumulation_steps": plan.num_microbatches,
            "fp16": {"enabled": True},
            "gradient_clipping": float(problem.runtime.gradient_clipping),
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": max(axis.zero for axis in sharding),
                "overlap_comm": plan.overlap_gradient_sync,
            },
        }
        model.half = lambda: model  # type: ignore[method-assign]  # It is, and its storages are watched.
        for unit in model.units:
            unit.checkpoint = deepspeed.checkpointing.checkpoint
        self._model = model
        self._adam = torch.optim.AdamW(model.parameters(), fused=True)
        words = {"dist_init_required": False, "dont_change_device": True, "config": config}
        with redirect_stdout(io.StringIO()):  # Ranks print what they step.
            self._engine = deepspeed.runtime.engine.DeepSpeedEngine(None, model, self._adam, **words)

    def begin(self, *, is_first: bool, is_last: bool) -> nullcontext[None]:
        """Return what holds during the passes of a microbatch: the engine counts them itself."""
        return nullcontext()

    def loss(self, samples: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss."""
        found: torch.Tensor = self._engine(samples)
        return found

    def backward(self, loss: Any) -> None:
        """Run the backward pass, and what of the reduction of gradients comes with it."""
        self._engine.backward(loss)

    def step(self, *, is_last: bool) -> None:
        """Step, where the engine does: it wants to be asked after each microbatch."""
        self._engine.step()

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield the gradients that are there."""
        yield from (each.grad for each in self._model.parameters() if each.grad is not None)
        for averaged in getattr(self._engine.optimizer, "averaged_gradients", {}).values():
            yield from averaged or ()

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters, or the rank's shards of them."""
        yield from (getattr(each, "ds_tensor", each) for each in self._model.parameters())

    def states(self) -> Iterator[torch.Tensor]:
        """Yield what the optimizer keeps."""
        for group in self._adam.param_groups:
            yield from group["params"]
        yield from getattr(self._engine.optimizer, "fp32_partitioned_groups_flat", ())
        for state in self._adam.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
