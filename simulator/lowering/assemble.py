"""Put tiled blocks and epilogue together into one task graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from simulator.lowering.columns import TemplateColumns, csr_of_arrays, stream_name
from simulator.lowering.rows import StreamKey, TaskRows
from simulator.lowering.symmetry import Partition
from simulator.lowering.tiling import Block, Ids, Tiling, csr_of_edges
from simulator.taskgraph import TaskGraph

Key = TypeVar("Key")
NO_IDS: Ids = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class DeviceTraits:
    """What the graph says of each representative.

    Attributes:
        slowdowns: Factors under overlap, computation and communication.
        first_stage: Position of its first stage.
        has_host: Whether hosts take time.
    """

    slowdowns: Sequence[tuple[float, float]]
    first_stage: Sequence[int]
    has_host: bool


def assemble(
    tiling: Tiling,
    templates: TemplateColumns,
    epilogue: TaskRows,
    entry: dict[int, list[int]],
    partition: Partition,
    traits: DeviceTraits,
) -> TaskGraph:
    """Return the task graph.

    Args:
        tiling: All microbatches.
        templates: Columns of the tiling's templates and of the epilogue.
        epilogue: What follows; its task ids start at 0.
        entry: Per representative, epilogue tasks that wait for its last pass.
        partition: Representatives and resources.
        traits: Facts per representative.
    """
    offset = tiling.num_tasks
    total = offset + len(epilogue)
    edges = [*tiling.edges, *_epilogue_edges(tiling, epilogue, entry, offset)]
    streams = _appended(tiling.streams, epilogue.streams, offset)
    hosts = _appended(tiling.hosts, epilogue.hosts, offset) if traits.has_host else {}
    keys: list[StreamKey] = sorted(streams, key=lambda key: (key[0], str(key[1])))
    numbers = np.concatenate([*(block.template for block in tiling.blocks), [len(tiling.templates)]])
    microbatches = np.concatenate([*(block.microbatch for block in tiling.blocks), [-1]])
    columns, shares, fractions = templates.tiled(numbers)
    return TaskGraph(
        **columns,
        predecessors=csr_of_edges(
            np.concatenate([NO_IDS, *(tasks for tasks, _ in edges)]),
            np.concatenate([NO_IDS, *(before for _, before in edges)]),
            total,
        ),
        streams=csr_of_arrays([streams[key] for key in keys]),
        stream_device=np.array([key[0] for key in keys], dtype=np.int32),
        hosts=csr_of_arrays([hosts.get(c, NO_IDS) for c in range(len(partition.members))]),
        shares=shares,
        share_fractions=fractions,
        slowdown_computation=np.array([factors[0] for factors in traits.slowdowns]),
        slowdown_communication=np.array([factors[1] for factors in traits.slowdowns]),
        microbatch=np.repeat(microbatches, templates.lengths[numbers]).astype(np.int32),
        causes=templates.causes,
        names=templates.names,
        stream_names=tuple(stream_name(key[1]) for key in keys),
        resource_names=partition.resource_names,
        device_stage=np.array(traits.first_stage, dtype=np.int32),
        device_members=partition.members,
    )


def _appended(first: Mapping[Key, Ids], then: Mapping[Key, list[int]], offset: int) -> dict[Key, Ids]:
    joined = dict(first)
    for key, tasks in then.items():
        ids = np.array(tasks, dtype=np.int64) + offset
        joined[key] = np.concatenate([joined[key], ids]) if key in joined else ids
    return joined


def _epilogue_edges(
    tiling: Tiling, epilogue: TaskRows, entry: dict[int, list[int]], offset: int
) -> Iterable[tuple[Ids, Ids]]:
    """Yield edges inside the epilogue, and from each device's last passes and overlapped reductions to it."""
    inner = [(task, before) for task, found in enumerate(epilogue.predecessors) for before in found]
    if inner:
        table = np.array(inner, dtype=np.int64) + offset
        yield table[:, 0], table[:, 1]
    for block in tiling.blocks:
        for position in _closing_positions(block):
            template = tiling.templates[block.template[position]]
            base = int(block.base[position])
            for c, found in entry.items():
                ends = [*template.tails.get(c, ()), *template.unchained.get(c, ())]
                ends += [send.task for send in template.sends if send.source == c]
                for task in found:
                    yield np.full(len(ends), offset + task, dtype=np.int64), np.array(ends, dtype=np.int64) + base


def _closing_positions(block: Block) -> list[int]:
    """Return the last action of each of a rank's templates."""
    last: dict[int, int] = {}
    for position, number in enumerate(block.template.tolist()):
        last[number] = position
    return sorted(last.values())
