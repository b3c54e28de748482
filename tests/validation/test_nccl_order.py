"""Transfers between stages as NCCL carries them out: over one communicator in order, whatever their tags."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")
import torch.distributed as dist  # noqa: E402

from simulator.plan import Plan  # noqa: E402
from simulator.problem import Problem  # noqa: E402
from simulator.validate import validate  # noqa: E402
from tests.validation.cases import CASES  # noqa: E402
from tests.validation.posing_gpu import rank_on_posing_gpu  # noqa: E402
from tests.validation.tiny import Case  # noqa: E402

SEND, RECEIVE = "send", "receive"
NAMES = (
    "gpt pp2, interleaved",  # a stage of each device follows one of the other
    "t5 tp2, sequence parallel, memory passed on in shards and shards cross and are gathered once",
    "gpt pp2 tp2, sequence parallel, zb-h1",
)
PIPELINES = [case for number in (2, 4) for case in CASES[number] if case.name in NAMES]


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


def transfers_of(plan: Plan, of: Problem, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Transfer]]:
    """Return what every rank asks for in one iteration."""
    found: dict[int, list[Transfer]] = {}
    for rank in range(len(plan.devices)):
        asked: list[Transfer] = []
        with rank_on_posing_gpu(plan, of, rank) as executor, monkeypatch.context() as patch:
            name_of = {id(handle): str(key) for key, handle in executor.worker.pool._handles.items()}

            def asks(word: str, into: list[Transfer] = asked, names: dict[int, str] = name_of) -> Callable[..., Done]:
                def ask(part: torch.Tensor, peer: int, group: Any, tag: int) -> Done:
                    into.append(Transfer(word, names[id(group)], peer, tag))
                    return Done()

                return ask

            patch.setattr(dist, "isend", asks(SEND))
            patch.setattr(dist, "irecv", asks(RECEIVE))
            executor.run_iteration(0)
        found[rank] = asked
    return found


def stuck(asked: dict[int, list[Transfer]]) -> dict[int, Transfer]:
    """Return where each rank stands in the end, if a send ends with its receive and a rank waits for what it receives.

    Between two ranks the transfers of a communicator follow each other; those of several do not mind each other.
    """
    lanes: dict[tuple[int, int, str], deque[tuple[int, Transfer]]] = {}
    at, ended = dict.fromkeys(asked, 0), set()
    goes_on = True
    while goes_on:
        goes_on = False
        for rank, todo in asked.items():
            while at[rank] < len(todo) and all((rank, i) in ended for i in range(at[rank]) if todo[i].word == RECEIVE):
                each = todo[at[rank]]
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
    return {rank: each for (rank, _, _), own in lanes.items() for _, each in own}


@pytest.mark.parametrize("case", PIPELINES, ids=lambda case: case.name)
def test_no_send_waits_for_a_receive_that_waits_for_it(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(PIPELINES) == len(NAMES)
    assert not stuck(transfers_of(validate(case.plan, case.problem), case.problem, monkeypatch))
