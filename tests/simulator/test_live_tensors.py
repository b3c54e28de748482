"""What is live while the backward pass of an operator works: all that it needs, and what is held besides."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.costs import CostTables
from simulator.lowering.lower import stage_views
from simulator.lowering.synchronisation import parameter_groups, units_gathered_for
from simulator.lowering.view import StageView
from simulator.memory.events import Pass
from simulator.memory.model_states import reduces_in_backward, static_bytes
from simulator.memory.program import StageMemory
from simulator.operator_cost import OperatorCost
from simulator.plan import Axis, Plan, Stage
from simulator.problem import Problem
from simulator.saved import ends_at_parting, is_private, saved_tensors
from simulator.schedules.registry import schedule_named
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.simulator.problems import SMALL, small_problem
from tests.simulator.test_segment_inputs import recomputing
from workloads.operators import Operator

RUNTIMES = ("composer-fsdp", "pytorch-fsdp2", "hetu-galvatron", "megatron-deepspeed", "windtunnel-executor")


class Watched(StageMemory):
    """One microbatch of a stage; says what an operator's backward pass finds, by names of tensors."""

    def __init__(self, view: StageView) -> None:
        reshards, sharded = view.plan.reshard_after_forward, reduces_in_backward(view.plan)
        static = static_bytes(list(parameter_groups(view)), view.costs, sharded_gradients=sharded)
        anew = static.gradients_anew
        super().__init__(view, view.cost, reshards=reshards, sharded_gradients=sharded, gradients_anew=anew)
        self.anew = {
            f"unit {unit}/gradient {number}"
            for unit, sizes in static.gradients_anew.items()
            for number, size in enumerate(sizes)
            if size
        }
        self.left: set[str] = set()
        self.found: list[tuple[int, bool, bool, set[str]]] = []

    def run(self) -> None:
        """Run all passes of the microbatch."""
        self.left = self._after(*self.forward())
        if schedule_named(self.view.plan.schedule).splits_backward:
            self.left = self._after(*self.backward(with_weights=False))
            self.left = self._after(*self.backward(with_inputs=False))
        else:
            self.left = self._after(*self.backward())

    def _after(self, tensors: list[int], is_alloc: list[bool]) -> set[str]:
        live, names = set(self.left), list(self.table.names)
        for tensor, allocates in zip(tensors, is_alloc, strict=True):
            (live.add if allocates else live.discard)(names[tensor])
        return live

    def _backward_operator(
        self, index: int, op: Operator, cost: OperatorCost, events: Pass, with_inputs: bool, with_weights: bool
    ) -> None:
        live = self._after(events.tensors, events.is_alloc)
        self.found.append((index, with_inputs, with_weights, {name.removesuffix("@shard") for name in live}))
        super()._backward_operator(index, op, cost, events, with_inputs, with_weights)

    # What must be there

    def needed(self, index: int, *, with_inputs: bool) -> set[str]:
        """Return what an operator saved (the second half has a gradient in the place of some), and its gradients."""
        workload, cost = self.workload, self.view.cost(index)
        op, segment = workload.operators[index], self._segment(index)
        found = set()
        copied = {op.inputs[position]: part for position, part in self.view.sliced_inputs(index).items()}
        for name, size in saved_tensors(workload, index, cost):
            if name in copied:
                found.add(f"{copied[name]} in {(segment.start, segment.stop)}" if segment else copied[name])
                continue
            if not is_private(name) and self.view.saves_gathered(index, name):
                found |= set() if segment else {f"{op.name}/gathered input {op.inputs.index(name)}"}
                continue
            parted = not with_inputs and ends_at_parting(workload, index, name)
            if size and name not in workload.input_names and not parted:
                made_again = not is_private(name) and workload.producer.get(name, -1) in segment
                found.add(f"{name}@again" if made_again else name)
        return found | {f"{name}/gradient" for name in op.outputs if self._is_read(name)}

    def held(self, index: int) -> set[str]:
        """Return what is held of the segment that begins with an operator: inputs, outputs, gradients of these."""
        segment = self._segment(index)
        if not segment or segment.start != index or not self.view.costs.problem.runtime.recompute_holds_ends:
            return set()
        operators = [self.workload.operators[each] for each in segment]
        made = [name for op in operators for name in op.outputs if self._is_read(name, beyond=segment)]
        entering = {name for name in operators[0].inputs if name in self.workload.producer}
        return {each for name in made for each in (f"{name}@again", f"{name}/gradient")} | (entering if made else set())

    def gathered(self, index: int) -> set[str]:
        """Return the units that ZeRO-3 gathers for an operator."""
        part = self.view.costs.unit_parts[index]
        groups = (each for each in parameter_groups(self.view) if index in each.users)
        used = any(part in units_gathered_for(self.view, group) for group in groups)
        return {f"unit {part}/gathered"} if used else set()

    def _segment(self, index: int) -> range:
        return next((range(*each) for each in self.view.stage.recompute if index in range(*each)), range(0))

    def _is_read(self, name: str, beyond: range = range(0)) -> bool:
        readers = [each for each in self.workload.consumers.get(name, ()) if each in self.view.shardings]
        return name in self.view.leaving or any(each not in beyond for each in readers)


@lru_cache
def costs_of(family: str, runtime: str) -> CostTables:
    return CostTables(small_problem(family, cluster="a100-80g-dgx:1x8", runtime=runtime))


def by_rows_first(plan: Plan) -> Plan:
    """Return the plan with tensor parallelism in Megatron's other order, whose linear layers copy parts of inputs."""
    words = {"tensor": "tensor_alternative"}

    def turned(stage: Stage) -> Stage:
        runs = []
        for count, axes in stage.shardings:
            runs.append((count, tuple(axis._replace(split=words.get(axis.split, axis.split)) for axis in axes)))
        return replace(stage, shardings=tuple(runs))

    return replace(plan, stages=tuple(map(turned, plan.stages)))


@st.composite
def plans(draw: st.DrawFn, problem: Problem, schedules: list[str]) -> Plan:
    """Draw a uniform plan under one of some schedules, its segments whole layers or any operators."""
    tp, pp, dp = draw(st.sampled_from([shape for shape in product((1, 2), (1, 2), (1, 2, 4)) if prod(shape) <= 8]))
    plan = uniform_plan(
        problem,
        tp=tp,
        pp=pp,
        dp=dp,
        microbatch=1,
        zero=draw(st.integers(0, 3)) if dp > 1 else 0,
        recompute=draw(st.sampled_from(["none", "full", "selective"])),
        schedule=draw(st.sampled_from(schedules)),
        gradient_reduction=draw(st.sampled_from(["every", "last"])),
        overlap_gradient_sync=True,
    )
    if draw(st.booleans()):
        plan = by_rows_first(plan)
    count = len(problem.workload)
    if draw(st.booleans()):
        plan = recomputing(plan, draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    return validate(plan, problem)


@pytest.mark.parametrize("schedules", [["1f1b", "gpipe"], ["zb-h1"]])
@settings(max_examples=100, deadline=None)
@given(data=st.data(), family=st.sampled_from(sorted(SMALL)), runtime=st.sampled_from(RUNTIMES))
def test_nothing_is_let_go_before_it_is_needed_and_nothing_stays(data, family: str, runtime: str, schedules) -> None:
    costs = costs_of(family, runtime)
    plan = data.draw(plans(costs.problem, schedules))
    splits = schedule_named(plan.schedule).splits_backward
    for view in stage_views(plan, costs):
        memory = Watched(view)
        memory.run()
        for index, with_inputs, with_weights, live in memory.found:
            missing = memory.needed(index, with_inputs=with_inputs) - live
            if with_inputs:
                missing |= memory.gathered(index) - live
            if not splits:
                missing |= memory.held(index) - live
            assert not missing, (index, with_inputs, with_weights)
        assert memory.left == memory.anew


@pytest.mark.parametrize("first", [27, 28])
def test_what_enters_a_segment_stays_until_no_weight_gradient_needs_it(first: int) -> None:
    """T5's encoded states, saved by the projections of both cross-attentions, one of them in a segment.

    They were gone by then if its first operator had no weights, and stayed for that one's if it had some.
    """
    costs = costs_of("t5", "composer-fsdp")
    zero_bubble = {"schedule": "zb-h1", "gradient_reduction": "every", "overlap_gradient_sync": True}
    plan = uniform_plan(costs.problem, microbatch=1, **zero_bubble)
    stage = replace(plan.stages[0], recompute=((first, 30),))
    (view,) = stage_views(validate(replace(plan, stages=(stage,)), costs.problem), costs)
    memory = Watched(view)
    memory.run()
    late = {index: live for index, with_inputs, _, live in memory.found if not with_inputs}
    assert memory.needed(29, with_inputs=False) <= late[29]
    assert min(index for index, live in late.items() if "decoder_embedding.encoder_final_norm" in live) == 29
    assert memory.left == memory.anew


def test_the_next_unit_is_gathered_when_the_ends_of_a_segment_are_gone() -> None:
    """The hook that asks for it comes behind checkpointing's function (torch 2.0.1), whose locals have gone by then."""
    costs = costs_of("llama", "hetu-galvatron")
    plan = uniform_plan(costs.problem, dp=8, microbatch=1, zero=3, recompute="full", gradient_reduction="every")
    (view,) = stage_views(validate(plan, costs.problem), costs)
    memory = Watched(view)
    memory.left = memory._after(*memory.forward())
    tensors, is_alloc = memory.backward()
    names = list(memory.table.names)
    asked = [place for place, tensor in enumerate(tensors) if is_alloc[place] and names[tensor].endswith("/gathered")]
    assert len(asked) == 1 + 4 + 2  # Embedding; layers; norm and head.
    for place in asked:
        assert not [name for name in memory._after(tensors[:place], is_alloc[:place]) if name.endswith("@again")]


@pytest.mark.parametrize("runtime", ["windtunnel-executor", "megatron-deepspeed", "composer-fsdp"])
def test_a_heads_product_works_when_its_logits_are_gone(runtime: str) -> None:
    """In the gradient of the logits and the one that it makes; torch's cast of the former reads the wide one."""
    costs = costs_of("gpt", runtime)
    (view,) = stage_views(validate(uniform_plan(costs.problem, microbatch=1), costs.problem), costs)
    memory = Watched(view)
    memory.left = memory._after(*memory.forward())
    tensors, is_alloc = memory.backward()
    head = view.operators[-1]
    name, cost = costs.problem.workload.operators[head].name, view.cost(head)
    work = [at for each, at in memory.table.names.items() if each.startswith(f"{name}/workspace of its product")]
    element_bytes = costs.problem.runtime.implementation.activation_bytes
    made_bytes = cost.gradient_elements * element_bytes
    assert sum(memory.table.sizes[each] for each in work) == cost.workspace_weight_bytes + made_bytes > made_bytes
    place = tensors.index(min(work))
    own = {each for each in memory._after(tensors[:place], is_alloc[:place]) if each.startswith(f"{name}/")}
    assert f"{name}/softmax" in memory.left and own <= {f"{name}/of logits backward"}


def test_the_part_that_a_loss_copies_stays_for_its_product() -> None:
    """A head of half the samples on each rank, behind layers that both have whole; weights are multiplied later."""
    costs = costs_of("gpt", "windtunnel-executor")
    zero_bubble = {"schedule": "zb-h1", "gradient_reduction": "every", "overlap_gradient_sync": True}
    plan = uniform_plan(costs.problem, tp=2, microbatch=2, **zero_bubble)
    count = len(costs.problem.workload)
    shardings = ((count - 1, (Axis("replicate", 2),)), (1, (Axis("batch", 2),)))
    plan = replace(plan, stages=(replace(plan.stages[0], shardings=shardings),))
    (view,) = stage_views(validate(plan, costs.problem), costs)
    memory = Watched(view)
    memory.run()
    part, *_ = view.sliced_inputs(count - 1).values()
    halves = [(with_inputs, part in live) for index, with_inputs, _, live in memory.found if index == count - 1]
    assert halves == [(True, True), (False, True)]
