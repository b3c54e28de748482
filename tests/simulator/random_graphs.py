"""Random task graphs for hypothesis: small, full of ties, every feature used."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import strategies as st

from simulator.taskgraph import COMMUNICATION, COMPUTATION, OTHER, Csr, TaskGraph
from tests.simulator.graphs import GraphBuilder

TIMES = (0.0, 0.25, 0.5, 1.0, 2.0)
FACTORS = (1.0, 1.0, 1.2, 1.5, 3.0)
SHARES = (0.2, 0.5, 0.75, 1.0, 1.6)
KINDS = (COMPUTATION, COMPUTATION, COMMUNICATION, COMMUNICATION, OTHER)


def graphs(max_tasks: int = 12) -> st.SearchStrategy[TaskGraph]:
    """Draw a small graph that can finish: everything points from lower to higher task ids.

    Hypothesis draws sizes and a seed: ten times as many graphs a second as where it draws everything. It makes a
    failing graph smaller by taking tasks off the end.
    """
    sizes = st.integers(1, 3), st.integers(0, 3), st.integers(1, max_tasks)
    return st.builds(random_graph, st.integers(0, 2**32 - 1), *sizes)


def random_graph(seed: int, num_devices: int, num_resources: int, num_tasks: int) -> TaskGraph:
    """Return the graph of a seed; with fewer tasks it is the same up to there."""
    generator = random.Random(seed)
    choice = generator.choice

    def time_s() -> float:
        return choice(TIMES) if generator.random() < 0.5 else generator.uniform(0.001, 3.0)

    def some(count: int) -> set[int]:
        return set(generator.sample(range(count), generator.randint(0, min(count, 2))))

    builder = GraphBuilder(
        slowdowns=[(choice(FACTORS), choice(FACTORS)) for _ in range(num_devices)], num_resources=num_resources
    )
    for device in range(num_devices):
        for _ in range(generator.randint(1, 3)):
            builder.stream(device)
    for task in range(num_tasks):
        builder.add(
            time_s(),
            latency_s=choice((0.0, time_s())),
            lead_s=choice((0.0, time_s())),
            host_s=time_s(),
            bound_s=choice((0.0, time_s())),
            kind=choice(KINDS),
            host_waits=generator.randrange(4) == 0,
            streams=some(len(builder.stream_device)),
            hosts=some(num_devices),
            after=some(task),
            shares={resource: choice(SHARES) for resource in some(num_resources)},
        )
    return builder.build()


def with_shuffled_orders(graph: TaskGraph, seed: int) -> TaskGraph:
    """Return a graph with the order of every stream shuffled, which may make circles."""
    generator = random.Random(seed)
    rows = [graph.streams.row(s).tolist() for s in range(len(graph.streams))]
    for row in rows:
        generator.shuffle(row)
    return replace(graph, streams=Csr.from_rows(rows))
