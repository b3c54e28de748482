"""From a plan to the task graph: programs per stage, representatives, templates, tiling, epilogue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from simulator.costs import CostTables
from simulator.fidelity import Fidelity
from simulator.lowering.assemble import DeviceTraits, assemble
from simulator.lowering.channels import ChannelTable
from simulator.lowering.columns import TemplateColumns
from simulator.lowering.epilogue import EpilogueBuilder, epilogue_collectives, tied_groups
from simulator.lowering.flow import Flow, flow
from simulator.lowering.items import GRADIENTS, Program
from simulator.lowering.mesh import batch_coordinate, batch_degree
from simulator.lowering.placement import StagePlacement
from simulator.lowering.program import ProgramBuilder, StageView
from simulator.lowering.rows import TaskRows, Template
from simulator.lowering.symmetry import Partition, partition
from simulator.lowering.synchronisation import parameter_groups, reshards, travels_before_use
from simulator.lowering.task_limit import check_num_tasks, with_few_microbatches
from simulator.lowering.templates import Outgoing, TemplateBuilder
from simulator.lowering.tiling import Ids, Tiling, laid_out
from simulator.lowering.variants import Variant, VariantChoice
from simulator.plan import Plan
from simulator.schedules.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    PipelineShape,
)
from simulator.schedules.registry import schedule_named
from simulator.taskgraph import TaskGraph
from workloads.kinds.base import BACKWARD_INPUT as INPUT_PHASE
from workloads.kinds.base import BACKWARD_WEIGHT as WEIGHT_PHASE

_PHASES = {BACKWARD: GRADIENTS, BACKWARD_INPUT: (INPUT_PHASE,), BACKWARD_WEIGHT: (WEIGHT_PHASE,)}
_WORDS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward input",
    BACKWARD_WEIGHT: "backward weight",
}


@dataclass(frozen=True)
class Lowered:
    """A plan ready to simulate.

    Attributes:
        graph: The task graph.
        views: Stages.
        placements: Stages on representatives.
        last_placements: The same with the samples of the last microbatch.
        orders: Actions of each pipeline rank.
        action_start_task: Per rank, the first task id of each action; a rank's tasks follow those of the one before.
        step_start_task: The first task id of what comes once per iteration, after all actions.
        recorded_s: Seconds of operators' device work by origin (measured, interpolated, modelled) on all devices, one
            microbatch of each stage, or all of them where the last is smaller; gradients added to none.
    """

    graph: TaskGraph
    views: tuple[StageView, ...]
    placements: tuple[StagePlacement, ...]
    last_placements: tuple[StagePlacement, ...]
    orders: list[list[Action]]
    action_start_task: list[Ids]
    step_start_task: int
    recorded_s: tuple[float, float, float]


def stage_views(plan: Plan, costs: CostTables) -> tuple[StageView, ...]:
    """Return one view per stage of a canonical plan; the same view for the same stage of a similar plan.

    A view asks its plan for what concerns all stages alike, never for another stage, nor for how many microbatches
    there are beyond one. What it needs to know of earlier stages it is told.
    """
    types = costs.problem.gpu_types
    settings = tuple({**plan.__dict__, "stages": None, "num_microbatches": min(plan.num_microbatches, 2)}.values())
    views: list[StageView] = []
    for position, stage in enumerate(plan.stages):
        entering = _entering_in_shards(views, plan)
        views.append(
            costs.stages.get(
                (position, stage, settings, entering),
                lambda position=position, stage=stage, entering=entering: StageView(  # type: ignore[misc]
                    position, stage, plan, costs, types[stage.devices[0]], entering
                ),
            )
        )
    return tuple(views)


def _entering_in_shards(before: Sequence[StageView], plan: Plan) -> tuple[str, ...]:
    """Return the tensors that stages make in shards of the sequence and that the next stage reads or passes on."""
    if not before:
        return ()
    consumers, later = before[0].costs.problem.workload.consumers, plan.stages[len(before) :]
    made = (*before[-1].entering, *before[-1].leaving_in_shards)
    return tuple(name for name in made if any(stage.holds(reader) for stage in later for reader in consumers[name]))


def pipeline_shape(plan: Plan, num_microbatches: int | None = None) -> PipelineShape:
    """Return what the schedule needs to know of a plan."""
    return PipelineShape(
        num_stages=len(plan.stages),
        num_microbatches=plan.num_microbatches if num_microbatches is None else num_microbatches,
        rank_of_stage=plan.rank_of_stage,
        warmup=plan.warmup_in_force(),
    )


def lower(plan: Plan, costs: CostTables, fidelity: Fidelity) -> Lowered:
    """Return the task graph of a valid, canonical plan.

    Raises:
        ValueError: If it has more tasks than fit (``task_limit``).
    """
    few = with_few_microbatches(plan)
    if few is not plan:  # Orders of many take long, too.
        num_tasks = _Lowering(few, costs, fidelity).num_tasks()
        check_num_tasks(num_tasks * plan.num_microbatches // few.num_microbatches, plan)
    return _Lowering(plan, costs, fidelity).run()


@dataclass(frozen=True)
class _Bound:
    """A plan's programs on representative devices, before they are repeated for every microbatch."""

    placements: tuple[StagePlacement, ...]
    last_placements: tuple[StagePlacement, ...]
    templates: list[Template]
    number_of: dict[tuple[int, Variant], int]
    epilogue: TaskRows
    columns: TemplateColumns
    entry: dict[int, list[int]]
    partition: Partition
    traits: DeviceTraits
    recorded_s: tuple[tuple[float, float, float], ...]


class _Lowering:
    def __init__(self, plan: Plan, costs: CostTables, fidelity: Fidelity) -> None:
        self.plan = plan
        self.costs = costs
        self.fidelity = fidelity
        self.problem = costs.problem
        self.flows = [flow(stage_views(plan, costs), "transfer")]
        if plan.last_microbatch_size is not None:
            self.flows.append(flow(stage_views(plan.all_like_last(), costs), "last transfer"))
        self.views = self.flows[0].views
        self.orders = schedule_named(plan.schedule).actions(pipeline_shape(plan))
        gathers = [any(travels_before_use(view, group) for group in parameter_groups(view)) for view in self.views]
        self.reshards = [reshards(view) for view in self.views]
        self.reduces_early = (plan.overlap_gradient_sync or plan.gradient_reduction == "every") and not plan.rotates
        hands_over = self.problem.runtime.hands_over_gradients
        chosen = VariantChoice(plan, gathers, self.reshards, self.reduces_early, hands_over, self.flows[0].num_turns)
        self.variants = [chosen.of_order(order) for order in self.orders]

    def num_tasks(self) -> int:
        """Return how many tasks all passes come to."""
        return self._tiling(self._bound()).num_tasks

    def run(self) -> Lowered:
        bound = self._bound()
        tiling = self._tiling(bound)
        check_num_tasks(tiling.num_tasks, self.plan)
        self._connect(tiling, bound.placements)
        graph = assemble(tiling, bound.columns, bound.epilogue, bound.entry, bound.partition, bound.traits)
        return Lowered(
            graph=graph,
            views=self.views,
            placements=bound.placements,
            last_placements=bound.last_placements,
            orders=self.orders,
            action_start_task=[block.base for block in tiling.blocks],
            step_start_task=tiling.num_tasks,
            recorded_s=self._all_recorded(bound),
        )

    def _bound(self) -> _Bound:
        """Return the programs bound to representative devices, from those of a plan alike if there was one."""
        programs: dict[tuple[int, Variant], Program] = {}
        for order, found in zip(self.orders, self.variants, strict=True):
            for action, variant in zip(order, found, strict=True):
                if (action.stage, variant) not in programs:
                    programs[action.stage, variant] = self._program(action.stage, variant)
        # One microbatch or several makes a difference, how many does not.
        alike = replace(self.plan, num_microbatches=min(self.plan.num_microbatches, 2))
        key = (alike, self.fidelity, tuple(programs))
        return self.costs.bound_plans.get(key, lambda: self._bound_anew(programs))

    def _flow(self, variant: Variant) -> Flow:
        return self.flows[-1 if variant.smaller else 0]

    def _bound_anew(self, programs: dict[tuple[int, Variant], Program]) -> _Bound:
        channels = self._channels(programs)
        placements = self._placements(channels)
        launch_s = {
            c: self.costs.launch_s(placement.gpu_type[c]) for placement in placements for c in placement.classes
        }
        last = placements
        if len(self.flows) > 1:
            last = [replace(one, view=view) for one, view in zip(placements, self.flows[-1].views, strict=True)]
        templates, number_of = self._templates(programs, channels, (placements, last), launch_s)
        epilogue = EpilogueBuilder(placements, channels, self.fidelity, launch_s, reduces_early=self.reduces_early)
        assert channels.partition is not None
        rows = epilogue.build(range(len(channels.partition.members)))
        return _Bound(
            placements=tuple(placements),
            last_placements=tuple(last),
            templates=templates,
            number_of=number_of,
            epilogue=rows,
            columns=TemplateColumns([*(template.rows for template in templates), rows]),
            entry=epilogue.entry,
            partition=channels.partition,
            traits=self._traits(channels.partition),
            recorded_s=tuple(
                self._recorded(each, channels.partition) for each in (placements, last)[: len(self.flows)]
            ),
        )

    # Programs

    def _program(self, stage: int, variant: Variant) -> Program:
        view = self._flow(variant).views[stage]
        received = self._flow(variant).gathers_of_received(stage, variant)
        waits = variant.sync and not self.plan.overlap_gradient_sync
        gather = (variant.gather, self.reshards[stage])
        gradients = (self.plan.gradient_reduction, variant.sync, waits, variant.hands_over)
        key = ("program", variant.kind, gather, gradients, tuple(received), self.fidelity)
        if key not in view.shared:
            builder = ProgramBuilder(view, self.fidelity)
            if variant.kind == FORWARD:
                items = builder.forward(gather=variant.gather, received=received)
            else:
                items = builder.backward(
                    _PHASES[variant.kind],
                    gather=variant.gather,
                    sync=variant.sync,
                    received=received,
                    first=variant.hands_over,
                )
            view.shared[key] = Program(items, view.operators[0])
        program: Program = view.shared[key]
        return program

    # Channels, representatives

    def _channels(self, programs: dict[tuple[int, Variant], Program]) -> ChannelTable:
        hardware = self.problem.hardware
        channels = ChannelTable(hardware.collective, hardware.transfer, contention=self.fidelity.contention)
        for (stage, _), program in programs.items():
            for item in program.items:
                if item.collective is not None:
                    channels.add_collective(stage, self.plan.stages[stage].devices, item.collective)
        for view in self.views:
            for collectives in epilogue_collectives(view, reduces_early=self.reduces_early):
                for collective in collectives:
                    channels.add_collective(view.position, view.stage.devices, collective)
        for tie, devices, size in tied_groups(self.views):
            channels.add_group(("tie", tie), devices, "all_reduce", size)
        for passing in self.flows:
            for family, transfer in passing.families():
                channels.add_transfer(family, transfer, passing.traffic)
        channels.partition = partition(self._roles(), channels.freeze(), merge=self.fidelity.symmetry)
        return channels

    def _roles(self) -> dict[int, Hashable]:
        """Return what each device is: its pipeline rank, type, and whether its slices are the larger ones."""
        roles: dict[int, list[Hashable]] = {}
        sizes = [passing.views[0].plan.microbatch_size for passing in self.flows]
        for view, rank in zip(self.views, self.plan.rank_of_stage, strict=True):
            shardings = sorted(set(view.shardings.values()))
            for local, device in enumerate(view.stage.devices):
                larger: tuple[int, ...] = tuple(
                    batch_coordinate(sharding, local) < size % batch_degree(sharding)
                    for size in sizes
                    for sharding in shardings
                )
                if view.num_turns > 1:
                    larger = (batch_coordinate(view.shardings[view.operators[0]], local),)
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

    def _templates(
        self,
        programs: dict[tuple[int, Variant], Program],
        channels: ChannelTable,
        placements: tuple[list[StagePlacement], list[StagePlacement]],
        launch_s: dict[int, float],
    ) -> tuple[list[Template], dict[tuple[int, Variant], int]]:
        templates: list[Template] = []
        number_of: dict[tuple[int, Variant], int] = {}
        for (stage, variant), program in programs.items():
            placement = placements[variant.smaller][stage].taking_turn(variant.turn)
            passing = self._flow(variant)
            builder = TemplateBuilder(placement, channels, self.fidelity, launch_s)
            number_of[stage, variant] = len(templates)
            templates.append(
                builder.build(
                    program,
                    Outgoing(passing.family_behind(stage, variant), passing.traffic),
                    passing.num_receives(stage, variant, placement),
                    f"{_WORDS[variant.kind]} of stage {stage}",
                )
            )
        return templates, number_of

    def _tiling(self, bound: _Bound) -> Tiling:
        """Return the tasks of all actions, with nothing between them yet."""
        numbers = [
            [bound.number_of[action.stage, variant] for action, variant in zip(order, found, strict=True)]
            for order, found in zip(self.orders, self.variants, strict=True)
        ]
        return Tiling(templates=bound.templates, blocks=laid_out(self.orders, numbers, bound.templates))

    def _connect(self, tiling: Tiling, placements: Sequence[StagePlacement]) -> None:
        tiling.add_inner_edges()
        blocking = self.fidelity.transfers and self.problem.runtime.blocks_on_transfers(self.plan.schedule)
        schedule = schedule_named(self.plan.schedule)
        tiling.add_previous_action_edges()
        if blocking:
            has_chunks = len(self.views) > len(self.orders)
            tiling.add_blocking_edges(exchanges_pairs=schedule.exchanges_pairs and has_chunks)
        backward_kind = BACKWARD_INPUT if schedule.splits_backward else BACKWARD
        for stage in range(1, len(self.views)):
            shared = frozenset(placements[stage].classes) & frozenset(placements[stage - 1].classes)
            tiling.add_received_edges((stage, FORWARD), (stage - 1, FORWARD), shared)
            tiling.add_received_edges((stage - 1, backward_kind), (stage, backward_kind), shared)
        tiling.order_streams()
        tiling.order_hosts()

    def _traits(self, parts: Partition) -> DeviceTraits:
        """Return what the graph says of each representative."""
        hardware = self.problem.hardware
        first_stage = {device: view.position for view in reversed(self.views) for device in view.stage.devices}
        return DeviceTraits(
            slowdowns=[
                hardware.overlap_slowdown(self.problem.gpu_types[members[0]])
                if self.fidelity.overlap_slowdown
                else (1.0, 1.0)
                for members in parts.members
            ],
            first_stage=[first_stage[members[0]] for members in parts.members],
            has_host=self.fidelity.host,
        )

    def _all_recorded(self, bound: _Bound) -> tuple[float, float, float]:
        if len(bound.recorded_s) == 1:
            return bound.recorded_s[0]
        count = self.plan.num_microbatches - 1
        a, b, c = (count * each + last for each, last in zip(*bound.recorded_s, strict=True))
        return a, b, c

    def _recorded(self, placements: Sequence[StagePlacement], parts: Partition) -> tuple[float, float, float]:
        """Return the seconds of each origin on all devices, of one microbatch of each stage."""
        totals = [0.0, 0.0, 0.0]
        for placement in placements:
            alike: Counter[tuple[str, tuple[int, ...]]] = Counter()
            example: dict[tuple[str, tuple[int, ...]], int] = {}
            for device in placement.view.stage.devices:
                c = parts.device_class[device]
                kind = (placement.gpu_type[c], placement.all_samples(c))
                alike[kind] += 1
                example.setdefault(kind, c)
            for kind, c in example.items():
                for index in placement.view.operators:
                    cost = self.costs.operator(
                        index, placement.view.shardings[index], placement.samples(index, c), placement.gpu_type[c]
                    )
                    for segment in (cost.forward, cost.backward_alone):
                        for origin in range(3):
                            totals[origin] += segment.recorded[origin] * alike[kind]
        return totals[0], totals[1], totals[2]
