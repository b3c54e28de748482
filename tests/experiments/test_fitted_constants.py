"""Constants of a machine from whole iterations: known factors come back, unknowable ones stay 1."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from experiments.calibrate.fitted_constants import fit_constants, log_error, moved
from experiments.calibrate.measured_run import MeasuredRun
from simulator.problem import Problem
from simulator.simulate import simulate_time_s
from simulator.uniform import uniform_plan
from tests.simulator.problems import small_problem

SHAPES = (dict(dp=16), dict(dp=16, recompute="full"), dict(dp=16, zero=3), dict(tp=8, dp=2), dict(tp=8, pp=2))
CUBE_MESHES = small_problem("gpt", cluster="v100-32g-dgx1:2x8", runtime="galvatron-v1")
TRUE = {"products": 0.8, "host": 1.0, "links": 0.7, "network": 0.6}


def runs_under(
    factors: dict[str, float], problem: Problem = CUBE_MESHES, shapes: tuple[dict, ...] = SHAPES, noise: float = 0.0
) -> list[MeasuredRun]:
    """Return runs of a machine whose constants are so many times the shipped ones, with errors of up to ``noise``."""
    own, random = moved(problem, factors), np.random.default_rng(3)
    found = []
    for shape in shapes:
        for microbatch in (1, 4):
            if shape.get("dp", 1) * microbatch <= problem.global_batch:
                plan = uniform_plan(problem, microbatch=microbatch, **shape)
                took = simulate_time_s(plan, own, engine="compiled")
                found.append(MeasuredRun(str(shape), problem, plan, took * (1 + noise * float(random.uniform(-1, 1)))))
    return found


def test_the_factors_of_another_machine_come_back() -> None:
    fitted = fit_constants(runs_under(TRUE), tuple(TRUE))
    assert np.abs(fitted.before).mean() > 0.15
    assert np.abs(fitted.after).mean() < 0.01 and np.abs(fitted.left_out).mean() < 0.02
    assert fitted.factors["network"] == pytest.approx(TRUE["network"], rel=0.05)
    for name, true in TRUE.items():
        assert abs(np.log(fitted.factors[name] / true)) < 2 * fitted.deviations[name], name


def test_what_overlapping_costs_is_seen_where_much_overlaps() -> None:
    lanes = small_problem("gpt", cluster="titan-rtx-pcie:1x8", runtime="galvatron-v1")
    runs = runs_under({"overlap": 4.0}, lanes, (dict(dp=8), dict(dp=8, recompute="full"), dict(dp=4, tp=2), dict(tp=8)))
    fitted = fit_constants(runs, ("links", "overlap"))
    assert 2.0 < fitted.factors["overlap"] < 4.2, "drawn towards the shipped constant, but not far"
    assert fitted.factors["links"] == pytest.approx(1.0, rel=0.05)
    assert np.abs(fitted.after).mean() < 0.4 * np.abs(fitted.before).mean()


def test_runs_that_were_left_out_are_predicted_under_noise_too() -> None:
    runs = runs_under(TRUE, noise=0.05)
    fitted = fit_constants(runs[::2], tuple(TRUE))
    before, after = (
        np.abs(np.expm1([log_error(run, factors) for run in runs[1::2]])).mean() for factors in ({}, fitted.factors)
    )
    assert after < 0.4 * before


def test_what_no_run_depends_on_stays() -> None:
    alone = small_problem("gpt", cluster="v100-32g-dgx1:1x1")
    fitted = fit_constants(runs_under({"products": 0.7}, alone, ({},)), ("products", "links", "network", "overlap"))
    assert fitted.factors["products"] == pytest.approx(0.7, rel=0.05)
    assert [fitted.factors[name] for name in ("links", "network", "overlap")] == [1, 1, 1]


@pytest.mark.parametrize(("factor", "names"), [(0.75, ("products",)), (0.6, ("products", "memory"))])
def test_a_machine_that_is_quicker_than_a_peak_is_fitted_as_far_as_it_goes(
    factor: float, names: tuple[str, ...]
) -> None:
    """Shares of a peak end at 1, where a factor moves nothing more: no oscillation, and no error that is made up."""
    alone = small_problem("gpt", cluster="v100-32g-dgx1:1x1")
    runs = runs_under({}, alone, ({}, dict(recompute="full")))
    quicker = [replace(run, seconds=run.seconds * factor) for run in runs]
    fitted = fit_constants(quicker, names)
    assert np.abs(fitted.after).mean() <= np.abs(fitted.before).mean()
    assert np.abs(fitted.left_out).mean() >= np.abs(fitted.after).mean()
    again = [np.expm1(log_error(run, fitted.factors)) for run in quicker]
    assert again == pytest.approx(fitted.after)


def test_right_constants_stay_as_they_are() -> None:
    fitted = fit_constants(runs_under({})[:4], ("links", "network"))
    assert fitted.width == 0 and set(fitted.factors.values()) == {1.0} and not fitted.left_out.any()


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="at least two runs and one constant"):
        fit_constants(runs_under({}, shapes=SHAPES[:1])[:1], ("links",))


def test_a_deviation_counts_what_the_fit_took_up_of_the_scatter() -> None:
    """Two runs 6 % apart and one factor between them: it is known to 3 % over what a run gains with it, not to 2."""
    alone = small_problem("gpt", cluster="v100-32g-dgx1:1x1")
    quick, slow = (replace(run, seconds=run.seconds * off) for run, off in
                   zip(runs_under({"products": 0.7}, alone, ({},)), (0.97, 1.03), strict=True))  # fmt: skip
    fitted = fit_constants([quick, slow], ("products",))
    at = np.array([log_error(run, fitted.factors) for run in (quick, slow)])
    further = np.array([log_error(run, {"products": fitted.factors["products"] * 1.05}) for run in (quick, slow)])
    gains = np.abs(further - at).mean() / np.log(1.05)
    assert fitted.deviations["products"] == pytest.approx(0.03 / gains, rel=0.15)


def test_runs_left_out_are_further_off_by_what_they_weighed_in_the_fit() -> None:
    """Weights of runs in what is fitted to them (the hat matrix's diagonal) add up to one for a factor."""
    alone = small_problem("gpt", cluster="v100-32g-dgx1:1x1")
    quick, slow = (replace(run, seconds=run.seconds * off) for run, off in
                   zip(runs_under({"products": 0.7}, alone, ({},)), (0.97, 1.03), strict=True))  # fmt: skip
    fitted = fit_constants([quick, slow], ("products",))
    weights = 1 - np.log1p(fitted.after) / np.log1p(fitted.left_out)
    assert (weights > 0.3).all() and 0.9 < weights.sum() <= 1  # the prior weighs the rest
