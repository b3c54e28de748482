"""What the compiled estimate reads: a workload, what was worked out for it, and plans, as arrays with numbered columns.

The files that compile functions over these name this one to ``compiled_with``: numba itself looks only at a file's own
date.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from simulator.lowering.step import AdamLaunches

Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]

NEVER = np.iinfo(np.int64).max
MAX_FAMILIES = 8
"""Ways in which parameters of one strategy are synchronised."""
MAX_PENDING = 64
"""Gathers of one unit, and reductions of one stage, that are added up at once."""

# Schedules, as ``PlanArrays.schedule`` has them.
ONE_F_ONE_B, GPIPE, INTERLEAVED, ZB_H1 = range(4)

# Columns of ``TimeTables.sums``: seconds of either pass, what launching them takes a host that runs ahead, seconds of
# the weight gradients, of gathering whole units once (those of the root apart), how many operators the strategy
# does not suit, ``StepWork``, how many buckets gradients fill (``stage_units.filled_buckets``), how many parameters
# are gathered by calls of their own, what a backward pass takes longer where weight gradients come later and no
# reduction travels beside them, what recomputing takes device and host longer than the forward pass, what adding
# gradients to earlier ones takes where first ones are handed over (``ADDED``: device and host, of whole gradients and
# of those that ZeRO scatters), elements of each family.
FORWARD_S, BACKWARD_S, FORWARD_HOST_S, BACKWARD_HOST_S, WEIGHT_S, GATHER_S, ROOT_S, UNSUITED = range(8)
PASSED_BYTES, TOUCHED_BYTES, TENSORS, STEPPED, REBUILT, BUCKETS, LARGE, PARTED_S = range(8, 16)
AGAIN_S, AGAIN_HOST_S, ADDED_S, ADDED_HOST_S, ADDED_SCATTERED_S, ADDED_SCATTERED_HOST_S, ELEMENTS = range(16, 23)
STEP_COLUMNS = 5
TIME_COLUMNS = ELEMENTS + MAX_FAMILIES

# Columns of ``TimeTables.families``: key and channels of the reduction (scatter first, then the rest), key and
# channel of the gather after the step, and of the gather before use; -1 for none; how often gradients are copied before
# they are reduced; whether ZeRO-3 shards it (1); key of its mesh and of what ZeRO does with it there.
REDUCTION, SCATTER, SCATTER_DEGREE, REST, REFRESH, REFRESH_CHANNEL, GATHER, GATHER_CHANNEL, COPIES, SHARDED = range(10)
LEVEL, FAMILY = range(10, 12)
REDUCED_KEYS, REFRESHED_KEYS, GATHERED_KEYS = range(3)
"""Of a stage: gradients that are reduced, parameters that are gathered after the step, and before use."""

# Columns of lines of prices: seconds alone at no bytes, seconds per byte alone, what part of that is latency, and by
# which share groups beside it stretch the rest.
START_S, S_PER_BYTE, LATENCY_S, STRETCH = range(4)
LINE = 4

# Columns of ``TimeTables.step_rates``: least seconds of a kernel, seconds of going over no gradients and per byte,
# seconds of the optimizer per byte, and of a launch; factors of overlap; seconds of copying nothing and per byte, and
# of one part of a rank that parameters are put together of.
FLOOR_S, PASS_START_S, PASS_S_PER_BYTE, UPDATE_S_PER_BYTE, LAUNCH_S = range(5)
COMPUTATION_SLOWDOWN, COMMUNICATION_SLOWDOWN, COPY_START_S, COPY_S_PER_BYTE, REBUILT_S, RATES = range(5, 11)

# Places in ``TimeTables.rows``, and what ``TimeTables.has_private`` adds up.
COPIES_PART, PARTED, OF_INPUTS = 2, 3, 4
PRIVATE, COPIED = 1, 2

# Columns of ``TimeTables.channel_hosts_s``.
CALL_S, LISTING_S, HOST_COLUMNS = range(3)

# What comes once per iteration: up to sums of tied weights, up to the norm, and behind it, as ``step_time.phases_s``
# has them.
REDUCED, PASSED, UPDATED = range(3)

# Of launching all that: how long before its last backward pass ends a host has launched it that never waits, what
# launching reductions of all sums takes it, what comes behind the last launch, and what a stage waits for behind its
# backward passes.
AHEAD, LAUNCHING, LAST, BEHIND, LAUNCHED = range(5)

# Kinds of what can be missing, and states of a plan.
TABLE, ROW, BOUNDARY, TIE, NORM = 1, 2, 3, 4, 5
DONE, INCOMPLETE, BAD_RUNS, BAD_SEGMENTS, BAD_STRATEGY, TOO_MANY_GATHERS, BAD_ROUNDS, MIXED_GATHERS = (
    0, 1, -1, -2, -3, -4, -5, -6,
)  # fmt: skip
PENDING = -2


class Structure(NamedTuple):
    """Who feeds and reads what in one workload. N operators, T tensors that somebody reads, O tied parameters.

    Attributes:
        neighbour_offsets, neighbours: Operators whose strategies decide, with its own, which collectives stand
            around an operator: producers of its inputs and their earlier readers, ascending.
        classes: int64[N]. Equal for operators with equal surroundings.
        input_offsets, input_producers: Producer of each input; NEVER for inputs of the graph.
        input_tensors: Tensor of each input; -1 for inputs of the graph.
        touched_offsets, touched: Per cut, operators behind it with a neighbour before it, ascending.
        crossing_offsets, crossing: Per cut, tensors made before it and read behind it.
        producers, sizes: int64[T]. Producer, and a number that tensors of equal size and length share.
        reader_offsets, readers: Readers of each tensor.
        first_saver: int64[N]. First operator that saves an output of the operator; NEVER for none.
        unit_of, unit_first, unit_stop: What ZeRO shards as one (``CostTables.units``).
        part_of, part_first, part_stop: What of that is whole at once (``CostTables.unit_parts``).
        gathers_of: int64[units]. How often ZeRO-3 gathers a unit for a microbatch.
        tied: int64[O]. Operators of tied parameters, ascending; one with two stands there twice.
        ties: int64[O]. Equal for parameters that are tied to one another.
    """

    neighbour_offsets: Ints
    neighbours: Ints
    classes: Ints
    input_offsets: Ints
    input_producers: Ints
    input_tensors: Ints
    touched_offsets: Ints
    touched: Ints
    crossing_offsets: Ints
    crossing: Ints
    producers: Ints
    sizes: Ints
    reader_offsets: Ints
    readers: Ints
    first_saver: Ints
    unit_of: Ints
    unit_first: Ints
    unit_stop: Ints
    part_of: Ints
    part_first: Ints
    part_stop: Ints
    gathers_of: Ints
    tied: Ints
    ties: Ints


class TimeTables(NamedTuple):
    """Everything worked out so far. The first axis of most is the number of a table.

    Attributes:
        sums: float64[tables, N + 1, TIME_COLUMNS]. Prefix sums.
        entering_s: float64[tables, inputs, 2]. What a segment which the input enters does not repeat: seconds, and
            what launching it takes.
        settling_s: float64[tables, T, 2]. Reducing a tensor that leaves the stage and nothing there reads, likewise.
        has_private: int64[tables, N]. PRIVATE where the operator saves something of its own, plus COPIED where it saves
            a part that it copies of what a neighbour of the same strategy made.
        made, read, passed: int64[tables, T], [tables, readings], [tables, N]. Numbers of layouts: of tensors
            where they are made, where they are read, and in stages that begin with the operator and pass them on.
        in_shards: int64[tables, T]. Whether a tensor is made in shards of the sequence, and so crosses in such.
        families: int64[tables, MAX_FAMILIES, FAMILY].
        tied: int64[tables, O, 4]. Family, elements, layout and shards (`tied_shards`) of tied parameters.
        tied_work: float64[tables, O, STEP_COLUMNS]. Their ``StepWork``.
        aliases: int64[tables]. Equal where collectives around operators are: strategies but for ZeRO.
        line_offsets, lines, point_offsets, points: Prices of each channel (``price_s``).
        goes_on: Per channel, whether the next one belongs to it; the slowest rules.
        channel_hosts_s: float64[channels, HOST_COLUMNS]. What a call takes the host beside its launch, and listing a
            tensor of each rank for it.
        rows: float64[., OF_INPUTS + inputs, 2]. Operators between unlike neighbours: forward, backward, whether it
            saves a part that it copies (first of a pair), what its backward pass takes longer in two halves, by input
            what a segment does not repeat; seconds, and what launching them takes.
        beyond_host_s: float64[tables, N, 4]. As ``stage_prices`` has it; [tables, 0, 4] if no host waits for gathers.
        boundaries: float64[., 4]. Transfers forward and backward, and making whole what arrived on either side.
        norms_s: Per set of placements, of the collective over them that the gradient norm needs.
        step_rates: float64[device types, RATES].
        keys, values: Hash table of 64-bit keys to numbers of tables, rows, boundaries and norms.
        placement_shape, placement_form, placement_node: Of each placement: equal for equal prices inside it;
            equal for equal places in nodes; number of the node it begins in.
        placement_types: Bits of its device types.
    """

    sums: Floats
    entering_s: Floats
    settling_s: Floats
    has_private: Ints
    made: Ints
    read: Ints
    passed: Ints
    in_shards: Ints
    families: Ints
    tied: Ints
    tied_work: Floats
    aliases: Ints
    line_offsets: Ints
    lines: Floats
    point_offsets: Ints
    points: Floats
    goes_on: Ints
    channel_hosts_s: Floats
    rows: Floats
    beyond_host_s: Floats
    boundaries: Floats
    norms_s: Floats
    step_rates: Floats
    keys: Keys
    values: Ints
    placement_shape: Ints
    placement_form: Ints
    placement_node: Ints
    placement_types: Ints


class PassRules(NamedTuple):
    """What holds for the passes of any plan.

    Attributes:
        stops_early: The tail of a segment that nothing saved needs is not computed again.
        ties_by_use: A whole weight that several operators of a stage use is reduced for each.
        regathers: Units that are computed again whole are gathered once more.
        blocking: By schedule. A stage goes on only when what it sent has arrived.
        parameter_bytes: Per element, as refreshed.
        passes_s: By schedule, what the passes of a microbatch through a stage add that nothing hides.
        pass_host_s: What a pass takes a host that runs ahead.
        waits_to_receive: By schedule. Such a host waits for what a pass receives.
    """

    stops_early: bool
    ties_by_use: bool
    regathers: bool
    blocking: Flags
    parameter_bytes: float
    passes_s: Floats
    pass_host_s: float
    waits_to_receive: Flags


class BesideRules(NamedTuple):
    """What holds for what any plan sends beside its passes, as ``overlap_time`` has it.

    Attributes:
        prefetches: A unit's parameters are gathered while the one before computes.
        waits_for_gathers: So does a host that runs ahead.
        waits_for_whole: The next pass waits for reductions of whole parameters' gradients.
        lists: Parameters are gathered, and sharded gradients reduced, by calls that are given a tensor of each rank.
        by_unit: Gradients of whole parameters are reduced by units.
        in_turn: Gathers and reductions have one communicator.
        copies_gathered: What was gathered is copied into parameters.
        gathered_bytes, gradient_bytes: Per element, as gathered and as reduced.
        tied_bytes: Of gradients of weights that stages share.
        whole_copied_bytes, sharded_copied_bytes: Read and written for each gradient that is copied once.
    """

    prefetches: bool
    waits_for_gathers: bool
    waits_for_whole: bool
    lists: bool
    by_unit: bool
    in_turn: bool
    copies_gathered: bool
    gathered_bytes: float
    gradient_bytes: float
    tied_bytes: float
    whole_copied_bytes: float
    sharded_copied_bytes: float


class StepRules(NamedTuple):
    """What holds for the optimizer's step of any plan.

    Attributes:
        has_norm: All ranks agree on the norm of the gradients before they step.
        waits: The host waits for it.
        runs_ahead: The host launches what comes next while the device works.
        goes_on: Nor does it wait for other stages.
        launches: How the optimizer's kernels are launched.
    """

    has_norm: bool
    waits: bool
    runs_ahead: bool
    goes_on: bool
    launches: AdamLaunches


class PlanColumns(NamedTuple):
    """Plans as arrays; see ``plans.PlanArrays``."""

    stage_offsets: Ints
    placements: Ints
    warmups: Ints
    run_offsets: Ints
    run_stops: Ints
    strategies: Ints
    segment_offsets: Ints
    segment_firsts: Ints
    segment_stops: Ints
    microbatch_size: Ints
    num_microbatches: Ints
    schedule: Ints
    reduces_every: Ints
    reshards: Ints
    overlaps: Ints
