"""Random task graphs for hypothesis: small, full of ties, every feature used."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import strategies as st

from simulator.taskgraph import COMMUNICATION, COMPUTATION, OTHER, Csr, TaskGraph
from tests.simulator.graphs import GraphBuilder

TIMES = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]) | st.floats(0.001, 3.0)
FACTORS = st.sampled_from([1.0, 1.0, 1.2, 1.5, 3.0])
SHARES = st.sampled_from([0.2, 0.5, 0.75, 1.0, 1.6])


@st.composite
def graphs(draw: st.DrawFn, max_tasks: int = 12) -> TaskGraph:
    """Draw a small graph that can finish: everything points from lower to higher task ids."""
    num_devices = draw(st.integers(1, 3))
    num_resources = draw(st.integers(0, 3))
    builder = GraphBuilder(
        slowdowns=[(draw(FACTORS), draw(FACTORS)) for _ in range(num_devices)], num_resources=num_resources
    )
    for device in range(num_devices):
        for _ in range(draw(st.integers(1, 3))):
            builder.stream(device)
    for task in range(draw(st.integers(1, max_tasks))):
        builder.add(
            draw(TIMES),
            latency_s=draw(st.just(0.0) | TIMES),
            lead_s=draw(st.just(0.0) | TIMES),
            host_s=draw(TIMES),
            bound_s=draw(st.just(0.0) | TIMES),
            kind=draw(st.sampled_from([COMPUTATION, COMPUTATION, COMMUNICATION, COMMUNICATION, OTHER])),
            host_waits=draw(st.integers(0, 3)) == 0,
            streams=draw(st.sets(st.integers(0, len(builder.stream_device) - 1), max_size=2)),
            hosts=draw(st.sets(st.integers(0, num_devices - 1), max_size=2)),
            after=draw(st.sets(st.integers(0, task - 1), max_size=2)) if task else (),
            shares={
                resource: draw(SHARES)
                for resource in (draw(st.sets(st.integers(0, num_resources - 1), max_size=2)) if num_resources else ())
            },
        )
    return builder.build()


def with_shuffled_orders(graph: TaskGraph, seed: int) -> TaskGraph:
    """Return a graph with the order of every stream shuffled, which may make circles."""
    generator = random.Random(seed)
    rows = [graph.streams.row(s).tolist() for s in range(len(graph.streams))]
    for row in rows:
        generator.shuffle(row)
    return replace(graph, streams=Csr.from_rows(rows))
