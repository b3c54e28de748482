"""Every registered searcher keeps the contract; each does what its paper says."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice, product
from math import comb
from pathlib import Path

import numpy as np
import pytest

from hardware_models.collective_table import CollectiveTable, Row
from hardware_models.group_shapes import GroupShape
from hardware_models.model import HardwareModel
from searchers.base import CandidateSearcher, Ledger, NoFeasiblePlan
from searchers.budget import Budget
from searchers.dapple.searcher import Dapple
from searchers.megatron_grid import MegatronGrid
from searchers.plan_words import describe_plan
from searchers.pure import DistributedDataParallel, GPipe
from searchers.random_search import RandomSearch
from searchers.registry import searcher_class, searcher_named, searcher_names
from searchers.scores import Score, estimated
from searchers.space import LayerSpace, Mesh
from simulator.closed_forms.estimate import Estimate, estimate
from simulator.fast.estimate import FastEstimator
from simulator.plan import Axis, Plan, Stage
from simulator.problem import Problem, ProblemSpec
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.searchers.searcher_contract import SearcherContract
from tests.searchers.tiny import tiny_problem
from workloads.registry import build_workload

NEEDED_DEVICES = {"deepspeed-3d": 4}


def contract_class(name: str) -> type[SearcherContract]:
    """Return the contract's tests for one registered searcher."""
    body = {"searcher": name, "num_devices": NEEDED_DEVICES.get(name, 2)}
    return type(f"Test_{name.replace('-', '_')}", (SearcherContract,), body)


for _name in searcher_names():
    globals()[f"Test_{_name.replace('-', '_')}"] = contract_class(_name)


MINE = '''
from searchers.base import CandidateSearcher
from simulator.uniform import uniform_plan


class Mine(CandidateSearcher):
    """Data parallel only."""

    name = "mine"
    paper = "none"

    def candidates(self, problem, random, ledger):
        yield uniform_plan(problem, dp=problem.num_devices, recompute="full")
'''


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_a_class_in_a_users_file_is_a_searcher(plugin: Path) -> None:
    problem = tiny_problem()
    found = searcher_named(f"{plugin}:Mine").search(problem)
    assert found.searcher == "mine"
    assert len(found.best.stages) == 1
    assert searcher_class(str(plugin)).name == "mine", "the only searcher of a file needs no class name"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("megatron-gird", "did you mean 'megatron-grid'"),
        ("nowhere.py:Mine", "does not exist"),
        ("{plugin}:Your", "has no 'Your'; .*Mine"),
        ("{plugin}:uniform_plan", "must be a subclass of"),
        ("{plugin}:CandidateSearcher", "must define candidates"),
    ],
)
def test_a_wrong_searcher_name_says_what_would_be_right(plugin: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        searcher_class(name.format(plugin=plugin))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import math\nx = 1 / 0\n", r"must run as Python; it raised ZeroDivisionError: division by zero \(.*line 2"),
        ("def search(:\n", r"it raised SyntaxError: .*line 1\)"),
        ("import nothing_of_this_name\n", "it raised ModuleNotFoundError: No module named"),
    ],
)
def test_a_file_that_does_not_run_says_where(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        searcher_class(f"{tmp_path}/broken.py:Mine")


def test_exhaustive_refuses_large_problems_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"at most 100 plans.*such as random"):
        searcher_named("exhaustive", max_plans=100).search(tiny_problem(8, 1024))


def test_deepspeed_3d_needs_a_multiple_of_four_devices() -> None:
    with pytest.raises(ValueError, match="multiple of 4 devices, got 2"):
        searcher_named("deepspeed-3d").search(tiny_problem(2))


UNEQUAL, UNLIKE = "v100-32g-dgx1:1x2+v100-32g-dgx1:1x4", "v100-32g-dgx1:1x1+a100-80g-dgx:1x1"


@pytest.mark.parametrize(
    ("searcher", "cluster", "message"),
    [
        ("pipedream", UNEQUAL, r"equal numbers of GPUs, got \[2, 4\]"),
        ("dapple", UNLIKE, "equal GPUs, got a100-sxm4-80gb, v100-sxm2-32gb; use one type"),
    ],
)
def test_a_cluster_that_a_paper_does_not_plan_for_is_refused(searcher: str, cluster: str, message: str) -> None:
    problem = replace(tiny_problem(2, 12), hardware=HardwareModel.from_name(cluster))
    with pytest.raises(ValueError, match=message):
        searcher_named(searcher).search(problem)


def test_the_largest_microbatch_of_the_space_is_in_it() -> None:
    """Per replica: two replicas of four samples each."""
    space = LayerSpace(tiny_problem(2, 16), max_microbatch=4)
    assert space.microbatch_sizes((Mesh(1, 1, False),)) == [1, 2, 4]
    assert space.microbatch_sizes((Mesh(1, 2, False),)) == [2, 4, 8]


def test_gpipe_runs_whole_stages_again_or_nothing() -> None:
    problem = tiny_problem(2, 4)
    none, stage = (GPipe().build(problem, 1, recompute) for recompute in ("none", "stage"))
    assert [each.recompute for each in none.stages] == [(), ()]
    assert [each.recompute for each in stage.stages] == [each.operators for each in none.stages]
    with pytest.raises(ValueError, match="recompute must be one of if-needed, never, got 'always'"):
        GPipe(recompute="always")


@pytest.mark.parametrize(
    ("searcher", "option"),
    [("mpe", "path"), ("mpe", "reuse"), ("alpa", "solver"), ("alpa", "submesh_space"), ("alpa", "stage_oracle"),
     ("dapple", "window")],
)  # fmt: skip
def test_words_that_an_option_does_not_know_are_refused(searcher: str, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be one of .*, got 'nonsense'"):
        searcher_named(searcher, **{option: "nonsense"})


@pytest.mark.parametrize(("shares", "words"), [((2, 2), "recompute 50%"), ((1, 3), "recompute 25%-75%")])
def test_the_share_of_a_stage_that_runs_again_is_of_its_operators(shares: tuple[int, int], words: str) -> None:
    """Stages of four operators each, the first few of which run again."""
    stages = tuple(
        Stage(((4 * rank, 4 * rank + 4),), (rank,), ((4, ()),), ((4 * rank, 4 * rank + share),))
        for rank, share in enumerate(shares)
    )
    assert describe_plan(Plan(stages, 1, 2)).endswith(words)


def test_a_stage_whose_operators_lie_differently_is_called_mixed() -> None:
    mixed = Stage(((0, 3),), (0, 1), ((2, (Axis("batch", 2),)), (1, (Axis("tensor", 2),))))
    assert describe_plan(Plan((mixed,), 2, 4)) == "dp 2, mixed by operator, microbatch 2 x 4"
    alike = Stage(((0, 3),), (0, 1), ((2, (Axis("column", 2),)), (1, (Axis("row", 2),))))
    assert describe_plan(Plan((alike,), 2, 4)) == "tp 2, microbatch 2 x 4"


@pytest.mark.parametrize(("num_devices", "global_batch"), [(1, 2), (2, 4), (4, 4)])
def test_the_space_has_as_many_points_as_it_says_none_twice(num_devices: int, global_batch: int) -> None:
    space = LayerSpace(tiny_problem(num_devices, global_batch))
    points = list(space)
    assert len(set(points)) == len(points)
    assert 0 < len(points) <= space.size_bound


def test_one_device_has_one_point_per_recompute_and_microbatch() -> None:
    space = LayerSpace(tiny_problem(1, 4))
    assert len(list(space)) == 2 * 3 == space.size_bound


def test_pipelines_of_single_devices_are_counted_in_closed_form() -> None:
    problem = tiny_problem(3, 1)
    layers = len(problem.workload.layers)
    deepest = [point for point in LayerSpace(problem) if len(point.meshes) == 3]
    assert len(deepest) == comb(layers - 1, 2) * 2**3


def test_every_point_of_the_space_is_a_legal_plan_of_the_space() -> None:
    problem = tiny_problem(4, 4)
    space = LayerSpace(problem)
    for point in islice(space, 0, None, 7):
        plan = space.plan(point)
        validate(plan, problem)
        assert space.contains(plan)


def test_random_points_come_from_the_space() -> None:
    space = LayerSpace(tiny_problem(4, 4))
    points = set(space)
    random = np.random.default_rng(0)
    drawn = [space.sample(random) for _ in range(300)]
    assert all(point in points for point in drawn if point is not None)
    assert len(set(drawn)) > 60


def test_random_search_ends_when_a_small_space_is_exhausted() -> None:
    problem = tiny_problem(1, 1)
    found = RandomSearch().search(problem, Budget(evaluations=10_000))
    assert found.counters["evaluations"] == 2


def test_the_grid_has_all_degrees_whose_product_is_the_cluster() -> None:
    seen = set()

    def note(plan, problem: Problem) -> Score:  # type: ignore[no-untyped-def]
        sizes = [axis.size for axis in plan.stages[0].shardings[0][1]]
        seen.add((len(plan.stages), *sizes, plan.microbatch_size // sizes[0], bool(plan.stages[0].recompute)))
        return Score(1.0, True, 0, 1, "")

    MegatronGrid(objective=note).search(tiny_problem(4, 4))
    expected = {
        (pp, dp, tp, microbatch, recompute)
        for pp, dp, tp in [(1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2)]
        for microbatch in (1, 2, 4)
        if microbatch * dp <= 4
        for recompute in (False, True)
    }
    assert seen == expected, "pp 4 is left out: the model has two layers"


@pytest.mark.parametrize("searcher", [DistributedDataParallel, Dapple])
def test_a_search_recomputes_only_if_nothing_fits_without(searcher: type[DistributedDataParallel | Dapple]) -> None:
    def fits_if_recomputed(plan, problem: Problem) -> Score:  # type: ignore[no-untyped-def]
        return Score(1.0, bool(plan.stages[0].recompute), 2.0, 1.0, "stage 0")

    problem = tiny_problem(2, 4)
    assert searcher(objective=fits_if_recomputed).search(problem).best.stages[0].recompute
    assert not searcher(objective=lambda *_: Score(1.0, True, 0, 1, "")).search(problem).best.stages[0].recompute
    with pytest.raises(NoFeasiblePlan):
        searcher(objective=fits_if_recomputed, recompute="never").search(problem)


def test_ddp_takes_the_largest_microbatch_that_fits() -> None:
    def fits_up_to_two(plan, problem: Problem) -> Score:  # type: ignore[no-untyped-def]
        return Score(float(plan.microbatch_size), plan.microbatch_size <= 4, 2.0, 1.0, "stage 0")

    best = DistributedDataParallel(objective=fits_up_to_two).search(tiny_problem(2, 16)).best
    assert best.microbatch_size == 4


@pytest.mark.parametrize("text", ["", "20 parsecs", "-3s", "0", "0s", "1e9s"])
def test_a_wrong_budget_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="budget"):
        Budget.parse(text)


@pytest.mark.parametrize("text", ["20 s", "1.5 s", "500 evaluations", "1 evaluation", "2000 evaluations"])
def test_a_budget_reads_as_it_was_written(text: str) -> None:
    budget = Budget.parse(text)
    assert str(budget) == text
    assert Budget.parse(str(budget)) == budget


def test_a_budget_of_both_says_both_and_one_of_neither_that_there_is_no_limit() -> None:
    assert str(Budget(seconds=2.0, evaluations=3)) == "2 s or 3 evaluations"
    assert str(Budget()) == "no limit"


def test_an_evaluation_that_began_in_time_may_end_after_it_but_none_begins_beyond_the_number() -> None:
    problem = tiny_problem(2, 8)
    plan = uniform_plan(problem, dp=2)
    late = Ledger(DistributedDataParallel(), problem, Budget(seconds=1e-9))
    assert late.spent
    late.evaluate(plan)
    assert late.result().counters["evaluations"] == 1
    used_up = Ledger(DistributedDataParallel(), problem, Budget(evaluations=1))
    used_up.evaluate(plan)
    with pytest.raises(AssertionError, match=r"ledger\.spent"):
        used_up.evaluate(plan)


def test_a_candidate_that_is_no_legal_plan_is_counted_and_never_scored() -> None:
    problem = tiny_problem(2, 8)
    legal = uniform_plan(problem, dp=2)
    illegal = replace(legal, num_microbatches=legal.num_microbatches + 1)  # another batch
    scored = []

    class Lists(CandidateSearcher):
        name, paper = "lists", "none"

        def candidates(self, problem: Problem, random: np.random.Generator, ledger: Ledger) -> Iterator[Plan]:
            yield illegal
            yield legal

    def note(plan: Plan, problem: Problem) -> Score:
        scored.append(plan)
        return Score(1.0, True, 0, 1, "")

    found = Lists(objective=note).search(problem)
    assert scored == [legal]
    assert (found.counters["illegal"], found.counters["evaluations"]) == (1, 1)


def test_a_chosen_plan_comes_first_and_once() -> None:
    """What a paper's own objective chooses may be second by the score."""
    problem = tiny_problem(2, 8)
    ledger = Ledger(DistributedDataParallel(keep=3), problem)
    plans = [uniform_plan(problem, **degrees) for degrees in ({"dp": 2}, {"tp": 2}, {"pp": 2})]
    by_score = sorted(plans, key=lambda plan: ledger.evaluate(plan).objective)
    ledger.choose(by_score[1])
    assert [ranked.plan for ranked in ledger.result().plans] == [by_score[1], by_score[0], by_score[2]]


def test_plans_that_leave_memory_free_come_after_the_best() -> None:
    """What an allocator loses is in no estimate: of 100 bytes, plans within 97, 93 and 88 are kept."""
    sizes = {1: 100.0, 2: 96.0, 4: 92.0, 8: 88.0}

    def own(plan: Plan, problem: Problem) -> Score:
        return Score(plan.microbatch_size, True, sizes[plan.microbatch_size], 100.0, "")

    ledger = Ledger(searcher_named("megatron-grid", objective=own, keep=1), tiny_problem(2, 8))
    plans = {size: uniform_plan(ledger.problem, tp=2, microbatch=size) for size in sizes}
    for plan in plans.values():
        ledger.evaluate(plan)
    assert [ranked.plan for ranked in ledger.result().plans] == [plans[1], plans[2], plans[4], plans[8]]


def test_the_best_plans_are_different_ones() -> None:
    """Tensor parallel alone: ZeRO levels, how gradients would be reduced, and axes of one device mean nothing."""
    ledger = Ledger(searcher_named("megatron-grid"), tiny_problem())
    for zero in range(4):
        ledger.evaluate(uniform_plan(ledger.problem, tp=2, zero=zero))
    ledger.evaluate(uniform_plan(ledger.problem, tp=2, recompute="full"))
    ledger.evaluate(uniform_plan(ledger.problem, dp=2, zero=1))
    assert len(ledger.result().plans) == 3
    assert ledger.result().counters["evaluations"] == 6


@pytest.mark.parametrize(("degrees", "num_kept"), [({"tp": 2}, 1), ({"dp": 2}, 4)])
def test_plans_that_an_objective_does_not_tell_apart_may_differ_all_the_same(degrees, num_kept) -> None:
    """How gradients are reduced matters where there are replicas, whether or not an objective knows."""
    searcher = searcher_named("megatron-grid", objective=lambda plan, problem: Score(1.0, True, 1.0, 2.0, ""))
    ledger = Ledger(searcher, tiny_problem())
    for reduction, overlaps in product(("last", "every"), (True, False)):
        words = {"gradient_reduction": reduction, "overlap_gradient_sync": overlaps, **degrees}
        ledger.evaluate(uniform_plan(ledger.problem, **words))
    assert len(ledger.result().plans) == num_kept


def test_what_the_fast_estimate_refuses_is_estimated_all_the_same() -> None:
    problem = tiny_problem(4, 8)
    shape = GroupShape(2, 1, 2, groups_per_node=2)
    crowded: list[Row] = [("all_reduce", shape, size, size / 1e10) for size in (1e4, 1e7)]
    table = CollectiveTable.from_rows(crowded, "made up")
    measured = replace(problem, hardware=replace(problem.hardware, collective_table=table))
    plan = uniform_plan(measured, tp=2, dp=2)
    with pytest.raises(ValueError, match="use estimate"):
        FastEstimator(measured).estimate(plan)
    assert estimated(plan, measured).objective == estimate(plan, measured).iteration_time_s
    assert MegatronGrid().search(measured).best


def test_no_search_spends_its_seconds_on_compiling_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fresh machine that takes longer than the default budget; the clock starts after it."""
    began: list[float] = []

    def slow(problem: Problem) -> None:
        time.sleep(0.3)
        began.append(time.perf_counter())

    monkeypatch.setattr("searchers.base.compile_ahead", slow)
    ledger = Ledger(searcher_named("megatron-grid"), tiny_problem())
    assert ledger.clock.wall_s <= time.perf_counter() - began[0]
    Ledger(searcher_named("megatron-grid", objective="simulator"), tiny_problem())
    assert len(began) == 1, "what does not score by the estimate compiles nothing"


@pytest.mark.parametrize("name", searcher_names())
def test_every_search_compiles_the_estimate_before_it_asks_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    own = FastEstimator.estimate

    def counted(self: FastEstimator, plan: Plan) -> Estimate:
        told.append("asked")
        return own(self, plan)

    monkeypatch.setattr(FastEstimator, "estimate", counted)
    for module in ("searchers.base", "searchers.aceso.searcher"):
        monkeypatch.setattr(f"{module}.compile_ahead", lambda problem: told.append("compiled"))
    with suppress(ValueError, NoFeasiblePlan):
        searcher_named(name).search(tiny_problem(4, 8), Budget(evaluations=3))
    assert "asked" not in told or told[0] == "compiled"


@pytest.mark.parametrize("name", searcher_names())
def test_a_dtype_that_the_gpus_lack_is_what_every_searcher_says(name: str) -> None:
    """Some took it for a model that no degree divides, or for too little memory."""
    spec = ProblemSpec(model="gpt3-350m", cluster="v100-32g-dgx1:1x4", runtime="pytorch-ddp", global_batch=4)
    problem = replace(spec.load(), workload=build_workload("gpt3-350m", overrides={"layers": 4}), spec=None)
    words = r"matmul curves for \(fp16, fp32\), got 'bf16' of runtime pytorch-ddp"
    with pytest.raises(ValueError, match=words) as caught:
        searcher_named(name).search(problem, Budget(evaluations=20), 0)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # as processes hand it over
