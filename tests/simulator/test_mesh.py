"""Meshes, collectives between layouts, transfers between stages, and classes of equal devices."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.lowering.mesh import batch_coordinate, collectives_between, groups, refine, reshard
from simulator.lowering.symmetry import Channel, partition
from simulator.lowering.transfers import overlap, regions, replica_bounds, route
from simulator.plan import Axis
from workloads.placements import PARTIAL, REPLICATE, Shard

SIZES = st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=3).map(tuple)
KEPT = st.sampled_from([REPLICATE, Shard(0), Shard(1), Shard(2)])


@given(SIZES, st.data())
def test_groups_partition_the_mesh(sizes: tuple[int, ...], data: st.DataObject) -> None:
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1))))
    found = groups(sizes, axes)
    assert sorted(device for members in found for device in members) == list(range(prod(sizes)))
    assert {len(members) for members in found} == {prod(sizes[axis] for axis in axes)}


@pytest.mark.parametrize(
    ("meshes", "expected"),
    [({(4, 2), (2, 4)}, (2, 2, 2)), ({(8,), (2, 2, 2)}, (2, 2, 2)), ({(3, 2), (2, 3)}, None), ({(6,)}, (6,))],
)
def test_refinement(meshes: set, expected: tuple | None) -> None:
    assert refine(frozenset(meshes)) == expected


def test_megatrons_row_to_norm_is_one_all_reduce_and_to_a_sequence_shard_a_reduce_scatter() -> None:
    (found,) = collectives_between((2, 4), (Shard(0), PARTIAL), (Shard(0), REPLICATE), 100.0)
    assert (found.collective, found.axes, found.num_bytes) == ("all_reduce", (1,), 100.0)
    (found,) = collectives_between((2, 4), (Shard(0), PARTIAL), (Shard(0), Shard(1)), 100.0)
    assert (found.collective, found.num_bytes) == ("reduce_scatter", 100.0)


def test_galvatrons_change_of_degrees_gathers_the_batch_over_the_inner_half() -> None:
    """Batch 8 to batch 4 with tensor 2: pairs of neighbours gather; the result is twice the shard."""
    (found,) = reshard((8,), (Shard(0),), (4, 2), (Shard(0), REPLICATE), 50.0)
    assert (found.collective, found.sizes, found.axes, found.num_bytes) == ("all_gather", (4, 2), (1,), 100.0)
    assert found.moves_batch
    assert reshard((4, 2), (Shard(0), REPLICATE), (8,), (Shard(0),), 100.0) == ()


def test_channels_are_joined_from_a_list_where_the_runtime_does_so_and_the_batch_is_not() -> None:
    (found,) = reshard((2, 4), (Shard(0), Shard(1)), (2, 4), (Shard(0), REPLICATE), 25.0, joins=True)
    assert (found.collective, found.axes, found.num_bytes) == ("joined_all_gather", (1,), 100.0)
    (plain,) = reshard((2, 4), (Shard(0), Shard(1)), (2, 4), (Shard(0), REPLICATE), 25.0)
    assert (plain.collective, plain.axes, plain.num_bytes) == ("all_gather", (1,), 100.0)
    (batch,) = reshard((8,), (Shard(0),), (4, 2), (Shard(0), REPLICATE), 50.0, joins=True)
    assert batch.collective == "all_gather"


@given(SIZES, st.data())
def test_a_tensor_ends_with_the_bytes_of_its_layout(sizes: tuple[int, ...], data: st.DataObject) -> None:
    """Following the collectives' own byte counts from source to target ends at the target's local size."""
    have = [data.draw(KEPT | st.just(PARTIAL)) for _ in sizes]
    want = [data.draw(KEPT) for _ in sizes]
    whole = 7.0 * 24**3

    def local(placements: list) -> float:
        return whole / prod(
            size for size, placement in zip(sizes, placements, strict=True) if isinstance(placement, Shard)
        )

    expected = local(have)
    for step in collectives_between(sizes, have, want, local(have)):
        span = prod(step.sizes[axis] for axis in step.axes)
        if step.collective == "all_gather":
            expected = step.num_bytes
        elif step.collective == "reduce_scatter":
            expected = step.num_bytes / span
    if not any(a == REPLICATE and isinstance(b, Shard) for a, b in zip(have, want, strict=True)):
        assert expected == pytest.approx(local(want))


LAYOUTS = st.tuples(SIZES, st.data())


@settings(deadline=None)
@given(SIZES, SIZES, st.integers(36, 40), st.data())
def test_every_receiver_gets_exactly_its_region(
    first: tuple[int, ...], second: tuple[int, ...], samples: int, data: st.DataObject
) -> None:
    sender = regions(first, [data.draw(KEPT) for _ in first], samples)
    receiver = regions(second, [data.draw(KEPT) for _ in second], samples)
    routes = route(dict(enumerate(sender)), dict(enumerate(receiver)))
    for rank, region in enumerate(receiver):
        volume = prod((high - low for _, low, high in region), start=Fraction(1))
        assert sum(share for _, target, share in routes if target == rank) == volume
    assert all(share <= overlap(sender[source], receiver[target]) for source, target, share in routes)


def test_replicas_share_the_sending() -> None:
    """Two tensor-parallel replicas feed two others pairwise; one feeds two if it is alone."""
    pair = dict(enumerate(regions((2,), (REPLICATE,), 4)))
    assert [(a, b) for a, b, _ in route(pair, pair)] == [(0, 0), (1, 1)]
    alone = dict(enumerate(regions((1,), (REPLICATE,), 4)))
    assert [(a, b) for a, b, _ in route(alone, pair)] == [(0, 0), (0, 1)]


def test_holders_of_one_region_share_what_different_receivers_need_of_it() -> None:
    """Two pairs of tensor-parallel replicas feed four slices: each sends one."""
    sender = dict(enumerate(regions((2, 2), (Shard(0), REPLICATE), 4)))
    receiver = dict(enumerate(regions((4,), (Shard(0),), 4)))
    assert [(a, b) for a, b, _ in route(sender, receiver)] == [(0, 0), (1, 1), (2, 2), (3, 3)]


@settings(deadline=None)
@given(SIZES, SIZES, st.integers(36, 40), st.data())
def test_no_holder_sends_more_than_one_piece_beyond_another(
    first: tuple[int, ...], second: tuple[int, ...], samples: int, data: st.DataObject
) -> None:
    sender = dict(enumerate(regions(first, [data.draw(KEPT) for _ in first], samples)))
    receiver = dict(enumerate(regions(second, [data.draw(KEPT) for _ in second], samples)))
    pieces: dict[int, list[Fraction]] = {rank: [] for rank in sender}
    for source, _, share in route(sender, receiver):
        pieces[source].append(share)
    for rank, other in product(sender, sender):
        if sender[rank] == sender[other]:
            assert sum(pieces[rank]) - sum(pieces[other]) <= max(pieces[rank], default=0)


def test_slices_of_a_microbatch_differ_by_one_sample_at_most() -> None:
    """DAPPLE's 15 replicas of 32 samples: two get three, the others two."""
    bounds = replica_bounds(32, 15)
    sizes = [(b - a) * 32 for a, b in pairwise(bounds)]
    assert sizes == [3, 3] + [2] * 13


@given(SIZES)
def test_batch_coordinates_count_replicas_in_mesh_order(sizes: tuple[int, ...]) -> None:
    sharding = tuple(Axis("batch" if axis % 2 == 0 else "column", size) for axis, size in enumerate(sizes))
    found = [batch_coordinate(sharding, local) for local in range(prod(sizes))]
    expected = []
    for coordinates in product(*(range(size) for size in sizes)):
        replica = 0
        for axis, coordinate in enumerate(coordinates):
            if axis % 2 == 0:
                replica = replica * sizes[axis] + coordinate
        expected.append(replica)
    assert found == expected


def _channel(family: str, members: tuple[int, ...], *shares: tuple[str, float], work: float = 1.0) -> Channel:
    return Channel(family, members, family.startswith("send"), (("x", 0.0, work, shares),))


def test_equal_pairs_on_one_nic_are_one_class_whose_share_is_the_sum() -> None:
    channels = [_channel("pairs", (i, i + 4), ("nic0", 1.0), ("nic1", 1.0)) for i in range(4)]
    parts = partition({device: device // 4 for device in range(8)}, channels, merge=True)
    assert parts.members == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert parts.shares == ({"x": {0: 4.0}},)


def test_one_slower_link_separates_its_users_and_their_partners() -> None:
    channels = [_channel("groups", (i, i + 1), work=2.0 if i == 2 else 1.0) for i in range(0, 6, 2)]
    parts = partition(dict.fromkeys(range(6), "stage"), channels, merge=True)
    assert parts.members == ((0, 1, 4, 5), (2, 3))


def test_a_chain_of_sends_keeps_its_ends_apart() -> None:
    channels = [_channel("send", (i, i + 1)) for i in range(4)]
    parts = partition(dict.fromkeys(range(5), "stage"), channels, merge=True)
    assert len(parts.members) == 5


@settings(deadline=None)
@given(st.integers(2, 8), st.data())
def test_classes_are_equitable(count: int, data: st.DataObject) -> None:
    """Members of a class see the same multiset of neighbouring classes, through channels and links alike."""
    roles = {device: data.draw(st.integers(0, 1)) for device in range(count)}
    channels = []
    for family in range(data.draw(st.integers(1, 3))):
        for _ in range(data.draw(st.integers(1, 4))):
            members = tuple(sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=3))))
            links = data.draw(st.sets(st.sampled_from(["a", "b", "c"]), max_size=2))
            channels.append(_channel(f"family{family}", members, *((link, 0.5) for link in sorted(links))))
    parts = partition(roles, channels, merge=True)

    def view(device: int) -> list:
        return sorted(
            (parts.channel_class[number], sorted(parts.device_class[member] for member in channel.members))
            for number, channel in enumerate(channels)
            if device in channel.members
        )

    for members in parts.members:
        assert len({roles[device] for device in members}) == 1
        assert all(view(device) == view(members[0]) for device in members)
    separate = partition(roles, channels, merge=False)
    assert len(separate.members) == count
