"""What follows the last backward pass: gradients not yet reduced, tied weights, norm, optimizer, refresh."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from simulator.fidelity import Fidelity
from simulator.lowering.channels import ChannelTable
from simulator.lowering.copies import copied_groups, gradient_copy
from simulator.lowering.items import stream_role
from simulator.lowering.mesh import MeshCollective
from simulator.lowering.placement import StagePlacement
from simulator.lowering.program import StageView
from simulator.lowering.rows import TaskRows
from simulator.lowering.step import (
    adam_launches,
    gradient_pass_s,
    has_norm,
    norm_s,
    num_launches,
    passes_gradients,
    rebuilding_s,
    step_work,
)
from simulator.lowering.synchronisation import (
    ParameterGroup,
    gradient_buckets,
    parameter_groups,
    parameter_refresh,
    tied_shards,
)
from simulator.taskgraph import COMMUNICATION, COMPUTATION


def epilogue_collectives(view: StageView, *, reduces_early: bool) -> tuple[list[MeshCollective], list[MeshCollective]]:
    """Return a stage's gradient reductions after the last backward pass, and its gathers after the step.

    Args:
        view: The stage.
        reduces_early: Gradients were already reduced during the backward pass.
    """
    reductions = (
        [] if reduces_early else [item for bucket in gradient_buckets(view, merged=True) for item in bucket.collectives]
    )
    return reductions, parameter_refresh(view)


def tied_groups(views: Sequence[StageView]) -> list[tuple[str, tuple[int, ...], float]]:
    """Return ``(tie, physical devices, gradient bytes)`` of weights shared between different stages.

    Rank i of one stage holds the same shard as rank i of the other (modulo the smaller stage). Two layouts of
    one weight inside a stage are brought together by a reduction over the whole stage.
    """
    holders: dict[str, list[tuple[StageView, ParameterGroup]]] = {}
    for view in views:
        for group in parameter_groups(view):
            if group.tie is not None:
                holders.setdefault(group.tie, []).append((view, group))
    found = []
    for tie, places in holders.items():
        if len(places) < 2:
            continue
        ranks = min(len(view.stage.devices) for view, _ in places)
        runtime = places[0][0].costs.problem.runtime
        size = max(group.num_elements / tied_shards(view, group) for view, group in places)
        size *= runtime.gradient_accumulation_bytes
        positions = [view.position for view, _ in places]
        for position in dict.fromkeys(found_at for found_at in positions if positions.count(found_at) > 1):
            if len(views[position].stage.devices) > 1:
                found.append((tie, views[position].stage.devices, float(size)))
        for rank in range(ranks):
            devices = tuple(
                dict.fromkeys(device for view, _ in places for device in view.stage.devices[rank::ranks])
            )
            if len(devices) > 1:
                found.append((tie, devices, float(size)))
    return found


class EpilogueBuilder:
    """Adds the epilogue of all stages to one set of rows; task ids start at 0 here."""

    def __init__(
        self,
        placements: Sequence[StagePlacement],
        channels: ChannelTable,
        fidelity: Fidelity,
        launch_s: Mapping[int, float],
        *,
        reduces_early: bool,
    ) -> None:
        self.placements = placements
        self.channels = channels
        self.fidelity = fidelity
        self.launch_s = launch_s
        self.reduces_early = reduces_early
        self.rows = TaskRows()
        self.entry: dict[int, list[int]] = {}
        self._last: dict[int, list[int]] = {}

    def build(self, all_classes: Sequence[int]) -> TaskRows:
        """Return the rows; ``entry`` then says which tasks wait for a device's last backward pass.

        Args:
            all_classes: Every representative.
        """
        for placement in self.placements:
            reductions, _ = epilogue_collectives(placement.view, reduces_early=self.reduces_early)
            if self.fidelity.gradient_sync and reductions:
                self._copies(placement, back=False)
                for item in reductions:
                    self._collective(placement, item, "gradient sync", "reduce")
                self._copies(placement, back=True)
        if self.fidelity.gradient_sync:
            self._tied()
        runtime = self.placements[0].view.costs.problem.runtime
        if self.fidelity.optimizer:
            if passes_gradients(runtime):
                self._norm(all_classes if has_norm(runtime) else ())
            for placement in self.placements:
                self._optimizer(placement)
        if self.fidelity.parameter_gather:
            for placement in self.placements:
                self._rebuild(placement)
                for item in parameter_refresh(placement.view):
                    self._collective(placement, item, "parameter gather", "gather")
        return self.rows

    def _append(self, members: Sequence[int], **fields: Any) -> None:
        before = [task for c in members for task in self._last.get(c, ())]
        task = self.rows.add(predecessors=before, hosts=members, **fields)
        for c in members:
            if c not in self._last:
                self.entry.setdefault(c, []).append(task)
            self._last[c] = [task]

    def _collective(self, placement: StagePlacement, item: MeshCollective, cause: str, role: str) -> None:
        family = ("collective", placement.view.position, item.sizes, item.axes)
        stream = (stream_role(role, placement.view.costs.problem.runtime), item.sizes, item.axes)
        self._shared(family, (item.collective, item.num_bytes), cause, placement.view.position, stream)

    def _shared(self, family: Hashable, traffic: Hashable, cause: str, stage: int, stream: Hashable) -> None:
        costs = self.placements[0].view.costs
        for channel_class, channel in self.channels.carrying(family, traffic):
            members = self.channels.representatives(channel)
            latency, work, shares = self.channels.price(channel_class, traffic)
            launch = 0.0
            if self.fidelity.host:
                launch = max(self.launch_s[c] for c in members) + costs.collective_host_s(channel.members)
            if self.placements[0].host_is_behind(self.fidelity):
                latency, launch = latency + launch, 0.0
            self._append(
                members,
                cause=cause,
                name=cause,
                stage=stage,
                kind=COMMUNICATION,
                work_s=work,
                latency_s=latency,
                lead_s=launch,
                host_s=launch,
                shares=shares,
                streams=[(c, stream) for c in members],
            )

    def _tied(self) -> None:
        views = [placement.view for placement in self.placements]
        done = set()
        for tie, _, size in tied_groups(views):
            if (tie, size) not in done:
                done.add((tie, size))
                self._shared(("tie", tie), ("all_reduce", size), "embedding sync", -1, ("tie", tie))

    def _norm(self, all_classes: Sequence[int]) -> None:
        view = self.placements[0].view
        for placement in self.placements:
            num_bytes = step_work(placement.view).passed_bytes
            for c in placement.classes:
                seconds = gradient_pass_s(view.costs, placement.gpu_type[c], num_bytes)
                self._compute(c, "gradient norm", placement.view.position, seconds)
        latency_s = norm_s(view.costs, view.plan.devices)
        if len(all_classes) > 1 or (all_classes and latency_s > 0):
            self._append(
                list(all_classes),
                cause="gradient norm",
                name="all_reduce gradient norm",
                stage=-1,
                kind=COMMUNICATION,
                work_s=0.0,
                latency_s=latency_s,
                host_waits=self.fidelity.host and "optimizer" in view.costs.problem.runtime.host_waits,
                streams=[(c, ("norm",)) for c in all_classes],
            )

    def _compute(self, c: int, cause: str, stage: int, seconds: float, num_kernels: int = 1) -> None:
        launch = self.launch_s[c] if self.fidelity.host else 0.0
        if self.placements[0].host_is_behind(self.fidelity):
            launch, seconds = 0.0, max(seconds, num_kernels * launch)
        launches = num_kernels * launch
        self._append(
            [c],
            cause=cause,
            name=cause,
            stage=stage,
            kind=COMPUTATION,
            work_s=seconds,
            lead_s=launch,
            host_s=launches,
            bound_s=max(seconds, launches - launch + seconds / num_kernels) if self.fidelity.host else 0.0,
            streams=[(c, "compute")],
        )

    def _copies(self, placement: StagePlacement, *, back: bool) -> None:
        """Copy gradients into the bucket of all, or back."""
        view = placement.view
        copied = [
            operator
            for bucket in gradient_buckets(view, merged=True)
            for operator in bucket.copied * (int(bucket.copied_back) if back else bucket.passes)
        ]
        num_kernels = sum(len(copied_groups(view)[operator]) for operator in copied)
        for c in placement.classes if copied else ():
            seconds = sum(gradient_copy(view, operator, placement.gpu_type[c]).device_s for operator in copied)
            self._compute(c, "gradient copy", view.position, seconds, num_kernels)

    def _rebuild(self, placement: StagePlacement) -> None:
        """Put together what is kept whole, part by part."""
        num_rebuilt = step_work(placement.view).num_rebuilt
        for c in placement.classes if num_rebuilt and self.fidelity.host else ():
            view, gpu_type = placement.view, placement.gpu_type[c]
            seconds = rebuilding_s(view.costs, gpu_type, num_rebuilt, view.plan.num_microbatches)
            self._compute(c, "parameter gather", placement.view.position, seconds)

    def _optimizer(self, placement: StagePlacement) -> None:
        view = placement.view
        problem, work = view.costs.problem, step_work(view)
        num_kernels = int(num_launches(adam_launches(problem.runtime), work.num_stepped, work.touched_bytes))
        for c in placement.classes:
            seconds = problem.hardware.optimizer_step_s(placement.gpu_type[c], work.touched_bytes)
            self._compute(c, "optimizer", view.position, seconds, num_kernels)
