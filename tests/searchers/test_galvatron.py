"""Galvatron: strategy counts, balanced pipelines, plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hardware_models.model import HardwareModel
from searchers.base import NoFeasiblePlan
from searchers.degrees import compositions
from searchers.galvatron.communication import CollectiveTimes, transfer_s
from searchers.galvatron.microbatches import Cut
from searchers.galvatron.options import Options
from searchers.galvatron.partitions import filled_from_the_back, least_maximum, least_maximum_within, neighbours
from searchers.galvatron.pipeline_plan import PipelinePlan, split
from searchers.galvatron.planner import Planner
from searchers.galvatron.plans import from_plan, to_plan
from searchers.galvatron.searcher import GalvatronBMW, assess, variant_options
from searchers.galvatron.stage_search import DegreeSearch
from searchers.galvatron.strategies import DATA, SHARDED, TENSOR, Level, Strategy, decision_trees, strategies
from simulator.closed_forms.estimate import estimate
from simulator.lowering.mesh import groups
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.searchers.galvatron_problems import bert, planner, profiles, titan
from tests.searchers.tiny import tiny_problem

GIB = 2**30


# Strategies


@pytest.mark.parametrize(
    ("num_devices", "whole", "pruned"), [(8, 68, 44), (16, 146, 74), (32, 272, 112), (64, 458, 158)]
)
def test_trees_are_as_many_as_the_paper_counts(num_devices: int, whole: int, pruned: int) -> None:
    """68 and 44 are printed (section III-B); the others follow from the same rules."""

    def count(**options: bool) -> int:
        return sum(len(found) for found in decision_trees(num_devices, **options).values())

    assert (count(mix_data_and_sharded=True), count()) == (whole, pruned)
    assert 2 * count(checkpoint=False) == pruned


def test_no_strategy_occurs_twice_and_every_one_uses_all_devices() -> None:
    for num_devices in (1, 2, 4, 8, 16):
        found = strategies(num_devices, mix_data_and_sharded=True)
        assert len(set(found)) == len(found)
        assert {each.num_devices for each in found} == {num_devices}
        assert all(level.degree >= 2 for each in found for level in each.levels)


def test_the_order_of_a_tree_says_which_ranks_form_a_group() -> None:
    inner, outer = Strategy((Level(DATA, 2), Level(TENSOR, 4))), Strategy((Level(TENSOR, 4), Level(DATA, 2)))
    assert inner.layout != outer.layout and (inner.data, inner.tensor) == (outer.data, outer.tensor)
    position = inner.axis_position(TENSOR)
    assert position is not None and groups((2, 4), (position,))[0] == (0, 1, 2, 3)
    position = outer.axis_position(TENSOR)
    assert position is not None and groups((4, 2), (position,))[0] == (0, 2, 4, 6)
    assert Strategy((Level(SHARDED, 2), Level(TENSOR, 4))).layout == inner.layout, "activations of DP and SDP lie alike"


def test_data_and_pipeline_parallelism_alone_give_four_strategies() -> None:
    found = [strategies(8 // degree, kinds=(DATA,), checkpoint=False) for degree in (1, 2, 4, 8)]
    assert [len(each) for each in found] == [1, 1, 1, 1]
    assert len(strategies(8, kinds=(DATA, TENSOR), checkpoint=False)) == 6


@pytest.mark.parametrize("num_devices", [0, 3, 12])
def test_devices_of_a_stage_are_a_power_of_two(num_devices: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        strategies(num_devices)


# Partitions and microbatches


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_stages=st.integers(1, 4), num_layers=st.integers(4, 8))
def test_balanced_partitions_are_the_best_of_all(seed: int, num_stages: int, num_layers: int) -> None:
    loads = np.random.default_rng(seed).uniform(0.1, 3, (num_stages, num_layers))

    def heaviest(partition: Sequence[int]) -> float:
        cuts = np.cumsum([0, *partition])
        return max(float(loads[stage, cuts[stage] : cuts[stage + 1]].sum()) for stage in range(num_stages))

    best = min(heaviest(partition) for partition in compositions(num_layers, num_stages))
    assert heaviest(least_maximum(loads)) == pytest.approx(best)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_stages=st.integers(1, 4), limit=st.floats(1, 12))
def test_partitions_within_a_limit_are_the_best_of_all_that_are(seed: int, num_stages: int, limit: float) -> None:
    loads, limited = np.random.default_rng(seed).uniform(0.1, 3, (2, num_stages, 6))

    def heaviest(weights: NDArray[np.float64], partition: Sequence[int]) -> float:
        cuts = np.cumsum([0, *partition])
        return max(float(weights[stage, cuts[stage] : cuts[stage + 1]].sum()) for stage in range(num_stages))

    within = [each for each in compositions(6, num_stages) if heaviest(limited, each) <= limit]
    found = least_maximum_within(loads, limited, limit)
    assert (found is None) == (not within)
    if found is not None:
        assert heaviest(limited, found) <= limit + 1e-9
        assert heaviest(loads, found) == pytest.approx(min(heaviest(loads, each) for each in within))


@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_filling_from_the_back_keeps_every_layer_and_stage(num_stages: int) -> None:
    found = filled_from_the_back([1.0] * 16 + [1.7] * 16, num_stages)
    assert sum(found) == 32 and min(found) >= 1 and found[0] > found[-1]


def test_a_stage_hands_over_one_boundary_layer() -> None:
    assert list(neighbours((5, 3), 0)) == [(4, 4)]
    assert list(neighbours((1, 7), 0)) == []


# Whole plans


def pure_plans(search: DegreeSearch, partition: tuple[int, ...], batch: int, cut: Cut) -> list[PipelinePlan]:
    stages = split(search.layers, partition)
    found = [
        search.assess(stages, [[strategy] * len(stage) for stage in stages], batch, cut)
        for strategy in search.strategies
    ]
    return [plan for plan in found if plan is not None and plan.fits]


@pytest.mark.parametrize("memory_gb", [8, 12, 20])
@pytest.mark.parametrize("model", ["bert-huge-32", "t5-large-32", "swin-huge-32"])
def test_no_pure_strategy_of_the_space_is_better_and_the_budget_is_kept(model: str, memory_gb: int) -> None:
    own = planner(model, memory_gb, Options(microbatches="free"))
    for degree, stages in own.searches.items():
        partition = (32 // degree,) * degree
        for cut in (Cut(1, 32), Cut(2, 16), Cut(3, 12, 8)):
            found = stages.plan(partition, 32, cut)
            pure = pure_plans(stages, partition, 32, cut)
            if not pure:
                continue
            assert found is not None
            assert found.peak_bytes <= stages.budget_bytes
            assert found.iteration_time_s <= min(plan.iteration_time_s for plan in pure) * (1 + 1e-12)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("model", ["bert-huge-32", "t5-512-4-32"])
def test_bmw_is_never_worse_than_base_with_the_same_options(model: str, checkpoint: bool) -> None:
    num_compared = 0
    for memory_gb in (8, 16):
        bmw = Options(checkpoint=checkpoint)
        base = replace(bmw, partition="base")
        for batch in (8, 32, 96):
            plain, balanced = (planner(model, memory_gb, options).best(batch) for options in (base, bmw))
            if plain is not None:
                assert balanced is not None
                assert balanced.iteration_time_s <= plain.iteration_time_s * (1 + 1e-12)
                num_compared += 1
    assert num_compared


def test_the_walk_also_starts_from_the_quickest_partitions_within_less_memory() -> None:
    """From the two ends and straight between them four stages were found, 14.8 samples/s for 16.2."""
    own = planner("bert-huge-32", 12, variant_options("galvatron-1f1b-bi"))
    partition = (3, 3, 4, 5, 5, 5, 5, 2)
    known = [own.searches[8].plan(partition, 32, cut) for cut in own.cuts(32, 8)]
    found = own.best(32)
    assert found is not None
    assert found.iteration_time_s <= min(plan.iteration_time_s for plan in known if plan is not None)


def test_more_memory_and_a_larger_space_never_hurt() -> None:
    times, num_compared = [], 0
    for memory_gb in (8, 12, 16, 20):
        found = planner("bert-huge-32", memory_gb, Options()).best(32)
        assert found is not None
        times.append(found.iteration_time_s)
        plain = planner("bert-huge-32", memory_gb, Options(checkpoint=False)).best(32)
        if plain is not None:
            assert found.iteration_time_s <= plain.iteration_time_s * 1.02
            num_compared += 1
    assert times == sorted(times, reverse=True)
    assert num_compared


def test_a_memory_balanced_1f1b_pipeline_gives_early_stages_fewer_layers() -> None:
    own = planner("bert-huge-32", 20, Options(checkpoint=False, partition="memory"))
    pipelines = [plan for plan in own.plans(64) if len(plan.stages) > 1 and plan.num_microbatches > 1]
    assert pipelines
    for plan in pipelines:
        assert list(plan.partition) == sorted(plan.partition)
        assert plan.partition[0] < plan.partition[-1]


@pytest.mark.parametrize("model", ["bert-huge-32", "t5-large-32", "swin-huge-32"])
@pytest.mark.parametrize("batch", [32, 40])
def test_a_plan_says_the_same_as_the_planner(model: str, batch: int) -> None:
    problem = titan(model, batch, 12)
    own = Planner(problem, Options(unequal_microbatches=batch == 40), profiles=profiles(model))
    for found in own.plans(batch):
        plan = to_plan(found, problem)
        assert plan.global_batch == batch
        validate(plan, problem)
        assert from_plan(plan, own.profiles.layers) == [(stage.layers, stage.chosen) for stage in found.stages]
        again = assess(plan, problem)
        assert again is not None
        assert again.iteration_time_s == pytest.approx(found.iteration_time_s)
        assert again.peak_bytes == pytest.approx(found.peak_bytes)


def test_a_plan_in_other_words_has_no_assessment() -> None:
    problem = tiny_problem(2, 4)
    assert assess(uniform_plan(problem, dp=2, microbatch=1, zero=1), problem) is None
    assert assess(uniform_plan(problem, pp=2, microbatch=1, schedule="zb-h1"), problem) is None


@pytest.mark.parametrize("words", [{"recompute": "selective"}, {"sequence_parallel": True}])
def test_layers_that_are_cut_or_recomputed_in_part_have_no_assessment(words: dict[str, Any]) -> None:
    """They were taken for plain tensor parallelism that keeps everything."""
    assert assess(uniform_plan(bert(24, 16), tp=2, dp=4, **words), bert(24, 16)) is None
    assert assess(uniform_plan(bert(24, 16), tp=2, dp=4, recompute="full"), bert(24, 16)) is not None


@pytest.mark.parametrize(
    ("degrees", "tolerance"),
    [({"dp": 8, "microbatch": 2}, 0.05), ({"dp": 8, "microbatch": 2, "zero": 3}, 0.08),
     ({"dp": 4, "tp": 2, "microbatch": 4}, 0.08), ({"dp": 4, "pp": 2, "microbatch": 1}, 0.05),
     ({"dp": 8, "microbatch": 2, "recompute": "full"}, 0.05)],
)  # fmt: skip
def test_the_estimator_agrees_with_the_simulator_on_pure_strategies(
    degrees: dict[str, int | str], tolerance: float
) -> None:
    problem = bert(24, 16)
    plan = uniform_plan(problem, overlap_gradient_sync=True, **degrees)  # type: ignore[arg-type]
    own, simulated = assess(plan, problem), simulate(plan, problem, engine="compiled")
    assert own is not None
    assert own.iteration_time_s == pytest.approx(simulated.iteration_time_s, rel=tolerance)
    peak = max(memory.peak_allocated_bytes for memory in simulated.memory)
    assert own.peak_bytes == pytest.approx(peak, rel=0.03)


def test_fused_layers_share_a_strategy_and_are_never_better() -> None:
    fine = planner("bert-huge-32", 8, Options()).best(32)
    coarse = planner("bert-huge-32", 8, Options(fused_layers=8)).best(32)
    assert fine is not None and coarse is not None
    assert coarse.iteration_time_s >= fine.iteration_time_s * (1 - 0.02)


def test_without_the_overlap_slowdown_nothing_is_slower() -> None:
    problem = bert(24, 16)
    plan = uniform_plan(problem, dp=8, microbatch=2, overlap_gradient_sync=True)
    slowed, ideal = assess(plan, problem), assess(plan, problem, Options(overlap_slowdown=False))
    assert slowed is not None and ideal is not None and ideal.iteration_time_s < slowed.iteration_time_s


def test_exploration_ends_and_finds_the_best_throughput() -> None:
    own = planner("bert-huge-32", 16, Options(partition="base", schedule="gpipe", microbatches="table"))
    found = own.explore(growth=0.1)
    assert found.best is not None and found.num_batches < 60
    assert found.best.throughput == max(plan.throughput for plan in found.plans)
    assert [plan.batch for plan in found.plans] == sorted(plan.batch for plan in found.plans)


def test_every_searched_plan_passes_the_shared_memory_estimate() -> None:
    problem = bert(12)
    for ranked in GalvatronBMW().search(problem).plans:
        assert estimate(ranked.plan, problem).fits


def test_no_plan_names_the_leanest() -> None:
    with pytest.raises(NoFeasiblePlan, match="out of memory"):
        GalvatronBMW().search(titan("bert-huge-48", 8, 2))


def test_groups_of_an_axis_share_a_card_as_the_protocol_that_they_take_loads_it() -> None:
    hardware = HardwareModel.from_name("a100-40g-dgx-100g:2x8")
    times, pair = CollectiveTimes(hardware, range(16)), (0, 8)
    (low, wide), rate = hardware.cluster.nodes[0].network.protocols, hardware.cluster.nodes[0].network.nic_bytes_per_s
    assert low.bandwidth_fraction * 8 > 1
    for num_bytes, protocol in ((1e4, low), (1e9, wide)):
        cost = hardware.collective("all_reduce", num_bytes, pair)
        assert cost.work_s == pytest.approx(num_bytes / rate / protocol.bandwidth_fraction)
        found_s = times.seconds("all_reduce", num_bytes, (2, 8), (0,))
        assert found_s == pytest.approx(cost.latency_s + 8 * num_bytes / rate)
    each_s = hardware.transfer(1e8, 0, 8).shares[0][1] * hardware.transfer(1e8, 0, 8).work_s
    assert transfer_s(hardware, range(8), range(8, 16), 1e8) == pytest.approx(
        hardware.transfer(1e8, 0, 8).latency_s + 8 * each_s
    )


@pytest.mark.parametrize("keep", [0, -2])
def test_a_search_keeps_at_least_one_plan(keep: int) -> None:
    with pytest.raises(ValueError, match=f"keep must be at least 1, got {keep}"):
        GalvatronBMW(keep=keep)
