"""Campaign files: what is shipped, what is refused, and that every plan could run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from datafiles.errors import DataFileError  # noqa: E402
from simulator.simulate import simulate  # noqa: E402
from validation.campaigns import definition  # noqa: E402
from validation.campaigns.definition import Campaign, campaign_from_mapping, campaign_names, is_campaign, load_campaign  # noqa: E402
from validation.campaigns.error_split import CLASS_OF_KIND  # noqa: E402
from validation.campaigns.work import campaign_work, profiled_sizes  # noqa: E402
from validation.kinds.torch_kinds import BUILDERS  # noqa: E402

MODEL = {
    "family": "gpt", "layers": 4, "hidden": 64, "heads": 2, "seq_len": 16, "vocab": 128, "dropout": 0.0,
    "attention_dropout": 0.0,
}  # fmt: skip


def mapping(**changes: Any) -> dict[str, Any]:
    return {
        "windtunnel_campaign": 1,
        "name": "mine",
        "description": "a test",
        "device": "cpu",
        "cluster": "local-cpu:1x2",
        "runtimes": {"fp32": {"base": "windtunnel-executor-fp32"}},
        "models": {"gpt": MODEL},
        "calibration": [{"model": "gpt", "pp": 2, "num_microbatches": 4, "schedule": "gpipe"}],
        "report": [{"model": "gpt", "pp": 2, "num_microbatches": 4}],
        **changes,
    }


def load(**changes: Any) -> Campaign:
    return campaign_from_mapping(mapping(**changes), "mine.yaml")


def test_the_shipped_campaigns_are_as_large_as_promised() -> None:
    assert set(campaign_names()) == {
        "cpu-gloo", "single-gpu", "single-gpu-families", "single-gpu-convolutions", "multi-gpu",
    }  # fmt: skip
    sizes = {name: len(load_campaign(name).report) for name in campaign_names()}
    assert sizes["cpu-gloo"] >= 16 and sizes["single-gpu"] >= 40 and sizes["multi-gpu"] >= 16
    schedules = {(each.plan.schedule, len(each.plan.stages)) for each in load_campaign("cpu-gloo").report}
    assert {("gpipe", 2), ("1f1b", 2), ("interleaved", 4), ("zb-h1", 2), ("1f1b", 1)} <= schedules
    single = load_campaign("single-gpu").report
    assert {each.problem.workload.family for each in single} == {"gpt", "bert", "llama", "vit"}
    assert {each.problem.runtime.implementation.dtype for each in single} == {"bf16", "fp32"}
    assert {each.problem.runtime.attention for each in single} == {"plain", "flash"}
    words = {word for each in single for word in each.name.split() if word.startswith("recompute")}
    assert words == {"recompute-selective", "recompute-full"}
    assert any("recompute" not in each.name for each in single)
    others = load_campaign("single-gpu-families").report
    assert {each.problem.workload.family for each in others} == {"gpt", "t5", "swin", "resnet", "vgg", "xlnet", "gnmt"}


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("cpu-gloo", None), ("single-gpu", None), ("single-gpu", "a100-80g-dgx:1x1"), ("single-gpu-families", None),
        ("single-gpu-convolutions", None),
        ("multi-gpu", "h100-dgx:1x4"),
    ],
)
def test_every_run_of_a_shipped_campaign_is_executable_and_said_to_fit(name: str, cluster: str | None) -> None:
    campaign = load_campaign(name, cluster=cluster)
    work = campaign_work(campaign)  # refuses what cannot be executed, and profiling runs that are report plans
    assert sum(len(unit.report) for unit in work) == len(campaign.report)
    runs = [job for unit in work for job in unit.jobs]
    # The largest of each unit hold more than the others; on one GPU they are what could fail to fit.
    largest = {id(unit): max(unit.jobs, key=lambda job: job.plan.microbatch_size) for unit in work}
    for job in runs if not name.startswith("single-gpu") else largest.values():
        assert simulate(job.plan, job.problem, engine="compiled").fits, job.plan


def test_every_kind_that_can_be_executed_has_a_class() -> None:
    assert set(CLASS_OF_KIND) == set(BUILDERS)


def test_a_plan_in_calibration_and_report_is_refused_however_it_is_spelled() -> None:
    spelled = {"model": "gpt", "pp": 2, "num_microbatches": 4, "schedule": "gpipe", "stage_layers": [2, 2]}
    with pytest.raises(DataFileError, match=r"must not share a plan.*layers2-2.*of the report is 'gpt pp2 gpipe 4x1'"):
        load(report=[spelled])
    with pytest.raises(DataFileError, match="report has the plan 'gpt dp2 1x1' twice"):
        load(report=[{"model": "gpt", "dp": 2}, {"model": "gpt", "dp": 2}])


def test_no_profiling_run_is_a_report_plan() -> None:
    split = {"model": "gpt", "dp": 2, "num_microbatches": 4, "schedule": "zb-h1"}
    campaign = load(report=[{"model": "gpt", "dp": 2, "num_microbatches": [4, 5], "schedule": "gpipe"}, split])
    (unit,) = campaign_work(campaign)
    workload = unit.problem.workload
    runs = [*unit.profiling.operators, *unit.alone, *unit.halves]
    profiling = {run.job.plan.canonical_hash(workload) for run in runs}
    assert unit.halves and len(profiling) == len(runs)
    assert not profiling & {each.plan.canonical_hash(workload) for each in campaign.report}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"report": [{"model": "gtp"}]}, "report.0: model must be one of the campaign, got 'gtp'; did you mean 'gpt'"),
        ({"report": [{"model": "gpt", "runtime": "bf16"}]}, "runtime must be one of the campaign, got 'bf16'"),
        ({"report": [{"model": "gpt", "pp": 4}]}, "tp \\* pp \\* dp must be at most the cluster's 2 devices"),
        ({"report": []}, "report"),
        ({"report": [{"model": "gpt", "pp": 2, "microbatch": []}]}, "microbatch: must have at least 1 value, got"),
        ({"report": [{"model": []}]}, "report.0.model: must have at least 1 value, got a list of 0"),
        ({"report": [{"model": "gpt", "recompute": []}]}, "report.0.recompute: must have at least 1 value, got a list"),
        ({"colour": "red"}, "colour: unknown key"),
        (
            {"report": [{"model": "gpt", "pp": 2, "stage_layers": [1, 1]}]},
            "stage_layers must name 2 numbers that add up to 4",
        ),
        ({"runtimes": {"a": {"base": "windtunnel-executor"}, "b": {"base": "alpa"}}}, "runtime must be named"),
        (
            {"models": {"communication": MODEL}, "report": [{"model": "communication"}], "calibration": []},
            "files of 'communication' .* would be those of the campaign's own communication too; give another name",
        ),
        (
            {"models": {"a b": MODEL, "a_b": MODEL}, "report": [{"model": "a b"}, {"model": "a_b"}], "calibration": []},
            r"files of 'a_b' \(a_b\) would be those of 'a b' too",
        ),
        (
            {
                "models": {"a": MODEL, "a.calibration": MODEL},
                "report": [{"model": "a.calibration"}, {"model": "a"}],
                "calibration": [],
            },
            r"files of 'a' \(a\.calibration\) would be those of 'a\.calibration' too",
        ),
    ],
)
def test_a_bad_campaign_says_where_and_what(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(**changes)


def test_lists_stand_for_every_combination() -> None:
    entry = {"model": "gpt", "dp": 2, "microbatch": [1, 2], "num_microbatches": [1, 3], "recompute": ["none", "full"]}
    plans = load(report=[entry]).report
    assert len(plans) == 8
    assert plans[1].name == "gpt dp2 recompute-full 1x1"
    assert {each.problem.global_batch for each in plans} == {2, 4, 6, 12}


def test_the_fingerprint_is_of_what_runs_not_of_how_often() -> None:
    plain = load()
    assert load(options={"rounds": 9, "statistic": "fastest"}).fingerprint == plain.fingerprint
    assert load(options={"ranking_margin": 0.5}).fingerprint == plain.fingerprint
    assert load(options={"iterations": 9}).fingerprint != plain.fingerprint
    assert load(report=[{"model": "gpt", "pp": 2, "num_microbatches": 6}]).fingerprint != plain.fingerprint


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"host_seconds_per_operator": (1e-3, 1e-3), "context_bytes": 1 << 20}, True),
        ({"recompute_stops_early": False}, False),
        ({"gradient_bucket_bytes": 1_000_000}, False),
        ({"gradient_accumulation_bytes": 2}, False),
    ],
)
def test_what_was_measured_stands_when_only_predictions_change(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], is_same: bool
) -> None:
    before = load().fingerprint
    shipped = definition.load_runtime
    monkeypatch.setattr(definition, "load_runtime", lambda name: replace(shipped(name), **changes))
    assert (load().fingerprint == before) == is_same


def test_sizes_between_calibrated_ones_are_interpolated_others_are_profiled() -> None:
    campaign = load(
        calibration=[{"model": "gpt", "microbatch": [2, 8], "num_microbatches": 1}],
        report=[{"model": "gpt", "microbatch": [4, 16], "num_microbatches": 1}, {"model": "gpt", "tp": 2}],
    )
    assert profiled_sizes(campaign.calibration, campaign.report) == [(1, 2), (2, 1), (8, 1), (16, 1)]


def test_plan_files_are_no_campaigns(tmp_path: Any) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("windtunnel_plan: 1\n")
    assert not is_campaign(str(path)) and not is_campaign("nothing.yaml") and is_campaign("cpu-gloo")
    with pytest.raises(ValueError, match="a campaign must be a shipped one or a file"):
        load_campaign("cpu-glow")
