"""What a result says of the whole plan: utilisation by a closed form, the fullest device, nothing where nothing is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.commands.simulate import simulate_file
from hardware_models.model import HardwareModel
from hardware_models.runtime_files import load_runtime
from simulator.problem import Problem, ProblemSpec
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from tests.simulator.results import pipeline_result
from tests.simulator.test_timeline import line_of
from workloads.registry import build_workload


@pytest.mark.parametrize("attention", ["plain", "flash"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_flop_are_megatrons_closed_form_whatever_computes_the_attention(attention: str, recompute: str) -> None:
    """72 B s l h^2 (1 + s / 6h) and 6 B s h V for the head (Narayanan et al., SC 2021, Section 5.1): no mask saves any.

    Layers that run again add a third of theirs; the head runs once.
    """
    batch, tokens, layers, hidden = 4, 2048, 4, 1024
    runtime = load_runtime("megatron-lm-2021")
    problem = Problem(
        workload=build_workload("gpt3-350m", attention=attention, overrides={"layers": layers}),
        hardware=HardwareModel.from_name("a100-80g-dgx:1x2"),
        runtime=replace(runtime, attention=attention, recompute_stops_early=False),
        global_batch=batch,
    )
    vocabulary = next(each.shape[0] for each in problem.workload.parameters(0) if "position" not in each.name)
    of_layers = 72 * batch * tokens * layers * hidden**2 * (1 + tokens / (6 * hidden))
    of_head = 6 * batch * tokens * hidden * vocabulary
    result = simulate(uniform_plan(problem, tp=2, recompute=recompute), problem)
    assert result.model_flop == pytest.approx(of_layers + of_head, rel=1e-9)
    again = of_layers / 3 if recompute == "full" else 0.0
    assert result.hardware_flop == pytest.approx(of_layers + of_head + again, rel=1e-9)
    assert result.mfu == pytest.approx(result.model_flop / result.iteration_time_s / (2 * 312e12), rel=1e-9)


@pytest.mark.parametrize(("runtime", "is_above"), [("megatron-lm-2021-fp32", True), ("megatron-lm-2021", False)])
def test_utilisation_is_above_one_where_winograd_does_fewer_operations(runtime: str, is_above: bool) -> None:
    """F(4x4, 3x3) multiplies 36 times where the product has 144; in 16 bits nothing takes it."""
    problem = ProblemSpec("vgg-16", "v100-32g-dgx1:1x1", runtime, 32).load()
    result = simulate(uniform_plan(problem, microbatch=32), problem)
    assert result.mfu is not None and (result.mfu > 1) is is_above
    assert result.mfu < 144 / 36
    assert "Winograd" in (type(result).mfu.__doc__ or "") and "Winograd" in (simulate_file.__doc__ or "")


def test_utilisation_of_a_model_without_flop_is_unknown_not_zero(tmp_path: Path) -> None:
    path = tmp_path / "two_b4.csv"
    path.write_text(
        "node,layer,fw_ms,bw_ms,output_activation_bytes,param_bytes,preds\n"
        "a,one,1,2,80,400,\nb,two,3,4,160,800,a\n"
    )
    problem = Problem(
        workload=build_workload(str(path)),
        hardware=HardwareModel.from_name("a100-80g-dgx:1x2"),
        runtime=load_runtime("megatron-lm-2021"),
        global_batch=8,
    )
    result = simulate(uniform_plan(problem, pp=2), problem)
    assert result.mfu is None and result.hfu is None
    summary = json.loads(json.dumps(result.summary()))
    assert summary["mfu"] is None and summary["hfu"] is None
    assert summary["tokens_per_s_per_device"] is None and "tokens/s" not in result.describe()
    assert "MFU             unknown: the model has times, no FLOPs" in result.describe().splitlines()
    assert "MFU" not in line_of(result) and "MFU" in line_of(pipeline_result())


def test_peaks_are_those_of_the_fullest_device_whichever_it_is() -> None:
    result = pipeline_result(num_stages=3)
    first, second, third = result.memory
    uneven = replace(
        result,
        memory=(
            replace(first, peak_allocated_bytes=5, peak_reserved_bytes=7),
            replace(second, peak_allocated_bytes=6, peak_reserved_bytes=6),
            replace(third, peak_allocated_bytes=4, peak_reserved_bytes=9),
        ),
    )
    assert (uneven.peak_allocated_bytes, uneven.peak_reserved_bytes) == (6, 9)
    assert uneven.peak_device == uneven.memory[1]


def test_a_result_without_memory_fits_and_says_nothing_of_it() -> None:
    bare = replace(pipeline_result(), memory=())
    assert bare.fits
    assert (bare.peak_allocated_bytes, bare.peak_reserved_bytes, bare.peak_device) == (0, 0, None)
    assert "memory" not in bare.describe()
