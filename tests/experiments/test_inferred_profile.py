"""Profiles inferred from whole iterations: on sums whose answer is known, and on the simulator's own times."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from experiments.calibrate.inferred_parts import AFTER, BLOCKS, LAYER, Factors, Part, corrected, parts_of, profile_of
from experiments.calibrate.inferred_profile import LayersRun, infer, sums_of
from experiments.calibrate.inferred_ridge import LEVELS, Prior, Sums, choose, priors
from experiments.cases.case import problem_of, uniform
from simulator.fidelity import Fidelity
from simulator.plan import Plan
from simulator.problem import Problem, ProblemSpec
from simulator.simulate import simulate_time_s
from simulator.uniform import uniform_plan
from simulator.validate import validate
from workloads.models.gpt import GPTSpec

SHAPE = "tiny"
MODEL = GPTSpec(name="tiny", layers=4, hidden=256, heads=4, seq_len=128, vocab=1024)
PARTS = tuple(sorted(Part(SHAPE, block, tp, samples) for block, tp, samples in product(BLOCKS, (1, 2), (1, 2))))
OWN = Prior({"part": 0.2}, noise=1e-6)


def sums(num_runs: int, deviations: np.ndarray, parts: tuple[Part, ...] = PARTS, noise: float = 0.0) -> Sums:
    random = np.random.default_rng(3)
    shares = random.uniform(0.05, 1.0, (num_runs, len(parts))) * (random.random((num_runs, len(parts))) < 0.5)
    return Sums(parts, shares, shares @ deviations + noise * random.standard_normal(num_runs))


def a_run(factors: Factors, *, runtime: str = "megatron-deepspeed-timed", batch: int = 8, **degrees: int) -> LayersRun:
    """Return a run whose measured time is what the simulator has with given factors."""
    problem = problem_of(model=MODEL, cluster="a100-80g-dgx:1x2", runtime=runtime, global_batch=batch)()
    plan = uniform(**degrees)(problem)
    run = LayersRun(f"{degrees}", problem, plan, 1.0, SHAPE)
    return replace(run, seconds=run.predicted_s(factors))


# Ridge regression


def test_as_many_runs_as_parts_give_the_factors_back() -> None:
    deviations = np.random.default_rng(0).uniform(-0.3, 0.3, len(PARTS))
    found = sums(len(PARTS) + 2, deviations).estimate(OWN, PARTS)
    assert [found[part] - 1 for part in PARTS] == pytest.approx(deviations, abs=1e-6)


def test_one_run_of_one_part_is_shrunk_by_noise_over_noise_and_prior() -> None:
    """Closed form: x = w^2 s r / (w^2 s^2 + n^2)."""
    one = Sums(PARTS[:1], np.array([[0.8]]), np.array([0.1]))
    found = one.estimate(Prior({"part": 0.05}, noise=0.02), PARTS[:1])[PARTS[0]]
    assert found - 1 == pytest.approx(0.05**2 * 0.8 * 0.1 / (0.05**2 * 0.8**2 + 0.02**2), rel=1e-12)


def test_the_prior_pulls_parts_that_no_run_has_to_one() -> None:
    unseen = Part("other", LAYER, 8, 16)
    given = sums(30, np.full(len(PARTS), 0.2))
    assert given.estimate(Prior({"part": 0.2, "sharding": 0.2}, 0.01), [unseen])[unseen] == 1.0


def test_a_part_without_a_run_gets_what_its_relatives_have_in_common() -> None:
    deviations = np.full(len(PARTS), 0.2)
    unseen = Part(SHAPE, LAYER, 2, 4)
    found = sums(60, deviations).estimate(Prior({"sharding": 0.2, "part": 0.01}, 1e-4), [unseen])
    assert 1.15 < found[unseen] <= 1.2
    assert sums(60, deviations).estimate(Prior({"samples": 0.2}, 1e-4), [unseen])[unseen] == 1.0  # none has four


def test_parts_covary_by_the_levels_that_they_share() -> None:
    """A level is named by what its members have in common beside their block; where that differs they share nothing."""
    one = Part("a", LAYER, 2, 4)
    others = {
        one: set(LEVELS),
        Part("a", LAYER, 2, 8): {"block", "sharding"},
        Part("a", LAYER, 1, 4): {"block", "samples"},
        Part("b", LAYER, 2, 4): {"block", "shapes"},
        Part("b", LAYER, 1, 4): {"block"},
        Part("a", AFTER, 2, 4): set(),
    }
    for other, shared in others.items():
        for name in LEVELS:
            (found,) = Prior({name: 0.2}, noise=0.01).covariance([one], [other]).flatten()
            assert found == pytest.approx(0.04 if name in shared else 0.0), (name, other)


def test_a_run_left_out_is_predicted_as_if_it_had_never_been_there() -> None:
    given = sums(9, np.linspace(-0.2, 0.2, len(PARTS)), noise=0.02)
    prior = Prior({"block": 0.1, "part": 0.05}, noise=0.02)
    for number, residual in enumerate(given.left_out(prior)):
        others = Sums(given.parts, np.delete(given.shares, number, 0), np.delete(given.residuals, number))
        found = others.estimate(prior, given.parts)
        predicted = given.shares[number] @ np.array([found[part] - 1 for part in given.parts])
        assert residual == pytest.approx(given.residuals[number] - predicted, rel=1e-9)


def test_runs_of_one_group_are_left_out_together() -> None:
    given = sums(9, np.linspace(-0.2, 0.2, len(PARTS)), noise=0.02)
    prior = Prior({"block": 0.1, "part": 0.05}, noise=0.02)
    found = given.left_out(prior, ["a", "b", "a", "c", "c", "c", "b", "a", "a"])
    own = [0, 2, 7, 8]
    others = Sums(given.parts, np.delete(given.shares, own, 0), np.delete(given.residuals, own))
    factors = others.estimate(prior, given.parts)
    predicted = given.shares[own] @ np.array([factors[part] - 1 for part in given.parts])
    assert found[own] == pytest.approx(given.residuals[own] - predicted, rel=1e-9)


def test_runs_left_out_choose_the_level_that_the_truth_has() -> None:
    of_block = np.array([0.2 * BLOCKS.index(part.block) for part in PARTS])
    given = sums(8, of_block, noise=0.005)
    assert choose(given, [Prior({name: 0.2}, 0.01) for name in LEVELS]).widths == {"block": 0.2}


def test_a_prior_under_which_a_part_takes_no_time_is_chosen_only_where_no_other_has_factors() -> None:
    below_zero = np.where(np.arange(len(PARTS)) == 0, -1.1, 0.1)
    given = sums(4 * len(PARTS), below_zero)
    wide, narrow, none = (Prior({"part": width}, noise=0.01) for width in (1.0, 0.003, 0.0))
    assert min(given.estimate(wide, PARTS).values()) < 0 < min(given.estimate(narrow, PARTS).values())
    assert np.abs(given.left_out(wide)).mean() < np.abs(given.left_out(narrow)).mean()
    assert choose(given, [none, wide, narrow]) is narrow
    assert choose(given, [none, wide]) is wide  # and what infers from it says what is wrong


def test_priors_are_few_named_and_checked() -> None:
    assert len(list(priors())) == 3 ** len(LEVELS)
    with pytest.raises(ValueError, match="levels of a prior must be among block"):
        Prior({"colour": 0.1}, 0.01)
    with pytest.raises(ValueError, match="noise must be above 0"):
        Prior({"part": 0.1}, 0.0)
    with pytest.raises(ValueError, match="at least one prior"):
        choose(sums(3, np.zeros(len(PARTS))), [])


# Parts and profiles


def test_a_profile_at_factors_of_one_changes_nothing_where_the_host_never_runs_ahead() -> None:
    run = a_run({}, tp=2, microbatch=2)
    assert run.predicted_s(dict.fromkeys(run.parts(), 1.0)) == pytest.approx(run.seconds, rel=1e-12)
    assert {(part.tensor_size, part.samples) for part in run.parts()} == {(2, 2)}
    assert {part.block for part in run.parts()} == set(BLOCKS)


def test_samples_are_those_of_a_rank() -> None:
    assert {part.samples for part in a_run({}, dp=2, microbatch=2).parts()} == {2}


def test_of_unequal_slices_the_larger_is_a_part() -> None:
    """Three samples on two replicas: 2 + 1, and the step waits for two."""
    run = a_run({}, dp=2, microbatch=1, batch=6)
    plan = replace(run.plan, microbatch_size=3, num_microbatches=2)
    assert {part.samples for part in parts_of(run.problem, plan, SHAPE)} == {2}


def test_factors_scale_the_operators_of_their_own_part_only() -> None:
    run = a_run({}, tp=2, microbatch=2)
    plain = profile_of([(run.problem, run.plan)], SHAPE, dict.fromkeys(run.parts(), 1.0), "x")
    twice = profile_of([(run.problem, run.plan)], SHAPE, {Part(SHAPE, AFTER, 2, 2): 2.0}, "x")
    assert set(twice.roles) == {"final_norm", "lm_loss"}  # others have no row: the model prices them
    for role in twice.roles:
        before, after = plain.lookup(role, 2, 2), twice.lookup(role, 2, 2)
        assert before is not None and after is not None
        assert after.row.forward_s == pytest.approx(2 * before.row.forward_s)
        assert after.row.backward_s == pytest.approx(2 * before.row.backward_s)


@pytest.mark.parametrize("other", [Part("large", LAYER, 2, 2), Part(SHAPE, LAYER, 1, 2), Part(SHAPE, LAYER, 2, 4)])
def test_factors_are_never_applied_to_other_shapes_degrees_or_samples(other: Part) -> None:
    run = a_run({}, tp=2, microbatch=2)
    assert profile_of([(run.problem, run.plan)], SHAPE, {other: 3.0}, "x").rows == ()
    own = corrected(run.problem, run.plan, SHAPE, {other: 3.0}, "x")
    assert simulate_time_s(run.plan, own) == pytest.approx(run.seconds, rel=1e-9)


def test_a_problem_with_a_profile_is_refused() -> None:
    run = a_run({}, microbatch=2)
    once = corrected(run.problem, run.plan, SHAPE, dict.fromkeys(run.parts(), 1.0), "x")
    with pytest.raises(ValueError, match="leave the profile out"):
        corrected(once, run.plan, SHAPE, {}, "x")


# From runs to a profile


def test_runs_on_known_factors_give_them_back_and_predict_a_plan_that_was_not_run() -> None:
    truth = {part: 1.0 + 0.1 * number for number, part in enumerate(sorted(a_run({}, microbatch=2).parts()))}
    truth |= dict.fromkeys(a_run({}, tp=2, microbatch=1).parts(), 0.8)
    runs = [
        a_run(truth, batch=batch, **degrees)
        for degrees in ({"microbatch": 2}, {"tp": 2, "microbatch": 1}, {"pp": 2, "microbatch": 2})
        for batch in (4, 8, 16)
    ]
    found = infer(runs, [Prior({"part": 0.3}, noise=1e-4)])
    assert np.abs(found.errors).max() < 1e-3 and np.abs(found.left_out_errors).max() < 2e-2
    layer = Part(SHAPE, LAYER, 1, 2)
    assert found.factors[layer] == pytest.approx(truth[layer], abs=0.02)
    unseen = a_run(truth, batch=32, dp=2, microbatch=2)
    assert unseen.predicted_s(found.factors) == pytest.approx(unseen.seconds, rel=5e-3)
    assert abs(unseen.predicted_s({}) / unseen.seconds - 1) > 0.05


def test_a_run_that_took_longer_than_the_others_say_is_predicted_too_short() -> None:
    """Errors are of predictions: a fifth longer than predicted from all others is 1 / 1.2 - 1."""
    runs = [a_run({}, batch=batch, microbatch=2) for batch in (4, 8, 16, 32)]
    odd = replace(runs[1], seconds=1.2 * runs[1].seconds)
    found = infer([runs[0], odd, *runs[2:]], [Prior({"block": 0.3}, noise=0.01)])
    assert found.left_out_errors[1] == pytest.approx(1 / 1.2 - 1, abs=0.01)
    assert (found.left_out_errors[[0, 2, 3]] > 0).all()


def test_shares_of_a_run_are_at_most_the_whole_and_no_other_runs() -> None:
    runs = [a_run({}, microbatch=1), a_run({}, tp=2, microbatch=2)]
    found = sums_of(runs, {})
    assert (found.shares >= 0).all() and (found.shares.sum(axis=1) <= 1 + 1e-9).all()
    assert found.residuals == pytest.approx([0.0, 0.0], abs=1e-9)
    for line, run in enumerate(runs):
        assert {part for part, share in zip(found.parts, found.shares[line], strict=True) if share} == run.parts()


def test_where_the_host_runs_ahead_shares_are_taken_again_until_sums_agree() -> None:
    truth = dict.fromkeys(a_run({}, runtime="megatron-lm-2021", microbatch=2).parts(), 1.3)
    runs = [a_run(truth, runtime="megatron-lm-2021", batch=batch, microbatch=2) for batch in (4, 8, 16)]
    assert np.abs(infer(runs, [Prior({"part": 0.3}, noise=1e-4)]).errors).max() < 5e-3


def test_fewer_than_two_runs_and_negative_factors_are_refused() -> None:
    run = a_run({}, microbatch=2)
    with pytest.raises(ValueError, match="at least two runs"):
        infer([run], priors())
    short = [replace(run, seconds=run.seconds / 50), replace(a_run({}, microbatch=2, batch=16), seconds=run.seconds)]
    with pytest.raises(ValueError, match="factors must be above 0"):
        infer(short, [Prior({"part": 0.5}, noise=1e-3)])


def test_parts_are_those_of_all_stages() -> None:
    run = a_run({}, pp=2, microbatch=2)
    assert parts_of(run.problem, run.plan, SHAPE) == a_run({}, microbatch=2).parts()


@pytest.mark.parametrize("runtime", ["megatron-deepspeed-timed", "megatron-lm-2021"])
def test_factors_of_one_are_the_model_itself(runtime: str) -> None:
    run = a_run({}, runtime=runtime, tp=2, microbatch=2)
    assert run.predicted_s(dict.fromkeys(run.parts(), 1.0)) == pytest.approx(run.predicted_s({}), rel=1e-9)


def test_runs_that_one_profile_cannot_describe_are_refused_whatever_their_microbatches() -> None:
    """A profile interpolates between numbers of samples: 1 of one model and 2 of another must not meet there."""
    first = a_run({}, tp=1, microbatch=1)
    other = problem_of(
        model=MODEL.model_copy(update={"hidden": 512}),
        cluster="a100-80g-dgx:1x2",
        runtime="megatron-deepspeed-timed",
        global_batch=8,
    )()
    wide = (other, uniform(tp=1, microbatch=2)(other))
    ones = dict.fromkeys((*first.parts(), *parts_of(*wide, SHAPE)), 1.0)
    with pytest.raises(ValueError, match="layers must be alike in all plans"):
        profile_of([(first.problem, first.plan), wide], SHAPE, ones, "here")
    ahead = a_run({}, runtime="megatron-lm-2021", tp=1, microbatch=2)
    with pytest.raises(ValueError, match="runs must share a GPU type, a type of numbers and whether"):
        profile_of([(first.problem, first.plan), (ahead.problem, ahead.plan)], SHAPE, ones, "here")


def a_plan(**words: object) -> tuple[Problem, Plan]:
    problem = problem_of(model=MODEL, cluster="a100-80g-dgx:1x2", runtime="megatron-deepspeed-timed", global_batch=8)()
    return problem, validate(uniform_plan(problem, tp=2, **words), problem)  # type: ignore[arg-type]


def test_what_a_smaller_last_microbatch_waits_for_collectives_is_its_own() -> None:
    problem, plan = a_plan(microbatch=3, smaller_last=True)
    assert plan.last_microbatch_size == 2
    ones = corrected(problem, plan, SHAPE, dict.fromkeys(parts_of(problem, plan, SHAPE), 1.0), "x")
    model_s, profile_s = (simulate_time_s(plan, each) for each in (problem, ones))
    assert profile_s == pytest.approx(model_s, rel=1e-12)


def test_plans_with_and_without_sequence_parallelism_share_a_profile() -> None:
    placed = [a_plan(microbatch=2, sequence_parallel=parallel) for parallel in (False, True)]
    parts = parts_of(*placed[0], SHAPE) | parts_of(*placed[1], SHAPE)
    assert profile_of(placed, SHAPE, dict.fromkeys(parts, 1.0), "here").rows


def test_what_operators_of_a_profile_have_waited_is_not_charged_again() -> None:
    run = a_run({}, tp=2, microbatch=2)
    ones = corrected(run.problem, run.plan, SHAPE, dict.fromkeys(run.parts(), 1.0), "x")
    whole, without = (
        simulate_time_s(run.plan, ones, fidelity=Fidelity().without(*names)) for names in ((), ("host",))
    )
    assert without < whole == pytest.approx(run.seconds, rel=1e-12)


@pytest.mark.parametrize("model", ["swin-huge-32", "vgg-16", "gnmt-8"])
def test_operators_of_one_role_and_several_shapes_keep_times_of_their_own(model: str) -> None:
    problem = ProblemSpec(model, "titan-rtx-pcie:1x2", "galvatron-v1", 16).load()
    plan = validate(uniform_plan(problem, pp=2, microbatch=2), problem)
    again = corrected(problem, plan, SHAPE, dict.fromkeys(parts_of(problem, plan, SHAPE), 1.0), "x")
    assert simulate_time_s(plan, again) == pytest.approx(simulate_time_s(plan, problem), rel=1e-3)
