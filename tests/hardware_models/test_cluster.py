"""Clusters: strings, presets, files, device numbering."""

from __future__ import annotations

from pathlib import Path

import pytest

from datafiles.writer import dump_yaml
from hardware_models.cluster import cluster_description, cluster_presets, parse_cluster
from hardware_models.gpus import gpu_names, load_curves, load_gpu
from hardware_models.links import COLLECTIVES, LinkType, load_link, load_network
from hardware_models.model import HardwareModel
from hardware_models.topology import link_counts

NODE = {
    "description": "two T4",
    "gpu": "t4-16gb",
    "gpus_per_node": 2,
    "links": "pcie3-t4",
    "network": "ethernet-50g",
    "nics_per_node": 1,
    "source": "test",
}


@pytest.mark.parametrize("preset", cluster_presets())
def test_every_preset_loads_and_names_its_gpus(preset: str) -> None:
    cluster = parse_cluster(f"{preset}:2x1")
    assert cluster.num_devices == 2
    assert cluster.memory_bytes(0) > 2**30
    assert cluster_description(preset)


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_type_has_curves_for_each_dtype_it_computes_in(name: str) -> None:
    gpu = load_gpu(name)
    assert set(gpu.peak_flop_per_s) <= set(load_curves(gpu.curves).matmul)


def test_devices_are_numbered_node_by_node() -> None:
    cluster = parse_cluster("v100-32g-dgx1:4x8")
    assert cluster.num_devices == 32
    assert [cluster.node_of(device) for device in (0, 7, 8, 31)] == [0, 0, 1, 3]
    assert cluster.slot_of(17) == 1


def test_a_mixed_cluster_has_a_gpu_type_per_node() -> None:
    cluster = parse_cluster("p3.8xlarge:3x4+g4dn.12xlarge:1x4")
    assert cluster.gpu_types == ("v100-sxm2-16gb", "t4-16gb")
    assert cluster.gpu_type(11) == "v100-sxm2-16gb"
    assert cluster.gpu_type(12) == "t4-16gb"


@pytest.mark.parametrize(
    ("text", "num_devices", "gpu_type", "starts"),
    [
        ("p3.8xlarge:3x4+g4dn.12xlarge:1x4", 4, None, (0, 12)),
        ("p3.8xlarge:3x4+g4dn.12xlarge:1x4", 8, None, (0, 8)),  # not 4, where no group of eight begins
        ("p3.8xlarge:3x4+g4dn.12xlarge:1x4", 4, "t4-16gb", (12,)),
        ("p3.8xlarge:3x4+g4dn.12xlarge:1x4", 8, "t4-16gb", (8,)),  # none begins on a T4: the last eight
        ("p3.8xlarge:1x4+g4dn.12xlarge:2x4", 8, "t4-16gb", (4,)),  # one does, and none is aligned
        ("p3.8xlarge:1x4+g4dn.12xlarge:1x4", 5, "t4-16gb", (3,)),  # a fifth is wanted beside all four T4
        ("p3.16xlarge:1x8+g4dn.12xlarge:2x4", 4, None, (0, 8)),
        ("p3.16xlarge:1x8+g4dn.12xlarge:2x4", 8, None, (0, 8)),
        ("p3.8xlarge:4x4", 8, None, (0,)),
        ("p3.8xlarge:1x4+g4dn.12xlarge:1x4", 8, None, (0,)),
    ],
)
def test_groups_of_a_mixed_cluster_begin_where_unlike_nodes_are_met(
    text: str, num_devices: int, gpu_type: str | None, starts: tuple[int, ...]
) -> None:
    assert parse_cluster(text).unlike_starts(num_devices, gpu_type) == starts


def test_every_gpu_of_the_cube_mesh_has_six_links() -> None:
    for preset in ("v100-32g-dgx1", "v100-32g-ndv2", "p3.16xlarge"):
        node = parse_cluster(f"{preset}:1x8").nodes[0]
        counts = link_counts(node.mesh, tuple(range(8)))
        for gpu in range(8):
            assert sum(count for pair, count in counts.items() if gpu in pair) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v100-32g-dgx:1x8", "v100-32g-dgx1"),
        ("v100-32g-dgx1:1x9", "1..8 GPUs"),
        ("v100-32g-dgx1", "preset:NODESxGPUS.*for example v100-32g-dgx1:4x8$"),
        ("p3.8xlarge:four", "for example p3.8xlarge:4x4$"),
        ("mycluster.yaml:4", "got 'mycluster.yaml:4'; for example mycluster.yaml:2x1 for two of "),
        ("mycluster.yaml", "got 'mycluster.yaml'; for example mycluster.yaml:2x1 for two of "),
        ("v100-32g-dgx1:0x8", "at least one node"),
        ("v100-32g-dgx1:999999x8", "at most 1,000,000 GPUs"),
        ("v100-32g-dgx1:100000000x8", "at most 1,000,000 GPUs"),
        ("v100-32g-dgx1:4x8+", "preset:NODESxGPUS"),
    ],
)
def test_a_bad_cluster_string_says_what_to_do(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_cluster(text)


def test_a_cluster_file_of_the_same_schema_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(dump_yaml(NODE))
    assert parse_cluster(f"{path}:3x2").num_devices == 6


@pytest.mark.parametrize(("num_nics", "times"), [(1, 1), (2, 1), (4, 2), (6, 3)])
def test_a_gpu_uses_its_share_of_the_cards_where_there_are_more_than_gpus(
    tmp_path: Path, num_nics: int, times: int
) -> None:
    path = tmp_path / "mine.yaml"
    # Behind a switch: a lane of PCIe would be slower than the cards.
    path.write_text(dump_yaml({**NODE, "nics_per_node": num_nics, "links": "nvswitch-a100"}))
    hardware, network = HardwareModel.from_name(f"{path}:2x2"), load_network("ethernet-50g")
    # Two ranks, a GPU on each node: half the result leaves each, over all cards of the GPU.
    gathered = hardware.collective("all_gather", 1e9, (0, 2))
    assert gathered.work_s == pytest.approx(0.5e9 / (times * network.nic_bytes_per_s) / 0.97, rel=1e-9)
    sent = hardware.transfer(1e9, 0, 2)
    assert sent.work_s == pytest.approx(1e9 / (times * 0.60 * 6.25e9), rel=1e-9)
    for cost, share in ((gathered, 0.97), (sent, 0.60 / 0.64)):
        used = {name: fraction for name, fraction in cost.shares if name.startswith("node0/nic") and "out" in name}
        assert used == pytest.approx({f"node0/nic{nic}/out": share for nic in range(times)}, rel=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus_per_node": -1}, "gpus_per_node"),
        ({"nics": 2}, "nics: unknown key"),
        ({"gpu": "t5-16gb"}, "t4-16gb"),
        ({"links": "nvlink2-v100"}, "mesh must list edges"),
        ({"links": "nvlink2-v100", "mesh": [[0, 5, 1]]}, "a < b < 2"),
    ],
)
def test_a_bad_cluster_file_names_the_field(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(dump_yaml({**NODE, **change}))
    with pytest.raises(ValueError, match=message):
        parse_cluster(f"{path}:1x1")


def test_a_link_may_have_a_local_rate_of_each_collective_and_of_nothing_else() -> None:
    link = load_link("nvswitch-a100").model_dump()
    rates = dict.fromkeys(COLLECTIVES, 1e9)
    assert LinkType.model_validate({**link, "local_bytes_per_s": rates}).local_bytes_per_s == rates
    with pytest.raises(ValueError, match="must have keys of all_reduce"):
        LinkType.model_validate({**link, "local_bytes_per_s": {**rates, "send": 1e9}})


def test_a_nan_in_a_cluster_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(dump_yaml(NODE).replace("nics_per_node: 1", "nics_per_node: .nan"))
    with pytest.raises(ValueError, match=r"(?i)nan"):
        parse_cluster(f"{path}:1x1")
