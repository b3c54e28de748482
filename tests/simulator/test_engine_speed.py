"""How fast tasks go in the SimPy engine: closed forms of shared links and of overlap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engines.engine_simpy import run_simpy
from simulator.taskgraph import COMMUNICATION, OTHER, Schedule
from tests.simulator.graphs import GraphBuilder

# Shared links


def transfers(works: list[float], shares: list[dict[int, float]], **options: float) -> Schedule:
    """Run transfers that all may start at once, each on its own stream."""
    builder = GraphBuilder(num_resources=3)
    for work_s, share in zip(works, shares, strict=True):
        builder.add(work_s, streams=[builder.stream()], shares=share, kind=COMMUNICATION, **options)
    return run_simpy(builder.build())


def test_two_transfers_on_one_link_share_it_equally() -> None:
    # Half speed until the short one has done 1, then the other has 2 left.
    assert transfers([1.0, 3.0], [{0: 1.0}, {0: 1.0}]).end_s.tolist() == [2.0, 4.0]
    assert transfers([2.0, 2.0], [{0: 1.0}, {0: 1.0}]).end_s.tolist() == [4.0, 4.0]


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=8))
def test_n_transfers_end_as_processor_sharing_says(works) -> None:
    expected, so_far, done = {}, 0.0, 0.0
    for rank, index in enumerate(np.argsort(works)):
        so_far += (works[index] - done) * (len(works) - rank)
        done = works[index]
        expected[int(index)] = so_far
    schedule = transfers(works, [{0: 1.0}] * len(works))
    assert schedule.end_s.tolist() == pytest.approx([expected[i] for i in range(len(works))], rel=1e-12)


def test_a_transfer_that_comes_later_slows_the_first_from_then_on() -> None:
    builder = GraphBuilder(num_resources=1)
    first = builder.add(4.0, streams=[builder.stream()], shares={0: 1.0}, kind=COMMUNICATION)
    before = builder.add(2.0, kind=OTHER)
    second = builder.add(4.0, streams=[builder.stream()], after=[before], shares={0: 1.0}, kind=COMMUNICATION)
    assert run_simpy(builder.build()).end_s[[first, second]].tolist() == [6.0, 8.0]


def test_shares_that_fit_do_not_slow() -> None:
    schedule = transfers([1.0, 2.0, 3.0], [{0: 0.5}, {0: 0.25}, {0: 0.25}])
    assert schedule.end_s.tolist() == [1.0, 2.0, 3.0]
    assert schedule.statistics["speed_changes"] == 0


def test_ten_tenths_fit() -> None:
    assert transfers([1.0] * 10, [{0: 0.1}] * 10).end_s.tolist() == [1.0] * 10


def test_the_fullest_resource_of_a_task_sets_its_speed() -> None:
    # Loads: link 0 1.5 (a, b), link 1 2.0 (b, c); a at 1/1.5, b and c at 1/2.
    schedule = transfers([1.0, 1.0, 1.0], [{0: 1.0}, {0: 0.5, 1: 1.0}, {1: 1.0}])
    assert schedule.end_s.tolist() == pytest.approx([1.5, 2.0, 2.0], rel=1e-12)


def test_a_share_above_one_slows_a_transfer_alone() -> None:
    assert transfers([2.0], [{0: 1.5}]).end_s.tolist() == [3.0]


def test_latency_passes_whatever_else_happens_and_loads_nothing() -> None:
    schedule = transfers([1.0, 1.0], [{0: 1.0}, {0: 1.0}], latency_s=0.5)
    assert schedule.end_s.tolist() == [2.5, 2.5]
    builder = GraphBuilder(num_resources=1)
    builder.add(1.0, streams=[builder.stream()], shares={0: 1.0}, kind=COMMUNICATION)
    builder.add(1.0, streams=[builder.stream()], shares={0: 1.0}, kind=COMMUNICATION, latency_s=1.0)
    assert run_simpy(builder.build()).end_s.tolist() == [1.0, 2.0]


# Overlap


def overlapping(computation_s: float, communication_s: float, kind: int = COMMUNICATION) -> list[float]:
    builder = GraphBuilder(slowdowns=[(1.5, 1.25)])
    builder.add(computation_s, streams=[builder.stream()])
    builder.add(communication_s, streams=[builder.stream()], kind=kind)
    return run_simpy(builder.build()).end_s.tolist()


def test_overlap_slows_both_sides_while_both_run() -> None:
    assert overlapping(3.0, 1.0) == pytest.approx([1.25 + 3.0 - 1.25 / 1.5, 1.25], rel=1e-12)
    assert overlapping(1.0, 3.0) == pytest.approx([1.5, 1.5 + 3.0 - 1.5 / 1.25], rel=1e-12)


def test_other_tasks_neither_slow_nor_are_slowed() -> None:
    assert overlapping(3.0, 1.0, kind=OTHER) == [3.0, 1.0]


def test_waiting_in_latency_is_not_overlap() -> None:
    builder = GraphBuilder(slowdowns=[(2.0, 2.0)])
    builder.add(1.0, streams=[builder.stream()])
    builder.add(1.0, streams=[builder.stream()], kind=COMMUNICATION, latency_s=1.0)
    assert run_simpy(builder.build()).end_s.tolist() == [1.0, 2.0]


def test_a_task_on_several_devices_takes_the_largest_factor_of_those_that_overlap() -> None:
    builder = GraphBuilder(slowdowns=[(2.0, 2.0), (1.5, 1.25), (9.0, 9.0)])
    streams = [builder.stream(device) for device in range(3)]
    builder.add(100.0, streams=[builder.stream(0)])
    builder.add(100.0, streams=[builder.stream(1)])
    transfer = builder.add(3.0, streams=streams, kind=COMMUNICATION)
    assert run_simpy(builder.build()).end_s[transfer] == 6.0


def test_devices_that_begin_to_overlap_at_the_same_instant_all_slow() -> None:
    builder = GraphBuilder(slowdowns=[(2.0, 1.0), (3.0, 1.0)])
    computations = [builder.add(4.0, streams=[builder.stream(device)]) for device in range(2)]
    streams = [builder.stream(device) for device in range(2)]
    builder.add(3.0, streams=streams, kind=COMMUNICATION, latency_s=1.0)
    assert run_simpy(builder.build()).end_s[computations].tolist() == [4.0 + 1.5, 4.0 + 2.0]


def test_overlap_and_contention_multiply() -> None:
    builder = GraphBuilder(slowdowns=[(1.5, 1.25)], num_resources=1)
    builder.add(100.0, streams=[builder.stream()])
    for _ in range(2):
        builder.add(2.0, streams=[builder.stream()], shares={0: 1.0}, kind=COMMUNICATION)
    assert run_simpy(builder.build()).end_s[1:].tolist() == [5.0, 5.0]


def test_tasks_that_follow_at_the_same_instant_change_no_speed() -> None:
    builder = GraphBuilder(slowdowns=[(1.5, 1.25)])
    stream = builder.stream()
    transfer = builder.add(6.0, streams=[builder.stream()], kind=COMMUNICATION)
    for _ in range(5):
        builder.add(0.0, streams=[stream], hosts=[0], host_waits=True)  # Several events between the two.
        last = builder.add(1.0, streams=[stream], hosts=[0])
    schedule = run_simpy(builder.build())
    assert schedule.end_s[[last, transfer]].tolist() == [7.5, 7.5]
    # One change each for those that started before the overlap was in force, at time 0.
    assert schedule.statistics["speed_changes"] == 2


def test_ends_a_rounding_apart_move_nothing() -> None:
    def run(parts: list[float]) -> np.ndarray:
        builder = GraphBuilder(slowdowns=[(1.5, 1.25)], num_resources=1)
        stream = builder.stream()
        builder.add(0.3, streams=[builder.stream()], shares={0: 1.0}, kind=COMMUNICATION)
        for work_s in parts:
            builder.add(work_s, streams=[stream], shares={0: 1.0})
        last = builder.add(1.0, streams=[stream], shares={0: 1.0})
        return run_simpy(builder.build()).end_s[[0, last]]

    assert sum([0.1, 0.1, 0.1]) != 0.3
    np.testing.assert_allclose(run([0.1, 0.1, 0.1]), run([0.3]), rtol=1e-14)
