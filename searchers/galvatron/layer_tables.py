"""What the search of a stage works on: seconds and bytes of every layer under every strategy, and of moving between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from searchers.galvatron.dynamic_programming import LayerTable
from searchers.galvatron.estimator import Estimator
from searchers.galvatron.layer_profiles import Layer
from searchers.galvatron.microbatches import Cut
from searchers.galvatron.pipeline_costs import LayerCost, released_layer_bytes
from searchers.galvatron.released_time import ReleasedTime
from searchers.galvatron.strategies import Strategy


class LayerTables:
    """Tables of the layers of one pipeline degree, from memoised rows.

    Args:
        estimator: Of the degree.
        strategies: The columns.
        paper: Steps count once, whatever the number of microbatches (Eq. 4 as printed).
    """

    def __init__(self, estimator: Estimator, strategies: Sequence[Strategy], *, paper: bool) -> None:
        self.estimator = estimator
        self.strategies = tuple(strategies)
        self.paper = paper
        self.layouts = tuple(dict.fromkeys(strategy.layout for strategy in self.strategies))
        self._layout_of = np.array([self.layouts.index(strategy.layout) for strategy in self.strategies])
        trees = list(dict.fromkeys(strategy.levels for strategy in self.strategies))
        self.weights = np.array([trees.index(strategy.levels) for strategy in self.strategies])
        self._ties_of: dict[int, frozenset[str]] = {}
        self._rows: dict[object, list[LayerCost | None]] = {}
        self._moves: dict[object, NDArray[np.float64]] = {}

    def table(
        self,
        groups: Sequence[tuple[Layer, ...]],
        held: float,
        cut: Cut,
        ties: Sequence[frozenset[str]],
        *,
        sends: bool,
        steps: bool = False,
        once: bool = False,
    ) -> LayerTable:
        """Return what the search of a stage works on.

        Args:
            groups: Layers of the stage; those of a group share a strategy.
            held: Microbatches in flight.
            cut: Weighs a layer's step against its synchronisation.
            ties: By group, the tied parameters that the stage holds already.
            sends: Another stage follows.
            steps: A layer keeps at least what the optimizer works in.
            once: Steps count once here too.
        """
        shape = (len(groups), len(self.strategies))
        cost, kept, backward, forward = (np.full(shape, np.inf) for _ in range(4))
        # The last microbatch is counted apart where it is smaller, and its synchronisation with it.
        weight = 1 if self.paper or once else cut.parts - (cut.last is not None)
        apart = None if self.paper or once else cut.last
        several = cut.parts > 1
        released = self.estimator.released is not None
        timed = self.estimator.released_time
        for number, (group, known) in enumerate(zip(groups, ties, strict=True)):
            row = self._row(group[0], cut.samples, several, known)
            last_row = row if cut.last is None else self._row(group[0], cut.last, several, known)
            size = len(group)
            for place, (found, last) in enumerate(zip(row, last_row, strict=True)):
                if found is not None and last is not None:
                    steps_s = weight * found.step_s
                    if apart is not None:
                        steps_s += last.step_s
                    cost[number, place] = size * (
                        steps_s + last.sync_s
                        if timed is None
                        else timed.layer_s(group[0].kind, self.strategies[place], cut.batch)
                    )
                    least = found.optimizer_bytes if steps else 0.0
                    each = max(held * found.forward_bytes, least) + found.state_bytes
                    kept[number, place] = size * (released_layer_bytes(found, held) if released else each)
                    if number == 0 and not released:
                        kept[number, place] += held * found.received_bytes
                    if sends and number == len(groups) - 1 and not released:
                        kept[number, place] += held * found.sent_bytes
                    backward[number, place] = found.backward_bytes * (held if released else 1)
                    forward[number, place] = 0.0 if released else size * found.forward_bytes
        transition = np.zeros((len(groups), len(self.layouts), len(self.layouts)))
        if timed is not None:
            transition[1:] = self._released_transition(timed, cut.batch)
            return LayerTable(cost, kept, backward, forward, self._layout_of, transition)
        for number in range(1, len(groups)):
            before = groups[number - 1][0]
            transition[number] = weight * self._transition(before, cut.samples, several)
            if apart is not None:
                transition[number] += self._transition(before, apart, several)
        return LayerTable(cost, kept, backward, forward, self._layout_of, transition)

    def held_before(self, layers: Sequence[Layer]) -> list[frozenset[str]]:
        """Return the tied parameters that layers of a stage hold before each of them."""
        found = [frozenset[str]()]
        for layer in layers[:-1]:
            found.append(found[-1] | self.ties(layer))
        return found

    def keepers(self, layers: Sequence[Layer], least_bytes: float) -> Iterator[tuple[int, list[frozenset[str]]]]:
        """Yield layers that later ones of their stage can share a tied parameter with, and what each of those shares.

        Args:
            layers: Of the stage.
            least_bytes: Tied parameters whose states are smaller are left out (T5's relative positions, which every
                layer holds).
        """
        profiles = self.estimator.profiles
        state_bytes = self.estimator.problem.runtime.state_bytes_per_parameter
        for number, layer in enumerate(layers[:-1]):
            elements = profiles.parameters(layer.kind, 1)
            large = frozenset(tie for tie in self.ties(layer) if elements[tie] * state_bytes >= least_bytes)
            if not large:
                continue
            shared = [frozenset[str]()] * (number + 1)
            shared += [self._agreeing(layer, other, large) for other in layers[number + 1 :]]
            if any(shared):
                yield number, shared

    def _agreeing(self, first: Layer, second: Layer, ties: frozenset[str]) -> frozenset[str]:
        """Return the ties that two layers lay out alike under every strategy that both can have."""
        found = ties & self.ties(second)
        for strategy in self.strategies if found else ():
            own, other = (self.estimator.tied_layouts(layer, strategy) for layer in (first, second))
            found = frozenset(tie for tie in found if not own or not other or own[tie] == other[tie])
        return found

    def ties(self, layer: Layer) -> frozenset[str]:
        """Return the tied parameters that a layer holds."""
        if layer.kind not in self._ties_of:
            self._ties_of[layer.kind] = frozenset(self.estimator.profiles.parameters(layer.kind, 1)) - {""}
        return self._ties_of[layer.kind]

    def _row(self, layer: Layer, samples: int, accumulates: bool, ties: frozenset[str]) -> list[LayerCost | None]:
        key = (layer.kind, samples, accumulates, ties & self.ties(layer))
        if key not in self._rows:
            self._rows[key] = [
                self.estimator.layer(layer, strategy, samples, accumulates=accumulates, held_ties=ties)
                for strategy in self.strategies
            ]
        return self._rows[key]

    def _released_transition(self, timed: ReleasedTime, batch: int) -> NDArray[np.float64]:
        """Return what the release takes from layout to layout for a batch: float64[K, K]."""
        lying = {strategy.layout: strategy for strategy in self.strategies}
        return np.array(
            [[timed.transition_s(lying[one], lying[two], batch) for two in self.layouts] for one in self.layouts]
        )

    def _transition(self, layer: Layer, samples: int, accumulates: bool) -> NDArray[np.float64]:
        """Return seconds from layout to layout behind a layer: float64[K, K]."""
        key = (layer.kind, samples)
        if key not in self._moves:
            seconds = np.zeros((len(self.layouts),) * 2)
            row = self._row(layer, samples, accumulates, frozenset())
            left = {
                strategy.layout: (cost, strategy)
                for cost, strategy in zip(row, self.strategies, strict=True)
                if cost is not None
            }
            # The next layer may be cut in ways that this one cannot.
            reached = {strategy.layout: strategy for strategy in self.strategies}
            for first, source in enumerate(self.layouts):
                for second, target in enumerate(self.layouts):
                    if first != second and source in left:
                        cost, strategy = left[source]
                        seconds[first, second] = self.estimator.transition_s(cost, strategy, reached[target])
            self._moves[key] = seconds
        return self._moves[key]
