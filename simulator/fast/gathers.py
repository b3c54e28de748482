"""Compiled: gathers of the layers of a stage before they are used, one of each layer, as runs of strategies come."""

from __future__ import annotations

from simulator.compiled_cache import pasted
from simulator.fast.arrays import (
    ELEMENTS,
    GATHER,
    GATHER_CHANNEL,
    GATHER_S,
    MAX_FAMILIES,
    MAX_PENDING,
    ROOT_S,
    Floats,
    Ints,
    PlanColumns,
    Structure,
    TimeTables,
)
from simulator.fast.prices import channels_s
from simulator.fast.ties import tied_elements


@pasted
def add_gathers(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    table: int,
    first: int,
    begin: int,
    start: int,
    ends: int,
    reshards: bool,
    gathered_bytes: float,
    keys: Ints,
    channels: Ints,
    elements: Floats,
    count: int,
    pending_layer: int,
    gather_s: Floats,
) -> tuple[int, int]:
    """Add what the layers of a run gather, and return ``count`` and ``pending_layer`` as they are then.

    Whole layers from sums; parts of layers, and layers with tied parameters, one by one.

    Args:
        shape, tables, plans, run_tables, gathered_bytes: See ``time.estimate_times``.
        table, start, ends: The run's, and its operators.
        first, begin: First operator of its stage, and first run.
        reshards: Layers are gathered for each pass.
        keys, channels, elements, count: Gathers of the layer that may not be through; more than MAX_PENDING of them
            are too many.
        pending_layer: Its number; -1 for none.
        gather_s: float64[2]. Where seconds are added, of the root unit and of other layers.
    """
    sums, families = tables.sums[table], tables.families[table]
    layer, last_layer = shape.layer_of[start], shape.layer_of[ends - 1]
    whole_first = layer + (shape.layer_first[layer] < start)
    whole_last = last_layer - (shape.layer_stop[last_layer] > ends)
    if whole_first <= whole_last:
        a, b = shape.layer_first[whole_first], shape.layer_stop[whole_last]
        gather_s[0] += sums[b, ROOT_S] - sums[a, ROOT_S]
        gather_s[1] += sums[b, GATHER_S] - sums[a, GATHER_S]
    place, num_tied = 0, len(shape.tied)
    while layer <= last_layer and count <= MAX_PENDING:
        if whole_first <= layer <= whole_last:
            # The next layer with a tied parameter, else the end of the whole ones.
            while place < num_tied and shape.layer_of[shape.tied[place]] < layer:
                place += 1
            layer = whole_last + 1
            if place < num_tied and shape.layer_of[shape.tied[place]] <= whole_last:
                layer = shape.layer_of[shape.tied[place]]
            if layer > last_layer:
                break
        if layer != pending_layer:
            gather_s[shape.gathers_of[pending_layer] - 1] += channels_s(
                tables, channels, elements, count, gathered_bytes
            )
            count, pending_layer = 0, layer
        a, b = max(start, shape.layer_first[layer]), min(ends, shape.layer_stop[layer])
        # Each layer gathers what is tied, but for those that stay gathered: the first of them.
        since = max(first, shape.layer_first[layer])
        if shape.gathers_of[layer] == 1 or not reshards:
            since = first
        for family in range(MAX_FAMILIES):
            own_key = families[family, GATHER]
            if own_key < 0:
                continue
            more = sums[b, ELEMENTS + family] - sums[a, ELEMENTS + family]
            more += tied_elements(shape, tables, plans, run_tables, table, family, since, begin, a, b, False)
            if more > 0:
                at = 0
                while at < count and keys[at] != own_key:
                    at += 1
                if at == MAX_PENDING:
                    count = MAX_PENDING + 1
                    break
                if at == count:
                    count += 1
                    keys[at], elements[at] = own_key, 0.0
                    channels[at] = families[family, GATHER_CHANNEL]
                elements[at] += more
        layer += 1
    return count, pending_layer
