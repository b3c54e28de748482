"""What runs on GPUs, with the GPU replaced: there is none here."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

import torch.distributed as dist  # noqa: E402
import typer  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from experiments.commands import campaign as campaign_command  # noqa: E402
from simulator.problem import Problem, ProblemSpec  # noqa: E402
from simulator.simulate import simulate  # noqa: E402
from simulator.uniform import uniform_plan  # noqa: E402
from simulator.validate import validate  # noqa: E402
from tests.validation.posing_gpu import Event, PosingGpu, posing_gpu, rank_on_posing_gpu  # noqa: E402
from tests.validation.test_campaign_files import mapping  # noqa: E402
from tests.validation.tiny import problem  # noqa: E402
from validation.campaigns import run as campaign_run  # noqa: E402
from validation.campaigns.definition import campaign_from_mapping  # noqa: E402
from validation.campaigns.plan_campaign import plan_campaign  # noqa: E402
from validation.campaigns.work import campaign_work  # noqa: E402
from validation.execution.executor import Job, ran_out_of_memory, run_rank  # noqa: E402
from validation.execution.groups import GroupPool  # noqa: E402
from validation.execution.launch import Worker  # noqa: E402
from validation.execution.memory_history import history_mapping  # noqa: E402
from validation.execution.plan_executor import PlanExecutor  # noqa: E402
from validation.execution.reference import run_reference  # noqa: E402
from validation.fake_devices import fake_processes  # noqa: E402
from validation.measurement import Measurement  # noqa: E402
from validation.profiling import communication_times, group_times, profile_run  # noqa: E402
from validation.profiling.machine_profile import other_gpu  # noqa: E402
from validation.profiling.profile_journal import Journal  # noqa: E402
from validation.profiling.profile_run import ProfileOptions, profile_work, run_profile  # noqa: E402
from validation.profiling.stopwatch import seconds_of  # noqa: E402
from validation.storage_tracer import StorageTracer  # noqa: E402

CAMPAIGN = mapping(
    device="cuda",
    cluster="h100-dgx:1x1",
    options={"records_memory": True},
    calibration=[{"model": "gpt", "microbatch": [1, 4]}],
    report=[{"model": "gpt", "microbatch": 2, "recompute": ["none", "full"]}],
)


def on(cluster: str) -> Problem:
    return ProblemSpec("gpt3-350m", cluster, "windtunnel-executor", 8).load()


def test_a_campaign_ends_with_the_first_unit_that_cannot_be_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after all rounds, which are an hour of a GPU."""
    started: list[int] = []

    def none_fits(jobs: Sequence[Job], **_: Any) -> list[list[Measurement]]:
        started.append(len(jobs))
        return [[ran_out_of_memory(job, "cuda") for job in jobs]]

    monkeypatch.setattr(campaign_run, "execute_rounds", none_fits)
    monkeypatch.setattr(campaign_run, "measure_overlap", lambda **_: [])
    campaign = campaign_from_mapping(CAMPAIGN, "mine")
    with pytest.raises(ValueError, match="profiling runs must fit into memory, but gpt at 1 sample did not"):
        campaign_run.run_campaign(campaign, campaign_work(campaign), tmp_path, rounds=5)
    assert len(started) == 1


def test_the_allocator_is_recorded_in_the_first_round_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording takes time of the host, and the median over rounds should not have it."""
    recorded: list[int] = []

    def fast(jobs: Sequence[Job], **_: Any) -> list[list[Measurement]]:
        recorded.append(sum(job.records_memory for job in jobs))
        return [[Measurement(1.0, (1.0,), 1, 1, 1, (1.0,), (1.0,), 0.1, (1.0,), (), (), {}, "", "cuda", "none", {})
                 for _ in jobs]]  # fmt: skip

    monkeypatch.setattr(campaign_run, "execute_rounds", fast)
    monkeypatch.setattr(campaign_run, "measure_overlap", lambda **_: [])
    campaign = campaign_from_mapping(CAMPAIGN, "mine")
    campaign_run.run_campaign(campaign, campaign_work(campaign), tmp_path, rounds=3)
    assert recorded == [2, 0, 0]


def test_operators_are_profiled_one_microbatch_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four microbatches in flight would need four times the activations; and what has no memory has no times."""
    options = ProfileOptions((8,), device="cuda", skip=("host", "memory", "overlap"))
    work = profile_work(on("h100-dgx:1x1"), options)
    assert [run.job.plan.schedule for run in work.jobs.operators] == ["1f1b"]
    monkeypatch.setattr(
        profile_run, "execute_rounds", lambda jobs, **_: [[ran_out_of_memory(job, "cuda") for job in jobs]]
    )
    with pytest.raises(ValueError, match="must fit into memory, but 8 samples did not; give smaller --microbatches"):
        run_profile(work, Journal(tmp_path / "partial", work.identity, "today"))


@pytest.mark.parametrize(
    ("cluster", "name", "mebibytes"),  # as torch.cuda.get_device_properties has them
    [
        ("h100-dgx:1x1", "NVIDIA H100 80GB HBM3", 81079),
        ("h200-dgx:1x1", "NVIDIA H200", 143167),
        ("a100-80g-dgx:1x1", "NVIDIA A100-SXM4-80GB", 81050),
        ("v100-32g-dgx1:1x1", "Tesla V100-SXM2-32GB", 32501),
        ("g4dn.12xlarge:1x1", "Tesla T4", 14930),
        ("rtx3090-pcie:1x1", "NVIDIA GeForce RTX 3090", 24258),
        ("titan-rtx-pcie:1x1", "NVIDIA TITAN RTX", 24212),
    ],
)
def test_a_gpu_of_another_type_than_the_clusters_is_named(
    cluster: str, name: str, mebibytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = SimpleNamespace(name=name, total_memory=mebibytes * 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: here)
    assert not other_gpu(on(cluster))
    words = other_gpu(on("a100-40g-dgx:1x1"))
    assert f"the cluster a100-40g-dgx:1x1 has a100-sxm4-40gb, but this machine {name} of" in words


def test_notes_say_what_measured_and_predicted_do_not_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=81079 * 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: here)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(campaign_command, "_run", lambda *_, **_named: None)  # as if interrupted at once
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

    def notes(cluster: str) -> str:
        with pytest.raises(typer.Exit):
            campaign_command.validate_campaign(
                campaign_from_mapping({**CAMPAIGN, "cluster": cluster}, "mine"),
                profile=None, limit=None, rounds=1, output=None, dry_run=False, write_cases=None, as_json=False,
            )  # fmt: skip
        return capsys.readouterr().err

    assert "note: PYTORCH_CUDA_ALLOC_CONF is set to expandable_segments:True: measured memory" in notes("h100-dgx:1x1")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert "note:" not in notes("h100-dgx:1x1")
    assert "note: the cluster h200-dgx:1x1 has h200-sxm5-141gb, but this machine NVIDIA H100" in notes("h200-dgx:1x1")


def test_what_calibrates_a_plan_of_one_stage_needs_no_more_memory_than_the_plan() -> None:
    spec = ProblemSpec("gpt3-350m", "h100-dgx:1x1", "windtunnel-executor", 16)
    problem = spec.load()
    campaign = plan_campaign(spec, uniform_plan(problem, microbatch=8), name="plan", device="cuda")
    (calibration,), (report,) = campaign.calibration, campaign.report
    peaks = [
        simulate(each.plan, each.problem, engine="compiled").peak_allocated_bytes for each in (calibration, report)
    ]
    assert peaks[0] <= 1.01 * peaks[1]


@pytest.mark.parametrize("attention", ["plain", "flash"])
def test_a_run_takes_the_branches_of_a_gpu_and_computes_the_same(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = problem("gpt", attention=attention)
    plan = validate(uniform_plan(of, microbatch=4, recompute="full"), of)
    recorded: list[object] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled, **_: recorded.append(enabled))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": [], "device_traces": [[]]})
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    with posing_gpu() as device:
        worker = Worker(0, 1, GroupPool(rank=0, world_size=1, backend=None), device)  # type: ignore[arg-type]
        record = run_rank(worker, Job(plan, of, 2, 1, traced_iterations=1, records_memory=True))
    assert record.losses == pytest.approx(run_reference(of, iterations=3).losses, rel=1e-5)
    assert record.traced is not None and len(record.traced.actions) == 4
    assert recorded == ["all", None] and record.memory_history == history_mapping({"segments": [], "device_traces": []})
    assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32


def test_nothing_of_a_run_is_left_for_the_next() -> None:
    """Its parameters would count in the next one's peaks."""
    of = problem("gpt")
    plan = validate(uniform_plan(of, microbatch=2), of)
    with posing_gpu() as device:
        worker = Worker(0, 1, GroupPool(rank=0, world_size=1, backend=None), device)  # type: ignore[arg-type]
        for measures in (False, True):
            run_rank(worker, Job(plan, of, 1, 1, measure_operators=measures, traced_iterations=1))
            gc.collect()
            assert not [each for each in gc.get_objects() if type(each) is PlanExecutor]


def test_the_time_of_an_iteration_is_without_reading_events(monkeypatch: pytest.MonkeyPatch) -> None:
    of = problem("gpt")
    plan, read_s = validate(uniform_plan(of, microbatch=2), of), 0.02
    reads: list[Event] = []

    def slow(start: Event, end: Event) -> float:
        reads.append(end)
        time.sleep(read_s)
        return 1e3 * (end.at_s - start.at_s)

    monkeypatch.setattr(Event, "elapsed_time", slow)
    with rank_on_posing_gpu(plan, of, 0) as executor:
        began = time.perf_counter()
        record = executor.run_iteration(0)
        whole_s = time.perf_counter() - began
    assert len(reads) >= 3 * len(record.actions)
    assert record.iteration_s <= whole_s - len(reads) * read_s


def test_no_parameter_lies_where_something_else_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator would keep the whole block for it, and reserve more than the plan needs."""
    of = problem("gpt")
    plan, tracer = validate(uniform_plan(of, microbatch=2), of), StorageTracer()
    emptied: list[int] = []
    with posing_gpu() as device, fake_processes(0, 1), FakeTensorMode(), tracer:
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(tracer.events)))
        worker = Worker(0, 1, GroupPool(rank=0, world_size=1, backend=None), device)  # type: ignore[arg-type]
        (runner,) = PlanExecutor(plan, of, worker).runners.values()
        parameters = {tracer.see(held.trained) for held in runner.parameters.held}
    made = [number for number, event in enumerate(tracer.events) if event.storage in parameters]
    assert len(made) == len(parameters) > 10
    for number in made:
        since = max(position for position in emptied if position <= number)
        assert all(event.num_bytes > 0 for event in tracer.events[since:number])


class SimulatedGpu:
    """A host that launches and a GPU that works behind it, in seconds."""

    LAUNCH_S, KERNEL_S, HERTZ = 40e-6, 12e-6, 2e9

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host_s = self.gpu_s = 0.0
        gpu = self

        class Mark:
            def __init__(self, enable_timing: bool) -> None:
                self.at_s = 0.0

            def record(self) -> None:
                gpu.gpu_s = self.at_s = max(gpu.host_s, gpu.gpu_s)

            def elapsed_time(self, end: Mark) -> float:
                return 1e3 * (end.at_s - self.at_s)

        monkeypatch.setattr(torch.cuda, "Event", Mark)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.launch(cycles / self.HERTZ))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: setattr(self, "host_s", self.gpu_s))
        monkeypatch.setattr(time, "perf_counter", lambda: self.host_s)

    def launch(self, seconds: float) -> None:
        """Let the host launch what takes the GPU so many seconds."""
        self.host_s += self.LAUNCH_S
        self.gpu_s = max(self.host_s, self.gpu_s) + seconds


def test_a_collective_is_timed_on_the_gpu_and_not_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimulatedGpu(monkeypatch)
    device: Any = PosingGpu("cpu")
    worker = Worker(0, 1, GroupPool(rank=0, world_size=1, backend=None), device)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: None)
    kernel = lambda: gpu.launch(gpu.KERNEL_S)  # noqa: E731
    for size in (1024, 1 << 30):
        assert communication_times._median_s(kernel, size, 3, worker) == pytest.approx(gpu.KERNEL_S)
        seconds, _ = group_times._seconds(kernel, size, worker, group_times.GroupRequest(2, (size,), 3, 0.05))
        assert seconds == pytest.approx(gpu.KERNEL_S)


def test_a_message_that_takes_milliseconds_is_not_sent_ten_times_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, device, sent = SimulatedGpu(monkeypatch), PosingGpu("cpu"), list[int]()
    for size in (1 << 20, 1 << 30):
        seconds_of(lambda size=size: sent.append(size) or gpu.launch(gpu.KERNEL_S), device, size)
    assert (sent.count(1 << 20), sent.count(1 << 30)) == (10, 1)
