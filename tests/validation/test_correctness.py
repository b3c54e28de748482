"""Loss and gradients of planned runs equal those of one process that knows no plan."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from tests.validation.tiny import CASES, Case  # noqa: E402
from tests.validation.worker import Outcome, run_cases  # noqa: E402
from validation.launch import launch  # noqa: E402
from validation.reference import Reference, run_reference  # noqa: E402

TOLERANCE = 1e-5
FLOOR = 1e-6
"""Of the global gradient norm: some true gradients are zero (a key's bias)."""

_references: dict[int, Reference] = {}


def reference_of(case: Case) -> Reference:
    """Return the unplanned run of a case's problem."""
    key = id(case.problem)
    if key not in _references:
        _references[key] = run_reference(case.problem, iterations=2)
    return _references[key]


@pytest.fixture(scope="module")
def outcomes() -> dict[int, list[list[Outcome]]]:
    """Return, per world size, every rank's outcomes: one launch each."""
    found = {}
    for world_size, cases in CASES.items():
        references = {case.name: reference_of(case) for case in cases}
        found[world_size] = launch(run_cases, references, num_processes=world_size, timeout_s=300, num_threads=1)
    return found


def worst_error(case: Case, ranks: list[Outcome]) -> float:
    """Return the largest difference over the largest gradient of its tensor (or the floor)."""
    reference = reference_of(case)
    norm = torch.stack([gradient.norm() for gradient in reference.gradients.values()]).norm()
    largest = {key: float(gradient.abs().max()) for key, gradient in reference.gradients.items()}
    return max(
        difference / max(largest[key], FLOOR * float(norm) / TOLERANCE)
        for outcome in ranks
        for key, difference in outcome.differences
    )


@pytest.mark.parametrize(
    ("world_size", "number"),
    [(world_size, number) for world_size, cases in CASES.items() for number in range(len(cases))],
    ids=[f"{world_size}-{case.name}" for world_size, cases in CASES.items() for case in cases],
)
def test_a_planned_run_equals_the_single_process_run(outcomes, world_size: int, number: int) -> None:
    case = CASES[world_size][number]
    ranks = [rank[number] for rank in outcomes[world_size]]
    assert not any(outcome.error for outcome in ranks), "\n".join(outcome.error for outcome in ranks)
    reference = reference_of(case)
    for iteration, expected in enumerate(reference.losses):
        measured = sum(outcome.losses[iteration] for outcome in ranks)
        assert measured == pytest.approx(expected, rel=TOLERANCE)
    held = {key for outcome in ranks for key, _ in outcome.differences}
    assert held == set(reference.gradients)
    assert worst_error(case, ranks) <= TOLERANCE
