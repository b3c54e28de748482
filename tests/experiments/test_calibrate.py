"""``windtunnel calibrate``: one command per source, a file that --profile takes, a summary, a picture."""

from __future__ import annotations

import json
import pickle
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from experiments.calibrate.report import COLOURS, _draw
from hardware_models.calibration.outcome import Point
from hardware_models.calibration_file import load_calibration
from hardware_models.import_aceso import import_table
from hardware_models.importers.galvatron import GalvatronFile, LayerTime
from simulator.plan_file import save_plan
from simulator.problem import ProblemSpec
from simulator.simulate import simulate_time_s
from simulator.uniform import uniform_plan
from tests.experiments.commands import run
from tests.hardware_models.data_folder import data_folder
from tests.hardware_models.test_importer_kineto import GEMM, REDUCE, Maker, collective
from tests.hardware_models.test_importer_nccl import log


def nccl_logs(tmp_path: Path) -> list[Path]:
    found = []
    for program, rate in (("all_reduce", 120e9), ("all_gather", 230e9), ("reduce_scatter", 220e9), ("alltoall", 150e9)):
        found.append(tmp_path / f"{program}.txt")
        found[-1].write_text(log(program, rate=rate))
    return found


def test_nccl_logs_become_a_file_that_changes_a_simulation(calibrate: Any, tmp_path: Path) -> None:
    summary = calibrate("nccl-tests", *nccl_logs(tmp_path), "-c", "a100-80g-dgx")
    assert summary["collective_points"] == 20
    assert summary["links"] == ["a100-80g-dgx"]
    hows = {fit["what"]: fit for fit in summary["fits"]}
    assert hows["all_gather, 8 ranks"]["median"] < 0.02
    assert hows["all_reduce, table, each size left out"]["how"] == "interpolated"
    spec = ProblemSpec("gpt3-1.3b", "a100-80g-dgx:1x8", "megatron-lm-2021", 16)
    plain = spec.load()
    with_file = ProblemSpec(**{**spec.__dict__, "profile": str(tmp_path / "out" / "c.json")})
    problem = with_file.load()
    group = tuple(range(8))
    assert problem.hardware.collective("all_reduce", 2**26, group).alone_s == pytest.approx(
        19e-6 + 2**26 / 120e9, rel=1e-3
    )
    assert problem.hardware.collective("all_to_all", 2**20, group).source == "measured"
    assert plain.hardware.collective("all_reduce", 2**26, group).source == "modelled"
    plan = uniform_plan(plain, tp=8, microbatch=2)
    assert simulate_time_s(plan, problem) != simulate_time_s(plan, plain)


def test_a_plan_that_names_a_calibration_is_simulated_from_the_command_line(
    calibrate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate("nccl-tests", *nccl_logs(tmp_path), "-c", "a100-80g-dgx")
    spec = ProblemSpec(
        "gpt3-350m", "a100-80g-dgx:1x8", "megatron-lm-2021", 16, profile=str(tmp_path / "out" / "c.json")
    )
    save_plan(tmp_path / "plan.yaml", spec, uniform_plan(spec.load(), tp=8, microbatch=2))
    code, out, err = run(capsys, "simulate", tmp_path / "plan.yaml", "--engine", "compiled", "--json")
    assert code == 0, err
    with_table = json.loads(out)["iteration_time_s"]
    plain = ProblemSpec("gpt3-350m", "a100-80g-dgx:1x8", "megatron-lm-2021", 16)
    save_plan(tmp_path / "plain.yaml", plain, uniform_plan(plain.load(), tp=8, microbatch=2))
    words = ("simulate", tmp_path / "plain.yaml", "--engine", "compiled", "--json")
    assert json.loads(run(capsys, *words)[1])["iteration_time_s"] != with_table
    code, out, err = run(capsys, *words, "--profile", tmp_path / "out" / "c.json")
    assert code == 0, err
    assert json.loads(out)["iteration_time_s"] == with_table


def test_alpas_pickle_gives_collectives_and_matmul_constants(calibrate: Any, tmp_path: Path) -> None:
    module = types.ModuleType("alpa.mesh_profiling")
    result_class = type("MeshProfilingResult", (), {"__module__": "alpa.mesh_profiling"})
    vars(module)["MeshProfilingResult"] = result_class
    saved = {name: sys.modules.get(name) for name in ("alpa", "alpa.mesh_profiling")}
    sys.modules |= {"alpa": types.ModuleType("alpa"), "alpa.mesh_profiling": module}
    try:
        result = result_class()
        pair = ((0, 1), (2, 3), (4, 5), (6, 7))
        vars(result).update(
            all_reduce_cost_dict={(pair, "f16"): [(2.0**p, 2e-5 + 2.0**p * 2 / 20e9) for p in range(8, 28, 2)]},
            dot_cost_dict={((), "f16"): [(2.0 * n**3, 2.0 * n**3 / 90e12) for n in (1024, 2048, 4096, 8192)]},
        )
        data = pickle.dumps({("default", (1, 8)): result})
    finally:
        for name, old in saved.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old
    (tmp_path / "db.pkl").write_bytes(data)
    summary = calibrate("alpa", tmp_path / "db.pkl", "-c", "p3.16xlarge", "--gpu", "v100-sxm2-16gb")
    assert summary["gpus"] == {"v100-sxm2-16gb": ["curves"]}
    found = load_calibration(tmp_path / "out" / "c.json")
    assert found.collectives is not None
    ((_, shape),) = found.collectives.series
    assert (shape.size, shape.groups_per_node) == (2, 4)  # how many ran at once is declared
    (matmuls,) = [fit for fit in found.fits if fit.what == "matmuls on v100-sxm2-16gb"]
    assert matmuls.median is not None and matmuls.median < 0.1


def test_a_trace_gives_constants_of_a_gpu(
    calibrate: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    maker = Maker()
    for n in (1024, 2048, 3072, 4096, 5120, 6144, 8192):
        number = maker.operator("aten::mm", [[4096, n], [n, 4096]], "c10::BFloat16")
        maker.kernel(GEMM, 2 * 4096 * 4096 * n / 150e12, **{"External id": number})
    for size in (1, 4, 16):
        maker.kernel(
            "Memcpy DtoD (Device -> Device)", 2 * size * 2**20 / 1.0e12 + 30e-6, cat="gpu_memcpy", bytes=size * 2**20
        )
        maker.kernel(REDUCE, 50e-6 + size * 2**21 / 1e11, **collective("allreduce", size * 2**20, size * 2**20))
    summary = calibrate("kineto", maker.write(tmp_path / "t.json.gz"), "--gpu", "a100-sxm4-80gb", "-c", "a100-80g-dgx")
    assert summary["gpus"] == {"a100-sxm4-80gb": ["curves", "optimizer_bandwidth_fraction"]}
    kept = "no row says how quick these are, which stay as shipped: products in fp32"
    assert [note for note in summary["notes"] if "as shipped" in note] == [kept]
    assert summary["collective_points"] == 3
    whats = {fit["what"]: fit for fit in summary["fits"]}
    assert whats["kernels: matmul"]["constants"]["seconds"] > 0
    assert whats["Matmul bf16 on a100-sxm4-80gb"]["median"] < 0.1
    assert not any("no faster" in note for note in summary["notes"])
    other = calibrate("kineto", tmp_path / "t.json.gz", "--gpu", "v100-sxm2-32gb", "-c", "a100-80g-dgx")
    words = "matmuls must be in number formats of v100-sxm2-32gb and no faster than their peak, 7 of 10"
    assert any(note.startswith(words) for note in other["notes"])
    only = Maker()
    number = only.operator("aten::mm", [[4096, 1024], [1024, 4096]], "c10::BFloat16")
    only.kernel(GEMM, 1e-3, **{"External id": number})
    code, _, err = run(capsys, "calibrate", "kineto", only.write(tmp_path / "o.json.gz"), "--gpu", "v100-sxm2-16gb")
    assert code == 2 and "matmuls must be in number formats of v100-sxm2-16gb" in err


def test_galvatrons_files_give_links_overlap_and_operators(calibrate: Any, tmp_path: Path) -> None:
    files = {
        "bandwidth.json": {"1_8_1": 0.2153, "1_4_1": 0.2265, "1_2_1": 0.2780, "2_2_0": 0.2242},
        "overlap.json": {"overlap_coe": 1.3},
        "layers.json": {
            f"layernum[{n}]_bsz{b}_seq512": 5.0 + n * (0.5 + 2.0 * b) for n in (2, 4) for b in (1, 2, 4, 8)
        },
        "memory.json": {
            "layertype_0": {"parameter_size": 76.98, "tp_activation_per_bsz_dict": {"1": 94.07, "2": 52.5}}
        },
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    paths = [tmp_path / name for name in files]
    summary = calibrate("galvatron", *paths, "-c", "titan-rtx-pcie", "-m", "bert-huge-32")
    assert summary["links"] == ["titan-rtx-pcie"]
    found = load_calibration(tmp_path / "out" / "c.json")
    assert found.gpus["titan-rtx-24gb"].overlap_slowdown_computation == 1.3
    assert found.operators is not None
    spec = ProblemSpec(
        "bert-huge-32", "titan-rtx-pcie:1x1", "galvatron-v1", 8, profile=str(tmp_path / "out" / "c.json")
    )
    problem = spec.load()
    from experiments.calibrate.layer_kinds import layers_by_kind
    from simulator.costs import CostTables

    table = CostTables(problem).table((), 4, problem.gpu_types[0])
    ((members, *_),) = layers_by_kind(problem.workload)
    assert sum(table.forward_s[index] for index in members) == pytest.approx(8.5e-3, rel=1e-6)
    bare = CostTables(replace(spec, profile=None).load()).table((), 4, problem.gpu_types[0])
    backward, forward = (sum(seconds[index] for index in members) for seconds in (bare.backward_s, bare.forward_s))
    assert sum(table.backward_s[index] for index in members) == pytest.approx(8.5e-3 * backward / forward, rel=1e-6)
    whats = {fit["what"]: fit for fit in summary["fits"]}
    assert whats["layer kind 0: time over batch"]["constants"]["seconds_per_sample"] == pytest.approx(2e-3, rel=0.02)
    assert whats["layer kind 0: activations of a sample"]["how"] == "checked"
    assert whats["layer kind 0: activations of a sample"]["worst"] < 0.05  # the published constants of BERT-Huge
    assert whats["layer kind 0: parameters"]["worst"] < 0.05


@pytest.mark.parametrize(("size", "samples"), [("1_3B", 1), ("1_3B", 4), ("2_6B", 4), ("6_7B", 4)])
def test_forward_times_of_layers_tell_the_backward_times_that_were_measured(size: str, samples: int) -> None:
    """Aceso timed both. Twice forward, as Galvatron's cost model has it, is 23 to 36 % too long for these."""
    from experiments.calibrate.layer_kinds import layers_by_kind
    from experiments.calibrate.layers import calibrate_layers

    rows = {
        row.role: row
        for row in import_table(data_folder("aceso_v100") / "ops.csv.gz", model="gpt", size=size).rows
        if (row.tensor_size, row.split, row.samples) == (1, "default", samples)
    }
    model, cluster, runtime = f"gpt3-{size.lower().replace('_', '.')}", "v100-32g-dgx1:1x1", "megatron-lm-2021"
    problem = ProblemSpec(model, cluster, runtime, samples).load()
    roles = [problem.workload.operators[index].role for index in layers_by_kind(problem.workload)[0][0]]
    forward, backward = (sum(getattr(rows[role], word) for role in roles) for word in ("forward_s", "backward_s"))
    file = GalvatronFile(layers=(LayerTime(0, samples, forward),))
    found = calibrate_layers([file], model, cluster, runtime, "test").operators
    assert found is not None
    assert sum(row.forward_s for row in found.rows) == pytest.approx(forward, rel=1e-6)
    assert sum(row.backward_s for row in found.rows) == pytest.approx(backward, rel=0.1)


def test_layer_times_of_other_sequences_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.json").write_text(json.dumps({f"layernum[{n}]_bsz1_seq2048": 1.0 + n for n in (2, 4)}))
    words = ("calibrate", "galvatron", tmp_path / "t.json", "-c", "a100-40g-dgx", "-r", "composer-fsdp")
    code, _, err = run(capsys, *words, "-m", "llama2-7b")
    assert code == 2
    assert "sequences of 2048 tokens, llama2-7b has 4096" in err.replace("\n", " ")
    code, _, err = run(capsys, *words)
    assert code == 2
    assert "--model must name" in err


@pytest.mark.parametrize(("times", "left_out"), [((10.0, 9.0), "layer kind 0"), ((10.0, 30.0), "outside layers")])
def test_layer_times_that_cannot_be_are_said(calibrate: Any, tmp_path: Path, times: Any, left_out: str) -> None:
    content = {f"layernum[{n}]_bsz8_seq2048": time for n, time in zip((2, 4), times, strict=True)}
    (tmp_path / "t.json").write_text(json.dumps(content))
    words = ("-c", "a100-40g-dgx", "-m", "gpt3-1.3b", "-r", "megatron-lm-2021")
    notes = calibrate("galvatron", tmp_path / "t.json", *words)["notes"]
    said = f"layer times must be above 0 and below the whole model's, got others for {left_out} at 8"
    assert [note.startswith(said) for note in notes].count(True) == 1


@pytest.mark.parametrize(("scale", "is_said"), [(1.0, False), (1e-3, True), (1e3, True)])
def test_layer_times_in_another_unit_are_said(calibrate: Any, tmp_path: Path, scale: float, is_said: bool) -> None:
    content = {f"layernum[{n}]_bsz{b}_seq512": scale * (5.0 + n * (0.5 + 4.4 * b)) for n in (2, 4) for b in (1, 8)}
    (tmp_path / "layers.json").write_text(json.dumps(content))
    found = calibrate("galvatron", tmp_path / "layers.json", "-c", "titan-rtx-pcie", "-m", "bert-huge-32")
    assert any("they must be in milliseconds, of this model" in note for note in found["notes"]) == is_said


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("", "must hold at least one collective of a size above 0, got none"),
        ("1x8,all-reduce,8,1,1,1,8,f16,1024,-1\n", "seconds must be above 0, got -1"),
    ],
)
def test_a_table_of_alpa_without_a_measurement_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str, message: str
) -> None:
    columns = "mesh,collective,group_size,stride,num_groups,nodes_per_group,gpus_per_node_in_group,dtype,bytes,seconds"
    (tmp_path / "t.csv").write_text(f"{columns}\n{row}")
    code, _, err = run(capsys, "calibrate", "alpa", tmp_path / "t.csv", "-c", "p3.16xlarge", "-o", tmp_path / "c.json")
    assert code == 2 and message in err.replace("\n", " ")
    assert not (tmp_path / "c.json").exists()


def test_logs_of_another_gpu_than_the_clusters_are_said(calibrate: Any, tmp_path: Path) -> None:
    logs = nccl_logs(tmp_path)
    notes = [calibrate("nccl-tests", *logs, "-c", preset)["notes"] for preset in ("a100-80g-dgx", "v100-32g-dgx1")]
    assert [any(note.startswith("the logs are of") for note in each) for each in notes] == [False, True]
    logs[0].write_text(logs[0].read_text().replace("NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 3090"))
    found = calibrate("nccl-tests", logs[0], "-c", "rtx3090-pcie")["notes"]
    assert not any(note.startswith("the logs are of") for note in found)


def test_of_several_logs_of_a_collective_the_median_counts(calibrate: Any, tmp_path: Path) -> None:
    """The least of several had: one log of another day, 40 % quicker, and the machine was that quick."""
    for number, rate in enumerate((118e9, 120e9, 123e9, 200e9, 60e9)):
        (tmp_path / f"all_reduce_{number}.txt").write_text(log("all_reduce", rate=rate))
    calibrate("nccl-tests", *sorted(tmp_path.glob("*.txt")), "-c", "a100-80g-dgx")
    found = load_calibration(tmp_path / "out" / "c.json").collectives
    assert found is not None
    answer = found.lookup("all_reduce", 8, 2.0**26)
    assert answer is not None and answer[0] == pytest.approx(19e-6 + 2**26 / 120e9, rel=1e-3)


def test_bandwidths_beyond_any_link_are_said(calibrate: Any, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps({"allreduce_size_8_consec_1": 1e9}))
    notes = calibrate("galvatron", tmp_path / "b.json", "-c", "titan-rtx-pcie")["notes"]
    assert any(note.startswith("links.rate must be near the preset's, got 100 times titan-rtx-pcie") for note in notes)


def test_acesos_folder_gives_operators_and_collectives(calibrate: Any, tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    header = "op_name,forward-compute,backward-compute,input_size,output_size,weights,activations,"
    header += "fwd_reserved,bwd_reserved\n"
    for samples in (1, 2, 4):
        row = f"enc-attention-qkv,{100 + 900 * samples},{2000 * samples},8,24,6,12,4,5\n"
        (folder / f"gpt_1_3B_mbs{samples}_tp1_algo0.csv").write_text(header + row)
    (folder / "prim_gpt_1_3B_all_reduce_8gpus.csv").write_text("size,ms\n1,0.1\n4,0.16\n64,1.36\n1024,20.56\n")
    summary = calibrate("aceso", folder, "-c", "v100-32g-dgx1")
    assert (summary["operators"], summary["collective_points"]) == (3, 4)
    whats = {fit["what"]: fit for fit in summary["fits"]}
    left_out = whats["operators forward, each microbatch size left out"]
    assert (left_out["num_points"], left_out["worst"]) == (1, pytest.approx(0, abs=1e-6))


def test_a_machine_profile_gets_its_links_fitted(calibrate: Any, tmp_path: Path) -> None:
    from hardware_models.calibrated import Calibration, GpuConstants
    from hardware_models.calibration_file import save_calibration
    from hardware_models.collective_table import CollectiveTable

    rows = [
        (kind, 2, 4.0**power, 1e-4 + 4.0**power / 2e9)
        for kind in ("all_reduce", "transfer_intra_node")
        for power in range(5, 13)
    ]
    save_calibration(
        Calibration(
            "windtunnel profile", collectives=CollectiveTable.from_rows(rows, "here"), collectives_of="local-cpu",
            gpus={"local-cpu-process": GpuConstants(overlap_slowdown_computation=1.5)}, machine="here", date="2024",
            versions={"torch": "2"},
        ),
        tmp_path / "machine.json",
    )  # fmt: skip
    summary = calibrate("machine", tmp_path / "machine.json", "-c", "local-cpu")
    assert summary["links"] == ["local-cpu"]
    found = load_calibration(tmp_path / "out" / "c.json")
    assert (found.machine, found.gpus["local-cpu-process"].overlap_slowdown_computation) == ("here", 1.5)
    assert found.links["local-cpu"].point_to_point_bytes_per_s == pytest.approx(2e9, rel=0.05)


def test_a_fit_that_is_far_from_a_point_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hardware_models.calibrated import Calibration
    from hardware_models.calibration_file import save_calibration
    from hardware_models.collective_table import CollectiveTable

    for slower, said in ((1.0, False), (3.0, True)):
        rows = [("transfer_intra_node", 2, 4.0**power, 1e-4 + 4.0**power / 2e9) for power in range(5, 13)]
        rows[3] = (*rows[3][:3], slower * rows[3][3])
        table = CollectiveTable.from_rows(rows, "here")
        save_calibration(Calibration("windtunnel profile", collectives=table, machine="here"), tmp_path / "m.json")
        code, _, err = run(capsys, "calibrate", "machine", tmp_path / "m.json")
        assert code == 0
        words = "a fit's worst residual should be below 30%, got transfer_intra_node, 2 ranks (64.8 %)"
        assert (words in err.replace("\n", " ")) == said, err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("aceso", "nowhere"), "must be a folder"),
        (("alpa", "nowhere.pkl"), "cannot be read"),
        (("nccl-tests", "nowhere.txt"), "no such file"),
        (("kineto", "nowhere.json"), "no such file"),
        (("galvatron", "nowhere.json", "-c", "titan-rtx-pcie"), "no such file"),
        (("machine", "nowhere.json"), "no such file"),
        (("runs", "nowhere.csv"), "no such file"),
    ],
)
def test_a_missing_file_ends_with_exit_code_two_and_one_message(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "calibrate", *words)
    assert code == 2
    assert message in err
    assert "Traceback" not in out + err


def test_a_malicious_pickle_ends_with_exit_code_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "evil.pkl").write_bytes(b"cos\nsystem\n(S'touch mark'\ntR.")
    code, _, err = run(capsys, "calibrate", "alpa", tmp_path / "evil.pkl")
    assert code == 2
    assert "refused: the pickle names 'os.system'" in err


def test_an_unknown_preset_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "calibrate", "nccl-tests", *nccl_logs(tmp_path), "-c", "a100-80g-dgz")
    assert code == 2
    assert "a100-80g-dgx" in err


def test_the_text_summary_names_fits_points_and_residuals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "calibrate", "nccl-tests", *nccl_logs(tmp_path))
    assert code == 0
    for word in ("points", "median", "90 %", "worst", "all_reduce, 8 ranks", "latency_s"):
        assert word in out
    assert "nothing was written" in err


def test_published_tables_calibrate(calibrate: Any) -> None:
    folder = data_folder("alpa_v100")
    summary = calibrate("alpa", folder / "collectives_a100_8gpu.csv", "-c", "a100-80g-dgx")
    tables = [fit for fit in summary["fits"] if fit["what"].endswith("each size left out")]
    assert len(tables) == 4
    assert all(fit["median"] <= 0.03 for fit in tables)


def test_series_of_a_picture_are_told_apart_and_lie_over_its_grid() -> None:
    left, right = Figure(figsize=(12.5, 5.8)).subplots(1, 2)
    num_series = len(COLOURS) + 4
    points = [Point(f"series {number}", 1e-3 * (number + 1), 1.1e-3 * (number + 1)) for number in range(num_series)]
    _draw(left, right, points, "s")
    drawn = [series for axes in (left, right) for series in axes.collections if isinstance(series, PathCollection)]
    for half in (drawn[:num_series], drawn[num_series:]):
        looks = [(to_hex(series.get_facecolor()[0]), series.get_paths()[0].vertices.tobytes()) for series in half]
        assert len({colour for colour, _ in looks[: len(COLOURS)]}) == len(COLOURS) >= 12
        assert len(set(looks)) == num_series
    grid = max(axis.get_zorder() for axes in (left, right) for axis in (axes.xaxis, axes.yaxis))
    assert grid < min(series.get_zorder() for series in drawn)
