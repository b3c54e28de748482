"""What the models that searchers minimise say of plans that no search chose."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import isfinite

from searchers.alpa.intra_op import ATTRIBUTES, IntraOp, IntraOpOptions
from searchers.alpa.layer_needs import LayerNeeds, layer_needs, layer_walk, stage_working_bytes
from searchers.alpa.meshes import LogicalMesh, Submesh
from searchers.alpa.oracle import StageCost
from searchers.base import Searcher
from searchers.registry import searcher_named
from simulator.costs import cost_tables
from simulator.plan import Plan, Sharding, Stage, batch_replicas, resolve
from simulator.problem import Problem, ProblemSpec
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from simulator.validate import validate

SEARCHERS = ("aceso", "alpa", "amp", "dapple", "galvatron-bmw", "megatron-grid", "pipedream", "piper")
OWN_MEMORY = ("aceso", "alpa", "galvatron-bmw", "megatron-grid")
"""Searchers with an account of memory; the others are given the shared closed form, `megatron-grid`'s."""
DEGREES = ((1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 2, 1), (2, 1, 2), (4, 1, 1))
"""Tensor, pipeline, data."""
SHAPES = ((1, "none"), (4, "none"), (4, "full"))
"""Samples per replica and microbatch, recomputation."""
QUICK = (
    ("gpt3-350m", "v100-32g-dgx1:1x4", "megatron-lm-2021"),
    ("bert-large", "p3.8xlarge:2x2", "megatron-lm-2021"),
    ("t5-770m", "a100-40g-dgx:1x4", "megatron-lm-2021"),
)
PROBLEMS = (
    *QUICK,
    ("gpt3-1.3b", "p3.8xlarge:1x4", "megatron-lm-2021"),
    ("gpt3-1.3b", "a100-80g-dgx-100g:2x2", "megatron-deepspeed"),
    ("bert-48", "v100-1gpu-25g:4x1", "dapple-tensorflow"),
    ("vit-large", "titan-rtx-pcie:1x4", "galvatron-v1"),
    ("vit-large", "a100-40g-dgx:2x2", "megatron-lm-2021"),
    ("wide-resnet-1b", "v100-32g-dgx1:1x4", "megatron-lm-2021-fp32"),
    ("wide-resnet-1b", "p3.8xlarge:2x2", "megatron-lm-2021-fp32"),
)
"""Model, cluster of four GPUs, runtime."""
BATCH = 32


@dataclass(frozen=True)
class Priced:
    """One plan by one searcher's model and by the simulator.

    Attributes:
        searcher, model, cluster, plan: Names; the plan's degrees.
        own_s, simulated_s: Seconds of an iteration.
        own_bytes, simulated_bytes: Peak of the fullest device, allocated.
    """

    searcher: str
    model: str
    cluster: str
    plan: str
    own_s: float
    simulated_s: float
    own_bytes: float
    simulated_bytes: float

    @property
    def time_error(self) -> float:
        """Of the searcher's time, as a share of the simulated one."""
        return self.own_s / self.simulated_s - 1

    @property
    def memory_error(self) -> float:
        """Of the searcher's peak, as a share of the simulated one."""
        return self.own_bytes / self.simulated_bytes - 1


def priced(
    model: str, cluster: str, runtime: str, shapes: Sequence[tuple[int, str]] = SHAPES
) -> Iterator[Priced]:
    """Yield every uniform plan of a problem by every searcher whose words it is in."""
    problem = ProblemSpec(model=model, cluster=cluster, runtime=runtime, global_batch=BATCH).load()
    for (tp, pp, dp), (microbatch, recompute) in product(DEGREES, shapes):
        try:
            plan = uniform_plan(problem, tp=tp, pp=pp, dp=dp, microbatch=microbatch, recompute=recompute)
            validate(plan, problem)
        except ValueError:  # heads, layers or the node do not divide so
            continue
        found = simulate(plan, problem, engine="compiled", costs=cost_tables(problem), leave_out_periods=True)
        words = f"tp {tp} pp {pp} dp {dp}, {microbatch}, {recompute}"
        for searcher in SEARCHERS:
            try:
                own_s, own_bytes = own_price(searcher, plan, problem)
            except ValueError:  # the searcher has no such plans
                continue
            peak = float(found.peak_allocated_bytes)
            yield Priced(searcher, model, cluster, words, own_s, found.iteration_time_s, own_bytes, peak)


def own_price(searcher: str, plan: Plan, problem: Problem) -> tuple[float, float]:
    """Return seconds of an iteration and the peak by what a searcher minimises.

    Raises:
        ValueError: If the plan is not in its words.
    """
    if searcher == "alpa":
        return _alpa_price(plan, problem)
    score = _searcher(searcher).paper_objective(plan, problem)
    if not isfinite(score.objective):
        raise ValueError(f"{searcher} cannot price the plan")
    return score.objective, score.peak_bytes


@cache
def _searcher(name: str) -> Searcher:
    """Return the searcher; it remembers what it worked out for the last problem."""
    return searcher_named(name)


def _alpa_price(plan: Plan, problem: Problem) -> tuple[float, float]:
    """Return Alpa's pipeline of stages, each the sum of its operators and what lies between them."""
    seconds, peaks = [], []
    for position, stage in enumerate(plan.stages):
        cost = _alpa_stage(stage, plan, problem)
        seconds.append(cost.seconds)
        peaks.append(cost.peak_bytes(min(plan.num_microbatches, len(plan.stages) - position)))
    return sum(seconds) + (plan.num_microbatches - 1) * max(seconds), max(peaks)


def _alpa_stage(stage: Stage, plan: Plan, problem: Problem) -> StageCost:
    """Return what Alpa counts of a stage whose operators are sharded and recomputed as given.

    Alpa's own plans recompute every layer or none; here the embedding and the head do not run again.
    """
    per_node = problem.hardware.cluster.devices_per_node
    size, rows = len(stage.devices), batch_replicas(stage)
    nodes = max(1, size // per_node)
    mesh = LogicalMesh(Submesh(nodes, size // nodes), rows, size // rows, batch_forced=True)
    intra, twice = (
        IntraOp(cost_tables(problem), mesh, plan.microbatch_size, plan.num_microbatches, IntraOpOptions(recompute=each))
        for each in (False, True)
    )
    operators = list(stage.indices())
    words = zip(operators, stage.sharding_per_operator(), strict=True)
    shardings = {index: resolve(sharding, problem.workload.operators[index]) for index, sharding in words}
    layer_of = [problem.workload.operators[index].layer for index in operators]
    ends = {layer: index for index, layer in zip(operators, layer_of, strict=True)}
    leaving = {
        index
        for index, layer in zip(operators, layer_of, strict=True)
        for name in problem.workload.operators[index].outputs
        if problem.workload.consumers.get(name, (-1,))[-1] > ends[layer]
    }
    once, recomputed = (each.graph(operators[0], operators[-1] + 1, leaving) for each in (intra, twice))
    again = {index for start, stop in stage.recompute for index in range(start, stop)}
    chosen = [intra.strategies(index).index(shardings[index]) for index in operators]
    seconds = kept_bytes = elements = 0.0
    for (u, v), table in once.edges.items():
        table = recomputed.edges[u, v] if operators[v] in again else table
        seconds += float(table[chosen[u], chosen[v]])
    for place, index in enumerate(operators):
        graph = recomputed if index in again else once
        own_costs = dict(zip(ATTRIBUTES, graph.attributes[place][:, chosen[place]].tolist(), strict=True))
        seconds += own_costs["seconds"]
        elements += own_costs["elements"]
        kept_bytes += own_costs["remaining_bytes" if again else "saved_bytes"]
    seen: set[Hashable] = set()
    places = {layer: place for place, layer in enumerate(dict.fromkeys(layer_of))}
    waiting: dict[Hashable, tuple[int, int, float]] = {}
    for index, layer in zip(operators, layer_of, strict=True):
        for layout, shared, _ in intra.tied_layouts(index, shardings[index]):
            elements -= shared if layout in seen else 0.0
            begun, *_ = waiting.get(layout, (places[layer],))
            waiting[layout] = begun, places[layer], shared * problem.runtime.tied_gradient_bytes
            seen.add(layout)
    per_element, _ = intra.state_bytes_per_element(sharded=False)
    needs, added = zip(*_layers_needs(intra, shardings, layer_of, again), strict=True)
    received = needs[0].received_bytes if operators[0] > 0 else 0.0
    sent = needs[-1].sent_bytes if operators[-1] < len(problem.workload) - 1 else 0.0
    return StageCost(
        seconds,
        elements * per_element,
        kept_bytes + sum(added),
        received + sent,
        stage_working_bytes(needs, [each for each in waiting.values() if each[0] < each[1]]),
        elements * problem.runtime.optimizer_workspace_bytes,
    )


def _layers_needs(
    intra: IntraOp, shardings: Mapping[int, Sharding], layer_of: Sequence[int], again: Set[int]
) -> Iterator[tuple[LayerNeeds, float]]:
    """Yield what each layer of a stage needs besides what the stage keeps, and what it adds to that.

    Where layers are recomputed a stage keeps what leaves each. An embedding is not and keeps all of its own; a head
    does so, too, but only while it is at work itself, as if it were.
    """
    layers: dict[int, dict[int, Sharding]] = {}
    for (index, sharding), layer in zip(shardings.items(), layer_of, strict=True):
        layers.setdefault(layer, {})[index] = sharding
    before = min(shardings)
    for own in layers.values():
        inside = [index for index in own if index in again]
        if again and not inside and len(intra.costs.problem.workload) - 1 in own:
            inside = list(own)
        segment = (inside[0], inside[-1] + 1) if inside else None
        memory = layer_walk(intra, own, before, segment).memory()
        added = memory.saved_bytes - memory.input_bytes if again and not inside else 0.0
        yield layer_needs(intra, own, before, segment), added
        before = min(own)
