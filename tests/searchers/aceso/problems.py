"""Problems and models for the tests of Aceso."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from hardware_models.cluster import parse_cluster
from hardware_models.import_aceso import import_collectives, import_table
from hardware_models.model import HardwareModel
from hardware_models.runtime_files import load_runtime
from searchers.aceso.arrays import (
    BACKWARD,
    ENTERS,
    EXTRA_BACKWARD,
    EXTRA_FORWARD,
    FORWARD,
    GRADIENT,
    INPUT,
    KEPT,
    LEAVES,
    LISTED,
    NUM_COLUMNS,
    OUTPUT,
    STATE,
    WEIGHT,
    Arrays,
)
from searchers.aceso.model import PerformanceModel
from searchers.aceso.tables import Space, Tables
from simulator.costs import CostTables
from simulator.problem import Problem
from tests.searchers.tiny import tiny_problem
from tests.workloads.graphs import SHARED_DATA
from workloads.models.gpt import GPTSpec
from workloads.registry import build_from_spec, build_workload

FOLDER = SHARED_DATA / "aceso_v100"
MODELS = {
    ("gpt", "1_3B"): "gpt3-1.3b",
    ("gpt", "2_6B"): "gpt3-2.6b",
    ("gpt", "6_7B"): "gpt3-6.7b",
    ("gpt", "13B"): "gpt3-13b",
}
needs_profile = pytest.mark.skipif(
    not FOLDER.exists(), reason="Aceso's published profile is not here: it is not part of the repository"
)


@cache
def profiled_problem(size: str, gpus: int) -> Problem:
    """Return GPT of a size on Aceso's cluster and profile, 28,000 MiB, batch 1024."""
    cluster = f"v100-32g-ndv2:{max(1, gpus // 8)}x{min(gpus, 8)}"
    return Problem(
        workload=build_workload(MODELS["gpt", size]),
        hardware=HardwareModel(
            cluster=parse_cluster(cluster),
            operator_profile=import_table(FOLDER / "ops.csv.gz", model="gpt", size=size),
            collective_table=import_collectives(FOLDER / "comm.csv"),
        ),
        runtime=load_runtime("megatron-lm-2021"),
        global_batch=1024,
        memory_limit_bytes=28000 << 20,
    )


def ideal_model(num_devices: int = 8, *, operators_per_layer: int = 4, limit: float = 1e12) -> PerformanceModel:
    """Return a model where parallelism is free of loss: work, states and activations divide by the GPUs.

    Every operator takes 1 ms forward and 2 ms backward per sample on one GPU. Tensor parallelism communicates
    3 us per operator and degree doubling, so that it is dearer than data parallelism; gradients take 2 us per
    byte-sized unit and doubling.
    """
    problem = tiny_problem(num_devices, 16)
    shape = GPTSpec(name="tiny", layers=2, hidden=1024, heads=8, seq_len=512, vocab=8000, tied_embeddings=False)
    problem = replace(problem, workload=build_from_spec(shape))  # sharing weights is no loss of parallelism
    count = len(problem.workload)
    degrees = tuple(2**power for power in range(num_devices.bit_length()))
    space = Space(degrees, (1, 2, 4, 8), 1, np.zeros(count, bool))
    columns = np.zeros((space.num_cells, NUM_COLUMNS, count))
    for degree in degrees:
        for samples in space.samples:
            cell = space.cell(degree, samples)
            # Twice the samples take a little less than twice the time.
            share = samples * (1.0 - 0.02 * np.log2(samples)) / degree
            columns[cell, FORWARD] = 1e-3 * share + 3e-6 * np.log2(degree)
            columns[cell, BACKWARD] = 2e-3 * share + 3e-6 * np.log2(degree)
            columns[cell, [INPUT, OUTPUT, ENTERS, LEAVES]] = 1e6 * samples
            columns[cell, STATE] = 16e6 / degree
            columns[cell, WEIGHT] = 2e6 / degree
            columns[cell, GRADIENT] = 2e6 / degree
            kept = (1.0 + 0.5 * (np.arange(count) % operators_per_layer)) * 4e6 * samples / degree
            columns[cell, [KEPT, LISTED]] = kept
            columns[cell, [EXTRA_FORWARD, EXTRA_BACKWARD]] = 1e6 * samples / degree
    sync = np.zeros((len(degrees), len(degrees), 2))
    sync[:, 1:, 1] = 1e-10 * np.arange(1, len(degrees))
    gather = np.zeros((len(degrees), 2))
    gather[1:, 1] = 1e-10
    knots = np.array([1e3, 1e9])
    arrays = Arrays(
        columns,
        np.arange(count, dtype=np.int32) % operators_per_layer,
        np.arange(count, dtype=np.int32) // operators_per_layer,
        (np.arange(count) % operators_per_layer > 0).astype(np.uint8),
        np.arange(count, dtype=np.int32),
        np.array([knots, knots]),
        np.repeat(np.array([knots * 1e-11, knots * 4e-11])[:, np.newaxis], len(degrees), axis=1),
        sync,
        gather,
        space.degree_table(),
        np.array([0, 0, 0], np.int64),
        np.full(count, -1, np.int32),
    )
    model = PerformanceModel(problem, Tables(arrays, space), compat="paper", recompute="cheapest")
    model.limit_bytes = limit
    return model


def shared_model(problem: Problem) -> PerformanceModel:
    """Return the paper's model on the problem's cost tables."""
    return PerformanceModel.of(problem, CostTables(problem))
