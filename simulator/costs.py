"""Cost tables: what each distinct operator costs under each sharding, computed once per problem.

Equal operators share a row, so 1,024 equal layers are a dozen rows. Lowering and searchers read the same
rows; there is no second path to a duration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache, partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from hardware_models.crowding import CrowdedGroup, unlike_groups
from hardware_models.gpus import DtypeError
from hardware_models.runtime_files import runtimes_in
from simulator.clocks import clock_slowdown_of
from simulator.fidelity import Fidelity
from simulator.kept import MAX_PLANS, MAX_STAGES, Kept
from simulator.lowering.forms import operator_forms
from simulator.lowering.mesh import (
    MeshCollective,
    MeshSizes,
    batch_degree,
    groups,
    mesh_sizes,
)
from simulator.operator_cost import OperatorCost
from simulator.operator_table import OperatorTable, operator_table
from simulator.plan import Sharding
from simulator.problem import Problem
from simulator.profiled_costs import with_profile
from simulator.segments import Segment
from simulator.uniform import repeated_layers
from workloads.kernels import Kernel, MemoryBound
from workloads.kinds.base import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    DTYPE_BYTES,
    FORWARD,
    Kind,
    Local,
    Shape,
    Split,
)
from workloads.local import (
    cast_weights,
    dtype_bytes,
    host_calls,
    input_bytes,
    lasting_buffer_bytes,
    localize,
    matmul_flop,
    memory_steps,
    output_bytes,
    saved_tensors,
    workspace_tensors,
)

MOST_NAMED = 4
"""Runtimes that a refusal of a dtype names."""
FINAL_NORM = "final_norm"
"""How the role of a norm ends that comes once, behind repeated layers."""
_PHASES = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


class CostTables:
    """Memoised costs of one problem. Cheap to make; rows are computed when first asked for.

    Args:
        problem: The problem.
        power_limit: Whether it slows products (`hardware_models.power`).

    Attributes:
        problem: The problem.
        stages: Stages lately lowered, with what was worked out for them.
        replays: What the allocator did with lists of events lately replayed.
        bound_plans: Programs of plans lately lowered, bound to devices.
        forms: What stages of one form have in common, of stages lately lowered.
    """

    def __init__(self, problem: Problem, *, power_limit: bool = True) -> None:
        self.problem = problem
        self._power_limit = power_limit
        self._slowdowns: dict[str, float] = {}
        self._operators: dict[tuple[int, Sharding, int, str], OperatorCost] = {}
        self._kernels: dict[tuple[str, Kernel], float] = {}
        self._tables: dict[tuple[Sharding, int, str], OperatorTable] = {}
        self._splits: dict[tuple[int, Sharding], tuple[Split, ...]] = {}
        self.stages = Kept(MAX_STAGES)
        self.replays = Kept(MAX_STAGES)
        self.bound_plans = Kept(MAX_PLANS)
        self.forms = Kept(MAX_STAGES)
        self._groups = Kept(MAX_STAGES)

    @cached_property
    def units(self) -> tuple[int, ...]:
        """What ZeRO shards as one, by operator, ascending: a layer; a final norm by itself (``wraps_final_norms``)."""
        operators, wraps = self.problem.workload.operators, self.problem.runtime.wraps_final_norms
        found, unit, alone = list[int](), -1, False
        for index, op in enumerate(operators):
            begins = index == 0 or op.layer != operators[index - 1].layer
            unit += begins or alone
            found.append(unit)
            alone = wraps and begins and op.role.endswith(FINAL_NORM)
        return tuple(found)

    @cached_property
    def root_units(self) -> frozenset[int]:
        """Units that do not repeat, where the runtime keeps what ZeRO-3 gathers of them until their backward pass."""
        operators = self.problem.workload.operators
        kept = {unit for unit, op in zip(self.units, operators, strict=True) if op.layer not in self._repeated}
        return frozenset(kept) if self.problem.runtime.keeps_root_gathered else frozenset()

    @cached_property
    def _repeated(self) -> frozenset[int]:
        workload = self.problem.workload
        return frozenset(workload.operators[start].layer for start, _ in repeated_layers(workload))

    @cached_property
    def leading_operators(self) -> frozenset[int]:
        """Of each unit, the first operator with parameters."""
        workload = self.problem.workload
        found: dict[int, int] = {}
        for index, unit in enumerate(self.units):
            if workload.parameters(index):
                found.setdefault(unit, index)
        return frozenset(found.values())

    @cached_property
    def unit_parts(self) -> tuple[int, ...]:
        """What ZeRO-2 and 3 hold whole at once, by operator: its unit (``units``).

        Where the runtime gathers and scatters parameters one by one (``parameter_calls_above``), one of more than a
        bucket of gradients is a run of several: those of its operators that fit a bucket together, or one that does
        not; they are numbered in the order of operators. Sizes are those before tensor parallelism, which leaves them
        smaller than a bucket.
        """
        workload, runtime = self.problem.workload, self.problem.runtime
        if runtime.parameter_calls_above is None or runtime.gradient_bucket_bytes is None:
            return self.units
        bucket = runtime.gradient_bucket_bytes / runtime.travelling_gradient_bytes
        units, unit, elements, outer = [], -1, 0.0, -1
        for index, own_outer in enumerate(self.units):
            own = sum(float(prod(parameter.shape)) for parameter in workload.parameters(index))
            if own_outer != outer or (own and elements and elements + own > bucket):
                unit, elements, outer = unit + 1, 0.0, own_outer
            elements += own
            units.append(unit)
        return tuple(units)

    @cached_property
    def operator_forms(self) -> NDArray[np.int64]:
        """Which operators are alike, and stand alike, but for names; see ``lowering.forms``."""
        return operator_forms(self.problem.workload)

    def splits(self, index: int, sharding: Sharding) -> tuple[Split, ...]:
        """Return one Split per axis of a canonical sharding for operator ``index``.

        Raises:
            ValueError: If the operator's kind has no such split.
        """
        key = (self.problem.workload.signatures[index], sharding)
        if key not in self._splits:
            op = self.problem.workload.operators[index]
            table = op.definition.splits(op.attributes)
            for axis in sharding:
                if axis.split not in table:
                    raise ValueError(
                        f"operator {index} ({op.name}, kind {op.kind}) cannot be split by {axis.split!r}; "
                        f"its splits are {', '.join(sorted(table))}"
                    )
            own = tuple(table[axis.split] for axis in sharding)
            self._splits[key] = own or (table["replicate"],)
        return self._splits[key]

    def operator(self, index: int, sharding: Sharding, samples: int, gpu_type: str) -> OperatorCost:
        """Return the cost of operator ``index``.

        Args:
            index: Operator.
            sharding: Canonical sharding (``simulator.plan.resolve``).
            samples: Samples that one rank works on.
            gpu_type: Device type.
        """
        signature = self.problem.workload.signatures[index]
        key = (signature, tuple(sharding), samples, gpu_type)
        if key not in self._operators:
            self._operators[key] = self._compute(index, sharding, samples, gpu_type)
        return self._operators[key]

    def _compute(self, index: int, sharding: Sharding, samples: int, gpu_type: str) -> OperatorCost:
        modelled_at = partial(self._modelled, index, gpu_type)
        return with_profile(modelled_at, self.problem, index, sharding, samples, gpu_type)

    def _modelled(self, index: int, gpu_type: str, sharding: Sharding, samples: int) -> OperatorCost:
        workload, runtime = self.problem.workload, self.problem.runtime
        op = workload.operators[index]
        kind = op.definition
        inputs = workload.input_shapes(index, samples * batch_degree(sharding))
        local = localize(
            kind,
            op.attributes,
            inputs,
            [(axis.split, axis.size) for axis in sharding],
            runtime.implementation,
            operator=op.name,
        )
        segments = {phase: self._phase(kind, phase, local, gpu_type) for phase in _PHASES}
        saved = tuple((item.ref, float(item.size_bytes)) for item in saved_tensors(kind, local))
        additions = self._additions(kind, local) if runtime.hands_over_gradients else []
        return OperatorCost(
            forward=segments[FORWARD],
            recomputed=segments[FORWARD],
            backward_input=segments[BACKWARD_INPUT],
            backward_weight_alone=segments[BACKWARD_WEIGHT],
            later_additions=self.launched(additions, gpu_type),
            input_bytes=tuple(float(size) for size in input_bytes(kind, local)),
            output_bytes=tuple(float(size) for size in output_bytes(kind, local)),
            saved=saved,
            parameters=tuple(
                (parameter, prod(shape))
                for parameter, shape in zip(workload.parameters(index), local.parameters, strict=True)
            ),
            gradients_apart=tuple(map(prod, self._apart(kind, local))),
            workspace_forward=workspace_tensors(kind, FORWARD, local),
            workspace_backward=workspace_tensors(kind, BACKWARD_INPUT, local),
            workspace_weight=workspace_tensors(kind, BACKWARD_WEIGHT, local),
            steps_forward=memory_steps(kind, FORWARD, local),
            steps_backward=memory_steps(kind, BACKWARD_INPUT, local),
            lasting_buffer_bytes=float(lasting_buffer_bytes(kind, local)),
            matmul_flop=matmul_flop(kind.kernels(FORWARD, local)),
            internal=tuple(self._internal(kind, local, sharding)),
            includes_collectives=False,
            has_waited=False,
        )

    def _phase(self, kind: Kind, phase: str, local: Local, gpu_type: str) -> Segment:
        stated = kind.stated_time_s(phase, local)
        if stated is None:
            work = kind.kernels(phase, local)
            wide, cast = (
                float(cast_weights(kind, local) * size) for size in (DTYPE_BYTES["fp32"], local.element_bytes)
            )
            if phase == FORWARD and cast:
                work = [MemoryBound(wide, cast), *work]
            if phase == BACKWARD_WEIGHT:
                added = [] if self.problem.runtime.hands_over_gradients else self._additions(kind, local)
                work = [*work, *([MemoryBound(cast, wide)] if cast else []), *added]
            forward_s, backward_s = self.problem.runtime.host_seconds_per_operator
            dispatch_s = (forward_s if phase == FORWARD else backward_s) * self._host_factor(gpu_type)
            if self.problem.hardware.gpu(gpu_type).is_its_own_host:
                dispatch_s = 0.0
            return self.launched(work, gpu_type, dispatch_s, host_calls(kind, phase, local) if dispatch_s else 0)
        return Segment(stated, 0.0, stated, 0.0, (stated, 0.0, 0.0))

    def _apart(self, kind: Kind, local: Local) -> list[Shape]:
        """Return local shapes of parameters whose gradients are made before they are added to those before."""
        fused = self.problem.runtime.adds_gradients_in_products and any(
            not isinstance(kernel, MemoryBound) for kernel in kind.kernels(BACKWARD_WEIGHT, local)
        )
        return [shape for shape in local.parameters if not (fused and len(shape) > 1)]

    def _additions(self, kind: Kind, local: Local) -> list[Kernel]:
        """Return the kernels that add the gradients of a microbatch to those before, one or two per parameter."""
        runtime = self.problem.runtime
        if not runtime.adds_gradients:
            return []
        kept = runtime.gradient_accumulation_bytes
        new = DTYPE_BYTES["fp32"] if local.implementation.autocast else local.element_bytes
        found: list[Kernel] = []
        for shape in self._apart(kind, local):
            count, each = float(prod(shape)), new
            if runtime.casts_gradients:
                found.append(MemoryBound(count * new, count * kept))
                each = kept
            found.append(MemoryBound(count * (kept + each), count * kept))
        return found

    def launched(
        self, kernels: Sequence[Kernel], gpu_type: str, dispatch_s: float = 0.0, num_calls: int = 0
    ) -> Segment:
        """Return kernels as they are launched, the first of each call after the framework's dispatch."""
        hardware, runtime = self.problem.hardware, self.problem.runtime
        launch_s = self.launch_s(gpu_type)
        dtype = runtime.implementation.dtype
        device_s = host_s = bound_s = lead_s = 0.0
        for position, kernel in enumerate(kernels):
            if position < num_calls:
                host_s += dispatch_s
                bound_s = max(bound_s, host_s)
            key = (gpu_type, kernel)
            if key not in self._kernels:
                try:
                    seconds = hardware.kernel_time_s(gpu_type, kernel, dtype)
                except DtypeError as error:
                    fitting = ", ".join(runtimes_in(error.known, like=runtime)[:MOST_NAMED]) or "one's own"
                    words = f"{error} of runtime {runtime.name}; runtimes that fit: {fitting}"
                    raise DtypeError(words, error.known) from None
                is_clocked = not isinstance(kernel, MemoryBound)
                self._kernels[key] = seconds * self.clock_slowdown(gpu_type) if is_clocked else seconds
            seconds = self._kernels[key]
            bound_s = max(bound_s + seconds, host_s + (launch_s + seconds))
            host_s += launch_s
            lead_s = lead_s if device_s > 0 else host_s
            device_s += seconds
        bare_s = max(0, num_calls - len(kernels)) * dispatch_s
        lead_s = lead_s if device_s > 0 else host_s + bare_s
        host_s += bare_s
        return Segment(device_s, host_s, max(bound_s, host_s), lead_s, (0.0, 0.0, device_s))

    def clock_slowdown(self, gpu_type: str) -> float:
        """Return what the power limit of a device type costs products; of the share of samples that is a device's."""
        if gpu_type not in self._slowdowns:
            self._slowdowns[gpu_type] = clock_slowdown_of(self.problem, gpu_type) if self._power_limit else 1.0
        return self._slowdowns[gpu_type]

    def under(self, fidelity: Fidelity) -> CostTables:
        """Return these tables, or those without a power limit where it counts and ``fidelity`` leaves it out."""
        if fidelity.power_limit or all(self.clock_slowdown(each) == 1 for each in set(self.problem.gpu_types)):
            return self
        return self._at_full_clock

    @cached_property
    def _at_full_clock(self) -> CostTables:
        return CostTables(self.problem, power_limit=False)

    def launch_s(self, gpu_type: str) -> float:
        """Return the host's seconds per kernel launch: the runtime's, else the device type's."""
        own = self.problem.runtime.host_seconds_per_kernel
        launch_s = own if own is not None else self.problem.hardware.launch_s(gpu_type)
        return launch_s * self._host_factor(gpu_type)

    def pass_s(self, gpu_type: str) -> float:
        """Return the host's seconds before a pass of a microbatch through a stage."""
        return self.problem.runtime.host_seconds_per_pass * self._host_factor(gpu_type)

    def _host_factor(self, gpu_type: str) -> float:
        return self.problem.hardware.host_factor(gpu_type)

    def collective_host_s(self, members: Sequence[int]) -> float:
        """Return the host's seconds for a collective over ``members`` beyond one launch."""
        once_s, per_rank_s = self.problem.runtime.host_seconds_per_collective
        if not once_s and not per_rank_s:
            return 0.0
        nodes = {device: self.problem.hardware.cluster.node_of(device) for device in members}
        ranks = Counter(nodes.values())
        return max(
            (once_s + per_rank_s * ranks[node]) * self._host_factor(self.problem.gpu_types[device])
            for device, node in nodes.items()
        )

    def listing_s(self, members: Sequence[int], num_entries: int) -> float:
        """Return the host's seconds for a collective that is given a tensor of each rank."""
        types = {self.problem.gpu_types[each] for each in members}
        return num_entries * max(self.entry_s(gpu_type) for gpu_type in types)

    def entry_s(self, gpu_type: str) -> float:
        """Return the host's seconds for one tensor of a list, and its copy."""
        return self.problem.runtime.host_seconds_per_list_entry * self._host_factor(gpu_type)

    def collective_delay_s(self, members: Sequence[int]) -> float:
        """Return the seconds by which launching a collective delays it: 0 where the host runs ahead."""
        if self.problem.runtime.host_runs_ahead:
            return 0.0
        types = {self.problem.gpu_types[device] for device in members}
        return max(self.launch_s(gpu_type) for gpu_type in types) + self.collective_host_s(members)

    def unlike_groups(
        self, devices: tuple[int, ...], sizes: MeshSizes, axes: tuple[int, ...]
    ) -> tuple[CrowdedGroup, ...]:
        """Return the groups of a mesh over devices, one of those that stand alike, with those beside it."""
        return self._groups.get(
            (devices, sizes, axes),
            lambda: unlike_groups(
                self.problem.hardware.cluster,
                (tuple(devices[local] for local in group) for group in groups(sizes, axes)),
            ),
        )

    def _internal(self, kind: Kind, local: Local, sharding: Sharding) -> Iterable[tuple[str, MeshCollective]]:
        for position, axis in enumerate(sharding):
            for phase in _PHASES:
                for item in kind.internal_collectives(phase, axis.split, local):
                    num_bytes = float(prod(item.shape)) * dtype_bytes(item.dtype, local.implementation)
                    yield phase, MeshCollective(item.collective, mesh_sizes(sharding), (position,), num_bytes)

    def table(self, sharding: Sharding, samples: int, gpu_type: str) -> OperatorTable:
        """Return all operators under one sharding (split words allowed) as arrays.

        Args:
            sharding: Applied to every operator, e.g. ``(Axis("batch", 2), Axis("tensor", 4))``.
            samples: Samples one rank works on per microbatch.
            gpu_type: Device type.
        """
        key = (tuple(sharding), samples, gpu_type)
        if key not in self._tables:
            self._tables[key] = operator_table(self, *key)
        return self._tables[key]


@lru_cache(maxsize=4)
def cost_tables(problem: Problem) -> CostTables:
    """Return the cost tables of a problem, shared by all that price, plan or simulate for it."""
    return CostTables(problem)
