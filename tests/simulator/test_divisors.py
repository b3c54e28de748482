"""Divisors, and the one that a refused batch could have had, at once however large the numbers are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.divisors import divisors, largest_divisor
from simulator.problem import MAX_BATCH, ProblemSpec
from simulator.uniform import uniform_plan

SMALL = {"model": "gpt3-350m", "cluster": "v100-32g-dgx1:1x4", "runtime": "megatron-lm-2021"}


@given(st.integers(1, 500))
def test_they_are_all_that_counting_finds(number: int) -> None:
    assert divisors(number) == [each for each in range(1, number + 1) if number % each == 0]


@given(st.integers(1, 500), st.integers(1, 600))
def test_it_is_the_largest_that_counting_finds(number: int, limit: int) -> None:
    counted = max(each for each in range(1, limit + 1) if number % each == 0)
    assert largest_divisor(number, limit) == counted


@pytest.mark.parametrize("microbatch", [10**11, 2**63 - 1, 10**23])
def test_a_huge_microbatch_is_refused_at_once(microbatch: int) -> None:
    with pytest.raises(ValueError, match=r"must divide the global batch 8, got 4 .* try microbatch 2"):
        uniform_plan(ProblemSpec(**SMALL, global_batch=8).load(), dp=4, microbatch=microbatch)


@pytest.mark.parametrize("batch", [MAX_BATCH + 1, 10**308])
def test_a_batch_beyond_counting_is_refused(batch: int) -> None:
    with pytest.raises(ValueError, match=r"global_batch must be at most 1,000,000,000 samples, got 1e\+"):
        ProblemSpec(**SMALL, global_batch=batch).load()
