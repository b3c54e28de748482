"""One rank of a running plan: the actions of the same schedule, on the same derivations.

A process runs the stages of its device in the order of ``simulator.schedules``. Receives are posted one
microbatch ahead on the CPU, sends never block. After the last action: what is left of the gradient
reductions, tied tensors, optimizer, refresh of sharded parameters (``simulator.lowering.epilogue``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from simulator.costs import CostTables
from simulator.lowering.lower import pipeline_shape, stage_views
from simulator.lowering.transfers import crossing_tensors
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.schedules.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from simulator.schedules.registry import schedule_named
from validation.execution.boundaries import BACKWARD_WAY, FORWARD_WAY, Boundary, Postman
from validation.execution.gradients import gradient_group_keys
from validation.execution.groups import GroupKey, StageGroups, Timer
from validation.execution.in_flight import InFlight
from validation.execution.launch import Worker
from validation.execution.parameters import input_specs
from validation.execution.reference import terminal_tensors
from validation.execution.stage_parameters import parameter_group_keys
from validation.execution.stage_runner import StageRunner
from validation.execution.ties import find_ties, sum_tied_gradients, tie_keys
from validation.execution.wiring import StageWiring
from validation.held_back_times import HeldBackTimes
from validation.kinds.operator_context import RunState
from validation.measurement import OPTIMIZER, IterationRecord, TimedAction
from validation.timers import Clock, CollectiveTimes, OperatorTimes

LEARNING_RATE = 1e-3
"""torch.optim.Adam's own default; its value does not change what an iteration costs."""

Hook = Callable[["PlanExecutor"], None]


class PlanExecutor:
    """One rank of a running plan. All processes of the world must make it at the same time.

    Args:
        plan: Canonical plan, checked by ``check_executable``.
        problem: What it is for.
        worker: This process. Ranks are the plan's device ids in ascending order; further processes idle.
        measure_operators: Time every operator: on CUDA its kernels and its host apart, which an iteration then takes
            several times as long for.
    """

    def __init__(self, plan: Plan, problem: Problem, worker: Worker, *, measure_operators: bool = False) -> None:
        self.plan, self.problem, self.worker = plan, problem, worker
        if worker.device.type == "cuda":
            is_tf32 = problem.runtime.implementation.dtype == "tf32"
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = is_tf32
        self.clock = Clock(worker.device)
        self.times: OperatorTimes | None = None
        if measure_operators:
            on_cuda = worker.device.type == "cuda"
            self.times = HeldBackTimes(worker.device) if on_cuda else OperatorTimes(self.clock)
        self.collective_times = CollectiveTimes(self.clock)
        self.run_state = RunState()
        costs = CostTables(problem)
        views = stage_views(plan, costs)
        devices = sorted(plan.devices)
        rank_of = {device: rank for rank, device in enumerate(devices)}
        self.device_id = devices[worker.rank] if worker.rank < len(devices) else -1
        last_views = stage_views(plan.all_like_last(), costs) if plan.last_microbatch_size is not None else ()
        self.wirings, self.last_wirings = (
            [StageWiring(view, tuple(rank_of[device] for device in view.stage.devices)) for view in each]
            for each in (views, last_views)
        )
        self.boundaries = [
            self._boundary(position, tuple(tensors)) for position, tensors in enumerate(crossing_tensors(views))
        ]
        self.ties = find_ties(self.wirings)
        groups = self._group_keys()
        connections = {each for boundary in self.boundaries for each in boundary.connections()}
        worker.pool.prepare(groups | {lane for lane, _, _ in connections})
        if worker.device.type == "cuda" and worker.world_size > 1:
            worker.pool.connect(groups, connections, worker.device)
        starts = {number: number * plan.microbatch_size for number in range(plan.num_microbatches)}
        last = {number: starts.pop(number) for number in list(starts) if plan.is_smaller(number)}
        self.runners = {
            wiring.view.position: self._runner(wiring, starts)
            for wiring in self.wirings
            if worker.rank in wiring.ranks
        }
        self.last_runners = {
            wiring.view.position: self._runner(wiring, last, self.runners[wiring.view.position])
            for wiring in self.last_wirings
            if worker.rank in wiring.ranks
        }
        """Run the last microbatch, where it is smaller. Their operators are not timed: times are of one size."""
        self.postman = Postman(self.boundaries, worker.pool, worker.device)
        self.order = self._own_actions()
        self.last_gradients = self._last_gradient_actions()
        self.incoming = self._incoming()
        trained = [held.trained for runner in self.runners.values() for held in runner.parameters.held]
        fused = problem.runtime.optimizer_kernels == "fused"
        self.optimizer = torch.optim.Adam(trained, lr=LEARNING_RATE, fused=fused, foreach=False) if trained else None
        self.on_gradients: Hook | None = None
        """Called when all gradients are reduced, before the optimizer step."""

    def _group_keys(self) -> set[GroupKey]:
        found: set[GroupKey] = set(tie_keys(self.ties))
        for wiring in (*self.wirings, *self.last_wirings):
            found |= wiring.groups()
        for wiring in self.wirings:
            found |= set(parameter_group_keys(wiring.view, wiring.ranks))
            found |= gradient_group_keys(wiring.view, wiring.ranks)
        return found

    def _boundary(self, position: int, tensors: tuple[str, ...]) -> Boundary:
        smaller = None
        if self.last_wirings:
            first, second = self.last_wirings[position : position + 2]
            smaller = Boundary(position, first, second, tensors), self.plan.num_microbatches - 1
        first, second = self.wirings[position : position + 2]
        return Boundary(position, first, second, tensors, smaller=smaller)

    def _runner(
        self, wiring: StageWiring, microbatches: Mapping[int, int], like: StageRunner | None = None
    ) -> StageRunner:
        groups = StageGroups(self.worker.pool, wiring.ranks, wiring.ranks.index(self.worker.rank))
        return StageRunner(
            wiring,
            groups,
            inputs=input_specs(self.problem.workload),
            losses=terminal_tensors(self.problem.workload),
            device=self.worker.device,
            run=self.run_state,
            microbatches=microbatches,
            times=self.times if like is None else None,
            like=like,
        )

    def runner_of(self, stage: int, microbatch: int) -> StageRunner:
        """Return what runs a microbatch of a stage of this rank."""
        return (self.last_runners if self.plan.is_smaller(microbatch) else self.runners)[stage]

    def _own_actions(self) -> list[Action]:
        """Return this rank's actions: its stages', of the microbatches it works on."""
        if not self.runners:
            return []
        orders = schedule_named(self.plan.schedule).actions(pipeline_shape(self.plan))
        ranks = {self.plan.rank_of_stage[position] for position in self.runners}
        assert len(ranks) == 1, f"device {self.device_id} is in pipeline ranks {ranks}"
        return [
            action
            for action in orders[ranks.pop()]
            if self.runners[action.stage].wiring.works_on(
                self.runners[action.stage].groups.local_rank, action.microbatch
            )
        ]

    def _last_gradient_actions(self) -> set[Action]:
        last = {action.stage: action for action in self.order if action.kind in (BACKWARD, BACKWARD_WEIGHT)}
        return set(last.values())

    def _incoming(self) -> dict[Action, tuple[int, int]]:
        """Return the boundary and direction from which an action receives, for those that do."""
        found = {}
        for action in self.order:
            if action.kind == FORWARD and action.stage > 0:
                found[action] = (action.stage - 1, FORWARD_WAY)
            elif action.kind in (BACKWARD, BACKWARD_INPUT) and action.stage + 1 < len(self.plan.stages):
                found[action] = (action.stage, BACKWARD_WAY)
        return found

    # One iteration

    def time_operators(self) -> None:
        """Time every operator from now on."""
        self.times = OperatorTimes(self.clock)
        for runner in self.runners.values():
            runner.times = self.times

    def run_iteration(self, iteration: int) -> IterationRecord:
        """Run one iteration and return when what happened."""
        self.run_state.iteration = iteration
        self.worker.pool.timer = timer_of(self.collective_times, self.times)
        processor_start_s, start_s = time.thread_time(), time.perf_counter()
        for runner in self.runners.values():
            runner.gradients.begin()
            runner.loss_total.zero_()
        states: dict[tuple[int, int], InFlight] = {}
        queues = self._receive_queues()
        marks: list[tuple[Action, Any, Any, Any]] = []
        start = self.clock.mark()
        for queue in queues.values():
            self._expect_next(queue)
        for action in self.order:
            self.worker.doing(iteration, *action)
            self.run_state.microbatch = action.microbatch
            before = self.clock.mark()
            arrived = self._receive(action, queues)
            ready = self.clock.mark()
            with nullcontext() if self.times is None else self.times.one_pass(action):
                self._perform(action, arrived, states)
            marks.append((action, before, ready, self.clock.mark()))
        assert not states, f"microbatches without a backward: {sorted(states)}"
        self._epilogue()
        end = self.clock.mark()
        if self.worker.device.type == "cuda":
            torch.cuda.synchronize(self.worker.device)
        # Before events are read, which takes time as well.
        iteration_s, processor_s = time.perf_counter() - start_s, time.thread_time() - processor_start_s
        since = self.clock.seconds
        timed = [
            TimedAction(self.worker.rank, *action, since(start, ready), since(start, done), since(before, ready))
            for action, before, ready, done in marks
        ]
        spans = self.collective_times.drain(self.worker.rank, start)
        if self.times is not None:
            spans += self.times.spans(self.worker.rank, start)
        tail_s = since(marks[-1][3], end) if marks else 0.0
        return IterationRecord(timed, spans, tail_s, processor_s, iteration_s)

    def _receive_queues(self) -> dict[tuple[int, int], list[Action]]:
        """Return, by boundary and direction, the actions that receive, in order."""
        queues: dict[tuple[int, int], list[Action]] = {}
        for action in self.order:
            if action in self.incoming:
                queues.setdefault(self.incoming[action], []).append(action)
        return {key: queue[::-1] for key, queue in queues.items()}

    def _expect_next(self, queue: list[Action]) -> None:
        """Post the receives of the next action of a queue (on CUDA they would occupy the GPU while they wait)."""
        if queue and self.worker.device.type == "cpu":
            self.postman.expect(*self.incoming[queue[-1]], queue[-1].microbatch)

    def _receive(self, action: Action, queues: dict[tuple[int, int], list[Action]]) -> dict[str, torch.Tensor]:
        if action not in self.incoming:
            return {}
        queue = queues[self.incoming[action]]
        assert queue.pop() == action
        arrived = self.postman.receive(*self.incoming[action], action.microbatch)
        self._expect_next(queue)
        return arrived

    def _perform(
        self, action: Action, arrived: dict[str, torch.Tensor], states: dict[tuple[int, int], InFlight]
    ) -> None:
        kind, stage, microbatch = action
        runner = self.runner_of(stage, microbatch)
        if kind == FORWARD:
            leaving, states[stage, microbatch] = runner.forward(microbatch, arrived)
            if stage < len(self.boundaries):
                crossing = {name: leaving.get(name, arrived.get(name)) for name in self.boundaries[stage].tensors}
                self.postman.send(stage, FORWARD_WAY, microbatch, _all_there(crossing))
            return
        inputs, weights = kind != BACKWARD_WEIGHT, kind != BACKWARD_INPUT
        sync = weights and (action in self.last_gradients or self.plan.gradient_reduction == "every")
        gradients = runner.backward(
            microbatch, states[stage, microbatch], arrived, inputs=inputs, weights=weights, sync=sync
        )
        if weights:
            del states[stage, microbatch]
        if inputs and stage > 0:
            self.postman.send(stage - 1, BACKWARD_WAY, microbatch, self._outgoing(stage, microbatch, gradients))

    def _outgoing(self, stage: int, microbatch: int, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the gradients of what crossed the boundary before ``stage``; zero where nobody used it."""
        found = {}
        local = self.runners[stage].groups.local_rank
        for route in self.boundaries[stage - 1].routes_of(BACKWARD_WAY, microbatch):
            gradient = gradients.get(route.tensor)
            if gradient is None:
                shape = tuple(part.stop - part.start for part in route.held[local])
                gradient = torch.zeros(shape, dtype=route.dtype, device=self.worker.device)
            found[route.tensor] = gradient
        return found

    def _epilogue(self) -> None:
        for runner in self.runners.values():
            runner.gradients.finish()
        held = {stage: runner.parameters.held for stage, runner in self.runners.items()}
        sum_tied_gradients(self.ties, held, self.worker.pool)
        if self.on_gradients is not None:
            self.on_gradients(self)
        if self.optimizer is not None:
            for runner in self.runners.values():
                for each in runner.parameters.held:
                    each.trained.grad = each.gradient
            with self.collective_times.measure("step", OPTIMIZER):
                self.optimizer.step()
            for runner in self.runners.values():
                for each in runner.parameters.held:
                    each.trained.grad = each.gradient = None
        for runner in self.runners.values():
            runner.parameters.refresh()
            for unit in runner.parameters.units:
                unit.release()
        self.postman.finish()

    def loss(self) -> float:
        """Return this rank's share of the last iteration's mean loss."""
        return float(sum(float(runner.loss_total) for runner in self.runners.values()))

    def notes(self) -> list[str]:
        """Return where execution does more than derived."""
        found = []
        for wiring in (*self.wirings, *self.last_wirings):
            count = sum(conversion.deviates for conversion in wiring.conversions())
            if count:
                found.append(
                    f"stage {wiring.view.position}: {count} conversions between meshes go through the whole tensor, "
                    "which moves more than the plan derives"
                )
        found += [
            f"tied tensor {tie.key} lies differently where it is used (stages "
            f"{', '.join(str(place.stage) for place in tie.places)}): summed whole over all ranks that hold it"
            for tie in self.ties
            if not tie.matches
        ]
        for stage, runner in self.runners.items():
            again = sorted(
                {
                    layer
                    for layer, units in runner.parameters.units_of_layer.items()
                    for unit in units
                    if unit.layer != layer
                }
            )
            if again:
                names = ", ".join(self.problem.workload.layer_names[layer] for layer in again)
                found.append(
                    f"stage {stage}: {names} gather tied ZeRO-3 parameters apart from their own, with all of the layer "
                    "that has them first"
                )
        return found


def timer_of(collectives: CollectiveTimes, operators: OperatorTimes | None) -> Timer:
    """Return what times a collective, which counts with no operator.

    No method of an executor: communicators outlive it, and would keep its parameters beside those of the next.
    """

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        with nullcontext() if operators is None else operators.outside(), collectives.measure(name):
            yield

    return timed


def _all_there(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    missing = [name for name, tensor in tensors.items() if tensor is None]
    assert not missing, f"neither made nor received: {missing}"
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
