"""Table 1 of the paper as a registry: what each reconfiguration trades, and what it does.

A primitive is data (its effect on three resources) and a function from a configuration and a stage to the
configurations that it may become, arguments chosen. A new primitive is one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

from searchers.aceso.balance import balanced, load_order, migrated, relayed
from searchers.aceso.configuration import Configuration, StageChoice, respects_nodes
from searchers.aceso.model import PerformanceModel
from searchers.aceso.prices import Price

MAX_PARTNERS = 12
UP, SAME, DOWN = 1, 0, -1


@dataclass(frozen=True)
class Move:
    """What a primitive is given.

    Attributes:
        model: Prices.
        configuration, price: What it starts from.
        stage: The stage to relieve.
        balances: Whether borders may all move at once (ours) or relay by relay (the paper's).
        exchanges: Whether degrees inside a stage may trade places (ours); the paper's partners are other stages.
    """

    model: PerformanceModel
    configuration: Configuration
    price: Price
    stage: int
    balances: bool = True
    exchanges: bool = True


Apply = Callable[[Move], Iterator[Configuration]]


@dataclass(frozen=True)
class Primitive:
    """A row of Table 1.

    Attributes:
        name: As in the paper.
        computation, communication, memory: 1 up, 0 the same, -1 down, for the stage it is applied to.
        inverse: Name of the primitive that undoes it.
        apply: Yields the configurations it can lead to, likely better ones first.
        searched: The search picks it itself; else it is a partner's side of another, or attached to all others.
        moves_load: Devices or degrees change, so that borders are moved afterwards.
    """

    name: str
    computation: int
    communication: int
    memory: int
    inverse: str
    apply: Apply
    searched: bool = True
    moves_load: bool = True

    def effect(self, resource: str) -> int:
        """Return the effect on ``computation``, ``communication`` or ``memory``."""
        effect: int = getattr(self, resource)
        return effect


RESOURCES = ("computation", "communication", "memory")
PRIMITIVES: dict[str, Primitive] = {}


def register(primitive: Primitive) -> Primitive:
    """Make a primitive known."""
    if primitive.name in PRIMITIVES:
        raise ValueError(f"primitive {primitive.name!r} is registered twice")
    PRIMITIVES[primitive.name] = primitive
    return primitive


def _shed_operators(move: Move) -> Iterator[Configuration]:
    """dec-op#: operators leave the stage; the neighbours' inc-op# is the partner side."""
    found = (
        balanced(move.model, move.configuration)
        if move.balances
        else relayed(move.model, move.configuration, move.price, move.stage)
    )
    if found != move.configuration:
        yield found
    single = migrated(move.model, move.configuration, move.price, move.stage)
    if single is not None and single != found:
        yield single


def _take_operators(move: Move) -> Iterator[Configuration]:
    """inc-op#: the stage takes an operator from each neighbour that has more than one."""
    cuts = list(move.configuration.cuts)
    for border, shift in ((move.stage, -1), (move.stage + 1, 1)):
        if not 0 < border < len(cuts) - 1:
            continue
        changed = list(cuts)
        changed[border] += shift
        if all(later > earlier for earlier, later in pairwise(changed)):
            yield move.configuration.with_cuts(changed)


def _change_microbatch(factor: float) -> Apply:
    """inc/dec-mbs: another aggregate microbatch; every stage takes the degrees that suit it best."""

    def apply(move: Move) -> Iterator[Configuration]:
        model, configuration = move.model, move.configuration
        microbatch = int(configuration.microbatch * factor)
        if microbatch < 1 or microbatch != configuration.microbatch * factor:
            return
        kept = Configuration(microbatch, configuration.stages)
        fitted = []
        start = first = 0
        for position, stage in enumerate(configuration.stages):
            options = [
                stage.with_degree(tp) for tp in model.space.degrees if model.allows(stage.gpus, tp, microbatch)
            ]
            if not options:
                return
            fitted.append(
                min(
                    options,
                    key=lambda option: _stage_cost(
                        model, option, start, position, len(configuration.stages), first, microbatch
                    ),
                )
            )
            start, first = start + stage.count, first + stage.gpus
        if all(
            model.allows(stage.gpus, run.tp, microbatch) for stage in configuration.stages for run in stage.runs
        ):
            yield kept
        chosen = Configuration(microbatch, tuple(fitted))
        if chosen != kept:
            yield chosen

    return apply


def _stage_cost(
    model: PerformanceModel,
    option: StageChoice,
    start: int,
    position: int,
    num_stages: int,
    first: int,
    microbatch: int,
) -> tuple[bool, float]:
    price = model.stage(option, start, position, num_stages, first, microbatch)
    fits = price.memory_bytes <= model.limit_bytes
    return not fits, price.time_s if fits else price.memory_bytes


def _grown(stage: StageChoice, *, tensor: bool) -> StageChoice:
    """Return a stage on twice as many GPUs: tensor degrees double, or replicas do."""
    runs = tuple(type(run)(run.count, run.tp * (2 if tensor else 1), run.partition) for run in stage.runs)
    return StageChoice(2 * stage.gpus, runs)


def _shrunk(stage: StageChoice, *, tensor: bool) -> StageChoice | None:
    """Return a stage on half as many GPUs, or None if a degree cannot be halved."""
    if stage.gpus == 1 or any((run.tp if tensor else stage.gpus // run.tp) == 1 for run in stage.runs):
        return None
    runs = tuple(type(run)(run.count, run.tp // (2 if tensor else 1), run.partition) for run in stage.runs)
    return StageChoice(stage.gpus // 2, runs)


def _take_gpus(*, tensor: bool) -> Apply:
    """inc-dp, inc-tp: the stage doubles; partners halve a degree (dec-dp or dec-tp) until GPUs balance.

    Within the stage the two may trade without partners: inc-tp with dec-dp.
    """

    def apply(move: Move) -> Iterator[Configuration]:
        own = move.configuration.stages[move.stage]
        exchanged = _shrunk(own, tensor=not tensor) if move.exchanges else None
        if exchanged is not None:
            yield from _legal(move, [(move.stage, _grown(exchanged, tensor=tensor))])
        grown = _grown(own, tensor=tensor)
        if grown.gpus > move.model.per_node:
            return
        yield from _with_partners(move, grown, own.gpus, gives=True)

    return apply


def _give_gpus(*, tensor: bool) -> Apply:
    """dec-dp, dec-tp: the stage halves; partners double."""

    def apply(move: Move) -> Iterator[Configuration]:
        own = move.configuration.stages[move.stage]
        shrunk = _shrunk(own, tensor=tensor)
        if shrunk is None:
            return
        if move.exchanges:
            yield from _legal(move, [(move.stage, _grown(shrunk, tensor=not tensor))])
        yield from _with_partners(move, shrunk, own.gpus // 2, gives=False)

    return apply


def _with_partners(move: Move, changed: StageChoice, amount: int, *, gives: bool) -> Iterator[Configuration]:
    """Yield configurations where one partner, or two, give or take ``amount`` GPUs, the idlest first.

    Where that cannot be, partners are added until GPUs balance.
    """
    stages = move.configuration.stages
    order = [position for position in reversed(load_order(move.price)) if position != move.stage]
    if not gives:
        order.reverse()
    options: dict[int, list[tuple[int, StageChoice]]] = {}
    for position in order:
        for tensor in (False, True):
            found = _shrunk(stages[position], tensor=tensor) if gives else _grown(stages[position], tensor=tensor)
            if found is not None and found.gpus <= move.model.per_node and _is_known(move, found):
                freed = abs(found.gpus - stages[position].gpus)
                options.setdefault(freed, []).append((position, found))
    yielded = 0
    singles = [[option] for option in options.get(amount, [])]
    halves = options.get(amount // 2, []) if amount > 1 else []
    pairs = [[one, other] for one, other in combinations(halves, 2) if one[0] != other[0]]
    for partners in [*singles, *pairs]:
        for configuration in _legal(move, [(move.stage, changed), *partners]):
            yield configuration
            yielded += 1
        if yielded >= MAX_PARTNERS:
            return
    if not yielded:
        for partners in _many_partners(options, amount):
            yield from _legal(move, [(move.stage, changed), *partners])


def _many_partners(
    options: dict[int, list[tuple[int, StageChoice]]], amount: int
) -> Iterator[list[tuple[int, StageChoice]]]:
    """Yield three or more partners that change ``amount`` GPUs together: large shares first, then in order."""
    for largest in sorted((size for size in options if size < amount), reverse=True):
        for first in options[largest]:
            chosen, left = [first], amount - largest
            for size in sorted((size for size in options if size <= largest), reverse=True):
                for option in options[size]:
                    if size <= left and all(option[0] != taken[0] for taken in chosen):
                        chosen.append(option)
                        left -= size
            if left == 0 and len(chosen) > 2:
                yield chosen


def _legal(move: Move, changes: list[tuple[int, StageChoice]]) -> Iterator[Configuration]:
    """Yield the changed configuration if the tables have its stages and none crosses a node's border."""
    configuration = move.configuration.replace_stages(changes)
    if not respects_nodes([stage.gpus for stage in configuration.stages], move.model.per_node):
        return
    if all(_is_known(move, stage) for _, stage in changes):
        yield configuration


def _is_known(move: Move, stage: StageChoice) -> bool:
    """Return whether the tables have what the stage would cost."""
    return all(move.model.allows(stage.gpus, run.tp, move.configuration.microbatch) for run in stage.runs)


def _recompute_more(move: Move) -> Iterator[Configuration]:
    """inc-rc: one more pair of operators is recomputed, the one with the largest activation not yet freed."""
    flags = bytearray(move.price.flags)
    start, stop = move.configuration.cuts[move.stage : move.stage + 2]
    arrays = move.model.tables.arrays
    cells = move.model.cells(move.configuration.stages[move.stage], move.configuration.microbatch)
    best, chosen = 0.0, -1
    for index in range(start, stop - 1):
        together = arrays.layer[index] == arrays.layer[index + 1] and arrays.may_free[index]
        if cells is None or not together or (flags[index] and flags[index + 1]):
            continue
        kept = float(arrays.columns[cells[index - start], 6, index])
        if kept > best:
            best, chosen = kept, index
    if chosen >= 0:
        flags[chosen] = flags[chosen + 1] = 1
        yield Configuration(move.configuration.microbatch, move.configuration.stages, bytes(flags))


def _recompute_less(move: Move) -> Iterator[Configuration]:
    """dec-rc: the last recomputed run of the stage is kept instead."""
    flags = bytearray(move.price.flags)
    start, stop = move.configuration.cuts[move.stage : move.stage + 2]
    index = stop - 1
    while index >= start and not flags[index]:
        index -= 1
    if index < start:
        return
    layer = move.model.tables.arrays.layer
    last = layer[index]
    while index >= start and flags[index] and layer[index] == last:
        flags[index] = 0
        index -= 1
    yield Configuration(move.configuration.microbatch, move.configuration.stages, bytes(flags))


register(Primitive("inc-op#", UP, SAME, UP, "dec-op#", _take_operators, searched=False))
register(Primitive("dec-op#", DOWN, SAME, DOWN, "inc-op#", _shed_operators, moves_load=False))
register(Primitive("inc-mbs", DOWN, SAME, UP, "dec-mbs", _change_microbatch(2)))
register(Primitive("dec-mbs", UP, SAME, DOWN, "inc-mbs", _change_microbatch(0.5)))
register(Primitive("inc-dp", DOWN, UP, DOWN, "dec-dp", _take_gpus(tensor=False)))
register(Primitive("dec-dp", UP, DOWN, UP, "inc-dp", _give_gpus(tensor=False)))
register(Primitive("inc-tp", DOWN, UP, DOWN, "dec-tp", _take_gpus(tensor=True)))
register(Primitive("dec-tp", UP, DOWN, UP, "inc-tp", _give_gpus(tensor=True)))
register(Primitive("inc-rc", UP, SAME, DOWN, "dec-rc", _recompute_more, searched=False, moves_load=False))
register(Primitive("dec-rc", DOWN, SAME, UP, "inc-rc", _recompute_less, searched=False, moves_load=False))
