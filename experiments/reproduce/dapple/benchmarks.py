"""DAPPLE's benchmarks: published layer profiles, batches, memory of Table 1, clusters of Table 2."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from experiments.cases.case import hardware
from experiments.reproduce.experiment import Context
from hardware_models.gpus import load_gpu
from hardware_models.runtime import Runtime
from hardware_models.runtime_files import load_runtime
from searchers.dapple.baselines import data_parallel
from searchers.dapple.planner import PipelinePlan, Planner, PlannerOptions
from searchers.dapple.searcher import Dapple, make_planner
from simulator.costs import cost_tables
from simulator.divisors import divisors
from simulator.plan import Axis, Plan, Stage
from simulator.problem import Problem
from simulator.result import SimulationResult
from simulator.simulate import simulate
from workloads.layer_profile import LayerProfile, load_layer_profile
from workloads.operators import Workload

CLUSTERS = {"A": "p3.16xlarge:2x8", "B": "v100-1gpu-25g:16x1", "C": "v100-1gpu-10g:16x1"}
"""Table 2, 16 GPUs each."""

STATE_BYTES = 16
"""Per parameter, "since we applied Adam" (Table 7)."""

PLANNED_BYTES = 16_000_000_000
"""A GPU's memory in the released planner."""
BUCKET_BYTES = 64 * 2**20
"""Of overlapped data parallelism: the default fusion buffer of Horovod, which the paper cites for it."""


@dataclass(frozen=True)
class Benchmark:
    """One model of Table 1.

    Attributes:
        name: As in the paper.
        file: Profile, relative to the data folder.
        global_batch: Of Table 4.
        batch: Profile batch size, and samples per microbatch of the planner (Table 1).
        memory_bytes: At that batch (Table 1).
        parameters: Table 1.
    """

    name: str
    file: str
    global_batch: int
    batch: int
    memory_bytes: float
    parameters: float


BENCHMARKS = {
    each.name: each
    for each in (
        Benchmark("ResNet-50", "pipedream/resnet50_b128.csv", 2048, 128, 1e9, 24.5e6),
        Benchmark("VGG-19", "dapple/vgg19_b32.csv", 2048, 32, 5.6e9, 137e6),
        Benchmark("GNMT-16", "dapple/gnmt16_b64.csv", 1024, 64, 3.9e9, 291e6),
        Benchmark("BERT-48", "dapple/bert48_b2.csv", 64, 2, 11.4e9, 640e6),
        Benchmark("XLNet-36", "dapple/xlnet36_b1.csv", 128, 1, 12e9, 500e6),
        Benchmark("AmoebaNet-36", "dapple/amoebanet36_b1.csv", 128, 1, 20e9, 933e6),
    )
}

NOTES = (
    "Layer times are the published profiles (GNMT-16 block by block; ResNet-50 is PipeDream's, DAPPLE published none); "
    "masks and ids, which every stage is fed, are left out. Configuration A is two p3.16xlarge.",
    "Activations come from Table 1: memory at the profile batch less 16 bytes a parameter, spread over the layers as "
    "the forward time is. GNMT-16's 3.9 GB are less than its parameters alone take, so its outputs stand for them.",
)


def profile_of(context: Context, name: str, *, by_block: bool = True) -> LayerProfile:
    """Return a benchmark's profile as the planner takes it.

    Raises:
        ValueError: If the data folder lacks it.
    """
    return _profile(context.data_file(BENCHMARKS[name].file), name, by_block)


@lru_cache(maxsize=32)
def _profile(path: Path, name: str, by_block: bool) -> LayerProfile:
    benchmark = BENCHMARKS[name]
    profile = load_layer_profile(path).without_inputs().without_side_inputs()
    if by_block:
        profile = profile.by_block()
    activations = (benchmark.memory_bytes - STATE_BYTES * profile.num_parameters) / benchmark.batch
    return profile.with_saved_bytes(activations) if activations > 0 else profile


@lru_cache(maxsize=64)
def _workload(profile: LayerProfile) -> Workload:
    return profile.workload()


@lru_cache(maxsize=64)
def problem_of_profile(profile: LayerProfile, cluster: str, global_batch: int, overlapped: bool = False) -> Problem:
    """Return the problem of a profile; ``overlapped`` reduces gradients in buckets."""
    return Problem(
        workload=_workload(profile),
        hardware=hardware(cluster),
        runtime=overlapping_runtime() if overlapped else load_runtime("dapple-tensorflow"),
        global_batch=global_batch,
    )


@lru_cache(maxsize=1)
def planned_runtime() -> Runtime:
    """Return DAPPLE's runtime with the memory that its released planner counts on, more than TensorFlow leaves it."""
    runtime = load_runtime("dapple-tensorflow")
    outside = load_gpu("v100-sxm2-16gb").memory_bytes - PLANNED_BYTES
    return replace(runtime, context_bytes=outside - runtime.communication_buffer_bytes)


@lru_cache(maxsize=1)
def overlapping_runtime() -> Runtime:
    """Return DAPPLE's runtime with gradient buckets."""
    return replace(load_runtime("dapple-tensorflow"), gradient_bucket_bytes=BUCKET_BYTES, overlap_gradient_sync=True)


@dataclass(frozen=True)
class Setting:
    """A benchmark on a cluster.

    Attributes:
        problem: For pipelines.
        planner: The formula's view, rules and memory check as in the paper.
        microbatch: The profile batch.
    """

    problem: Problem
    planner: Planner
    microbatch: int

    def best(self, **options: object) -> PipelinePlan | None:
        """Return the planner's best plan at the profile batch, slices below one sample allowed, as the paper's."""
        chosen = replace(self.planner.options, **options)  # type: ignore[arg-type]
        planner = replace(self.planner, options=chosen)
        return planner.best(self.microbatch, self.problem.global_batch // self.microbatch)

    def best_of_all(self) -> PipelinePlan | None:
        """Return the best of the whole space, of two stages and of straight pipelines.

        The program keeps one prefix per state, so the whole space alone can lose the special cases.
        """
        found = [form for form in (self.best(), self.best(max_stages=2), self.best(max_replicas=1)) if form]
        return min(found, key=lambda form: form.latency_s, default=None)

    def data_parallel(self, overlap: str = "backward") -> PipelinePlan | None:
        """Return plain data parallelism with its closed-form latency, or None if it does not fit."""
        time = data_parallel(self.planner, self.problem.global_batch, overlap=overlap)
        if not time.fits:
            return None
        devices = tuple(range(self.problem.num_devices))
        step = time.samples_per_step * len(devices)
        while self.problem.global_batch % step:
            step -= len(devices)
        whole = (0, self.planner.chain.num_layers)
        return PipelinePlan(whole, (devices,), step, self.problem.global_batch // step, latency_s=time.latency_s)


def setting(
    context: Context,
    name: str,
    cluster: str,
    global_batch: int | None = None,
    microbatch: int | None = None,
    *,
    as_released: bool = False,
) -> Setting:
    """Return a benchmark on a cluster string, or on configuration A, B or C.

    Args:
        context: Where the data are.
        name: Of the benchmark.
        cluster: A cluster string or A, B or C.
        global_batch, microbatch: Samples; the benchmark's own if None.
        as_released: The planner counts on the memory that the released one does.
    """
    benchmark = BENCHMARKS[name]
    batch = global_batch or benchmark.global_batch
    problem = problem_of_profile(profile_of(context, name), CLUSTERS.get(cluster, cluster), batch)
    seen = replace(problem, runtime=planned_runtime()) if as_released else problem
    planner = make_planner(seen, 1, options=PlannerOptions(executable=False))
    return Setting(problem, planner, min(microbatch or benchmark.batch, batch))


def judge(
    problem: Problem, form: PipelinePlan, *, overlapped: bool = False, warmup: str = "acr", fits: bool = True
) -> SimulationResult:
    """Simulate a plan; where its microbatch has fewer samples than a stage has replicas, with one that has enough.

    Then microbatch sizes that divide the batch are tried and the fastest that fits is taken.

    Raises:
        ValueError: If nothing can run.
    """
    found = [simulate_form(problem, replace(form, microbatch=size, num_microbatches=count), overlapped, warmup)
             for size, count in executable_sizes(problem.global_batch, form)]  # fmt: skip
    fitting = [result for result in found if result.fits or not fits]
    return min(fitting or found, key=lambda result: result.iteration_time_s)


def executable_sizes(batch: int, form: PipelinePlan) -> list[tuple[int, int]]:
    """Return microbatch sizes and counts that can run: the plan's own, or up to four larger ones."""
    replicas = max(len(devices) for devices in form.devices)
    if form.microbatch >= replicas:
        return [(form.microbatch, form.num_microbatches)]
    sizes = [size for size in divisors(batch) if size >= replicas][:4]
    if not sizes:
        raise ValueError(f"a batch of {batch} has no microbatch for {replicas} replicas")
    return [(size, batch // size) for size in sizes]


def simulate_form(
    problem: Problem, form: PipelinePlan, overlapped: bool = False, warmup: str = "acr"
) -> SimulationResult:
    """Simulate a planner's result as it is."""
    searcher = Dapple(profile_samples=1, warmup=warmup)
    if overlapped:
        problem = replace(problem, runtime=overlapping_runtime())
    plan = searcher.to_plan(problem, form)
    if not overlapped:
        plan = replace(plan, overlap_gradient_sync=False)
    return simulate(plan, problem, engine="compiled", costs=cost_tables(problem))


def one_device_s(planner: Planner, global_batch: int) -> float:
    """Return the time of all samples on one device, one after the other: what speedups are relative to."""
    return float(planner.chain.forward_s[-1] + planner.chain.backward_s[-1]) * global_batch


def stages_plan(
    problem: Problem, ranges: list[tuple[tuple[int, int], tuple[int, ...]]], microbatch: int, **more: object
) -> Plan:
    """Return a plan of operator ranges on devices, split by batch."""
    stages = tuple(
        Stage((span,), devices, ((span[1] - span[0], (Axis("batch", len(devices)),)),)) for span, devices in ranges
    )
    made = Plan(stages, microbatch, problem.global_batch // microbatch, overlap_gradient_sync=False)
    return replace(made, **more)  # type: ignore[arg-type]
