"""The release's model on Wide-ResNet and T5, and where its profile does not trade as Table 1 says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.cases import aceso_t5, aceso_wide_resnet
from experiments.cases.aceso import problem_on
from experiments.cases.case import Case, Skipped
from searchers.aceso.configuration import from_plan
from searchers.aceso.model import PerformanceModel, Price
from searchers.aceso.release_tables import release_arrays
from simulator.costs import CostTables
from simulator.problem import Problem
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from tests.searchers.aceso.problems import FOLDER, needs_profile
from tests.workloads.graphs import SHARED_DATA
from workloads.models.t5 import T5Spec
from workloads.registry import model_spec

# Seconds by the public code, run on its profile: Megatron-LM's uniform plans, and its search's own of T5.
WIDE_RESNET_S = {"500M": 66.99, "2B": 73.19, "4B": 90.49, "6_8B": 83.81}
T5_S = {"3B": 161.92, "11B": 170.15}


def release_price(case: Case, *, recomputes_ends: bool = False) -> Price:
    """Return the price of a case's plan; if it recomputes layers, optionally with first and last operators as well."""
    problem = case.problem()
    model = PerformanceModel.of(problem, CostTables(problem), compat="release")
    configuration = from_plan(case.plan(problem), problem)
    if recomputes_ends and any(configuration.recompute or b""):
        configuration = replace(configuration, recompute=b"\1" * len(problem.workload))
    return model.price(configuration)


def profiled(module: object, group: str) -> list[Case]:
    cases = module.cases(SHARED_DATA)  # type: ignore[attr-defined]
    return [case for case in cases if not isinstance(case, Skipped) and group in case.groups]


@needs_profile
def test_uniform_plans_of_wide_resnet_get_the_public_codes_time() -> None:
    cases = profiled(aceso_wide_resnet, aceso_wide_resnet.LIKELY)
    # The public code's full recomputation is of every operator.
    found = {str(case.features["model"]): release_price(case, recomputes_ends=True) for case in cases}
    assert {size: price.iteration_s for size, price in found.items()} == pytest.approx(WIDE_RESNET_S, rel=1.5e-3)


@needs_profile
def test_t5_plans_get_the_public_codes_time() -> None:
    found = {str(case.features["model"])[3:]: release_price(case) for case in profiled(aceso_t5, aceso_t5.LIKELY)}
    assert {size: price.iteration_s for size, price in found.items()} == pytest.approx(T5_S, rel=1e-4)
    assert all(price.fits for price in found.values())


@pytest.mark.parametrize("name", ["t5-770m", "t5-3b", "t5-22b"])
def test_reported_flop_of_t5_are_those_of_its_matrix_products(name: str) -> None:
    """The closed form against the sum over the operator graph."""
    problem = problem_on(name, ("t5", ""), 4, 4, None)
    result = simulate(uniform_plan(problem, pp=4, recompute="full"), problem, engine="compiled")
    spec = model_spec(name)
    assert isinstance(spec, T5Spec)
    assert aceso_t5.reported_flop(spec, 4) == pytest.approx(result.model_flop, rel=1e-12)


def _work(problem: Problem) -> dict[tuple[int, int], float]:
    """Return seconds of one pass through the model by tensor degree and samples."""
    tables = release_arrays(problem)
    columns, space = tables.arrays.columns, tables.space
    return {
        (degree, samples): float(columns[space.cell(degree, samples), :2].sum())
        for degree in space.degrees
        for samples in space.samples
    }


@needs_profile
@pytest.mark.parametrize(("size", "exceptions"), [
    # One sample of so small a layer is launch-bound on 4 GPUs already, and pays for the larger all-reduce.
    ("350M", {(4, 1)}),
    ("1_3B", set()),
    ("6_7B", set()),
])  # fmt: skip
def test_more_tensor_parallelism_is_less_work_on_the_profile_but_for_small_layers(
    size: str, exceptions: set[tuple[int, int]]
) -> None:
    """inc-tp: computation down, Table 1. ``(degree, samples)`` where doubling the degree is not faster."""
    name = f"gpt3-{size.replace('_', '.').lower()}"
    seconds = _work(problem_on(name, ("gpt", size), 8, 1024, FOLDER))
    slower = {(tp, n) for tp, n in seconds if (2 * tp, n) in seconds and seconds[2 * tp, n] >= seconds[tp, n]}
    assert slower == exceptions


@needs_profile
def test_larger_microbatches_are_less_work_per_sample_on_the_profile_but_for_wide_convolutions() -> None:
    """inc-mbs: computation down, Table 1. Up to 4 % more where a convolution's larger batch takes another kernel."""
    cases = profiled(aceso_wide_resnet, aceso_wide_resnet.LIKELY)
    case = next(each for each in cases if each.features["model"] == "6_8B")
    seconds = _work(case.problem())
    change = {key: seconds[key[0], 2 * key[1]] / 2 / seconds[key] for key in seconds if (key[0], 2 * key[1]) in seconds}
    assert {key for key, value in change.items() if value >= 1} == {(1, 16), (2, 16), (4, 16), (8, 16)}
    assert max(change.values()) < 1.04
