"""Links and networks are found back from what was measured on them, and what that does not tell is said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hardware_models.calibration.link_fit import fit_links
from hardware_models.cluster import Cluster, parse_cluster
from hardware_models.collective_table import TRANSFERS
from hardware_models.group_shapes import GroupShape, groups_at_once
from hardware_models.importers.alpa_database import read_alpa_table
from hardware_models.model import HardwareModel
from tests.hardware_models.data_folder import data_folder

SIZES = [2.0**power for power in range(10, 31, 2)]


def slower(name: str, factor: float) -> Cluster:
    """Return a cluster whose links and network have a fraction of their rate and twice their latencies."""
    cluster = parse_cluster(name)
    node = cluster.nodes[0]
    links = node.links.model_copy(
        update={
            "link_bytes_per_s": node.links.link_bytes_per_s * factor,
            "bridge_bytes_per_s": node.links.bridge_bytes_per_s * factor,
            "fallback_bytes_per_s": node.links.fallback_bytes_per_s * factor,
            "efficiency": {**node.links.efficiency, "all_gather": 0.6},
            "protocols": tuple(p.model_copy(update={"launch_s": 2 * p.launch_s}) for p in node.links.protocols),
        }
    )
    network = node.network.model_copy(update={"collective_fraction": node.network.collective_fraction * factor})
    return Cluster(name, tuple(replace(each, links=links, network=network) for each in cluster.nodes))


def at_once_s(cluster: Cluster, kind: str, shape: GroupShape, size: float) -> float:
    """Return what a group takes while all of its shape run, by the engine's rule: work times its fullest link."""
    hardware = HardwareModel(cluster)
    prices = [
        hardware.transfer(size, *group) if kind in TRANSFERS else hardware.collective(kind, size, group)
        for group in groups_at_once(cluster, range(shape.num_nodes), shape)
    ]
    loads: dict[str, float] = {}
    for name, share in (pair for price in prices for pair in price.shares):
        loads[name] = loads.get(name, 0.0) + share
    return prices[0].latency_s + prices[0].work_s * max([1.0, *(loads[name] for name, _ in prices[0].shares)])


@pytest.mark.parametrize("preset", ["a100-80g-dgx", "p3.16xlarge", "titan-rtx-pcie"])
def test_links_are_found_back_through_groups_that_ran_at_once(preset: str) -> None:
    true = slower(f"{preset}:2x8", 0.7)
    rows = [
        (kind, shape, size, at_once_s(true, kind, shape, size))
        for shape in (GroupShape(8, 1, 1), GroupShape(4, 1, 1, 2), GroupShape(2, 1, 1, 4), GroupShape(16, 2, 1),
                      GroupShape(2, 2, None, 8))
        for kind in ("all_reduce", "all_gather")
        for size in (2.0**14, 2.0**20, 2.0**26, 2.0**30)
    ]  # fmt: skip
    found = fit_links(preset, rows, "test")
    assert found.links is not None
    assert found.network is not None
    errors = np.abs(np.array(found.predicted_s) / np.array([row[3] for row in found.used]) - 1)
    assert np.median(errors) < 0.05
    large = [error for error, row in zip(errors, found.used, strict=True) if row[2] >= 2.0**26]
    assert max(large) < 0.08  # two protocols of nearly equal rate are not told apart for every group
    rate = true.nodes[0].links.link_bytes_per_s
    assert found.links.link_bytes_per_s == pytest.approx(rate, rel=0.1)
    assert found.links.source == "test"


def test_all_to_alls_by_a_quick_host_do_not_quicken_the_links_of_a_mesh() -> None:
    """Between GPUs that no link joins goes nothing else: what it takes there is no rate of a link."""
    cluster = parse_cluster("v100-32g-dgx1:1x8")
    links = cluster.nodes[0].links
    quick = links.model_copy(
        update={
            "fallback_bytes_per_s": 3 * links.fallback_bytes_per_s,
            "bridge_bytes_per_s": 3 * links.bridge_bytes_per_s,
        }
    )
    true = Cluster(cluster.name, tuple(replace(each, links=quick) for each in cluster.nodes))
    shape = GroupShape(8, 1, 1)
    rows = [
        (kind, shape, size, at_once_s(true, kind, shape, size))
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        for size in (2.0**20, 2.0**24, 2.0**28, 2.0**32)
    ]
    found = fit_links("v100-32g-dgx1", rows, "test")
    assert found.links is not None
    assert found.links.link_bytes_per_s == pytest.approx(links.link_bytes_per_s, rel=0.05)
    assert found.links.fallback_bytes_per_s == pytest.approx(quick.fallback_bytes_per_s, rel=0.1)


def test_on_a_mesh_groups_that_do_not_say_which_gpus_are_not_fitted() -> None:
    with pytest.raises(ValueError, match="say which GPUs they are"):
        fit_links("v100-32g-dgx1", [("all_reduce", GroupShape(2), 1e6, 1e-3)], "test")


def unlike(name: str, *, links: float, network: float) -> Cluster:
    """Return a cluster whose wires have other rates, for collectives and sends alike."""
    cluster = parse_cluster(name)
    node = cluster.nodes[0]
    inside = {word: getattr(node.links, word) * links for word in ("link_bytes_per_s", "point_to_point_bytes_per_s")}
    nominal = node.network.nominal_bytes_per_s * network
    own = node.links.model_copy(update=inside)
    card = node.network.model_copy(update={"nominal_bytes_per_s": nominal})
    return Cluster(name, tuple(replace(each, links=own, network=card) for each in cluster.nodes))


def rows_of(true: Cluster, *asked: tuple[str, GroupShape]) -> list[tuple[str, GroupShape, float, float]]:
    """Return what a user's logs of a machine hold, times 3 % off either way."""
    rng = np.random.default_rng(1)
    return [
        (kind, shape, size, at_once_s(true, kind, shape, size) * float(np.exp(rng.normal(0, 0.03))))
        for kind, shape in asked
        for size in (2.0**power for power in range(13, 31))
    ]


INSIDE, OVER = ("all_reduce", GroupShape(8, 1, 1)), ("all_reduce", GroupShape(16, 2, 1))
SENDS = (("transfer_intra_node", GroupShape(2, 1)), ("transfer_inter_node", GroupShape(2, 2)))


@pytest.mark.parametrize(
    ("preset", "links", "network"),
    [
        ("a100-80g-dgx", 0.5, 0.25),
        ("a100-80g-dgx-100g", 1.0, 4.0),  # quicker than the preset's card could ever be
        ("a100-80g-dgx-100g", 0.04, 0.25),  # PCIe, one card of 25 Gb/s
    ],
)
def test_logs_of_all_reduces_alone_tell_what_sends_and_other_groups_take(
    preset: str, links: float, network: float
) -> None:
    true = unlike(f"{preset}:2x8", links=links, network=network)
    found = fit_links(preset, rows_of(true, INSIDE, OVER), "test")
    assert found.links is not None
    assert found.network is not None
    fitted = Cluster(preset, tuple(replace(each, links=found.links, network=found.network) for each in true.nodes))
    for size in (2.0**22, 2.0**26, 2.0**29):
        for ends in ((0, 1), (0, 8)):
            one, other = (HardwareModel(cluster).transfer(size, *ends).alone_s for cluster in (fitted, true))
            assert one == pytest.approx(other, rel=0.06)
        for kind, group in (("all_gather", range(4)), ("all_reduce", (0, 8)), ("reduce_scatter", range(16))):
            one, other = (HardwareModel(cluster).collective(kind, size, group).alone_s for cluster in (fitted, true))
            assert one == pytest.approx(other, rel=0.1)


def test_logs_of_sends_alone_tell_what_all_reduces_take() -> None:
    true = unlike("a100-80g-dgx:2x8", links=0.5, network=3.0)
    found = fit_links("a100-80g-dgx", rows_of(true, *SENDS), "test")
    assert found.links is not None
    assert found.network is not None
    assert found.links.link_bytes_per_s == pytest.approx(true.nodes[0].links.link_bytes_per_s, rel=0.05)
    assert found.network.nic_bytes_per_s == pytest.approx(true.nodes[0].network.nic_bytes_per_s, rel=0.05)


def test_a_network_behind_slow_links_is_the_presets_or_the_sends_and_said_to_be_unknown() -> None:
    """Nothing of an all-reduce that its NVLinks hold up says how quick the cards are."""
    true = unlike("a100-80g-dgx:2x8", links=0.5, network=2.0)
    nominal = parse_cluster("a100-80g-dgx:1x8").nodes[0].network.nominal_bytes_per_s
    for asked, rate in (((INSIDE, OVER), 1.0), ((INSIDE, OVER, *SENDS), 2.0)):
        found = fit_links("a100-80g-dgx", rows_of(true, *asked), "test")
        assert found.network is not None
        assert found.network.nominal_bytes_per_s == pytest.approx(nominal * rate, rel=0.05)
        (note,) = found.notes
        assert note.startswith("groups over several nodes take as long as their links inside nodes have it")


@pytest.mark.parametrize("largest", [2.0**18, 2.0**20, 2.0**22])
def test_messages_that_launches_rule_say_nothing_of_rates(largest: float) -> None:
    """Launches differ by collective; told from a rate by nothing, they would be taken for collectives' efficiencies."""
    launch_s = {"all_reduce": 70e-6, "all_gather": 50e-6, "reduce_scatter": 60e-6}
    true = parse_cluster("a100-80g-dgx:1x8")
    rows = [
        (kind, GroupShape(8, 1, 1), size, launch_s[kind] + at_once_s(true, kind, GroupShape(8, 1, 1), size))
        for kind in launch_s
        for size in (2.0**power for power in range(10, 30))
    ]
    fit = fit_links("a100-80g-dgx", [row for row in rows if row[2] <= largest], "test")
    assert not any("rate" in name or "efficiency" in name for name in fit.constants)
    assert any(note.startswith("messages are too small to say how quick the links") for note in fit.notes)
    assert fit.links is not None
    fitted = Cluster(true.name, tuple(replace(each, links=fit.links) for each in true.nodes))
    for kind, shape, size, seconds in rows:
        if size >= 2.0**27:
            assert at_once_s(fitted, kind, shape, size) == pytest.approx(seconds, rel=0.1)


def test_two_sizes_near_each_other_tell_a_rate_where_time_grows_with_them() -> None:
    """32 and 64 MiB: the second takes 1.9 times as long; half of twice the size is no launch."""
    true, shape = slower("a100-80g-dgx:1x8", 0.7), GroupShape(8, 1, 1)
    rows = [("all_reduce", shape, size, at_once_s(true, "all_reduce", shape, size)) for size in (2.0**25, 2.0**26)]
    assert rows[1][3] < 1.95 * rows[0][3] < 1e-3
    found = fit_links("a100-80g-dgx", rows, "test")
    assert found.constants["links.rate"] == pytest.approx(0.7, rel=0.1) and not found.notes[1:]


@pytest.mark.parametrize("largest", [2.0**20, 2.0**24])
def test_published_small_messages_do_not_spoil_what_is_told_of_large_ones(largest: float) -> None:
    """With all rates fitted, medians: all-reduces 50 and 54 % off, gathers 275 and 10, reduce-scatters 365 and 6."""
    measured = read_alpa_table(data_folder("alpa_v100") / "collectives_a100_8gpu.csv")
    rows = [(kind, group, size, seconds) for kind, group, size, seconds in measured if isinstance(group, GroupShape)]
    fit = fit_links("a100-80g-dgx", [row for row in rows if row[2] <= largest], "test")
    assert fit.links is not None
    cluster = parse_cluster("a100-80g-dgx:1x8")
    fitted = Cluster(cluster.name, tuple(replace(each, links=fit.links) for each in cluster.nodes))
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        errors = [
            abs(at_once_s(fitted, kind, shape, size) / seconds - 1)
            for own, shape, size, seconds in rows
            if own == kind and size > largest
        ]
        print(f"{kind}: {100 * np.median(errors):.1f} % over {len(errors)} larger messages")
        assert np.median(errors) < 0.15


@pytest.mark.parametrize("slower", [2.5, 8.0, 30.0])
def test_a_network_far_from_the_presets_is_found_from_its_largest_message(slower: float) -> None:
    """A latency and a bandwidth, the latter a few times off: no size is left out as if it were a mistake."""
    shape = GroupShape(16, 2, 1)
    sizes = [2.0**power for power in range(14, 30, 2)]
    rows = [("all_reduce", shape, size, 60e-6 + size * slower / 160e9) for size in sizes]
    fit = fit_links("a100-80g-dgx", rows, "test")
    for (_, _, size, seconds), predicted in zip(fit.used, fit.predicted_s, strict=True):
        assert predicted == pytest.approx(seconds, rel=0.15), size


EIGHTS, TWOS = ("all_reduce", GroupShape(8, 1, 1)), ("all_reduce", GroupShape(2, 1, 1, 4))


@pytest.mark.parametrize(("asked", "is_told"), [((EIGHTS, TWOS), True), ((EIGHTS,), False), ((TWOS,), False)])
def test_what_pairs_reach_of_a_rate_is_told_by_pairs_beside_larger_groups(
    asked: tuple[tuple[str, GroupShape], ...], is_told: bool
) -> None:
    """Either alone has one rate, which is taken for the links'; what pairs reach of it stays the preset's."""
    preset = parse_cluster("titan-rtx-pcie:1x8")
    links = preset.nodes[0].links
    other = links.model_copy(update={"pair_fraction": 0.5 * links.pair_fraction})
    true = Cluster(preset.name, tuple(replace(each, links=other) for each in preset.nodes))
    found = fit_links("titan-rtx-pcie", rows_of(true, *asked), "test")
    assert ("links.pair_fraction" in found.constants) == is_told
    assert found.links is not None
    expected = other if is_told else links
    assert found.links.pair_fraction == pytest.approx(expected.pair_fraction, rel=0.1)


def test_of_gathers_alone_the_rate_is_theirs_and_no_share_of_another() -> None:
    """Links of half the rate: told apart from a lower efficiency of gathers by nothing, and of all that goes there."""
    found = fit_links("a100-80g-dgx", rows_of(unlike("a100-80g-dgx:1x8", links=0.5, network=1.0),
                                              ("all_gather", GroupShape(8, 1, 1))), "test")  # fmt: skip
    preset = parse_cluster("a100-80g-dgx:1x8").nodes[0].links
    assert found.links is not None and found.links.efficiency == preset.efficiency
    assert found.constants["links.rate"] == pytest.approx(0.5, rel=0.05)


def test_a_network_a_little_slower_than_the_links_is_told() -> None:
    """Large all-reduces over two nodes take a fifth longer than their NVLinks have it: the cards are at 0.6."""
    true = unlike("a100-80g-dgx:2x8", links=1.0, network=0.6)
    assert at_once_s(true, *OVER, 2.0**29) > 1.15 * at_once_s(parse_cluster("a100-80g-dgx:2x8"), *OVER, 2.0**29)
    found = fit_links("a100-80g-dgx", rows_of(true, INSIDE, OVER), "test")
    assert found.network is not None
    assert found.network.nic_bytes_per_s == pytest.approx(true.nodes[0].network.nic_bytes_per_s, rel=0.1)


def test_times_a_thousand_times_too_long_are_fitted_all_the_same() -> None:
    """Milliseconds taken for seconds: rates far below the preset's, at the bound of what is tried."""
    rows = [(kind, shape, size, 1e3 * seconds)
            for kind, shape, size, seconds in rows_of(parse_cluster("a100-80g-dgx:2x8"), INSIDE, OVER)]  # fmt: skip
    assert fit_links("a100-80g-dgx", rows, "test").constants["links.rate"] < 0.01
