"""What only a GPU can show: events, memory counted by torch, the allocator's history, overlap of two streams."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from hardware_models.cluster import parse_cluster  # noqa: E402
from hardware_models.model import HardwareModel  # noqa: E402
from hardware_models.runtime_files import load_runtime  # noqa: E402
from simulator.problem import Problem  # noqa: E402
from simulator.uniform import uniform_plan  # noqa: E402
from validation.campaigns.definition import Campaign, campaign_from_mapping  # noqa: E402
from validation.campaigns.fit import fit_campaign  # noqa: E402
from validation.campaigns.result import evaluate  # noqa: E402
from validation.campaigns.run import load_rounds, run_campaign  # noqa: E402
from validation.campaigns.work import campaign_work  # noqa: E402
from validation.execution.memory_history import history_peaks, replay_history  # noqa: E402
from validation.execution.reference import run_reference  # noqa: E402
from validation.profiling.jobs import execute_rounds, plan_job  # noqa: E402
from validation.profiling.machine_profile import machine_name, now  # noqa: E402
from validation.profiling.overlap import measure_overlap  # noqa: E402
from validation.profiling.profiler import operator_job  # noqa: E402
from workloads.models.gpt import GPTSpec  # noqa: E402
from workloads.registry import build_from_spec  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch built for it"),
]

SHAPE = {
    "layers": 4, "hidden": 512, "heads": 8, "seq_len": 512, "vocab": 8192, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip


def problem(runtime: str, global_batch: int, attention: str = "plain") -> Problem:
    chosen = replace(load_runtime(runtime), attention=attention)
    spec = GPTSpec.model_validate({"name": "small-gpt", **SHAPE})
    hardware = HardwareModel(parse_cluster("h200-dgx:1x1"))
    return Problem(build_from_spec(spec, attention), hardware, chosen, global_batch)


def small_campaign(**words: Any) -> Campaign:
    mapping = {"windtunnel_campaign": 1, "name": "small", "description": "a test", "device": "cuda", **words}
    return campaign_from_mapping(mapping, "small")


@pytest.mark.parametrize("attention", ["plain", "flash"])
def test_losses_are_those_of_torchs_own_autograd(attention: str) -> None:
    of = problem("windtunnel-executor-fp32", 4, attention)
    job = plan_job(uniform_plan(of, microbatch=2), of, iterations=2, warmup=0, device="cuda")
    ((measured,),) = execute_rounds([job], device="cuda")
    assert measured.losses == pytest.approx(run_reference(of, iterations=2, device="cuda").losses, rel=1e-3)


def test_memory_and_times_are_measured_and_peaks_are_a_runs_own() -> None:
    small, large = problem("windtunnel-executor", 4), problem("windtunnel-executor", 32)
    plans = [uniform_plan(large, microbatch=16), uniform_plan(small, microbatch=2)]
    jobs = [
        plan_job(plan, of, iterations=3, warmup=2, device="cuda", traced_iterations=1, records_memory=True)
        for plan, of in zip(plans, (large, small), strict=True)
    ]
    ((first, second),) = execute_rounds(jobs, device="cuda")
    assert first.peak_allocated_bytes > 2 * second.peak_allocated_bytes > 0
    assert first.peak_reserved_bytes > second.peak_reserved_bytes >= second.peak_allocated_bytes
    for measured, plan in zip((first, second), plans, strict=True):
        assert measured.stage_forward_s[0] > 0 and measured.devices[0].optimizer_s > 0
        assert len(measured.traced[0]) == 2 * plan.num_microbatches
        history = measured.memory_history[0]
        peaks = history_peaks(history)
        assert peaks.reserved_bytes >= measured.peak_reserved_bytes
        replayed = replay_history(history, 2**40)
        assert replayed.failure is None
        assert replayed.reserved_peak_bytes == pytest.approx(peaks.reserved_bytes, rel=0.05)


def test_kernels_are_timed_apart_from_the_host_that_launches_them() -> None:
    """Those of a pass that the GPU rules add up to it; the host takes as long for few samples as for many."""
    of = problem("windtunnel-executor-fp32", 64)
    runs = [operator_job(of, samples, 1, iterations=3, device="cuda") for samples in (2, 64)]
    free = plan_job(uniform_plan(of, microbatch=64), of, iterations=3, device="cuda")
    ((few, many, whole),) = execute_rounds([*(run.job for run in runs), free], device="cuda")
    kernels = [sum(each.operator_s.values()) for each in (few, many)]
    hosts = [sum(each.operator_host_s.values()) for each in (few, many)]
    assert kernels[1] == pytest.approx(whole.stage_forward_s[0] + whole.stage_backward_s[0], rel=0.1)
    assert kernels[1] > 10 * kernels[0] and 1 / 3 < hosts[1] / hosts[0] < 3


def test_what_cudnn_works_in_is_in_a_profile_and_in_the_peaks_it_predicts(tmp_path: Path) -> None:
    campaign = small_campaign(
        cluster="h100-dgx:1x1",
        runtimes={"fp32": {"base": "windtunnel-executor-fp32"}},
        models={"vgg": {"family": "vgg", "groups": [[64, 64], [128, 128]], "image": 128, "linear": 256}},
        calibration=[{"model": "vgg", "microbatch": [64, 256], "num_microbatches": 1}],
        report=[{"model": "vgg", "microbatch": 128, "num_microbatches": 1}],
    )
    work = campaign_work(campaign)
    run_campaign(campaign, work, tmp_path, rounds=1)
    rounds = list(load_rounds(campaign, work, tmp_path))
    fitted = fit_campaign(work, rounds)
    (profile,) = (each.profile.operators for each in fitted.values())
    convolutions = [row for row in profile.rows if row.role.startswith("conv")]
    taken = [((row.forward_taken_bytes or 0.0), (row.backward_taken_bytes or 0.0)) for row in convolutions]
    assert all(forward >= row.output_bytes for (forward, _), row in zip(taken, convolutions, strict=True))
    gradients = [row.input_bytes + row.parameter_bytes for row in convolutions]
    assert any(
        forward > 1.1 * row.output_bytes or backward > 1.1 * made
        for (forward, backward), row, made in zip(taken, convolutions, gradients, strict=True)
    )
    (outcome,) = evaluate(campaign, work, rounds, fitted, machine_name(), now()).outcomes
    assert outcome.memory.measured_allocated is not None
    assert outcome.memory.predicted_allocated == pytest.approx(outcome.memory.measured_allocated, rel=0.08)


def test_a_run_that_does_not_fit_says_so() -> None:
    of = problem("windtunnel-executor-fp32", 2**14)
    job = plan_job(uniform_plan(of, microbatch=2**14), of, iterations=1, warmup=0, device="cuda")
    ((measured,),) = execute_rounds([job], device="cuda")
    assert measured.out_of_memory


def test_computation_and_copies_slow_each_other() -> None:
    rows = measure_overlap(device="cuda")
    assert {row.kind for row in rows} == {"copy", "reduction"}
    for row in rows:
        assert 1.0 <= row.computation_factor < 4.0 and 1.0 <= row.communication_factor < 4.0


def test_a_campaign_runs_on_one_gpu(tmp_path: Path) -> None:
    campaign = small_campaign(
        cluster="h200-dgx:1x1",
        runtimes={"bf16": {"base": "windtunnel-executor", "attention": "flash"}},
        models={"gpt": {"family": "gpt", **SHAPE}},
        options={"iterations": 3, "warmup": 2, "records_memory": True},
        calibration=[{"model": "gpt", "microbatch": [4, 16]}],
        report=[{"model": "gpt", "microbatch": 8, "recompute": ["none", "full"], "num_microbatches": 2}],
    )
    work = campaign_work(campaign)
    run_campaign(campaign, work, tmp_path, rounds=2)
    rounds = list(load_rounds(campaign, work, tmp_path))
    result = evaluate(campaign, work, rounds, fit_campaign(work, rounds), machine_name(), now())
    assert result.median_absolute < 0.5
    for outcome in result.outcomes:
        assert outcome.memory.measured_allocated is not None
    histories = list((tmp_path / "memory").glob("*.json.gz"))
    assert len(histories) == len(result.outcomes)
    assert all(json.loads(gzip.decompress(path.read_bytes()))["events"] for path in histories)
