"""Memory of DistributedDataParallel: buckets all the time, gradients from the first backward pass to the step."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from simulator.closed_forms.estimate import estimate
from simulator.costs import CostTables
from simulator.lowering.lower import stage_views
from simulator.lowering.synchronisation import parameter_groups
from simulator.memory.model_states import static_bytes
from simulator.problem import ProblemSpec
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from simulator.validate import validate

PARAMETERS = 24 * (12 * 1024 * 1024 + 13 * 1024) + (51200 + 2048 + 2) * 1024
"""Of GPT 350M, its vocabulary padded."""


def consumers(**words: object) -> tuple[Mapping[str, int], int]:
    """Return what lives at the peak of GPT 350M on the fullest device, and the closed form's peak."""
    problem = ProblemSpec("gpt3-350m", "a100-80g-dgx:1x4", "pytorch-ddp", 16).load()
    plan = validate(uniform_plan(problem, **words), problem)  # type: ignore[arg-type]
    memory = max(simulate(plan, problem).memory, key=lambda one: one.peak_allocated_bytes)
    return memory.consumers, round(max(estimate(plan, problem).peak_bytes))


def test_a_pass_that_is_the_first_has_no_gradients_yet() -> None:
    """Live bytes of torch 2.13.0: parameters 1, with buckets 2, behind the first backward pass 3, behind a step 5."""
    alone, _ = consumers(dp=4, microbatch=4)
    assert alone["parameters"] == pytest.approx(4 * PARAMETERS, rel=1e-3)
    assert alone["gradients"] == pytest.approx(4 * PARAMETERS, rel=0.02)  # buckets, and what the head has made
    later, _ = consumers(dp=4, microbatch=1)
    assert later["gradients"] == pytest.approx(8 * PARAMETERS, rel=1e-3)


def test_what_no_replica_reduces_is_in_no_bucket() -> None:
    """Tensor parallelism keeps positions and norms whole."""
    whole = (2048 + 24 * 6 + 2) * 1024
    later, _ = consumers(tp=4, microbatch=4)
    assert later["gradients"] == pytest.approx(4 * ((PARAMETERS - whole) / 4 + whole), rel=1e-3)


@pytest.mark.parametrize("words", [{"dp": 4, "microbatch": 4}, {"dp": 4, "microbatch": 1}, {"pp": 2, "dp": 2}])
def test_the_closed_form_knows_both(words: Mapping[str, int]) -> None:
    found, peak_bytes = consumers(**{"microbatch": 2, **words})
    assert peak_bytes == pytest.approx(sum(found.values()), rel=0.005)


@pytest.mark.parametrize(("zero", "num_bytes"), [(0, 8), (1, 8), (2, 1), (3, 1)])
def test_what_is_scattered_is_in_no_bucket(zero: int, num_bytes: float) -> None:
    """The reducer all-reduces whatever the optimizer shards; FSDP has none."""
    problem = ProblemSpec("gpt3-350m", "a100-80g-dgx:1x4", "pytorch-ddp", 16).load()
    plan = validate(uniform_plan(problem, dp=4, zero=zero), problem)
    (view,) = stage_views(plan, costs := CostTables(problem))
    groups = list(parameter_groups(view))
    static = static_bytes(groups, costs, sharded_gradients=zero > 1)
    elements = sum(group.num_elements for group in groups)
    assert sum(static.gradients) + static.anew_bytes == pytest.approx(elements * num_bytes, rel=1e-3)
