"""Peak memory of many stages at once: what ``memory_program`` allocates and frees, without names.

A forward pass leaves ``kept`` bytes behind and has its own highest point above where it began; so has a
backward pass. A stage with K microbatches in flight peaks at the larger of ``(K - 1) kept + forward`` and
``K kept + backward``, on top of model states.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.batch import pipeline
from simulator.batch.pipeline import row_of
from simulator.batch.stages import ModelShape, StageRows
from simulator.closed_forms.operator_needs import never_given_back_bytes
from simulator.compiled_cache import compiled, compiled_with
from simulator.costs import CostTables
from simulator.lowering.mesh import parameter_layout
from simulator.memory.model_states import optimizer_parts_bytes
from simulator.operator_cost import OperatorCost
from simulator.plan import Axis, resolve
from simulator.saved import ends_at_parting, is_private, saved_tensors

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

NEVER = np.iinfo(np.int64).max
BLOCK_BYTES = 512  # The caching allocator's rounding.

# Columns of ``op_bytes``.
FORWARD_WORKSPACE, BACKWARD_WORKSPACE, INSIDE, UNREAD, STATES, TIED_STATES, STEP, TIED_STEP = range(8)
# (GRADIENTS: those that the first backward pass makes; GIVEN: of the graph's inputs, what is saved.)
HAS_PARAMETERS, GRADIENTS, TIED_GRADIENTS, BUFFER, GIVEN = range(8, 13)
OP_BYTES = 13

# Columns of the result.
KEPT, FORWARD_PEAK, BACKWARD_PEAK, MODEL_STATES, STEP_WORKSPACE, FIRST_BACKWARD_PEAK, GRADIENTS_ANEW = range(7)
MEMORY = 7


@dataclass(frozen=True)
class TensorUse:
    """Who makes, reads and saves what. N operators, T tensors, Q readings.

    Attributes:
        output_offsets, outputs: Tensors that each operator makes (and somebody reads).
        input_offsets, inputs, readings: Tensors that each operator reads, and the number of the reading.
        saved_offsets, saved: Tensors that each operator saves.
        saver_offsets, savers, saver_readings: Operators that save each tensor, ascending, and the numbers of their
            readings; -1 for its maker, and where the runtime keeps what is gathered as it was made, too.
        user_offsets, users, user_readings: Operators whose backward pass needs what forward kept of each tensor
            under recomputation, ascending: savers outside segments, with the numbers of their readings, and readers
            in other segments than its maker, with -1.
    """

    output_offsets: Ints
    outputs: Ints
    input_offsets: Ints
    inputs: Ints
    readings: Ints
    saved_offsets: Ints
    saved: Ints
    saver_offsets: Ints
    savers: Ints
    saver_readings: Ints
    user_offsets: Ints
    users: Ints
    user_readings: Ints


def tensor_use(costs: CostTables, shape: ModelShape) -> TensorUse:
    """Return who uses which tensor."""
    workload = costs.problem.workload
    gpu_type = costs.problem.gpu_types[0]
    number = {name: index for index, name in enumerate(shape.tensor_names)}
    outputs: list[list[int]] = []
    inputs: list[list[int]] = []
    readings: list[list[int]] = []
    saved: list[list[int]] = []
    savers: list[list[int]] = [[] for _ in number]
    for index, op in enumerate(workload.operators):
        outputs.append([number[name] for name in op.outputs if name in number])
        inputs.append([number[name] for name in dict.fromkeys(op.inputs) if name in number])
        readings.append(
            [
                int(shape.reader_offsets[tensor]) + workload.consumers[shape.tensor_names[tensor]].index(index)
                for tensor in inputs[-1]
            ]
        )
        names = dict(saved_tensors(workload, index, costs.operator(index, (), 1, gpu_type)))
        saved.append([number[name] for name in names if name in number])
        for tensor in saved[-1]:
            savers[tensor].append(index)
    users: list[list[int]] = []
    saver_readings: list[list[int]] = []
    user_readings: list[list[int]] = []
    for tensor, producer in enumerate(shape.producers.tolist()):
        start = int(shape.reader_offsets[tensor])
        readers = shape.readers[start : shape.reader_offsets[tensor + 1]].tolist()
        keeps_made = costs.problem.runtime.keeps_gathered_shards
        saver_readings.append(
            [-1 if keeps_made or user == producer else start + readers.index(user) for user in savers[tensor]]
        )
        reading_of = dict(zip(savers[tensor], saver_readings[-1], strict=True))
        own = shape.segment_first[producer]
        outside = {user for user in savers[tensor] if shape.segment_stop[user] < 0}
        inside = {user for user in readers if shape.segment_stop[user] >= 0 and shape.segment_first[user] != own}
        users.append(sorted(outside | inside))
        user_readings.append([reading_of[user] if user in outside else -1 for user in users[-1]])
    return TensorUse(
        *_csr(outputs),
        *_csr(inputs),
        _csr(readings)[1],
        *_csr(saved),
        *_csr(savers),
        _csr(saver_readings)[1],
        *_csr(users),
        _csr(user_readings)[1],
    )


def _csr(rows: list[list[int]]) -> tuple[Ints, Ints]:
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return offsets, np.array([item for row in rows for item in row], dtype=np.int64)


@dataclass(frozen=True)
class StageBytes:
    """Sizes under one tensor degree and number of samples, in whole blocks.

    Attributes:
        op_bytes: float64[N, OP_BYTES].
        made_bytes: float64[T]. Each tensor where it is made.
        read_bytes: float64[Q]. Each tensor where it is read.
        gathered_bytes: float64[rows]. What ``StageRows.gathered`` lists.
        previous_tied: int64[N]. The last operator before with the same tied parameter in the same layout; -1
            for none.
    """

    op_bytes: Floats
    made_bytes: Floats
    read_bytes: Floats
    gathered_bytes: Floats
    previous_tied: Ints


def stage_bytes(
    costs: CostTables, shape: ModelShape, rows: StageRows, tp: int, samples: int, gpu_type: str, *, replicated: bool
) -> StageBytes:
    """Return the sizes of everything that a stage allocates, which has replicas or not."""
    workload, runtime = costs.problem.workload, costs.problem.runtime
    # (Without ZeRO no gradients are scattered: a runtime that frees those frees none.)
    own_bytes = runtime.gradient_bytes - runtime.bucket_bytes
    anew_bytes = own_bytes if runtime.frees_gradients == "all" else 0.0
    kept_bytes = own_bytes - anew_bytes, runtime.bucket_bytes if replicated else 0.0
    per_element = (runtime.parameter_bytes, *kept_bytes, *optimizer_parts_bytes(runtime))
    per_gradient = runtime.implementation.activation_bytes
    op_bytes = np.zeros((len(workload), OP_BYTES))
    found: list[OperatorCost] = []
    previous_tied = np.full(len(workload), -1, dtype=np.int64)
    last_tied: dict[object, int] = {}
    for index, op in enumerate(workload.operators):
        sharding = resolve((Axis("tensor", tp),), op)
        cost = costs.operator(index, sharding, samples, gpu_type)
        found.append(cost)
        inside = [size for name, size in saved_tensors(workload, index, cost) if is_private(name)]
        unread = [
            size for name, size in zip(op.outputs, cost.output_bytes, strict=True) if name not in workload.consumers
        ]
        row = op_bytes[index]
        row[FORWARD_WORKSPACE] = sum(map(_blocks, cost.workspace_forward))
        inputs = zip(op.inputs, cost.input_bytes, strict=True)
        input_gradients = sum(_blocks(size) for name, size in inputs if name not in workload.input_names)
        before = cost.beside_input_gradients(input_gradients, _blocks)
        at_product = sum(map(_blocks, cost.product_temporaries(per_gradient)))
        saved = dict(saved_tensors(workload, index, cost)).items()
        parted = sum(_blocks(size) for name, size in saved if ends_at_parting(workload, index, name))
        row[BACKWARD_WORKSPACE] = max(before, at_product - parted)
        row[INSIDE] = sum(_blocks(size) for size in inside)
        row[GIVEN] = sum(_blocks(size) for name, size in saved if name in workload.input_names)
        row[UNREAD] = sum(_blocks(size) for size in unread)
        row[HAS_PARAMETERS] = bool(cost.parameters)
        row[BUFFER] = _blocks(never_given_back_bytes(cost, costs.problem))
        for place, (parameter, elements) in enumerate(cost.parameters):
            tied = parameter.tie is not None
            if tied:
                splits = costs.splits(index, sharding)
                layout = (parameter.tie, parameter_layout(sharding, splits, place))
                previous_tied[index] = last_tied.get(layout, -1)
                last_tied[layout] = index
            row[TIED_STATES if tied else STATES] += sum(_blocks(elements * size) for size in per_element)
            row[TIED_STEP if tied else STEP] += _blocks(elements * runtime.optimizer_workspace_bytes)
            row[TIED_GRADIENTS if tied else GRADIENTS] += _blocks(elements * anew_bytes)
    made, read = [], []
    for name in shape.tensor_names:
        producer = workload.producer[name]
        made.append(_blocks(found[producer].output_bytes[workload.operators[producer].outputs.index(name)]))
        for reader in workload.consumers[name]:
            read.append(_blocks(found[reader].input_bytes[workload.operators[reader].inputs.index(name)]))
    gathered = np.array([sum(_blocks(size) for size in sizes) for sizes in rows.gathered], dtype=np.float64)
    return StageBytes(op_bytes, np.array(made), np.array(read), gathered, previous_tied)


def _blocks(num_bytes: float) -> float:
    return float(-(-int(num_bytes) // BLOCK_BYTES) * BLOCK_BYTES)


@compiled
def _lower_bound(items: Ints, low: int, high: int, value: int) -> int:
    """Return the first place in ``[low, high)`` whose item is at least ``value``."""
    while low < high and items[low] < value:
        low += 1
    return low


@compiled
def _first_need(needs: Ints, need_readings: Ints, low: int, high: int, made: float, read: Floats) -> int:
    """Return the first place in ``[low, high)`` of an operator that needs a tensor as it was made, not as gathered."""
    while low < high and need_readings[low] >= 0 and read[need_readings[low]] > made:
        low += 1
    return low


@compiled_with(pipeline)
def measure_memory(
    firsts: Ints,
    stops: Ints,
    tables: Ints,
    recompute: Flags,
    stops_early: bool,
    holds_ends: bool,
    keeps_outputs: bool,
    op_bytes: Floats,
    made_bytes: Floats,
    read_bytes: Floats,
    gathered_bytes: Floats,
    previous_tied: Ints,
    producers: Ints,
    reader_offsets: Ints,
    readers: Ints,
    crossing_offsets: Ints,
    crossing: Ints,
    row_offsets: Ints,
    row_limits: Ints,
    layer_first: Ints,
    segment_first: Ints,
    segment_stop: Ints,
    output_offsets: Ints,
    outputs: Ints,
    input_offsets: Ints,
    inputs: Ints,
    readings: Ints,
    saved_offsets: Ints,
    saved: Ints,
    saver_offsets: Ints,
    savers: Ints,
    saver_readings: Ints,
    user_offsets: Ints,
    users: Ints,
    user_readings: Ints,
) -> Floats:
    """Return float64[S, MEMORY] in bytes; see ``StageBytes``, ``ModelShape`` and ``TensorUse``.

    Args:
        firsts, stops: int64[S]. Operators ``[first, stop)`` of each stage.
        tables: int64[S]. Row of ``op_bytes`` and of the four after it.
        recompute: bool[S]. Repeated layers are recomputed.
        stops_early: Not beyond the last operator that saves anything, or makes what is saved.
        holds_ends: What a segment makes for others, and its gradients, stay until its backward pass is through.
        keeps_outputs: What leaves a stage is held until the backward pass.
        op_bytes, made_bytes, read_bytes, gathered_bytes, previous_tied: [tables, ...].
        producers, reader_offsets, readers, crossing_offsets, crossing: Of the shape.
        row_offsets, row_limits, layer_first, segment_first, segment_stop: Of the shape.
        output_offsets, outputs, input_offsets, inputs, readings: Of the use.
        saved_offsets, saved, saver_offsets, savers, saver_readings, user_offsets, users, user_readings: Of the use.
    """
    result = np.zeros((len(firsts), MEMORY))
    for stage in range(len(firsts)):
        first, stop = firsts[stage], stops[stage]
        sizes, made, read = op_bytes[tables[stage]], made_bytes[tables[stage]], read_bytes[tables[stage]]
        again = recompute[stage]
        gathered, tied_before = gathered_bytes[tables[stage]], previous_tied[tables[stage]]
        need_offsets, needs = (user_offsets, users) if again else (saver_offsets, savers)
        need_readings = user_readings if again else saver_readings

        # Model states.
        states, step, buffer = 0.0, 0.0, 0.0
        for index in range(first, stop):
            buffer = max(buffer, sizes[index, BUFFER])
            states += sizes[index, STATES]
            step += sizes[index, STEP]
            if tied_before[index] < first:
                states += sizes[index, TIED_STATES]
                step += sizes[index, TIED_STEP]

        # Forward.
        live, peak = 0.0, 0.0
        for place in range(crossing_offsets[first], crossing_offsets[first + 1]):
            tensor = crossing[place]
            row, end = reader_offsets[tensor], reader_offsets[tensor + 1]
            reading = _lower_bound(readers, row, end, first)
            if readers[reading] < stop:
                live += read[reading]
        peak = live
        for index in range(first, stop):
            in_segment = again and segment_stop[index] >= 0
            whole = gathered[row_of(first, index, row_offsets, row_limits)]
            live += whole + sizes[index, FORWARD_WORKSPACE] + sizes[index, UNREAD] + sizes[index, GIVEN]
            for place in range(output_offsets[index], output_offsets[index + 1]):
                live += made[outputs[place]]
            if not in_segment:
                live += sizes[index, INSIDE]
            peak = max(peak, live)
            live -= sizes[index, FORWARD_WORKSPACE] + sizes[index, UNREAD]
            if in_segment:
                live -= whole
            for place in range(input_offsets[index], input_offsets[index + 1]):
                tensor = inputs[place]
                last = readers[reader_offsets[tensor + 1] - 1]
                end = need_offsets[tensor + 1]
                need = _first_need(needs, need_readings, need_offsets[tensor], end, made[tensor], read)
                is_kept = need < end and needs[need] < stop
                if producers[tensor] >= first and last == index and not is_kept:
                    live -= made[tensor]
        if not keeps_outputs:
            for place in range(crossing_offsets[stop], crossing_offsets[stop + 1]):
                tensor = crossing[place]
                end = need_offsets[tensor + 1]
                need = _first_need(needs, need_readings, need_offsets[tensor], end, made[tensor], read)
                is_kept = need < end and needs[need] < stop
                if producers[tensor] >= first and not is_kept:
                    live -= made[tensor]
        kept, forward_peak = live, peak

        # Backward, from where forward left off.
        at_end = 0.0  # What a segment holds until its backward pass is through.
        live, anew, begun = 0.0, 0.0, stop  # (The first such pass has made gradients of operators from ``begun`` on.)
        for place in range(crossing_offsets[stop], crossing_offsets[stop + 1]):
            if producers[crossing[place]] >= first:
                live += made[crossing[place]]
        peak = first_peak = live
        for index in range(stop - 1, first - 1, -1):
            in_segment = again and segment_stop[index] >= 0
            low, high = max(segment_first[index], first), min(segment_stop[index], stop)
            if in_segment and index + 1 == high:
                again_until = high
                while stops_early and again_until > low:
                    once = again_until - 1
                    is_saved = sizes[once, INSIDE] > 0
                    for place in range(output_offsets[once], output_offsets[once + 1]):
                        start, end = saver_offsets[outputs[place]], saver_offsets[outputs[place] + 1]
                        saver = _lower_bound(savers, start, end, low)
                        is_saved |= saver < end and savers[saver] < high
                    if is_saved:
                        break
                    again_until -= 1
                for once in range(low, again_until):
                    whole = gathered[row_of(first, once, row_offsets, row_limits)]
                    live += whole + sizes[once, FORWARD_WORKSPACE] + sizes[once, INSIDE] + sizes[once, UNREAD]
                    for place in range(output_offsets[once], output_offsets[once + 1]):
                        live += made[outputs[place]]
                    peak, first_peak = max(peak, live), max(first_peak, live + anew)
                    live -= whole + sizes[once, FORWARD_WORKSPACE] + sizes[once, UNREAD]
                    for place in range(input_offsets[once], input_offsets[once + 1]):
                        tensor = inputs[place]
                        following = readings[place] + 1
                        is_last = following == reader_offsets[tensor + 1] or readers[following] >= again_until
                        saver = _lower_bound(savers, saver_offsets[tensor], saver_offsets[tensor + 1], low)
                        is_saved = saver < saver_offsets[tensor + 1] and savers[saver] < high
                        is_held = holds_ends and readers[reader_offsets[tensor + 1] - 1] >= high
                        if producers[tensor] >= low and is_last and not is_saved:
                            at_end += made[tensor] if is_held else 0.0
                            live -= 0.0 if is_held else made[tensor]
                    for place in range(output_offsets[once], output_offsets[once + 1]):
                        tensor = outputs[place]
                        saver = saver_offsets[tensor]
                        is_saved = saver < saver_offsets[tensor + 1] and savers[saver] < high
                        is_held = holds_ends and readers[reader_offsets[tensor + 1] - 1] >= high
                        if readers[reader_offsets[tensor]] >= again_until and not is_saved:
                            at_end += made[tensor] if is_held else 0.0
                            live -= 0.0 if is_held else made[tensor]
            while sizes[index, HAS_PARAMETERS] > 0 and begun > index:
                start = max(layer_first[begun - 1], first)
                for maker in range(start, begun):
                    tied = sizes[maker, TIED_GRADIENTS] if tied_before[maker] < first else 0.0
                    anew += sizes[maker, GRADIENTS] + tied
                begun = start
            whole = gathered[row_of(first, index, row_offsets, row_limits)]
            live += sizes[index, BACKWARD_WORKSPACE]
            if in_segment:
                live += whole
            for place in range(input_offsets[index], input_offsets[index + 1]):
                tensor = inputs[place]
                following, end = readings[place] + 1, reader_offsets[tensor + 1]
                leaves = producers[tensor] >= first and readers[end - 1] >= stop
                if not leaves and (following == end or readers[following] >= stop):
                    live += read[readings[place]]
            peak, first_peak = max(peak, live), max(first_peak, live + anew)
            live -= whole + sizes[index, BACKWARD_WORKSPACE] + sizes[index, INSIDE] + sizes[index, GIVEN]
            for place in range(output_offsets[index], output_offsets[index + 1]):
                tensor = outputs[place]
                last = reader_offsets[tensor + 1] - 1
                gradient = made[tensor] if readers[last] >= stop else read[last]
                is_held = holds_ends and in_segment and readers[last] >= high
                at_end += gradient if is_held else 0.0
                live -= 0.0 if is_held else gradient
            # What forward kept goes with the first operator that needs it, or the segment that this is in, ...
            for place in range(input_offsets[index], input_offsets[index + 1]):
                tensor = inputs[place]
                enters = in_segment and producers[tensor] < low
                if producers[tensor] >= first:
                    end = need_offsets[tensor + 1]
                    need = _first_need(needs, need_readings, need_offsets[tensor], end, made[tensor], read)
                    if need < end and needs[need] == index:
                        at_end += made[tensor] if enters else 0.0
                        live -= 0.0 if enters else made[tensor]
                else:  # (Of what another stage made, any segment that reads it.)
                    reading = _lower_bound(readers, reader_offsets[tensor], reader_offsets[tensor + 1], first)
                    need = _lower_bound(needs, need_offsets[tensor], need_offsets[tensor + 1], first)
                    earliest = needs[need] if need < need_offsets[tensor + 1] else NEVER
                    reader = reading
                    while again and reader < reader_offsets[tensor + 1] and segment_stop[readers[reader]] < 0:
                        reader += 1
                    if again and reader < reader_offsets[tensor + 1]:
                        earliest = min(earliest, readers[reader])
                    if earliest == index:
                        at_end += read[reading] if enters else 0.0
                        live -= 0.0 if enters else read[reading]
            for place in range(output_offsets[index], output_offsets[index + 1]):
                tensor = outputs[place]
                end = need_offsets[tensor + 1]
                need = _first_need(needs, need_readings, need_offsets[tensor], end, made[tensor], read)
                if need < end and needs[need] == index:
                    live -= made[tensor]
            # ... and what recomputation made with the first of its segment that saved it.
            for place in range(saved_offsets[index], saved_offsets[index + 1]):
                tensor = saved[place]
                saver = _lower_bound(savers, saver_offsets[tensor], saver_offsets[tensor + 1], low)
                if in_segment and producers[tensor] >= low and savers[saver] == index:
                    is_held = holds_ends and readers[reader_offsets[tensor + 1] - 1] >= high
                    at_end += made[tensor] if is_held else 0.0
                    live -= 0.0 if is_held else made[tensor]
            if in_segment and index == low:
                live, at_end = live - at_end, 0.0
        result[stage, KEPT] = kept
        result[stage, FORWARD_PEAK] = forward_peak
        result[stage, BACKWARD_PEAK] = peak
        result[stage, MODEL_STATES] = states + buffer
        result[stage, STEP_WORKSPACE] = step
        result[stage, FIRST_BACKWARD_PEAK] = first_peak
        result[stage, GRADIENTS_ANEW] = anew
    return result
