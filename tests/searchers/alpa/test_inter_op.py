"""The inter-operator dynamic program equals exhaustive search; clustering and meshes are as published."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware_models.cluster import parse_cluster
from searchers.alpa.clustering import MIN_HEAVY, cluster, num_heavy
from searchers.alpa.import_plan import import_plan
from searchers.alpa.inter_op import best_pipeline
from searchers.alpa.meshes import Submesh, all_logical_meshes, logical_meshes, submeshes
from searchers.alpa.oracle import StageCost
from searchers.alpa.searcher import Alpa
from searchers.alpa.stage_table import max_successors, placed
from simulator.problem import ProblemSpec
from simulator.uniform import repeated_layers
from simulator.validate import validate
from tests.searchers.tiny import tiny_problem
from workloads.registry import build_workload


def random_table(seed: int, layers: int, submeshes_: int, configs: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    seconds = random.uniform(0.1, 1.0, (layers, layers, submeshes_, configs))
    for first, last in itertools.product(range(layers), range(layers)):
        if last < first:
            seconds[first, last] = np.inf
    seconds[random.uniform(size=seconds.shape) < 0.1] = np.inf
    return seconds, random.integers(-1, 4, seconds.shape)


def exhaustive(
    seconds: np.ndarray, successors: np.ndarray, sizes: list[int], devices: int, microbatches: int
) -> float:
    """Return the best objective over every partition, submesh and config."""
    layers = len(seconds)
    best = np.inf

    def extend(first: int, left: int, times: list[float], rooms: list[int]) -> None:
        nonlocal best
        if first == layers:
            behind = all(room >= len(times) - 1 - position for position, room in enumerate(rooms))
            if left == 0 and behind:
                best = min(best, sum(times) + (microbatches - 1) * max(times))
            return
        for last in range(first, layers):
            for mesh, size in enumerate(sizes):
                for config in range(seconds.shape[3]):
                    t = seconds[first, last, mesh, config]
                    if size <= left and np.isfinite(t):
                        extend(
                            last + 1, left - size, [*times, t], [*rooms, int(successors[first, last, mesh, config])]
                        )

    extend(0, devices, [], [])
    return best


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 20))
def test_the_pipeline_equals_exhaustive_search(seed: int, layers: int, devices: int, microbatches: int) -> None:
    sizes = [1, 2, 4]
    seconds, successors = random_table(seed, layers, len(sizes), 2)
    best = exhaustive(seconds, successors, sizes, devices, microbatches)
    found = best_pipeline(seconds, successors, np.array(sizes), devices, microbatches)
    assert (found is None) == (not np.isfinite(best))
    if found is not None:
        assert found.objective == pytest.approx(best, rel=1e-12)
        times = [seconds[s.first, s.last, s.submesh, s.config] for s in found.stages]
        assert found.objective == pytest.approx(sum(times) + (microbatches - 1) * max(times), rel=1e-12)
        assert sum(sizes[s.submesh] for s in found.stages) == devices
        assert [s.first for s in found.stages] == [0, *(s.last + 1 for s in found.stages[:-1])]


@pytest.mark.parametrize(("cluster_name", "count"), [("rtx3090-pcie:1x8", 14), ("v100-32g-dgx1:1x4", 9)])
def test_the_number_of_logical_meshes_is_divisors_plus_one(cluster_name: str, count: int) -> None:
    assert len(all_logical_meshes(parse_cluster(cluster_name))) == count


def test_submeshes_of_several_nodes_are_whole_nodes() -> None:
    shapes = submeshes(parse_cluster("p3.16xlarge:4x8"))
    assert [(s.nodes, s.gpus_per_node) for s in shapes] == [
        (1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (3, 8), (4, 8),
    ]  # fmt: skip
    powers = submeshes(parse_cluster("p3.16xlarge:4x8"), "power_of_two")
    assert [s.num_devices for s in powers] == [1, 2, 4, 8, 16, 32]
    assert len(logical_meshes(Submesh(3, 8))) == 9


@given(st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, max_size=12))
def test_placed_stages_are_disjoint_and_small_ones_stay_in_a_node(sizes: list[int]) -> None:
    shapes = [Submesh(max(1, size // 8), min(size, 8)) for size in sizes]
    devices = placed(shapes, 8)
    flat = [device for own in devices for device in own]
    assert sorted(flat) == list(range(sum(sizes)))
    for own, size in zip(devices, sizes, strict=True):
        assert len(own) == size
        assert len({device // 8 for device in own}) == max(1, size // 8)


def test_successors_are_what_memory_leaves_room_for() -> None:
    for step_bytes in (0, 7):  # the optimizer's 17 are more than the 15 of passes with one microbatch
        cost = StageCost(1.0, state_bytes=10, kept_bytes=2, ends_bytes=1, working_bytes=2, step_bytes=step_bytes)
        for capacity in range(10, 40):
            room = max_successors(cost, capacity)
            assert (room >= 0) == (cost.peak_bytes(1) <= capacity)
            if room >= 0:
                assert cost.peak_bytes(room + 1) <= capacity < cost.peak_bytes(room + 2)


def test_clustering_balances_flops_and_cuts_where_little_crosses() -> None:
    gpt = build_workload("gpt3-1.3b")
    spans = cluster(gpt, 8)
    assert spans[0][0] == 0 and spans[-1][1] == len(gpt)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    ends = [gpt.operators[stop - 1].role for _, stop in spans[:-1]]
    # Behind a residual add one tensor crosses; anywhere else the residual crosses as well.
    assert set(ends) <= {"post_mlp_dropout", "post_attention_dropout"}


def test_clustering_refuses_more_layers_than_there_are_matmuls() -> None:
    with pytest.raises(ValueError, match="num_layers must be 1 to"):
        cluster(build_workload("gpt3-350m"), 1000)


@pytest.mark.parametrize(("model", "overrides"), [("gpt3-350m", {"layers": 1}), ("gnmt-16", {})])
def test_a_model_of_few_matmuls_is_clustered_into_as_many_layers_as_they_suffice_for(model, overrides) -> None:
    """Nobody asked for a number of layers: a block that occurs once, and LSTMs, have too few for one layer each."""
    problem = replace(tiny_problem(2, 4), workload=build_workload(model, overrides=overrides))
    heavy = num_heavy(problem.workload)
    assert len(Alpa().layers(problem)) == heavy // MIN_HEAVY < len(repeated_layers(problem.workload))
    with pytest.raises(ValueError, match=f"num_layers must be 1 to {heavy} "):
        Alpa(num_layers=heavy + 1).layers(problem)


def test_the_three_solvers_find_plans_and_the_exact_two_agree() -> None:
    problem = tiny_problem(2, 4)
    found = {
        solver: Alpa(solver=solver, num_layers=2, max_microbatch=2, recompute=(False,)).search(problem)
        for solver in ("elimination", "milp", "pareto")
    }
    objectives = {solver: result.plans[0].objective for solver, result in found.items()}
    assert objectives["milp"] == pytest.approx(objectives["elimination"], rel=1e-6)
    assert objectives["pareto"] >= objectives["elimination"] * (1 - 1e-9)


def test_mixed_clusters_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match="nodes of one kind"):
        submeshes(parse_cluster("p3.8xlarge:1x4+g4dn.12xlarge:1x4"))
    with pytest.raises(ValueError, match="nodes of one kind"):
        submeshes(parse_cluster("v100-32g-dgx1:1x8+v100-32g-dgx1:1x4"))


STATED = '''{"n_auto_layers": 6, "layers": [[0, 1, 2], [3, 4, 5]], "submesh": [[1, 2], [1, 2]],
"logical": [[2, 1], [2, 1]], "force_dp": [1, 1], "num_microbatches": 8}'''


def test_a_stated_plan_is_imported(tmp_path: Path) -> None:
    problem = ProblemSpec(model="alpa-gpt-1.3b", cluster="p3.16xlarge:1x4", runtime="alpa", global_batch=64).load()
    path = tmp_path / "plan.json"
    path.write_text(STATED)
    plan = import_plan(path, problem)
    validate(plan, problem)
    assert [stage.devices for stage in plan.stages] == [(0, 1), (2, 3)]
    assert plan.num_microbatches == 8 and plan.microbatch_size == 8
    path.write_text(STATED.replace('"n_auto_layers": 6, ', ""))
    assert import_plan(path, problem) == plan
    for wrong, message in (
        (STATED.replace('"num_microbatches": 8', '"num_microbatches": 7'), "divisor of the global batch"),
        (STATED.replace("[1, 1], ", "[1, 0], "), "force_dp"),
        (STATED.replace("[[1, 2], [1, 2]]", "[[1, 4], [1, 2]]"), "equal sizes"),
        (STATED.replace('"n_auto_layers": 6', '"n_auto_layers": 7'), "groups of layers 0 to 6 in order"),
        (STATED.replace('"n_auto_layers": 6', '"n_auto_layers": 0'), "n_auto_layers: must be greater than"),
        (STATED.replace("[[0, 1, 2], [3, 4, 5]]", "[[3, 4, 5], [0, 1, 2]]"), "groups of layers 0 to 5 in order"),
        (STATED.replace("[[0, 1, 2], [3, 4, 5]]", '[[0, 1, 2], [3, 4, "x"]]'), "layers"),
        (STATED.replace("[[0, 1, 2], [3, 4, 5]]", "5"), "layers"),
        (STATED.replace("[[0, 1, 2], [3, 4, 5]]", '"axb"'), "layers"),
        (STATED.replace("[[2, 1], [2, 1]]", "3"), "logical"),
        (STATED.replace("[[1, 2], [1, 2]]", "[[1, 2], [1]]"), "submesh"),
        (STATED.replace('"force_dp": [1, 1]', '"force_dp": 3'), "force_dp"),
    ):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=message):
            import_plan(path, problem)
