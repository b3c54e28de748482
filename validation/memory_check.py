"""The simulator's live and reserved bytes against torch's own storages: no GPU, any machine.

Prints the table of `CHECKS`: GPT and BERT of 1.3 billion parameters and one model or more of other families, executed
on fake tensors, in about six minutes. Or that of `WRAPPED`: models under PyTorch's own data parallelism, in two. Or
that of `OF_DEEPSPEED`: under DeepSpeed's own engine, in two. Or that of plans drawn at random, of other models too.

Run: ``python -m validation.memory_check [--wrapped | --deepspeed] [--random 40 --seed 1]``
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track

from datafiles.words import counted
from hardware_models.cluster import parse_cluster
from hardware_models.model import HardwareModel
from hardware_models.runtime_files import load_runtime
from simulator.memory.events import ACTIVATIONS, GRADIENTS, OPTIMIZER_STATES, PARAMETERS
from simulator.memory.usage import DeviceMemory
from simulator.problem import Problem
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from simulator.validate import validate
from workloads.registry import build_workload

if TYPE_CHECKING:
    from hardware_models.runtime import Runtime
    from validation.storage_tracer import TracedMemory

STATES = (PARAMETERS, GRADIENTS, OPTIMIZER_STATES)
EXECUTOR = "windtunnel-executor"
VALUED = "pytorch-ddp"
"""The runtime that is traced on tensors with data (``wrapped_trace``)."""
DEEPSPEED, ZERO_3 = "megatron-deepspeed", "deepspeed-zero3-2021"
"""The runtimes that are traced under DeepSpeed's own engine, which is not among what windtunnel depends on."""


@dataclass(frozen=True)
class Check:
    """A plan to compare.

    Attributes:
        model, num_gpus, global_batch: The problem, on A100s.
        degrees: Of ``simulator.uniform.uniform_plan``.
        devices: Which devices; None for the first.
        runtime, attention: Of the executor; or one that PyTorch's own data parallelism stands for (``wrapped_model``),
            or DeepSpeed's (``deepspeed_engine``).
        layers: Of a model cut down; 0 for all.
        shape: Of one cut down further.
    """

    model: str
    num_gpus: int
    global_batch: int
    degrees: Mapping[str, object]
    devices: tuple[int, ...] = (0,)
    runtime: str = "windtunnel-executor"
    attention: str = "plain"
    layers: int = 0
    shape: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [
            name.replace("_", " ") if value is True else f"{name.replace('_', ' ')} {value}"
            for name, value in self.degrees.items()
        ]
        of_fp16 = self.runtime in (DEEPSPEED, ZERO_3)
        precision = "fp32" if self.runtime.endswith("fp32") else "fp16" if of_fp16 else "bf16"
        model = f"{self.model} of {self.layers} layers" if self.layers else self.model
        model += "".join(f", {name.replace('_', ' ')} {value}" for name, value in self.shape.items())
        runtime = [self.runtime] if self.is_wrapped else []
        return ", ".join([*runtime, model, precision, f"{self.attention} attention", *parts])

    @property
    def is_wrapped(self) -> bool:
        """Whether torch's autograd goes through the model, not the executor."""
        return not self.runtime.startswith(EXECUTOR)

    def problem(self) -> Problem:
        """Return the problem; fake tensors are worked on by no library that would hold memory for it."""
        cut = {"layers": self.layers, **self.shape} if self.layers else None
        runtime = load_runtime(self.runtime)
        runtime = _of_torch(runtime, self.attention) if self.is_wrapped else runtime
        without_copies = replace(runtime.implementation, channels_last=True)
        return Problem(
            workload=build_workload(self.model, attention=self.attention, overrides=cut),
            hardware=HardwareModel(cluster=parse_cluster(f"a100-80g-dgx:1x{self.num_gpus}")),
            runtime=replace(runtime, matmul_workspaces=0, implementation=without_copies),
            global_batch=self.global_batch,
        )


def _of_torch(runtime: Runtime, attention: str) -> Runtime:
    """Return a runtime with the operators that torch has here: of its own, without others' kernels.

    The loss is an operator of the graph, so the model does not return logits. Steps of optimizers are fused where
    tensors are fake: in others torch reads a count from them.
    """
    own = runtime if runtime.implementation.autocast else load_runtime("pytorch-fsdp2")
    implementation = replace(own.implementation, loss_keeps_logits=False)
    if runtime.name in (DEEPSPEED, ZERO_3):
        implementation = replace(implementation, dtype=runtime.implementation.dtype)
    runtime = replace(runtime, implementation=implementation, attention=attention)  # type: ignore[arg-type]
    if runtime.name in (VALUED, DEEPSPEED, ZERO_3):
        return runtime
    return replace(runtime, optimizer_kernels="fused", optimizer_workspace_bytes=0)


@dataclass(frozen=True)
class Compared:
    """One device of a check.

    Attributes:
        check: The plan.
        device: Device id.
        predicted, traced: Bytes of parameters, gradients, optimizer states and activations at the peak.
        predicted_where, traced_where: What ran at the peak.
        predicted_reserved, traced_reserved: Bytes that the caching allocator holds (``TracedMemory.reserved_bytes``).
    """

    check: Check
    device: int
    predicted: Mapping[str, int]
    traced: Mapping[str, int]
    predicted_where: str
    traced_where: str
    predicted_reserved: int
    traced_reserved: int

    @property
    def error(self) -> float:
        """Signed relative error of the peak."""
        return sum(self.predicted.values()) / sum(self.traced.values()) - 1

    @property
    def reserved_error(self) -> float:
        """Signed relative error of what is reserved."""
        return self.predicted_reserved / self.traced_reserved - 1


GPT = "gpt3-1.3b"
CHECKS = (
    Check(GPT, 1, 4, {"microbatch": 1}),
    Check(GPT, 1, 4, {"microbatch": 2, "recompute": "full"}),
    Check(GPT, 1, 4, {"microbatch": 2, "recompute": "selective"}),
    Check(GPT, 1, 4, {"microbatch": 2}, attention="flash"),
    Check(GPT, 2, 4, {"dp": 2, "microbatch": 1}, runtime="windtunnel-executor-fp32"),
    Check(GPT, 2, 4, {"tp": 2, "microbatch": 2}),
    Check(GPT, 2, 4, {"tp": 2, "sequence_parallel": True, "microbatch": 2}),
    Check(GPT, 4, 8, {"dp": 4, "zero": 1, "microbatch": 1}),
    Check(GPT, 4, 4, {"dp": 4, "zero": 2, "microbatch": 1, "recompute": "full", "overlap_gradient_sync": True}),
    Check(GPT, 4, 4, {"dp": 4, "zero": 3, "microbatch": 1, "overlap_gradient_sync": True}),
    Check(GPT, 4, 4, {"dp": 4, "zero": 3, "microbatch": 1, "recompute": "full", "overlap_gradient_sync": True}),
    Check(GPT, 2, 8, {"pp": 2, "microbatch": 1}, (0, 1)),
    Check(GPT, 4, 8, {"pp": 4, "microbatch": 1}, (0, 1, 2, 3)),
    Check(GPT, 4, 8, {"pp": 4, "microbatch": 1, "schedule": "gpipe", "recompute": "full"}, (0, 3)),
    Check(GPT, 2, 8, {"pp": 2, "microbatch": 1, "schedule": "interleaved", "chunks": 2}, (0, 1)),
    Check(GPT, 2, 8, {"pp": 2, "microbatch": 1, "schedule": "zb-h1"}, (0, 1)),
    Check(GPT, 4, 8, {"pp": 2, "tp": 2, "microbatch": 1}, (0, 3), runtime="windtunnel-executor-fp32"),
    Check(GPT, 4, 16, {"pp": 4, "microbatch": 2, "recompute": "selective"}, (0, 3), attention="plain"),
    Check("arena-bert-1.3b", 4, 8, {"pp": 4, "microbatch": 1}, (0, 3)),
    Check("arena-bert-1.3b", 2, 4, {"pp": 2, "microbatch": 1, "recompute": "full"}, (0, 1), attention="flash"),
    Check(GPT, 2, 4, {"tp": 2, "microbatch": 2, "recompute": "full"}),
    Check("llama3-8b", 1, 2, {"microbatch": 1}, attention="flash"),
    Check("llama3-8b", 2, 2, {"tp": 2, "sequence_parallel": True, "microbatch": 1}, attention="flash"),
    Check("t5-large-48", 1, 4, {"microbatch": 2, "recompute": "selective"}),
    Check("t5-large-48", 2, 4, {"tp": 2, "microbatch": 2}),
    Check("xlnet-large", 2, 8, {"tp": 2, "microbatch": 4}),
    Check("vit-large", 2, 64, {"tp": 2, "microbatch": 32}, attention="flash"),
    Check("swin-huge-32", 2, 64, {"tp": 2, "microbatch": 32}),
    Check("wide-resnet-500m", 1, 16, {"microbatch": 8}),
    Check("wide-resnet-500m", 2, 16, {"tp": 2, "microbatch": 8}),
    Check("wide-resnet-500m", 4, 16, {"tp": 4, "microbatch": 8, "recompute": "full"}),
    Check("wide-resnet-500m", 4, 32, {"pp": 2, "tp": 2, "microbatch": 8}, (0, 3), runtime="windtunnel-executor-fp32"),
    Check("vgg-16", 2, 64, {"tp": 2, "microbatch": 32}),
    Check("vgg-19", 2, 24, {"dp": 2, "zero": 1, "microbatch": 4}),
)


def wrapped_check(
    runtime: str,
    model: str,
    num_gpus: int,
    microbatches: int,
    *,
    microbatch: int,
    layers: int = 0,
    shape: Mapping[str, int] | None = None,
    attention: str = "flash",
    **degrees: object,
) -> Check:
    """Return the check of a model whose GPUs are replicas, or share everything by ZeRO-3; by any ZeRO in DeepSpeed."""
    own: dict[str, object] = {} if runtime in (VALUED, DEEPSPEED) else {"zero": 3}
    if num_gpus > 1:
        own |= {"dp": num_gpus}
        own |= {} if runtime in (DEEPSPEED, ZERO_3) else {"overlap_gradient_sync": True}
    words = {**own, "microbatch": microbatch, **degrees}
    batch = num_gpus * microbatches * microbatch
    return Check(model, num_gpus, batch, words, (0,), runtime, attention, layers, shape or {})


NARROW = {"hidden": 1024, "heads": 8, "seq_len": 256, "vocab": 2048}
"""Few activations beside parameters: what the last backward pass gives back then matters."""
LLAMA = {"hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 688, "seq_len": 256, "vocab": 512}
WRAPPED = (
    wrapped_check("pytorch-fsdp2", GPT, 4, 1, microbatch=2),
    wrapped_check("pytorch-fsdp2", GPT, 8, 2, microbatch=2, recompute="full"),
    wrapped_check("pytorch-fsdp2", "llama2-7b", 8, 1, microbatch=1),
    wrapped_check("pytorch-fsdp2", "llama2-7b", 8, 2, microbatch=1, zero=2),
    wrapped_check("pytorch-fsdp2", GPT, 8, 1, microbatch=1, layers=24, shape=NARROW, recompute="full", zero=2),
    wrapped_check("pytorch-fsdp2", GPT, 8, 3, microbatch=1, layers=24, shape=NARROW, recompute="full", zero=2),
    wrapped_check("pytorch-fsdp2", "llama3-8b", 8, 2, microbatch=1, recompute="full"),
    wrapped_check("pytorch-fsdp2", "bert-large", 4, 2, microbatch=8),
    wrapped_check("pytorch-fsdp2", "bert-large", 4, 2, microbatch=8, gradient_reduction="last"),
    wrapped_check("pytorch-fsdp2", "vit-large", 4, 1, microbatch=32),
    wrapped_check("pytorch-fsdp2", "swin-huge-32", 4, 1, microbatch=16, attention="plain"),
    wrapped_check("pytorch-fsdp2", "wide-resnet-500m", 4, 1, microbatch=8, attention="plain"),
    wrapped_check("pytorch-fsdp2", "vgg-19", 2, 1, microbatch=16, attention="plain"),
    wrapped_check("composer-fsdp", GPT, 8, 2, microbatch=2),
    wrapped_check("composer-fsdp", GPT, 8, 2, microbatch=2, recompute="full"),
    wrapped_check("composer-fsdp", "gpt2-1.5b", 4, 1, microbatch=4),
    wrapped_check("composer-fsdp", "gpt2-1.5b", 4, 2, microbatch=4, gradient_reduction="last"),
    wrapped_check("hetu-galvatron", "llama2-7b", 8, 1, microbatch=1),
    wrapped_check("hetu-galvatron", "llama2-7b", 8, 2, microbatch=1, recompute="full"),
    wrapped_check("hetu-galvatron", "vit-large", 4, 2, microbatch=32),
    wrapped_check(VALUED, "gpt3-350m", 2, 2, microbatch=2, layers=4, shape={"seq_len": 512}, attention="plain"),
    wrapped_check(VALUED, "llama2-7b", 2, 1, microbatch=16, layers=4, shape=LLAMA, attention="plain"),
    wrapped_check(VALUED, "resnet-50", 2, 1, microbatch=8, attention="plain"),
)
OF_DEEPSPEED = (
    wrapped_check(DEEPSPEED, GPT, 2, 2, microbatch=1, recompute="full"),
    wrapped_check(DEEPSPEED, GPT, 4, 1, microbatch=2, attention="plain"),
    wrapped_check(DEEPSPEED, GPT, 2, 1, microbatch=1, zero=1, recompute="full"),
    wrapped_check(DEEPSPEED, GPT, 4, 2, microbatch=1, zero=1, recompute="full"),
    wrapped_check(DEEPSPEED, GPT, 8, 1, microbatch=1, zero=1, recompute="full"),
    wrapped_check(DEEPSPEED, GPT, 8, 2, microbatch=2, zero=1),
    wrapped_check(DEEPSPEED, GPT, 2, 1, microbatch=1, zero=2, recompute="full"),
    wrapped_check(DEEPSPEED, GPT, 4, 2, microbatch=1, zero=2, recompute="full"),
    wrapped_check(DEEPSPEED, GPT, 8, 4, microbatch=2, zero=2),
    wrapped_check(DEEPSPEED, "bert-large", 4, 2, microbatch=8, zero=1, attention="plain"),
    wrapped_check(DEEPSPEED, "bert-large", 4, 2, microbatch=8, zero=2, recompute="full"),
    wrapped_check(DEEPSPEED, "llama2-7b", 8, 1, microbatch=1, zero=1, recompute="full"),
    wrapped_check(DEEPSPEED, "llama2-7b", 8, 2, microbatch=1, zero=2, recompute="full"),
    wrapped_check(ZERO_3, GPT, 8, 1, microbatch=1, recompute="full"),
    wrapped_check(ZERO_3, GPT, 8, 2, microbatch=1, overlap_gradient_sync=True),
    wrapped_check(ZERO_3, "llama2-7b", 8, 1, microbatch=1, recompute="full"),
    wrapped_check(ZERO_3, "llama2-7b", 8, 1, microbatch=1),
)


RANDOM_MODELS = (
    "gpt3-350m", "gpt2-1.5b", "alpa-gpt-125m", "bert-large", "bert-48", "llama2-7b", "llama3-8b", "t5-large-32",
    "t5-770m", "vit-large", "swin-huge-32", "xlnet-large", "wide-resnet-500m", "resnet-50", "vgg-19",
)  # fmt: skip
MOST_GPUS = 8


def random_checks(random: Random) -> Iterator[Check]:
    """Yield checks of legal plans without end: degrees, ZeRO, schedule, recomputation and precision drawn evenly."""
    while True:
        tp, pp, dp = random.choice((1, 1, 2, 4)), random.choice((1, 1, 2, 4)), random.choice((1, 1, 2))
        count, microbatch = tp * pp * dp, random.choice((1, 2, 4))
        words: dict[str, object] = {"tp": tp, "pp": pp, "dp": dp, "microbatch": microbatch}
        words["recompute"] = random.choice(("none", "none", "full", "selective"))
        if tp > 1:
            words["sequence_parallel"] = random.random() < 0.4
        if dp > 1:
            words |= {"zero": random.choice((0, 1, 2, 3)), "overlap_gradient_sync": random.random() < 0.5}
        if pp > 1:
            words["schedule"] = random.choice(("1f1b", "1f1b", "gpipe", "zb-h1"))
        check = Check(
            model=random.choice(RANDOM_MODELS),
            num_gpus=count,
            global_batch=microbatch * dp * random.choice((2, 3, 4)),
            degrees=words,
            devices=(0,) if pp == 1 else (0, count - 1),
            runtime=random.choice(("windtunnel-executor", "windtunnel-executor-fp32")),
            attention=random.choice(("plain", "flash")),
        )
        if count > MOST_GPUS:
            continue
        with suppress(ValueError):  # Degrees that do not divide, or attention that the model has not.
            problem = check.problem()
            validate(uniform_plan(problem, **words), problem)  # type: ignore[arg-type]
            yield check


def compare(check: Check) -> list[Compared]:
    """Return predicted and traced bytes of a check's devices."""
    from validation.memory_trace import trace_memory  # torch, which --help does not wait for
    from validation.wrapped_trace import trace_wrapped

    problem = check.problem()
    plan = uniform_plan(problem, **check.degrees)  # type: ignore[arg-type]
    result = simulate(plan, problem)
    found = []
    wrapped = check.is_wrapped
    for traced in [trace_wrapped(plan, problem)] if wrapped else trace_memory(plan, problem, check.devices):
        (memory,) = [one for one in result.memory if traced.device in result.graph.device_members[one.device]]
        found.append(compared(check, memory, traced))
    return found


def compared(check: Check, memory: DeviceMemory, traced: TracedMemory) -> Compared:
    """Return what was predicted of a device beside what was traced."""
    predicted = {name: memory.consumers.get(name, 0) for name in STATES}
    predicted[ACTIVATIONS] = memory.peak_allocated_bytes - sum(predicted.values())
    where = memory.peak_where, traced.peak_where
    reserved = memory.peak_reserved_bytes, traced.reserved_bytes
    return Compared(check, traced.device, predicted, traced.consumers, *where, *reserved)


def table(rows: list[Compared]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| plan | device | states, GiB (traced) | activations, GiB (traced) | peak, GiB (traced) | error "
        "| reserved, GiB (replayed) | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    gib = 2.0**30
    for row in rows:
        states = [sum(side[name] for name in STATES) / gib for side in (row.predicted, row.traced)]
        rest = [side[ACTIVATIONS] / gib for side in (row.predicted, row.traced)]
        cells = [f"{a:.2f} ({b:.2f})" for a, b in (states, rest, [x + y for x, y in zip(states, rest, strict=True)])]
        cells += [f"{100 * row.error:+.2f} %", f"{row.predicted_reserved / gib:.2f} ({row.traced_reserved / gib:.2f})"]
        lines.append(f"| {row.check} | {row.device} | {' | '.join(cells)} | {100 * row.reserved_error:+.1f} % |")
    return "\n".join(lines)


def closing_words(rows: list[Compared]) -> str:
    """Return how far rows are off together: live bytes, then reserved ones."""
    plans = counted(len({id(row.check) for row in rows}), "plan")

    def words(errors: list[float], places: int) -> str:
        worst = max(range(len(rows)), key=lambda number: abs(errors[number]))
        mean, at = sum(map(abs, errors)) / len(rows), f"{rows[worst].check}, device {rows[worst].device}"
        return f"mean absolute error {100 * mean:.{places}f} %, worst {100 * errors[worst]:+.{places}f} % ({at})"

    live = words([row.error for row in rows], 2)
    reserved = words([row.reserved_error for row in rows], 1)
    return f"{plans}, {counted(len(rows), 'device')}: {live}\nreserved: {reserved}"


def main() -> None:
    """Print the table of all checks, or of random ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--wrapped", action="store_true", help="models under PyTorch's own data parallelism instead")
    kind.add_argument("--deepspeed", action="store_true", help="models under DeepSpeed's own ZeRO instead")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="draw so many plans instead")
    parser.add_argument("--seed", type=int, default=0, help="the same plans for the same seed")
    given = parser.parse_args()
    if given.random < 0:
        parser.error(f"--random must be the number of plans to draw, at least 0, got {given.random}")
    if given.random and (given.wrapped or given.deepspeed):
        other = "--wrapped" if given.wrapped else "--deepspeed"
        parser.error(f"--random draws plans of the executor; leave it or {other} out")
    drawn = list(islice(random_checks(Random(given.seed)), given.random))
    checks = drawn or (WRAPPED if given.wrapped else OF_DEEPSPEED if given.deepspeed else CHECKS)
    try:
        rows = [row for check in track(checks, "plans", console=Console(stderr=True)) for row in compare(check)]
    except ImportError as error:  # What is checked is not there; the message says how to get it.
        parser.error(str(error))
    print(table(rows))
    print(closing_words(rows))


if __name__ == "__main__":
    main()
