"""What Megatron-Core needs of a GPU, without one: kernels of its extensions, answers of CUDA, transfers that are done.

A kernel that exists on CUDA alone stands here as an operation that makes and keeps the same tensors: the scaled
softmaxes (result kept, gradient in place; scaled_upper_triang_masked_softmax.h), the product that adds to a gradient
(``wgrad_gemm_accum_fp32``), the norm of many tensors at once, dropout and bias-dropout-add in one kernel (a byte a
number is kept). What torch compiles is one kernel: what it makes on its way is not counted. All else is Megatron's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.overrides import TorchFunctionMode

from validation.megatron.calls import CallTracer

_Function: Any = torch.autograd.Function
_Mode: Any = TorchFunctionMode
PRODUCTS = "fused_weight_gradient_mlp_cuda"
_tracing: list[CallTracer] = []
"""The tracer of the run in progress: functions that were compiled when Megatron was imported ask for it."""


class _Softmax:
    """Of ``scaled_softmax_cuda`` and its masked kin."""

    @staticmethod
    def forward(scores: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.empty_like(scores)

    @staticmethod
    def backward(gradients: torch.Tensor, *_: Any) -> torch.Tensor:
        return gradients

    @staticmethod
    def get_batch_per_block(*_: int) -> int:
        return 4  # A divisor of samples times heads where Megatron asks for it.


class _Dropout(_Function):  # type: ignore[misc]
    """``native_dropout`` on CUDA."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty(source.shape, dtype=torch.bool))
        return torch.empty_like(source)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        _ = ctx.saved_tensors
        return torch.empty_like(gradients[0])


class _BiasDropoutAdd(_Function):  # type: ignore[misc]
    """``bias_dropout_add_fused_train`` in one kernel."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, bias: Any, residual: torch.Tensor, probability: float) -> torch.Tensor:
        ctx.bias = bias
        ctx.save_for_backward(*([torch.empty(source.shape, dtype=torch.bool)] if probability else []))
        return torch.empty_like(residual)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        own = torch.empty_like(gradients[0]) if ctx.saved_tensors else gradients[0]
        return own, None if ctx.bias is None else torch.empty_like(ctx.bias), gradients[0], None


def _bias_dropout_add(pair: Any, residual: torch.Tensor, probability: float) -> torch.Tensor:
    found: torch.Tensor = _BiasDropoutAdd.apply(*pair, residual, probability)
    return found


def _dropout(source: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    found: torch.Tensor = _Dropout.apply(source) if p and training else source
    return found


def _norm(_: type, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any) -> torch.nn.Module:
    """Return Apex's layer norm, or RMS norm: torch's, whose parameters say that their gradients are of a shard."""
    of = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    module = of(hidden_size, eps)
    for parameter in module.parameters():
        setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010
    return module


def _compiled(function: Any = None, **_: Any) -> Any:
    """Stand for ``torch.compile``."""
    if function is None:
        return _compiled

    def run(*args: Any, **kwargs: Any) -> Any:
        return _tracing[-1].as_one(function, *args, **kwargs) if _tracing else function(*args, **kwargs)

    return run


class _FusedAdam(torch.optim.AdamW):
    """Apex's, which works on many tensors at once and makes none but the moments."""

    def __init__(self, params: Any, adam_w_mode: bool = True, **given: Any) -> None:
        super().__init__(params, fused=True, **given)


class _OnTheCpu(_Mode):  # type: ignore[misc]
    """What is made on CUDA is made here, and types say that it was there; what the host would read of a
    device is 0."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.item:
            try:
                return func(*args)
            except DataDependentOutputException:
                return 0.0
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = "cpu"
        result = func(*args, **given)
        is_type = func is torch.Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.") if is_type else result


class _Done:
    """Transfers, or calls, that are done."""

    def wait(self) -> bool:
        return True


@contextmanager
def _at_once(*_: Any, **__: Any) -> Iterator[_Done]:
    yield _Done()


@contextmanager
def extensions() -> Iterator[None]:
    """Let Megatron-Core be imported as where its extensions are installed.

    Raises:
        ModuleNotFoundError: If it is not installed itself; says how to get it.
        ValueError: If it was imported before, without them.
    """
    if PRODUCTS not in sys.modules and "megatron.core" in sys.modules:
        raise ValueError("validation.megatron must be imported before megatron.core, got it later; turn them round")
    softmax = {name: getattr(_Softmax, name) for name in ("forward", "backward", "get_batch_per_block")}
    for name in ("scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda", "scaled_softmax_cuda"):
        _add_module(name, softmax)
    products = dict.fromkeys(("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"), _nothing)
    _add_module(PRODUCTS, products)
    with patch.object(torch, "compile", _compiled):
        try:
            import_module("megatron.core")
        except ModuleNotFoundError as error:
            if error.name not in ("megatron", "megatron.core"):
                raise
            hint = "Megatron-Core must be installed for this check: pip install 'windtunnel[megatron]'"
            raise ModuleNotFoundError(hint) from error
        yield


def _add_module(name: str, functions: dict[str, Any]) -> None:
    sys.modules.setdefault(name, ModuleType(name)).__dict__.update(functions)


def _nothing(*_: Any) -> None:
    return


@contextmanager
def on_no_gpu(tracer: CallTracer) -> Iterator[None]:
    """While Megatron's code runs: no CUDA is asked, compiled functions are one kernel, transfers are done."""
    mcore = partial(import_module, package="megatron.core")
    random, buffers = mcore(".tensor_parallel.random"), mcore(".distributed.param_and_grad_buffer")
    new_group = dist.new_group

    def grouped(*ranks: Any, **given: Any) -> Any:
        return new_group(*ranks, **{**given, "backend": "fake", "pg_options": None})

    def sent(operations: Sequence[Any]) -> list[_Done]:
        tracer.transfers(operations)
        return [_Done() for _ in operations]

    def gathered(found: list[Any], own: Any, group: Any = None) -> None:
        found[:] = [own] * len(found)

    no_state = lambda *_, **__: torch.empty(0)  # noqa: E731
    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: "cpu"),
        (torch.cuda, "synchronize", _nothing),
        (torch.cuda, "get_rng_state", no_state),
        (torch.cuda.random, "get_rng_state", no_state),
        (random, "_set_cuda_rng_state", lambda *_, **__: None),
        (random.CudaRNGStatesTracker, "fork", lambda *_, **__: nullcontext()),
        (dist, "batch_isend_irecv", sent),
        (dist, "all_gather_object", gathered),
        (dist, "new_group", grouped),
        (buffers, "_coalescing_manager", _at_once),
        (mcore(".optimizer"), "Adam", _FusedAdam),
        (mcore(".optimizer"), "USING_PYTORCH_OPTIMIZER", False),
        (mcore(".optimizer.clip_grads"), "l2_norm_impl", lambda *_: (torch.zeros(1), None)),
        (mcore(".fusions.fused_bias_dropout"), "bias_dropout_add_fused_train", _bias_dropout_add),
        (mcore(".transformer.torch_norm").WrappedTorchNorm, "__new__", _norm),
        (F, "dropout", _dropout),
    ]
    with ExitStack() as stack:
        for where, name, stand_in in replaced:
            stack.enter_context(patch.object(where, name, stand_in))
        stack.enter_context(_OnTheCpu())
        _tracing.append(tracer)
        stack.callback(_tracing.pop)
        yield
