"""Between the planner's words and plans."""

from __future__ import annotations

from collections.abc import Sequence

from searchers.galvatron.layer_profiles import Layer
from searchers.galvatron.microbatches import Cut
from searchers.galvatron.pipeline_plan import PipelinePlan
from searchers.galvatron.strategies import DATA, SHARDED, TENSOR, Level, Strategy
from simulator.plan import Axis, Plan, Sharding, Stage
from simulator.problem import Problem


def to_plan(found: PipelinePlan, problem: Problem) -> Plan:
    """Return the plan: equal consecutive device groups, ordered axes per layer, a segment per checkpointed layer.

    Raises:
        ValueError: If the problem has another batch.
    """
    if found.batch != problem.global_batch:
        raise ValueError(f"the problem's global batch must be {found.batch}, got {problem.global_batch}")
    return plan_of_layers(
        [(stage.layers, stage.chosen) for stage in found.stages],
        cut=found.cut,
        schedule=found.schedule,
        outside=found.outside,
    )


def plan_of_layers(
    stages: Sequence[tuple[Sequence[Layer], Sequence[Strategy]]],
    *,
    cut: Cut,
    schedule: str,
    outside: str = "layers",
) -> Plan:
    """Return the plan of strategies per layer, stages on consecutive devices.

    Args:
        stages: Layers of each stage, and a strategy for each.
        cut: Microbatches.
        schedule: Name.
        outside: How embedding and head are cut, see `searchers.galvatron.options.Options`.
    """
    built: list[Stage] = []
    device = 0
    for layers, chosen in stages:
        size = chosen[0].num_devices
        built.append(
            Stage(
                operators=((layers[0].span[0], layers[-1].span[1]),),
                devices=tuple(range(device, device + size)),
                shardings=_runs(layers, chosen, cut if outside == "data" else None),
                recompute=tuple(
                    layer.core for layer, strategy in zip(layers, chosen, strict=True) if strategy.checkpoint
                ),
            )
        )
        device += size
    return Plan(
        stages=tuple(built),
        microbatch_size=cut.samples,
        num_microbatches=cut.parts,
        last_microbatch_size=cut.last,
        schedule=schedule,
        gradient_reduction="last",
        overlap_gradient_sync=True,
    )


def _runs(layers: Sequence[Layer], chosen: Sequence[Strategy], spreads: Cut | None) -> tuple[tuple[int, Sharding], ...]:
    runs: list[tuple[int, Sharding]] = []
    for layer, strategy in zip(layers, chosen, strict=True):
        own = strategy.sharding
        outer = own if spreads is None else spread(strategy.num_devices, spreads, own)
        for count, sharding in runs_of_layer(layer, own, outer):
            if runs and runs[-1][1] == sharding:
                runs[-1] = (runs[-1][0] + count, sharding)
            else:
                runs.append((count, sharding))
    return tuple(runs)


def runs_of_layer(layer: Layer, own: Sharding, outer: Sharding) -> list[tuple[int, Sharding]]:
    """Return a layer's runs of operators: the repeated layer cut its own way, what lies around it another."""
    counts = (
        (layer.core[0] - layer.span[0], outer),
        (layer.core[1] - layer.core[0], own),
        (layer.span[1] - layer.core[1], outer),
    )
    return [(count, sharding) for count, sharding in counts if count]


def spread(num_devices: int, cut: Cut, own: Sharding) -> Sharding:
    """Return the sharding that keeps weights whole and shares samples among a stage's devices, if there are enough.

    Args:
        num_devices: Of the stage.
        cut: Microbatches; where one cannot be shared evenly the layer's ``own`` sharding stays.
        own: How the layer is cut.
    """
    if cut.samples % num_devices or (cut.last or 0) % num_devices:
        return own
    return (Axis("batch", num_devices),) if num_devices > 1 else ()


def from_plan(plan: Plan, layers: Sequence[Layer]) -> list[tuple[tuple[Layer, ...], tuple[Strategy, ...]]] | None:
    """Return layers and strategies of each stage, or None where a plan is not in these words.

    Stages must hold whole layers on equally many devices, and a repeated layer must be cut one way throughout, and
    recomputed whole or not at all.
    """
    found = []
    for stage in plan.stages:
        if len(stage.operators) != 1:
            return None
        start, stop = stage.operators[0]
        own = tuple(layer for layer in layers if start <= layer.span[0] and layer.span[1] <= stop)
        if not own or own[0].span[0] != start or own[-1].span[1] != stop:
            return None
        if set(stage.recompute) - {layer.core for layer in own}:
            return None
        shardings = list(stage.sharding_per_operator())
        chosen = []
        for layer in own:
            of_core = shardings[layer.core[0] - start : layer.core[1] - start]
            levels = levels_of(of_core[0])
            if levels is None or any(sharding != of_core[0] for sharding in of_core):
                return None
            chosen.append(Strategy(levels, layer.core in stage.recompute))
        found.append((own, tuple(chosen)))
    sizes = {strategy.num_devices for _, chosen in found for strategy in chosen}
    return found if len(sizes) == 1 else None


def levels_of(sharding: Sharding) -> tuple[Level, ...] | None:
    """Return the tree of a sharding, None where it is not one.

    >>> from simulator.plan import Axis
    >>> levels_of((Axis("batch", 2, 3), Axis("tensor", 4)))
    (Level(kind='sdp', degree=2), Level(kind='tp', degree=4))
    """
    levels: list[Level] = []
    for split, size, zero in sharding:
        if size == 1:
            continue
        if split not in ("tensor", "batch") or (split == "batch" and zero not in (0, 3)):
            return None
        kind = (SHARDED if zero == 3 else DATA) if split == "batch" else TENSOR
        if any(level.kind == kind for level in levels):
            return None
        levels.append(Level(kind, size))
    return tuple(levels)
