"""One stage's program for one microbatch, bound to representative devices."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from simulator.fidelity import Fidelity
from simulator.lowering.channels import ChannelTable
from simulator.lowering.handover import handover_s
from simulator.lowering.items import Item, Program, stream_role
from simulator.lowering.placement import StagePlacement
from simulator.lowering.rows import Send, Template
from simulator.lowering.symmetry import Channel
from simulator.segments import Segment
from simulator.taskgraph import COMMUNICATION, COMPUTATION, OTHER


class Outgoing(NamedTuple):
    """The transfers that leave after a pass.

    Attributes:
        family: Of their channels; None at the pipeline's end.
        traffic: Which of what passes through these channels.
    """

    family: Hashable | None
    traffic: str


@dataclass
class TemplateBuilder:
    """Binds item lists of one stage to representatives."""

    placement: StagePlacement
    channels: ChannelTable
    fidelity: Fidelity
    launch_s: Mapping[int, float]

    def build(
        self, program: Program, outgoing: Outgoing, num_receives: Mapping[int, int], label: str
    ) -> Template:
        """Return the template of a program.

        Args:
            program: The stage's, for one microbatch.
            outgoing: The transfers that leave afterwards.
            num_receives: Per representative, how many transfers one of its devices posts before it starts.
            label: Pass in words, for names.
        """
        template = Template()
        view, items = self.placement.view, program.items
        shift = view.operators[0] - program.first
        apart = self.placement.host_is_behind(self.fidelity)
        segments = {c: self.placement.segments(program, c, apart=apart) for c in self.placement.classes}
        tails: dict[int, list[int]] = {c: [] for c in self.placement.classes}
        positions: dict[int, list[int]] = {}
        waited: set[int] = set()
        owed: dict[int, list[int]] = {}
        sends = [] if outgoing.family is None else self.channels.carrying(outgoing.family, outgoing.traffic)
        num_sends = self._num_sends(outgoing) if sends else {}
        computed = [
            position
            for position, item in enumerate(items)
            if item.collective is None and item.chained and not item.waits
        ]
        opened: set[int] = set()
        has_begun = False
        for position, item in enumerate(items):
            if not has_begun and not item.has_head_start:
                self._add_waits(template, num_receives, label, tails)
                has_begun = True
            name = self._name(item, shift) or label
            tasks = []
            if item.collective is None:
                for c in self.placement.classes:
                    first, last = position == computed[0], position == computed[-1]
                    pass_s = view.costs.pass_s(self.placement.gpu_type[c])
                    before_s = self.launch_s[c] * num_receives.get(c, 0) + pass_s if first else 0.0
                    after_s = self.launch_s[c] * num_sends.get(c, 0) if last else 0.0
                    segment = self._between(before_s, segments[c][position], after_s)
                    awaited = (*item.after, *owed.pop(c, ()))
                    tasks.append(self._add_segment(template, item, name, c, segment, tails, positions, awaited))
            else:
                tasks = self._add_collective(template, item, name, tails, positions, owed, program.first)
            for after in item.after:
                waited.update(positions[after])
            positions[position] = tasks
            for task in tasks:
                members = template.rows.members[task]
                if item.chained:
                    for c in members:
                        if not tails[c]:
                            template.heads.setdefault(c, []).append(task)
                        if c not in opened:
                            template.starters.setdefault(c, []).append(task)
                            if item.collective is not None:
                                template.openers.setdefault(c, []).append(task)
                elif not item.after and not item.early:
                    for c in members:
                        template.free_heads.setdefault(c, []).append(task)
                        if item.role == "tensor" and not tails[c]:
                            template.heads.setdefault(c, []).append(task)
            if item.chained:
                for task in tasks:
                    for c in template.rows.members[task]:
                        tails[c] = [task]
                        opened.add(c)
        for position, item in enumerate(items):
            if not item.chained:
                for task in positions[position]:
                    if task not in waited:
                        for c in template.rows.members[task]:
                            template.unchained.setdefault(c, []).append(task)
        template.tails = tails
        for channel_class, channel in sends:
            self._add_send(template, channel_class, channel, outgoing, label)
        return template

    def _add_waits(
        self, template: Template, num_receives: Mapping[int, int], label: str, tails: dict[int, list[int]]
    ) -> None:
        """Let hosts wait for what the pass needs, if they do (``Runtime.host_waits``)."""
        for c in self.placement.classes:
            if num_receives.get(c, 0) and self._waits_for_receives:
                wait = template.rows.add(
                    cause="transfer",
                    name=f"wait before {label}",
                    stage=self.placement.view.position,
                    kind=OTHER,
                    work_s=0.0,
                    host_waits=True,
                    hosts=[c],
                )
                template.heads[c] = [wait]
                tails[c] = [wait]

    def _name(self, item: Item, shift: int) -> str:
        """Return the operator that an item is of, or the first and the last of several; empty where it is of none."""
        operators = self.placement.view.costs.problem.workload.operators
        if item.operator < 0:
            return ""
        ends = item.operator, item.parts[-1][0] if item.parts else item.operator
        first, last = (operators[end + shift].name for end in ends)
        return first if first == last else f"{first} to {last}"

    def _between(self, before_s: float, segment: Segment, after_s: float) -> Segment:
        """Return the computation of an item between what the host does before and after it."""
        if self.placement.host_is_behind(self.fidelity):
            seconds = before_s + after_s
            return Segment(device_s=seconds, bound_s=seconds).then(segment)
        if before_s:
            segment = Segment.launch(before_s).then(segment)
        return segment.then(Segment.launch(after_s)) if after_s else segment

    @property
    def _waits_for_receives(self) -> bool:
        """Whether hosts launch a pass only when what it needs has arrived."""
        view = self.placement.view
        waits = view.costs.problem.runtime.host_waits_to_receive(view.plan.schedule)
        return self.fidelity.host and self.fidelity.transfers and waits

    def _num_sends(self, outgoing: Outgoing) -> dict[int, int]:
        assert self.channels.partition is not None
        counts: dict[int, int] = {}
        example_of = {c: self.placement.view.stage.devices[local] for c, local in self.placement.example.items()}
        for channel in self.channels.of_family(outgoing.family):
            if not channel.carries(outgoing.traffic):
                continue
            source = channel.members[0]
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
        awaited: tuple[int, ...],
    ) -> int:
        extra = [task for after in awaited for task in positions[after] if c in template.rows.members[task]]
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
            host_waits=item.waits and host,
        )

    def _add_collective(
        self,
        template: Template,
        item: Item,
        name: str,
        tails: dict[int, list[int]],
        positions: dict[int, list[int]],
        owed: dict[int, list[int]],
        first: int,
    ) -> list[int]:
        """Add a collective among those whose operator's duration does not contain it; others owe what it waits for."""
        collective = item.collective
        assert collective is not None
        tasks = []
        view, costs = self.placement.view, self.placement.view.costs
        owner = item.owner + view.operators[0] - first if item.owner >= 0 else -1
        stream = stream_role(item.role, costs.problem.runtime)
        family = ("collective", self.placement.view.position, collective.sizes, collective.axes)
        for channel_class, channel in self.channels.classes(family):
            members = self.channels.representatives(channel)
            if not set(members) <= set(self.placement.classes):
                continue  # another replica's turn
            types = {costs.problem.gpu_types[device] for device in channel.members}
            if owner >= 0 and view.contains(owner, collective, types):
                for c in members:
                    owed.setdefault(c, []).extend(item.after)
                continue
            waiting = [*item.after, *(after for c in members for after in owed.pop(c, ()))]
            latency, work, shares = self.channels.price(channel_class, (collective.collective, collective.num_bytes))
            launch = 0.0
            if self.fidelity.host:
                launch = max(self.launch_s[c] for c in members) + costs.collective_host_s(channel.members)
                launch += costs.listing_s(channel.members, item.num_entries)
            latency, launch = latency * item.num_calls, launch * item.num_calls
            if self.placement.host_is_behind(self.fidelity):
                latency, launch = latency + launch, 0.0
            latency += handover_s(view, item, self.fidelity, view.operators[0] - first)
            before = [task for c in members for task in tails[c]] if item.chained else []
            before += [
                task
                for after in waiting
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
                    streams=[(c, (stream, collective.sizes, collective.axes)) for c in members],
                    hosts=members,
                )
            )
        return tasks

    def _add_send(
        self, template: Template, channel_class: int, channel: Channel, outgoing: Outgoing, label: str
    ) -> None:
        assert self.channels.partition is not None
        source, target = (self.channels.partition.device_class[device] for device in channel.members)
        latency, work, shares = self.channels.price(channel_class, outgoing.traffic)
        if not self.fidelity.transfers:
            latency = work = 0.0
            shares = {}
        task = template.rows.add(
            cause="transfer",
            name=f"transfer after {label}",
            stage=self.placement.view.position,
            kind=COMMUNICATION,
            work_s=work,
            latency_s=latency,
            shares=shares,
            predecessors=template.tails[source],
            streams=[
                (source, ("send", outgoing.family, channel_class)),
                (target, ("receive", outgoing.family, channel_class)),
            ],
        )
        template.sends.append(Send(task, source, target))
