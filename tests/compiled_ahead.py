"""What most tests need compiled, compiled side by side by the workers before their first test where nothing is."""

from __future__ import annotations

import numpy as np

from searchers.aceso.warm_up import warm_up
from simulator.compiled_cache import is_cached
from simulator.engines.engine_compiled import advance, run_compiled
from simulator.fast.arrays import INCOMPLETE
from simulator.fast.estimate import FastEstimator, compile_ahead
from simulator.fast.peaks import estimate_peaks
from simulator.uniform import uniform_plan
from tests.simulator.graphs import GraphBuilder
from tests.simulator.problems import small_problem


def compile_estimate() -> None:
    """Compile the estimate, its times first: they take two thirds of it."""
    compile_ahead(small_problem())


def compile_peaks_and_engine() -> None:
    """Compile the estimate's peaks, for a plan that no times are known of, and the engine."""
    if not is_cached(estimate_peaks):
        problem = small_problem()
        estimator = FastEstimator(problem)
        columns = estimator.arrays([uniform_plan(problem)]).columns()
        estimator.peaks(columns, np.array([INCOMPLETE]), np.zeros(len(columns.strategies), dtype=np.int64))
    if not is_cached(advance):
        builder = GraphBuilder()
        builder.add(1.0)
        run_compiled(builder.build())


def compile_share(worker: int) -> None:
    """Compile what falls to a worker, of two or more. Others wait for what they need of it, and load it."""
    if worker == 0:
        compile_estimate()
    elif worker == 1:
        compile_peaks_and_engine()
        warm_up()
