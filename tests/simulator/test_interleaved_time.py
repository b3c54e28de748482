"""The time of the interleaved schedule against the engine, which runs the schedule's own order, and by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from simulator.closed_forms.estimate import estimate
from simulator.closed_forms.interleaved_time import interleaved_s
from simulator.closed_forms.stage_rows import FORWARD_LAG, INPUT_LAG, NUM_COLUMNS
from simulator.engines.engine_compiled import run_compiled
from simulator.fast.estimate import FastEstimator
from simulator.fidelity import Fidelity
from simulator.schedules.actions import FORWARD
from simulator.schedules.registry import schedule_named
from simulator.simulate import simulate_time_s
from simulator.uniform import uniform_plan
from tests.simulator.graphs import interleaved_shape, makespan_s, pipeline_graph
from tests.simulator.problems import small_problem

ALONE = Fidelity().without("overlap-slowdown", "host")


def stages(times: NDArray[np.float64], link_s: float = 0.0) -> NDArray[np.float64]:
    """Return rows for ``interleaved_s``: two passes of each stage, and transfers between neighbours."""
    rows = np.zeros((len(times), NUM_COLUMNS))
    rows[:, :2] = times
    rows[:-1, 3] = rows[1:, 4] = link_s
    return rows


def engine_s(
    times: NDArray[np.float64], last: NDArray[np.float64], num_ranks: int, m: int, link_s: float = 0.0
) -> float:
    """Return what the engine says of the schedule's order."""
    shape = interleaved_shape(num_ranks, len(times) // num_ranks, m)
    pipeline = pipeline_graph(shape, schedule_named("interleaved").actions(shape), link_s=link_s)
    work_s = pipeline.graph.work_s.copy()
    for (kind, stage, microbatch), task in pipeline.task_of.items():
        work_s[task] = (last if microbatch == m - 1 else times)[stage, 0 if kind == FORWARD else 1]
    return makespan_s(run_compiled(replace(pipeline.graph, work_s=work_s)))


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_equal_stages_take_the_published_time(p: int, chunks: int, groups: int) -> None:
    """m (t_f + t_b) + (p - 1) (t_f + t_b) / v: SC 2021, Section 2.2.2."""
    rows, m = stages(np.array([[1.0, 2.0]] * p * chunks)), groups * p
    assert interleaved_s(rows, rows, p, m, False) == 3.0 * (m * chunks + p - 1)


@pytest.mark.parametrize("seed", range(40))
def test_unequal_stages_and_last_microbatches_take_what_the_engine_says(seed: int) -> None:
    random = np.random.default_rng(seed)
    p, chunks = int(random.integers(2, 7)), int(random.integers(1, 4))
    m = p * int(random.integers(1, 5))
    times = np.array([1.0, 2.0]) * (1 + 0.6 * random.uniform(-1, 1, (p * chunks, 2)))
    last = times * random.uniform(0.2, 1.0)
    found_s = interleaved_s(stages(times), stages(last), p, m, False)
    assert found_s == pytest.approx(engine_s(times, last, p, m), rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_transfers_share_the_link_of_a_rank(seed: int) -> None:
    """The engine's graph here has a link per boundary and direction: as quick at best, and nearly so for short ones."""
    random = np.random.default_rng(seed)
    p, chunks = int(random.integers(2, 7)), int(random.integers(2, 4))
    m, link_s = p * int(random.integers(1, 5)), random.uniform(0.0, 0.3)
    times = np.array([1.0, 2.0]) * (1 + 0.3 * random.uniform(-1, 1, (p * chunks, 2)))
    rows, apart_s = stages(times, link_s), engine_s(times, times, p, m, link_s)
    assert apart_s * (1 - 1e-12) <= interleaved_s(rows, rows, p, m, False) <= 1.02 * apart_s


def test_a_pass_that_begins_late_keeps_no_link_and_no_rank() -> None:
    """Equal stages whose transfers take no time."""
    times = np.array([[1.0, 2.0]] * 8)
    rows = stages(times)
    rows[1:, FORWARD_LAG] = rows[:-1, INPUT_LAG] = 0.1
    expected_s = engine_s(times, times, 4, 8, 0.1)
    assert interleaved_s(rows, rows, 4, 8, False) == pytest.approx(expected_s, rel=1e-12)


def test_a_link_carries_one_transfer_after_the_other() -> None:
    """Two ranks, two stages each, two microbatches, passes of a second, transfers of two (digits: microbatch)::

    rank 0   F0 F1 .  .  .  .  f0 .  f1 .  .  .  .  .  .  .  .  b0 .  b1 .  .  .  .  .  .  .  .  B0 .  B1
    its link .  down-- down--  .  down-- down--  .  .  .  .  .  .  up--- up---
    rank 1   .  .  .  F0 .  F1 .  .  .  f0 .  f1 b0 b1
    """
    rows = stages(np.ones((4, 2)), 2.0)
    arrived = [1.0 + 2.0, 5.0]  # of F0 and F1, on rank 1
    arrived = [arrived[0] + 3.0, arrived[1] + 3.0]  # of f0 and f1, on rank 0
    arrived = [arrived[0] + 3.0, arrived[1] + 3.0]  # on rank 1, which then turns
    turned = [12.0, 13.0]  # f0 9-10, f1 11-12, b0 12-13, b1 13-14: all forwards come first
    assert arrived == [9.0, 11.0]
    sent = [turned[0] + 1.0 + 2.0, turned[0] + 1.0 + 4.0]  # 15 and 17: the link is taken until 15
    last = sent[1] + 3 * 1.0 + 2 * 2.0  # b1, B1 and B1 again, two more transfers
    assert interleaved_s(rows, rows, 2, 2, False) == last


@pytest.mark.parametrize(("down_s", "blocked_s"), [(0.0, 27.0), (0.5, 33.5)])
def test_a_rank_that_waits_for_what_it_sent_goes_on_later(down_s: float, blocked_s: float) -> None:
    """Two ranks, two stages each, four microbatches; half a second for what each pass sends, pairs in brackets.

    Counted by hand, end of each pass or pair and of what it sent::

        rank 0  F0 1.5  F1 3  f0 4.5  f1 6  (F2 b0) 11    (F3 b1) 15    (f2 B0) 18.5  (f3 B1) 22.5
                b2 25.5  b3 29  B2 31  B3 33.5
        rank 1  F0 3  F1 4.5  (f0 b0) 8  (f1 b1) 11.5  (F2 B0) 15.5  (F3 B1) 19.5  (f2 b2) 23
                (f3 b3) 26.5  B2 29  B3 31.5
    """
    rows = stages(np.array([[1.0, 2.0]] * 4), down_s)
    found_s = interleaved_s(rows, rows, 2, 4, True)
    assert found_s >= interleaved_s(rows, rows, 2, 4, False)
    assert found_s == blocked_s


@pytest.mark.parametrize(
    ("cluster", "runtime"),
    [
        ("v100-32g-dgx1:1x4", "megatron-lm-2021"),
        ("v100-1gpu-10g:4x1", "megatron-lm-2021"),  # what was sent is waited for
        ("v100-1gpu-10g:4x1", "windtunnel-executor-fp32"),
    ],
)
@pytest.mark.parametrize("degrees", [dict(pp=2, chunks=2), dict(pp=4, chunks=1)], ids=str)
def test_plans_take_what_the_simulator_says(cluster: str, runtime: str, degrees: dict[str, int]) -> None:
    problem = small_problem("gpt", cluster=cluster, runtime=runtime, global_batch=16)
    schedule = "interleaved" if degrees["chunks"] > 1 else "1f1b"
    plan = uniform_plan(problem, schedule=schedule, **degrees)  # type: ignore[arg-type]
    plan = replace(plan, schedule="interleaved")
    expected_s = simulate_time_s(plan, problem, engine="compiled", fidelity=ALONE)
    time_s = estimate(plan, problem).iteration_time_s
    assert time_s == pytest.approx(expected_s, rel=0.03)
    assert FastEstimator(problem).estimate(plan).iteration_time_s == pytest.approx(time_s, rel=1e-11)
