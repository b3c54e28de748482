"""The simulator's live bytes and what it sends against Megatron-Core itself: no GPU, any machine.

Trains GPT and LLaMA cut to a few layers as single ranks of Megatron-Core (0.16), on fake tensors, and prints what they
hold beside simulations; then collectives and messages whose bytes, or whose number, differ.

Run: ``python -m validation.megatron_check``
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import track

from hardware_models.cluster import parse_cluster
from hardware_models.model import HardwareModel
from hardware_models.runtime_files import load_runtime
from simulator.problem import Problem
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from validation.memory_check import Check, Compared, closing_words, compared, table
from validation.simulated_calls import Call, simulated_calls
from workloads.registry import build_workload

if TYPE_CHECKING:
    from hardware_models.runtime import Runtime

OF_TODAY: Mapping[str, Any] = {
    "loss_subtracts_anew": False,
    "keeps_score_buffer": True,
    "packed_rotary": True,
    "fused_gate": True,
    "fused_rotary": False,
    "sequence_first": False,
}
"""What Megatron-Core 0.16 does, whose own attention is in single operations, whatever the runtime's version did.

It subtracts the loss's maximum in place (0.7 did into a new tensor), shares one buffer of scores, leaves rotary
positions in plain operations unless told otherwise, and has a kernel for SwiGLU.
"""
LARGE_BYTES = 2**20
"""From here on calls are counted."""
SLACK_BYTES = 2**17
"""What bytes may differ by: flags, norms of gradients, and norms' gradients under sequence parallelism with ZeRO-1.

Ranks of a tensor-parallel group sum these whole, and here shards of them.
"""
GPT, LLAMA, GROUPED = "gpt3-1.3b", "llama2-7b", "llama3-8b"


def megatron_problem(check: Check) -> Problem:
    """Return the problem of a check, whose runtime does what Megatron-Core 0.16 does."""
    return Problem(
        workload=build_workload(check.model, attention="plain", overrides={"layers": check.layers, **check.shape}),
        hardware=HardwareModel(cluster=parse_cluster(f"a100-80g-dgx:1x{check.num_gpus}")),
        runtime=_of_today(load_runtime(check.runtime)),
        global_batch=check.global_batch,
    )


def _of_today(runtime: Runtime) -> Runtime:
    """Return a runtime that does what Megatron-Core 0.16 does, on tensors that no library multiplies."""
    implementation = replace(runtime.implementation, **OF_TODAY)
    return replace(runtime, implementation=implementation, attention="plain", matmul_workspaces=0)


def check(
    model: str,
    microbatches: int,
    ranks: tuple[int, ...] = (0,),
    *,
    layers: int = 4,
    runtime: str = "megatron-lm-2023",
    **degrees: Any,
) -> Check:
    """Return the check of some ranks of a plan."""
    sizes = [degrees.get(name, 1) for name in ("tp", "pp", "dp")]
    batch = microbatches * sizes[2] * degrees["microbatch"]
    count = sizes[0] * sizes[1] * sizes[2]
    return Check(model, count, batch, degrees, ranks, runtime, "plain", layers)


CHECKS = (
    check(GPT, 2, microbatch=2),
    check(GPT, 2, tp=2, microbatch=2),
    check(GPT, 2, tp=2, sequence_parallel=True, microbatch=2),
    check(GPT, 2, tp=2, sequence_parallel=True, microbatch=2, recompute="selective"),
    check(GPT, 2, tp=4, microbatch=4, recompute="full"),
    check(GPT, 2, dp=4, microbatch=1),
    check(GPT, 2, dp=4, zero=1, microbatch=1),
    check(GPT, 8, (0, 7), tp=2, pp=4, sequence_parallel=True, microbatch=2, layers=8),
    check(GPT, 4, (0, 1), pp=2, microbatch=1, schedule="interleaved", chunks=2),
    check(GPT, 4, (0, 1), pp=2, microbatch=2, runtime="megatron-lm-2021"),
    check(GPT, 2, tp=2, microbatch=2, recompute="full", runtime="megatron-lm-2021"),
    check(LLAMA, 2, microbatch=1),
    check(LLAMA, 2, tp=2, sequence_parallel=True, microbatch=1, recompute="full"),
    check(LLAMA, 4, (0, 7), tp=2, pp=2, dp=2, zero=1, sequence_parallel=True, microbatch=1),
    check(LLAMA, 4, (0, 3), pp=2, dp=2, zero=1, microbatch=1, overlap_gradient_sync=True, runtime="megatron-core-2024"),
    check(GROUPED, 2, tp=4, sequence_parallel=True, microbatch=1),
)


class Total(NamedTuple):
    """All calls of one kind in groups of one size: how many, how many of at least `LARGE_BYTES`, and their bytes."""

    num_calls: int
    num_large: int
    num_bytes: int


Totals = Mapping[tuple[str, int], Total]
"""By kind and size of the group."""


@dataclass(frozen=True)
class Sent:
    """What a device of a check sends in an iteration, as simulated and by Megatron-Core.

    Attributes:
        check, device: Of whom.
        predicted, traced: What.
    """

    check: Check
    device: int
    predicted: Totals
    traced: Totals

    @property
    def other_bytes(self) -> list[tuple[str, int]]:
        """Kinds and groups whose bytes differ by more than `SLACK_BYTES`."""
        pairs = self._pairs()
        return [key for key, mine, theirs in pairs if abs(mine.num_bytes - theirs.num_bytes) > SLACK_BYTES]

    @property
    def other_numbers(self) -> list[tuple[str, int]]:
        """Kinds and groups that differ in the number of large calls."""
        return [key for key, mine, theirs in self._pairs() if mine.num_large != theirs.num_large]

    def _pairs(self) -> list[tuple[tuple[str, int], Total, Total]]:
        none = Total(0, 0, 0)
        keys = sorted({*self.predicted, *self.traced})
        return [(key, self.predicted.get(key, none), self.traced.get(key, none)) for key in keys]


def compare(of: Check) -> tuple[list[Compared], list[Sent]]:
    """Return predicted and traced bytes, and calls, of a check's devices."""
    from validation.megatron.model import Degrees  # torch and Megatron-Core, which --help does not wait for
    from validation.megatron.trace import trace_megatron

    problem = megatron_problem(of)
    plan = uniform_plan(problem, **of.degrees)  # type: ignore[arg-type]
    result, rows, sent = simulate(plan, problem), [], []
    for device in of.devices:
        traced, calls = trace_megatron(problem, Degrees(**of.degrees), device)  # type: ignore[arg-type]
        (memory,) = [one for one in result.memory if device in result.graph.device_members[one.device]]
        rows.append(compared(of, memory, traced))
        sent.append(Sent(of, device, totals(simulated_calls(plan, problem, device)), totals(calls)))
    return rows, sent


def totals(calls: Counter[Call]) -> Totals:
    """Return calls by kind and size of the group."""
    found: dict[tuple[str, int], Total] = {}
    for (kind, num_ranks, num_bytes), number in calls.items():
        num_calls, num_large, so_far = found.get((kind, num_ranks), Total(0, 0, 0))
        num_large += number if num_bytes >= LARGE_BYTES else 0
        found[kind, num_ranks] = Total(num_calls + number, num_large, so_far + number * num_bytes)
    return found


def main() -> None:
    """Print what ranks hold, and what they send otherwise than simulated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    rows: list[Compared] = []
    sent: list[Sent] = []
    try:
        for one in track(CHECKS, "plans", console=Console(stderr=True)):
            held, calls = compare(one)
            rows += held
            sent += calls
    except ImportError as error:  # Megatron-Core is not there; the message says how to get it.
        parser.error(str(error))
    print(table(rows))
    print(closing_words(rows))
    total = sum(num_bytes for each in sent for _, _, num_bytes in each.traced.values())
    num_calls = sum(count for each in sent for count, _, _ in each.traced.values())
    print(f"sent: {num_calls:,} calls, {total / 2**30:,.0f} GiB in all")
    for each in sent:
        for kind, num_ranks in sorted({*each.other_bytes, *each.other_numbers}):
            mine, theirs = (side.get((kind, num_ranks), Total(0, 0, 0)) for side in (each.predicted, each.traced))
            of = f"{each.check}, device {each.device}: {kind} among {num_ranks}"
            print(f"{of}: {_words(mine)}, traced {_words(theirs)}")


def _words(total: Total) -> str:
    return f"{total.num_bytes:,} bytes in {total.num_large} large calls"


if __name__ == "__main__":
    main()
