"""What the allocator is asked for over two iterations: each thing made when a run makes it, and given back once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from simulator.memory import device_memory
from simulator.memory.allocator import replay
from simulator.memory.first_iterations import Columns, first_iterations
from simulator.memory.stream import HANDED, LATE, STEPPED, EventArrays
from simulator.problem import Problem
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from tests.simulator.problems import SHORT, small_problem

MIB = 2**20
A100S = "a100-80g-dgx:1x4"


def arrays(rows: list[tuple[int, int, bool, int, int]], rooms: Mapping[int, int] | None = None) -> EventArrays:
    """Return events of ``(bytes, tensor, is allocation, action, mark)``, and what makes room where, by place."""
    sizes, tensors, is_alloc, actions, marks = (np.array(column) for column in zip(*rows, strict=True))
    return EventArrays(
        sizes=sizes,
        rounded=sizes,
        tensors=tensors.astype(np.int32),
        is_alloc=is_alloc.astype(np.bool_),
        categories=np.zeros(len(rows), dtype=np.int64),
        actions=actions,
        times_s=np.zeros(len(rows)),
        marks=marks.astype(np.int8),
        rooms=np.array([(rooms or {}).get(place, -1) for place in range(len(rows))]),
    )


def signed(columns: Columns) -> list[int]:
    """Return tensor ids plus 1, negative where they are given back."""
    _, tensors, is_alloc = columns
    pairs = zip(tensors, is_alloc, strict=True)
    return [int(tensor) + 1 if allocates else -int(tensor) - 1 for tensor, allocates in pairs]


def test_moments_come_when_the_first_step_has_what_it_works_in() -> None:
    """Tensors: 1 a parameter, 2 a moment, 3 an activation, 4 a sum that stays, 5 the step's."""
    events = arrays(
        [
            (8, 0, True, -1, 0),
            (8, 1, True, -1, LATE),
            (4, 2, True, 0, 0),
            (4, 2, False, 0, 0),
            (2, 3, True, 0, 0),
            (6, 4, True, 1, 0),
            (6, 4, False, 1, STEPPED),
        ]
    )
    first, second = [1, 3, -3, 4, 5, 2, -5], [8, -8, 9, 10, -10]
    assert signed(first_iterations(events, 1)) == [*first, -4, *second]


def test_a_gradient_makes_room_for_the_next_when_its_operator_begins() -> None:
    """Tensors: 1 a gradient that is there all the time, 2 what the operator works in, 3 what its product makes."""
    rows = [(8, 0, True, -1, HANDED), (4, 1, True, 0, 0), (8, 2, True, 0, HANDED), (8, 2, False, 0, HANDED)]
    events = arrays([*rows, (4, 1, False, 0, 0)], rooms={2: 1})
    assert signed(first_iterations(events, 1)) == [2, 3, -2, -3, 5, 6, -5]


def asked_for(problem: Problem, monkeypatch: pytest.MonkeyPatch, **degrees: object):
    """Return the memory of every device with what its allocator is asked for."""
    found = []

    def noted(events: EventArrays, num_actions: int) -> Columns:
        found.append(first_iterations(events, num_actions))
        return found[-1]

    monkeypatch.setattr(device_memory, "first_iterations", noted)
    result = simulate(uniform_plan(problem, **degrees), problem)  # type: ignore[arg-type]
    return list(zip(result.memory, found, strict=True))


@pytest.mark.parametrize(
    "degrees",
    [
        {"microbatch": 2},
        {"pp": 2, "microbatch": 1, "schedule": "zb-h1"},
        {"pp": 2, "microbatch": 3, "smaller_last": True, "recompute": "full"},
        {"dp": 2, "microbatch": 4, "zero": 1},
        {"dp": 2, "microbatch": 4, "zero": 3, "overlap_gradient_sync": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("runtime", ["megatron-lm-2021", "windtunnel-executor", "pytorch-ddp", "composer-fsdp"])
@pytest.mark.parametrize("family", list(SHORT))
def test_the_second_iteration_is_the_one_that_is_simulated(
    family: str, runtime: str, degrees: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor is taken once and given back once at most; the most that lives is the peak, and states remain."""
    problem = small_problem(family, cluster=A100S, runtime=runtime, global_batch=16)
    for memory, (sizes, tensors, is_alloc) in asked_for(problem, monkeypatch, **degrees):
        live: dict[int, int] = {}
        levels, total = [], 0
        for size, tensor, allocates in zip(sizes.tolist(), tensors.tolist(), is_alloc.tolist(), strict=True):
            if allocates:
                assert tensor not in live
                live[tensor] = -(-size // 512) * 512
                total += live[tensor]
            else:
                total -= live.pop(tensor)
            levels.append(total)
        is_steady = runtime != "windtunnel-executor"  # whose last gradient has gone before the next is made
        for most in (max(levels), max(levels[len(levels) // 2 :])):
            assert most == memory.peak_allocated_bytes if is_steady else most <= memory.peak_allocated_bytes
        states = sum(memory.consumers.get(name, 0) for name in ("parameters", "gradients", "optimizer states"))
        assert levels[-1] >= states


@pytest.mark.parametrize(("replicas", "bytes_each"), [(1, 2), (2, 4)])
def test_gradients_are_handed_over_where_nothing_reduces_them(
    replicas: int, bytes_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first pass there are parameters and workspaces of products, and what replicas reduce into."""
    problem = small_problem("gpt", cluster=A100S, runtime="windtunnel-executor", global_batch=4)
    ((_, (sizes, _, is_alloc)),) = asked_for(problem, monkeypatch, microbatch=2, dp=replicas)
    counted = sum(len(problem.workload.parameters(index)) for index in range(len(problem.workload)))
    count = (counted - 1) * bytes_each // 2  # the embedding is tied
    assert is_alloc[:count].all()
    assert sizes[:count].sum() == bytes_each * problem.workload.num_parameters
    assert sizes[count] == problem.matmul_workspace_bytes
    assert sizes[count + 1] < 64 * MIB


@pytest.mark.parametrize(("moment", "early", "late"), [(4, 20 + 20, 20 + 20), (12, 12 + 20, 20 + 20)])
def test_moments_made_at_the_first_step_take_what_the_second_iteration_wants_again(
    moment: int, early: int, late: int
) -> None:
    """MiB, beside activations of 20, in whose segment late ones lie. Made before, 4 have one of 20, 12 one of 12."""
    reserved = []
    for mark in (0, LATE):
        events = arrays([(moment * MIB, 0, True, -1, mark), (20 * MIB, 1, True, 0, 0), (20 * MIB, 1, False, 0, 0)])
        reserved.append(replay(*first_iterations(events, 1), 2**40).reserved_peak_bytes // MIB)
    assert reserved == [early, late]


@pytest.mark.parametrize("runtime", ["megatron-deepspeed", "megatron-lm-2021"])
def test_deepspeed_makes_moments_with_its_optimizer(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight bytes a parameter, before the first pass or in the first step."""
    problem = small_problem("gpt", runtime=runtime, global_batch=4)
    elements = problem.workload.num_parameters
    early_bytes = []
    for at_first_step in (problem.runtime.moments_at_first_step, True):
        own = replace(problem, runtime=replace(problem.runtime, moments_at_first_step=at_first_step))
        ((_, (sizes, _, is_alloc)),) = asked_for(own, monkeypatch, microbatch=2)
        early_bytes.append(int(sizes[: np.argmin(is_alloc)].sum()))  # up to the first that is given back
    assert early_bytes[0] - early_bytes[1] == (8 * elements if runtime == "megatron-deepspeed" else 0)
