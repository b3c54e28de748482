"""A table of runs says the same as the plans and times that its rows name."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.run_remarks import other_dtypes, unknown_gpus
from experiments.run_table import Common, columns_not_read, load_runs, resembled
from simulator.plan_file import save_plan
from simulator.problem import ProblemSpec
from simulator.uniform import uniform_plan
from workloads.registry import build_workload

GPT = {"model": "mine", "layers": 4, "hidden": 256, "heads": 4, "seq": 128, "vocab": 1024}
DEGREES = {"gpus": 16, "tp": 2, "pp": 2, "dp": 4, "microbatch": 2, "global_batch": 64}
COMMON = Common(cluster="a100-80g-dgx", runtime="megatron-lm-2021")


def table(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "runs.csv"
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_row_of_degrees_is_the_plan_that_they_name(tmp_path: Path) -> None:
    row = {**GPT, **DEGREES, "recompute": "full", "vpp": 2, "seqpar": 1, "iteration_time_s": 1.5, "source": "a log"}
    path = table(tmp_path, row)
    (case,) = load_runs(path, COMMON)
    problem = case.problem()
    assert problem.hardware.cluster.name == "a100-80g-dgx:2x8" and problem.global_batch == 64
    assert problem.workload.tokens_per_sample == 128 and len(problem.workload.layers) == 6
    wanted = uniform_plan(
        problem, tp=2, pp=2, dp=4, microbatch=2, recompute="full", sequence_parallel=True, schedule="interleaved",
        chunks=2,
    )  # fmt: skip
    assert case.plan(problem) == wanted
    assert case.measured.iteration_time_s == 1.5 and case.measured.out_of_memory is None
    assert case.features["chunks"] == "2" and case.features["source"] == "a log"
    assert columns_not_read(path) == {"source": None}


def test_a_row_may_name_a_plan_file_or_a_model(tmp_path: Path) -> None:
    spec = ProblemSpec("gpt3-350m", "v100-32g-dgx1:1x4", "megatron-lm-2021", 16)
    plan = uniform_plan(spec.load(), tp=2, dp=2, microbatch=4)
    save_plan(tmp_path / "plan.yaml", spec, plan)
    named = {
        "model": "gpt3-350m", "cluster": "v100-32g-dgx1:1x4", "tp": 2, "microbatch": 4, "global_batch": 16,
    }  # fmt: skip
    first, second = load_runs(table(tmp_path, {"plan": "plan.yaml"}, named), Common(runtime="megatron-lm-2021"))
    assert first.plan(first.problem()) == second.plan(second.problem()) == plan
    assert second.problem().spec == spec


def test_columns_change_a_known_model_its_layers_too(tmp_path: Path) -> None:
    row = {"model": "gpt3-350m", "layers": 12, "microbatch": 4, "global_batch": 16, "gpus": 1}
    (case,) = load_runs(table(tmp_path, row), COMMON)
    known = build_workload("gpt3-350m", attention="plain")
    workload = case.problem().workload
    assert (len(known.layers), len(workload.layers)) == (26, 14)
    assert workload.tokens_per_sample == known.tokens_per_sample
    with pytest.raises(ValueError, match="hidden: is required, but missing"):
        load_runs(table(tmp_path, {**row, "model": "mine"}), COMMON)


def test_models_clusters_and_runtimes_may_be_files_beside_the_table(tmp_path: Path) -> None:
    node = {"gpu": "a100-sxm4-80gb", "gpus_per_node": 4, "links": "nvswitch-a100", "network": "ib-100g"}
    lines = [*(f"{key}: {value}" for key, value in node.items()), "nics_per_node: 1", 'description: "four"']
    (tmp_path / "node.yaml").write_text("\n".join([*lines, 'source: "none"']))
    (tmp_path / "gpt.yaml").write_text("family: gpt\nlayers: 4\nhidden: 256\nheads: 4\nseq_len: 128\nvocab: 1024\n")
    row = {"model": "gpt.yaml", "cluster": "node.yaml:2x4", "tp": 2, "pp": 2, "microbatch": 1, "global_batch": 8}
    (case,) = load_runs(table(tmp_path, row), COMMON)
    assert case.problem().num_devices == 8 and len(case.problem().workload.layers) == 6
    (case,) = load_runs(table(tmp_path, {**row, "cluster": "node.yaml"}), COMMON)
    assert case.problem().num_devices == 4, "as many as the degrees need"


@pytest.mark.parametrize(
    ("measured", "seconds"),
    [
        ({"metric": "iteration_time", "value": 2500, "unit": "ms"}, 2.5),
        ({"metric": "samples_per_s", "value": 32}, 2.0),
        ({"metric": "tokens_per_s", "value": 4096}, 2.0),
        # 3 passes of 24 s l h^2 (1 + s / 6h), and the head's 6 s h V, a sample; 64 samples, 16 GPUs.
        (
            {"metric": "tflops_per_gpu", "value": 1.5},
            64 * (72 * 128 * 4 * 256**2 * (1 + 128 / (6 * 256)) + 6 * 128 * 256 * 1024) / (16 * 1.5e12),
        ),
        (
            {"metric": "tflops_per_gpu", "value": 1.5, "recompute": "full"},
            64 * 96 * 128 * 4 * 256**2 * (1 + 128 / (6 * 256) + 1024 / (16 * 4 * 256)) / (16 * 1.5e12),
        ),
        ({"value": ""}, None),
    ],
)
def test_what_was_measured_is_an_iteration_time(tmp_path: Path, measured: dict[str, Any], seconds: float) -> None:
    (case,) = load_runs(table(tmp_path, {**GPT, **DEGREES, **measured}), COMMON)
    found = case.measured.iteration_time_s
    assert found == (None if seconds is None else pytest.approx(seconds, rel=1e-12))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp": 0}, "tp must be at least 1, got 0"),
        ({"global_batch": -8}, "global_batch must be at least 1, got -8"),
        ({"gpus_per_node": 0}, "gpus_per_node must be at least 1, got 0"),
        ({"cluster": "a100-80g-dgx:1x8"}, "8 of a100-80g-dgx:1x8, got 16; name the preset alone, a100-80g-dgx, and"),
        ({"cluster": "a100-80g-dgx:1x8+h100-dgx:1x4"}, "12 of a100-80g-dgx:1x8\\+h100-dgx:1x4, got 16$"),
        ({"cluster": "a100-80g-dgx+h100-dgx"}, "every part of a mixed cluster must have a shape"),
        ({"microbatch": ""}, "row 1: a run without a plan file must have a microbatch"),
        ({"global_batch": ""}, "must have a global_batch"),
        ({"tp": "two"}, "tp must be an integer, got 'two'"),
        ({"tp": 3, "pp": 1, "gpus": 12, "gpus_per_node": 6}, "cannot be split|must divide|divisible"),
        ({"dp": 2}, r"tp \* pp \* dp must be the run's 16 gpus, got 2 \* 2 \* 2$"),
        ({"pp": 5, "dp": ""}, r"must be the run's 16 gpus, got 2 \* 5 \* 1$"),
        ({"gpu": "V100-SXM3-32GB"}, "one of the cluster's, a100-sxm4-80gb, got V100-SXM3-32GB; name its cluster"),
        ({"gpu": "A100 40 GB"}, "one of the cluster's, a100-sxm4-80gb, got A100 40 GB"),
        ({"value": 5, "metric": "tokens_per_s", "unit": "tokens/s/GPU"}, "unit of tokens_per_s must be tokens/s of"),
        ({"value": 5, "metric": "tflops_per_gpu", "unit": "PFLOP/s"}, "unit of tflops_per_gpu must be TFLOP/s of one"),
        ({"global_batch": "", "global_batch_size": 64}, r"read: global_batch_size \(did you mean global_batch\?\)$"),
        ({"microbatch": 3}, r"dp \* microbatch must divide the global batch 64"),
        ({"recompute": "most"}, "recompute must be one of none, selective, full"),
        ({"seqpar": "maybe"}, "sequence_parallel must be 1 or 0"),
        ({"vpp": 2, "chunks": 2}, "columns vpp and chunks say the same"),
        ({"heads": 5}, "heads must divide hidden=256"),
        ({"value": 5, "metric": "furlongs"}, "metric must be one of iteration_time, tokens_per_s"),
        ({"value": 5, "metric": "iteration_time", "unit": "min"}, "unit of an iteration time must be s or ms"),
        ({"value": 500, "metric": "tflops_per_gpu"}, "at most the GPU's peak of 312 in fp16, got 500"),
        ({"value": 5}, "a run with a value must have a metric, one of iteration_time"),
        ({"iteration_time_s": -1}, "iteration_time_s must be a number above 0"),
        ({"cluster": "a101"}, "preset must be a known one"),
        ({"gpus": 12}, "GPUs must fill nodes of 8, got 12"),
        ({"family": "bart"}, "unknown family 'bart'"),
        ({"model": "gpt3-350m", "family": "bert"}, "family must be that of gpt3-350m, gpt, or empty, got bert"),
        ({"runtime": "two\nlines"}, "runtime must be a known one"),
        ({"peak_allocated_gib": 58000}, "at most the GPU's memory, 79.35 GiB, got 58000; is it in GiB"),
        ({"out_of_memory": 1, "iteration_time_s": 5}, "must have no time and no peak, got a time; empty the cell"),
        ({"out_of_memory": 1, "peak_reserved_gib": 70}, "must have no time and no peak, got peak_reserved_gib"),
    ],
)
def test_a_row_that_cannot_be_run_is_refused_by_its_number(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        load_runs(table(tmp_path, {**GPT, **DEGREES, **change}), COMMON)
    assert "runs.csv, row 1: " in str(refused.value)


@pytest.mark.parametrize(
    "gpu", ["A100", "NVIDIA A100-SXM4-80GB", "8xA100 (600 GB/s NVLink)", "DGX A100 640GB", "Ampere", ""]
)
def test_the_word_for_a_gpu_is_free_as_long_as_it_is_not_another_one(tmp_path: Path, gpu: str) -> None:
    assert len(load_runs(table(tmp_path, {**GPT, **DEGREES, "gpu": gpu}), COMMON)) == 1


def test_gpus_that_are_not_known_are_told(tmp_path: Path) -> None:
    rows = [{**GPT, **DEGREES, "gpu": text} for text in ("A100", "NVIDIA L40S", "MI300X", "NVIDIA L40S", "")]
    own = "which is none of windtunnel list gpus: simulated on a100-sxm4-80gb"
    assert unknown_gpus(load_runs(table(tmp_path, *rows), COMMON)) == [
        f"2 rows of gpu NVIDIA L40S, {own}",
        f"1 row of gpu MI300X, {own}",
    ]


def test_number_formats_that_are_not_the_runtimes_are_told(tmp_path: Path) -> None:
    rows = [{**GPT, **DEGREES, "dtype": text} for text in ("fp16", "amp_bf16", "mixed", "amp_bf16", "FP8")]
    assert other_dtypes(load_runs(table(tmp_path, *rows), COMMON)) == [
        "2 rows of dtype amp_bf16: simulated in fp16, as their runtime trains",
        "1 row of dtype FP8: simulated in fp16, as their runtime trains",
    ]


@pytest.mark.parametrize(
    ("metric", "unit"),
    [("tokens_per_s", "tok/s"), ("samples_per_s", "images/s"), ("samples_per_s", "samples/sec"),
     ("tflops_per_gpu", "TFLOP/s"), ("tflops_per_gpu", "TFLOPS")],
)  # fmt: skip
def test_units_of_rates_may_be_written_as_tables_write_them(tmp_path: Path, metric: str, unit: str) -> None:
    (case,) = load_runs(table(tmp_path, {**GPT, **DEGREES, "metric": metric, "value": 1.5, "unit": unit}), COMMON)
    assert case.measured.iteration_time_s is not None


def test_two_measured_times_of_one_run_must_agree(tmp_path: Path) -> None:
    row = {**GPT, **DEGREES, "iteration_time_s": 0.5, "metric": "iteration_time", "unit": "ms"}
    (case,) = load_runs(table(tmp_path, {**row, "value": 501}), COMMON)
    assert case.measured.iteration_time_s == 0.5
    with pytest.raises(ValueError, match=r"iteration_time_s and value must say the same, got 0\.5 s and 0\.6 s"):
        load_runs(table(tmp_path, {**row, "value": 600}), COMMON)


def test_cells_are_separated_by_commas(tmp_path: Path) -> None:
    (path := tmp_path / "runs.csv").write_text("model;tp;global_batch\nmine;1;8\n")
    with pytest.raises(ValueError, match=r"runs\.csv: cells must be separated by commas, got ';' in the header"):
        load_runs(path, COMMON)


def test_what_all_rows_lack_can_be_said_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must have a runtime: give the column, or say it once for all rows"):
        load_runs(table(tmp_path, {**GPT, **DEGREES}), Common(cluster="a100-80g-dgx"))
    with pytest.raises(ValueError, match="must have a runtime"):
        load_runs(table(tmp_path, {**GPT, **DEGREES}), Common(cluster="a100-80g-dgx", runtime=""))
    with pytest.raises(ValueError, match=r"must have a cluster: .*--cluster"):
        load_runs(table(tmp_path, {**GPT, **DEGREES}), Common(runtime="megatron-lm-2021"))


def test_a_column_changes_a_field_of_a_known_model(tmp_path: Path) -> None:
    row = {"model": "gpt3-350m", "seq": 512, "microbatch": 1, "global_batch": 8, "gpus": 8}
    (case,) = load_runs(table(tmp_path, row), COMMON)
    workload = case.problem().workload
    assert workload.tokens_per_sample == 512 and len(workload.layers) == 26


def test_words_of_frameworks_are_told_the_column_that_is_read() -> None:
    words = ["num_layers", "hidden_size", "seq_length", "zero-stage", "micro_batch_size", "recompute_granularity"]
    assert [resembled(word) for word in words] == ["layers", "hidden", "seq", "zero", "microbatch", "recompute"]
    assert [resembled(word) for word in ("source", "notes", "intra_bw", "inter_bw", "date", "log")] == [None] * 6


def test_a_rate_is_not_counted_for_a_plan_file(tmp_path: Path) -> None:
    spec = ProblemSpec("gpt3-350m", "v100-32g-dgx1:1x4", "megatron-lm-2021", 16)
    save_plan(tmp_path / "plan.yaml", spec, uniform_plan(spec.load(), dp=4, microbatch=4))
    row = {"plan": "plan.yaml", "metric": "tflops_per_gpu", "value": 30}
    with pytest.raises(ValueError, match="counted from columns, which a plan file has not"):
        load_runs(table(tmp_path, row), COMMON)


def test_plans_for_one_problem_are_rivals_whatever_they_are_called(tmp_path: Path) -> None:
    """Not those of another shape under the same word."""
    spec = ProblemSpec("gpt3-350m", "a100-80g-dgx:1x8", "megatron-lm-2021", 16)
    save_plan(tmp_path / "plan.yaml", spec, uniform_plan(spec.load(), dp=8, microbatch=2))
    named = {"model": "gpt3-350m", "tp": 2, "dp": 4, "microbatch": 2, "global_batch": 16, "gpus": 8}
    shorter = {**named, "seq": 512}
    rivals = [case.rivals for case in load_runs(table(tmp_path, {"plan": "plan.yaml"}, named, shorter), COMMON)]
    assert rivals[0] == rivals[1] != rivals[2]


@pytest.mark.parametrize("model", ["resnet-50", "layers_b4.csv"])
def test_rates_that_a_model_has_not_are_refused(tmp_path: Path, model: str) -> None:
    (tmp_path / "layers_b4.csv").write_text(
        "node,layer,fw_ms,bw_ms,output_activation_bytes,param_bytes,preds\na,first,1,2,64,64,\nb,last,1,2,64,64,a\n"
    )
    row = {"model": model, "gpus": 8, "microbatch": 4, "global_batch": 32, "value": 100}
    common = replace(COMMON, runtime="pytorch-ddp")
    with pytest.raises(ValueError, match=r"row 1: tokens_per_s needs a model with tokens, which .* has not; give samp"):
        load_runs(table(tmp_path, {**row, "metric": "tokens_per_s"}), common)
    with pytest.raises(ValueError, match="a published formula for GPT alone"):
        load_runs(table(tmp_path, {**row, "metric": "tflops_per_gpu"}), common)
    (case,) = load_runs(table(tmp_path, {**row, "metric": "samples_per_s"}), common)
    assert case.measured.iteration_time_s == pytest.approx(0.32)
