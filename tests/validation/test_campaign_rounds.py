"""A damaged round of a campaign is refused before anything is measured, and stays where it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from datafiles.errors import DataFileError  # noqa: E402
from tests.validation.test_campaign_faults import ALONE  # noqa: E402
from validation.campaigns import run as campaign_run  # noqa: E402
from validation.campaigns.definition import campaign_from_mapping  # noqa: E402
from validation.campaigns.run import FORMAT, load_rounds, prepare_folder, run_campaign  # noqa: E402
from validation.campaigns.work import campaign_work  # noqa: E402
from validation.execution.executor import ran_out_of_memory  # noqa: E402
from validation.measurement_file import measurement_mapping  # noqa: E402


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("}", "", "malformed JSON: .*"),
        ('"jobs"', '"job"', r"(.|\n)*jobs: is required, but missing(.|\n)*"),
        ('"jobs": [', '"jobs": [null, ', r"jobs\.0: .*"),
        ('"out_of_memory": true', '"out_of_memory": false', "iteration_time_s must be above 0, got 0"),
        ('"plan_hash": "', '"plan_hash": "0', "does not hold what the campaign runs"),
        (FORMAT, "another", r"must be a round of a campaign \(windtunnel-campaign-round-1\)"),
    ],
)
def test_a_damaged_round_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, message: str
) -> None:
    campaign = campaign_from_mapping(ALONE, "alone.yaml")
    (unit,) = work = campaign_work(campaign)
    prepare_folder(campaign, tmp_path, with_profiling=True)
    jobs = [measurement_mapping(ran_out_of_memory(job, "cpu"), with_trace=False) for job in unit.jobs]
    text = json.dumps({"format": FORMAT, "jobs": jobs})
    (first := tmp_path / "rounds" / "001-gpt.json").write_text(text)
    (turn,) = load_rounds(campaign, work, tmp_path)
    assert len(turn.measured["gpt"]) == len(unit.jobs)
    (second := tmp_path / "rounds" / "002-gpt.json").write_text(text.replace(old, new, 1))
    monkeypatch.setattr(campaign_run, "execute_rounds", lambda *jobs, **options: pytest.fail("something ran"))
    first.unlink()
    with pytest.raises(DataFileError, match=f"002-gpt.json.*: {message}; remove it to measure again"):
        run_campaign(campaign, work, tmp_path, rounds=3)
    assert second.read_text() == text.replace(old, new, 1)


def test_rounds_of_another_torch_are_not_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    campaign = campaign_from_mapping(ALONE, "alone.yaml")
    (unit,) = work = campaign_work(campaign)
    today = campaign_run.versions()
    monkeypatch.setattr(campaign_run, "versions", lambda: {"torch": "1.8.0", "python": "3.11"})
    prepare_folder(campaign, tmp_path, with_profiling=True)
    monkeypatch.setattr(campaign_run, "versions", lambda: today)
    prepare_folder(campaign, tmp_path, with_profiling=True)  # nothing was measured before torch was updated
    jobs = [measurement_mapping(ran_out_of_memory(job, "cpu"), with_trace=False) for job in unit.jobs]
    (tmp_path / "rounds" / "001-gpt.json").write_text(json.dumps({"format": FORMAT, "jobs": jobs}))
    monkeypatch.setattr(campaign_run, "versions", lambda: {"torch": "1.9.0", "python": "3.11"})
    monkeypatch.setattr(campaign_run, "execute_rounds", lambda *jobs, **options: pytest.fail("something ran"))
    run_campaign(campaign, work, tmp_path, rounds=1)  # nothing is left to measure
    with pytest.raises(ValueError, match=r"same versions, but those in .* are of torch .*, here 1\.9\.0"):
        run_campaign(campaign, work, tmp_path, rounds=2)
    (tmp_path / "campaign.json").write_text("{")
    with pytest.raises(DataFileError, match=r"campaign\.json.*malformed JSON: .*; bring it back, or give another -o"):
        run_campaign(campaign, work, tmp_path, rounds=1)


def test_a_folder_says_whether_its_rounds_have_profiles_of_their_own(tmp_path: Path) -> None:
    campaign = campaign_from_mapping(ALONE, "alone.yaml")
    prepare_folder(campaign, tmp_path, with_profiling=True)
    words = r"another kind \(with profiles of its own; this is with a profile that was given\); give another -o"
    with pytest.raises(ValueError, match=words):
        prepare_folder(campaign, tmp_path, with_profiling=False)
