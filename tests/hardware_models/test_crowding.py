"""Groups and transfers that run at once: by hand, and against what runs alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hardware_models.cluster import parse_cluster
from hardware_models.collective_table import CollectiveTable
from hardware_models.communication import Communication
from hardware_models.crowding import CrowdedGroup, together_s, unlike_groups
from hardware_models.group_shapes import GroupShape, full_nodes, groups_at_once
from hardware_models.links import load_network
from hardware_models.model import HardwareModel

STRIDED = [(rank, rank + 4) for rank in range(4)]
"""Data-parallel pairs over two nodes of four."""

NETWORK = load_network("ethernet-10g")
STEPS_S = {protocol.name: protocol.launch_s + 2 * protocol.step_s for protocol in NETWORK.protocols}
"""Latency of an all-reduce of a pair over two nodes: up and down once."""


def crowded(hardware: HardwareModel, groups: list[tuple[int, ...]]) -> list[CrowdedGroup]:
    return list(unlike_groups(hardware.cluster, groups))


def test_four_pairs_over_one_card_send_four_buffers_through_it() -> None:
    hardware = HardwareModel.from_name("p3.8xlarge:2x4")
    expected_s = STEPS_S["simple"] + 4 * 1e8 / NETWORK.nic_bytes_per_s
    for group in crowded(hardware, STRIDED):
        assert len(group.beside) == 3
        assert hardware.crowded_collective_s("all_reduce", 1e8, group) == pytest.approx(expected_s, rel=1e-12)


def test_a_protocol_that_leaves_bandwidth_to_others_is_slowed_by_less() -> None:
    hardware = HardwareModel.from_name("p3.8xlarge:2x4")
    low, rate = NETWORK.protocols[0], NETWORK.nic_bytes_per_s
    assert (low.name, low.bandwidth_fraction) == ("low_latency", 0.254)
    pairs = crowded(hardware, STRIDED[:3])[0], crowded(hardware, STRIDED)[0]
    seconds = [hardware.crowded_collective_s("all_reduce", 1e3, pair) for pair in pairs]
    assert seconds[0] == hardware.collective("all_reduce", 1e3, pairs[0].members).alone_s, "3 * 0.254 < 1"
    assert seconds[1] == pytest.approx(STEPS_S["low_latency"] + 4 * 1e3 / rate, rel=1e-12)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("num_bytes", [1e3, 1e6, 1e9])
@pytest.mark.parametrize(
    ("cluster", "groups"),
    [
        ("p3.8xlarge:2x4", [(0, 1, 2, 3, 4, 5, 6, 7)]),  # nobody beside it
        ("a100-80g-dgx:2x8", [(rank, rank + 8) for rank in range(8)]),  # a card per GPU
        ("v100-32g-dgx1:1x8", [(0, 3), (1, 2), (4, 7), (5, 6)]),  # links of their own
        ("titan-rtx-pcie:1x8", [(0, 1), (2, 3), (4, 5), (6, 7)]),  # measured: groups do not slow each other
    ],
)
def test_groups_that_share_nothing_overfull_take_what_they_take_alone(cluster, groups, kind, num_bytes) -> None:
    hardware = HardwareModel.from_name(cluster)
    for group in crowded(hardware, groups):
        alone_s = hardware.collective(kind, num_bytes, group.members).alone_s
        assert hardware.crowded_collective_s(kind, num_bytes, group) == alone_s


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_rings_of_two_on_a_node_that_share_a_card_take_it_in_turn(kind: str) -> None:
    """Each sends and receives 3/4 of the buffer through it, whatever goes on inside the nodes."""
    hardware = HardwareModel.from_name("p3.8xlarge:2x4")
    groups = [(0, 2, 4, 6), (1, 3, 5, 7)]
    latency_s = hardware.collective(kind, 1e9, groups[0]).latency_s
    for group in crowded(hardware, groups):
        seconds = hardware.crowded_collective_s(kind, 1e9, group)
        assert seconds == pytest.approx(latency_s + 2 * 0.75e9 / NETWORK.nic_bytes_per_s, rel=1e-12)


@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        (GroupShape(2, 1, 2, groups_per_node=9), [(0, 2), (1, 3), (4, 6), (5, 7)]),
        (GroupShape(3, 1, 2, groups_per_node=9), [(0, 2, 4), (1, 3, 5)]),  # GPUs 6 and 7 have no third
        (GroupShape(3, 1, 1, groups_per_node=9), [(0, 1, 2), (3, 4, 5)]),
        (GroupShape(4, 2, 4, groups_per_node=2), [(0, 4, 8, 12), (1, 5, 9, 13)]),
        (GroupShape(2, 2, None, groups_per_node=3), [(0, 8), (1, 9), (2, 10)]),
    ],
)
def test_groups_of_a_shape_fill_nodes_without_a_gpu_in_two(shape: GroupShape, groups: list[tuple[int, ...]]) -> None:
    whole = full_nodes(parse_cluster("v100-32g-dgx1:2x4"))
    assert groups_at_once(whole, range(shape.num_nodes), shape) == groups


def test_pairs_below_one_bridge_share_it() -> None:
    hardware = HardwareModel.from_name("titan-rtx-pcie:1x8")
    (node,) = hardware.cluster.nodes
    links = node.links.model_copy(update={"bridge_bytes_per_s": 10e9})
    hardware = replace(hardware, cluster=replace(hardware.cluster, nodes=(replace(node, links=links),)))
    (group, *others) = crowded(hardware, [(0, 1), (2, 3), (4, 5), (6, 7)])
    latency_s = links.protocols[0].launch_s + 2 * links.protocols[0].step_s
    expected_s = latency_s + 4 * 2 * 1e8 / 10e9  # A pair sends the buffer over both of its lanes.
    assert hardware.crowded_collective_s("all_reduce", 1e8, group) == pytest.approx(expected_s, rel=1e-12)
    assert len(others) == 3, "they have other lanes"


def test_what_was_measured_with_all_groups_at_once_is_what_they_take_at_once() -> None:
    shape = GroupShape(2, 2, groups_per_node=4)
    modelled = HardwareModel.from_name("p3.8xlarge:2x4")
    together, alone = (
        replace(modelled, collective_table=CollectiveTable.from_rows([("all_reduce", each, 1e8, 0.5)], "made up"))
        for each in (shape, replace(shape, groups_per_node=1))
    )
    (group, *_) = crowded(modelled, STRIDED)
    assert together.crowded_collective_s("all_reduce", 1e8, group) == pytest.approx(0.5, rel=1e-12)
    latency_s = STEPS_S["simple"]
    expected_s = latency_s + 4 * (0.5 - latency_s)
    assert alone.crowded_collective_s("all_reduce", 1e8, group) == pytest.approx(expected_s, rel=1e-12)


def test_groups_stand_alike_where_they_and_those_beside_them_do() -> None:
    hardware = HardwareModel.from_name("p3.8xlarge:6x4")
    pairs = [(0, 4), (1, 5), (8, 12), (9, 13), (16, 20)]
    found = crowded(hardware, pairs)
    assert [(group.members, group.beside) for group in found] == [
        ((0, 4), ((1, 5),)),  # as (8, 12)
        ((1, 5), ((0, 4),)),
        ((16, 20), ()),
    ]
    alike = HardwareModel.from_name("a100-80g-dgx:128x8").cluster
    strided = [tuple(range(rank, 1024, 8)) for rank in range(8)]
    assert [len(group.beside) for group in unlike_groups(alike, strided)] == [7] * 8
    assert len(unlike_groups(alike, [tuple(range(first, first + 8)) for first in range(0, 1024, 8)])) == 1


def test_what_runs_together_lasts_as_long_as_its_fullest_resource_needs() -> None:
    long, short = (Communication(0.5, seconds, (("nic", 0.75), ("lane", 0.1))) for seconds in (4.0, 1.0))
    assert together_s([long, short]) == 4.5, "they need 3.75 s of the card"
    assert together_s([long, long, short]) == 0.5 + 0.75 * 9
    elsewhere = Communication(0.5, 4.0, (("other nic", 1.0),))
    assert together_s([long, elsewhere]) == elsewhere.alone_s


@pytest.mark.parametrize(
    ("size", "stride", "measured", "within"),
    [
        (16, 1, 4.6647, 0.05),
        (8, 1, 4.6186, 0.05),
        (4, 1, 4.4911, 0.05),
        (2, 1, 3.6744, 0.05),
        (2, 8, 1.1608, 0.05),
        (4, 4, 1.978, 0.05),  # a tree would be 76 % too quick, a card that is merely shared 17
        (8, 2, 3.3433, 0.05),  # the two rings would just fill the card, and it was measured to be slower by a third
    ],
)
def test_all_reduces_at_once_on_two_titan_boxes_take_what_was_measured(
    size: int, stride: int, measured: float, within: float
) -> None:
    """Bus bandwidth in MiB/ms, all groups of a shape at once. Source: Galvatron's coefficients of sixteen GPUs."""
    hardware = HardwareModel.from_name("titan-rtx-pcie:2x8")
    starts = range(0, 16, size) if stride == 1 else range(stride)
    groups = [tuple(range(start, start + size * stride, stride)) for start in starts]
    num_bytes = 64 * 2**20
    seconds = max(hardware.crowded_collective_s("all_reduce", num_bytes, group) for group in crowded(hardware, groups))
    assert 2 * (size - 1) / size * 64 / (1e3 * seconds) == pytest.approx(measured, rel=within)
