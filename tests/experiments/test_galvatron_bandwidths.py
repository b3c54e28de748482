"""Galvatron's bandwidths as measured messages: which groups ran at once where, and how long they took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.calibrate.galvatron import AVERAGE_BYTES, _groups, _Parts, _sample, galvatron
from hardware_models.group_shapes import GroupShape
from hardware_models.importers.galvatron import Bandwidth, GalvatronFile

RATE = 100e9


def reduced(size: int, *, stages: int = 1, consecutive: bool = True, at_once: bool = True) -> Bandwidth:
    return Bandwidth("all_reduce", stages, size, consecutive, RATE, at_once)


@pytest.mark.parametrize(
    ("bandwidth", "shape"),
    [
        (reduced(16), GroupShape(16, 2, 1, 1)),
        # Of sixteen ranks neighbours are four groups, two on each node; those four apart are four, all on both.
        (reduced(4), GroupShape(4, 1, 1, 2)),
        (reduced(4, consecutive=False), GroupShape(4, 2, 4, 4)),
        (reduced(4, consecutive=False, at_once=False), GroupShape(4, 2, 4, 1)),
        # Eight pairs across the nodes, one rank on each.
        (reduced(2, consecutive=False), GroupShape(2, 2, None, 8)),
        # Two stages of a node each: what is spread over a stage stays on its node.
        (reduced(4, stages=2, consecutive=False), GroupShape(4, 1, 2, 2)),
        # Four stages of half a node each.
        (reduced(2, stages=4, consecutive=False), GroupShape(2, 1, 2, 4)),
    ],
)
def test_groups_lie_on_two_nodes_of_eight_as_galvatron_places_them(bandwidth: Bandwidth, shape: GroupShape) -> None:
    """Rings move 2 (n - 1) / n of the message, and bandwidths are of that traffic (nccl-tests' bus bandwidth)."""
    n = bandwidth.size
    assert _sample(bandwidth, 16, 8) == ("all_reduce", shape, AVERAGE_BYTES, pytest.approx(
        2 * (n - 1) / n * 64 * 2**20 / RATE
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("degree", "num_devices", "kind"),
    [
        (2, 16, "transfer_inter_node"),  # stages of a node each
        (2, 8, "transfer_intra_node"),
        (8, 8, "transfer_intra_node"),
        (2, 32, "transfer_inter_node"),
    ],
)
def test_a_transfer_is_one_message_inside_a_node_or_between_two(degree: int, num_devices: int, kind: str) -> None:
    found = _sample(Bandwidth("transfer", 1, degree, True, RATE, False), num_devices, 8)
    nodes = 2 if kind == "transfer_inter_node" else 1
    assert found == (kind, GroupShape(2, nodes), AVERAGE_BYTES, pytest.approx(64 * 2**20 / RATE))


def test_transfers_of_which_only_some_cross_nodes_are_left_out() -> None:
    """Four stages of half a node: every second boundary is inside one."""
    assert _sample(Bandwidth("transfer", 1, 4, True, RATE, False), 16, 8) is None


def test_groups_are_neighbours_or_as_far_apart_as_their_part_goes() -> None:
    assert _groups(8, 2, True) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert _groups(8, 2, False) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert _groups(8, 4, False) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_cluster_has_as_many_gpus_as_stages_times_their_groups() -> None:
    file = GalvatronFile(bandwidths=(reduced(2, stages=4), reduced(4)))
    assert _Parts(((Path("x"), file),), "titan-rtx-pcie").num_devices == 8


def test_both_sides_of_an_overlap_have_galvatrons_one_coefficient(tmp_path: Path) -> None:
    """The mean of several runs (``overlap_coe``)."""
    files = [tmp_path / f"{number}.json" for number in range(2)]
    for file, coefficient in zip(files, (1.2, 1.4), strict=True):
        file.write_text(json.dumps({"overlap_coe": coefficient}))
    outcome = galvatron(files, preset="titan-rtx-pcie", model=None, runtime="galvatron-v1")
    found = outcome.calibration.gpus["titan-rtx-24gb"]
    assert found.overlap_slowdown_computation == pytest.approx(1.3)
    assert found.overlap_slowdown_communication == pytest.approx(1.3)
