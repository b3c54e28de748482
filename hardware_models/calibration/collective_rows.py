"""Published measurements of collectives as rows: who ran what at once, and how long it took.

Three ways of measuring, and so three ways to launch. nccl-tests and PyTorch drive each GPU from a process of its own.
Alpa's XLA drives all GPUs of a node from one process that launches them one after the other: its smallest collectives
take 23 us (p3.16xlarge) or 19 us (A100) times the GPUs of a group inside a node, whatever the collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from datafiles.tables import load_table
from hardware_models.cluster import Cluster
from hardware_models.collectives import Flow, collective_flows, quickest_price
from hardware_models.links import LinkType, NetworkType

ALPA_P3, ALPA_A100 = "collectives_p3_16xlarge_osdi22.csv", "collectives_a100_8gpu.csv"
SIMAI = "collective_busbw_ratio_simai.csv"
ALPA_LOOP_S = 16e-6
"""Loop overhead in every Alpa row: 14 to 18 us by its data description, the rows of no bytes."""

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
}
MIB = 2**20
CARD_BYTES_PER_S = 50e9
"""400 Gb/s."""
Kind = TypeVar("Kind", LinkType, NetworkType)


@dataclass(frozen=True)
class CollectiveRow:
    """One measured collective, run by several groups at once.

    Attributes:
        cluster: Cluster string.
        kind: As in ``HardwareModel.collective``.
        groups: Device ids of each group.
        num_bytes: Size as in ``HardwareModel.collective``.
        seconds: Measured.
        ranks_per_process: GPUs of a group that one process launches one after the other; 0 where each has its own.
        dtype: Of the elements.
    """

    cluster: str
    kind: str
    groups: tuple[tuple[int, ...], ...]
    num_bytes: float
    seconds: float
    ranks_per_process: int = 0
    dtype: str = "f32"

    @property
    def size_exponent(self) -> int:
        """Floor of the size's binary logarithm."""
        return int(self.num_bytes).bit_length() - 1


def alpa_rows(path: Path, preset: str) -> Iterator[CollectiveRow]:
    """Yield Alpa's rows: every group of a shape ran at the same time."""
    integers = ("group_size", "stride", "num_groups", "gpus_per_node_in_group", "bytes")
    for row in load_table(path, floats=("seconds",), integers=integers):
        if row["bytes"] == 0 or row["collective"] not in KINDS:
            continue
        nodes, gpus = map(int, row["mesh"].split("x"))
        size, stride = row["group_size"], row["stride"]
        firsts = [rank for rank in range(nodes * gpus) if rank // stride % size == 0]
        assert len(firsts) == row["num_groups"], row
        # An all-to-all is stated by the whole tensor, of which each rank holds a part.
        share = size if row["collective"] == "all-to-all" else 1
        yield CollectiveRow(
            cluster=f"{preset}:{nodes}x{gpus}",
            kind=KINDS[row["collective"]],
            groups=tuple(tuple(first + stride * rank for rank in range(size)) for first in firsts),
            num_bytes=row["bytes"] / share,
            seconds=row["seconds"] - ALPA_LOOP_S,
            ranks_per_process=row["gpus_per_node_in_group"],
            dtype=row["dtype"],
        )


def measured_rows(path: Path, gpu: str, source: str, preset: str) -> list[CollectiveRow]:
    """Return the all-reduces inside one node of ``gpu_efficiency/collectives_measured.csv``, a process per GPU."""
    table = load_table(path, floats=("time_ms",), integers=("num_gpus", "gpus_per_node", "bytes"))
    return [
        CollectiveRow(
            cluster=f"{preset}:1x{row['num_gpus']}",
            kind="all_reduce",
            groups=(tuple(range(row["num_gpus"])),),
            num_bytes=float(row["bytes"]),
            seconds=row["time_ms"] / 1e3,
        )
        for row in table
        if row["gpu"] == gpu
        and row["source"].startswith(source)
        and row["op"] == "all_reduce"
        and row["num_gpus"] == row["gpus_per_node"]
    ]


def simai_rows(path: Path, preset: str, num_nodes: Iterable[int]) -> list[CollectiveRow]:
    """Return SimAI's shares of the cards' nominal rate (``nic_ratio``), up to 1 GiB, as gathers over whole nodes.

    The table says neither the collective nor the cards; it is read as ring all-gathers of nodes with eight cards of
    400 Gb/s.
    """
    scopes = {f"{nodes}node{8 * nodes}": nodes for nodes in num_nodes}
    table = load_table(path, floats=("busbw_ratio",), integers=("bytes",))
    return [
        CollectiveRow(
            cluster=f"{preset}:{nodes}x8",
            kind="all_gather",
            groups=(tuple(range(8 * nodes)),),
            num_bytes=float(row["bytes"]),
            seconds=row["bytes"] * (1 - 1 / (8 * nodes)) / (row["busbw_ratio"] * 8 * CARD_BYTES_PER_S),
        )
        for row in table
        if row["table"] == "nic_ratio" and (nodes := scopes.get(row["scope"])) and row["bytes"] <= 2**30
    ]


def aceso_rows(path: Path, database: str, preset: str) -> list[CollectiveRow]:
    """Return Aceso's all-reduces inside a node, the quickest of each size, from 1 MiB.

    Its all-gathers and reduce-scatters go through lists of tensors, whose copies they contain.
    """
    best: dict[tuple[int, int], float] = {}
    for row in load_table(path, floats=("ms",), integers=("group_size", "message_mib")):
        if row["db"] == database and row["collective"] == "all_reduce" and row["message_mib"] > 0:
            key = (row["group_size"], row["message_mib"])
            best[key] = min(best.get(key, row["ms"]), row["ms"])
    return [
        CollectiveRow(
            cluster=f"{preset}:1x{size}",
            kind="all_reduce",
            groups=(tuple(range(size)),),
            num_bytes=float(mib * MIB),
            seconds=milliseconds / 1e3,
            dtype="f16",
        )
        for (size, mib), milliseconds in best.items()
    ]


def galvatron_rows(path: Path, preset: str) -> list[CollectiveRow]:
    """Return the all-reduces and all-to-alls of Galvatron's eight A100s (``galvatron/a100``), a process per GPU."""
    kinds = {"allreduce": "all_reduce", "all2all": "all_to_all"}
    return [
        CollectiveRow(
            cluster=f"{preset}:1x{row['group_size']}",
            kind=kinds[row["op"]],
            groups=(tuple(range(row["group_size"])),),
            num_bytes=float(row["message_MiB"] * MIB),
            seconds=row["time_ms"] / 1e3,
        )
        for row in load_table(path, floats=("time_ms",), integers=("group_size", "message_MiB"))
    ]


class Predictor:
    """Prices rows on clusters whose link constants may be replaced.

    Args:
        clusters: By the names that rows have for them.
        launch_per_rank_s: Of one rank where one process launches several.
    """

    def __init__(self, clusters: dict[str, Cluster], launch_per_rank_s: float) -> None:
        self._clusters = clusters
        self._launch_per_rank_s = launch_per_rank_s
        self._bare = {name: _without_launch(cluster) for name, cluster in clusters.items()}
        self._flows: dict[tuple[str, str, tuple[int, ...], bool], tuple[Flow, ...]] = {}

    def seconds(self, row: CollectiveRow) -> float:
        """Return when the last of the row's groups ends, all started at once and slowed by the fullest link."""
        bare = row.ranks_per_process > 0
        costs = []
        load: Counter[str] = Counter()
        for group in row.groups:
            flows = self._of(row.cluster, row.kind, group, bare)
            cost = quickest_price(flows, row.num_bytes)
            costs.append(cost)
            load.update(dict(cost.shares))
        slowest = max(
            cost.latency_s + cost.work_s * max([1.0, *(load[name] for name, _ in cost.shares)]) for cost in costs
        )
        return slowest + self._launch_per_rank_s * row.ranks_per_process

    def _of(self, name: str, kind: str, group: tuple[int, ...], bare: bool) -> tuple[Flow, ...]:
        key = (name, kind, group, bare)
        if key not in self._flows:
            self._flows[key] = collective_flows((self._bare if bare else self._clusters)[name], kind, group)
        return self._flows[key]


def _without_launch(cluster: Cluster) -> Cluster:
    """Return the cluster without the launch that its protocols share: whoever measured launched in another way."""
    nodes = []
    for node in cluster.nodes:
        links, network = _without_shared_launch(node.links), _without_shared_launch(node.network)
        nodes.append(replace(node, links=links, network=network))
    return Cluster(name=cluster.name, nodes=tuple(nodes))


def _without_shared_launch(kind: Kind) -> Kind:
    shared = min(protocol.launch_s for protocol in kind.protocols)
    rest = tuple(
        protocol.model_copy(update={"launch_s": protocol.launch_s - shared}) for protocol in kind.protocols
    )
    return kind.model_copy(update={"protocols": rest})


def relative_errors(predictor: Predictor, rows: Sequence[CollectiveRow]) -> list[float]:
    """Return ``predicted / measured - 1`` of each row."""
    return [predictor.seconds(row) / row.seconds - 1 for row in rows]


def clusters_of(rows: Iterable[CollectiveRow]) -> set[str]:
    """Return the cluster strings that rows name."""
    return {row.cluster for row in rows}
