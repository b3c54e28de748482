"""Every searcher's own estimate of a plan is as far from the simulator as its published model is, and no farther.

Other tests compare a searcher with itself: an estimate that leaves out a collective passes them all. Here plans that no
search chose are priced by what the search minimises, and simulated (``windtunnel reproduce cost-models`` has more).
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from experiments.reproduce.cost_models.prices import OWN_MEMORY, QUICK, SEARCHERS, SHAPES, Priced, own_price, priced
from simulator.problem import ProblemSpec
from simulator.uniform import uniform_plan

FOUR_SAMPLES = SHAPES[1:]
"""With one sample a replica launches rule the smaller models: up to 40 % above, in every model without a host."""


class Tolerance(NamedTuple):
    """Least and most of estimated over simulated, less one, as measured and rounded outwards to whole per cent.

    Attributes:
        one_node, two_nodes: Of time, on four GPUs of one node, and on two nodes of two with 10 Gb/s between.
        memory, recomputed: Of peak memory, with everything kept, and with every layer recomputed.
    """

    one_node: tuple[float, float]
    two_nodes: tuple[float, float]
    memory: tuple[float, float] = (0.0, 0.0)
    recomputed: tuple[float, float] = (0.0, 0.0)


TOLERANCES = {
    # Stages that differ, as T5's encoder and decoder, are 8 % above by the papers' formulas of a pipeline. By this one
    # the hungriest operator's memory comes on top of what a recomputed layer brings back.
    "aceso": Tolerance((-0.04, 0.1), (-0.03, 0.03), (0.0, 0.02), (0.0, 0.39)),
    # No transfers between stages and no gradient synchronisation: little inside a node, most of the time outside.
    # What later layers keep is there, in its memory, while an earlier one works.
    "alpa": Tolerance((-0.05, 0.09), (-0.79, 0.0), (0.0, 0.01), (0.0, 0.04)),
    # Groups of a reduction as if alone, and weights that stages share left out: on 10 Gb/s a third of an iteration.
    "amp": Tolerance((-0.05, 0.09), (-0.4, 0.0)),
    # Transfers and reductions as if alone on their card; no layer stops recomputing early.
    "dapple": Tolerance((-0.05, 0.1), (-0.1, 0.07)),
    # Eq. 9 counts what stages differ by in full.
    "galvatron-bmw": Tolerance((-0.03, 0.1), (-0.03, 0.06)),
    # The shared closed form: a first launch and a last kernel not waited for.
    "megatron-grid": Tolerance((-0.001, 0.0), (-0.01, 0.0)),
    # Steady state only, recomputation unknown; weights travel 4 (m - 1) / m times, with every four samples.
    "pipedream": Tolerance((-0.41, 0.02), (-0.49, 2.6)),
    # Steady state only; weights travel 4 (d - 1) / d times, twice what a ring takes.
    "piper": Tolerance((-0.23, 0.02), (-0.26, 0.95)),
}


@pytest.fixture(scope="module")
def prices() -> list[Priced]:
    return [each for problem in QUICK for each in priced(*problem, shapes=FOUR_SAMPLES)]


@pytest.mark.parametrize("searcher", SEARCHERS)
def test_the_searchers_estimate_is_within_its_tolerance_of_the_simulator(
    searcher: str, prices: list[Priced]
) -> None:
    own = [each for each in prices if each.searcher == searcher]
    assert len(own) >= 15
    allowed = TOLERANCES[searcher]
    for each in own:
        least, most = allowed.two_nodes if ":2x" in each.cluster else allowed.one_node
        assert least <= each.time_error <= most, each
        least, most = allowed.recomputed if each.plan.endswith("full") else allowed.memory
        # (Sizes in blocks of 512 bytes.)
        assert least - 1e-4 <= each.memory_error <= most + 1e-4, each


def test_searchers_with_an_account_of_memory_are_known() -> None:
    assert set(OWN_MEMORY) < set(SEARCHERS) == set(TOLERANCES)


@pytest.mark.parametrize(
    ("searcher", "degrees", "message"),
    [
        ("pipedream", (2, 2, 1), "by batch only"),
        ("piper", (4, 1, 1), "inside a node"),
    ],
)
def test_a_plan_that_is_not_in_a_searchers_words_is_refused(
    searcher: str, degrees: tuple[int, int, int], message: str
) -> None:
    """PipeDream priced tensor-parallel ranks as replicas, Piper ended in a KeyError."""
    model, cluster, runtime = QUICK[1]
    problem = ProblemSpec(model=model, cluster=cluster, runtime=runtime, global_batch=8).load()
    tp, pp, dp = degrees
    with pytest.raises(ValueError, match=message):
        own_price(searcher, uniform_plan(problem, tp=tp, pp=pp, dp=dp), problem)
