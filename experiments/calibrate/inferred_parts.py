"""The parts of a plan whose times are corrected together, and the operator profile that corrects them.

A part is what a framework runs again and again with equal shapes: the operators of a repeated layer, of what comes
before the first or after the last, on so many tensor-parallel ranks with so many samples. A factor of a part is on the
times of all its operators; what the model has for them, times the factor, is a row of an operator profile. So factors
reach the simulator as measured times do, and nowhere else: a part without a factor is priced by the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isclose
from typing import NamedTuple

from datafiles.words import counted
from hardware_models.model import HardwareModel
from hardware_models.profile import OperatorProfile, ProfileRow
from simulator.costs import CostTables
from simulator.fidelity import Fidelity
from simulator.lowering.handover import handover_s
from simulator.lowering.items import GRADIENTS
from simulator.lowering.lower import stage_views
from simulator.lowering.mesh import batch_degree
from simulator.lowering.program import ProgramBuilder
from simulator.plan import Plan, resolve
from simulator.problem import Problem
from simulator.profiled_costs import modelled_row, profiled_as
from simulator.segments import Segment
from simulator.uniform import repeated_layers
from workloads.operators import Workload

BEFORE, LAYER, AFTER = BLOCKS = ("before", "layer", "after")
"""Where an operator stands: before the repeated layers, in one, after them."""


class Part(NamedTuple):
    """Operators whose times are corrected together.

    Attributes:
        shape: What the layers are in words, e.g. ``hidden 1024``: operators of other shapes are other parts.
        block: One of ``BLOCKS``.
        tensor_size: Tensor-parallel ranks.
        samples: Samples a rank works on in a microbatch.
    """

    shape: str
    block: str
    tensor_size: int
    samples: int


Factors = Mapping[Part, float]


def parts_of(problem: Problem, plan: Plan, shape: str) -> set[Part]:
    """Return the parts of a plan that a profile can correct.

    Args:
        problem: Where to run.
        plan: What to run.
        shape: See `Part`.
    """
    return {part for part, *_ in _rows(problem, plan, shape, "")}


def profile_of(
    placed: Sequence[tuple[Problem, Plan]], shape: str, factors: Factors, source: str
) -> OperatorProfile:
    """Return the model's own times of the operators of plans, times the factors, as a profile.

    Args:
        placed: Problems and plans on one GPU type whose layers are alike; times come from the cost tables.
        shape: See `Part`.
        factors: Parts that are not named have no rows.
        source: Of the rows, in words.

    Raises:
        ValueError: If operators of one profile role differ, or GPU types or runtimes, which a profile cannot say.
    """
    _check_one_machine(placed)
    _check_one_model(problem for problem, _ in placed)
    found: dict[tuple[str, int, int, str], ProfileRow] = {}
    modelled: dict[tuple[str, int, int, str], ProfileRow] = {}
    weights: dict[tuple[str, int, str], float] = {}
    for problem, plan in placed:
        for part, row, (forward_wait_s, backward_wait_s) in _rows(problem, plan, shape, source):
            if part in factors:
                key, factor = (row.role, row.samples, row.tensor_size, row.split), factors[part]
                bytes_before = weights.setdefault((row.role, row.tensor_size, row.split), row.parameter_bytes)
                if row.parameter_bytes != bytes_before:
                    raise ValueError(
                        f"layers must be alike in all plans, got {row.role} with {bytes_before:,.0f} and "
                        f"{row.parameter_bytes:,.0f} bytes of parameters on "
                        f"{counted(row.tensor_size, 'tensor-parallel rank')}; "
                        f"{problem.workload.name} needs a profile of its own"
                    )
                if not _alike(row, modelled.setdefault(key, row)):
                    raise ValueError(
                        f"operators of one profile role must be alike, got {row.role} of {row.forward_s:.4g} and "
                        f"{modelled[key].forward_s:.4g} s forward with {counted(row.samples, 'sample')} on "
                        f"{counted(row.tensor_size, 'tensor-parallel rank')}; "
                        f"{problem.workload.name} needs a profile of its own, or has none"
                    )
                found.setdefault(
                    key,
                    replace(
                        row,
                        forward_s=(row.forward_s + forward_wait_s) * factor,
                        backward_s=(row.backward_s + backward_wait_s) * factor,
                    ),
                )
    first = placed[0][0]
    return OperatorProfile(
        model=first.workload.name,
        gpu_type=_gpu_type(first),
        dtype=first.runtime.implementation.dtype,
        rows=tuple(found.values()),
        source=source,
        kernels_only=first.runtime.host_runs_ahead,
    )


def corrected(problem: Problem, plan: Plan, shape: str, factors: Factors, source: str) -> Problem:
    """Return the problem on hardware that has the profile of `profile_of`.

    Raises:
        ValueError: If the hardware has a profile already: factors are on the model's own prices.
    """
    if problem.hardware.operator_profile is not None:
        raise ValueError("factors are on modelled times, got a problem with an operator profile; leave the profile out")
    hardware = HardwareModel(
        cluster=problem.hardware.cluster,
        operator_profile=profile_of([(problem, plan)], shape, factors, source),
        collective_table=problem.hardware.collective_table,
    )
    return replace(problem, hardware=hardware, spec=None)


def _check_one_machine(placed: Sequence[tuple[Problem, Plan]]) -> None:
    """Refuse runs that one profile cannot describe: of several GPU types, types of numbers or kinds of host."""
    kinds = {
        (_gpu_type(problem), problem.runtime.implementation.dtype, problem.runtime.host_runs_ahead)
        for problem, _ in placed
    }
    if len(kinds) > 1:
        words = "; ".join(f"{gpu} {dtype}, host {'ahead' if ahead else 'waits'}" for gpu, dtype, ahead in sorted(kinds))
        raise ValueError(f"runs must share a GPU type, a type of numbers and whether the host runs ahead, got {words}")


def _check_one_model(problems: Iterable[Problem]) -> None:
    """Refuse models that differ in more than their number of layers, whatever degrees and microbatches they ran at."""
    first: Workload | None = None
    kinds: dict[str, frozenset[object]] = {}
    for workload in {problem.workload.fingerprint: problem.workload for problem in problems}.values():
        own = _kinds_by_role(workload)
        for role, kind in own.items():
            if first is not None and kind != kinds.get(role, kind):
                raise ValueError(
                    f"layers must be alike in all plans, got {role} of {first.name} and of {workload.name}, which "
                    "differ; a profile is of one model: make a table for each, or fit constants of the machine, which "
                    "are of any models (--constants)"
                )
        first, kinds = first or workload, {**own, **kinds}


def _kinds_by_role(workload: Workload) -> dict[str, frozenset[object]]:
    """Return what operators of each role are, and on which shapes."""
    found: dict[str, set[object]] = {}
    for op in workload.operators:
        found.setdefault(op.role, set()).add(workload.work_key(op))
    return {role: frozenset(kinds) for role, kinds in found.items()}


def _gpu_type(problem: Problem) -> str:
    types = sorted(set(problem.gpu_types))
    if len(types) > 1:
        raise ValueError(f"a profile is of one GPU type, got a cluster of {', '.join(types)}; use runs on one type")
    return types[0]


def _rows(
    problem: Problem, plan: Plan, shape: str, source: str
) -> Iterator[tuple[Part, ProfileRow, tuple[float, float]]]:
    """Yield each operator that some stage runs, with the model's own times, and what it waits forward and backward.

    Equal operators once.
    """
    workload, gpu_type, costs = problem.workload, _gpu_type(problem), CostTables(problem)
    layers = repeated_layers(workload)
    sizes = {plan.microbatch_size, plan.last_microbatch_size or plan.microbatch_size}
    seen: set[tuple[object, ...]] = set()
    waits = {size: _waits(replace(plan, microbatch_size=size, last_microbatch_size=None), costs) for size in sizes}
    for stage in plan.stages:
        for index, sharding in zip(stage.indices(), stage.sharding_per_operator(), strict=True):
            op = workload.operators[index]
            placed = resolve(sharding, op)
            measured_as = profiled_as(op, placed)
            if measured_as is None:
                continue
            block = BEFORE if index < layers[0][0] else LAYER if index < layers[-1][1] else AFTER
            replicas = 1 if plan.rotates else batch_degree(placed)
            for size in sorted(sizes):
                samples = -(-size // replicas)
                role = workload.profile_roles[index]
                key = (role, block, placed, samples)
                if key in seen:
                    continue
                seen.add(key)
                cost = costs.operator(index, placed, samples, gpu_type)
                row = replace(
                    modelled_row(problem, index, cost, samples, measured_as, source),
                    forward_s=_takes_s(cost.forward, problem),
                    backward_s=_takes_s(cost.backward, problem),
                )
                waited = waits[size].get((index, False), 0.0), waits[size].get((index, True), 0.0)
                yield Part(shape, block, measured_as[0], samples), row, waited


def _alike(a: ProfileRow, b: ProfileRow) -> bool:
    times = ((a.forward_s, b.forward_s), (a.backward_s, b.backward_s))
    return a.parameter_bytes == b.parameter_bytes and all(isclose(*pair, rel_tol=1e-6) for pair in times)


def _waits(plan: Plan, costs: CostTables) -> Mapping[tuple[int, bool], float]:
    """Return what operators wait for collectives in their own time, by operator and whether in a backward pass.

    Only where the host never runs ahead: else it is a part of the collective, measured operators or not.
    """
    found: dict[tuple[int, bool], float] = {}
    if costs.problem.runtime.host_runs_ahead:
        return found
    for view in stage_views(plan.canonical(costs.problem.workload), costs):
        forward = ProgramBuilder(view, Fidelity()).forward(gather=False)
        backward = ProgramBuilder(view, Fidelity()).backward(GRADIENTS, gather=False, sync=False)
        once = (*forward, *(item for item in backward if item.holds_backward))  # what is computed again came before
        for item in once:
            if item.held >= 0 and item.hands_over:
                key = item.held, item.holds_backward
                found[key] = found.get(key, 0.0) + handover_s(view, item, Fidelity())
    return found


def _takes_s(segment: Segment, problem: Problem) -> float:
    """Return what a phase of an operator takes: its kernels, or its host time where that is longer and not hidden.

    A host that runs ahead is simulated beside measured times as beside modelled ones, so factors of 1 change nothing.
    """
    return segment.device_s if problem.runtime.host_runs_ahead else max(segment.device_s, segment.host_s)
