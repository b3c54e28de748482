"""Collectives of a group whose mesh order is not that of its ranks: parts have their places in the mesh.

The backend is posed: as with gloo and NCCL, its places are those of the ranks in ascending order.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from validation.execution import groups  # noqa: E402
from validation.execution.groups import Group  # noqa: E402

ORDERS = [(0, 1, 2), (2, 0, 1), (1, 2, 0), (5, 3, 9, 4)]
"""Two that are not their own inverses, so that a way there is told from the way back."""


def parts_of(rank: int, size: int) -> torch.Tensor:
    """Return what a rank has for each place of the mesh."""
    return torch.tensor([[100.0 * rank + place, 0.5] for place in range(size)])


@pytest.mark.parametrize("ranks", ORDERS)
def test_gathered_parts_lie_in_mesh_order(ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(out: torch.Tensor, own: torch.Tensor, handle: Any, **_: Any) -> None:
        out.copy_(torch.cat([parts_of(rank, 1).view(-1) for rank in sorted(ranks)]))

    monkeypatch.setattr(groups, "all_gather_flat", answer)
    for rank in ranks:
        found, _ = Group(ranks, None, rank).all_gather(parts_of(rank, 1))
        assert [float(part[0, 0]) for part in found] == [100.0 * each for each in ranks]


@pytest.mark.parametrize("ranks", ORDERS)
def test_a_rank_gets_the_sum_of_the_parts_of_its_place(ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[torch.Tensor] = []

    def note(out: torch.Tensor, own: torch.Tensor, **_: Any) -> None:
        handed.append(own.view(len(ranks), -1).clone())

    monkeypatch.setattr(groups, "reduce_scatter_flat", note)
    for rank in ranks:
        Group(ranks, None, rank).reduce_scatter(parts_of(rank, len(ranks)))
    total = torch.stack(handed).sum(dim=0)
    for row, rank in enumerate(sorted(ranks)):
        assert float(total[row][0]) == sum(100.0 * each + ranks.index(rank) for each in ranks)


@pytest.mark.parametrize("ranks", ORDERS)
def test_exchanged_parts_are_those_for_a_place_from_each_place(
    ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: dict[int, torch.Tensor] = {}
    asking = [ranks[0]]

    def exchange(out: torch.Tensor, own: torch.Tensor, **_: Any) -> None:
        handed[asking[0]] = own.clone()
        if len(handed) == len(ranks):
            here = sorted(ranks).index(asking[0])
            for row, sender in enumerate(sorted(ranks)):
                out[row] = handed[sender][here]

    monkeypatch.setattr(groups.dist, "all_to_all_single", exchange)
    for turn in (*ranks, *ranks):  # first all hand in, then each is answered
        asking[0] = turn
        found = Group(ranks, None, turn).all_to_all(parts_of(turn, len(ranks)))
    place = ranks.index(ranks[-1])
    assert [float(part[0]) for part in found] == [100.0 * sender + place for sender in ranks]
