"""What a stage holds under zb-h1, followed pass by pass in the order that the schedule makes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.closed_forms.zero_bubble_memory import zero_bubble_peak_bytes
from simulator.schedules.actions import BACKWARD_INPUT, FORWARD, PipelineShape
from simulator.schedules.zero_bubble import actions

SIZES = st.integers(0, 20).map(float)


def followed(
    kept: float, for_weights: float, input_pass: float, weight_pass: float, last: float, anew: float, stage: int,
    num_stages: int, num_microbatches: int,
) -> float:  # fmt: skip
    """Return the most that is held while the passes of a stage come one after the other."""
    order = actions(PipelineShape(num_stages, num_microbatches, tuple(range(num_stages))))[stage]
    held = highest = made = 0.0
    for action in order:
        if action.kind == FORWARD:
            held += kept
        elif action.kind == BACKWARD_INPUT:
            highest = max(highest, made + held + input_pass)
            held += for_weights - kept
        else:
            highest = max(highest, made + held + weight_pass)
            held, made = held - for_weights, anew
    return max(highest, anew + min(stage, num_microbatches - 1) * for_weights + last)


@given(sizes=st.tuples(*[SIZES] * 6), num_stages=st.integers(1, 8), data=st.data())
def test_the_closed_form_is_the_most_of_all_passes(sizes, num_stages: int, data) -> None:
    place = data.draw(st.integers(0, num_stages - 1)), num_stages, data.draw(st.integers(1, 12))
    assert zero_bubble_peak_bytes(*sizes, *place) == followed(*sizes, *place)


@pytest.mark.parametrize(
    ("sizes", "place", "expected"),
    [
        ((1.0, 5.0, 0.0, 0.0, 0.0, 0.0), (3, 4, 2), 10.0),  # both wait for their weight passes
        ((1.0, 1.0, 0.0, 0.0, 50.0, 0.0), (0, 4, 8), 50.0),
        ((1.0, 0.5, 0.0, 0.0, 0.0, 0.0), (3, 8, 6), 5.5),
    ],
)
def test_and_what_a_hand_finds(sizes, place, expected: float) -> None:
    assert zero_bubble_peak_bytes(*sizes, *place) == expected
