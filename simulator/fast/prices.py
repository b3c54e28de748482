"""Compiled: prices of collectives from lines and measured points, and the hash table of what has a number."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.compiled_cache import compiled_with, inlined
from simulator.fast import arrays
from simulator.fast.arrays import LATENCY_S, PENDING, S_PER_BYTE, START_S, STRETCH, Floats, Ints, Keys, TimeTables

MAX_LATENCY_SHARE = 0.9
"""Of a measured time, as in ``collective_table``."""

_MIX = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing.
_SHIFT = np.uint64(29)
_ONE, _NONE = np.uint64(1), np.uint64(0)


@inlined
def _price(
    lines: Floats, line: int, line_end: int, points: Floats, point: int, point_end: int, num_bytes: float
) -> float:
    if num_bytes <= 0.0:
        return 0.0
    alone_s, best = np.inf, line
    for option in range(line, line_end):
        option_s = lines[option, START_S] + num_bytes * lines[option, S_PER_BYTE]
        if option_s < alone_s:
            alone_s, best = option_s, option
    latency_s = lines[best, LATENCY_S]
    if point < point_end:
        while points[point, 0] < num_bytes:
            point += 1
        if points[point, 0] == num_bytes:
            alone_s = points[point, 1]
        else:
            part = (num_bytes - points[point - 1, 0]) / (points[point, 0] - points[point - 1, 0])
            alone_s = points[point - 1, 1] + part * (points[point, 1] - points[point - 1, 1])
        latency_s = min(latency_s, MAX_LATENCY_SHARE * alone_s)
    return float(alone_s + (alone_s - latency_s) * lines[best, STRETCH])


@compiled_with(arrays)
def price_s(lines: Floats, points: Floats, num_bytes: float) -> float:
    """Return the seconds of a collective beside others: as alone, but for what they stretch its work.

    Alone it is the quickest straight line, or linear between measured points.

    Args:
        lines: float64[., LINE]. See its columns.
        points: float64[., 2]. Bytes and seconds alone, ascending from no bytes to more than are sent; or none.
        num_bytes: Its size.
    """
    return float(_price(lines, 0, len(lines), points, 0, len(points), num_bytes))


@inlined
def channel_s(tables: TimeTables, channel: int, num_bytes: float) -> float:
    """Return the seconds of a channel: of its slowest group."""
    slowest = 0.0
    while True:
        line, line_end = tables.line_offsets[channel], tables.line_offsets[channel + 1]
        point, point_end = tables.point_offsets[channel], tables.point_offsets[channel + 1]
        slowest = max(slowest, _price(tables.lines, line, line_end, tables.points, point, point_end, num_bytes))
        if tables.goes_on[channel] == 0:
            break
        channel += 1
    return slowest


@inlined
def channels_s(tables: TimeTables, channels: Ints, elements: Floats, count: int, element_bytes: float) -> float:
    """Return the seconds of ``count`` channels one after the other, each with so many elements of so many bytes."""
    total = 0.0
    for at in range(count):
        total += channel_s(tables, channels[at], elements[at] * element_bytes)
    return total


@inlined
def mixed(key: Any, word: Any) -> Any:
    """Return the hash of a key and one more word."""
    key = (key ^ np.uint64(word)) * _MIX
    return key ^ (key >> _SHIFT)


@inlined
def wanted(keys: Keys, values: Ints, key: Any, misses: Ints, counts: Ints, kind: int, first: int, second: int) -> int:
    """Return the value of a key, or PENDING after noting what is missing."""
    mask = np.uint64(len(keys) - 1)
    key = key | _ONE
    slot = key >> np.uint64(20) & mask
    while keys[slot] != key and keys[slot] != _NONE:
        slot = (slot + _ONE) & mask
    value = PENDING
    if keys[slot] == key:
        value = values[slot]
    elif counts[0] < len(misses):
        keys[slot] = key
        values[slot] = PENDING
        misses[counts[0], 0], misses[counts[0], 1] = kind, slot
        misses[counts[0], 2], misses[counts[0], 3] = first, second
        counts[0] += 1
    return value
