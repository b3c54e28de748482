"""What runs on GPUs, with the GPU replaced: there is none here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from simulator.problem import Problem, ProblemSpec  # noqa: E402
from tests.validation.test_campaign_files import mapping  # noqa: E402
from validation.campaigns import run as campaign_run  # noqa: E402
from validation.campaigns.definition import campaign_from_mapping  # noqa: E402
from validation.campaigns.work import campaign_work  # noqa: E402
from validation.execution.executor import Job, ran_out_of_memory  # noqa: E402
from validation.measurement import Measurement  # noqa: E402
from validation.profiling import profile_run  # noqa: E402
from validation.profiling.machine_profile import other_gpu  # noqa: E402
from validation.profiling.profile_journal import Journal  # noqa: E402
from validation.profiling.profile_run import ProfileOptions, profile_work, run_profile  # noqa: E402

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
    with pytest.raises(ValueError, match="profiling runs must fit into memory, but gpt at 1 samples did not"):
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
