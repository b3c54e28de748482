"""Loss and gradients of planned runs equal those of one process that knows no plan; collectives are those derived.

All plans of a world size run in one set of processes. A test per world size, so that no launch is repeated
where tests are spread over workers.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from tests.validation.cases import WORLD_SIZES, cases_of  # noqa: E402
from tests.validation.tiny import Case  # noqa: E402
from tests.validation.worker import Outcome, run_cases  # noqa: E402
from validation.execution.launch import launch  # noqa: E402
from validation.execution.reference import Reference, run_reference  # noqa: E402

TOLERANCE = 1e-5
FLOOR = 1e-6
"""Of the global gradient norm: some true gradients are zero (a key's bias)."""
FLOOR_OF_IMAGES = 1e-3
"""The same where batch norms are: they amplify rounding, and a bias between two of them has no true gradient."""

DERIVED_OTHERWISE = {
    "gpt tp2, opposite splits": "attention_score reads one packed tensor twice; the derivation moves it twice",
    "gpt pp2 dp2, interleaved, ZeRO-1": "the derivation sums whole tied gradients, ZeRO-1 leaves chunks of them",
}
"""Plans whose collectives are not those derived, besides those whose notes say so."""


def test_there_are_at_least_25_plans_and_every_family() -> None:
    cases = [case for size in WORLD_SIZES for case in cases_of(size)]
    assert len(cases) >= 25
    assert len({case.name for case in cases}) == len(cases)
    families = {"gpt", "bert", "llama", "t5", "vit", "resnet", "vgg", "gnmt", "xlnet", "swin"}
    assert {case.problem.workload.family for case in cases} == families


@pytest.mark.measured
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_planned_runs_equal_the_single_process_run(world_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    cases = cases_of(world_size)
    known: dict[int, Reference] = {}
    for case in cases:
        if id(case.problem) not in known:
            known[id(case.problem)] = run_reference(case.problem, iterations=2)
    references = {case.name: known[id(case.problem)] for case in cases}
    ranks = launch(run_cases, references, num_processes=world_size, timeout_s=300, num_threads=1)
    lines, wrong = [], []
    for number, case in enumerate(cases):
        found = problem_with(case, references[case.name], [rank[number] for rank in ranks])
        error = worst_error(references[case.name], [rank[number] for rank in ranks], floor_of(case))
        lines.append(f"{world_size} processes, {case.name}: worst gradient error {error:.1e}")
        if found:
            wrong.append(f"{case.name}: {found}")
    with capsys.disabled():
        if wrong:
            print("\n" + "\n".join(lines))
    assert not wrong, "\n".join(wrong)


def problem_with(case: Case, reference: Reference, ranks: list[Outcome]) -> str:
    """Return what is wrong with a run, or nothing."""
    errors = [outcome.error for outcome in ranks if outcome.error]
    if errors:
        return errors[0]
    for iteration, expected in enumerate(reference.losses):
        # The second iteration's loss has seen the optimizer step.
        measured = sum(outcome.losses[iteration] for outcome in ranks)
        if measured != pytest.approx(expected, rel=TOLERANCE):
            return f"loss of iteration {iteration} is {measured}, expected {expected}"
    missing = set(reference.gradients) - {key for outcome in ranks for key, _ in outcome.differences}
    if missing:
        return f"no rank holds a gradient of {sorted(missing)}"
    unlike = [outcome.unlike for outcome in ranks if outcome.unlike and not outcome.notes]
    if unlike and case.name not in DERIVED_OTHERWISE:
        return f"collectives run more (or, below zero, less) often than derived: {unlike[0]}"
    error = worst_error(reference, ranks, floor_of(case))
    return f"worst gradient error {error:.1e}, allowed {TOLERANCE:.0e}" if not error <= TOLERANCE else ""


def floor_of(case: Case) -> float:
    """Return the share of the gradient norm below which a gradient counts as rounding."""
    return FLOOR_OF_IMAGES if case.problem.workload.family == "resnet" else FLOOR


def worst_error(reference: Reference, ranks: list[Outcome], floor: float) -> float:
    """Return the largest difference over the largest gradient of its tensor (or the floor)."""
    norm = torch.stack([gradient.norm() for gradient in reference.gradients.values()]).norm()
    largest = {key: float(gradient.abs().max()) for key, gradient in reference.gradients.items()}
    errors = [
        difference / max(largest[key], floor * float(norm))
        for outcome in ranks
        for key, difference in outcome.differences
    ]
    return max(errors, default=0.0)
