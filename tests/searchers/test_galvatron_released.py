"""The first release's planner: its times by hand, and the plans that it shipped."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from searchers.galvatron.import_plan import import_plan
from searchers.galvatron.microbatches import Cut
from searchers.galvatron.options import Options
from searchers.galvatron.overlap import overlapped_s
from searchers.galvatron.pipeline_costs import LayerCost, released_bytes
from searchers.galvatron.pipeline_plan import PipelinePlan
from searchers.galvatron.planner import Planner
from searchers.galvatron.plans import from_plan, plan_of_layers
from searchers.galvatron.released_time import ReleasedTime
from searchers.galvatron.searcher import variant_options
from searchers.galvatron.strategies import DATA, SHARDED, TENSOR, Level, Strategy
from searchers.registry import searcher_named
from simulator.closed_forms.estimate import estimate
from simulator.plan import Axis
from simulator.problem import Problem
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.searchers.galvatron_problems import profiles, titan
from tests.workloads.graphs import SHARED_DATA

PLANS = SHARED_DATA / "galvatron" / "plans"
MIB = 2**20


def released(problem: Problem, model: str) -> Planner:
    options = replace(
        variant_options("galvatron"),
        memory="released",
        time="released",
        unequal_microbatches=True,
        granularity_bytes=MIB,
    )
    return Planner(problem, options, profiles=profiles(model))


def times(model: str, num_stages: int) -> ReleasedTime:
    search = released(titan(model, 8, 24), model).degree_search(num_stages)
    assert search is not None and search.estimator.released_time is not None
    return search.estimator.released_time


def test_a_layer_takes_what_the_published_constants_add_up_to() -> None:
    # BERT-Huge, 16 samples over dp 4 > tp 2: 4 samples a replica, 2.291667 ms each forward on one device.
    forward = 4 * 2.291667 / 2
    tensor = 4 * (4 * 512 * 1280 * 4 / MIB) * 0.277994792  # Two all-reduces each way; a ring of two moves S.
    reduction = 2 * 3 / 4 * 0.220138889 * profiles("bert-huge-32").core_parameters(1, 2) * 4 / MIB
    left = overlapped_s(2 * forward, reduction, (1.3, 1.3)) - 2 * forward
    strategy = Strategy((Level(DATA, 4), Level(TENSOR, 2)))
    assert times("bert-huge-32", 1).layer_s(1, strategy, 16) == pytest.approx(
        1.1e-3 * (3 * forward + tensor + left), rel=1e-6
    )
    sharded = Strategy((Level(SHARDED, 4), Level(TENSOR, 2)))
    assert times("bert-huge-32", 1).layer_s(1, sharded, 16) == pytest.approx(
        1.1e-3 * (3 * forward + tensor + left + reduction / 2), rel=1e-6
    )
    checkpointed = replace(strategy, checkpoint=True)
    left = overlapped_s(3 * forward, reduction, (1.3, 1.3)) - 3 * forward
    assert times("bert-huge-32", 1).layer_s(1, checkpointed, 16) == pytest.approx(
        1.1e-3 * (4 * forward + 1.5 * tensor + left), rel=1e-6
    )


def test_a_pipeline_of_one_device_per_stage_takes_its_bubble() -> None:
    # Three microbatches on eight stages: (8 + 3 - 1) / (8 * 3) of 8 samples forward and twice that backward.
    assert times("bert-huge-32", 8).layer_s(1, Strategy(), 8) == pytest.approx(
        1.1e-3 * 3 * 8 * 2.291667 * 10 / 24, rel=1e-6
    )


def test_moving_between_layers_costs_only_where_the_tensor_degree_grows_or_ranks_lie_otherwise() -> None:
    model = times("bert-huge-32", 1)
    wide, narrow = Strategy((Level(DATA, 2), Level(TENSOR, 4))), Strategy((Level(DATA, 8),))
    strided = Strategy((Level(TENSOR, 4), Level(DATA, 2)))
    assert model.transition_s(wide, narrow, 16) == 0.0
    assert model.transition_s(wide, wide, 16) == 0.0
    # Half of 16 samples, a MiB each, around a ring of four.
    assert model.transition_s(narrow, wide, 16) == pytest.approx(1.1e-3 * 8 * 2 * 3 / 4 * 0.226519097)
    assert model.transition_s(wide, strided, 16) == pytest.approx(1.1e-3 * 8 * 2 * 3 / 4 * 0.220138889)


def test_the_release_ran_gpipe_by_its_own_rules_for_microbatches() -> None:
    with pytest.raises(ValueError, match="time 'released' is of releases that ran gpipe, got schedule '1f1b'"):
        Options(time="released")
    with pytest.raises(ValueError, match="goes with microbatches released or table, got 'free'"):
        Options(time="released", schedule="gpipe", microbatches="free")


def test_other_plans_are_scored_by_the_shared_closed_form() -> None:
    problem = titan("vit-huge-32", 16, 20)
    plan = uniform_plan(problem, pp=2, dp=4, microbatch=1, schedule="1f1b")
    score = searcher_named("galvatron-base", time="released").paper_objective(plan, problem)
    assert score.objective == pytest.approx(estimate(plan, problem).iteration_time_s)


@pytest.mark.parametrize("num_gpus", [2, 8])
def test_pure_plans_are_never_better_than_what_is_found(num_gpus: int) -> None:
    options = replace(variant_options("galvatron"), memory="released", time="released")
    planner = Planner(titan("vit-huge-32", 16, 20, num_gpus), options)
    plans = list(planner.plans(16))
    found = planner.best(16)
    assert found is not None and found.fits and len({len(plan.stages) for plan in plans}) > 1
    num_compared = 0
    for plan in plans:
        search = planner.degree_search(len(plan.stages))
        assert search is not None
        for strategy in search.strategies:
            pure = search.assess(
                [stage.layers for stage in plan.stages],
                [[strategy] * len(stage.layers) for stage in plan.stages],
                16,
                planner.cuts(16, len(plan.stages))[0],
            )
            if pure is not None and pure.fits:
                assert pure.iteration_time_s >= found.iteration_time_s * (1 - 1e-9)
                num_compared += 1
    assert num_compared


def shipped(name: str, model: str, memory_gb: int, batch: int) -> tuple[PipelinePlan, PipelinePlan]:
    """Return what the release shipped for a cell of Table II, assessed, and what is found for it."""
    path = PLANS / name
    if not path.exists():
        pytest.skip("needs the plans of the public data set (galvatron/plans)")
    problem = titan(model, batch, memory_gb)
    planner = released(problem, model)
    stages = from_plan(import_plan(path, problem), planner.profiles.layers)
    assert stages is not None
    search = planner.degree_search(len(stages))
    assert search is not None
    cut = Cut(len(stages), batch // len(stages))
    plan = search.assess([layers for layers, _ in stages], [chosen for _, chosen in stages], batch, cut)
    found = planner.best(batch)
    assert plan is not None and found is not None
    return plan, found


def count(plan: PipelinePlan, stage: int) -> Counter[Strategy]:
    return Counter(plan.stages[stage].chosen)


def test_the_plan_shipped_for_bert_at_8_gb_is_found() -> None:
    plan, found = shipped("v1_bert__galvatron_config_8gpus_1280hidden_32layers_8G_full.json", "bert-huge-32", 8, 8)
    assert found.partition == plan.partition == (16, 16)
    assert found.cut == plan.cut == Cut(2, 4)
    # The release searches one of two equal stages and uses the result for both; only the first needs a sharded layer.
    assert count(found, 0) == count(plan, 0)
    assert plan.fits and found.peak_bytes == plan.peak_bytes


def test_the_plan_shipped_for_bert_at_12_gb_is_found() -> None:
    plan, found = shipped("v1_bert__galvatron_config_8gpus_1280hidden_32layers_12G_full.json", "bert-huge-32", 12, 16)
    assert plan.fits and count(found, 0) == count(plan, 0)
    assert found.iteration_time_s == pytest.approx(plan.iteration_time_s, rel=1e-9)


def test_for_swin_a_plan_at_least_as_good_as_the_shipped_one_is_found() -> None:
    name = "v1_swin__galvatron_config_8gpus_320embeddim_2_2_26_2_layers_8G_full.json"
    plan, found = shipped(name, "swin-huge-32", 8, 48)
    assert plan.fits
    assert 0.97 * plan.iteration_time_s < found.iteration_time_s <= plan.iteration_time_s


def test_the_release_keeps_embedding_and_head_whole_on_every_device() -> None:
    problem = titan("bert-huge-32", 16, 24)
    layers = profiles("bert-huge-32").layers
    tensor = Strategy((Level(TENSOR, 8),))
    plan = plan_of_layers([(layers, [tensor] * len(layers))], cut=Cut(1, 16), schedule="gpipe", outside="data")
    validate(plan, problem)
    shardings = list(plan.stages[0].sharding_per_operator())
    inside = {index for layer in layers for index in range(*layer.core)}
    for index, sharding in enumerate(shardings):
        assert sharding == (tensor.sharding if index in inside else (Axis("batch", 8),))
    assert len(inside) < len(shardings)
    assert from_plan(plan, layers) == [(layers, (tensor,) * len(layers))]
    few = plan_of_layers([(layers, [tensor] * len(layers))], cut=Cut(4, 4), schedule="gpipe", outside="data")
    assert set(few.stages[0].sharding_per_operator()) == {tensor.sharding}, "four samples cannot be shared by eight"


def test_released_memory_rounds_each_layer_to_whole_mebibytes_and_adds_the_largest_inner_activations() -> None:
    """Two layers of 3 MiB a microbatch and 1.5 of states hold 7.5, hence 8 each, of two; beside 2 x 1.25 MiB."""
    mib = float(2**20)
    layers = [LayerCost(*[0.0] * 3, 3 * mib, inner * mib, 1.5 * mib, *[0.0] * 6) for inner in (0.5, 1.25)]
    assert released_bytes(layers, 2) == (8 + 8 + 2.5) * mib
