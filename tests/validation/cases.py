"""All plans of the gradient suite: written by hand, and returned by searchers, per number of processes."""

from __future__ import annotations

from tests.validation import searched_alpa, tiny_plans
from tests.validation.tiny import Case

CASES: dict[int, list[Case]] = {
    1: tiny_plans.one_process(),
    2: tiny_plans.two_processes(),
    4: [*tiny_plans.four_processes(), *searched_alpa.four_processes()],
}
