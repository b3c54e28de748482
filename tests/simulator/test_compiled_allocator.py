"""The compiled replay against the readable one, on any events."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.memory.allocator import replay, replay_compiled
from tests.simulator.test_allocator_properties import CAPACITIES, MIB, STEPS, as_events


@settings(max_examples=300, deadline=None)
@given(STEPS, CAPACITIES)
def test_both_replays_agree(steps, capacity) -> None:
    events = as_events(steps)
    assert replay_compiled(*events, capacity) == replay(*events, capacity)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([80 * MIB, 200 * MIB, 1 << 40]))
def test_both_replays_agree_on_long_lists(seed, capacity) -> None:
    chance = random.Random(seed)
    sizes, tensors, allocates, alive = [], [], [], []
    for number in range(3000):
        if alive and (chance.random() < 0.5 or len(alive) > 40):
            sizes.append(0)
            tensors.append(alive.pop(chance.randrange(len(alive))))
            allocates.append(False)
        else:
            sizes.append(chance.choice([chance.randrange(4096), chance.randrange(3 * MIB), chance.randrange(30 * MIB)]))
            tensors.append(number)
            alive.append(number)
            allocates.append(True)
    events = np.array(sizes), np.array(tensors, dtype=np.int32), np.array(allocates)
    assert replay_compiled(*events, capacity) == replay(*events, capacity)
