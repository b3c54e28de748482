"""Which microbatches searchers try."""

from __future__ import annotations

from typing import Any

import pytest

from searchers.aceso.searcher import Aceso
from searchers.alpa.searcher import Alpa
from searchers.base import Searcher
from searchers.mcmc import FlexFlowMcmc
from searchers.megatron_grid import MegatronGrid
from searchers.pure import FullyShardedDataParallel
from searchers.scores import Score
from simulator.plan import Plan
from simulator.problem import Problem, ProblemSpec
from tests.searchers.tiny import tiny_problem


def _samples_tried(searcher: type[Searcher], problem: Problem, **options: Any) -> set[int]:
    """Return the samples of a microbatch over all replicas of plans that a searcher scores."""
    seen = set()

    def note(plan: Plan, problem: Problem) -> Score:
        seen.add(plan.microbatch_size)
        return Score(1.0, True, 0.0, 1.0, "")

    searcher(objective=note, **options).search(problem)
    return seen


@pytest.mark.parametrize("searcher", [MegatronGrid, Alpa])
def test_all_that_divide_the_batch_are_tried(searcher: type[MegatronGrid | Alpa]) -> None:
    problem = tiny_problem(1, 24)
    assert _samples_tried(searcher, problem, max_microbatch=12) == {1, 2, 3, 4, 6, 8, 12}
    assert _samples_tried(searcher, problem, max_microbatch=12, powers_of_two=True) == {1, 2, 4, 8}


def test_so_they_are_by_flexflows_walk() -> None:
    tried = _samples_tried(FlexFlowMcmc, tiny_problem(1, 24), max_microbatch=12, steps=2)
    assert tried == {1, 2, 3, 4, 6, 8, 12}


def test_a_pure_strategy_takes_its_whole_batch_at_once_where_that_is_no_power_of_two() -> None:
    assert FullyShardedDataParallel().search(tiny_problem(2, 24)).best.microbatch_size == 24


def test_images_have_larger_ones_than_text_as_in_acesos_profiles() -> None:
    image = ProblemSpec(model="vit-large", cluster="v100-32g-dgx1:1x1", runtime="megatron-lm-2021", global_batch=128)
    for problem, largest in ((tiny_problem(1, 128), 8), (image.load(), 64)):
        assert max(_samples_tried(MegatronGrid, problem)) == largest
        assert max(Aceso().model(problem).space.samples) == largest
