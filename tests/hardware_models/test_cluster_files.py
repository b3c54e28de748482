"""Links measured on a cluster file are those of what the file says, wherever it lies and whatever its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from datafiles.writer import dump_yaml
from hardware_models.calibrated import Calibration
from hardware_models.calibration_file import load_calibration, save_calibration
from hardware_models.cluster import Cluster, measured_name, parse_cluster
from hardware_models.collective_table import CollectiveTable
from hardware_models.machine_factors import with_factors
from hardware_models.model import HardwareModel

NODE: Mapping[str, object] = {
    "description": "8 A100 on NVSwitch",
    "gpu": "a100-sxm4-80gb",
    "gpus_per_node": 8,
    "links": "nvswitch-a100",
    "network": "ib-100g",
    "nics_per_node": 2,
    "source": "the order form",
}
BYTES = 1e8
HALF = {"links": 0.5, "network": 0.5}
TABLE = CollectiveTable.from_rows([("all_reduce", 8, BYTES, 0.25)], "test")


def node(path: Path, **changed: object) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(dump_yaml({**NODE, **changed}))
    return path


def all_reduce_s(hardware: HardwareModel) -> float:
    return hardware.collective("all_reduce", BYTES, range(16)).alone_s


def shipped_s(cluster: Cluster) -> float:
    return all_reduce_s(HardwareModel(cluster))


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return node(tmp_path / "one" / "ours.yaml")


@pytest.fixture
def measured(ours: Path) -> Calibration:
    """Return constants of the file's GPU, links and network, as a file of them is read."""
    found = with_factors(parse_cluster(f"{ours}:1x4"), {"products": 0.8, **HALF}, "test")
    save_calibration(found, ours.with_name("c.json"))
    return load_calibration(ours.with_name("c.json"))


def test_one_file_is_one_whatever_its_path_shape_name_and_formatting(
    ours: Path, measured: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = all_reduce_s(measured.hardware(parse_cluster(f"{ours}:2x8")))
    assert found > 1.5 * shipped_s(parse_cluster(f"{ours}:2x8"))
    monkeypatch.chdir(ours.parent)
    copy = node(ours.parent.parent / "two" / "copy.yaml")
    spaced = copy.with_name("spaced.yml")
    spaced.write_text("# a comment\n\n" + "\n".join(reversed(copy.read_text().splitlines())).replace(": ", ":   "))
    as_json = copy.with_name("ours.json")
    as_json.write_text(json.dumps({**NODE, "source": "an invoice", "mesh": []}))
    for name in ("ours.yaml", "./ours.yaml", "../one/ours.yaml", copy, "../two/copy.yaml", spaced, as_json):
        assert all_reduce_s(measured.hardware(parse_cluster(f"{name}:2x8"))) == found, name


def test_a_calibration_of_a_cluster_file_keeps_its_name_for_the_reader(ours: Path, measured: Calibration) -> None:
    name, _, digest = measured_name(str(ours)).partition("#")
    assert name == "ours.yaml" and len(digest) == 12
    assert list(measured.links) == list(measured.networks) == [f"ours.yaml#{digest}"]
    assert f"ours.yaml#{digest}" in measured.about
    assert digest == "4747e6bd8bfa", "a digest that changes makes calibrations of cluster files useless"
    assert measured_name("a100-80g-dgx") == parse_cluster("a100-80g-dgx:2x4").nodes[0].preset == "a100-80g-dgx"


@pytest.mark.parametrize(
    "changed",
    [{"description": "8 A100 of another rack"}, {"network": "ib-200g"}, {"nics_per_node": 4}, {"links": "pcie4-3090"}],
)
def test_another_file_of_the_name_and_an_edited_file_are_told(
    ours: Path, measured: Calibration, changed: dict[str, object]
) -> None:
    earlier = measured_name(str(ours))
    other = node(ours.parent.parent / "two" / "ours.yaml", **changed)
    for path in (other, node(ours, **changed)):
        now = measured_name(str(path))
        assert now != earlier and now.startswith("ours.yaml#")
        with pytest.raises(ValueError, match="must be of the cluster file") as error:
            measured.hardware(parse_cluster(f"{path}:2x8"))
        assert f"now {now} " in str(error.value) and f"those of {earlier}:" in str(error.value)


def test_what_is_of_the_gpu_alone_serves_any_cluster_that_has_it(ours: Path, measured: Calibration) -> None:
    alone = replace(measured, links={}, networks={})
    other = parse_cluster(f"{node(ours, nics_per_node=4)}:2x8")
    hardware = alone.hardware(other)
    assert hardware.gpu("a100-sxm4-80gb").calibrated_curves is not None
    assert all_reduce_s(hardware) == shipped_s(other)
    shipped = parse_cluster("a100-80g-dgx:2x8")  # no edit of a file makes it one of ours
    assert all_reduce_s(measured.hardware(shipped)) == shipped_s(shipped)


def test_links_of_a_shipped_preset_stay_where_they_are_beside_a_file(ours: Path) -> None:
    shipped = parse_cluster("a100-80g-dgx:2x8")
    found = with_factors(shipped, {"memory": 0.8, **HALF}, "test")
    assert list(found.links) == ["a100-80g-dgx"]
    own = parse_cluster(f"{ours}:2x8")
    assert all_reduce_s(found.hardware(own)) == shipped_s(own)
    assert all_reduce_s(found.hardware(shipped)) > shipped_s(shipped)


def test_a_mixed_cluster_takes_links_for_the_nodes_that_were_measured(ours: Path, measured: Calibration) -> None:
    mixed = measured.hardware(parse_cluster(f"{ours}:1x8+a100-80g-dgx:1x8"))
    assert mixed.cluster.nodes[0].links == measured.hardware(parse_cluster(f"{ours}:1x8")).cluster.nodes[0].links
    assert mixed.cluster.nodes[1].links == parse_cluster("a100-80g-dgx:1x8").nodes[0].links
    second = node(ours.parent.parent / "two" / "ours.yaml", network="ib-400g")
    both = parse_cluster(f"{ours}:1x8+{second}:1x8")
    one, other = measured.hardware(both).cluster.nodes
    assert one.network != both.nodes[0].network and other.network == both.nodes[1].network
    of_both = with_factors(both, HALF, "test")
    assert len(of_both.links) == 2 and of_both.hardware(parse_cluster(f"{second}:2x8"))
    node(ours, nics_per_node=1)  # The second is as it was measured, and what was the first is not told by that.
    with pytest.raises(ValueError, match="must be of the cluster file"):
        of_both.hardware(parse_cluster(f"{ours}:1x8+{second}:1x8"))


def test_a_table_of_collectives_is_of_what_the_file_says(ours: Path) -> None:
    table = Calibration(source="test", collectives=TABLE, collectives_of=measured_name(str(ours)))
    copy = node(ours.parent.parent / "two" / "copy.yaml")
    for path in (ours, copy):
        hardware = table.hardware(parse_cluster(f"{path}:1x8"))
        assert hardware.collective("all_reduce", BYTES, range(8)).alone_s == 0.25
    with pytest.raises(ValueError, match="must be of the cluster file"):
        table.hardware(parse_cluster(f"{node(copy, nics_per_node=8)}:1x8"))


@pytest.mark.parametrize("path", ["ours.yaml", "../one/ours.yaml", "/home/me/ours.json"])
def test_an_earlier_calibration_that_names_a_path_says_what_to_write(
    ours: Path, measured: Calibration, path: str
) -> None:
    (links,), (network,) = measured.links.values(), measured.networks.values()
    earlier = replace(measured, links={path: links}, networks={path: network})
    with pytest.raises(ValueError, match="must be of the cluster file") as error:
        earlier.hardware(parse_cluster(f"{ours}:2x8"))
    name = measured_name(str(ours))
    assert path in str(error.value) and f"now {name} " in str(error.value)
    renamed = replace(measured, links={name: links}, networks={name: network})
    found = [each.hardware(parse_cluster(f"{ours}:2x8")) for each in (renamed, measured)]
    assert all_reduce_s(found[0]) == all_reduce_s(found[1])
