"""The compiled engine against the SimPy engine, which has its own tests against closed forms."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.costs import CostTables
from simulator.engines import engine_compiled
from simulator.engines.compiled_prepare import crowding_shares, slowing_devices
from simulator.engines.engine_common import devices_that_slow, shares_that_crowd
from simulator.engines.engine_compiled import DeadlockError, run_compiled
from simulator.engines.engine_simpy import run_simpy
from simulator.fidelity import Fidelity
from simulator.lowering.lower import lower
from simulator.schedules.registry import schedule_named
from simulator.simulate import simulate
from simulator.taskgraph import COMMUNICATION, Schedule, TaskGraph
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.simulator.graphs import GraphBuilder, interleaved_shape, pipeline_graph, plain_shape
from tests.simulator.problems import SMALL, small_problem
from tests.simulator.random_graphs import graphs, with_shuffled_orders

ROOT = Path(__file__).parents[2]


def assert_agree(graph: TaskGraph, rtol: float = 1e-9) -> Schedule:
    """Check start, end and host arrival of every task, and return the compiled engine's."""
    found, expected = run_compiled(graph), run_simpy(graph)
    for name in ("start_s", "end_s", "host_arrival_s"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=rtol, atol=0.0)
    assert found.statistics["speed_changes"] == expected.statistics["speed_changes"]
    return found


@settings(max_examples=300, deadline=None)
@given(graph=graphs(max_tasks=60))
def test_every_task_of_larger_graphs_agrees(graph) -> None:
    assert_agree(graph)


@settings(max_examples=1_500, deadline=None)
@given(graph=graphs(max_tasks=20))
def test_both_engines_give_the_same_bits(graph) -> None:
    assert_agree(graph, rtol=0.0)


@settings(max_examples=600, deadline=None)
@given(graph=graphs(), seed=st.integers(0, 1000))
def test_orders_shuffled_into_circles_stop_both_engines_with_the_same_words(graph, seed) -> None:
    graph = with_shuffled_orders(graph, seed)
    try:
        expected = run_simpy(graph)
    except DeadlockError as error:
        with pytest.raises(DeadlockError) as raised:
            run_compiled(graph)
        assert str(raised.value) == str(error)
    else:
        assert run_compiled(graph).end_s.tobytes() == expected.end_s.tobytes()


@settings(max_examples=600, deadline=None)
@given(graph=graphs())
def test_what_can_change_speeds_is_what_the_simpy_engine_finds(graph) -> None:
    streams = graph.streams.offsets, graph.streams.items
    offsets, devices = slowing_devices(
        graph.work_s,
        graph.kind,
        *streams,
        graph.stream_device,
        graph.slowdown_computation,
        graph.slowdown_communication,
    )
    expected = devices_that_slow(graph)
    assert offsets.tolist() == expected.offsets.tolist()
    rows = [sorted(devices[a:b]) for a, b in pairwise(offsets)]
    assert rows == [expected.row(task).tolist() for task in range(graph.num_tasks)]
    offsets, resources, fractions = crowding_shares(
        graph.work_s,
        graph.shares.offsets,
        graph.shares.items,
        graph.share_fractions,
        len(graph.resource_names),
        *streams,
    )
    crowding, expected_fractions = shares_that_crowd(graph)
    assert offsets.tolist() == crowding.offsets.tolist()
    assert resources.tolist() == crowding.items.tolist()
    assert fractions.tolist() == expected_fractions.tolist()


def test_many_transfers_on_many_links_agree() -> None:
    """Ten thousand rate changes in one component: the worst case for sums that depend on order."""
    generator = np.random.default_rng(0)
    builder = GraphBuilder(slowdowns=[(1.3, 1.1)] * 8, num_resources=5)
    streams = [builder.stream(device % 8) for device in range(40)]
    for task in range(2000):
        chosen = generator.choice(40, size=generator.integers(1, 3), replace=False)
        builder.add(
            float(generator.choice([0.1, 0.2, generator.uniform(0.0, 1.0)])),
            streams=[streams[index] for index in chosen],
            kind=int(generator.integers(0, 3)),
            latency_s=float(generator.choice([0.0, 0.05])),
            after=[int(generator.integers(0, task))] if task and generator.random() < 0.3 else (),
            shares={int(link): 0.1 + 0.3 * float(generator.random()) for link in generator.choice(5, size=2)},
        )
    found = assert_agree(builder.build())
    assert found.statistics["speed_changes"] > 10_000


def test_all_names_of_a_share_pair_are_kept_apart() -> None:
    builder = GraphBuilder(num_resources=2)
    for shares in ({0: 1.0, 1: 0.5}, {1: 1.0}, {0: 0.5}):
        builder.add(1.0, streams=[builder.stream()], shares=shares, kind=COMMUNICATION)
    assert_agree(builder.build())


SCHEDULES = [
    ("1f1b", plain_shape(4, 12)),
    ("gpipe", plain_shape(4, 12)),
    ("zb-h1", plain_shape(4, 12)),
    ("interleaved", interleaved_shape(4, 2, 12)),
]


@pytest.mark.parametrize(("name", "shape"), SCHEDULES, ids=[name for name, _ in SCHEDULES])
def test_pipelines_of_every_schedule_agree(name, shape) -> None:
    orders = schedule_named(name).actions(shape)
    assert_agree(pipeline_graph(shape, orders, link_s=0.3).graph)
    assert_agree(pipeline_graph(shape, orders, link_s=0.5, half_duplex=True).graph)


PLANS = {
    "one device": {},
    "dp": {"dp": 4},
    "dp sync at the end": {"dp": 4, "overlap_gradient_sync": False},
    "tp": {"tp": 4},
    "tp sp": {"tp": 2, "sequence_parallel": True},
    "pp": {"pp": 4},
    "pp of two": {"pp": 2, "dp": 2},
    "3d": {"tp": 2, "pp": 2, "dp": 2},
    "gpipe": {"pp": 4, "schedule": "gpipe"},
    "interleaved": {"pp": 2, "chunks": 2, "schedule": "interleaved", "tp": 2},
    "zb-h1": {"pp": 4, "schedule": "zb-h1", "dp": 2},
    "recompute": {"pp": 2, "recompute": "full", "tp": 2},
    "selective": {"pp": 2, "recompute": "selective", "tp": 2},
    "zero 1": {"dp": 4, "zero": 1},
    "zero 2": {"dp": 4, "zero": 2, "pp": 2},
    "zero 3": {"dp": 4, "zero": 3, "recompute": "full"},
}


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("degrees", PLANS.values(), ids=PLANS)
def test_plans_of_every_family_agree(family, degrees) -> None:
    if family == "vit" and "sequence_parallel" in degrees:
        pytest.skip("ViT's 197 tokens cannot be split in two")
    problem = small_problem(family, cluster="v100-32g-dgx1:2x4", global_batch=8)
    plan = validate(uniform_plan(problem, **degrees), problem)
    costs = CostTables(problem)
    for fidelity in (Fidelity(), Fidelity(symmetry=False, merge=False), Fidelity.ideal()):
        assert_agree(lower(plan, costs, fidelity).graph)


@pytest.mark.parametrize(
    "runtime", ["galvatron-v1", "windtunnel-executor", "megatron-deepspeed", "megatron-deepspeed-timed", "alpa"]
)
def test_plans_of_every_runtime_agree(runtime) -> None:
    problem = small_problem(cluster="a100-80g-dgx:1x4", runtime=runtime, global_batch=8)
    for degrees in (PLANS["pp of two"], PLANS["recompute"], PLANS["zero 3"]):
        assert_agree(lower(validate(uniform_plan(problem, **degrees), problem), CostTables(problem), Fidelity()).graph)


def test_simulate_gives_the_same_result_with_either_engine() -> None:
    problem = small_problem()
    plan = uniform_plan(problem, tp=2, pp=2)
    results = [simulate(plan, problem, engine=engine) for engine in ("simpy", "compiled")]
    assert results[0].iteration_time_s == results[1].iteration_time_s
    assert results[1].engine == "compiled"


def test_the_engine_is_chosen_by_the_number_of_tasks_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small_problem()
    plan = uniform_plan(problem, tp=2, pp=2)
    few = simulate(plan, problem)
    assert few.engine == "simpy"
    monkeypatch.setattr("simulator.simulate.COMPILED_FROM_TASKS", few.graph.num_tasks)
    assert simulate(plan, problem).engine == "compiled"
    assert simulate(plan, problem, engine="simpy").engine == "simpy"
    monkeypatch.setattr("simulator.simulate.COMPILED_FROM_TASKS", few.graph.num_tasks + 1)
    assert simulate(plan, problem).engine == "simpy"
    with pytest.raises(ValueError, match="one of auto, simpy, compiled, got 'fast'"):
        simulate(plan, problem, engine="fast")


def test_a_run_in_pieces_is_the_run_in_one(monkeypatch) -> None:
    problem = small_problem(cluster="v100-32g-dgx1:2x4")
    plan = validate(uniform_plan(problem, tp=2, pp=2, dp=2), problem)
    graph = lower(plan, CostTables(problem), Fidelity()).graph
    whole = run_compiled(graph)
    for size in (1, 7, 100):
        monkeypatch.setattr(engine_compiled, "TASKS_PER_PROGRESS_CALL", size)
        calls: list[int] = []
        pieces = run_compiled(graph, calls.append)
        assert all(getattr(pieces, f.name) is not None for f in fields(pieces))
        assert pieces.end_s.tobytes() == whole.end_s.tobytes()
        assert pieces.statistics == whole.statistics
        assert calls[-1] == graph.num_tasks
        assert calls[0] == size
        assert calls == sorted(calls)


def test_an_empty_graph_takes_no_time() -> None:
    assert len(run_compiled(GraphBuilder().build()).end_s) == 0


def test_arrays_of_other_layouts_are_taken() -> None:
    builder = GraphBuilder()
    for _ in range(4):
        builder.add(1.0)
    graph = builder.build()
    work_s = np.ones((4, 2))[:, 0]
    frozen = graph.latency_s.copy()
    frozen.flags.writeable = False
    graph = replace(graph, work_s=work_s, latency_s=frozen, kind=graph.kind.astype(np.int64))
    assert run_compiled(graph).end_s.tolist() == [1.0] * 4


def test_a_negative_time_is_refused() -> None:
    builder = GraphBuilder()
    builder.add(-1.0)
    with pytest.raises(AssertionError):
        run_compiled(builder.build())


def test_importing_the_simulator_does_not_import_numba() -> None:
    code = "import sys, simulator.simulate; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_cache_goes_elsewhere_where_package_and_home_cannot_be_written(tmp_path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name in ("simulator", "datafiles", "workloads", "hardware_models"):
        (package / name).symlink_to(ROOT / name)
    copy = package / "cached.py"
    copy.write_text("from simulator.compiled_cache import compiled\n\n\n@compiled\ndef twice(x):\n    return 2 * x\n")
    code = (
        "from numba.core.caching import CacheImpl\n"
        "for locator in CacheImpl._locator_classes:\n"
        "    if 'UserProvided' not in locator.__name__:\n"
        "        locator.from_function = classmethod(lambda cls, function, path: None)\n"
        "import cached\n"
        "assert cached.twice(21) == 42\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= {"TMPDIR": str(tmp_path), "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=package, env=environment, check=True)
    folders = list(tmp_path.glob("windtunnel-numba-*"))
    assert len(folders) == 1
    assert list(folders[0].rglob("*.nbc"))


def test_the_first_call_on_a_machine_says_that_it_is_compiling(monkeypatch, caplog) -> None:
    builder = GraphBuilder()
    builder.add(1.0)
    graph = builder.build()
    run_compiled(graph)
    caplog.clear()
    run_compiled(graph)
    assert not caplog.messages
    monkeypatch.setattr(engine_compiled, "is_cached", lambda function: False)
    run_compiled(graph)
    assert caplog.messages == ["compiling the engine, once on this machine (a minute, or some on a slow one) ..."]
