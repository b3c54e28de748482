"""A rank's part of Megatron-Core's GPT, as a workload and degrees say, with its buffers of gradients and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from simulator.problem import Problem
from validation.kinds.operator_context import DTYPES
from validation.megatron.stand_ins import extensions
from workloads.operators import Workload

with extensions():
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Degrees:
    """As ``simulator.uniform.uniform_plan`` has them, of those that Megatron-Core can do."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    microbatch: int = 1
    recompute: str = "none"
    zero: int = 0
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    chunks: int = 1
    overlap_gradient_sync: bool = False

    @property
    def num_ranks(self) -> int:
        """Size of the world."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class Shape:
    """Of a decoder: what Megatron's configuration asks for."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq_len: int
    is_gated: bool
    has_bias: bool
    has_positions: bool
    is_tied: bool
    dropout: float

    @classmethod
    def of(cls, workload: Workload) -> Shape:
        """Read it off a graph.

        Raises:
            ValueError: If the graph is not of a GPT or LLaMA with attention in single operations.
        """
        by_role = {op.role: op.attributes for op in workload.operators}
        if workload.family not in ("gpt", "llama") or "attention_score" not in by_role:
            raise ValueError(
                f"the model must be of the GPT or LLaMA family with plain attention, got {workload.name} of family "
                f"{workload.family}"
            )
        embedding, score = by_role["embedding"], by_role["attention_score"]
        is_gated = "attention_rotary" in by_role
        width = int(by_role["mlp_linear_1"]["out"])
        ties = [parameter.tie for index in range(len(workload)) for parameter in workload.parameters(index)]
        return cls(
            num_layers=sum(op.role == "attention_score" for op in workload.operators),
            hidden=int(embedding["hidden"]),
            heads=int(score["heads"]),
            kv_heads=int(by_role["attention_qkv"]["groups"]),
            ffn=width // 2 if is_gated else width,
            vocab=int(embedding["vocab"]),
            seq_len=workload.tokens_per_sample,
            is_gated=is_gated,
            has_bias=bool(by_role["attention_qkv"]["bias"]),
            has_positions="positions" in embedding,
            is_tied=any(tie is not None for tie in ties),
            dropout=float(embedding["dropout"]),
        )


@dataclass(frozen=True)
class Rank:
    """What a rank holds: a wrapped model for each chunk of its stage, and the optimizer."""

    config: Any
    chunks: list[Any]
    optimizer: Any


def build_rank(problem: Problem, degrees: Degrees, on_chunk: Callable[[Any], None]) -> Rank:
    """Make the part of the rank whose process groups are initialised.

    Args:
        problem: Its runtime says what Megatron is told to fuse, to overlap and to keep.
        degrees: Of the plan.
        on_chunk: Called with each wrapped chunk, before the optimizer is made.
    """
    shape, runtime = Shape.of(problem.workload), problem.runtime
    config = _configuration(problem, degrees, shape)
    wrapper = DistributedDataParallelConfig(
        grad_reduce_in_fp32=runtime.gradient_bytes == 4,
        overlap_grad_reduce=degrees.overlap_gradient_sync,
        overlap_param_gather=degrees.zero == 1 and runtime.refreshes_in_forward,
        use_distributed_optimizer=degrees.zero == 1,
        bucket_size=_elements(runtime.gradient_bucket_bytes, runtime.gradient_bytes),
    )
    chunks = []
    for number in range(degrees.chunks):
        with _made_as(config.params_dtype):
            chunk = Float16Module(config, _gpt(config, shape, degrees, number if degrees.chunks > 1 else None))
        chunks.append(DistributedDataParallel(config, wrapper, chunk, disable_bucketing=number > 0))
        on_chunk(chunks[-1])
    if degrees.overlap_gradient_sync:
        syncs = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = syncs if len(chunks) > 1 else syncs[0]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            bf16=config.bf16,
            fp16=config.fp16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=degrees.zero == 1,
            clip_grad=1.0,
            overlap_param_gather=wrapper.overlap_param_gather,
        ),
        chunks,
    )
    return Rank(config=config, chunks=chunks, optimizer=optimizer)


def _configuration(problem: Problem, degrees: Degrees, shape: Shape) -> Any:
    runtime, fuses = problem.runtime, problem.runtime.implementation
    dtype = DTYPES[fuses.dtype]
    is_full = degrees.recompute == "full"
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        ffn_hidden_size=shape.ffn,
        gated_linear_unit=shape.is_gated,
        activation_func=torch.nn.functional.silu if shape.is_gated else torch.nn.functional.gelu,
        normalization="RMSNorm" if shape.is_gated else "LayerNorm",
        add_bias_linear=shape.has_bias,
        hidden_dropout=shape.dropout,
        attention_dropout=shape.dropout,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_cpu_initialization=True,
        perform_initialization=False,
        tensor_model_parallel_size=degrees.tp,
        pipeline_model_parallel_size=degrees.pp,
        virtual_pipeline_model_parallel_size=degrees.chunks if degrees.chunks > 1 else None,
        sequence_parallel=degrees.sequence_parallel,
        gradient_accumulation_fusion=runtime.adds_gradients_in_products,
        masked_softmax_fusion=fuses.fused_softmax,
        bias_activation_fusion=fuses.fused_bias_activation,
        bias_dropout_fusion=fuses.fused_bias_dropout,
        apply_rope_fusion=False,
        deallocate_pipeline_outputs=not runtime.keeps_stage_outputs,
        recompute_granularity=None if degrees.recompute == "none" else degrees.recompute,
        recompute_method="uniform" if is_full else None,
        recompute_num_layers=1 if is_full else None,
        finalize_model_grads_func=finalize_model_grads,
    )


def _gpt(config: Any, shape: Shape, degrees: Degrees, chunk: int | None) -> Any:
    if chunk is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
    place = {} if chunk is None else {"ignore_virtual": False, "vp_stage": chunk}
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        shape.vocab,
        shape.seq_len,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        share_embeddings_and_output_weights=shape.is_tied,
        position_embedding_type="learned_absolute" if shape.has_positions else "rope",
        vp_stage=chunk,
    )


def _elements(num_bytes: float | None, each: float) -> int | None:
    return None if num_bytes is None else round(num_bytes / each)


@contextmanager
def _made_as(dtype: torch.dtype) -> Iterator[None]:
    """Make parameters in their type at once: those of fake tensors cannot be cast in place."""
    same = patch.multiple(torch.nn.Module, bfloat16=lambda module: module, half=lambda module: module)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with same:
            yield
    finally:
        torch.set_default_dtype(before)
