"""Link technologies inside a node and between nodes, as the data file ``link_types.yaml`` states them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import field_validator

from datafiles.loader import load_mapping
from datafiles.names import nearest
from datafiles.schema import FileModel, validated
from hardware_models.schema import BytesPerS, Fraction, Load, RampBytes, Seconds, Text

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")

JOINED_GATHER = "joined_all_gather"
"""An all-gather of shards along a dimension that is not the outermost in memory, by a framework that gathers into a
list and joins its entries: what ranks hold does not lie in one piece, so the result is copied, JOINING_COPIES times."""

GATHERS = ("all_gather", JOINED_GATHER)

OWNER_REDUCE = "owner_reduce"
"""What reduce_scatter leaves, by one reduce to each owner of a part after the other. A part's reduce takes it once over
every link of a chain, as a broadcast does the other way: all parts together take as long as a broadcast of them."""

JOINING_COPIES = 3
"""Aceso's Wide-ResNet 0.5B gathers channels behind each convolution of the default split. Its forward rows are longer
than those that do not gather by 2.6 to 3.2 times reading and writing the output on one GPU (outputs over 100 MB), and
than a convolution and a gather as modelled by 3.1, 2.8 and 2.7 times on 2, 4 and 8 (aceso_v100/ops.csv.gz, db eurosys,
fp32). torch's ``all_gather`` copies from one buffer into the list, and ``cat`` from the list into the result."""


class Protocol(FileModel):
    """One way the library moves data: NCCL chooses between a quick one and a wide one.

    Attributes:
        name: ``low_latency`` or ``simple``.
        launch_s: Seconds paid once.
        step_s: Seconds per step of the ring or tree.
        bandwidth_fraction: Share of the full rate that it reaches.
    """

    name: Text
    launch_s: Seconds
    step_s: Seconds
    bandwidth_fraction: Fraction


class LinkType(FileModel):
    """Links between the GPUs of one node.

    Attributes:
        kind: ``mesh`` (point-to-point links with multiplicity), ``switch`` (a port per GPU) or ``host``
            (a lane per GPU below one host bridge).
        link_bytes_per_s: Collective data rate of one physical link, port or lane, each direction: what
            large transfers reach, not the nominal figure.
        pair_fraction: Share of that rate that groups of two reach.
        point_to_point_bytes_per_s: Rate of a send/receive over one link, port or lane.
        point_to_point_latency_s: Seconds of a send/receive of nothing.
        fallback_bytes_per_s: Mesh: rate between GPUs that no link joins, and of rings that do not close.
        bridge_bytes_per_s: What a host's bridge carries in all; on a mesh, its memory between GPUs that no link joins.
        efficiency: Rate of each collective over that of a large all-reduce.
        local_bytes_per_s: Rate at which a rank deals with its own n-th of the data, which crosses no link: copied
            (all-gather), added up (reduce-scatter). Collectives that are not named have no such cost.
        protocols: At least one.
        step_over_nodes_s: Step of rings and trees that go on to other nodes, under every protocol; None: as inside a
            node. Where the switch adds up itself, what takes as long for two GPUs as for eight is no ring's.
    """

    kind: Literal["mesh", "switch", "host"]
    link_bytes_per_s: BytesPerS
    pair_fraction: Fraction
    point_to_point_bytes_per_s: BytesPerS
    point_to_point_latency_s: Seconds
    fallback_bytes_per_s: BytesPerS
    bridge_bytes_per_s: BytesPerS
    efficiency: Mapping[str, Fraction]
    protocols: tuple[Protocol, ...]
    source: Text
    local_bytes_per_s: Mapping[str, BytesPerS] = {}
    step_over_nodes_s: Seconds | None = None

    @field_validator("efficiency")
    @classmethod
    def _complete(cls, value: Mapping[str, float]) -> Mapping[str, float]:
        return _all_collectives(value)

    @field_validator("local_bytes_per_s")
    @classmethod
    def _known(cls, value: Mapping[str, float]) -> Mapping[str, float]:
        if not set(value) <= set(COLLECTIVES):
            raise ValueError(f"must have keys of {', '.join(COLLECTIVES)} only")
        return value

    @field_validator("protocols")
    @classmethod
    def _some(cls, value: tuple[Protocol, ...]) -> tuple[Protocol, ...]:
        return _at_least_one(value)


class NetworkType(FileModel):
    """The network between nodes, per NIC.

    Attributes:
        nominal_bytes_per_s: What the link is sold as, each direction.
        collective_fraction: Share of it that ring collectives reach.
        point_to_point_fraction: Share of it that one send/receive reaches (a flow or two, not all channels).
        point_to_point_latency_s: Seconds of a send/receive of nothing.
        efficiency, protocols: As for links.
        tree_fill_bytes: Bytes' worth of time until the tree of an all-reduce runs at full rate: what makes the library
            prefer the ring, which moves more, for all but large messages. None where it takes rings only.
        relay_load: What each hop of a ring inside a node adds to its load on the node's cards, as a share of that load.
            Where GPUs reach neither each other nor the card but through the host's memory, rings that share a card
            wait for the host as well. A ring alone is not slowed.
    """

    nominal_bytes_per_s: BytesPerS
    collective_fraction: Fraction
    point_to_point_fraction: Fraction
    point_to_point_latency_s: Seconds
    efficiency: Mapping[str, Fraction]
    protocols: tuple[Protocol, ...]
    source: Text
    tree_fill_bytes: RampBytes | None = 0.0
    relay_load: Load = 0.0

    @field_validator("efficiency")
    @classmethod
    def _complete(cls, value: Mapping[str, float]) -> Mapping[str, float]:
        return _all_collectives(value)

    @field_validator("protocols")
    @classmethod
    def _some(cls, value: tuple[Protocol, ...]) -> tuple[Protocol, ...]:
        return _at_least_one(value)

    @property
    def nic_bytes_per_s(self) -> float:
        """Rate of one NIC in one direction that large collectives reach."""
        return self.nominal_bytes_per_s * self.collective_fraction


def _all_collectives(value: Mapping[str, float]) -> Mapping[str, float]:
    if set(value) != set(COLLECTIVES):
        raise ValueError(f"must have exactly the keys {', '.join(COLLECTIVES)}")
    return value


def _at_least_one(value: tuple[Protocol, ...]) -> tuple[Protocol, ...]:
    if not value:
        raise ValueError("must list at least one protocol")
    return value


@cache
def _tables() -> Mapping[str, Mapping[str, Mapping[str, object]]]:
    return load_mapping(Path(__file__).parent / "link_types.yaml")


def link_names() -> tuple[str, ...]:
    """Return the names of all shipped links inside a node, sorted."""
    return tuple(sorted(_tables()["links"]))


def network_names() -> tuple[str, ...]:
    """Return the names of all shipped networks between nodes, sorted."""
    return tuple(sorted(_tables()["networks"]))


@cache
def load_link(name: str) -> LinkType:
    """Return a shipped intra-node link type by name."""
    table = _tables()["links"]
    if name not in table:
        raise ValueError(f"links must be a known link type, got {name!r}; {nearest(name, table)}")
    return validated(LinkType, table[name], f"link_types.yaml: {name}")


@cache
def load_network(name: str) -> NetworkType:
    """Return a shipped network type by name."""
    table = _tables()["networks"]
    if name not in table:
        raise ValueError(f"network must be a known type, got {name!r}; {nearest(name, table)}")
    return validated(NetworkType, table[name], f"link_types.yaml: {name}")
