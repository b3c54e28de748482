"""The accuracy cases and the gate, without public data sets: what a clean clone has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from experiments.accuracy.baseline import figures_of
from experiments.accuracy.calibration_rows import calibration_rows, named_rows
from experiments.accuracy.docs import write_docs
from experiments.accuracy.errors import DISTINGUISHABLE, ErrorReport, rank_report
from experiments.accuracy.groups import groups
from experiments.accuracy.plots import plot_group, scale_by_log
from experiments.accuracy.run import (
    Outcome,
    check_cases,
    group_reports,
    report_of,
    residuals_by,
    run_case,
    run_cases,
    telling_features,
)
from experiments.cases import alpa, galvatron_table2, megatron_sc21, vtrain
from experiments.cases.case import Case, Measured, Skipped, problem_of, uniform
from experiments.cases.sources import all_cases, data_folder
from hardware_models.gpus import gpu_names
from simulator.problem import Problem
from simulator.simulate import simulate
from workloads.models.gpt import GPTSpec

MODEL = GPTSpec(name="tiny", layers=4, hidden=256, heads=4, seq_len=128, vocab=1000)


@pytest.fixture(scope="module")
def printed() -> list[Case]:
    return [entry for entry in all_cases(None) if isinstance(entry, Case)]


def a_case(row_id: str = "tiny.csv#1", seconds: float | None = 1.0, **more: object) -> Case:
    fields: dict[str, object] = {
        "groups": ("megatron-sc21-table1",),
        "problem": problem_of(model=MODEL, cluster="a100-80g-dgx:1x2", runtime="megatron-lm-2021", global_batch=8),
        "plan": uniform(dp=2, microbatch=2),
        "measured": Measured(iteration_time_s=seconds, out_of_memory=False),
        "source": "made up",
        "features": {"tp": 1},
        **more,
    }
    return Case(row_id=row_id, **fields)  # type: ignore[arg-type]


def test_a_clean_clone_has_at_least_forty_cases(printed: list[Case]) -> None:
    assert len(printed) >= 40
    assert {name for case in printed for name in case.groups} == {
        name for name, group in groups().items() if not group.needs_data
    }


def test_values_of_a_feature_are_in_the_order_of_their_size(printed: list[Case]) -> None:
    cases = [case for case in printed if case.row_id.startswith("megatron_sc21")]
    outcomes = [cast(Outcome, SimpleNamespace(case=case)) for case in cases]
    by_stages = residuals_by(outcomes, ["pp"], dict.fromkeys((case.row_id for case in cases), 0.1))
    assert [int(stages) for (stages,) in by_stages] == [1, 2, 4, 8, 16, 35, 64]


def test_row_ids_are_unique_and_no_constant_was_fitted_on_a_reported_row(printed: list[Case]) -> None:
    check_cases(printed)


def test_every_printed_case_has_a_plan_that_is_legal(printed: list[Case]) -> None:
    from simulator.validate import validate

    for case in printed:
        if case.features.get("strategy") in galvatron_table2.SEARCHED and case.features["model"] != "vit-huge-32":
            continue  # each is a search
        if case.row_id.startswith("megatron") and int(case.row_id.partition("#")[2]) > 6:
            continue  # thousands of GPUs: simulated by the gate
        problem = case.problem()
        validate(case.plan(problem), problem)


def test_groups_that_need_data_are_skipped_with_a_reason() -> None:
    skipped = [entry for entry in all_cases(None) if isinstance(entry, Skipped)]
    assert {name for entry in skipped for name in entry.groups} == {
        name for name, group in groups().items() if group.needs_data
    }
    assert all("--data" in entry.reason for entry in skipped)


def test_a_data_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must exist"):
        data_folder(tmp_path / "nothing")


def test_an_empty_data_folder_skips_every_public_set(tmp_path: Path) -> None:
    entries = list(all_cases(tmp_path))
    reasons = {entry.reason for entry in entries if isinstance(entry, Skipped)}
    assert reasons and all("the data folder has no" in reason for reason in reasons)


def test_reported_flop_gives_the_iteration_times_of_sc21(printed: list[Case]) -> None:
    first = next(case for case in printed if case.row_id == "megatron_sc21_table1.csv#1")
    assert first.measured.iteration_time_s == pytest.approx(3.53, rel=2e-3)  # the data README derives the same
    assert megatron_sc21.reported_flop(MODEL, 1) > 0


def test_a_calibration_row_is_refused() -> None:
    fitted = sorted(calibration_rows())[0]
    with pytest.raises(ValueError, match="constants were fitted on 1 of the rows"):
        check_cases([a_case(fitted)])


def test_two_cases_of_one_row_are_refused() -> None:
    with pytest.raises(ValueError, match="one case"):
        check_cases([a_case(), a_case()])


def test_an_unknown_group_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="vtrain-single-node"):
        run_cases([], only=["vtrain-single-nod"])


@pytest.mark.parametrize(
    ("hidden", "tp", "row", "may_be_fitted"),
    [(1024, 1, 8, True), (1024, 2, 8, True), (1024, 1, 9, False), (1024, 4, 8, False), (2048, 1, 8, False)],
)
def test_constants_are_never_fitted_out_of_distribution(hidden: int, tp: int, row: int, may_be_fitted: bool) -> None:
    assert vtrain.is_calibration({"hidden": hidden, "tp": tp, "notes": f"1F1B; CSV row {row}"}) is may_be_fitted


def test_constants_are_fitted_on_at_most_a_tenth_of_vtrains_716_rows() -> None:
    fitted = {row_id for row_id in calibration_rows() if row_id.startswith("vtrain/")}
    assert 0 < len(fitted) <= 71
    assert all(int(row_id.partition("#")[2]) % vtrain.CALIBRATION_EVERY == 0 for row_id in fitted)


def test_row_ids_are_found_in_sources() -> None:
    found = list(named_rows(["fit on x/y.csv#2,4-6, and z.csv#9"]))
    assert found == ["x/y.csv#2", "x/y.csv#4", "x/y.csv#5", "x/y.csv#6", "z.csv#9"]


def test_a_case_runs_and_its_error_is_signed() -> None:
    outcome = run_case(a_case(seconds=1e-9))
    assert outcome.time_error is not None and outcome.time_error > 0
    assert not outcome.out_of_memory and outcome.peak_bytes > 0
    slower = run_case(a_case(seconds=2 * outcome.iteration_time_s))
    assert slower.time_error == pytest.approx(-0.5)


def test_a_too_small_memory_is_predicted_out_of_memory() -> None:
    small = problem_of(
        model=MODEL,
        cluster="a100-80g-dgx:1x2",
        runtime="megatron-lm-2021",
        global_batch=8,
        memory_limit_bytes=840 << 20,
    )
    case = a_case(problem=small, measured=Measured(out_of_memory=True))
    (report,) = group_reports([run_case(case)], [], only=["megatron-sc21-table1"])
    assert (report.num_fits_asked, report.num_fits_right, report.num_wrong_fits) == (1, 1, 0)
    assert report.time is None and report.fits_agreement == 1.0


def test_average_peaks_count_every_device() -> None:
    def average(flag: bool) -> float:
        measured = Measured(peak_bytes=1e9, peak_is_average=flag)
        return run_case(a_case(plan=uniform(pp=2, microbatch=2), measured=measured)).peak_bytes

    assert average(True) < average(False)


def test_error_report_of_known_numbers() -> None:
    report = ErrorReport.of([("a", 1.1, 1.0), ("b", 0.7, 1.0), ("c", 1.0, 1.0)])
    assert report is not None
    assert report.mean_absolute == pytest.approx(0.4 / 3)
    assert report.median_absolute == pytest.approx(0.1)
    assert report.bias == pytest.approx(-0.2 / 3)
    assert report.worst == ("b", pytest.approx(-0.3))
    assert ErrorReport.of([]) is None


def test_ranks_leave_out_pairs_that_hardly_differ() -> None:
    report = rank_report({"x": [(1.0, 1.00), (0.9, 1.03), (2.0, 3.0)]})
    assert report is not None
    assert (report.num_pairs, report.num_agreeing, report.correlation) == (2, 2, 1.0)
    assert report.spearman == pytest.approx(0.5)
    assert rank_report({"x": [(1.0, 1.0)]}) is None


def test_pairs_are_asked_for_beyond_five_per_cent_of_the_quicker() -> None:
    def pairs(slower: float) -> int:
        report = rank_report({"x": [(1.0, 1.0), (2.0, slower)]})
        return report.num_pairs if report is not None else 0

    assert [pairs(slower) for slower in (1.049, 1.051, 1.06)] == [0, 1, 1]


def test_spearman_is_the_mean_of_sets_of_three_and_more_by_their_size() -> None:
    three, four = [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)], [(4.0, 1.0), (3.0, 2.0), (2.0, 3.0), (1.0, 4.0)]
    two = [(1.0, 2.0), (2.0, 1.0)]
    report = rank_report({"a": three, "b": four, "c": two})
    assert report is not None and report.spearman == pytest.approx((3 - 4) / 7)
    assert (report.num_pairs, report.num_agreeing) == (3 + 6 + 1, 3)
    alone = rank_report({"a": two, "b": three[:2], "c": three[1:]})
    assert alone is not None and alone.spearman == alone.correlation == pytest.approx(1 / 3)
    flat = rank_report({"a": [(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]})
    assert flat is not None and flat.spearman == 0.0


def test_the_figures_of_a_group_are_counted() -> None:
    """Right twice, once a false alarm, once predicted to fit what did not; per sample 1 s beats 1.5 s, as predicted."""

    def outcome(number: int, predicted: bool, measured: bool | None, **more: object) -> Outcome:
        case = a_case(f"t.csv#{number}", **more, measured=measured_of(measured))
        return Outcome(case, 12.0, predicted, 5e9, 0.1, f"plan {number}", 1)

    def measured_of(out_of_memory: bool | None) -> Measured:
        return Measured(iteration_time_s=None if out_of_memory else 8.0, out_of_memory=out_of_memory, peak_bytes=4e9)

    outcomes = [
        outcome(1, False, False, rivals="m", rival_samples=8),
        outcome(2, True, False, rivals="m", rival_samples=4),
        outcome(3, False, True, rivals="m"),
        outcome(4, True, True),
        outcome(5, False, None, rivals="alone"),
    ]
    skipped = [
        Skipped(("a",), 3, "why"), Skipped(("b",), 1, "other"), Skipped(("a", "b"), 2, "why"),
        Skipped(("a",), 0, "none"),
    ]  # fmt: skip
    found = report_of("a", outcomes, skipped)
    assert (found.num_run, found.num_skipped, found.reasons) == (5, 5, ("why",))
    assert report_of("a", [], skipped).reasons == ("why", "none")
    assert (found.num_fits_asked, found.num_fits_right, found.num_wrong_fits) == (4, 2, 1)
    assert found.fits_agreement == 0.5
    assert found.time is not None and found.time.num_cases == 3 and found.time.bias == pytest.approx(0.5)
    assert found.memory is not None and found.memory.num_cases == 5 and found.memory.bias == pytest.approx(0.25)
    assert found.rank is not None and (found.rank.num_pairs, found.rank.num_agreeing) == (1, 1)


def test_runs_of_one_plan_are_ranked_as_one() -> None:
    """Two runs of a plan, 20 % apart, are no pair in the wrong order, as two plans with one prediction are."""

    def outcome(number: int, predicted: float, measured: float, plan: str) -> Outcome:
        case = a_case(f"t.csv#{number}", rivals="m", measured=Measured(iteration_time_s=measured))
        return Outcome(case, predicted, False, 5e9, 0.1, plan, 1)

    twice = [outcome(1, 1.0, 1.0, "a"), outcome(2, 1.0, 1.2, "a")]
    assert report_of("a", twice).rank is None
    tied = report_of("a", [twice[0], outcome(2, 1.0, 1.2, "b")]).rank
    assert tied is not None and (tied.num_pairs, tied.num_agreeing) == (1, 0)
    found = report_of("a", [*twice, outcome(3, 2.0, 3.0, "c")]).rank
    assert found is not None and (found.num_pairs, found.num_agreeing, found.correlation) == (1, 1, 1.0)


def test_only_the_groups_asked_for_are_run_and_each_case_is_said() -> None:
    said: list[tuple[int, int, str]] = []
    cases = [a_case(f"tiny.csv#{number}", groups=(group,)) for number, group in enumerate(("vtrain-single-node",) * 2)]
    cases.append(a_case("other.csv#1", groups=("dapple-table5", "vtrain-single-node")))
    skipped = [Skipped(("dapple-table5",), 1, "why"), Skipped(("aceso-gpt-likely",), 1, "why")]
    outcomes, left = run_cases(
        [*cases, *skipped], only=["dapple-table5"], listener=lambda *words: said.append(words)
    )  # fmt: skip
    assert [each.case.row_id for each in outcomes] == ["other.csv#1"] and left == skipped[:1]
    assert said == [(0, 1, "other.csv#1")]
    assert len(run_cases([*cases, *skipped])[0]) == 3


def test_live_bytes_are_held_to_the_limit_where_the_measured_system_counts_those() -> None:
    """A budget between live and reserved bytes."""
    whole = run_case(a_case(measured=Measured(peak_bytes=1.0)))
    reserved = run_case(a_case(measured=Measured(peak_bytes=1.0, peak_is_reserved=True)))
    assert whole.peak_bytes < reserved.peak_bytes and whole.memory_error == whole.peak_bytes - 1

    def limited(num_bytes: int) -> Callable[[], Problem]:
        return problem_of(
            model=MODEL, cluster="a100-80g-dgx:1x2", runtime="megatron-lm-2021", global_batch=8,
            memory_limit_bytes=num_bytes,
        )  # fmt: skip

    probe = limited(4 << 30)()
    taken = (4 << 30) - simulate(whole.case.plan(probe), probe).memory[0].capacity_bytes  # beside the allocator
    between = limited(int((whole.peak_bytes + reserved.peak_bytes) / 2 + taken))
    found = [
        run_case(a_case(problem=between, measured=Measured(out_of_memory=False, limits_live_bytes=live))).out_of_memory
        for live in (False, True)
    ]
    assert found == [True, False]


def test_plans_of_different_batches_are_ranked_by_time_per_sample(printed: list[Case]) -> None:
    by_rivals: dict[str, set[int]] = {}
    for case in printed:
        if case.rivals is not None and "galvatron-table2" in case.groups:
            by_rivals.setdefault(case.rivals, set()).add(case.rival_samples)
    assert any(len(batches) > 1 for batches in by_rivals.values())


def test_residuals_by_feature() -> None:
    outcomes = [run_case(a_case(f"tiny.csv#{number}", features={"tp": number % 2})) for number in range(4)]
    found = residuals_by(outcomes, ["tp", "none"])
    assert list(found) == [("0", "-"), ("1", "-")] and found["0", "-"][0] == 2
    known = {"tiny.csv#0": 0.5, "tiny.csv#2": -0.25}
    assert residuals_by(outcomes, ["tp"], known) == {("0",): (2, 0.375, 0.125)}


def test_features_that_tell_cases_apart_are_kept_where_several_share_a_value() -> None:
    """Not one that all share, nor one of which each case has its own; of the others no value of a single case."""
    features = [{"tp": 1 if number < 3 else 2, "gpu": "one", "row": number} for number in range(4)]
    outcomes = [run_case(a_case(f"tiny.csv#{number}", features=own)) for number, own in enumerate(features)]
    assert telling_features(outcomes) == ["tp"]
    found = report_of("tiny", outcomes)
    assert found.time is not None
    assert found.error_by_feature == {"tp": {"1": pytest.approx(found.time.mean_absolute)}}
    kept = figures_of(found)
    assert kept is not None and kept.error_by_feature == {"tp": {"1": kept.time_mean_absolute}}


# Loaders on synthetic rows of the public layouts


def test_alpa_rows_without_a_stated_split_are_skipped(tmp_path: Path) -> None:
    folder = tmp_path / "measured_runs"
    folder.mkdir()
    (folder / "alpa_p3_gpt.csv").write_text(
        "source,instance,hosts,gpus_per_host,gpus,model,config,global_batch,microbatches,method,plan,iter_time_s,"
        "iter_time_derived_s,tflops_per_gpu,peak_mem_GB,params_B,note\n"
        "x,p3,1,4,4,gpt,GPT-1.3B S1024,1024,128,megatron,dp2 tp1 pp2,,52.0,,,,\n"
        'x,p3,1,4,4,gpt,GPT-1.3B S1024,1024,128,alpa.auto,"{""n_auto_layers"": 6, ""layers"": [[0, 1, 2], [3, 4, 5]], '
        '""submesh"": [[1, 2], [1, 2]], ""logical"": [[2, 1], [2, 1]], ""force_dp"": [1, 1]}",,50.0,,,,\n'
        'x,p3,1,4,4,gpt,GPT-1.3B S1024,1024,64,alpa.intra_only,"logical mesh (4,1)",,49.9,,,,\n'
    )
    entries = list(alpa.cases(tmp_path))
    cases = [entry for entry in entries if isinstance(entry, Case)]
    plans = [case.plan(case.problem()) for case in cases]
    assert [len(plan.stages) for plan in plans] == [2, 2] and all(plan.microbatch_size == 8 for plan in plans)
    assert [entry.num_rows for entry in entries if isinstance(entry, Skipped)] == [1]


def test_vtrain_rows_become_cases_without_calibration_rows(tmp_path: Path) -> None:
    folder = tmp_path / "measured_runs"
    folder.mkdir()
    header = (
        "source,model,layers,hidden,heads,ffn,vocab,seq,gpu,gpus,gpus_per_node,intra_bw,inter_bw,tp,pp,dp,zero,vpp,"
        "microbatch,global_batch,recompute,seqpar,dtype,metric,value,unit,notes\n"
    )
    line = (
        "vTrain data/ground_truth_single.csv,gpt,4,1024,16,4096,50257,1024,A100,2,8,x,,{tp},1,1,0,1,2,4,full,0,fp16,"
        "iteration_time,100,ms,CSV row {row}\n"
    )
    (folder / "dev.csv").write_text(
        header + "".join(line.format(tp=tp, row=row) for tp, row in ((1, 4), (1, 5), (4, 8)))
    )
    entries = list(vtrain.cases(tmp_path))
    cases = [entry for entry in entries if isinstance(entry, Case)]
    assert [case.row_id.partition("#")[2] for case in cases] == ["5", "8"]
    assert vtrain.OTHER_TENSOR in cases[1].groups and vtrain.IN_DISTRIBUTION in cases[0].groups
    assert cases[0].measured.iteration_time_s == 0.1
    rows = vtrain.rows(tmp_path)
    assert [vtrain.spec_of(row).vocab_multiple for row in rows] == [1, 1, 512]  # what is split is padded
    assert [entry.num_rows for entry in entries if isinstance(entry, Skipped)] == [1]


def test_the_pipeline_of_galvatron_splits_equal_layers_evenly_and_t5_by_memory(printed: list[Case]) -> None:
    problems = {str(case.features["model"]): case.problem() for case in printed if "galvatron-table2" in case.groups}
    assert galvatron_table2.memory_balanced(problems["bert-huge-32"]) == [4] * 8
    uneven = galvatron_table2.memory_balanced(problems["t5-large-32"])
    assert sum(uneven) == 32 and len(uneven) == 8 and min(uneven) >= 1 and len(set(uneven)) > 1


# Pages and pictures


def test_a_picture_is_drawn_for_a_group_with_times(tmp_path: Path) -> None:
    outcomes = [run_case(a_case(f"tiny.csv#{number}", seconds=0.02 * number)) for number in (1, 2)]
    (found,) = group_reports(outcomes, [], only=["megatron-sc21-table1"])
    assert plot_group(found, outcomes, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert not plot_group(replace(found, time=None), [], tmp_path / "y.png")


def test_the_page_names_every_group_and_its_peers(tmp_path: Path) -> None:
    outcomes = [run_case(a_case())]
    path = tmp_path / "docs" / "accuracy.md"
    write_docs(group_reports(outcomes, []), outcomes, path)
    text = path.read_text()
    for group in groups().values():
        assert group.title.strip() in text
        assert all(peer.name in text for peer in group.peers)
    assert f"more than {DISTINGUISHABLE:.0%}".replace("%", " %") in text  # what the rank column is over
    assert (tmp_path / "docs" / "accuracy" / "megatron-sc21-table1.png").exists()
    (line,) = [line for line in text.splitlines() if line.startswith("No measured run above is on")]
    named = line.split(": ")[1].split(".")[0].split(", ")
    assert set(named) == set(gpu_names()) - set(outcomes[0].case.problem().gpu_types)


@pytest.mark.parametrize(("low", "high"), [(53.0, 139.0), (0.03, 0.35), (1.0, 4000.0)])
def test_a_scale_is_written_in_plain_numbers_several_of_them(low: float, high: float) -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    scale_by_log(axes, low, high)
    ticks = [place for place in axes.xaxis.get_majorticklocs() if low <= place <= high]
    assert len(ticks) >= 3
    assert [float(text) for text in axes.xaxis.get_major_formatter().format_ticks(ticks)] == pytest.approx(ticks)
