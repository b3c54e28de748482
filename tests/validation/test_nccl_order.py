"""Transfers between stages as NCCL carries them out: over one communicator in order, whatever their tags."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")
import torch.distributed as dist  # noqa: E402

from hardware_models.cluster import parse_cluster  # noqa: E402
from hardware_models.model import HardwareModel  # noqa: E402
from simulator.plan import Plan  # noqa: E402
from simulator.problem import Problem  # noqa: E402
from simulator.uniform import even_layer_cuts  # noqa: E402
from simulator.validate import validate  # noqa: E402
from tests.validation.posing_gpu import rank_on_posing_gpu  # noqa: E402
from tests.validation.tiny import Case, axes, pipeline, problem  # noqa: E402
from tests.validation.tiny_plans import four_processes, two_processes  # noqa: E402

SEND, RECEIVE = "send", "receive"
NAMES = (
    "gpt pp2, interleaved",  # a stage of each device follows one of the other
    "t5 tp2, sequence parallel, memory passed on in shards and shards cross and are gathered once",
    "gpt pp2 tp2, sequence parallel, zb-h1",
)
TURNS = replace(problem("llama", global_batch=12), hardware=HardwareModel(cluster=parse_cluster("local-cpu:1x5")))
HALF = even_layer_cuts(TURNS.workload, 2)[0][1]
PARTS = [(HALF, [0, 1], axes(("batch", 2))), (-1, [2, 3, 4], axes(("batch", 3)))]
PIPELINES = [
    *(case for case in (*two_processes(), *four_processes()) if case.name in NAMES),
    Case("llama 2 then 3 in turn", TURNS, pipeline(TURNS, PARTS, microbatch=1, replica_assignment="round_robin")),
]


@dataclass(frozen=True)
class Transfer:
    """What a rank asks of NCCL."""

    word: str
    communicator: str
    peer: int
    tag: int


class Done:
    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


def note(asked: list[tuple[str, Any, int, int]], word: str, part: object, peer: int, group: Any, tag: int = 0) -> Done:
    """Ask for a transfer."""
    asked.append((word, group, peer, tag))
    return Done()


def transfers_of(plan: Plan, of: Problem, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Transfer]]:
    """Return what every rank asks for until the end of the first iteration."""
    found: dict[int, list[Transfer]] = {}
    for rank in range(len(plan.devices)):
        asked: list[tuple[str, Any, int, int]] = []
        with monkeypatch.context() as patch:
            for name, word in (("send", SEND), ("isend", SEND), ("recv", RECEIVE), ("irecv", RECEIVE)):
                patch.setattr(dist, name, partial(note, asked, word))
            with rank_on_posing_gpu(plan, of, rank) as executor:
                executor.run_iteration(0)
                name_of = {id(handle): str(key) for key, handle in executor.worker.pool._handles.items()}
        found[rank] = [Transfer(word, name_of[id(group)], peer, tag) for word, group, peer, tag in asked]
    return found


def stuck(asked: dict[int, list[Transfer]]) -> dict[int, Transfer]:
    """Return where each rank stands in the end, if a send ends with its receive and a rank waits for what it receives.

    Between two ranks the transfers of a communicator follow each other; those of several do not mind each other. Ahead
    of the first, each of the two waits until the other is there.
    """
    here: dict[tuple[str, frozenset[int]], set[int]] = {}
    lanes: dict[tuple[int, int, str], deque[tuple[int, Transfer]]] = {}
    at, ended = dict.fromkeys(asked, 0), set()
    goes_on = True
    while goes_on:
        goes_on = False
        for rank, todo in asked.items():
            while at[rank] < len(todo) and all((rank, i) in ended for i in range(at[rank]) if todo[i].word == RECEIVE):
                each = todo[at[rank]]
                there = here.setdefault((each.communicator, frozenset((rank, each.peer))), set())
                goes_on |= rank not in there
                there.add(rank)
                if len(there) < 2:
                    break
                lanes.setdefault((rank, each.peer, each.communicator), deque()).append((at[rank], each))
                at[rank] += 1
                goes_on = True
        for (rank, peer, communicator), own in lanes.items():
            other = lanes.get((peer, rank, communicator), deque())
            while own and other and own[0][1].word != other[0][1].word:
                (mine, first), (theirs, second) = own.popleft(), other.popleft()
                assert first.tag == second.tag, "NCCL would hand over another tensor"
                ended |= {(rank, mine), (peer, theirs)}
                goes_on = True
    return {rank: todo[at[rank]] for rank, todo in asked.items() if at[rank] < len(todo)} | {
        rank: each for (rank, _, _), own in lanes.items() for _, each in own
    }


@pytest.mark.parametrize("case", PIPELINES, ids=lambda case: case.name)
def test_no_send_waits_for_a_receive_that_waits_for_it(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(PIPELINES) == len(NAMES) + 1
    assert not stuck(transfers_of(validate(case.plan, case.problem), case.problem, monkeypatch))


def test_the_ranks_of_every_communicator_have_met_before_the_first_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in four_processes() if case.name == "gpt pp2 dp2, interleaved, ZeRO-1")
    plan, met = validate(case.plan, case.problem), list[Any]()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: met.append(group))
    with rank_on_posing_gpu(plan, case.problem, 3) as executor:
        pool = executor.worker.pool
        of_collectives = {key for key in pool._handles if key[0] in ("tensor", "gather", "reduce") and 3 in key[1]}
        assert len(of_collectives) > 1 and {id(pool._handles[key]) for key in of_collectives} == set(map(id, met))
        num_met = len(met)
        pool.connect(executor._group_keys(), executor.boundaries[0].connections(), executor.worker.device)
        assert len(met) == num_met  # for a next plan only what is new
