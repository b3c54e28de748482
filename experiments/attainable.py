"""What any consistent model can reach on vTrain's rows, chosen with the rows in view.

The rows are sums of parts (``docs/residuals.md``). So is every prediction of the accuracy cases:

    (q (m + p - 1)) layer + m head + (m, or 1 in a pipeline) embedding + once + m wait + send

for ``q`` layers a stage, ``m`` microbatches, ``p`` stages. ``layer``, ``head`` and ``embedding`` depend on hidden,
tensor-parallel degree and samples of a microbatch, ``once`` (reductions, optimizer) on all but the samples, ``wait``
and ``send`` (transfers) on what they carry. A table of these parts is *consistent* if

- nothing is negative;
- a part of more samples, or of the larger hidden, takes at least as long (not between one and two samples at
  tensor-parallel 8, where two heads a rank rule the fused softmax out);
- a microbatch of twice the samples takes at most as long as two;
- ``once`` falls neither with hidden, nor with layers, nor with replicas.

The least mean absolute error of all such tables is a linear program. Whatever prices the parts, physics or fit, cannot
be below it as long as it is consistent. The simulator's own predictions must be in the class (checked: error 0).
Ranking is bounded from above: pairs of plans that no consistent table orders as measured are found as infeasible sets
(Farkas' lemma), disjoint ones, each of which costs at least one pair.

Run: ``python -m experiments.attainable --data DIR``
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from experiments.accuracy.errors import DISTINGUISHABLE, rank_report
from experiments.accuracy.run import run_case
from experiments.cases import vtrain

Part = tuple[str | int, ...]
Sum = Mapping[Part, float]
Row = Mapping[str, Any]

HIDDEN, TENSOR, SAMPLES = (1024, 2048), (1, 2, 4, 8), (1, 2, 4, 8)
UNFUSED = (8, 1)
"""Tensor-parallel degree and samples whose heads the fused softmax does not take (16 heads, multiples of four)."""


@dataclass(frozen=True)
class Attainable:
    """What the best consistent table reaches on some rows.

    Attributes:
        least_error: Least mean absolute error of any consistent table.
        correlation: Rank correlation of the table that has it.
        most_correlation: No consistent table has a higher one.
        num_pairs: Pairs of plans that are ranked.
    """

    least_error: float
    correlation: float
    most_correlation: float
    num_pairs: int


def parts_of(row: Row) -> dict[Part, float]:
    """Return how often each part is in the iteration of a row.

    Args:
        row: ``hidden``, ``layers``, ``tp``, ``pp``, ``dp``, ``microbatch``, ``global_batch``.
    """
    hidden, tp, pp, dp, samples = (row[name] for name in ("hidden", "tp", "pp", "dp", "microbatch"))
    per_stage, m = row["layers"] // pp, row["global_batch"] // (dp * samples)
    priced = (hidden, tp, samples)
    found: dict[Part, float] = {
        ("layer", *priced): per_stage * (m + pp - 1),
        ("head", *priced): m,
        ("embedding", *priced): m if pp == 1 else 1,
        ("once", tp, pp, hidden, dp, row["layers"]): 1,
    }
    if pp > 1:
        found |= {("send", tp, pp, hidden, samples): 1, ("wait", tp, pp, hidden, samples): m}
    return found


def constraints(parts: Sequence[Part]) -> Iterator[Sum]:
    """Yield what must not be positive in a consistent table (``parts`` are those in use)."""
    for name in ("layer", "head", "embedding"):
        for tp in TENSOR:
            for samples in SAMPLES:
                yield {(name, HIDDEN[0], tp, samples): 1, (name, HIDDEN[1], tp, samples): -1}
                if samples == SAMPLES[-1]:
                    continue
                for hidden in HIDDEN:
                    fewer, more = (name, hidden, tp, samples), (name, hidden, tp, 2 * samples)
                    yield {more: 1, fewer: -2}
                    if name != "layer" or (tp, samples) != UNFUSED:
                        yield {fewer: 1, more: -1}
    for a in parts:
        if a[0] not in ("once", "send", "wait"):
            continue
        for b in parts:
            if a != b and a[:3] == b[:3] and all(int(x) <= int(y) for x, y in zip(a[3:], b[3:], strict=True)):
                yield {a: 1, b: -1}


@dataclass(frozen=True)
class _Programme:
    """Rows and constraints as matrices over the parts."""

    rows: NDArray[np.float64]
    limits: NDArray[np.float64]

    @staticmethod
    def of(rows: Sequence[Row]) -> _Programme:
        sums: list[Sum] = [parts_of(row) for row in rows]
        limits = list(constraints(list(dict.fromkeys(part for each in sums for part in each))))
        number: dict[Part, int] = {}
        for each in (*sums, *limits):
            for part in each:
                number.setdefault(part, len(number))
        return _Programme(_matrix(sums, number), _matrix(limits, number))


def _matrix(sums: Sequence[Sum], number: Mapping[Part, int]) -> NDArray[np.float64]:
    matrix = np.zeros((len(sums), len(number)))
    for line, each in enumerate(sums):
        for part, count in each.items():
            matrix[line, number[part]] = count
    return matrix


def least_error(rows: Sequence[Row], seconds: Sequence[float]) -> tuple[float, NDArray[np.float64]]:
    """Return the least mean absolute relative error of any consistent table, and its times.

    Args:
        rows: See `parts_of`.
        seconds: What is to be met, one time per row.
    """
    programme, count = _Programme.of(rows), len(rows)
    scaled = programme.rows / np.asarray(seconds)[:, None]
    num_parts, num_limits, unit = scaled.shape[1], len(programme.limits), np.eye(count)
    result = linprog(
        np.concatenate([np.zeros(num_parts), np.full(count, 1 / count)]),
        A_ub=np.block([[scaled, -unit], [-scaled, -unit], [programme.limits, np.zeros((num_limits, count))]]),
        b_ub=np.concatenate([np.ones(count), -np.ones(count), np.zeros(num_limits)]),
        bounds=(0, None),
        method="highs",
    )
    assert result.x is not None and result.fun is not None, result.message
    return float(result.fun), programme.rows @ result.x[:num_parts]


def ranked_pairs(rows: Sequence[Row], seconds: Sequence[float]) -> list[tuple[int, int]]:
    """Return ``(slower, faster)`` of all plans for one problem whose times measurably differ."""
    problems: dict[object, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        problems[row["hidden"], row["layers"], row["gpus"], row["global_batch"]].append(index)
    found = []
    for rivals in problems.values():
        for a, b in combinations(rivals, 2):
            if abs(seconds[a] - seconds[b]) > DISTINGUISHABLE * min(seconds[a], seconds[b]):
                found.append((a, b) if seconds[a] > seconds[b] else (b, a))
    return found


def conflicts(rows: Sequence[Row], pairs: Sequence[tuple[int, int]], seed: int = 0) -> list[list[int]]:
    """Return disjoint sets of pairs that no consistent table orders as measured all at once.

    Args:
        rows: See `parts_of`.
        pairs: ``(slower, faster)``.
        seed: Which of several sets is found first; any choice is a valid bound.
    """
    if not pairs:
        return []
    programme, random = _Programme.of(rows), np.random.default_rng(seed)
    slower, faster = np.array(pairs).T
    apart = programme.rows[slower] - programme.rows[faster]
    apart /= np.maximum(np.abs(apart).max(axis=1, keepdims=True), 1.0)
    limits, left, found = programme.limits, np.arange(len(pairs)), list[list[int]]()
    while len(left):
        # Farkas: apart @ parts > 0, limits @ parts <= 0 has no solution >= 0 exactly if this one has.
        result = linprog(
            np.concatenate([random.uniform(0.1, 1.1, len(left)), np.zeros(len(limits))]),
            A_ub=np.hstack([apart[left].T, -limits.T]),
            b_ub=np.zeros(apart.shape[1]),
            A_eq=np.concatenate([np.ones(len(left)), np.zeros(len(limits))])[None],
            b_eq=[1.0],
            bounds=(0, None),
            method="highs",
        )
        if result.status == 2:  # infeasible: all that are left can be ordered
            return found
        assert result.x is not None, result.message
        chosen = result.x[: len(left)] > 1e-9
        found.append(left[chosen].tolist())
        left = left[~chosen]
    return found


def attainable(rows: Sequence[Row], seconds: Sequence[float]) -> Attainable:
    """Return what any consistent table can reach on rows."""
    error, times = least_error(rows, seconds)
    pairs = ranked_pairs(rows, seconds)
    right = sum(times[a] > times[b] for a, b in pairs)
    lost, count = len(conflicts(rows, pairs)), max(len(pairs), 1)
    return Attainable(error, (2 * right - len(pairs)) / count, (len(pairs) - 2 * lost) / count, len(pairs))


def replica_steps(rows: Sequence[Row]) -> dict[tuple[int, ...], list[float]]:
    """Return what going from fewer to more replicas adds, in seconds, by what a reduction depends on.

    Keys are ``(hidden, layers, tp, pp, replicas before, after)``; the values, all that are found at other microbatches,
    are equal where the reduction is a term of its own.
    """
    alike: dict[tuple[int, ...], dict[int, float]] = defaultdict(dict)
    for row in rows:
        microbatches = row["global_batch"] // (row["dp"] * row["microbatch"])
        key = (*(row[name] for name in ("hidden", "layers", "tp", "pp", "microbatch")), microbatches)
        alike[key][row["dp"]] = row["value"] / 1e3
    found: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for key, times in alike.items():
        for a, b in combinations(sorted(times), 2):
            found[(*key[:4], a, b)].append(times[b] - times[a])
    return dict(found)


def step_per_parameter(rows: Sequence[Row]) -> dict[tuple[int, int], list[float]]:
    """Return what the optimizer step takes for each parameter of a layer, in seconds, by ``(hidden, tp)``.

    From rows on one replica and one stage: what does not grow with microbatches is once per iteration, and what of it
    grows with layers is a layer's part of the step (a layer has 12 hidden^2 weights, biases and norms left out).
    """
    alike: dict[tuple[int, ...], dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row["dp"] == row["pp"] == 1:
            key = tuple(row[name] for name in ("hidden", "tp", "microbatch", "layers"))
            alike[key][row["global_batch"] // row["microbatch"]] = row["value"] / 1e3
    once: dict[tuple[int, ...], dict[int, float]] = defaultdict(dict)
    for (*kind, layers), times in alike.items():
        if len(times) > 1:
            few, many = min(times), max(times)
            once[tuple(kind)][layers] = times[few] - few * (times[many] - times[few]) / (many - few)
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (hidden, tp, _), by_layers in once.items():
        if len(by_layers) > 1:
            few, many = min(by_layers), max(by_layers)
            parameters = (many - few) * 12 * hidden**2 / tp
            found[hidden, tp].append((by_layers[many] - by_layers[few]) / parameters)
    return dict(found)


def main() -> None:
    """Print bounds beside the simulator's figures, group by group, and how reductions and steps enter the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds measured_runs/dev.csv")
    arguments = parser.parse_args()
    everything = vtrain.rows(arguments.data)
    reported = [row for row in everything if not vtrain.is_calibration(row)]
    cases = [vtrain.case_of(row) for row in reported]
    predicted = np.array([run_case(case).iteration_time_s for case in cases])
    measured = np.array([row["value"] / 1e3 for row in reported])
    print("| group | rows | error | least | rank correlation | of the best table | at most | in the class |")
    print("|---|---|---|---|---|---|---|---|")
    for group in vtrain.GROUPS:
        at = np.array([group in case.groups for case in cases])
        rows = [row for row, own in zip(reported, at, strict=True) if own]
        found = attainable(rows, measured[at].tolist())
        rivals: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for index in np.flatnonzero(at):
            rivals[str(cases[index].rivals)].append((predicted[index], measured[index]))
        rank = rank_report(rivals)
        error = np.abs(predicted[at] / measured[at] - 1).mean()
        own = f"{rank.correlation:.3f} of {rank.num_pairs} pairs" if rank else ""
        member = least_error(rows, predicted[at].tolist())[0]
        print(
            f"| {group} | {len(rows)} | {error:.1%} | {found.least_error:.1%} | {own} | {found.correlation:.3f} "
            f"| {found.most_correlation:.3f} | {member:.3%} |"
        )
    steps = replica_steps(everything)
    repeated = [values for values in steps.values() if len(values) > 1]
    print(f"\n{len(repeated)} sets of rows that differ in replicas, at several microbatches or batches:")
    print(f"the difference repeats to {1e6 * max(np.ptp(values) for values in repeated):.1g} us")
    fewer = sorted(key for key, values in steps.items() if min(values) < 0)
    print(f"{len(fewer)} of {len(steps)} fall with replicas: hidden, layers, tp, pp, replicas before, after")
    for key in fewer:
        print(*key, f"{1e3 * min(steps[key]):+.3f} ms")
    print("\nOptimizer step, ps a parameter of a rank: hidden, tp, by microbatch")
    for kind, seconds in sorted(step_per_parameter(everything).items()):
        print(*kind, ", ".join(f"{1e12 * value:.1f}" for value in seconds))


if __name__ == "__main__":
    main()
