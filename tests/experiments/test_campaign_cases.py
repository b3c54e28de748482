"""Case files of campaigns: what a prediction needs is in them, and they need no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from datafiles.writer import dump_yaml
from experiments.accuracy.groups import groups
from experiments.accuracy.run import run_case
from experiments.campaign_cases import FORMAT, hardware_mapping
from experiments.cases import campaigns
from experiments.cases.campaigns import CALIBRATED, FOLDER, cases_of
from experiments.cases.case import Case
from hardware_models.cluster import parse_cluster
from hardware_models.collective_table import CollectiveTable
from hardware_models.model import HardwareModel
from hardware_models.profile import OperatorProfile, ProfileRow
from hardware_models.profile_scaling import ProfileScaling
from hardware_models.runtime_files import load_runtime
from simulator.plan import plan_to_mapping
from simulator.problem import Problem
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from workloads.models.gpt import GPTSpec
from workloads.registry import build_from_spec

SPEC = {"family": "gpt", "layers": 2, "hidden": 64, "heads": 2, "seq_len": 16, "vocab": 128}
SCALING: dict[str, Any] = {
    "factor": 0.9, "extra_forward_s": 1e-5, "extra_backward_s": 2e-5, "backward_factors": {"norm_1": 1.4},
}  # fmt: skip


def measured_problem() -> tuple[Problem, OperatorProfile]:
    """Return a problem on hardware with a profile, and the profile."""
    runtime = load_runtime("windtunnel-executor-fp32")
    workload = build_from_spec(GPTSpec.model_validate({**SPEC, "name": "gpt"}), runtime.attention)
    rows = tuple(
        ProfileRow(role, 2, 1, "default", 1e-3 * number, 2e-3 * number, 0, 0, 0, 0, 0, 0, False, 2, "test")
        for number, role in enumerate(dict.fromkeys(op.role for op in workload.operators), 1)
    )
    profile = OperatorProfile("gpt", "local-cpu-process", "fp32", rows, "test")
    transfers = [("transfer_intra_node", 2, 256.0, 1e-4), ("transfer_intra_node", 2, 1e6, 1e-3)]
    table = CollectiveTable.from_rows([*transfers, ("all_reduce", 2, 256.0, 1e-4)], "test")
    hardware = HardwareModel(parse_cluster("local-cpu:1x2"), profile, table)
    return Problem(workload, hardware, runtime, 8), profile


def document() -> dict[str, Any]:
    problem, profile = measured_problem()
    plan = plan_to_mapping(uniform_plan(problem, pp=2, microbatch=2))
    del plan["warmup"]
    return {
        "format": FORMAT,
        "campaign": "cpu-gloo",
        "machine": "none",
        "date": "2000-01-01",
        "versions": {"torch": "none"},
        "rounds": 5,
        "cluster": "local-cpu:1x2",
        "models": {"gpt": SPEC},
        "runtimes": {"fp32": {"base": "windtunnel-executor-fp32"}},
        "hardware": {"gpt": hardware_mapping(problem, profile, "test")},
        "plans": [
            {
                "name": "gpt pp2",
                "unit": "gpt",
                "model": "gpt",
                "runtime": "fp32",
                "global_batch": 8,
                "measured": {"out_of_memory": False, "spread": 0.01, "iteration_time_s": 0.5},
                "scaling": SCALING,
                "plan": plan,
            }
        ],
    }


def test_a_case_predicts_what_the_campaign_predicted(tmp_path: Path) -> None:
    path = tmp_path / "cpu-gloo.yaml"
    path.write_text(dump_yaml(document()))
    (case,) = cases_of(path)
    assert case.row_id == "cpu-gloo.yaml#gpt pp2" and case.groups == ("campaign-cpu-gloo",)
    problem, profile = measured_problem()
    scaled = ProfileScaling(**SCALING).apply(profile)
    applied = replace(problem, hardware=replace(problem.hardware, operator_profile=scaled))
    expected = simulate(uniform_plan(problem, pp=2, microbatch=2), applied)
    outcome = run_case(case)
    assert outcome.iteration_time_s == pytest.approx(expected.iteration_time_s, rel=1e-9)
    assert outcome.time_error == pytest.approx(expected.iteration_time_s / 0.5 - 1)
    assert case.measured.out_of_memory is None and case.measured.peak_bytes is None


def test_a_runtimes_attention_is_the_one_that_the_file_says(tmp_path: Path) -> None:
    for chosen, expected in (({}, "plain"), ({"attention": "flash"}, "flash")):
        path = tmp_path / f"{expected}.yaml"
        path.write_text(dump_yaml({**document(), "runtimes": {"fp32": {"base": "windtunnel-executor-fp32", **chosen}}}))
        (case,) = cases_of(path)
        problem = case.problem()
        assert problem.runtime.attention == expected
        assert any(op.kind == "flash_attention" for op in problem.workload.operators) == (expected == "flash")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("unit", "bert", "plans.0: unit must be one of gpt, got bert"),
        ("model", "bert", "plans.0: model must be one of gpt, got bert"),
        ("runtime", "bf16", "plans.0: runtime must be one of fp32, got bf16"),
        ("global_batch", 0, "global_batch"),
        ("colour", "red", "colour: unknown key"),
    ],
)
def test_a_damaged_file_says_where(tmp_path: Path, key: str, value: object, message: str) -> None:
    content = document()
    content["plans"][0][key] = value
    path = tmp_path / "cases.yaml"
    path.write_text(dump_yaml(content))
    with pytest.raises(ValueError, match=message):
        list(cases_of(path))


def test_a_campaign_has_a_group_where_its_cases_are_committed() -> None:
    committed = {f"campaign-{path.stem}" for path in FOLDER.glob("*.yaml")}
    known = {name for name in groups() if name.startswith("campaign-")}
    replayed = ("single-gpu", "single-gpu-small", "single-gpu-families", "single-gpu-convolutions")
    reserved = {f"campaign-{name}-reserved" for name in replayed}
    without = ("single-gpu", "single-gpu-families", "single-gpu-families-second")
    modelled = {f"campaign-{name}-modelled" for name in without}
    imported = {f"campaign-{name}-imported" for name in ("single-gpu-second", "single-gpu-families-second")}
    assert known == committed | modelled | reserved | imported
    assert {group for case in campaigns.cases(None) for group in case.groups} == known  # type: ignore[union-attr]


def of_group(name: str) -> dict[str, Case]:
    """Return the cases of a group of the campaign single-gpu, by the plan's row."""
    return {
        case.row_id.removesuffix(" on our kernels").removesuffix(" as held"): case
        for case in cases_of(FOLDER / "single-gpu.yaml")
        if case.groups == (name,)
    }


def test_where_nothing_is_measured_of_a_gpu_its_preset_predicts() -> None:
    profiled, modelled = of_group("campaign-single-gpu"), of_group("campaign-single-gpu-modelled")
    left_out = {profiled[row].features["model"] for row in profiled.keys() - modelled.keys()}
    assert left_out == set(CALIBRATED["single-gpu"]) and modelled.keys() < profiled.keys()
    assert all(case.measured == profiled[row].measured for row, case in modelled.items())
    row = next(iter(modelled))
    own, bare = (case.problem().hardware for case in (profiled[row], modelled[row]))
    assert own.operator_profile is not None and bare == HardwareModel(parse_cluster("h100-dgx:1x1"))


def test_what_the_allocator_held_is_compared_apart() -> None:
    profiled, reserved = of_group("campaign-single-gpu"), of_group("campaign-single-gpu-reserved")
    assert profiled.keys() == reserved.keys()
    for row, held in reserved.items():
        assert held.measured.peak_is_reserved and held.measured.iteration_time_s is None
        assert held.measured.peak_bytes is not None and profiled[row].measured.peak_bytes is not None
        assert held.measured.peak_bytes > profiled[row].measured.peak_bytes


def test_a_second_machine_is_predicted_with_the_profile_of_the_first() -> None:
    found = list(cases_of(FOLDER / "single-gpu-second.yaml"))
    lenders = {case.row_id: case for case in cases_of(FOLDER / "single-gpu.yaml")}
    for own, imported in zip(found[::2], found[1::2], strict=True):
        assert own.groups == ("campaign-single-gpu-second",)
        assert imported.groups == ("campaign-single-gpu-second-imported",) and imported.measured == own.measured
    own, imported = found[:2]
    lender = lenders[own.row_id.replace("single-gpu-second", "single-gpu")]
    assert imported.problem().hardware.operator_profile == lender.problem().hardware.operator_profile
    assert imported.problem().hardware.operator_profile != own.problem().hardware.operator_profile
    assert imported.measured != lender.measured
