"""The power limit of a GPU: what it costs, and what was measured where nothing but products runs."""

from __future__ import annotations

from functools import partial
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datafiles.tables import load_table
from hardware_models.compute import kernel_time_s
from hardware_models.gpus import PowerCurve, load_curves, load_gpu
from hardware_models.power import clock_slowdown, slowdown_of_shares
from simulator.costs import CostTables
from simulator.fidelity import Fidelity
from simulator.problem import Problem, ProblemSpec
from simulator.simulate import simulate_time_s
from simulator.uniform import uniform_plan
from tests.hardware_models.data_folder import data_folder
from workloads.kernels import Matmul, MemoryBound

GPU = "h100-sxm5-80gb"
CUBE = PowerCurve(memory=0.6, products={"bf16": 1.4}, exponent=3.0, source="a test")


def test_products_alone_fall_to_the_limit() -> None:
    assert slowdown_of_shares(CUBE, "bf16", 1.0, 1.0) == pytest.approx(1.4 ** (1 / 3))


def test_within_the_limit_nothing_is_slower() -> None:
    """0.6 (1 - x) + 1.4 x reaches 1 at x = 0.5."""
    assert slowdown_of_shares(CUBE, "bf16", 0.499, 0.499) == 1.0
    assert 1.0 < slowdown_of_shares(CUBE, "bf16", 0.51, 0.51) < 1.02


@given(
    clocked=st.floats(0.0, 1.0), part=st.floats(0.0, 1.0), products=st.floats(0.5, 3.0), memory=st.floats(0.0, 1.0)
)
def test_the_mean_power_is_within_the_limit(clocked: float, part: float, products: float, memory: float) -> None:
    power = PowerCurve(memory=memory, products={"bf16": products}, exponent=3.0, source="a test")
    busy = clocked * part
    slowdown = slowdown_of_shares(power, "bf16", clocked, busy)
    total = 1 + clocked * (slowdown - 1)
    drawn = busy * products / slowdown**2 + (total - busy * slowdown) * memory
    assert drawn <= total * (1 + 1e-9)
    assert slowdown == 1.0 or drawn == pytest.approx(total, rel=1e-6)


def test_products_one_after_the_other_are_as_slow_as_vidur_measured_them() -> None:
    """None of these was fitted on: an H100 that runs one product again and again, from 32 GFLOP on."""
    gpu, curves = load_gpu(GPU), load_curves("hopper")
    seconds_of = partial(kernel_time_s, gpu, dtype="fp16")
    full, limited, large = [], [], []
    path = data_folder("gpu_efficiency") / "gemm_vidur_a100_h100.csv"
    for row in load_table(path, floats=("time_ms_median",), integers=("m_tokens", "n", "k")):
        product = Matmul(m=row["m_tokens"], n=row["n"], k=row["k"])
        if row["gpu"] != "H100" or product.flop < 2**35:
            continue
        measured_s = row["time_ms_median"] / 1e3
        slowdown = clock_slowdown(gpu, curves, "fp16", [(product, 1)], seconds_of)
        full.append(measured_s / seconds_of(product))
        limited.append(full[-1] / slowdown)
        if product.flop >= 2**39:
            large.append((measured_s, slowdown * seconds_of(product)))
    assert len(full) > 700 and len(large) > 100
    assert median(full) > 1.07
    assert median(limited) == pytest.approx(1.0, abs=0.02)
    measured, predicted = map(sum, zip(*large, strict=True))
    assert predicted == pytest.approx(measured, rel=0.015)


def _problem(model: str, batch: int, cluster: str = "h100-dgx:1x1", runtime: str = "composer-fsdp") -> Problem:
    return ProblemSpec(model, cluster, runtime, batch).load()


def test_models_of_larger_products_have_a_slower_clock() -> None:
    slowdowns = [CostTables(_problem(model, 8)).clock_slowdown(GPU) for model in ("gpt3-350m", "gpt3-1.3b", "gpt3-13b")]
    assert slowdowns == sorted(slowdowns)
    assert 1.04 < slowdowns[-1] < 1.34 ** (1 / 3)


def test_plain_attention_leaves_products_their_clock() -> None:
    problem = _problem("gpt3-350m", 8, runtime="megatron-lm-2021")
    assert CostTables(problem).clock_slowdown(GPU) == 1.0


def test_only_what_the_clock_rules_is_slower() -> None:
    problem = _problem("gpt3-13b", 8)
    costs = CostTables(problem)
    bare, slowdown = costs.under(Fidelity().without("power-limit")), costs.clock_slowdown(GPU)
    assert bare.clock_slowdown(GPU) == 1.0
    for kernel, factor in ((Matmul(m=4096, n=4096, k=4096), slowdown), (MemoryBound(1e9, 1e9), 1.0)):
        own, other = (each.launched([kernel], GPU).device_s for each in (costs, bare))
        assert own == pytest.approx(factor * other)


def test_the_power_limit_can_be_left_out() -> None:
    problem = _problem("gpt3-1.3b", 8)
    plan = uniform_plan(problem, microbatch=4, recompute="full")
    times = [simulate_time_s(plan, problem, fidelity=each) for each in (None, Fidelity().without("power-limit"))]
    assert times[0] > 1.01 * times[1]
    elsewhere = _problem("gpt3-1.3b", 8, "a100-80g-dgx:1x1")
    times = [simulate_time_s(plan, elsewhere, fidelity=each) for each in (None, Fidelity().without("power-limit"))]
    assert times[0] == times[1]
