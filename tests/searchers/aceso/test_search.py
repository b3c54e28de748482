"""What Aceso finds: the published targets within evaluation budgets, options, and the dynamic program's optimum."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from searchers.aceso import multihop, stage_counts
from searchers.aceso import searcher as searcher_module
from searchers.aceso.configuration import Configuration
from searchers.aceso.dynamic_program import AcesoDynamicProgram
from searchers.aceso.initial import INITIALS, initial_configuration
from searchers.aceso.model import PerformanceModel, Price
from searchers.aceso.multihop import Limits, SearchOptions, StageCountSearch
from searchers.aceso.narrow_borders import narrow_borders
from searchers.aceso.searcher import Aceso
from searchers.base import LOWERED_BUDGETS, NoFeasiblePlan
from searchers.budget import Budget
from searchers.megatron_grid import MegatronGrid
from searchers.scores import estimated
from simulator.plan import Plan
from simulator.problem import Problem, ProblemSpec
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.searchers.aceso.problems import ideal_model, needs_profile, profiled_problem, shared_model
from tests.searchers.tiny import tiny_problem

# Best of the public code on its own profile, with 60 to 200 s for each stage count.
TARGETS_S = {("1_3B", 4): 101.2, ("2_6B", 8): 87.2, ("6_7B", 16): 87.0, ("13B", 32): 84.7}


@needs_profile
@pytest.mark.parametrize(("size", "gpus"), TARGETS_S)
def test_a_hundred_evaluations_beat_the_public_codes_best(size: str, gpus: int) -> None:
    searcher = Aceso(compat="release", judge=0)
    found = searcher.search(profiled_problem(size, gpus), Budget(evaluations=100))
    assert found.plans[0].objective <= TARGETS_S[size, gpus]
    assert found.counters["evaluations"] <= 100


@needs_profile
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("size", "gpus"), TARGETS_S)
def test_twenty_seconds_beat_the_public_codes_best_from_every_seed(size: str, gpus: int, seed: int) -> None:
    searcher = Aceso(compat="release", judge=0, workers=2)
    found = searcher.search(profiled_problem(size, gpus), Budget(seconds=20), seed=seed)
    assert found.plans[0].objective <= TARGETS_S[size, gpus]


def test_heads_that_no_tensor_degree_divides_are_no_error() -> None:
    """GPT-2 1.5B has 25 heads."""
    spec = ProblemSpec(model="gpt2-1.5b", cluster="rtx3090-pcie:1x8", runtime="alpa", global_batch=64)
    problem = spec.load()
    found = Aceso(judge=0).search(problem, Budget(evaluations=60))
    assert all(validate(each.plan, problem) for each in found.plans)


@pytest.mark.slow
def test_1024_layers_on_8_gpus_are_planned_in_ten_seconds_at_least_as_well_as_by_the_grid() -> None:
    spec = ProblemSpec(
        model="gpt-scale-1024", cluster="v100-32g-dgx1:1x8", runtime="megatron-lm-2021", global_batch=1024
    )
    problem = spec.load()
    found = Aceso(judge=0).search(problem, Budget(seconds=10))
    assert found.wall_s < 15
    grid = MegatronGrid(max_microbatch=4).search(problem)
    assert estimated(found.best, problem).objective <= grid.plans[0].objective


@pytest.mark.parametrize("options", [
    {"borders": "relay", "recompute": "largest", "breadth": 1, "fine_tunes": False},
    {"heuristic_2": False},
    {"max_hops": 1},
    {"initial": "imbalance-op"},
    {"initial": "imbalance-gpu"},
    {"objective": "simulator"},
    {"races": False},
])  # fmt: skip
def test_every_variant_finds_legal_plans_and_is_repeatable(options: dict[str, object]) -> None:
    problem = tiny_problem(4, 16)
    plans = []
    for _ in range(2):
        found = Aceso(**options).search(problem, Budget(evaluations=40), seed=3)  # type: ignore[arg-type]
        validate(found.best, problem)
        plans.append([each.plan for each in found.plans])
    assert plans[0] == plans[1]


def test_plans_are_judged_by_the_clock_that_compiling_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation takes longer than the budget, as where it compiles the engine; the clock stands still meanwhile."""
    problem = ProblemSpec("gpt3-350m", "v100-32g-dgx1:1x2", "megatron-lm-2021", 8).load()
    times = []

    def slow(*args: object, **options: object) -> object:
        time.sleep(0.3)
        times.append(0.3)
        return simulate(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(searcher_module, "simulate", slow)
    monkeypatch.setattr(searcher_module, "moment_s", lambda: 5.0)
    found = Aceso(judge=3).search(problem, Budget(seconds=0.3))
    assert len(times) >= 3
    assert found.wall_s == found.history[-1].wall_s < sum(times)


def test_the_judged_plan_is_the_fastest_simulated_of_those_returned() -> None:
    problem = tiny_problem(4, 16)
    by_model = Aceso(judge=0, keep=6).search(problem, Budget(evaluations=60))
    judged = Aceso(judge=3, keep=6).search(problem, Budget(evaluations=60))
    assert {each.plan for each in judged.plans} <= {each.plan for each in by_model.plans} | set(_plans(judged.plans))
    assert judged.best in _plans(judged.plans)


@pytest.mark.parametrize(("late", "misfits", "simulated"), [(False, 0, 3), (True, 0, 1), (True, 1, 2)])
def test_after_the_seconds_of_a_search_one_plan_that_fits_is_simulated(
    late: bool, misfits: int, simulated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Plan] = []

    def counting(plan: Plan, problem: Problem, **options: object) -> SimpleNamespace:
        asked.append(plan)
        return SimpleNamespace(fits=len(asked) > misfits, iteration_time_s=1.0)

    monkeypatch.setattr("searchers.aceso.searcher.simulate", counting)
    searcher = Aceso(judge=3)
    problem = tiny_problem(4, 16)
    ranked = searcher.search(problem, Budget(evaluations=60)).plans
    asked.clear()
    found, fits = searcher._judged(list(ranked), problem, 0.0 if late else math.inf)
    assert fits and len(asked) == simulated and {each.plan for each in found} == set(_plans(ranked))


def _plans(ranked: object) -> list[Plan]:
    return [each.plan for each in ranked]  # type: ignore[attr-defined]


def test_the_search_reaches_the_dynamic_programs_optimum_with_a_hundredth_of_its_states() -> None:
    """Uniform stages only, so that both search one space."""
    problem = tiny_problem(4, 16)
    optimum = AcesoDynamicProgram(slack=4.0).search(problem)
    found = Aceso(fine_tunes=False, judge=0).search(problem, Budget(evaluations=60))
    assert found.plans[0].objective <= optimum.plans[0].objective * 1.01
    assert found.counters["evaluations"] <= 0.01 * optimum.counters["explored"]


@pytest.mark.parametrize(("model", "cluster", "batch"), [
    ("gpt3-350m", "v100-1gpu-10g:4x1", 32),
    ("bert-large", "v100-1gpu-10g:8x1", 64),
])  # fmt: skip
def test_over_slow_links_borders_reach_the_dynamic_programs(model: str, cluster: str, batch: int) -> None:
    """Only borders that few bytes cross are good ones there, and the next of them is beyond the window."""
    problem = ProblemSpec(model=model, cluster=cluster, runtime="megatron-lm-2021", global_batch=batch).load()
    optimum = AcesoDynamicProgram().search(problem).plans[0].objective
    found = Aceso(judge=0).search(problem, Budget(evaluations=200)).plans[0].objective
    assert found <= optimum * (1 + 1e-9)


def test_narrow_borders_are_those_that_residuals_alone_cross() -> None:
    workload = tiny_problem(1, 4).workload
    narrow = narrow_borders(workload)
    behind = [workload.operators[index].name for index in narrow if index < len(workload)]
    assert {f"layer{layer}.norm_{number}" for layer in (1, 2) for number in (1, 2)} <= set(behind)
    assert not any("attention" in name or "mlp" in name for name in behind)


def test_the_dynamic_program_is_never_beaten_by_any_uniform_configuration_of_two_stages() -> None:
    problem = tiny_problem(2, 8)
    model = shared_model(problem)
    program = AcesoDynamicProgram(slack=2.0)
    best = program.search(problem).plans[0].objective
    start = initial_configuration(model, 2)
    assert start is not None
    for cut in range(1, model.num_operators):
        assert model.price(start.with_cuts([0, cut, model.num_operators])).iteration_s >= best * (1 - 1e-9)


def test_the_dynamic_program_counts_the_synchronisation_of_gradients() -> None:
    """Of two GPUs on one microbatch data parallelism is the fastest stage, and tensor parallelism the fastest plan."""
    problem = tiny_problem(2, 2)
    program = AcesoDynamicProgram()
    best = program.search(problem).plans[0].objective
    for degrees in ({"dp": 2, "microbatch": 1}, {"tp": 2, "microbatch": 2}):
        assert best <= program.score(uniform_plan(problem, **degrees), problem).objective * (1 + 1e-9)


@pytest.mark.parametrize("kind", INITIALS)
def test_initial_configurations_use_every_device_and_operator(kind: str) -> None:
    model = ideal_model(8)
    for stages in range(1, 9):
        found = initial_configuration(model, stages, kind)
        if found is None:
            continue
        assert sum(each.gpus for each in found.stages) == 8
        assert found.cuts[-1] == model.num_operators
        model.price(found)


def test_a_search_can_be_continued_and_counts_what_it_spent() -> None:
    model = ideal_model(8)
    once = StageCountSearch(4, SearchOptions()).run(model, Limits(60, None))
    twice = StageCountSearch(4, SearchOptions())
    for _ in range(2):
        twice.run(model, Limits(30, None))
    assert once.best is not None
    assert twice.best is not None
    assert twice.evaluations <= 60
    assert twice.best[1].iteration_s <= once.best[1].iteration_s * 1.05
    assert len(once.statistics.hops) == len(once.statistics.bottlenecks_tried)


def test_a_search_goes_on_where_configurations_far_from_the_best_were_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from one that was dropped while it was looked at, as long searches drop them."""
    monkeypatch.setattr(multihop, "KEPT", 1)
    search = StageCountSearch(4, SearchOptions())
    for _ in range(40):
        search.run(ideal_model(8), Limits(7, None))
    assert search.best is not None


def test_stages_have_keys_on_the_largest_nodes_that_a_cluster_file_may_have() -> None:
    """1,024 GPUs; more operators than keys distinguish are refused."""
    model = ideal_model(8)
    model.per_node = 1024
    assert model.known_stages() is model.known_stages()
    model.num_operators, model.limit_bytes = 1 << 19, 1.0
    with pytest.raises(ValueError, match="fewer than 524,288 operators, got 524,288; search a model of fewer layers"):
        model.known_stages()


def test_more_cells_than_a_neighbour_has_bits_for_are_refused() -> None:
    """Ten tensor degrees of 26 numbers of samples: 260, and 8 bits."""
    tables = ideal_model(8).tables
    space = replace(tables.space, degrees=tuple(2**i for i in range(10)), samples=tuple(2**i for i in range(26)))
    with pytest.raises(ValueError, match=r"at most 256 for Aceso, got 10 \* 26 \* 1; lower largest_samples"):
        PerformanceModel(ideal_model(8).problem, replace(tables, space=space))


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="borders must be all or relay"):
        Aceso(borders="some")
    with pytest.raises(ValueError, match="compat must be one of"):
        Aceso(compat="other").search(tiny_problem(2))
    with pytest.raises(ValueError, match="the release's model reads Aceso's profile"):
        Aceso(compat="release").search(tiny_problem(2))


def test_where_no_judged_plan_fits_those_that_leave_more_memory_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator that loses a tenth: what is returned first takes at most 0.9 of the limit."""
    whole = tiny_problem(4, 16)
    best = Aceso(judge=0).search(whole, Budget(evaluations=200)).best
    peak = Aceso().score(best, whole).peak_bytes
    tight = replace(whole, memory_limit_bytes=int(1.01 * peak) + whole.runtime.outside_allocator_bytes)

    def losing(plan: Plan, problem: Problem, **options: object) -> SimpleNamespace:
        score = Aceso().score(plan, problem)
        return SimpleNamespace(fits=score.peak_bytes <= 0.9 * peak, iteration_time_s=score.objective)

    monkeypatch.setattr("searchers.aceso.searcher.simulate", losing)
    full = Aceso(judge=0).search(tight, Budget(evaluations=200)).best
    assert not losing(full, tight).fits
    assert losing(Aceso().search(tight, Budget(evaluations=200)).best, tight).fits


class Waiting:
    """A search that says what SIGTERM does where it runs."""

    def run(self, model: object, limit: object) -> object:
        return signal.getsignal(signal.SIGTERM)


def test_where_the_closed_form_refuses_the_best_those_that_leave_more_memory_are_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []
    top = StageCountSearch.top

    def remembering(self: StageCountSearch, number: int, share: float = 1.0) -> object:
        asked.append(share)
        return top(self, number, share)

    monkeypatch.setattr(StageCountSearch, "top", remembering)
    monkeypatch.setattr("searchers.aceso.searcher.estimated", lambda *_: SimpleNamespace(fits=False))
    with pytest.raises(NoFeasiblePlan):
        Aceso(workers=1).search(tiny_problem())
    assert set(asked) == {1.0, *LOWERED_BUDGETS}


def test_sigterm_ends_the_processes_of_an_interrupted_search() -> None:
    """The command line takes it as Ctrl-C, and so did processes forked from it: the pool waited for them for ever.

    Also those that had no work yet, so it holds from their start, and what has nothing to spend gets no process.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        idle = Waiting()
        limits = [Limits(None, None), Limits(0, None), Limits(None, None)]
        found = stage_counts._run([Waiting(), idle, Waiting()], None, limits, 3)  # type: ignore[list-item, arg-type]
        assert signal.getsignal(signal.SIGTERM) is interrupt
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found == [signal.SIG_DFL, idle, signal.SIG_DFL]


def test_what_an_interrupted_search_has_found_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = StageCountSearch._iterate

    def interrupted(self: StageCountSearch) -> None:
        if self.num_stages == 2:
            raise KeyboardInterrupt
        whole(self)

    monkeypatch.setattr(StageCountSearch, "_iterate", interrupted)
    searcher, problem = Aceso(), tiny_problem(2, 8)
    with pytest.raises(KeyboardInterrupt):
        searcher.search(problem, Budget(evaluations=60))
    assert searcher.ledger is not None
    kept = searcher.ledger.result()
    assert kept.best == Aceso(stage_counts=(1,), judge=0).search(problem, Budget(evaluations=60)).best


def test_in_a_process_of_a_pool_it_starts_none_and_takes_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """joblib would run the stage counts one after the other there, each with the seconds of two cores."""
    shares: list[int] = []
    own = stage_counts._run

    def counted(searches: list, model: PerformanceModel, limits: list[Limits], workers: int) -> list:
        shares.append(workers)
        return own(searches, model, limits, 1)

    monkeypatch.setattr(stage_counts, "_run", counted)
    monkeypatch.setattr("multiprocessing.parent_process", lambda: SimpleNamespace())
    Aceso(workers=2).search(tiny_problem(2, 8), Budget(evaluations=20))
    monkeypatch.setattr("multiprocessing.parent_process", lambda: None)
    Aceso(workers=2).search(tiny_problem(2, 8), Budget(evaluations=20))
    assert set(shares) == {1, 2} and shares[0] == 1 and shares[-1] == 2


def test_the_history_counts_all_stage_counts_and_the_time_to_make_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not each stage count by its own clock, as if all had run at once."""
    totals: list[int] = []
    price, model = StageCountSearch._price, Aceso.model

    def counted(self: StageCountSearch, configuration: Configuration) -> Price:
        found = price(self, configuration)
        totals.append(self._model.evaluations)
        return found

    def slow(self: Aceso, problem: Problem) -> PerformanceModel:
        time.sleep(0.2)
        return model(self, problem)

    monkeypatch.setattr(StageCountSearch, "_price", counted)
    monkeypatch.setattr(Aceso, "model", slow)
    found = Aceso(workers=1).search(tiny_problem(4, 16), Budget(evaluations=60))
    assert len(found.history) > 2
    assert all(0.2 <= entry.wall_s <= found.wall_s for entry in found.history)
    assert [entry.evaluations in totals for entry in found.history] == [True] * len(found.history)
    assert found.history[-1].evaluations == totals[-1]
