"""Galvatron-BMW's Table II on eight RTX TITANs, throughput and out-of-memory cells.

Cells of pure strategies say what the plan is. Cells of searched ones print no plan: there our searcher's plan for
the printed batch, in the variant's own space, stands for the paper's.

The cards have 24 GB; the 8 to 20 GB of the table are budgets of Galvatron's planner, which adds up model states,
activations and 1 GiB of context: its released constants give the printed largest batch in 125 of 128 cells of the
pure strategies. So a cell is compared with live bytes; the allocator replay would find more cells full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from math import ceil, gcd
from pathlib import Path

from datafiles.tables import load_table
from experiments.calibrate.fitted_constants import moved
from experiments.cases.case import (
    PRINTED,
    Case,
    Measured,
    Skipped,
    hardware,
    problem_of,
    stages_of_layers,
    uniform,
)
from searchers.galvatron.judged import judged_plan
from searchers.galvatron.layer_profiles import LayerProfiles
from searchers.galvatron.microbatches import Cut, chunked, formula_count, table_count
from searchers.galvatron.options import Options
from searchers.galvatron.partitions import even, filled_from_the_back
from searchers.galvatron.planner import Planner
from searchers.galvatron.plans import plan_of_layers, to_plan
from searchers.galvatron.searcher import variant_options
from searchers.galvatron.strategies import SHARDED, TENSOR, Level, Strategy
from simulator.costs import CostTables
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.saved import saved_tensors
from simulator.uniform import repeated_layers

GROUP = "galvatron-table2"
SOURCE = "Galvatron-BMW (TKDE), Table II"
NUM_GPUS = 8
SMALLEST_BATCH = 8
"""The paper steps the batch by eight: a cell that says OOM did not fit eight samples."""

PURE = ("ddp", "megatron-tp", "gpipe", "fsdp")
DEEPSPEED = "deepspeed-3d"
DEEPSPEED_SAMPLES = 2
"""Samples of a microbatch. Source, from memory: pretrain_bert_distributed_with_mp.sh of Megatron-DeepSpeed, the paper's
reference for this strategy, has tensor and pipeline parallelism of two and a micro-batch of two."""

FINE_UP_TO, RELEASED_STEP, WIDE_STEP = 16, 1 << 20, 16 << 20
"""Up to so many GPUs the search counts memory by the release's bytes, beyond by wider ones."""

PIPELINED = ("gpipe", DEEPSPEED)
SEARCHED = (
    "galvatron-dp-tp", "galvatron-dp-pp", "galvatron", "galvatron-base", "galvatron-1f1b-bi", "galvatron-bmw"
)  # fmt: skip
"""Searchers of those names."""


def cases(data: Path | None) -> Iterator[Case | Skipped]:
    """Yield one case per cell; nothing is read from ``data``."""
    table = load_table(
        PRINTED / "galvatron_table2.csv",
        integers=("row", "memory_gb", "global_batch"),
        floats=("throughput_samples_per_s",),
    )
    for row in table:
        throughput = row["throughput_samples_per_s"]
        batch = row["global_batch"] or SMALLEST_BATCH
        strategy, model = row["strategy"], row["model"]
        run = Run(model=model, cluster=f"titan-rtx-pcie:1x{NUM_GPUS}", memory_gb=row["memory_gb"])
        problem, plan = run.searched(strategy, batch) if strategy in SEARCHED else run.fixed(strategy, batch)
        yield Case(
            row_id=f"galvatron_table2.csv#{row['row']}",
            groups=groups_of(strategy, model),
            problem=problem,
            plan=plan,
            measured=Measured(
                iteration_time_s=batch / throughput if throughput else None,
                out_of_memory=throughput is None,
                limits_live_bytes=True,
            ),
            source=SOURCE,
            rivals=f"{model} in {row['memory_gb']} GB" if throughput and strategy in PURE else None,
            rival_samples=batch,
            features={
                "strategy": strategy, "model": model, "memory GB": row["memory_gb"], "batch": batch,
            },
        )  # fmt: skip


def groups_of(strategy: str, model: str) -> tuple[str, ...]:
    """Return the groups of a cell: pure strategies of the uniform models, of Swin, DeepSpeed 3D, each searched one."""
    if strategy not in PURE:
        return (f"{GROUP}-{strategy}",)
    return (f"{GROUP}-swin",) if model.startswith("swin") else (GROUP, f"{GROUP}-{strategy}")


@dataclass(frozen=True)
class Run:
    """What a cell of the paper's tables is about.

    Attributes:
        model, cluster: Preset names.
        memory_gb: Memory budget of a device, GiB.
        runtime: Name.
        overlap: Factor by which computation and communication slow each other; None for the GPU type's own.
        factors: On the machine's constants, by name (`hardware_models.machine_factors.FACTORS`).
    """

    model: str
    cluster: str
    memory_gb: int
    runtime: str = "galvatron-v1"
    overlap: float | None = None
    factors: tuple[tuple[str, float], ...] = ()

    @property
    def num_gpus(self) -> int:
        """Devices of the cluster."""
        return hardware(self.cluster).cluster.num_devices

    @property
    def profiles(self) -> LayerProfiles:
        """Layer costs, shared by searches for one model on one machine: neither budget nor overlap is in them."""
        return _profiles(replace(self, memory_gb=1, overlap=None))

    def problem(self, batch: int) -> Problem:
        """Return the problem of a batch."""
        problem = moved(
            problem_of(
                model=self.model,
                cluster=self.cluster,
                runtime=self.runtime,
                global_batch=batch,
                memory_limit_bytes=self.memory_gb << 30,
            )(),
            dict(self.factors),
        )
        if self.overlap is None:
            return problem
        return replace(problem, hardware=problem.hardware.with_overlap_slowdown(self.overlap))

    def fixed(self, strategy: str, batch: int) -> tuple[Callable[[], Problem], Callable[[Problem], Plan]]:
        """Return problem and plan of a strategy with fixed degrees.

        Raises:
            ValueError: If the strategy is unknown.
        """
        num_gpus = self.num_gpus
        parts = 1
        if strategy in PIPELINED:
            parts = num_microbatches(self.model, batch, strategy, num_gpus)
        cut = chunked(batch, parts)
        each = max(1, cut.samples // num_gpus)

        def pipeline(problem: Problem) -> Plan:
            return Plan(
                stages=stages_of_layers(problem, memory_balanced(problem, num_gpus), [()] * num_gpus),
                microbatch_size=cut.samples,
                num_microbatches=cut.parts,
                schedule="gpipe",
                last_microbatch_size=cut.last,
            )

        def one_strategy(problem: Problem, kind: str) -> Plan:
            layers = self.profiles.layers
            chosen = [Strategy((Level(kind, num_gpus),))] * len(layers)
            return plan_of_layers([(layers, chosen)], cut=Cut(1, batch), schedule="gpipe", outside="data")

        plans: dict[str, Callable[[Problem], Plan]] = {
            "ddp": uniform(dp=num_gpus, microbatch=each),
            "fsdp": partial(one_strategy, kind=SHARDED),
            "megatron-tp": partial(one_strategy, kind=TENSOR),
            "gpipe": pipeline,
            DEEPSPEED: uniform(
                tp=2, pp=2, dp=num_gpus // 4, microbatch=max(1, cut.samples * 4 // num_gpus), schedule="1f1b"
            ),
        }
        if strategy not in plans:
            raise ValueError(f"strategy must be one of {', '.join((*plans, *SEARCHED))}, got {strategy!r}")
        return (lambda: self._of_megatron(batch) if strategy == DEEPSPEED else self.problem(batch)), plans[strategy]

    def _of_megatron(self, batch: int) -> Problem:
        """Return the problem under a runtime that reduces a tied weight once, as Megatron."""
        problem = self.problem(batch)
        return replace(problem, runtime=replace(problem.runtime, reduces_ties_by_use=False))

    def searched(self, strategy: str, batch: int) -> tuple[Callable[[], Problem], Callable[[Problem], Plan]]:
        """Return problem and plan of a searched strategy; the plan waits for the search, which happens once.

        The plan is the variant's within the budget by the release's memory model, else its leanest.
        """

        @cache
        def found() -> Plan:
            options = planner_options(strategy, self.num_gpus)
            judged = judged_plan(self.problem, options, lambda planner: planner.best(batch), self.profiles)
            if judged is not None:
                return judged.plan
            leanest = Planner(self.problem(batch), options, profiles=self.profiles).leanest(batch)
            if leanest is None:
                raise ValueError(f"{strategy} has no plan for {batch} samples of {self.model}")
            return to_plan(leanest, self.problem(batch))

        return (lambda: self.problem(batch)), (lambda _: found())


def planner_options(strategy: str, num_gpus: int = NUM_GPUS) -> Options:
    """Return a variant's options with the release's microbatches, memory model and step, embedding and head whole.

    Beyond sixteen GPUs the step is wider than the release's: 158 strategies and tens of GB would take hours.
    """
    return replace(
        variant_options(strategy),
        unequal_microbatches=True,
        memory="released",
        outside="data",
        granularity_bytes=RELEASED_STEP if num_gpus <= FINE_UP_TO else WIDE_STEP,
    )


@lru_cache(maxsize=8)
def _profiles(run: Run) -> LayerProfiles:
    return LayerProfiles(CostTables(run.problem(1)))


def num_microbatches(model: str, batch: int, strategy: str = "gpipe", num_gpus: int = NUM_GPUS) -> int:
    """Return how many microbatches the release's tables give a pipeline of one device, or of two, a stage.

    The tables have fractions (b/8 + 2 for BERT); b is a multiple of eight here, so none arise. Where they do
    not divide the batch, PyTorch makes the last microbatch smaller.
    DeepSpeed 3D has no table; its script takes two samples at a time.

    Source:
        Galvatron data README (titan_v1): BERT b/8 + 2; ViT 1 if b = 8 else 2; T5 3 for eight stages; Swin 1, 2, 3.

    >>> num_microbatches("bert-huge-32", 24), num_microbatches("vit-huge-48", 8), num_microbatches("swin-huge-32", 40)
    (5, 1, 3)
    """
    family = model.split("-")[0]
    if strategy == DEEPSPEED:
        each = max(1, batch // (num_gpus // 4))
        return each // gcd(each, DEEPSPEED_SAMPLES)
    rule = table_count if num_gpus == NUM_GPUS else formula_count
    return max(1, ceil(rule(family, batch, num_gpus)))


def memory_balanced(problem: Problem, num_stages: int = NUM_GPUS) -> list[int]:
    """Return layers per stage as the release splits them: filled from the back up to the mean memory.

    Encoder and decoder layers of T5 weigh differently, so its split is uneven; equal layers split evenly.
    """
    costs = CostTables(problem)
    workload = problem.workload
    state_bytes = problem.runtime.state_bytes_per_parameter
    weights = []
    for start, stop in repeated_layers(workload):
        total, seen = 0.0, set()
        for index in range(start, stop):
            cost = costs.operator(index, (), problem.global_batch, problem.gpu_types[0])
            total += state_bytes * cost.num_parameter_elements
            for name, size in saved_tensors(workload, index, cost):
                if name not in seen:
                    seen.add(name)
                    total += size
        weights.append(total)
    if max(weights) - min(weights) < 1e-3 * max(weights):
        return list(even(len(weights), num_stages))
    return list(filled_from_the_back(weights, num_stages))
