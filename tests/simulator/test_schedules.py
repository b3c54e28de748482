"""Schedules against closed forms and published replays, and the checks on orders."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.schedules.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    PipelineShape,
)
from simulator.schedules.one_f_one_b import warmup_p_a, warmup_p_b
from simulator.schedules.orders import check_order
from simulator.schedules.registry import SCHEDULES, schedule_named
from tests.simulator.graphs import interleaved_shape, pipeline_s, plain_shape
from tests.simulator.replays import REPLAYS

DEPTHS = [1, 2, 3, 4, 8]
# Sums of these are exact in binary, so closed forms can be compared with ==.
DYADIC_TIMES = [(1.0, 2.0), (0.75, 1.5), (2.0, 2.25)]


def end_s(name: str, shape: PipelineShape, **options: float) -> float:
    """Return the iteration time of a schedule with equal stages."""
    orders = schedule_named(name).actions(shape)
    check_order(shape, orders)
    return pipeline_s(shape, orders, **options)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(p, m) for p in DEPTHS for m in (1, 3, 8, 17)])
@pytest.mark.parametrize(("t_f", "t_b"), DYADIC_TIMES)
def test_equal_stages_end_after_m_plus_p_minus_1_slots(name, p, m, t_f, t_b) -> None:
    assert end_s(name, plain_shape(p, m), forward_s=t_f, backward_s=t_b) == (m + p - 1) * (t_f + t_b)


@pytest.mark.parametrize("m", [4, 8, 32])
def test_p_b_with_free_links_is_as_fast_as_p_a(m) -> None:
    assert end_s("1f1b", plain_shape(4, m, warmup_p_b(4, m))) == (m + 3) * 3.0


@pytest.mark.parametrize(("p", "v", "groups"), list(itertools.product([2, 4, 8], [1, 2, 3, 4], [1, 2, 4])))
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(p, v, groups) -> None:
    m, t_f, t_b = groups * p, 12.0, 24.0  # Divisible by every v here.
    interleaved = end_s("interleaved", interleaved_shape(p, v, m), forward_s=t_f / v, backward_s=t_b / v)
    plain = end_s("1f1b", plain_shape(p, m), forward_s=t_f, backward_s=t_b)
    ideal = m * (t_f + t_b)
    assert interleaved - ideal == (plain - ideal) / v == (p - 1) * (t_f + t_b) / v


@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 2), (4, 3)])
def test_interleaving_as_many_microbatches_as_ranks_runs_all_forwards_first(p, v) -> None:
    """Megatron-LM's schedules.py: "just the number of pipeline stages"."""
    for order in schedule_named("interleaved").actions(interleaved_shape(p, v, p)):
        assert [action.kind for action in order] == [FORWARD] * (p * v) + [BACKWARD] * (p * v)
    for rank, order in enumerate(schedule_named("interleaved").actions(interleaved_shape(p, v, 2 * p))):
        assert [action.kind for action in order].index(BACKWARD) == 2 * (p - rank - 1) + (v - 1) * p + 1


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in DEPTHS for m in (8, 11, 32)])
@pytest.mark.parametrize(("t_f", "t_i", "t_w"), [(1.0, 1.0, 1.0), (1.0, 1.5, 1.0), (2.0, 1.5, 1.25), (0.5, 2.5, 0.5)])
def test_zb_h1_leaves_the_bubble_of_the_zero_bubble_paper(p, m, t_f, t_i, t_w) -> None:
    time = end_s("zb-h1", plain_shape(p, m), forward_s=t_f, backward_s=t_i + t_w, backward_input_s=t_i)
    assert time - m * (t_f + t_i + t_w) == (p - 1) * (t_f + t_i - t_w)


def most_in_flight(order: list[Action], released_by: tuple[str, ...]) -> int:
    """Return the largest number of microbatches whose activations one rank holds."""
    held = list(itertools.accumulate((a.kind == FORWARD) - (a.kind in released_by) for a in order))
    return max(held)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 8), (8, 20), (5, 3)])
def test_microbatches_in_flight_are_those_of_the_papers(p, m) -> None:
    shape = plain_shape(p, m)
    whole, split = (BACKWARD,), (BACKWARD_WEIGHT,)
    gpipe = [most_in_flight(order, whole) for order in schedule_named("gpipe").actions(shape)]
    plain = [most_in_flight(order, whole) for order in schedule_named("1f1b").actions(shape)]
    zb_h1 = [most_in_flight(order, split) for order in schedule_named("zb-h1").actions(shape)]
    assert gpipe == [m] * p
    assert plain == [min(p - i, m) for i in range(p)]
    assert zb_h1 == [min(p, m)] * p
    assert max(zb_h1) == max(plain)


def test_the_dapple_replay_without_link_cost_ends_at_33() -> None:
    assert end_s("1f1b", plain_shape(4, 8)) == 33.0


@pytest.mark.parametrize("half_duplex", [False, True], ids=["full duplex", "half duplex"])
@pytest.mark.parametrize(("stages", "link_s"), list(REPLAYS))
def test_replays_with_link_cost_match_to_the_printed_digit(stages, link_s, half_duplex) -> None:
    shapes = {
        "P_A": ("1f1b", plain_shape(stages, 64, warmup_p_a(stages, 64))),
        "P_B": ("1f1b", plain_shape(stages, 64, warmup_p_b(stages, 64))),
        "GPipe": ("gpipe", plain_shape(stages, 64)),
    }
    ends = [end_s(name, shape, link_s=link_s, half_duplex=half_duplex) for name, shape in shapes.values()]
    assert tuple(f"{end:.2f}" for end in ends) == REPLAYS[stages, link_s]
    assert ends == pytest.approx([float(printed) for printed in REPLAYS[stages, link_s]], rel=1e-12)


def test_p_a_on_stages_and_links_is_p_b_on_stages() -> None:
    assert warmup_p_a(2 * 4 - 1, 64)[::2] == warmup_p_b(4, 64) == (7, 5, 3, 1)


@given(p=st.integers(1, 7), v=st.integers(1, 4), groups=st.integers(1, 4), m=st.integers(1, 20))
def test_every_schedule_gives_orders_that_can_be_executed(p, v, groups, m) -> None:
    for name in SCHEDULES:
        shape = interleaved_shape(p, v, groups * p) if name == "interleaved" else plain_shape(p, m)
        check_order(shape, schedule_named(name).actions(shape))
    depth_first = interleaved_shape(p, v, m)
    check_order(depth_first, schedule_named("gpipe").actions(depth_first))


@given(depths=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_any_warmup_that_does_not_grow_can_be_executed(depths) -> None:
    shape = plain_shape(len(depths), 9, tuple(sorted(depths, reverse=True)))
    check_order(shape, schedule_named("1f1b").actions(shape))


def test_a_warmup_that_grows_would_deadlock_and_is_refused() -> None:
    shape = plain_shape(2, 4, (1, 2))
    with pytest.raises(ValueError, match=r"must not grow from stage to stage.*got 1 then 2"):
        schedule_named("1f1b").actions(shape)
    orders = [
        [Action(FORWARD, 0, 0), Action(BACKWARD, 0, 0), Action(FORWARD, 0, 1), Action(BACKWARD, 0, 1)],
        [Action(FORWARD, 1, 0), Action(FORWARD, 1, 1), Action(BACKWARD, 1, 0), Action(BACKWARD, 1, 1)],
    ]
    with pytest.raises(ValueError, match=r"wait for each other: rank 0 at B\(stage 0, microbatch 0\)"):
        check_order(plain_shape(2, 2), orders)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("gpipe", plain_shape(0, 1), "num_stages must be >= 1"),
        ("gpipe", plain_shape(1, 0), "num_microbatches must be >= 1"),
        ("gpipe", plain_shape(2, 4, (2, 1)), "warmup must be None"),
        ("gpipe", PipelineShape(2, 4, (0,)), "one rank for each of 2 stages, got 1"),
        ("gpipe", PipelineShape(2, 4, (0, 2)), "without gaps"),
        ("1f1b", interleaved_shape(2, 2, 4), "stage i on rank i.*interleaved"),
        ("1f1b", plain_shape(2, 4, (5, 1)), "between 1 and the 4 microbatches, got 5"),
        ("1f1b", plain_shape(2, 4, (2,)), "one depth for each of 2 stages, got 1"),
        ("interleaved", interleaved_shape(4, 2, 6), "divisible by its 4 ranks, got 6; try 8"),
        ("interleaved", PipelineShape(3, 4, (0, 1, 0)), "same number of stages"),
        ("interleaved", PipelineShape(4, 4, (0, 0, 1, 1)), "stage 1 on rank 0; put it on rank 1"),
        ("zb-h1", plain_shape(2, 4, (2, 1)), "warmup must be None"),
    ],
)
def test_a_shape_that_cannot_run_is_refused_with_the_rule_and_the_remedy(name, shape, message) -> None:
    with pytest.raises(ValueError, match=message):
        schedule_named(name).actions(shape)


def test_an_unknown_schedule_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="'1f1'; did you mean '1f1b'"):
        schedule_named("1f1")


F, B, B_INPUT, W = (Action(kind, 0, 0) for kind in (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([F], "1 backwards.*got 0"),
        ([], "1 forwards.*got 0"),
        ([B, F], "must come after its forward"),
        ([F, F, B], "must come once"),
        ([F, B, B_INPUT], "not both"),
        ([F, W, B_INPUT], "must come after its input gradient"),
        ([F, B_INPUT], "weight gradient W, which is missing"),
        ([F, B, Action("X", 0, 0)], "kind must be one of"),
        ([F, B, Action(FORWARD, 1, 0)], "must be one of 1 stage and"),
    ],
)
def test_an_incomplete_or_contradictory_order_is_refused(order, message) -> None:
    with pytest.raises(ValueError, match=message):
        check_order(plain_shape(1, 1), [order])


def test_an_action_on_the_wrong_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="stage 0 is on rank 0; move it there"):
        check_order(plain_shape(2, 1), [[], [F, B]])
    with pytest.raises(ValueError, match="one list for each of 2 ranks, got 1"):
        check_order(plain_shape(2, 1), [[F, B]])
