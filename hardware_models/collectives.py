"""From the link graph to the time of a collective or transfer that runs alone, and its share of each link.

All loads are linear in bytes, so a ``Flow`` (seconds per byte on every resource) is computed once per
(collective, device set) and scaled. Per collective of S bytes over n ranks:

- ring all-reduce moves 2 (n-1)/n S over every link of its rings; all-gather and reduce-scatter (n-1)/n S;
- the bytes that leave a node cross its NICs, which all groups share; over two nodes the tree all-reduce
  moves S, not 2 (n-1)/n S;
- all-to-all sends S/n from every rank to every other over a direct link, by the host, or the NIC.

Time = latency + work, for the quickest of the library's protocols and algorithms.

Resources are called ``nodeN/nvlink/A-B`` (all links from GPU A to B), ``nodeN/nvswitch/G/out`` and ``/in``,
``nodeN/lane/G/out`` and ``/in`` with ``nodeN/bridge`` (PCIe, shared memory; what leaves the node takes the lane
alone: transfers, and collectives of a lone GPU), ``nodeN/pcie/G/out`` and ``/in`` with
``nodeN/bridge`` (transfers and all-to-all between GPUs of a mesh that no link joins; rings that do not close take the
lanes alone, since how many of their hops cross the host is not known), ``nodeN/nicK/out`` and ``/in``; G, A, B count
inside the node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log2

from hardware_models.cluster import Cluster, Node
from hardware_models.communication import Communication
from hardware_models.gpus import curves_of
from hardware_models.links import (
    COLLECTIVES,
    JOINED_GATHER,
    JOINING_COPIES,
    OWNER_REDUCE,
    LinkType,
    NetworkType,
    Protocol,
)
from hardware_models.topology import is_connected, link_counts, pack_rings, tree_edges

Loads = dict[str, float]


@dataclass(frozen=True)
class FlowProtocol:
    """One protocol of the library over one route.

    Attributes:
        latency_s: Launch and all steps, before data flow at full rate.
        bandwidth_fraction: Share of the full rate that it reaches.
    """

    latency_s: float
    bandwidth_fraction: float


@dataclass(frozen=True)
class Flow:
    """One algorithm of one collective over one group, per byte of its size.

    Attributes:
        work_s_per_byte: Seconds of data flow per byte.
        loads: ``(resource, seconds per byte at the resource's full rate)``.
        protocols: The library's choices.
        fill_bytes: Bytes' worth of data flow that pass before the algorithm runs at full rate.
        copied_s_per_byte: Seconds of copies per byte, whatever the protocol.
    """

    work_s_per_byte: float
    loads: tuple[tuple[str, float], ...]
    protocols: tuple[FlowProtocol, ...]
    fill_bytes: float = 0.0
    copied_s_per_byte: float = 0.0

    def shares(self, index: int) -> tuple[tuple[str, float], ...]:
        """Return the shares of resources under a protocol; they do not depend on the size."""
        found = self._shares.get(index)
        if found is None:
            protocol = self.protocols[index]
            copied = self.copied_s_per_byte * protocol.bandwidth_fraction
            scale = protocol.bandwidth_fraction / (self.work_s_per_byte + copied)
            found = self._shares[index] = tuple((name, min(1.0, load * scale)) for name, load in self.loads)
        return found

    @cached_property
    def _shares(self) -> dict[int, tuple[tuple[str, float], ...]]:
        return {}

    def s_per_byte(self, protocol: FlowProtocol) -> float:
        """Return the seconds that a byte more takes under a protocol."""
        return self.work_s_per_byte / protocol.bandwidth_fraction + self.copied_s_per_byte

    def quickest(self, num_bytes: float) -> tuple[float, int, float]:
        """Return the seconds of the quickest protocol, which one that is, and its work in seconds."""
        options = []
        for index, protocol in enumerate(self.protocols):
            work = (num_bytes + self.fill_bytes) * self.work_s_per_byte / protocol.bandwidth_fraction
            work += num_bytes * self.copied_s_per_byte
            options.append((protocol.latency_s + work, index, work))
        return min(options)

    def price(self, num_bytes: float) -> Communication:
        """Return the cost with the quickest protocol."""
        _, index, work = self.quickest(num_bytes)
        return Communication(latency_s=self.protocols[index].latency_s, work_s=work, shares=self.shares(index))


def quickest_price(flows: Iterable[Flow], num_bytes: float) -> Communication:
    """Return the cost with the quickest algorithm and protocol."""
    return min(flows, key=lambda flow: flow.quickest(num_bytes)[0]).price(num_bytes)


def bus_factor(kind: str, n: int) -> float:
    """Return bytes over each ring link per byte of size, for n ranks."""
    return {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}.get(kind, (n - 1) / n)


def collective_flows(cluster: Cluster, kind: str, devices: tuple[int, ...]) -> tuple[Flow, ...]:
    """Return the algorithms available for a collective; the caller takes the quickest.

    Raises:
        ValueError: If the collective is unknown or a device is named twice.
    """
    if kind == JOINED_GATHER:
        copies = joining_s_per_byte(cluster, devices)
        gathers = collective_flows(cluster, "all_gather", devices)
        return tuple(replace(flow, copied_s_per_byte=copies) for flow in gathers)
    if kind == OWNER_REDUCE:
        return collective_flows(cluster, "broadcast", devices)
    if kind not in COLLECTIVES:
        raise ValueError(f"collective must be one of {', '.join(COLLECTIVES)}, got {kind!r}")
    if len(set(devices)) != len(devices) or len(devices) < 2:
        raise ValueError(f"a group must have at least two different devices, got {devices[:16]}")
    groups = _by_node(cluster, devices)
    if len(groups) == 1:
        ((index, members),) = groups.items()
        return (_inside(cluster.nodes[index], index, kind, members, len(devices)),)
    if kind == "all_to_all":
        return (_across(cluster, groups, kind, 1.0),)
    if kind == "all_reduce":
        ring = _across(cluster, groups, kind, bus_factor(kind, len(devices)))
        fills = [cluster.nodes[index].network.tree_fill_bytes for index in groups]
        if any(fill is None for fill in fills):
            return (ring,)
        # A tree: every node passes each byte up once and down once; a pair of nodes shares that work.
        tree_bytes = 1.0 if len(groups) == 2 else 2.0
        return ring, _across(cluster, groups, kind, tree_bytes, tree=True)
    return (_across(cluster, groups, kind, bus_factor(kind, len(devices))),)


def joining_s_per_byte(cluster: Cluster, devices: Iterable[int]) -> float:
    """Return what it takes on the slowest GPU to join the entries of a gathered list, per byte of the result."""
    gpus = {cluster.node_of(device): cluster.nodes[cluster.node_of(device)].gpu for device in devices}
    rates = [gpu.memory_bytes_per_s * curves_of(gpu).memory.fraction["elementwise"] for gpu in gpus.values()]
    return JOINING_COPIES * 2 / min(rates)


def transfer_flow(cluster: Cluster, source: int, target: int) -> Flow:
    """Return the flow of a send/receive between two devices."""
    a, b = cluster.node_of(source), cluster.node_of(target)
    slot_a, slot_b = cluster.slot_of(source), cluster.slot_of(target)
    node = cluster.nodes[a]
    if a == b:
        links, prefix = node.links, f"node{a}"
        protocol = (FlowProtocol(links.point_to_point_latency_s, 1.0),)
        if links.kind == "mesh":
            count = {(i, j): c for i, j, c in node.mesh}.get((min(slot_a, slot_b), max(slot_a, slot_b)), 0)
            if count:
                work = 1 / (count * links.point_to_point_bytes_per_s)
                loads: Loads = {f"{prefix}/nvlink/{slot_a}-{slot_b}": work}
            else:
                loads = _by_host(links, prefix, slot_a, slot_b, 1.0)
                work = max(loads.values())
        else:
            work = 1 / links.point_to_point_bytes_per_s
            port = min(work, 1 / links.link_bytes_per_s)
            name = "nvswitch" if links.kind == "switch" else "lane"
            loads = {f"{prefix}/{name}/{slot_a}/out": port, f"{prefix}/{name}/{slot_b}/in": port}
            if links.kind == "host":
                loads[f"{prefix}/bridge"] = 1 / links.bridge_bytes_per_s
        return Flow(work, tuple(loads.items()), protocol)
    other = cluster.nodes[b]
    rates, loads = [], {}
    for index, there, slot, way in ((a, node, slot_a, "out"), (b, other, slot_b, "in")):
        nics = there.nics_of(slot)
        rates.append(len(nics) * there.network.nominal_bytes_per_s * there.network.point_to_point_fraction)
        for nic in nics:
            loads[f"node{index}/nic{nic}/{way}"] = 1 / (len(nics) * there.network.nic_bytes_per_s)
        if there.links.kind == "host":
            loads[f"node{index}/lane/{slot}/{way}"] = _lane_s_per_byte(there.links)
    rate = min(rates)
    latency = max(node.network.point_to_point_latency_s, other.network.point_to_point_latency_s)
    return Flow(1 / rate, tuple(loads.items()), (FlowProtocol(latency, 1.0),))


def _lane_s_per_byte(links: LinkType) -> float:
    """Return what a byte that leaves or enters a node takes of a GPU's PCIe lane: at the quickest it is known to go."""
    return 1 / max(links.point_to_point_bytes_per_s, links.link_bytes_per_s)


def _by_node(cluster: Cluster, devices: Iterable[int]) -> dict[int, tuple[int, ...]]:
    groups: dict[int, list[int]] = {}
    for device in devices:
        groups.setdefault(cluster.node_of(device), []).append(cluster.slot_of(device))
    return {index: tuple(sorted(slots)) for index, slots in sorted(groups.items())}


def _steps(kind: str, n: int) -> int:
    return 2 * (n - 1) if kind == "all_reduce" else n - 1


def _inside(node: Node, index: int, kind: str, members: tuple[int, ...], n: int) -> Flow:
    links = node.links
    if kind == "all_to_all" and links.kind == "mesh":
        work, loads = _mesh_all_to_all(node, index, members, 1.0 / n)
    else:
        work, loads = _ring(node, index, kind, members, bus_factor(kind, n))
        work /= links.efficiency[kind]
    work += _local_s_per_byte(links, kind, n)
    steps = _steps(kind, n)
    protocols = tuple(
        FlowProtocol(protocol.launch_s + steps * protocol.step_s, protocol.bandwidth_fraction)
        for protocol in links.protocols
    )
    return Flow(work, tuple(loads.items()), protocols)


def _local_s_per_byte(links: LinkType, kind: str, n: int) -> float:
    """Return seconds per byte of size that a rank needs for its own n-th, which crosses no link."""
    rate = links.local_bytes_per_s.get(kind)
    return 1.0 / (n * rate) if rate is not None else 0.0


def _ring(node: Node, index: int, kind: str, members: tuple[int, ...], bus_bytes: float) -> tuple[float, Loads]:
    """Return seconds and loads of ``bus_bytes`` over every ring link of the group."""
    links, prefix = node.links, f"node{index}"
    pair = links.pair_fraction if len(members) == 2 else 1.0
    rate = links.link_bytes_per_s * pair
    if links.kind == "mesh":
        rings = pack_rings(node.mesh, members)
        if rings.num_rings:
            work = bus_bytes / (rings.num_rings * rate)
            return work, {f"{prefix}/nvlink/{a}-{b}": work * used / there for a, b, used, there in rings.use}
        if kind == "all_reduce" and is_connected(node.mesh, members):
            n = len(members)
            work = bus_bytes * n / (2 * (n - 1)) / rate
            loads: Loads = {}
            for a, b, there in tree_edges(node.mesh, members):
                loads[f"{prefix}/nvlink/{a}-{b}"] = loads[f"{prefix}/nvlink/{b}-{a}"] = work / there
            return work, loads
        work = bus_bytes / links.fallback_bytes_per_s
        return work, {f"{prefix}/pcie/{m}/{way}": work for m in members for way in ("out", "in")}
    work = bus_bytes / rate
    port = bus_bytes / links.link_bytes_per_s
    name = "nvswitch" if links.kind == "switch" else "lane"
    loads = {f"{prefix}/{name}/{m}/{way}": port for m in members for way in ("out", "in")}
    if links.kind == "host":
        loads[f"{prefix}/bridge"] = len(members) * bus_bytes / links.bridge_bytes_per_s
        work = max(work, loads[f"{prefix}/bridge"])
    return work, loads


def _mesh_all_to_all(node: Node, index: int, members: tuple[int, ...], pair_bytes: float) -> tuple[float, Loads]:
    """Send ``pair_bytes`` between every ordered pair at once: over one link where links join it, else by the host.

    A pair gets no more from two links than from one (measured: Alpa's pairs of either kind take equally long).
    """
    links, prefix = node.links, f"node{index}"
    counts = link_counts(node.mesh, members)
    loads: Loads = {}
    linked_s = 0.0
    for source in members:
        for target in members:
            if source == target:
                continue
            count = counts.get((min(source, target), max(source, target)), 0)
            if count:
                linked_s = pair_bytes / (links.link_bytes_per_s * links.efficiency["all_to_all"])
                loads[f"{prefix}/nvlink/{source}-{target}"] = linked_s / count
            else:
                for name, seconds in _by_host(links, prefix, source, target, pair_bytes).items():
                    loads[name] = loads.get(name, 0.0) + seconds
    return max(linked_s, *loads.values()), loads


def _by_host(links: LinkType, prefix: str, source: int, target: int, num_bytes: float) -> Loads:
    """Return loads of bytes between two GPUs of a mesh that no link joins: their lanes, and the host's memory."""
    lane_s = num_bytes / links.fallback_bytes_per_s
    return {
        f"{prefix}/pcie/{source}/out": lane_s,
        f"{prefix}/pcie/{target}/in": lane_s,
        f"{prefix}/bridge": num_bytes / links.bridge_bytes_per_s,
    }


def _across(
    cluster: Cluster, groups: dict[int, tuple[int, ...]], kind: str, node_bytes: float, *, tree: bool = False
) -> Flow:
    """Return the flow over several nodes; ``node_bytes`` leave (and enter) each node per byte of size.

    Data pass through links inside nodes and cards at once, each at its own share of a protocol: the slower rules.
    """
    n = sum(len(members) for members in groups.values())
    loads: Loads = {}
    by_links: list[tuple[LinkType, float]] = []
    outside_s = 0.0  # By cards, and by the lane of a GPU that is alone in its node.
    for index, members in groups.items():
        node = cluster.nodes[index]
        leaving = node_bytes
        if kind == "all_to_all":
            leaving = len(members) * (n - len(members)) / n
        if len(members) > 1:
            if kind == "all_to_all" and node.links.kind == "mesh":
                seconds, inside = _mesh_all_to_all(node, index, members, 1.0 / n)
            else:
                share = (len(members) - 1) / n if kind == "all_to_all" else bus_factor(kind, n)
                seconds, inside = _ring(node, index, kind, members, share)
                seconds /= node.links.efficiency[kind]
            by_links.append((node.links, seconds))
            loads.update(inside)
        elif node.links.kind == "host":  # its lane takes all that leaves the node
            outside_s = max(outside_s, leaving / node.links.point_to_point_bytes_per_s)
            port = leaving * _lane_s_per_byte(node.links)
            loads |= {f"node{index}/lane/{slot}/{way}": port for slot in members for way in ("out", "in")}
        nics = sorted({nic for slot in members for nic in node.nics_of(slot)})
        seconds = leaving / (len(nics) * node.network.nic_bytes_per_s)
        outside_s = max(outside_s, seconds / node.network.efficiency[kind])
        if kind != "all_to_all" and not tree:
            seconds *= 1 + node.network.relay_load * (len(members) - 1)
        for nic in nics:
            loads[f"node{index}/nic{nic}/out"] = loads[f"node{index}/nic{nic}/in"] = seconds
    work = max([outside_s, *(seconds for _, seconds in by_links)])
    links = [(cluster.nodes[index].links, len(members)) for index, members in groups.items()]
    network = max((cluster.nodes[index].network for index in groups), key=_slowness)
    # A tree goes up from node to node; a part of a ring passes n - 1 times, at most once from each node to the next.
    hops = ceil(log2(len(groups))) if tree else min(len(groups), n - 1)
    passes = 2 if kind == "all_reduce" else 1
    protocols = []
    for protocol in network.protocols:
        own = [(_protocol_inside(each, protocol.name), seconds) for each, seconds in by_links]
        slowest = max(
            [outside_s / protocol.bandwidth_fraction, *(seconds / each.bandwidth_fraction for each, seconds in own)]
        )
        launch_s = max([protocol.launch_s, *(each.launch_s for each, _ in own)])
        steps_s = hops * protocol.step_s + (_chain_s if tree else _inside_s)(links, protocol.name)
        protocols.append(FlowProtocol(launch_s + passes * steps_s, work / slowest))
    fill_bytes = (network.tree_fill_bytes or 0.0) if tree else 0.0
    return Flow(work, tuple(loads.items()), tuple(protocols), fill_bytes)


def _slowness(network: NetworkType) -> list[tuple[float, float, float]]:
    """Return what orders networks by how long their steps take; equal ones have equal protocols."""
    return [(each.step_s, each.launch_s, -each.bandwidth_fraction) for each in network.protocols]


def _protocol_inside(links: LinkType, name: str) -> Protocol:
    """Return the protocol of that name inside a node, or its quickest where it has none of that name."""
    return next((each for each in links.protocols if each.name == name), links.protocols[0])


def _step_s(links: LinkType, protocol: str) -> float:
    """Return the seconds of a step inside a node of what goes over several."""
    if links.step_over_nodes_s is not None:
        return links.step_over_nodes_s
    return _protocol_inside(links, protocol).step_s


def _chain_s(nodes: Sequence[tuple[LinkType, int]], protocol: str) -> float:
    """Return the seconds of a tree's steps inside nodes: down the chain of each one's members, all at once."""
    return max((count - 1) * _step_s(links, protocol) for links, count in nodes)


def _inside_s(nodes: Sequence[tuple[LinkType, int]], protocol: str) -> float:
    """Return the seconds of a ring's steps inside nodes: all but the one that a part never needs, the quickest."""
    steps: Counter[float] = Counter()
    for links, count in nodes:
        steps[_step_s(links, protocol)] += count - 1
    left = +steps
    if left:
        left[min(left)] -= 1
    return sum(count * step_s for step_s, count in left.items())
