"""Random plans on which closed forms are compared with the simulator."""

from itertools import islice
from random import Random

import numpy as np

from experiments.closed_form_errors import drawn_plans, errors_of


def test_a_seed_draws_the_same_plans() -> None:
    first, again, other = ([each.plan for each in islice(drawn_plans(Random(seed)), 12)] for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_closed_forms_are_near_the_simulator_on_random_plans() -> None:
    """1.4 % of time and 0.3 % of memory off in the mean of 1,500 plans (``docs/simplifications.md``)."""
    drawn = list(islice(drawn_plans(Random(7)), 40))
    times, peaks = (np.concatenate([errors_of(each, of) for each in drawn]) for of in ("time", "memory"))
    assert np.abs(times).mean() < 0.03
    assert np.abs(np.median(times)) < 0.01
    assert np.abs(peaks).mean() < 0.01
    assert np.abs(np.median(peaks)) < 0.0001
