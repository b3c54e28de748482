"""Problems so small that every plan of the shared space can be scored."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from simulator.problem import Problem, ProblemSpec
from workloads.models.gpt import GPTSpec
from workloads.registry import build_from_spec


@cache
def tiny_problem(
    num_devices: int = 2, global_batch: int = 4, memory_limit_bytes: int | None = None
) -> Problem:
    """Return a two-layer GPT on V100s.

    Args:
        num_devices: GPUs of one DGX-1, 1..8.
        global_batch: Samples per iteration.
        memory_limit_bytes: Per GPU; None for all of its 32 GiB.
    """
    spec = ProblemSpec(
        model="gpt3-350m",
        cluster=f"v100-32g-dgx1:1x{num_devices}",
        runtime="megatron-lm-2021",
        global_batch=global_batch,
        memory_limit_bytes=memory_limit_bytes,
    )
    shape = GPTSpec(name="tiny", layers=2, hidden=1024, heads=8, seq_len=512, vocab=8000)
    return replace(spec.load(), workload=build_from_spec(shape), spec=None)
