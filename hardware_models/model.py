"""The hardware model: pure functions of a cluster, optional measured tables and calibration constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hardware_models.cluster import Cluster, parse_cluster, same_preset
from hardware_models.collective_table import TRANSFERS, Asked, CollectiveTable
from hardware_models.collectives import Flow, collective_flows, joining_s_per_byte, quickest_price, transfer_flow
from hardware_models.communication import Communication
from hardware_models.compute import kernel_time_s
from hardware_models.crowding import CrowdedGroup, slowdowns
from hardware_models.gpus import GpuType
from hardware_models.group_shapes import GroupShape, full_nodes, groups_at_once, shape_of, slots_by_node
from hardware_models.links import JOINED_GATHER, OWNER_REDUCE
from hardware_models.profile import OperatorProfile
from workloads.kernels import Kernel

NOTHING = Communication(latency_s=0.0, work_s=0.0)
"""A collective of one rank, or of no bytes."""


@dataclass(frozen=True)
class HardwareModel:
    """What a cluster costs: kernels, launches, collectives, transfers, optimizer, memory.

    Attributes:
        cluster: Nodes, GPUs, links.
        operator_profile: Measured operator times; where present they come before the efficiency curves
            (the cost tables decide, from ``lookup``).
        collective_table: Measured collectives and transfers; where present they come before the link model.
        table_of: Measured name of the preset that the table was measured on; None: any. Others keep the link model.
        left_out: What a calibration holds that is of other hardware and so not used, in sentences.
    """

    cluster: Cluster
    operator_profile: OperatorProfile | None = None
    collective_table: CollectiveTable | None = None
    table_of: str | None = None
    left_out: tuple[str, ...] = field(default=(), compare=False)
    _flows: dict[tuple[str, tuple[int, ...]], tuple[Flow, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _prices: dict[tuple[str, float, tuple[int, ...]], Communication] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _crowded_s: dict[tuple[str, float, CrowdedGroup], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _slowdowns: dict[tuple[str, CrowdedGroup], tuple[tuple[float, ...], ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _kernels: dict[tuple[str, Kernel, str], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _gpus: dict[str, GpuType] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def from_name(cls, text: str) -> HardwareModel:
        """Return the model of a cluster string such as ``v100-32g-dgx1:4x8``."""
        return cls(cluster=parse_cluster(text))

    def gpu(self, gpu_type: str) -> GpuType:
        """Return the constants of a GPU type of this cluster."""
        if not self._gpus:
            self._gpus.update({node.gpu.name: node.gpu for node in self.cluster.nodes})
        try:
            return self._gpus[gpu_type]
        except KeyError:
            known = ", ".join(self._gpus)
            raise ValueError(
                f"GPU type must be one of {self.cluster.name} ({known}), got {gpu_type!r}"
            ) from None

    def gpu_type(self, device: int) -> str:
        """Return the GPU type at ``device``."""
        return self.cluster.gpu_type(device)

    def memory_bytes(self, device: int) -> int:
        """Return the memory of ``device`` in bytes."""
        return self.cluster.memory_bytes(device)

    def peak_flop_per_s(self, gpu_type: str, dtype: str) -> float:
        """Return the dense peak of a GPU type in flop/s."""
        return self.gpu(gpu_type).peak(dtype)

    def kernel_time_s(self, gpu_type: str, kernel: Kernel, dtype: str) -> float:
        """Return device seconds of one kernel, launch excluded."""
        key = (gpu_type, kernel, dtype)
        if key not in self._kernels:
            self._kernels[key] = kernel_time_s(self.gpu(gpu_type), kernel, dtype)
        return self._kernels[key]

    def launch_s(self, gpu_type: str) -> float:
        """Return host seconds per kernel launch, before ``host_factor``."""
        return self.gpu(gpu_type).launch_s

    def host_factor(self, gpu_type: str) -> float:
        """Return the host's seconds over those that launches and a runtime's fields have."""
        return self.gpu(gpu_type).host_factor

    def overlap_slowdown(self, gpu_type: str) -> tuple[float, float]:
        """Return the factors ``(computation, communication)`` while both run on a device, each >= 1."""
        gpu = self.gpu(gpu_type)
        return gpu.overlap_slowdown_computation, gpu.overlap_slowdown_communication

    def with_overlap_slowdown(self, factor: float) -> HardwareModel:
        """Return the same hardware with another factor, for computation and communication of every GPU type.

        Raises:
            ValueError: If the factor is below 1.
        """
        if not factor >= 1:
            raise ValueError(f"a factor of overlap slowdown must be at least 1, got {factor}")
        changed = {"overlap_slowdown_computation": factor, "overlap_slowdown_communication": factor}
        nodes = tuple(replace(node, gpu=node.gpu.model_copy(update=changed)) for node in self.cluster.nodes)
        return replace(self, cluster=replace(self.cluster, nodes=nodes))

    def optimizer_step_s(self, gpu_type: str, num_bytes_touched: float) -> float:
        """Return device seconds of an optimizer step that reads and writes that many bytes in all."""
        gpu = self.gpu(gpu_type)
        return num_bytes_touched / (gpu.memory_bytes_per_s * gpu.optimizer_bandwidth_fraction)

    def collective(self, kind: str, num_bytes: float, devices: Sequence[int]) -> Communication:
        """Return the cost of a collective alone.

        Args:
            kind: ``all_reduce`` (bytes = buffer on every rank), ``all_gather`` (the gathered result),
                ``reduce_scatter`` (input on every rank), ``all_to_all`` (what each rank holds in total),
                ``broadcast`` (the message), ``joined_all_gather`` (as all_gather, with the copies that join it) or
                ``owner_reduce`` (as reduce_scatter, by a reduce to each owner).
            num_bytes: Size in bytes, as above, >= 0.
            devices: Ranks; their order does not matter.

        Raises:
            ValueError: If the kind is unknown, the size negative, or a device missing or named twice.
        """
        group = tuple(sorted(devices))
        key = (kind, float(num_bytes), group)
        if key not in self._prices:
            self._prices[key] = self._price(kind, float(num_bytes), group)
        return self._prices[key]

    def crowded_collective_s(self, kind: str, num_bytes: float, group: CrowdedGroup) -> float:
        """Return the seconds of a collective while the groups beside it run the same; see ``collective``."""
        key = (kind, num_bytes, group)
        if key not in self._crowded_s:
            cost = self.collective(kind, num_bytes, group.members)
            seconds = cost.alone_s
            if group.beside and cost.work_s > 0:
                own = self.flows(kind, group.members)
                quickest = [flow.quickest(num_bytes) for flow in own]
                flow = min(range(len(own)), key=lambda index: quickest[index][0])
                seconds += cost.work_s * (self.slowdowns(kind, group)[flow][quickest[flow][1]] - 1)
            self._crowded_s[key] = seconds
        return self._crowded_s[key]

    def slowdowns(self, kind: str, group: CrowdedGroup) -> tuple[tuple[float, ...], ...]:
        """Return by what the groups beside it stretch a collective's work, per flow and protocol of ``flows``."""
        key = (kind, group)
        if key not in self._slowdowns:
            beside = [self.flows(kind, members) for members in group.beside]
            self._slowdowns[key] = slowdowns(self.flows(kind, group.members), beside)
        return self._slowdowns[key]

    def flows(self, kind: str, devices: Sequence[int]) -> tuple[Flow, ...]:
        """Return the algorithms that the library may take for a collective of at least two ranks."""
        key = (kind, tuple(sorted(devices)))
        if key not in self._flows:
            self._flows[key] = collective_flows(self.cluster, *key)
        return self._flows[key]

    def transfer(self, num_bytes: float, source: int, destination: int) -> Communication:
        """Return the cost of a send/receive of ``num_bytes`` between two devices alone."""
        key = ("transfer", float(num_bytes), (source, destination))
        if key not in self._prices:
            self._prices[key] = self._price_transfer(float(num_bytes), source, destination)
        return self._prices[key]

    def is_tabled(self, nodes: Sequence[int]) -> bool:
        """Return whether the table is about groups and transfers of these nodes."""
        of = self.table_of
        return of is None or all(same_preset(of, self.cluster.nodes[node].preset) for node in nodes)

    def asked_of_table(self, kind: str, group: Sequence[int]) -> Asked | None:
        """Return what to ask the table about a collective over at least two ranks; None if it cannot know."""
        shape, nodes = shape_of(self.cluster, group), tuple(slots_by_node(self.cluster, group))
        if shape is None or not self.is_tabled(nodes):
            return None
        joined = kind == JOINED_GATHER
        return Asked(
            kind={JOINED_GATHER: "all_gather", OWNER_REDUCE: "broadcast"}.get(kind, kind),
            shape=shape,
            nodes=nodes,
            any_stride=all(self.cluster.nodes[node].links.kind != "mesh" for node in nodes),
            added_s_per_byte=joining_s_per_byte(self.cluster, group) if joined else 0.0,
        )

    def _price(self, kind: str, num_bytes: float, group: tuple[int, ...]) -> Communication:
        _check_size(num_bytes)
        if len(group) == 1:
            self.cluster.node_of(group[0])
            return NOTHING
        flows = self.flows(kind, group)
        if num_bytes == 0:
            return NOTHING
        return self._refined(kind, num_bytes, group, flows)

    def _refined(self, kind: str, num_bytes: float, group: tuple[int, ...], flows: Sequence[Flow]) -> Communication:
        """Return the cost of a collective: measured, if it was; of a joined gather, the gather's with copies.

        Outside the measured sizes it grows from that of the nearest as the link model does (``growth``).
        """
        modelled = quickest_price(flows, num_bytes)
        if self.collective_table is None:
            return modelled
        asked = self.asked_of_table(kind, group)
        if asked is None:
            return modelled
        found = self.collective_table.find(asked.kind, asked.shape, num_bytes, any_stride=asked.any_stride)
        if found is None:
            return modelled
        if found.num_bytes != num_bytes:
            own = self.flows(asked.kind, group)
            found = found.extended(num_bytes, lambda size: quickest_price(own, size).alone_s)
        found = replace(found, seconds=found.seconds + num_bytes * asked.added_s_per_byte)
        return found.replace(modelled, self._crowding(kind, num_bytes, asked.nodes, found.shape))

    def _crowding(self, kind: str, num_bytes: float, nodes: tuple[int, ...], shape: GroupShape) -> float:
        """Return the load of the fullest resource while all groups of a shape run at once, by the link model."""
        if shape.groups_per_node == 1:
            return 1.0
        whole = full_nodes(self.cluster)
        loads: dict[str, float] = {}
        for group in groups_at_once(whole, nodes, shape):
            is_transfer = kind in TRANSFERS
            flows = (transfer_flow(whole, *group),) if is_transfer else collective_flows(whole, kind, group)
            for name, share in quickest_price(flows, num_bytes).shares:
                loads[name] = loads.get(name, 0.0) + share
        return max([1.0, *loads.values()])

    def _price_transfer(self, num_bytes: float, source: int, destination: int) -> Communication:
        _check_size(num_bytes)
        a, b = self.cluster.node_of(source), self.cluster.node_of(destination)
        if source == destination or num_bytes == 0:
            return NOTHING
        flow = transfer_flow(self.cluster, source, destination)
        modelled = flow.price(num_bytes)
        if self.collective_table is None or not self.is_tabled((a, b)):
            return modelled
        kind = "transfer_intra_node" if a == b else "transfer_inter_node"
        found = self.collective_table.find(kind, 2, num_bytes, any_stride=True)
        if found is None:
            return modelled
        if found.num_bytes != num_bytes:
            found = found.extended(num_bytes, lambda size: flow.price(size).alone_s)
        nodes = (a,) if a == b else (a, b)
        return found.replace(modelled, self._crowding(kind, num_bytes, nodes, found.shape))


def _check_size(num_bytes: float) -> None:
    if not 0 <= num_bytes < float("inf"):
        raise ValueError(f"a message must have a finite size of 0 bytes or more, got {num_bytes}")
