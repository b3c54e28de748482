"""Collectives and transfers: closed forms, ring counts, shares, and the measured tables."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datafiles.tables import load_table
from hardware_models.calibration.collective_rows import SIMAI, Predictor, relative_errors, simai_rows
from hardware_models.calibration.fit_collectives import REPORTED_NODES
from hardware_models.cluster import parse_cluster
from hardware_models.collective_table import CollectiveTable
from hardware_models.crowding import CrowdedGroup, together_s
from hardware_models.model import HardwareModel
from hardware_models.topology import pack_rings
from tests.hardware_models.data_folder import data_folder

P3 = HardwareModel(parse_cluster("p3.16xlarge:4x8"))
NIC = P3.cluster.nodes[0].network.nic_bytes_per_s
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@pytest.mark.parametrize(("num_gpus", "rings"), [(2, 1), (3, 2), (4, 4), (5, 0), (6, 2), (7, 4), (8, 6)])
def test_the_cube_mesh_holds_as_many_rings_as_nccl_finds(num_gpus: int, rings: int) -> None:
    assert pack_rings(P3.cluster.nodes[0].mesh, tuple(range(num_gpus))).num_rings == rings


@pytest.mark.parametrize(
    ("num_gpus", "bus"), [(2, 22.55), (3, 45.14), (4, 85.36), (5, 37.17), (6, 45.74), (7, 87.01), (8, 134.51)]
)
def test_large_all_reduces_reach_the_measured_bus_bandwidth(num_gpus: int, bus: float) -> None:
    # vTrain, V100 NVLink, 1 GiB (collectives_measured.csv).
    seconds = P3.collective("all_reduce", 2**30, range(num_gpus)).alone_s
    assert 2 * (num_gpus - 1) / num_gpus * 2**30 / seconds / 1e9 == pytest.approx(bus, rel=0.08)


def test_rings_use_no_link_more_than_it_has() -> None:
    mesh = P3.cluster.nodes[0].mesh
    rings = pack_rings(mesh, tuple(range(8)))
    counts = {(a, b): count for a, b, count in mesh}
    for a, b, used, there in rings.use:
        assert used <= there == counts[min(a, b), max(a, b)]
    assert sum(used for _, _, used, _ in rings.use) == rings.num_rings * 8


def test_a_pair_over_one_nic_moves_the_buffer_once() -> None:
    cost = P3.collective("all_reduce", 1e9, (0, 8))
    assert cost.work_s == pytest.approx(1e9 / NIC)
    assert dict(cost.shares)["node0/nic0/out"] == pytest.approx(1.0)


def test_two_nodes_reduce_in_a_tree_and_four_in_a_ring() -> None:
    fill = P3.cluster.nodes[0].network.tree_fill_bytes
    assert P3.collective("all_reduce", 1e9, range(16)).work_s == pytest.approx((1e9 + fill) / NIC)
    assert P3.collective("all_reduce", 1e9, range(32)).work_s == pytest.approx(2 * 31 / 32 * 1e9 / NIC)
    efficiency = P3.cluster.nodes[0].network.efficiency["all_gather"]
    assert P3.collective("all_gather", 1e9, range(32)).work_s == pytest.approx(31 / 32 * 1e9 / NIC / efficiency)


@pytest.mark.parametrize("devices", [(0, 1), (0, 1, 2, 3), (0, 8), tuple(range(16))])
def test_joining_a_gathered_list_copies_it_three_times(devices: tuple[int, ...]) -> None:
    """Read and written at 0.895 of 900 GB/s: 7.45 ms for a gigabyte."""
    gathered, joined = (P3.collective(kind, 1e9, devices) for kind in ("all_gather", "joined_all_gather"))
    assert joined.alone_s - gathered.alone_s == pytest.approx(6e9 / (0.895 * 900e9))
    assert joined.latency_s == gathered.latency_s
    # The links are idle meanwhile: a smaller share of them over a longer time.
    shares, fewer = dict(gathered.shares), dict(joined.shares)
    assert set(shares) == set(fewer)
    for name, share in shares.items():
        assert fewer[name] * joined.work_s == pytest.approx(share * gathered.work_s)


def test_a_measured_gather_is_joined_too() -> None:
    rows = [("all_gather", 4, size, 1e-4 + size / 5e10) for size in (1e6, 1e9)]
    hardware = HardwareModel(P3.cluster, collective_table=CollectiveTable.from_rows(rows, "made up"))
    for size in (1e6, 5e8, 2e9):
        gathered, joined = (hardware.collective(kind, size, range(4)) for kind in ("all_gather", "joined_all_gather"))
        assert joined.source == gathered.source != "modelled"
        assert joined.alone_s - gathered.alone_s == pytest.approx(6 * size / (0.895 * 900e9))


@pytest.mark.parametrize("stride", [1, 2, 4, 8])
def test_strided_groups_that_run_at_once_load_one_nic_in_equal_parts(stride: int) -> None:
    """``stride`` groups over two nodes: each has a full share, so the engine slows each by their number."""
    hardware = HardwareModel(parse_cluster("p3.16xlarge:2x8"))
    costs = [hardware.collective("all_reduce", 1e9, range(first, 16, stride)) for first in range(stride)]
    load = sum(dict(cost.shares)["node1/nic0/in"] for cost in costs)
    assert load == pytest.approx(stride)
    assert len({cost.work_s for cost in costs}) == 1


def test_a_lone_gpu_behind_pcie_is_no_quicker_than_its_lane() -> None:
    """Galvatron's RTX TITANs over two nodes: 5.1 to 5.3 MiB/ms for a pair alone, 9.7 GB/s for eight at once."""
    titans = HardwareModel(parse_cluster("titan-rtx-pcie:2x8"))
    alone = titans.collective("all_reduce", 2**30, (0, 8))
    assert 2**30 / alone.work_s == pytest.approx(5.2 * 2**20 * 1e3, rel=0.08)
    pairs = CrowdedGroup((0, 8), tuple((slot, slot + 8) for slot in range(1, 8)))
    together_s = titans.crowded_collective_s("all_reduce", 2**30, pairs)
    assert 8 * 2**30 / together_s == pytest.approx(9.7e9, rel=0.02)


def test_what_leaves_a_node_by_one_pcie_lane_shares_it() -> None:
    """Alone a transfer takes what the network gives; with another on its lane, or a collective, half of the lane."""
    titans = HardwareModel(parse_cluster("titan-rtx-pcie:2x8"))
    alone, *others = (titans.transfer(2**30, slot, 8) for slot in range(4))
    assert alone.work_s == pytest.approx(2**30 / (0.41 * 12.5e9))
    assert together_s([alone, *others]) - alone.latency_s == pytest.approx(4 * alone.work_s, rel=0.01)
    ring = titans.collective("all_reduce", 2**30, (8, 12))
    assert dict(alone.shares)["node1/lane/0/in"] + dict(ring.shares)["node1/lane/0/in"] > 1.3
    rails = [titans.transfer(2**30, slot, 8 + slot) for slot in range(2)]
    assert together_s(rails) < 1.06 * alone.alone_s, "lanes of their own, and together all of the card"


def test_eight_nics_serve_eight_rails_apart() -> None:
    hardware = HardwareModel(parse_cluster("a100-80g-dgx:2x8"))
    resources = [{name for name, _ in hardware.collective("all_reduce", 1e9, (g, g + 8)).shares} for g in range(8)]
    assert len(set.union(*resources)) == sum(len(names) for names in resources) == 32


def test_disjoint_pairs_share_nothing_inside_a_node() -> None:
    first = {name for name, _ in P3.collective("all_reduce", 1e8, (0, 1)).shares}
    second = {name for name, _ in P3.collective("all_reduce", 1e8, (2, 3)).shares}
    assert not first & second


def test_a_double_link_carries_twice_a_single_one() -> None:
    single, double = P3.transfer(1e9, 0, 1), P3.transfer(1e9, 0, 3)
    assert single.work_s == pytest.approx(2 * double.work_s)
    assert P3.transfer(1e9, 0, 7).work_s > single.work_s  # no link: through the host


def test_an_all_to_all_takes_one_link_of_a_pair_and_the_host_where_there_is_none() -> None:
    """Of eight GPUs each has four linked and three other partners; S/8 of S bytes goes to each."""
    links = P3.cluster.nodes[0].links
    link_rate = links.link_bytes_per_s * links.efficiency["all_to_all"]
    pairs = [P3.collective("all_to_all", 8e9, pair) for pair in ((0, 1), (0, 3))]
    assert [cost.work_s for cost in pairs] == pytest.approx([4e9 / link_rate] * 2)
    assert dict(pairs[0].shares)["node0/nvlink/0-1"] == 1
    assert dict(pairs[1].shares)["node0/nvlink/0-3"] == 0.5
    eight = P3.collective("all_to_all", 8e9, range(8))
    assert eight.work_s == pytest.approx(8 * 3 * 1e9 / links.bridge_bytes_per_s)
    shares = dict(eight.shares)
    assert shares["node0/bridge"] == pytest.approx(1)
    assert shares["node0/pcie/5/out"] == pytest.approx(3e9 / links.fallback_bytes_per_s / eight.work_s)
    quad = P3.collective("all_to_all", 8e9, range(4))
    assert quad.work_s == pytest.approx(2e9 / link_rate)
    assert "node0/bridge" not in dict(quad.shares)


@pytest.mark.parametrize(("kind", "local"), [("all_gather", 560e9), ("reduce_scatter", 85.2e9), ("broadcast", None)])
def test_a_group_whose_ring_does_not_close_goes_by_the_host(kind: str, local: float | None) -> None:
    """Five GPUs of the cube mesh: 4/5 of the result over every lane (all of a broadcast), and a rank's own fifth."""
    links = P3.cluster.nodes[0].links
    cost = P3.collective(kind, 1e9, range(5))
    ring_s = (0.8e9 if local else 1e9) / 9e9 / links.efficiency[kind]
    assert cost.work_s == pytest.approx(ring_s + (0.2e9 / local if local else 0.0))
    assert {name.split("/")[1] for name, _ in cost.shares} == {"pcie"}


def test_nothing_to_move_costs_nothing() -> None:
    assert P3.collective("all_reduce", 1e9, (3,)).alone_s == 0
    assert P3.collective("all_reduce", 0, (3, 4)).alone_s == 0
    assert P3.transfer(1e6, 5, 5).alone_s == 0


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    sizes=st.tuples(st.floats(1, 1e10), st.floats(1, 1e10)),
    group=st.sets(st.integers(0, 31), min_size=2, max_size=12),
)
def test_collectives_grow_with_bytes_and_shares_stay_fractions(
    kind: str, sizes: tuple[float, float], group: set[int]
) -> None:
    small, large = (P3.collective(kind, size, sorted(group)) for size in sorted(sizes))
    assert 0 < small.alone_s <= large.alone_s
    assert small.shares
    assert all(0 < share <= 1 for cost in (small, large) for _, share in cost.shares)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_reduce_sum", 1e6, (0, 1)), "one of all_reduce"),
        (("all_reduce", -1.0, (0, 1)), "0 bytes or more"),
        (("all_reduce", float("nan"), (0, 1)), "finite"),
        (("all_reduce", 1e6, (0, 0)), "different devices"),
        (("all_reduce", 1e6, (0, 32)), r"0\.\.31"),
    ],
)
def test_a_bad_collective_is_refused(arguments: tuple[str, float, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        P3.collective(*arguments)


def test_three_thousand_gpus_are_priced_without_tables_of_pairs() -> None:
    hardware = HardwareModel(parse_cluster("a100-80g-dgx:384x8"))
    cost = hardware.collective("all_reduce", 1e9, range(3072))
    assert cost.work_s == pytest.approx(2 * 3071 / 3072 * 1e9 / (8 * 25e9 * 0.85), rel=0.01)


def test_a_ring_over_many_nodes_of_h100_passes_every_gpu() -> None:
    """All that a small gather over 64 nodes has above one over 32: their rings' steps between nodes and inside them."""
    small, large = (
        HardwareModel(parse_cluster(f"h100-dgx:{nodes}x8")).collective("all_gather", 1.0, range(8 * nodes)).alone_s
        for nodes in (32, 64)
    )
    node = parse_cluster("h100-dgx:1x8").nodes[0]
    assert node.links.step_over_nodes_s is not None
    step_s = min(protocol.step_s for protocol in node.network.protocols)
    assert large - small == pytest.approx(32 * (step_s + 7 * node.links.step_over_nodes_s), rel=0.01)


def test_measured_gathers_over_many_nodes_of_h100_are_met() -> None:
    """SimAI's rows that no constant was fitted on; 41 % off if steps inside nodes are free."""
    rows = simai_rows(data_folder("gpu_efficiency") / SIMAI, "h100-dgx", REPORTED_NODES)
    predictor = Predictor({row.cluster: parse_cluster(row.cluster) for row in rows}, 0.0)
    errors = relative_errors(predictor, rows)
    assert len(errors) == 21
    assert sum(map(abs, errors)) / len(errors) < 0.17


def test_alpas_measured_collectives_are_met_at_large_sizes() -> None:
    folder = data_folder("alpa_v100")
    names = {"all-reduce": "all_reduce", "all-gather": "all_gather", "reduce-scatter": "reduce_scatter"}
    errors = []
    table = load_table(
        folder / "collectives_p3_16xlarge_osdi22.csv",
        floats=("seconds",),
        integers=("group_size", "stride", "num_groups", "nodes_per_group", "bytes"),
    )
    for row in table:
        if row["collective"] not in names or row["bytes"] != 2**30 or row["dtype"] != "f16":
            continue
        nodes, gpus = map(int, row["mesh"].split("x"))
        hardware = HardwareModel(parse_cluster(f"p3.16xlarge:{nodes}x{gpus}"))
        group = [row["stride"] * rank for rank in range(row["group_size"])]
        cost = hardware.collective(names[row["collective"]], row["bytes"], group)
        # All groups ran at once: those over several nodes share the NIC.
        together = row["stride"] if row["nodes_per_group"] > 1 else 1
        errors.append(abs((cost.latency_s + cost.work_s * together) / row["seconds"] - 1))
    assert len(errors) > 50
    assert sorted(errors)[len(errors) // 2] < 0.10


def test_alpas_measured_all_to_alls_inside_a_node_are_met_at_large_sizes() -> None:
    """Odd powers of two a rank, which no constant was fitted on; groups that run at once share the host's memory."""
    folder = data_folder("alpa_v100")
    table = load_table(
        folder / "collectives_p3_16xlarge_osdi22.csv",
        floats=("seconds",),
        integers=("group_size", "stride", "num_groups", "nodes_per_group", "bytes"),
    )
    errors = []
    for row in table:
        exponent = (row["bytes"] // row["group_size"]).bit_length() - 1
        asked = row["collective"] == "all-to-all" and row["dtype"] == "f16" and exponent % 2 and exponent >= 26
        if not asked or row["nodes_per_group"] != 1 or not row["mesh"].startswith("1x"):
            continue
        group = range(0, row["group_size"] * row["stride"], row["stride"])
        cost = P3.collective("all_to_all", row["bytes"] / row["group_size"], group)
        together = row["num_groups"] if "node0/bridge" in dict(cost.shares) else 1
        errors.append((cost.latency_s + cost.work_s * together) / row["seconds"] - 1)
    assert len(errors) >= 8 and max(map(abs, errors)) < 0.15


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_steps_over_unlike_nodes_are_those_of_each_node_in_either_order(order: tuple[int, int]) -> None:
    parts = ("v100-32g-dgx1:1x8", "a100-80g-dgx-100g:1x8")
    hardware = HardwareModel(parse_cluster("+".join(parts[number] for number in order)))
    # A tree of two nodes (link_types.yaml): a hop of the network and down the chain of eight V100, up and down.
    small = hardware.collective("all_reduce", 4.0, range(16))
    assert small.latency_s == pytest.approx(30e-6 + 2 * (12e-6 + 7 * 0.85e-6), rel=1e-9)
    # A ring of 16: two hops over the network, seven inside either node, of which a part needs all but one of 15.
    large = hardware.collective("all_gather", 1e9, range(16))
    assert large.latency_s == pytest.approx(45e-6 + 2 * 20e-6 + 7 * 4.80e-6 + 6 * 1.82e-6, rel=1e-9)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_network_of_slower_steps_sets_the_pace_but_not_that_inside_the_other_node(order: tuple[int, int]) -> None:
    parts = ("g4dn.12xlarge:1x4", "v100-32g-dgx1:1x8")
    hardware = HardwareModel(parse_cluster("+".join(parts[number] for number in order)))
    small = hardware.collective("all_gather", 4.0, range(12))
    # Ethernet between; T4s launch in 600 us and take three steps of 10 us, V100s seven, less one of these.
    assert small.latency_s == pytest.approx(600e-6 + 2 * 152e-6 + 3 * 10e-6 + 6 * 0.85e-6, rel=1e-9)


@pytest.mark.parametrize("preset", ["a100-80g-dgx", "h100-dgx", "dgx2-v100", "p3.16xlarge", "g4dn.12xlarge"])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_collective_over_two_full_nodes_is_never_quicker_than_over_one(preset: str, kind: str) -> None:
    one, two = (HardwareModel(parse_cluster(f"{preset}:{nodes}x4")) for nodes in (1, 2))
    for exponent in range(10, 31):
        inside = one.collective(kind, 2**exponent, range(4))
        across = two.collective(kind, 2**exponent, range(8))
        assert across.latency_s + across.work_s >= inside.latency_s + inside.work_s, 2**exponent


def test_the_quick_protocol_has_nvlinks_own_share_inside_nodes() -> None:
    hardware = HardwareModel(parse_cluster("a100-80g-dgx:2x8"))
    small, larger = (hardware.collective("all_reduce", size, range(16)) for size in (2**17, 2**18))
    # Eight cards at 0.4 of 21.25 GB/s move S; NVLink at 0.0937 of 227.8 GB/s moves 2 * 15/16 S, and that is slower.
    assert larger.work_s - small.work_s == pytest.approx(2**17 * 2 * 15 / 16 / (0.0937 * 227.8e9), rel=1e-6)
    # The ports are in use for as long as their share of that time.
    shares = dict(larger.shares)
    assert shares["node0/nvswitch/0/out"] == pytest.approx(0.0937, rel=1e-6)
    assert shares["node0/nic0/out"] == pytest.approx((1 / (8 * 21.25e9)) / (2 * 15 / 16 / (0.0937 * 227.8e9)), rel=1e-6)
