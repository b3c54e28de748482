"""How long the model says that operators take which campaigns profiled, beside what was measured: where it misses.

Of every unit of a campaign's committed cases: each kind of operator with its share of the profiled passes, forward and
backward, kernels alone, times what calibration plans took of them. With ``--kind``, each profiled operator of that
kind, with its shapes. Pages of ``docs/`` cite these figures.

Run: ``python -m experiments.operator_residuals --campaign single-gpu-families`` (needs no data)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from experiments.cases.campaign_operators import MeasuredOperator, measured_operators
from experiments.cases.campaigns import FOLDER
from simulator.costs import cost_tables
from workloads.kernels import Kernel, MemoryBound

SHORTEST_SHARE = 0.01
"""Of the passes of a unit, below which a kind is not worth a line."""


@dataclass(frozen=True)
class Residual:
    """One pass of operators of one kind, or of one profiled operator.

    Attributes:
        unit, kind, phase: What it is of; ``phase`` is ``forward`` or ``backward``.
        words: Role and shapes where it is of one operator.
        measured_s, modelled_s: Of all such operators of an iteration and of all profiled sizes.
        share: Of the measured seconds of the unit.
    """

    unit: str
    kind: str
    phase: str
    words: str
    measured_s: float
    modelled_s: float
    share: float

    @property
    def error(self) -> float:
        """Signed, relative to what was measured."""
        return self.modelled_s / self.measured_s - 1.0


def residuals(operators: Sequence[MeasuredOperator], kind: str | None = None) -> list[Residual]:
    """Return the residuals of profiled operators, by unit and kind, or of each operator of one kind.

    Args:
        operators: From ``measured_operators``.
        kind: Of operators.
    """
    sums: dict[tuple[str, str, str, str], list[float]] = {}
    totals: dict[str, float] = {}
    for each in operators:
        for phase, kernels, seconds in _passes(each):
            totals[each.unit] = totals.get(each.unit, 0.0) + seconds * each.count
            if kind is None or each.operator.kind == kind:
                words = "" if kind is None else _words(each)
                own = sums.setdefault((each.unit, each.operator.kind, phase, words), [0.0, 0.0])
                own[0] += seconds * each.count
                own[1] += _modelled_s(each, kernels) * each.count
    return [
        Residual(*key, measured_s, modelled_s, measured_s / totals[key[0]])
        for key, (measured_s, modelled_s) in sums.items()
        if measured_s > 0
    ]


def _words(each: MeasuredOperator) -> str:
    return f"{each.count} x {each.row.role} {each.local.inputs[0]} -> {each.local.outputs[0]}"


def _passes(each: MeasuredOperator) -> Iterator[tuple[str, Sequence[Kernel], float]]:
    yield "forward", each.forward, each.row.forward_s
    yield "backward", each.backward, each.row.backward_s


def _modelled_s(each: MeasuredOperator, kernels: Sequence[Kernel]) -> float:
    hardware, gpu_type = each.problem.hardware, each.problem.gpu_types[0]
    dtype, clock = each.problem.runtime.implementation.dtype, cost_tables(each.problem).clock_slowdown(gpu_type)
    return sum(
        hardware.kernel_time_s(gpu_type, kernel, dtype) * (1.0 if isinstance(kernel, MemoryBound) else clock)
        for kernel in kernels
    )


def main() -> None:
    """Print the residuals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    parser.add_argument("--campaign", choices=names, required=True, help="committed cases of a campaign")
    parser.add_argument("--unit", help="part of a unit's name, e.g. bf16")
    parser.add_argument("--kind", help="kind of operator, e.g. conv2d, each of whose operators gets a line")
    arguments = parser.parse_args()
    operators = list(measured_operators(FOLDER / f"{arguments.campaign}.yaml"))
    chosen = [each for each in operators if (arguments.unit or "") in each.unit]
    if not chosen:
        known = ", ".join(dict.fromkeys(each.unit for each in operators))
        parser.error(f"--unit must be part of a name that the campaign has ({known}), got {arguments.unit!r}")
    kinds = sorted({each.operator.kind for each in chosen})
    if arguments.kind not in (None, *kinds):
        parser.error(f"--kind must be one that these units have ({', '.join(kinds)}), got {arguments.kind!r}")
    lines = [each for each in residuals(chosen, arguments.kind) if arguments.kind or each.share >= SHORTEST_SHARE]
    width = max((len(each.words) for each in lines), default=0)
    head = f"{'unit':22} {'kind':20} {'pass':9} {'':{width}} {'share':>6}"
    print(f"{head} {'measured':>10} {'modelled':>10} {'error':>7}")
    for each in lines:
        print(
            f"{each.unit:22} {each.kind:20} {each.phase:9} {each.words:{width}} {each.share:6.1%} "
            f"{each.measured_s * 1e3:7.3f} ms {each.modelled_s * 1e3:7.3f} ms {each.error:+7.1%}"
        )


if __name__ == "__main__":
    main()
