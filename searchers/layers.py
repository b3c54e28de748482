"""Costs per layer on the shared cost tables: what systems that plan whole layers work on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simulator.costs import CostTables
from simulator.plan import Sharding
from simulator.uniform import repeated_layers
from workloads.operators import Workload


@dataclass(frozen=True)
class LayerCosts:
    """Every layer of a workload under one sharding, for one microbatch on one rank.

    Arrays are float64[num_layers]. A layer takes its kernels, or its launches if those take longer. Times include the
    collectives that the sharding itself causes (alone, on devices that begin with a node of the type), no gradient
    synchronisation and no parameter gathers.

    Attributes:
        forward_s, backward_s: Seconds.
        parameter_elements: Local parameter elements.
        saved_bytes: Kept from forward to backward.
        input_bytes: Of that, what remains when the layer is recomputed: what enters the layer.
        boundary_bytes: Bytes that leave the layer for later ones, on one replica.
    """

    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    parameter_elements: NDArray[np.float64]
    saved_bytes: NDArray[np.float64]
    input_bytes: NDArray[np.float64]
    boundary_bytes: NDArray[np.float64]

    @cached_property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.forward_s)


class LayerTables:
    """Layer costs of one problem, memoised per sharding, samples and device type.

    Args:
        costs: Shared cost tables.
        spans: Operator ranges ``[start, stop)`` that count as layers; by default the workload's own.
    """

    def __init__(self, costs: CostTables, spans: tuple[tuple[int, int], ...] | None = None) -> None:
        self.costs = costs
        self.spans = spans or costs.problem.workload.layers
        self._found: dict[tuple[Sharding, int, str], LayerCosts] = {}

    def layers(self, sharding: Sharding, samples: int, gpu_type: str) -> LayerCosts:
        """Return the costs of every layer.

        Args:
            sharding: Applied to every operator; split words allowed.
            samples: Samples one rank works on per microbatch.
            gpu_type: Device type.

        Raises:
            ValueError: If an operator cannot be split so.
        """
        key = (tuple(sharding), samples, gpu_type)
        if key not in self._found:
            self._found[key] = self._build(*key)
        return self._found[key]

    def slowest(self, sharding: Sharding, samples: int) -> LayerCosts:
        """Return the costs of every layer with the times of the problem's slowest type of device.

        Raises:
            ValueError: If an operator cannot be split so.
        """
        found = [self.layers(sharding, samples, each) for each in dict.fromkeys(self.costs.problem.gpu_types)]
        return replace(
            found[0],
            forward_s=np.max([each.forward_s for each in found], axis=0),
            backward_s=np.max([each.backward_s for each in found], axis=0),
        )

    def _build(self, sharding: Sharding, samples: int, gpu_type: str) -> LayerCosts:
        table = self.costs.table(sharding, samples, gpu_type)
        starts = np.array([start for start, _ in self.spans])
        ends = np.array([stop - 1 for _, stop in self.spans])
        boundary = table.boundary_bytes[ends]

        def sums(kernels_s: NDArray[np.float64], launches_s: NDArray[np.float64]) -> NDArray[np.float64]:
            found: NDArray[np.float64] = np.maximum(
                np.add.reduceat(kernels_s, starts), np.add.reduceat(launches_s, starts)
            )
            return found

        return LayerCosts(
            forward_s=sums(table.forward_s, table.forward_host_s),
            backward_s=sums(table.backward_s, table.backward_host_s),
            parameter_elements=np.add.reduceat(table.parameter_elements, starts),
            saved_bytes=np.add.reduceat(table.saved_bytes, starts),
            input_bytes=np.concatenate([[0.0], boundary[:-1]]),
            boundary_bytes=boundary,
        )


def blocks(workload: Workload) -> tuple[tuple[int, int], ...]:
    """Return the repeated layers, with what lies before the first joined to it and the rest to the one before.

    Systems that count transformer layers give the embedding to the first one and the head to the last.
    """
    starts = [start for start, _ in repeated_layers(workload)]
    return tuple(zip([0, *starts[1:]], [*starts[1:], len(workload)], strict=True))
