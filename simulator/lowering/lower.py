"""From a plan to the task graph: programs per stage, representatives, templates, tiling, epilogue."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from simulator.costs import CostTables
from simulator.fidelity import Fidelity
from simulator.lowering.epilogue import EpilogueBuilder, epilogue_collectives, tied_groups
from simulator.lowering.mesh import batch_degree
from simulator.lowering.program import GRADIENTS, Item, ProgramBuilder, StageView
from simulator.lowering.symmetry import partition
from simulator.lowering.synchronisation import parameter_groups
from simulator.lowering.templates import ChannelTable, StagePlacement, TaskRows, Template, TemplateBuilder, batch_coordinate
from simulator.lowering.tiling import Block, Ids, Tiling, csr_of_edges
from simulator.lowering.transfers import boundary, crossing_tensors
from simulator.plan import Plan
from simulator.schedules.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, PipelineShape
from simulator.schedules.registry import schedule_named
from simulator.taskgraph import Csr, TaskGraph
from workloads.kinds.base import BACKWARD_INPUT as INPUT_PHASE
from workloads.kinds.base import BACKWARD_WEIGHT as WEIGHT_PHASE

_PHASES = {BACKWARD: GRADIENTS, BACKWARD_INPUT: (INPUT_PHASE,), BACKWARD_WEIGHT: (WEIGHT_PHASE,)}
_WORDS = {FORWARD: "forward", BACKWARD: "backward", BACKWARD_INPUT: "backward input", BACKWARD_WEIGHT: "backward weight"}


@dataclass(frozen=True)
class Variant:
    """Which program an action runs.

    Attributes:
        kind: Phase letter.
        gather: ZeRO-3 parameters are gathered.
        sync: Gradients are reduced in it.
    """

    kind: str
    gather: bool
    sync: bool


@dataclass(frozen=True)
class Lowered:
    """A plan ready to simulate.

    Attributes:
        graph: The task graph.
        views: Stages.
        placements: Stages on representatives.
        orders: Actions of each pipeline rank.
        action_start_task: Per rank, the first task id of each action.
        recorded_s: Seconds of device work by origin (measured, interpolated, modelled), one microbatch of
            each stage.
    """

    graph: TaskGraph
    views: tuple[StageView, ...]
    placements: tuple[StagePlacement, ...]
    orders: list[list[Action]]
    action_start_task: list[Ids]
    recorded_s: tuple[float, float, float]


def stage_views(plan: Plan, costs: CostTables) -> tuple[StageView, ...]:
    """Return one view per stage of a canonical plan."""
    types = costs.problem.gpu_types
    return tuple(
        StageView(position, stage, plan, costs, types[stage.devices[0]]) for position, stage in enumerate(plan.stages)
    )


def pipeline_shape(plan: Plan, num_microbatches: int | None = None) -> PipelineShape:
    """Return what the schedule needs to know of a plan."""
    return PipelineShape(
        num_stages=len(plan.stages),
        num_microbatches=plan.num_microbatches if num_microbatches is None else num_microbatches,
        rank_of_stage=plan.rank_of_stage,
        warmup=plan.warmup,
    )


def lower(plan: Plan, costs: CostTables, fidelity: Fidelity) -> Lowered:
    """Return the task graph of a valid, canonical plan."""
    return _Lowering(plan, costs, fidelity).run()


class _Lowering:
    def __init__(self, plan: Plan, costs: CostTables, fidelity: Fidelity) -> None:
        self.plan = plan
        self.costs = costs
        self.fidelity = fidelity
        self.problem = costs.problem
        self.views = stage_views(plan, costs)
        self.orders = schedule_named(plan.schedule).actions(pipeline_shape(plan))
        self.has_zero3 = [any(group.zero == 3 for group in parameter_groups(view)) for view in self.views]
        self.overlapped = plan.overlap_gradient_sync or plan.gradient_reduction == "every"
        self.transfers = [
            boundary(first, second, relayed)
            for first, second, relayed in zip(
                self.views, self.views[1:], crossing_tensors(self.views), strict=False
            )
        ]

    def run(self) -> Lowered:
        variants = [[self._variant(action) for action in actions] for actions in self._marked_orders()]
        programs: dict[tuple[int, Variant], list[Item]] = {}
        for order, found in zip(self.orders, variants, strict=True):
            for action, variant in zip(order, found, strict=True):
                if (action.stage, variant) not in programs:
                    programs[action.stage, variant] = self._program(action.stage, variant)
        channels = self._channels(programs)
        placements = self._placements(channels)
        launch_s = {
            c: self.costs.launch_s(placement.gpu_type[c]) for placement in placements for c in placement.classes
        }
        templates, number_of = self._templates(programs, channels, placements, launch_s)
        tiling = self._tile(templates, number_of, variants, placements)
        epilogue = EpilogueBuilder(placements, channels, self.fidelity, launch_s, overlapped=self.overlapped)
        assert channels.partition is not None
        classes = range(len(channels.partition.members))
        rows = epilogue.build(self._norm_latency_s(), classes)
        graph = self._assemble(tiling, rows, epilogue.entry, channels)
        return Lowered(
            graph=graph,
            views=self.views,
            placements=tuple(placements),
            orders=self.orders,
            action_start_task=[block.base for block in tiling.blocks],
            recorded_s=self._recorded(placements),
        )

    # Variants and programs

    def _marked_orders(self) -> list[list[tuple[Action, bool, bool]]]:
        """Return every action with: is it its stage's first forward, and its last gradient pass?"""
        marked = []
        for order in self.orders:
            gradient_kind = BACKWARD_WEIGHT if any(action.kind == BACKWARD_WEIGHT for action in order) else BACKWARD
            first, last = {}, {}
            for position, action in enumerate(order):
                if action.kind == FORWARD:
                    first.setdefault(action.stage, position)
                if action.kind == gradient_kind:
                    last[action.stage] = position
            marked.append(
                [
                    (action, first.get(action.stage) == position, last.get(action.stage) == position)
                    for position, action in enumerate(order)
                ]
            )
        return marked

    def _variant(self, marked: tuple[Action, bool, bool]) -> Variant:
        action, first, last = marked
        gather = self.has_zero3[action.stage] and (
            (action.kind == FORWARD and (self.plan.reshard_after_forward or first))
            or (action.kind in (BACKWARD, BACKWARD_INPUT) and self.plan.reshard_after_forward)
        )
        makes_gradients = action.kind in (BACKWARD, BACKWARD_WEIGHT)
        sync = self.overlapped and makes_gradients and (last or self.plan.gradient_reduction == "every")
        return Variant(action.kind, gather, sync)

    def _program(self, stage: int, variant: Variant) -> list[Item]:
        builder = ProgramBuilder(self.views[stage], self.fidelity)
        if variant.kind == FORWARD:
            return builder.forward(gather=variant.gather)
        return builder.backward(_PHASES[variant.kind], gather=variant.gather, sync=variant.sync)

    # Channels, representatives

    def _channels(self, programs: dict[tuple[int, Variant], list[Item]]) -> ChannelTable:
        hardware = self.problem.hardware
        channels = ChannelTable(hardware.collective, hardware.transfer, contention=self.fidelity.contention)
        for (stage, _), items in programs.items():
            for item in items:
                if item.collective is not None:
                    channels.add_collective(stage, self.plan.stages[stage].devices, item.collective)
        for view in self.views:
            for collectives in epilogue_collectives(view, overlapped=self.overlapped):
                for collective in collectives:
                    channels.add_collective(view.position, view.stage.devices, collective)
        for tie, devices, size in tied_groups(self.views):
            channels.add_group(("tie", tie), devices, "all_reduce", size)
        for position, (forward, backward) in enumerate(self.transfers):
            for transfer in forward:
                channels.add_transfer(("transfer", position, FORWARD), transfer)
            for transfer in backward:
                channels.add_transfer(("transfer", position, BACKWARD), transfer)
        channels.partition = partition(self._roles(), channels.freeze(), merge=self.fidelity.symmetry)
        return channels

    def _roles(self) -> dict[int, Hashable]:
        """Return what each device is: its pipeline rank, type, and whether its slices are the larger ones."""
        roles: dict[int, list[Hashable]] = {}
        for view, rank in zip(self.views, self.plan.rank_of_stage, strict=True):
            degrees = {batch_degree(sharding): sharding for sharding in view.shardings.values()}
            for local, device in enumerate(view.stage.devices):
                larger = tuple(
                    batch_coordinate(sharding, local) < self.plan.microbatch_size % degree
                    for degree, sharding in sorted(degrees.items())
                )
                role = roles.setdefault(device, [rank, self.problem.gpu_types[device]])
                role.append((view.position, larger))
        return {device: tuple(role) for device, role in roles.items()}

    def _placements(self, channels: ChannelTable) -> list[StagePlacement]:
        assert channels.partition is not None
        placements = []
        for view in self.views:
            example: dict[int, int] = {}
            for local, device in enumerate(view.stage.devices):
                example.setdefault(channels.partition.device_class[device], local)
            placements.append(
                StagePlacement(
                    view=view,
                    classes=tuple(sorted(example)),
                    example=example,
                    gpu_type={c: self.problem.gpu_types[view.stage.devices[local]] for c, local in example.items()},
                )
            )
        return placements

    # Templates and tiling

    def _transfer_family(self, stage: int, kind: str) -> Hashable | None:
        if kind == FORWARD and stage + 1 < len(self.views):
            return ("transfer", stage, FORWARD)
        if kind in (BACKWARD, BACKWARD_INPUT) and stage > 0:
            return ("transfer", stage - 1, BACKWARD)
        return None

    def _num_receives(self, stage: int, kind: str, placement: StagePlacement) -> dict[int, int]:
        if kind == FORWARD and stage > 0:
            incoming = self.transfers[stage - 1][0]
        elif kind in (BACKWARD, BACKWARD_INPUT) and stage + 1 < len(self.views):
            incoming = self.transfers[stage][1]
        else:
            return {}
        counts: dict[int, int] = {}
        class_of_example = {self.plan.stages[stage].devices[local]: c for c, local in placement.example.items()}
        for transfer in incoming:
            if transfer.target in class_of_example:
                c = class_of_example[transfer.target]
                counts[c] = counts.get(c, 0) + 1
        return counts

    def _templates(
        self,
        programs: dict[tuple[int, Variant], list[Item]],
        channels: ChannelTable,
        placements: list[StagePlacement],
        launch_s: dict[int, float],
    ) -> tuple[list[Template], dict[tuple[int, Variant], int]]:
        templates: list[Template] = []
        number_of: dict[tuple[int, Variant], int] = {}
        for (stage, variant), items in programs.items():
            builder = TemplateBuilder(placements[stage], channels, self.fidelity, launch_s)
            number_of[stage, variant] = len(templates)
            templates.append(
                builder.build(
                    items,
                    self._transfer_family(stage, variant.kind),
                    self._num_receives(stage, variant.kind, placements[stage]),
                    f"{_WORDS[variant.kind]} of stage {stage}",
                )
            )
        return templates, number_of

    def _tile(
        self,
        templates: list[Template],
        number_of: dict[tuple[int, Variant], int],
        variants: list[list[Variant]],
        placements: list[StagePlacement],
    ) -> Tiling:
        lengths = np.array([len(template.rows) for template in templates], dtype=np.int64)
        blocks = []
        start = 0
        for order, found in zip(self.orders, variants, strict=True):
            template = np.array(
                [number_of[action.stage, variant] for action, variant in zip(order, found, strict=True)],
                dtype=np.int64,
            )
            base = np.zeros(len(order) + 1, dtype=np.int64)
            np.cumsum(lengths[template], out=base[1:])
            blocks.append(
                Block(
                    template=template,
                    base=base[:-1] + start,
                    microbatch=np.array([action.microbatch for action in order], dtype=np.int64),
                    kind=np.array([action.kind for action in order]),
                    stage=np.array([action.stage for action in order], dtype=np.int64),
                )
            )
            start += int(base[-1])
        tiling = Tiling(templates=templates, blocks=blocks)
        tiling.add_inner_edges()
        blocking = self.fidelity.transfers and self.problem.runtime.transfer_mode == "blocking"
        tiling.add_previous_action_edges(after_sends=blocking)
        backward_kind = BACKWARD_INPUT if schedule_named(self.plan.schedule).splits_backward else BACKWARD
        for stage in range(1, len(self.views)):
            shared = frozenset(placements[stage].classes) & frozenset(placements[stage - 1].classes)
            tiling.add_received_edges((stage, FORWARD), (stage - 1, FORWARD), shared)
            tiling.add_received_edges((stage - 1, backward_kind), (stage, backward_kind), shared)
        tiling.order_streams()
        tiling.order_hosts()
        return tiling

    def _norm_latency_s(self) -> float:
        devices = self.plan.devices
        if len(devices) == 1:
            return 0.0
        return self.problem.hardware.collective("all_reduce", 4.0, devices).alone_s

    # Assembly

    def _assemble(
        self, tiling: Tiling, epilogue: TaskRows, entry: dict[int, list[int]], channels: ChannelTable
    ) -> TaskGraph:
        assert channels.partition is not None
        offset = tiling.num_tasks
        total = offset + len(epilogue)
        self._connect_epilogue(tiling, entry, offset)
        for task, found in enumerate(epilogue.predecessors):
            for before in found:
                tiling.edges.append((np.array([offset + task]), np.array([offset + before])))
        streams = dict(tiling.streams)
        for key, tasks in epilogue.streams.items():
            ids = np.array(tasks, dtype=np.int64) + offset
            streams[key] = np.concatenate([streams[key], ids]) if key in streams else ids
        hosts = dict(tiling.hosts)
        for c, tasks in epilogue.hosts.items():
            ids = np.array(tasks, dtype=np.int64) + offset
            hosts[c] = np.concatenate([hosts[c], ids]) if c in hosts else ids
        parts = channels.partition
        keys = sorted(streams, key=lambda key: (key[0], str(key[1])))
        columns = _Columns(total)
        for number, template in enumerate(tiling.templates):
            for block in tiling.blocks:
                chosen = np.flatnonzero(block.template == number)
                columns.tile(template.rows, block.base[chosen], block.microbatch[chosen])
        columns.tile(epilogue, np.array([offset]), np.array([-1]))
        tasks = np.concatenate([edge[0] for edge in tiling.edges]) if tiling.edges else np.zeros(0, dtype=np.int64)
        before = np.concatenate([edge[1] for edge in tiling.edges]) if tiling.edges else np.zeros(0, dtype=np.int64)
        shares, fractions = columns.shares()
        types = [self.problem.gpu_types[members[0]] for members in parts.members]
        slow = [
            self.problem.hardware.overlap_slowdown(gpu_type) if self.fidelity.overlap_slowdown else (1.0, 1.0)
            for gpu_type in types
        ]
        rank_of_device = {
            device: view.position for view in reversed(self.views) for device in view.stage.devices
        }
        host_rows = [
            hosts.get(c, np.zeros(0, dtype=np.int64)) if self.fidelity.host else np.zeros(0, dtype=np.int64)
            for c in range(len(parts.members))
        ]
        return TaskGraph(
            work_s=columns.work_s,
            latency_s=columns.latency_s,
            lead_s=columns.lead_s,
            host_s=columns.host_s,
            bound_s=columns.bound_s,
            kind=columns.kind,
            host_waits=columns.host_waits,
            predecessors=csr_of_edges(tasks, before, total),
            streams=_csr([streams[key] for key in keys]),
            stream_device=np.array([key[0] for key in keys], dtype=np.int32),
            hosts=_csr(host_rows),
            shares=shares,
            share_fractions=fractions,
            slowdown_computation=np.array([factor[0] for factor in slow]),
            slowdown_communication=np.array([factor[1] for factor in slow]),
            cause=columns.cause,
            stage=columns.stage,
            microbatch=columns.microbatch,
            name=columns.name,
            causes=tuple(columns.causes),
            names=tuple(columns.names),
            stream_names=tuple(_stream_name(key[1]) for key in keys),
            resource_names=parts.resource_names,
            device_stage=np.array([rank_of_device[members[0]] for members in parts.members], dtype=np.int32),
            device_members=parts.members,
        )

    def _connect_epilogue(self, tiling: Tiling, entry: dict[int, list[int]], offset: int) -> None:
        """Let the epilogue wait for each device's last actions and for all overlapped reductions."""
        for block in tiling.blocks:
            for position in self._closing_positions(block):
                template = tiling.templates[block.template[position]]
                base = int(block.base[position])
                for c, found in entry.items():
                    ends = [*template.tails.get(c, ()), *template.unchained.get(c, ())]
                    ends += [send.task for send in template.sends if send.source == c]
                    for task in found:
                        if ends:
                            before = np.array(ends, dtype=np.int64) + base
                            tiling.edges.append((np.full(len(ends), offset + task, dtype=np.int64), before))

    @staticmethod
    def _closing_positions(block: Block) -> list[int]:
        """Return the last action of a rank and the last of each of its templates."""
        last: dict[int, int] = {}
        for position, number in enumerate(block.template.tolist()):
            last[number] = position
        return sorted(set(last.values()))

    def _recorded(self, placements: list[StagePlacement]) -> tuple[float, float, float]:
        totals = [0.0, 0.0, 0.0]
        for placement in placements:
            c = placement.classes[0]
            for index in placement.view.operators:
                cost = self.costs.operator(
                    index, placement.view.shardings[index], placement.samples(index, c), placement.gpu_type[c]
                )
                for segment in (cost.forward, cost.backward_input, cost.backward_weight):
                    for origin in range(3):
                        totals[origin] += segment.recorded[origin]
        return totals[0], totals[1], totals[2]


def _stream_name(key: Hashable) -> str:
    if isinstance(key, str):
        return key
    assert isinstance(key, tuple)
    return " ".join("x".join(str(size) for size in part) if isinstance(part, tuple) and all(isinstance(x, int) for x in part) else str(part) for part in key)


def _csr(rows: list[Ids]) -> Csr:
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    items = np.concatenate(rows).astype(np.int32) if rows else np.zeros(0, dtype=np.int32)
    return Csr(offsets=offsets, items=items)


class _Columns:
    """The task graph's columns, filled template by template."""

    def __init__(self, total: int) -> None:
        self.work_s = np.zeros(total)
        self.latency_s = np.zeros(total)
        self.lead_s = np.zeros(total)
        self.host_s = np.zeros(total)
        self.bound_s = np.zeros(total)
        self.kind = np.zeros(total, dtype=np.int8)
        self.host_waits = np.zeros(total, dtype=np.bool_)
        self.cause = np.zeros(total, dtype=np.int16)
        self.stage = np.full(total, -1, dtype=np.int32)
        self.microbatch = np.full(total, -1, dtype=np.int32)
        self.name = np.zeros(total, dtype=np.int32)
        self.causes: dict[str, int] = {}
        self.names: dict[str, int] = {}
        self._share_of = np.full(total, -1, dtype=np.int32)
        self._share_sets: dict[tuple[tuple[int, float], ...], int] = {}

    def tile(self, rows: TaskRows, bases: Ids, microbatches: Ids) -> None:
        """Write copies of ``rows`` at ``bases``."""
        if not len(bases) or not len(rows):
            return
        ids = (bases[:, None] + np.arange(len(rows))).ravel()
        repeat = len(bases)
        for name in ("work_s", "latency_s", "lead_s", "host_s", "bound_s", "kind", "host_waits", "stage"):
            getattr(self, name)[ids] = np.tile(np.array(getattr(rows, name)), repeat)
        self.cause[ids] = np.tile([self.causes.setdefault(word, len(self.causes)) for word in rows.cause], repeat)
        self.name[ids] = np.tile([self.names.setdefault(word, len(self.names)) for word in rows.name], repeat)
        self.microbatch[ids] = np.repeat(microbatches, len(rows))
        sets = [
            self._share_sets.setdefault(tuple(sorted(found.items())), len(self._share_sets)) if found else -1
            for found in rows.shares
        ]
        self._share_of[ids] = np.tile(sets, repeat)

    def shares(self) -> tuple[Csr, np.ndarray]:
        """Return resources per task and the fractions beside them."""
        found = list(self._share_sets)
        lengths = np.array([len(row) for row in found] + [0], dtype=np.int64)
        counts = lengths[self._share_of]
        offsets = np.zeros(len(self._share_of) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        items = np.zeros(offsets[-1], dtype=np.int32)
        fractions = np.zeros(offsets[-1])
        for number, row in enumerate(found):
            tasks = np.flatnonzero(self._share_of == number)
            slots = (offsets[:-1][tasks][:, None] + np.arange(len(row))).ravel()
            items[slots] = np.tile([resource for resource, _ in row], len(tasks))
            fractions[slots] = np.tile([fraction for _, fraction in row], len(tasks))
        return Csr(offsets=offsets.astype(np.int32), items=items), fractions
