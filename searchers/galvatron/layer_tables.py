"""What the search of a stage works on: seconds and bytes of every layer under every strategy, and of moving between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from searchers.galvatron.estimator import Estimator
from searchers.galvatron.layer_profiles import Layer
from searchers.galvatron.microbatches import Cut
from searchers.galvatron.pipeline_costs import LayerCost, in_whole_mib
from searchers.galvatron.released_time import ReleasedTime
from searchers.galvatron.stage_table import Floats, StageTable
from searchers.galvatron.strategies import Strategy


class _Columns(NamedTuple):
    """What a layer costs under each strategy, float64[S] each, inf where one cannot be used; as of `LayerCost`."""

    step_s: Floats
    sync_s: Floats
    forward_bytes: Floats
    backward_bytes: Floats
    state_bytes: Floats
    optimizer_bytes: Floats
    sent_bytes: Floats
    received_bytes: Floats
    early_bytes: Floats


_fields_of = attrgetter(*_Columns._fields)


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
        self._untied_of: dict[int, Floats] = {}
        self._rows: dict[object, list[LayerCost | None]] = {}
        self._columns_of: dict[object, _Columns] = {}
        self._moves: dict[object, Floats] = {}

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
    ) -> StageTable:
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
        waits, own_ties = self._waits([group[0] for group in groups], ties)
        alike: dict[object, int] = {}
        for number, (group, known) in enumerate(zip(groups, ties, strict=True)):
            waiting = tuple((holder.kind, shared) for holder, shared in waits[number])
            ends = number == 0, number == len(groups) - 1
            key = (group[0].kind, len(group), known & self.ties(group[0]), own_ties[number], waiting, ends)
            first = alike.setdefault(key, number)
            if first != number:
                for column in (cost, kept, backward, forward):
                    column[number] = column[first]
                continue
            row = self._columns(group[0], cut.samples, several, known)
            last = row if cut.last is None else self._columns(group[0], cut.last, several, known)
            size = len(group)
            if timed is None:
                seconds = weight * row.step_s
                if apart is not None:
                    seconds += last.step_s
                seconds += last.sync_s
            else:
                layer_s = [timed.layer_s(group[0].kind, strategy, cut.batch) for strategy in self.strategies]
                seconds = np.where(np.isfinite(row.step_s + last.step_s), layer_s, np.inf)
            cost[number] = size * seconds
            if released:
                kept[number] = size * in_whole_mib(held * row.forward_bytes + row.state_bytes)
                forward[number] = 0.0
            else:
                least = row.optimizer_bytes if steps else 0.0
                kept[number] = size * (np.maximum(held * row.forward_bytes, least) + row.state_bytes)
                if number == 0:
                    kept[number] += held * row.received_bytes
                if sends and number == len(groups) - 1:
                    kept[number] += held * row.sent_bytes
                forward[number] = size * row.forward_bytes
            own = self._waiting_bytes(group[0], own_ties[number], several)
            most = np.where(own > 0, np.maximum(row.backward_bytes, row.early_bytes + own), row.backward_bytes)
            backward[number] = most * (held if released else 1)
            for holder, shared in waits[number]:
                backward[number] += self._waiting_bytes(holder, shared, several)
        transition = np.zeros((len(groups), len(self.layouts), len(self.layouts)))
        if timed is not None:
            transition[1:] = self._released_transition(timed, cut.batch)
            return StageTable(cost, kept, backward, forward, self._layout_of, transition)
        for number in range(1, len(groups)):
            before = groups[number - 1][0]
            transition[number] = weight * self._transition(before, cut.samples, several)
            if apart is not None:
                transition[number] += self._transition(before, apart, several)
        return StageTable(cost, kept, backward, forward, self._layout_of, transition)

    def costs_of(
        self, layers: Sequence[Layer], chosen: Sequence[Strategy], samples: int, accumulates: bool
    ) -> list[LayerCost] | None:
        """Return what the layers of a stage cost together, or None where one cannot be cut so.

        Args:
            layers: Of the stage.
            chosen: Their strategies.
            samples: Samples of a microbatch over the whole stage.
            accumulates: More than one microbatch.
        """
        costs = []
        held: dict[tuple[str, Hashable], int] = {}
        waiting, shared = [0.0] * len(layers), list[frozenset[str]]()
        known: dict[tuple[int, Strategy, frozenset[str]], LayerCost | None] = {}
        for number, (layer, strategy) in enumerate(zip(layers, chosen, strict=True)):
            ties = frozenset[str]()
            if self.ties(layer):
                own = self.estimator.tied_layouts(layer, strategy).items()
                ties = frozenset(tie for tie, layout in own if (tie, layout) in held)
                for tie, layout in own:
                    before = held.get((tie, layout), number)
                    held[tie, layout] = number
                    for place in range(before, number):
                        waiting[place] += self.estimator.waiting_bytes(
                            layers[before], [tie], chosen[before], accumulates=accumulates
                        )
            key = (layer.kind, strategy, ties)
            if key not in known:
                known[key] = self.estimator.layer(layer, strategy, samples, accumulates=accumulates, held_ties=ties)
            cost = known[key]
            if cost is None:
                return None
            shared.append(ties)
            costs.append(cost)
        if any(waiting):
            for number, (layer, strategy) in enumerate(zip(layers, chosen, strict=True)):
                last = [tie for (tie, _), at in held.items() if at == number and tie in shared[number]]
                own_bytes = self.estimator.waiting_bytes(layer, last, strategy, accumulates=accumulates)
                early_bytes = costs[number].early_bytes + own_bytes
                most = max(costs[number].backward_bytes, early_bytes) if last else costs[number].backward_bytes
                costs[number] = replace(costs[number], backward_bytes=most + waiting[number])
        return costs

    def least(self, layers: Sequence[Layer], samples: int, accumulates: bool) -> Floats:
        """Return what layers that share a strategy cost at least: float64[3, strategies], inf where one cannot have it.

        Their steps in seconds, and bytes that they keep: for a microbatch in flight, and of what is not tied for good.
        """
        total = np.zeros((3, len(self.strategies)))
        for kind, count in Counter(layer.kind for layer in layers).items():
            example = self.estimator.profiles.examples[kind]
            own = self._columns(example, samples, accumulates, frozenset())
            state_bytes = own.state_bytes * self._untied_share(example)
            total += count * np.array([own.step_s, own.forward_bytes, state_bytes])
        return total

    def _untied_share(self, layer: Layer) -> Floats:
        """Return the share of a layer's parameters that is not tied, by strategy: float64[S], 1 where it cannot be."""
        if layer.kind not in self._untied_of:
            share = dict.fromkeys({strategy.tensor for strategy in self.strategies}, 1.0)
            for tensor in share if self.ties(layer) else ():
                with suppress(ValueError):  # the degree does not divide this layer
                    elements = self.estimator.profiles.parameters(layer.kind, tensor)
                    share[tensor] = elements[""] / max(1, sum(elements.values()))
            self._untied_of[layer.kind] = np.array([share[strategy.tensor] for strategy in self.strategies])
        return self._untied_of[layer.kind]

    def _waits(
        self, layers: Sequence[Layer], held: Sequence[frozenset[str]]
    ) -> tuple[list[list[tuple[Layer, frozenset[str]]]], list[frozenset[str]]]:
        """Return whose gradients wait, for each layer of a stage.

        Args:
            layers: Of the stage.
            held: What the stage holds already before each.

        Returns:
            Layers up to it with those of their tied gradients that later ones have made; and its own, which wait for
            earlier layers', if none behind has made them.
        """
        behind, found, own_last = frozenset[str](), [], []
        holders = [number for number, layer in enumerate(layers) if self.ties(layer)]
        for number in range(len(layers) - 1, -1, -1):
            missing, own = behind, []
            for place in holders if behind else ():
                ties = missing & self.ties(layers[place]) if place <= number else None
                if ties:
                    own.append((layers[place], ties))
                    missing -= ties
            found.append(own)
            shared = held[number] & self.ties(layers[number])
            own_last.append(shared - behind)
            behind |= shared
        return found[::-1], own_last[::-1]

    def _waiting_bytes(self, holder: Layer, ties: frozenset[str], accumulates: bool) -> Floats:
        """Return bytes of tied gradients that wait for a layer's under each strategy: float64[S]."""
        if not ties:
            return np.zeros(len(self.strategies))
        return np.array(
            [self.estimator.waiting_bytes(holder, ties, each, accumulates=accumulates) for each in self.strategies]
        )

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

    def _columns(self, layer: Layer, samples: int, accumulates: bool, ties: frozenset[str]) -> _Columns:
        key = (layer.kind, samples, accumulates, ties & self.ties(layer))
        if key not in self._columns_of:
            row = self._row(layer, samples, accumulates, ties)
            unusable = (np.inf,) * len(_Columns._fields)
            costs = [unusable if cost is None else _fields_of(cost) for cost in row]
            self._columns_of[key] = _Columns(*np.array(costs).T)
        return self._columns_of[key]

    def _released_transition(self, timed: ReleasedTime, batch: int) -> Floats:
        """Return what the release takes from layout to layout for a batch: float64[K, K]."""
        lying = {strategy.layout: strategy for strategy in self.strategies}
        return np.array(
            [[timed.transition_s(lying[one], lying[two], batch) for two in self.layouts] for one in self.layouts]
        )

    def _transition(self, layer: Layer, samples: int, accumulates: bool) -> Floats:
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
