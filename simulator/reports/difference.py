"""Why one plan is faster or smaller than another: time and memory by cause, as a waterfall.

Time comes from the two critical paths: each adds up to its iteration time, so the differences by cause add
up to the difference of the iteration times. Memory compares the consumers at the peak of each plan's
device that holds most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from datafiles.writer import write_bytes_atomically
from simulator.reports.critical_path import cause_words
from simulator.result import BYTES_PER_GIB, SimulationResult, format_bytes, format_rate, format_s

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

NEGLIGIBLE_SHARE = 0.005
"""Changes below this share of the larger total are summed up as one in text and plots."""

TIME_WORDS, MEMORY_WORDS = ("takes", "time", "as long as before"), ("needs", "memory", "as much memory as before")
"""Verb, what there is less or more of, and what is said where there is neither."""

SLOWER, FASTER, TOTAL = "#D55E00", "#009E73", "#8C8C8C"


class Change(NamedTuple):
    """One cause in both plans: seconds of the critical path, or bytes at the peak."""

    cause: str
    a: float
    b: float

    @property
    def difference(self) -> float:
        """What b spends more than a."""
        return self.b - self.a


@dataclass(frozen=True)
class Difference:
    """Plan b against plan a.

    Attributes:
        names: What the plans are called.
        iteration_time_s: Of a and b.
        peak_bytes: Live peak of the fullest device of a and b.
        fits: Of a and b.
        global_batch: Of a and b.
        time: Causes, largest absolute difference first; columns add up to the iteration times.
        memory: Consumers, likewise; columns add up to the peaks.
    """

    names: tuple[str, str]
    iteration_time_s: tuple[float, float]
    peak_bytes: tuple[int, int]
    fits: tuple[bool, bool]
    global_batch: tuple[int, int]
    time: tuple[Change, ...]
    memory: tuple[Change, ...]

    @property
    def samples_per_s(self) -> tuple[float, float]:
        """Throughput of a and b; 0 where an iteration takes no time."""
        a, b = (
            size / seconds if seconds > 0 else 0.0
            for size, seconds in zip(self.global_batch, self.iteration_time_s, strict=True)
        )
        return a, b

    def table(self) -> pd.DataFrame:
        """Return one row per cause: ``cause, a_s, b_s, difference_s, share`` (of a's iteration time)."""
        import pandas as pd

        total = self.iteration_time_s[0]
        rows = [
            (row.cause, row.a, row.b, row.difference, row.difference / total if total > 0 else 0.0) for row in self.time
        ]
        return pd.DataFrame(rows, columns=["cause", "a_s", "b_s", "difference_s", "share"])

    def memory_table(self) -> pd.DataFrame:
        """Return one row per consumer: ``consumer, a_bytes, b_bytes, difference_bytes``."""
        import pandas as pd

        rows = [(row.cause, row.a, row.b, row.difference) for row in self.memory]
        return pd.DataFrame(rows, columns=["consumer", "a_bytes", "b_bytes", "difference_bytes"])

    def summary(self) -> dict[str, Any]:
        """Return plain values with units in their keys."""
        return {
            "names": list(self.names),
            "global_batch": list(self.global_batch),
            "iteration_time_s": list(self.iteration_time_s),
            "samples_per_s": list(self.samples_per_s),
            "peak_allocated_bytes": list(self.peak_bytes),
            "fits": list(self.fits),
            "time_s": [{"cause": row.cause, "a": row.a, "b": row.b} for row in self.time],
            "memory_bytes": [{"consumer": row.cause, "a": row.a, "b": row.b} for row in self.memory],
        }

    def describe(self, limit: int = 4) -> str:
        """Return ``b takes 12.3 % less time, mainly: -0.41 s tensor-parallel communication, ...``.

        Where the batches differ, by samples a second: an iteration of fewer samples is no quicker plan.
        """
        first, second = self.names
        a, b = self.iteration_time_s
        reasons = _main(self.time, limit, _signed_s)
        seconds = f" ({first} {format_s(a)}, {second} {format_s(b)})"
        if self.global_batch[0] == self.global_batch[1]:
            lines = [_sentence(second, TIME_WORDS, a, b, reasons) + seconds]
        else:
            one, other = self.samples_per_s
            lines = [
                f"samples per iteration differ: {first} {self.global_batch[0]}, {second} {self.global_batch[1]}; by "
                f"samples/s {_throughput_sentence(second, one, other)} "
                f"({first} {format_rate(one)}, {second} {format_rate(other)})",
                f"iterations change by {_signed_s(b - a)}, mainly: {reasons}{seconds}",
            ]
        low, high = (float(size) for size in self.peak_bytes)
        if low > 0 or high > 0:
            text = _sentence(second, MEMORY_WORDS, low, high, _main(self.memory, limit, _signed_bytes))
            lines.append(f"{text} ({first} {format_bytes(low)}, {second} {format_bytes(high)})")
        for name, fits in zip(self.names, self.fits, strict=True):
            if not fits:
                lines.append(f"{name} does not fit into memory")
        return "\n".join(lines)

    def plot_waterfall(self, path: str | Path, title: str | None = None) -> None:
        """Write a PNG: from a's iteration time by cause to b's, and the same for memory.

        Args:
            path: The PNG; its folder must exist.
            title: First line; None for the names of the plans.
        """
        from simulator.reports.figures import TEXT, new_figure, png

        times = _steps(self.time)
        sizes = _steps(self.memory)
        bars = max(len(times), len(sizes)) + 2
        scale, unit = _time_scale(self.iteration_time_s)
        figure = new_figure(13.0, 1.6 + 0.36 * bars)
        left, right = figure.subplots(1, 2)
        _waterfall(left, self.names, times, self.iteration_time_s, scale, unit, bars)
        left.set_title("iteration time, by cause on the critical path", loc="left", fontsize=10.5, color=TEXT)
        _waterfall(right, self.names, sizes, self.peak_bytes, 1 / BYTES_PER_GIB, "GiB", bars)
        right.set_title("live memory at the peak, by consumer", loc="left", fontsize=10.5, color=TEXT)
        figure.suptitle(
            title or f"{self.names[0]} → {self.names[1]}",
            x=0.01, ha="left", fontsize=13, fontweight="bold", color=TEXT,
        )  # fmt: skip
        write_bytes_atomically(path, png(figure))


def difference(a: SimulationResult, b: SimulationResult, *, names: tuple[str, str] = ("a", "b")) -> Difference:
    """Compare two results.

    Args:
        a: The one to start from.
        b: The one to explain.
        names: What to call them.
    """
    return Difference(
        names=names,
        iteration_time_s=(a.iteration_time_s, b.iteration_time_s),
        peak_bytes=(_peak_bytes(a), _peak_bytes(b)),
        fits=(a.fits, b.fits),
        global_batch=(a.global_batch, b.global_batch),
        time=_changes(_seconds(a), _seconds(b)),
        memory=_changes(_consumers(a), _consumers(b)),
    )


def _seconds(result: SimulationResult) -> dict[str, float]:
    by_cause = result.critical_path().seconds_by(per_stage=False)
    return {cause_words(cause): seconds for (cause, _), seconds in by_cause.items()}


def _peak_bytes(result: SimulationResult) -> int:
    return int(result.peak_allocated_bytes)


def _consumers(result: SimulationResult) -> dict[str, float]:
    device = result.largest_device
    if device is None:
        return {}
    sizes = {name: float(size) for name, size in device.consumers.items()}
    rest = device.peak_allocated_bytes - sum(sizes.values())
    return {**sizes, "rounding and other": sizes.get("rounding and other", 0.0) + rest} if rest else sizes


def _changes(a: Mapping[str, float], b: Mapping[str, float]) -> tuple[Change, ...]:
    rows = [Change(cause, a.get(cause, 0.0), b.get(cause, 0.0)) for cause in {**a, **b}]
    return tuple(sorted(rows, key=lambda row: (-abs(row.difference), -row.a, row.cause)))


def _sentence(name: str, words: tuple[str, str, str], a: float, b: float, reasons: str) -> str:
    verb, what, same = words
    change = (b - a) / a if a > 0 else 0.0
    if abs(change) < 0.0005:
        return f"{name} {verb} {same}"
    return f"{name} {verb} {100 * abs(change):.1f} % {'less' if change < 0 else 'more'} {what}, mainly: {reasons}"


def _throughput_sentence(name: str, a: float, b: float) -> str:
    change = (b - a) / a if a > 0 else 0.0
    if abs(change) < 0.0005:
        return f"{name} is as fast as before"
    return f"{name} is {100 * abs(change):.1f} % {'faster' if change > 0 else 'slower'}"


def _main(rows: Sequence[Change], limit: int, text: Any) -> str:
    negligible = NEGLIGIBLE_SHARE * max((abs(row.difference) for row in rows), default=0.0)
    chosen = [row for row in rows if abs(row.difference) > negligible][:limit]
    return ", ".join(f"{text(row.difference)} {row.cause}" for row in chosen)


def _signed_s(seconds: float) -> str:
    return ("+" if seconds >= 0 else "-") + format_s(abs(seconds))


def _signed_bytes(size: float) -> str:
    return ("+" if size >= 0 else "-") + format_bytes(abs(size))


def _time_scale(times: tuple[float, float]) -> tuple[float, str]:
    return (1.0, "s") if max(times) >= 1 else (1e3, "ms")


def _steps(rows: Sequence[Change]) -> list[tuple[str, float]]:
    """Return (cause, difference) of what matters, and the rest as one."""
    scale = max(sum(row.a for row in rows), sum(row.b for row in rows), 0.0)
    large = [row for row in rows if abs(row.difference) >= NEGLIGIBLE_SHARE * scale and row.difference]
    rest = [row for row in rows if row not in large]
    steps = [(row.cause, row.difference) for row in large]
    remainder = sum(row.difference for row in rest)
    return [*steps, ("smaller changes", remainder)] if remainder else steps


def _waterfall(
    axes: Axes,
    names: tuple[str, str],
    steps: Sequence[tuple[str, float]],
    totals: tuple[float, float],
    factor: float,
    unit: str,
    bars: int,
) -> None:
    from simulator.reports.figures import GRID, TEXT, clean_axes

    level, largest = totals[0], max(*totals, 1e-30)
    axes.barh(0, totals[0] * factor, 0.62, color=TOTAL)
    labels = [(totals[0], f"{totals[0] * factor:,.4g} {unit}")]
    for row, (_, change) in enumerate(steps, start=1):
        axes.barh(row, change * factor, 0.62, level * factor, color=FASTER if change < 0 else SLOWER)
        axes.plot([level * factor] * 2, [row - 1 + 0.31, row - 0.31], color=TEXT, linewidth=0.6)
        labels.append((max(level, level + change), f"{change * factor:+,.3g}"))
        level += change
        largest = max(largest, level)
    last = len(steps) + 1
    axes.plot([totals[1] * factor] * 2, [last - 1 + 0.31, last - 0.31], color=TEXT, linewidth=0.6)
    axes.barh(last, totals[1] * factor, 0.62, color=TOTAL)
    labels.append((totals[1], f"{totals[1] * factor:,.4g} {unit}"))
    for row, (x, text) in enumerate(labels):
        axes.annotate(text, (x * factor, row), (4, 0), textcoords="offset points", va="center", fontsize=9, color=TEXT)
    axes.set_yticks(range(last + 1), [names[0], *(cause for cause, _ in steps), names[1]])
    axes.set_ylim(bars - 0.4, -0.6)
    axes.set_xlim(0, 1.2 * largest * factor)
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    clean_axes(axes)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(unit, color=TEXT)
