"""Galvatron's microbatches: the rules, PyTorch's parts, and what a smaller last one costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from searchers.galvatron.microbatches import RULES, Cut, chunked, cuts, microbatch_counts, replica_count
from searchers.galvatron.options import Options
from searchers.galvatron.pipeline_plan import split
from searchers.galvatron.plans import spread
from searchers.galvatron.searcher import GalvatronBMW
from searchers.registry import searcher_named
from simulator.plan import Axis
from simulator.simulate import simulate
from tests.searchers.galvatron_problems import planner, titan


@pytest.mark.parametrize("rule", RULES)
def test_microbatches_divide_the_batch(rule: str) -> None:
    for family in ("bert", "vit", "t5", "swin"):
        for batch in (8, 24, 56, 136):
            for stages in (1, 2, 8):
                for count in microbatch_counts(rule, family, batch, stages, 8):
                    assert batch % count == 0 and (stages > 1 or rule in ("free", "divisors") or count == 1)


@pytest.mark.parametrize(
    ("cut", "divides"), [(Cut(4, 8), True), (Cut(4, 8, 4), True), (Cut(4, 8, 6), False), (Cut(4, 6), False)]
)
def test_samples_are_shared_among_all_devices_where_each_microbatch_divides(cut: Cut, divides: bool) -> None:
    own = (Axis("tensor", 4),)
    assert spread(4, cut, own) == ((Axis("batch", 4),) if divides else own)
    assert spread(1, cut, own) == ()


def test_unequal_microbatches_are_those_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    for batch in range(8, 200, 8):
        for stages in (2, 4, 8):
            (cut,) = cuts("released", "bert", batch, stages, 8, unequal=True)
            width = 8 // stages
            own = torch.arange(batch // width).chunk(min(8, -(-batch // width // 4)))
            sizes = [cut.samples] * (cut.parts - 1) + [cut.last or cut.samples]
            assert [len(part) * width for part in own] == sizes
            assert cut.batch == batch


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 16))
def test_a_batch_in_chunks_is_the_batch(batch: int, parts: int, width: int) -> None:
    cut = chunked(batch, parts, width)
    assert cut.batch == batch and 1 <= cut.parts <= parts
    assert cut.samples % width == 0 or cut.samples == batch
    assert cut.last is None or (cut.parts > 1 and 1 <= cut.last < cut.samples)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_smaller_last_microbatch_is_priced_between_fewer_and_more_whole_ones(schedule: str) -> None:
    own = planner("bert-huge-32", 20, Options(schedule=schedule))
    for degree in (2, 4, 8):
        search = own.searches[degree]
        stages = split(search.layers, (32 // degree,) * degree)
        chosen = [[search.strategies[0]] * len(stage) for stage in stages]
        found = [
            search.assess(stages, chosen, cut.batch, cut)
            for cut in (Cut(3, 8), Cut(4, 8, 4), Cut(4, 8, 8), Cut(4, 8))
        ]
        fewer, between, same, more = (plan for plan in found if plan is not None)
        assert fewer.iteration_time_s < between.iteration_time_s < more.iteration_time_s
        assert fewer.peak_bytes <= between.peak_bytes <= more.peak_bytes
        if schedule == "gpipe":
            assert between.peak_bytes == pytest.approx((fewer.peak_bytes + more.peak_bytes) / 2, rel=0.01)
        assert same.iteration_time_s == pytest.approx(more.iteration_time_s, rel=1e-12)
        assert same.peak_bytes == more.peak_bytes


def test_a_searcher_plans_for_the_very_batch_with_a_smaller_last_microbatch() -> None:
    problem = titan("bert-huge-32", 24, 20)
    found = searcher_named("galvatron-dp-pp", unequal_microbatches=True).search(problem)
    plans = [ranked.plan for ranked in found.plans]
    assert plans and all(plan.global_batch == 24 for plan in plans)
    unequal = [plan for plan in plans if plan.last_microbatch_size is not None]
    assert unequal, "five parts of 5, 5, 5, 5 and 4 on eight stages"
    for plan in unequal:
        assert simulate(plan, problem, engine="compiled").global_batch == 24


def test_an_unknown_rule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="released, formula, table, free, divisors, got 'some'"):
        Options(microbatches="some")
    with pytest.raises(ValueError, match=r"options of galvatron-bmw are .*got 'granularty'"):
        GalvatronBMW(granularty=3)


@pytest.mark.parametrize(
    ("family", "samples", "tensor", "stages", "devices", "count"),
    [
        ("bert", 4, 2, 2, 8, 2),  # The shipped plan for 8 GB: b / 2 below six samples of a replica.
        ("bert", 64, 4, 2, 8, 16),  # No data parallelism: b / 4.
        ("swin", 64, 4, 2, 8, 3),
        ("bert", 64, 4, 2, 16, 4),  # Sixteen GPUs: ceil(b / tp / 4).
        ("vit", 64, 1, 8, 16, 4),
    ],
)
def test_hand_tables_follow_the_samples_of_a_replica(
    family: str, samples: float, tensor: int, stages: int, devices: int, count: float
) -> None:
    assert replica_count("table", family, samples, tensor, stages, devices) == count


def test_the_releases_of_bmw_cut_a_batch_into_at_most_eight() -> None:
    counts = [replica_count("released", "bert", samples, 1, 2, 16) for samples in (3, 24, 32, 47, 1000)]
    assert counts == [1, 6, 8, 8, 8]
    assert replica_count("released", "vit", 24, 2, 2, 8) == 3
    assert [replica_count("formula", "vit", samples, 1, 2, 8) for samples in (24, 480)] == [2, 8]
