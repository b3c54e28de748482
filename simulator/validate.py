"""Is a plan legal for a problem? Everything wrong is named at once, with where and what to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod

from datafiles.names import nearest
from datafiles.words import counted
from simulator.divisors import largest_divisor
from simulator.lowering.mesh import batch_degree
from simulator.plan import GRADIENT_REDUCTIONS, REPLICA_ASSIGNMENTS, TENSOR_WORDS, Plan, Sharding, Stage, resolve
from simulator.problem import Problem
from simulator.schedules.actions import PipelineShape
from simulator.schedules.registry import SCHEDULES, schedule_named
from workloads.local import localize
from workloads.operators import Operator

MAX_MESSAGES = 20


def validate(plan: Plan, problem: Problem) -> Plan:
    """Check a plan and return its canonical form.

    Raises:
        ValueError: One message that lists what is wrong, each with place, rule and remedy.
    """
    problems: list[str] = []
    of_operators: defaultdict[str, list[str]] = defaultdict(list)
    _check_batch(plan, problem, problems)
    _check_coverage(plan, problem, problems)
    for position, stage in enumerate(plan.stages):
        _check_devices(position, stage, problem, problems)
        _check_recompute(position, stage, problems)
    _check_sharing(plan, problems)
    if not problems:
        for position, stage in enumerate(plan.stages):
            _check_shardings(position, stage, plan, problem, problems, of_operators)
    problems += [
        f"{first}{' and others like it' if others else ''}: {words}" for words, (first, *others) in of_operators.items()
    ]
    if not problems:
        _check_schedule(plan, problem, problems)
    if problems:
        shown = problems[:MAX_MESSAGES]
        more = f"\n  ... and {len(problems) - len(shown)} more" if len(problems) > len(shown) else ""
        raise ValueError("the plan is not legal:\n  " + "\n  ".join(shown) + more)
    return plan.canonical(problem.workload)


def _check_batch(plan: Plan, problem: Problem, problems: list[str]) -> None:
    if not plan.stages:
        problems.append("stages: a plan must have at least one stage, got none")
    for name in ("microbatch_size", "num_microbatches"):
        if getattr(plan, name) < 1:
            problems.append(f"{name} must be at least 1, got {getattr(plan, name)}")
    last = plan.last_microbatch_size
    if last is not None and not 1 <= last <= plan.microbatch_size:
        problems.append(
            f"last_microbatch_size must be from 1 to the microbatch_size {plan.microbatch_size}, got {last}; leave it "
            "out where all microbatches are alike"
        )
    elif last is not None and plan.num_microbatches == 1 and last != plan.microbatch_size:
        problems.append(
            "last_microbatch_size needs microbatches before the last, got num_microbatches 1; use microbatch_size: "
            f"{last}"
        )
    elif last is not None and plan.global_batch != problem.global_batch:
        problems.append(
            f"microbatch_size * (num_microbatches - 1) + last_microbatch_size must equal the global batch "
            f"{problem.global_batch}, got {plan.microbatch_size} * {plan.num_microbatches - 1} + {last} = "
            f"{plan.global_batch}; {_last_remedy(plan.microbatch_size, problem.global_batch)}"
        )
    elif plan.global_batch != problem.global_batch:
        problems.append(
            f"microbatch_size * num_microbatches must equal the global batch {problem.global_batch}, got "
            f"{plan.microbatch_size} * {plan.num_microbatches} = {plan.global_batch}; "
            f"{_batch_remedy(plan.microbatch_size, problem.global_batch)}"
        )
    if plan.gradient_reduction not in GRADIENT_REDUCTIONS:
        problems.append(
            f"gradient_reduction must be one of {', '.join(GRADIENT_REDUCTIONS)}, got {plan.gradient_reduction!r}"
        )
    if plan.replica_assignment not in REPLICA_ASSIGNMENTS:
        problems.append(
            f"replica_assignment must be one of {', '.join(REPLICA_ASSIGNMENTS)}, got {plan.replica_assignment!r}"
        )
    elif plan.rotates and plan.gradient_reduction == "every":
        problems.append(
            "gradient_reduction: with replica_assignment round_robin gradients are reduced once an iteration; use last"
        )


def _last_remedy(microbatch_size: int, global_batch: int) -> str:
    count, left = divmod(global_batch, microbatch_size)
    if not count or not left:
        return _batch_remedy(microbatch_size, global_batch) + " without last_microbatch_size"
    return f"try num_microbatches: {count + 1}, last_microbatch_size: {left}"


def _batch_remedy(microbatch_size: int, global_batch: int) -> str:
    if microbatch_size >= 1 and global_batch % microbatch_size == 0:
        return f"try num_microbatches: {global_batch // microbatch_size}"
    near = largest_divisor(global_batch, max(1, microbatch_size))
    return f"try microbatch_size: {near}, num_microbatches: {global_batch // near}"


def _check_coverage(plan: Plan, problem: Problem, problems: list[str]) -> None:
    count = len(problem.workload)
    owner: dict[int, int] = {}
    for position, stage in enumerate(plan.stages):
        if not stage.operators:
            problems.append(f"stages.{position}.operators: a stage must have at least one operator, got none")
        for start, stop in stage.operators:
            if not 0 <= start < stop <= count:
                problems.append(
                    f"stages.{position}.operators: a range must satisfy 0 <= start < stop <= {count} "
                    f"({problem.workload.name} has {counted(count, 'operator')}), got [{start}, {stop}]"
                )
                return
            for index in range(start, stop):
                if index in owner:
                    problems.append(
                        f"stages.{position}.operators: operator {index} ({problem.workload.operators[index].name}) "
                        f"is in stage {owner[index]} already; give each operator to one stage"
                    )
                    return
                owner[index] = position
    missing = [index for index in range(count) if index not in owner]
    if missing and plan.stages:
        problems.append(
            f"stages: every operator must be in a stage, {len(missing)} are in none, the first is "
            f"{missing[0]} ({problem.workload.operators[missing[0]].name})"
        )
        return
    for index, op in enumerate(problem.workload.operators):
        for name in op.inputs:
            producer = problem.workload.producer.get(name)
            if producer is not None and owner.get(producer, 0) > owner.get(index, 0):
                problems.append(
                    f"stages: operator {index} ({op.name}) in stage {owner[index]} needs {name}, which stage "
                    f"{owner[producer]} makes later; order the stages along the data"
                )
                return


def _check_devices(position: int, stage: Stage, problem: Problem, problems: list[str]) -> None:
    place = f"stages.{position}.devices"
    if not stage.devices:
        problems.append(f"{place}: a stage must have at least one device, got none")
    if len(set(stage.devices)) != len(stage.devices):
        problems.append(f"{place}: a device must not be named twice, got {list(stage.devices)}")
    outside = [device for device in stage.devices if not 0 <= device < problem.num_devices]
    if outside:
        problems.append(
            f"{place}: devices must be in 0..{problem.num_devices - 1} (cluster {problem.hardware.cluster.name} has "
            f"{problem.num_devices}), got {outside[0]}; use fewer devices or a larger cluster"
        )


def _check_sharing(plan: Plan, problems: list[str]) -> None:
    seen: dict[int, tuple[int, ...]] = {}
    for position, stage in enumerate(plan.stages):
        for device in stage.devices:
            if seen.setdefault(device, stage.devices) != stage.devices:
                problems.append(
                    f"stages.{position}.devices: device {device} is also in another stage with other devices; "
                    "two stages must use the same device tuple or none in common"
                )
                return


def _check_recompute(position: int, stage: Stage, problems: list[str]) -> None:
    place = f"stages.{position}.recompute"
    own = set(stage.indices())
    previous = -1
    for start, stop in sorted(stage.recompute):
        if start >= stop or any(index not in own for index in range(start, stop)):
            problems.append(f"{place}: a segment must lie inside its stage, got [{start}, {stop}]")
            return
        if start < previous:
            problems.append(f"{place}: segments must not overlap, got one that starts at {start} before {previous}")
            return
        previous = stop


def _check_shardings(
    position: int,
    stage: Stage,
    plan: Plan,
    problem: Problem,
    problems: list[str],
    of_operators: defaultdict[str, list[str]],
) -> None:
    """Note what is wrong with a stage, and with operators: the words, and the places that they are true of."""
    place = f"stages.{position}.shardings"
    counts = [count for count, _ in stage.shardings]
    if any(count < 1 for count in counts) or sum(counts) != stage.num_operators():
        problems.append(
            f"{place}: counts must be at least 1 and add up to the stage's "
            f"{counted(stage.num_operators(), 'operator')}, got {sum(counts)}"
        )
        return
    checked: set[object] = set()
    degrees: set[int] = set()
    for index, sharding in zip(stage.indices(), stage.sharding_per_operator(), strict=True):
        op = problem.workload.operators[index]
        key = (problem.workload.signatures[index], sharding)
        if key in checked:
            continue
        checked.add(key)
        where = f"{place}, operator {index} ({op.name})"
        if wrong_mesh := _wrong_mesh(sharding, len(stage.devices)):
            of_operators[wrong_mesh].append(where)
            continue
        resolved = resolve(sharding, op)
        degree = batch_degree(resolved)
        degrees.add(degree)
        for words in (*_wrong_splits(op, resolved), *_wrong_replicas(degree, resolved, plan)):
            of_operators[words].append(where)
        if not problems and not of_operators:
            try:
                shapes = problem.workload.input_shapes(index, degree)
                axes = [(axis.split, axis.size) for axis in resolved]
                localize(op.definition, op.attributes, shapes, axes, problem.runtime.implementation, operator=op.name)
            except ValueError as error:
                problems.append(f"{place}: {error}")
    if plan.rotates and len(degrees) > 1:
        problems.append(f"{place}: round_robin needs the same batch degree in the whole stage, got {sorted(degrees)}")
        return
    for name in ("microbatch_size", "last_microbatch_size"):
        size = getattr(plan, name)
        ragged = [degree for degree in degrees if size is not None and size % degree and not plan.rotates]
        if ragged and len(degrees) > 1:
            problems.append(
                f"{place}: {name} {size} does not divide over {ragged[0]} replicas; unequal "
                f"slices need the same batch degree in the whole stage, got {sorted(degrees)}"
            )


def _wrong_mesh(sharding: Sharding, num_devices: int) -> str:
    """Return what is wrong with the axes of an operator's mesh; nothing if they make one of the stage's devices."""
    if any(axis.size < 1 or not 0 <= axis.zero <= 3 for axis in sharding):
        return f"axes need size >= 1 and zero 0..3, got {[tuple(axis) for axis in sharding]}"
    size = prod(axis.size for axis in sharding)
    if size == num_devices:
        return ""
    product = " * ".join(str(axis.size) for axis in sharding) or "1"
    return f"axis sizes must multiply to the stage's {counted(num_devices, 'device')}, got {product} = {size}"


def _wrong_splits(op: Operator, resolved: Sharding) -> Iterator[str]:
    """Yield what is wrong with how an operator is split."""
    table = op.definition.splits(op.attributes)
    limits: dict[str, int] = {}
    for axis in resolved:
        if axis.split not in table:
            yield f"kind {op.kind} has no split {axis.split!r}; {nearest(axis.split, [*TENSOR_WORDS, *sorted(table)])}"
        elif axis.zero and axis.split != "batch":
            yield f"zero goes with batch only, got {axis.split} with zero {axis.zero}"
        limits[axis.split] = limits.get(axis.split, 1) * axis.size
    for split, degree in limits.items():
        limit = op.definition.split_limit(op.attributes, split) if split in table else None
        if limit is not None and limit % degree:
            remedy = "; pad the vocabulary (vocab_multiple of the model)" if split == "vocab" else ""
            if split == "column" and "attention" in op.role:
                remedy = f"; {limit} are its groups of heads (kv_heads of the model, else heads), none replicated"
            yield f"a {split} split must divide {limit}, got {degree}{remedy}"


def _wrong_replicas(degree: int, resolved: Sharding, plan: Plan) -> Iterator[str]:
    """Yield what is wrong with an operator's replicas, of which there are ``degree``."""
    if plan.rotates:
        if degree > plan.num_microbatches:
            yield (
                f"each of {degree} replicas needs a microbatch of its own, got num_microbatches {plan.num_microbatches}"
            )
        if any(axis.zero == 3 for axis in resolved):
            yield (
                "replicas that take microbatches in turn cannot gather parameters together; use zero 0 to 2, or "
                "replica_assignment slice"
            )
    elif degree > plan.microbatch_size:
        yield (
            f"each of {degree} replicas needs a sample of the microbatch, got microbatch_size {plan.microbatch_size}; "
            f"try microbatch_size: {degree}"
        )
    elif plan.last_microbatch_size is not None and degree > plan.last_microbatch_size:
        yield (
            f"each of {degree} replicas needs a sample of the last microbatch too, got last_microbatch_size "
            f"{plan.last_microbatch_size}; cut the batch so that at least {degree} are left"
        )


def _check_schedule(plan: Plan, problem: Problem, problems: list[str]) -> None:
    shardings = (sharding for stage in plan.stages for sharding in stage.sharding_per_operator())
    gathers = any(axis.zero == 3 for sharding in shardings for axis in sharding)
    if gathers and "gather" in problem.runtime.host_waits and len(plan.stages) > len(set(plan.rank_of_stage)):
        problems.append(
            f"schedule: under runtime {problem.runtime.name} hosts wait for gathered parameters before they post "
            "receives, so ranks with several stages would wait for each other; use one stage a rank, or ZeRO-2"
        )
    try:
        schedule = schedule_named(plan.schedule)
        if plan.rotates and not schedule.takes_turns:
            able = ", ".join(each.name for each in SCHEDULES.values() if each.takes_turns)
            problems.append(
                f"replica_assignment: round_robin goes with the schedules {able}, got {plan.schedule}, which has no "
                "order of its own for each replica; use one of these, or slice"
            )
        if plan.warmup is not None and not schedule.takes_warmup:
            problems.append(f"warmup: schedule {plan.schedule} sets its own warm-up; leave warmup out")
            return
        if plan.warmup is not None and len(plan.warmup) != len(plan.stages):
            problems.append(f"warmup: one depth per stage ({len(plan.stages)}), got {len(plan.warmup)}")
            return
        schedule.check(
            PipelineShape(len(plan.stages), plan.num_microbatches, plan.rank_of_stage, plan.warmup_in_force())
        )
    except ValueError as error:
        problems.append(f"schedule: {error}")
