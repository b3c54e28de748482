"""What a pair of passes takes where computation waits for what was sent, against seconds counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.fidelity import Fidelity
from simulator.simulate import simulate_time_s
from simulator.uniform import uniform_plan
from tests.simulator.problems import chain_of_opaque, chain_problem

FORWARD_S, BACKWARD_S = 1.0, 2.0
OUTPUT_BYTES = 10**9


@pytest.mark.parametrize(
    ("contention", "ranks", "chunks", "exchanges"),
    [
        (False, 4, 1, 2),  # 1F1B, ends of the pipeline apart: it sends forward and waits, and backward and waits
        (False, 2, 2, 1),  # interleaved: both leave after the backward pass, and are waited for once
        (False, 4, 3, 1),
        (True, 4, 1, 2),
        (True, 4, 3, 2),  # both leave by one card, but for the two ends of the pipeline
    ],
)
def test_interleaved_pairs_wait_once_for_what_both_passes_send(
    contention: bool, ranks: int, chunks: int, exchanges: int
) -> None:
    """Every further group of p microbatches adds p pairs of passes to each chunk."""
    chain = chain_of_opaque(ranks * chunks, FORWARD_S, BACKWARD_S, output_bytes=OUTPUT_BYTES)
    fidelity = replace(Fidelity.ideal(), transfers=True, contention=contention)
    found = []
    for count in (3 * ranks, 4 * ranks):
        problem = chain_problem(chain, num_devices=ranks, global_batch=count)
        plan = uniform_plan(problem, pp=ranks, chunks=chunks, schedule="interleaved" if chunks > 1 else "1f1b")
        found.append(simulate_time_s(plan, problem, fidelity=fidelity))
    transfer_s = problem.hardware.transfer(OUTPUT_BYTES, 0, 1).alone_s
    pair_s = FORWARD_S + BACKWARD_S + exchanges * transfer_s
    assert (found[1] - found[0]) / (ranks * chunks) == pytest.approx(pair_s, rel=1e-2)


def test_forwards_that_all_come_first_send_alone() -> None:
    """As many microbatches as ranks: a fused exchange would make each rank wait for what the other has yet to send."""
    chain = chain_of_opaque(4, FORWARD_S, BACKWARD_S, output_bytes=OUTPUT_BYTES)
    problem = chain_problem(chain, num_devices=2, global_batch=2)
    plan = uniform_plan(problem, pp=2, chunks=2, schedule="interleaved")
    fidelity = replace(Fidelity.ideal(), transfers=True)
    ideal_s = (2 * 2 + 1) * (FORWARD_S + BACKWARD_S)
    assert simulate_time_s(plan, problem, fidelity=Fidelity.ideal()) == ideal_s
    transfer_s = problem.hardware.transfer(OUTPUT_BYTES, 0, 1).alone_s
    # Three of four chunks send each way; a deadlock is what a fused exchange would be.
    assert ideal_s < simulate_time_s(plan, problem, fidelity=fidelity) <= ideal_s + 8 * transfer_s
