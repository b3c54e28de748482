"""Fits a preset's links and network to measured collectives and transfers, through the same flows that price plans.

What the rows hold is fitted, the rest keeps the preset's values: links from groups in one node, the network from
groups over several. Collectives and sends go over the same wires: where only one of them was measured, the other's rate
moves as much. Groups that ran at once are priced with the load they put on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from hardware_models.cluster import Cluster, cluster_gpus_per_node, parse_cluster
from hardware_models.collective_table import TRANSFERS
from hardware_models.collectives import Flow, collective_flows, quickest_price, transfer_flow
from hardware_models.group_shapes import GroupShape, groups_at_once
from hardware_models.links import LinkType, NetworkType, Protocol

Vector = npt.NDArray[np.float64]
Sample = tuple[str, GroupShape, float, float]
MAX_POINTS = 6
"""Of a series: more sizes say the same, and every residual prices all groups that ran at once."""

LEAST_BYTES = 1024.0
"""Where there are larger ones: a few elements are no measurement of the network. Alpa's smallest take 35 us on four
nodes as on one, and twice that with each doubling until they are level."""

RATES = (1e-3, 100.0)
"""Over the preset's: PCIe has a thirtieth of an H100's NVLinks, one card of 10 Gb/s a hundredth of eight of 200."""

PULL = 0.002
"""Weight of the start values: what no row tells apart (a launch from steps, where all groups are of one size) stays
like the preset's. A constant that is ten times as large costs as much as all rows 2 % off."""

SLOWER = (0.8, 0.6, 0.4)
"""Of the rate that the largest message says, which ones are tried where the links inside nodes rule at that."""

HARDLY, UNSEEN, AS_GOOD = 0.2, 1e-3, 1.05
"""By how much a double rate of the network moves the rows of which it may not be what rules, and of which it is not;
and how much worse such rows may be told without a rate of its own."""

GROWN, LAUNCH_S = 0.75, 1e-3
"""Of a series' longest time, how much must grow with the message for its rate to be told from launches; and the most
that a launch is taken to be. The share was chosen on Alpa's A100, cut at 256 KiB to 64 MiB: under a half, times of what
is larger are off by factors."""

OTHERS = ("all_gather", "reduce_scatter", "all_to_all", "broadcast")


@dataclass(frozen=True)
class LinkFit:
    """What was fitted.

    Attributes:
        links, network: None where no row is about them.
        constants: Fitted numbers by name.
        used: Rows that the fit was made on.
        predicted_s: Of those, in order.
        notes: What the rows do not tell.
    """

    links: LinkType | None
    network: NetworkType | None
    constants: Mapping[str, float]
    used: tuple[Sample, ...]
    predicted_s: tuple[float, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Parameter:
    name: str
    start: float
    low: float
    high: float


def fit_links(preset: str, rows: Iterable[Sample], source: str) -> LinkFit:
    """Return the constants with which the link model comes closest to measured rows.

    Args:
        preset: Cluster preset that the rows were measured on; it says how GPUs are joined.
        rows: ``(collective, shape, bytes, seconds)``.
        source: For the fitted types.

    Raises:
        ValueError: If the preset is unknown or smaller than the groups, or nothing is left to fit on.
    """
    gpus = cluster_gpus_per_node(preset)
    samples = _thinned(rows)
    num_nodes = max((shape.num_nodes for _, shape, _, _ in samples), default=1)
    cluster = parse_cluster(f"{preset}:{num_nodes}x{gpus}")
    fitting = [sample for sample in samples if _fits(cluster, sample[1])]
    if not fitting:
        raise ValueError(
            f"measured groups must fit on {preset} with {gpus} GPUs a node, and on a mesh of links say which GPUs they "
            "are, got none that does; name another preset"
        )
    groups = [groups_at_once(cluster, range(shape.num_nodes), shape) for _, shape, _, _ in fitting]

    def predicted(values: Mapping[str, float]) -> Vector:
        changed = _changed(cluster, values, source)
        flows: dict[tuple[str, GroupShape], list[tuple[Flow, ...]]] = {}  # the same for all sizes of a series
        seconds = []
        for (kind, shape, num_bytes, _), each in zip(fitting, groups, strict=True):
            if (kind, shape) not in flows:
                flows[kind, shape] = _flows(changed, kind, each)
            seconds.append(_at_once_s(flows[kind, shape], num_bytes))
        return np.array(seconds)

    def moves(values: Mapping[str, float]) -> float:
        """Return by how much the row moves most that the network's double rate moves."""
        quicker = {**values, "network.rate": 2 * _rates("network", values)[0]}
        return float(np.abs(predicted(quicker) / predicted(values) - 1).max())

    measured = np.array([seconds for *_, seconds in fitting])
    parameters = _parameters(cluster, fitting)
    constants, cost = _least(parameters, predicted, measured)
    inside = any(shape.num_nodes == 1 for _, shape, _, _ in fitting)
    if inside and "network.rate" in constants and moves(constants) < HARDLY:
        # Where links rule, the network's rate has no slope: once more from lower ones.
        starts = {each.name: each.start for each in parameters}
        for rate in SLOWER:
            again, its_cost = _least(
                parameters, predicted, measured, {**starts, "network.rate": rate * starts["network.rate"]}
            )
            if its_cost * AS_GOOD < cost:
                constants, cost = again, its_cost
                break
    notes = [] if inside else ["nothing inside a node was measured: its links are the preset's"]
    notes += [] if num_nodes > 1 else ["nothing over several nodes was measured: their network is the preset's"]
    notes += [
        f"messages are too small to say how quick {words}: launches take most of their times, and rates are the "
        "preset's; measure larger ones"
        for where, words, is_measured in (
            ("links", "the links inside a node are", inside), ("network", "the network is", num_nodes > 1)
        )
        if is_measured and not {f"{where}.rate", f"{where}.point_to_point_rate"} & set(constants)
    ]  # fmt: skip
    if inside and "network.rate" in constants and moves(constants) < HARDLY:
        others, their_cost = _least([each for each in parameters if each.name != "network.rate"], predicted, measured)
        if their_cost <= AS_GOOD * cost and moves(others) < UNSEEN:
            constants = others
            notes.append(
                "groups over several nodes take as long as their links inside nodes have it: no row says how quick the "
                "network is for them; measure groups of one GPU on each node"
            )
    node = _changed(cluster, constants, source).nodes[0]
    return LinkFit(
        links=node.links if inside else None,
        network=node.network if num_nodes > 1 else None,
        constants=constants,
        used=tuple(fitting),
        predicted_s=tuple(map(float, predicted(constants))),
        notes=tuple(notes),
    )


def _least(
    parameters: Sequence[_Parameter],
    predicted: Callable[[Mapping[str, float]], Vector],
    measured: Vector,
    begin: Mapping[str, float] | None = None,
) -> tuple[dict[str, float], float]:
    """Return the values with which predictions come closest to measured seconds, and how close that is.

    Args:
        parameters: What may move; what no row tells apart is pulled to their starts.
        predicted: Seconds by values.
        measured: Seconds.
        begin: Where to look first; None for the starts.
    """

    def named(vector: Vector) -> dict[str, float]:
        return {parameter.name: float(value) for parameter, value in zip(parameters, vector, strict=True)}

    def residuals(vector: Vector) -> Vector:
        pull = PULL * np.sqrt(len(measured)) * (vector - start) / scale
        return np.concatenate([np.log(predicted(named(vector)) / measured), pull])

    start = np.array([parameter.start for parameter in parameters])
    scale = np.array([max(parameter.start, 0.01 * parameter.high) for parameter in parameters])
    first = start
    if begin is not None:
        first = np.array([min(max(begin[each.name], each.low), each.high) for each in parameters])
    found = least_squares(
        residuals,
        first,
        bounds=([parameter.low for parameter in parameters], [parameter.high for parameter in parameters]),
        x_scale=scale,
        loss="soft_l1",
        f_scale=0.1,
        ftol=1e-6,
        max_nfev=60,
    )
    return named(found.x), float(found.cost)


def _thinned(rows: Iterable[Sample]) -> list[Sample]:
    """Return at most MAX_POINTS sizes of every series, evenly over its range, first and last among them."""
    series: dict[tuple[str, GroupShape], list[Sample]] = {}
    for row in rows:
        series.setdefault((row[0], row[1]), []).append(row)
    found = []
    for points in series.values():
        points.sort(key=lambda row: row[2])
        points = [row for row in points if row[2] >= LEAST_BYTES] or points
        chosen = sorted({round(place) for place in np.linspace(0, len(points) - 1, MAX_POINTS)})
        found += [points[place] for place in chosen]
    return found


def _fits(cluster: Cluster, shape: GroupShape) -> bool:
    """Return whether a group can be placed: on a mesh of links its GPUs must be known, unless it takes them all."""
    node = cluster.nodes[0]
    on_mesh = node.links.kind == "mesh" and shape.num_nodes == 1
    if on_mesh and shape.stride is None and shape.size < node.num_slots:
        return False
    return bool(groups_at_once(cluster, range(shape.num_nodes), shape))


def _parameters(cluster: Cluster, rows: Sequence[Sample]) -> list[_Parameter]:
    links, network = cluster.nodes[0].links, cluster.nodes[0].network
    found: list[_Parameter] = []

    def add(name: str, start: float, low: float, high: float) -> None:
        found.append(_Parameter(name, min(max(start, low), high), low, high))

    inside = [row for row in rows if row[1].num_nodes == 1 and row[0] not in TRANSFERS]
    across = [row for row in rows if row[1].num_nodes > 1 and row[0] not in TRANSFERS]
    for where, own, protocols in (("links", inside, links.protocols), ("network", across, network.protocols)):
        grown = _grown(own)
        kinds = {row[0] for row in grown}
        if grown:
            rate = _rate(cluster, grown)
            add(f"{where}.rate", rate, *RATES)
            if where == "links" and links.kind != "mesh" and len({row[1].size == 2 for row in grown}) == 2:
                add("links.pair_fraction", links.pair_fraction, 0.2, 1.0)
            if where == "links" and links.kind == "mesh" and {"all_to_all"} < kinds:
                # Between GPUs that no link joins only all-to-alls go; else they would set the rate of the links.
                add("links.host_rate", rate, *RATES)
        if len({row[2] for row in own}) > 1:
            for protocol in protocols:
                add(f"{where}.{protocol.name}.launch_s", protocol.launch_s, 0.0, LAUNCH_S)
                add(f"{where}.{protocol.name}.step_s", protocol.step_s, 0.0, 2e-4)
                if protocol.bandwidth_fraction < 1:
                    add(f"{where}.{protocol.name}.fraction", protocol.bandwidth_fraction, 0.02, 1.0)
        efficiency = (links if where == "links" else network).efficiency
        # The rate is the all-reduce's; without one, that of the first collective there is.
        reference = "all_reduce" if "all_reduce" in kinds else next((k for k in OTHERS if k in kinds), "")
        for kind in OTHERS:
            if kind in kinds and kind != reference:
                add(f"{where}.efficiency.{kind}", efficiency[kind], 0.02, 1.0)
    sends = {row[0] for row in rows if row[0] in TRANSFERS}
    for kind, where in zip(TRANSFERS, ("links", "network"), strict=True):
        if kind in sends:
            latency_s = (links if where == "links" else network).point_to_point_latency_s
            if any(row[0] == kind for row in _grown(rows)):
                add(f"{where}.point_to_point_rate", 1.0, *RATES)
            if len({row[2] for row in rows if row[0] == kind}) > 1:
                add(f"{where}.point_to_point_latency_s", latency_s, 0.0, 5e-3)
    return found


def _grown(rows: Sequence[Sample]) -> list[Sample]:
    """Return the rows of series whose longest time mostly grows with the message, or is more than launches can be.

    One size alone is taken for such.
    """
    series: dict[tuple[str, GroupShape], list[Sample]] = {}
    for row in rows:
        series.setdefault((row[0], row[1]), []).append(row)
    found = []
    for points in series.values():
        small, large = min(points, key=lambda row: row[2]), max(points, key=lambda row: row[2])
        share = 1.0
        if large[2] > small[2]:
            share = (1 - small[3] / large[3]) / (1 - small[2] / large[2])
        if share >= GROWN or small[3] > LAUNCH_S:
            found += points
    return found


def _rate(cluster: Cluster, rows: Sequence[Sample]) -> float:
    """Return the rate to start from, over the preset's: what the largest message says."""
    kind, shape, num_bytes, seconds = max(rows, key=lambda row: row[2])
    groups = groups_at_once(cluster, range(shape.num_nodes), shape)
    return _at_once_s(_flows(cluster, kind, groups), num_bytes) / seconds


def _changed(cluster: Cluster, values: Mapping[str, float], source: str) -> Cluster:
    node = cluster.nodes[0]
    links, network = node.links, node.network
    scale, send = _rates("links", values)
    host = values.get("links.host_rate", scale)
    new_links = links.model_copy(
        update={
            "link_bytes_per_s": links.link_bytes_per_s * scale,
            "bridge_bytes_per_s": links.bridge_bytes_per_s * host,
            "fallback_bytes_per_s": links.fallback_bytes_per_s * host,
            "pair_fraction": values.get("links.pair_fraction", links.pair_fraction),
            "point_to_point_bytes_per_s": links.point_to_point_bytes_per_s * send,
            "point_to_point_latency_s": values.get("links.point_to_point_latency_s", links.point_to_point_latency_s),
            "efficiency": _efficiency("links", links.efficiency, values),
            "protocols": _protocols("links", links.protocols, values),
            "source": source,
        }
    )
    latency_s = values.get("network.point_to_point_latency_s", network.point_to_point_latency_s)
    scale, send = _rates("network", values)
    sends = send * network.point_to_point_fraction
    card = max(scale, sends)  # No share of it is above 1, however much quicker sends are than the preset's.
    new_network = network.model_copy(
        update={
            "nominal_bytes_per_s": network.nominal_bytes_per_s * card,
            "collective_fraction": network.collective_fraction * scale / card,
            "point_to_point_fraction": min(1.0, sends / card),
            "point_to_point_latency_s": latency_s,
            "efficiency": _efficiency("network", network.efficiency, values),
            "protocols": _protocols("network", network.protocols, values),
            "source": source,
        }
    )
    nodes = tuple(replace(each, links=new_links, network=new_network) for each in cluster.nodes)
    return Cluster(name=cluster.name, nodes=nodes)


def _rates(where: str, values: Mapping[str, float]) -> tuple[float, float]:
    """Return the rates of collectives and of sends over the preset's; one that was not measured is as the other."""
    collectives, sends = values.get(f"{where}.rate"), values.get(f"{where}.point_to_point_rate")
    known = collectives if collectives is not None else sends if sends is not None else 1.0
    return known, sends if sends is not None else known


def _efficiency(where: str, old: Mapping[str, float], values: Mapping[str, float]) -> dict[str, float]:
    return {kind: values.get(f"{where}.efficiency.{kind}", share) for kind, share in old.items()}


def _protocols(where: str, old: Sequence[Protocol], values: Mapping[str, float]) -> tuple[Protocol, ...]:
    return tuple(
        Protocol(
            name=protocol.name,
            launch_s=values.get(f"{where}.{protocol.name}.launch_s", protocol.launch_s),
            step_s=values.get(f"{where}.{protocol.name}.step_s", protocol.step_s),
            bandwidth_fraction=values.get(f"{where}.{protocol.name}.fraction", protocol.bandwidth_fraction),
        )
        for protocol in old
    )


def _flows(cluster: Cluster, kind: str, groups: Sequence[tuple[int, ...]]) -> list[tuple[Flow, ...]]:
    """Return the algorithms that each group has."""
    if kind in TRANSFERS:
        return [(transfer_flow(cluster, *group),) for group in groups]
    return [collective_flows(cluster, kind, group) for group in groups]


def _at_once_s(flows: Sequence[tuple[Flow, ...]], num_bytes: float) -> float:
    """Return what the first of some groups takes while all of them run."""
    prices = [quickest_price(each, num_bytes) for each in flows]
    loads: dict[str, float] = {}
    for price in prices:
        for name, share in price.shares:
            loads[name] = loads.get(name, 0.0) + share
    return prices[0].latency_s + prices[0].work_s * max([1.0, *(loads[name] for name, _ in prices[0].shares)])
