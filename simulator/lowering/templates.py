"""One stage's program for one microbatch, bound to representative devices: a block of tasks to be tiled."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hardware_models.communication import Communication
from simulator.costs import EMPTY, Segment
from simulator.fidelity import Fidelity
from simulator.lowering.mesh import MeshCollective, batch_degree, groups
from simulator.lowering.program import Item, StageView
from simulator.lowering.symmetry import Channel, Partition, Traffic
from simulator.lowering.transfers import Transfer
from simulator.taskgraph import COMMUNICATION, COMPUTATION

StreamKey = tuple[int, Hashable]
"""A representative device and the stream on it."""


@dataclass
class TaskRows:
    """Columns of a few tasks; ids are positions."""

    work_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    lead_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    bound_s: list[float] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    host_waits: list[bool] = field(default_factory=list)
    cause: list[str] = field(default_factory=list)
    name: list[str] = field(default_factory=list)
    stage: list[int] = field(default_factory=list)
    shares: list[dict[int, float]] = field(default_factory=list)
    predecessors: list[list[int]] = field(default_factory=list)
    streams: dict[StreamKey, list[int]] = field(default_factory=dict)
    hosts: dict[int, list[int]] = field(default_factory=dict)
    members: list[tuple[int, ...]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.work_s)

    def add(
        self,
        *,
        cause: str,
        name: str,
        stage: int,
        kind: int,
        work_s: float,
        latency_s: float = 0.0,
        lead_s: float = 0.0,
        host_s: float = 0.0,
        bound_s: float = 0.0,
        host_waits: bool = False,
        shares: Mapping[int, float] | None = None,
        predecessors: Iterable[int] = (),
        streams: Iterable[StreamKey] = (),
        hosts: Iterable[int] = (),
    ) -> int:
        """Append a task and return its position."""
        task = len(self.work_s)
        self.work_s.append(work_s)
        self.latency_s.append(latency_s)
        self.lead_s.append(lead_s)
        self.host_s.append(host_s)
        self.bound_s.append(bound_s)
        self.kind.append(kind)
        self.host_waits.append(host_waits)
        self.cause.append(cause)
        self.name.append(name)
        self.stage.append(stage)
        self.shares.append(dict(shares or {}))
        self.predecessors.append(sorted(set(predecessors)))
        for key in streams:
            self.streams.setdefault(key, []).append(task)
        launched_by = tuple(hosts)
        self.members.append(launched_by)
        for device in launched_by:
            self.hosts.setdefault(device, []).append(task)
        return task


@dataclass(frozen=True)
class Send:
    """A transfer task at the end of a template.

    Attributes:
        task: Position in the template.
        source, target: Representative devices.
    """

    task: int
    source: int
    target: int


@dataclass
class Template:
    """A block of tasks for one (stage, phase, variant).

    Attributes:
        rows: The tasks.
        heads: Per representative, tasks that wait for what the stage receives.
        tails: Per representative, the tasks after which the action's chain is done.
        free_heads: Per representative, unchained tasks that wait for the previous action only.
        sends: Transfers to the neighbouring stage.
        unchained: Per representative, unchained tasks that nothing in the block waits for.
    """

    rows: TaskRows = field(default_factory=TaskRows)
    heads: dict[int, list[int]] = field(default_factory=dict)
    tails: dict[int, list[int]] = field(default_factory=dict)
    free_heads: dict[int, list[int]] = field(default_factory=dict)
    sends: list[Send] = field(default_factory=list)
    unchained: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class StagePlacement:
    """A stage on representative devices.

    Attributes:
        view: The stage.
        classes: Representatives of the stage's devices, ascending.
        example: Representative to the local index of one of its devices.
        gpu_type: Representative to device type.
    """

    view: StageView
    classes: tuple[int, ...]
    example: Mapping[int, int]
    gpu_type: Mapping[int, str]

    def samples(self, index: int, representative: int) -> int:
        """Return the samples that the representative works on in operator ``index``."""
        sharding = self.view.shardings[index]
        degree = batch_degree(sharding)
        base, extra = divmod(self.view.plan.microbatch_size, degree)
        if not extra:
            return base
        return base + (batch_coordinate(sharding, self.example[representative]) < extra)

    def segment(self, item: Item, representative: int) -> Segment:
        """Return the computation of an item on a representative."""
        total = EMPTY
        costs = self.view.costs
        for index, phase in item.parts:
            cost = costs.operator(
                index, self.view.shardings[index], self.samples(index, representative), self.gpu_type[representative]
            )
            total = total.then(getattr(cost, phase))
        return total


def batch_coordinate(sharding: Sequence[tuple[str, int, int]], local: int) -> int:
    """Return the number of the replica that local device ``local`` belongs to."""
    coordinates = []
    for _, size, _ in reversed(sharding):
        coordinates.append(local % size)
        local //= size
    replica = 0
    for (split, size, _), coordinate in zip(sharding, reversed(coordinates), strict=True):
        if split == "batch":
            replica = replica * size + coordinate
    return replica


class ChannelTable:
    """All channels of a plan: collected first, then looked up by representative."""

    def __init__(self, hardware_collective, hardware_transfer, *, contention: bool) -> None:  # type: ignore[no-untyped-def]
        self._collective = hardware_collective
        self._transfer = hardware_transfer
        self._contention = contention
        self._groups: dict[tuple[Hashable, tuple[int, ...]], dict[Traffic, tuple[float, float, object]]] = {}
        self._ordered: set[Hashable] = set()
        self._known: set[Hashable] = set()
        self.channels: list[Channel] = []
        self._by_family: dict[Hashable, list[int]] = {}
        self.partition: Partition | None = None

    def add_collective(self, stage: int, devices: Sequence[int], item: MeshCollective) -> None:
        """Register every group of a collective of a stage."""
        if (stage, item) in self._known:
            return
        self._known.add((stage, item))
        for members in groups(item.sizes, item.axes):
            physical = tuple(devices[local] for local in members)
            self.add_group(("collective", stage, item.sizes, item.axes), physical, item.collective, item.num_bytes)

    def add_group(self, family: Hashable, devices: tuple[int, ...], collective: str, num_bytes: float) -> None:
        """Register one group and one size."""
        table = self._groups.setdefault((family, devices), {})
        traffic = (collective, num_bytes)
        if traffic not in table:
            table[traffic] = self._priced(self._collective(collective, num_bytes, devices))

    def add_transfer(self, family: Hashable, transfer: Transfer) -> None:
        """Register one transfer."""
        self._ordered.add(family)
        devices = (transfer.source, transfer.target)
        self._groups[family, devices] = {
            "transfer": self._priced(self._transfer(transfer.num_bytes, transfer.source, transfer.target))
        }

    def _priced(self, cost: Communication) -> tuple[float, float, object]:
        return cost.latency_s, cost.work_s, cost.shares if self._contention else ()

    def freeze(self) -> list[Channel]:
        """Return all channels, in the order registered."""
        for (family, devices), table in self._groups.items():
            costs = tuple((traffic, latency, work, shares) for traffic, (latency, work, shares) in table.items())
            self._by_family.setdefault(family, []).append(len(self.channels))
            self.channels.append(Channel(family, devices, family in self._ordered, costs))  # type: ignore[arg-type]
        return self.channels

    def classes(self, family: Hashable) -> list[tuple[int, Channel]]:
        """Return ``(channel class, an example)`` of a family, one per class."""
        assert self.partition is not None
        found: dict[int, Channel] = {}
        for position in self._by_family.get(family, ()):
            found.setdefault(self.partition.channel_class[position], self.channels[position])
        return sorted(found.items())

    def representatives(self, channel: Channel) -> tuple[int, ...]:
        """Return the representatives of a channel's members, without repeats, in order."""
        assert self.partition is not None
        return tuple(dict.fromkeys(self.partition.device_class[device] for device in channel.members))

    def price(self, channel_class: int, traffic: Traffic) -> tuple[float, float, dict[int, float]]:
        """Return latency, work and the shares on representative resources."""
        assert self.partition is not None
        channel = self.channels[self.partition.channel_examples[channel_class]]
        for known, latency, work, _ in channel.costs:
            if known == traffic:
                return latency, work, self.partition.shares[channel_class].get(traffic, {})
        raise AssertionError(f"traffic {traffic} was not registered")


@dataclass
class TemplateBuilder:
    """Binds item lists of one stage to representatives."""

    placement: StagePlacement
    channels: ChannelTable
    fidelity: Fidelity
    launch_s: Mapping[int, float]

    def build(
        self, items: Sequence[Item], transfer_family: Hashable | None, num_receives: Mapping[int, int], label: str
    ) -> Template:
        """Return the template of ``items``.

        Args:
            items: The stage's program for one microbatch.
            transfer_family: Family of the transfers that leave afterwards; None at the pipeline's end.
            num_receives: Per representative, how many transfers one of its devices posts before it starts.
            label: Pass in words, for names.
        """
        template = Template()
        view = self.placement.view
        workload = view.costs.problem.workload
        tails: dict[int, list[int]] = {c: [] for c in self.placement.classes}
        positions: dict[int, list[int]] = {}
        waited: set[int] = set()
        sends = self.channels.classes(transfer_family) if transfer_family is not None else []
        num_sends = self._num_sends(sends, transfer_family)
        computed = [position for position, item in enumerate(items) if item.collective is None]
        for position, item in enumerate(items):
            name = workload.operators[item.operator].name if item.operator >= 0 else label
            tasks = []
            if item.collective is None:
                for c in self.placement.classes:
                    segment = self.placement.segment(item, c)
                    if position == computed[0]:
                        segment = Segment.launch(self.launch_s[c] * num_receives.get(c, 0)).then(segment)
                    if position == computed[-1]:
                        segment = segment.then(Segment.launch(self.launch_s[c] * num_sends.get(c, 0)))
                    tasks.append(self._add_segment(template, item, name, c, segment, tails, positions))
            else:
                tasks = self._add_collective(template, item, name, tails, positions)
            for after in item.after:
                waited.update(positions[after])
            positions[position] = tasks
            for task in tasks:
                members = template.rows.members[task]
                if item.chained:
                    for c in members:
                        if not tails[c]:
                            template.heads.setdefault(c, []).append(task)
                elif not item.after:
                    for c in members:
                        template.free_heads.setdefault(c, []).append(task)
            if item.chained:
                for task in tasks:
                    for c in template.rows.members[task]:
                        tails[c] = [task]
        for position, item in enumerate(items):
            if not item.chained:
                for task in positions[position]:
                    if task not in waited:
                        for c in template.rows.members[task]:
                            template.unchained.setdefault(c, []).append(task)
        template.tails = tails
        for channel_class, channel in sends:
            self._add_send(template, channel_class, channel, transfer_family, label)
        return template

    def _num_sends(self, sends: list[tuple[int, Channel]], family: Hashable | None) -> dict[int, int]:
        assert self.channels.partition is not None
        counts: dict[int, int] = {}
        example_of = {
            c: self.placement.view.stage.devices[local] for c, local in self.placement.example.items()
        }
        for position in self.channels._by_family.get(family, ()) if sends else ():
            source = self.channels.channels[position].members[0]
            c = self.channels.partition.device_class[source]
            if example_of.get(c) == source:
                counts[c] = counts.get(c, 0) + 1
        return counts

    def _add_segment(
        self,
        template: Template,
        item: Item,
        name: str,
        c: int,
        segment: Segment,
        tails: dict[int, list[int]],
        positions: dict[int, list[int]],
    ) -> int:
        extra = [task for after in item.after for task in positions[after] if c in template.rows.members[task]]
        host = self.fidelity.host
        return template.rows.add(
            cause=item.cause,
            name=name,
            stage=self.placement.view.position,
            kind=COMPUTATION,
            work_s=segment.device_s,
            lead_s=segment.lead_s if host else 0.0,
            host_s=segment.host_s if host else 0.0,
            bound_s=segment.bound_s - segment.lead_s if host else 0.0,
            predecessors=[*tails[c], *extra],
            streams=[(c, "compute")],
            hosts=[c],
        )

    def _add_collective(
        self,
        template: Template,
        item: Item,
        name: str,
        tails: dict[int, list[int]],
        positions: dict[int, list[int]],
    ) -> list[int]:
        collective = item.collective
        assert collective is not None
        tasks = []
        family = ("collective", self.placement.view.position, collective.sizes, collective.axes)
        for channel_class, channel in self.channels.classes(family):
            members = self.channels.representatives(channel)
            latency, work, shares = self.channels.price(channel_class, (collective.collective, collective.num_bytes))
            launch = max(self.launch_s[c] for c in members) if self.fidelity.host else 0.0
            before = [task for c in members for task in tails[c]] if item.chained else []
            before += [
                task
                for after in item.after
                for task in positions[after]
                if any(c in members for c in template.rows.members[task])
            ]
            tasks.append(
                template.rows.add(
                    cause=item.cause,
                    name=f"{collective.collective} {name}",
                    stage=self.placement.view.position,
                    kind=COMMUNICATION,
                    work_s=work,
                    latency_s=latency,
                    lead_s=launch,
                    host_s=launch,
                    shares=shares,
                    predecessors=before,
                    streams=[(c, (item.role, collective.sizes, collective.axes)) for c in members],
                    hosts=members,
                )
            )
        return tasks

    def _add_send(
        self, template: Template, channel_class: int, channel: Channel, family: Hashable, label: str
    ) -> None:
        assert self.channels.partition is not None
        source, target = (self.channels.partition.device_class[device] for device in channel.members)
        latency, work, shares = self.channels.price(channel_class, "transfer")
        if not self.fidelity.transfers:
            latency = work = 0.0
            shares = {}
        runtime = self.placement.view.costs.problem.runtime
        task = template.rows.add(
            cause="transfer",
            name=f"transfer after {label}",
            stage=self.placement.view.position,
            kind=COMMUNICATION,
            work_s=work,
            latency_s=latency,
            host_waits=self.fidelity.host and self.fidelity.transfers and "receive" in runtime.host_waits,
            shares=shares,
            predecessors=template.tails[source],
            streams=[(source, ("send", family, channel_class)), (target, ("receive", family, channel_class))],
        )
        template.sends.append(Send(task, source, target))
