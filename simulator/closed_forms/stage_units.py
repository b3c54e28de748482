"""How a stage's gathers and reductions lie in its passes: by units, by buckets, or some of each."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from simulator.compiled_cache import also_compiled


class StageUnits(NamedTuple):
    """How many units a stage has, and where those are that gather parameters before use.

    Attributes:
        num_others, num_root: Units without and of the root.
        gathered_others, gathered_root: Of these, those that gather; others hold all of their parameters.
        others_before, others_behind: Of ``num_others``, before the first of them that gathers and behind the last.
        num_whole: Units that do not gather.
        before_whole, behind_whole: Units before the first of these and behind the last.
    """

    num_others: int
    num_root: int
    gathered_others: int
    gathered_root: int
    others_before: int
    others_behind: int
    num_whole: int
    before_whole: int
    behind_whole: int


NO_UNITS = StageUnits(*[0] * 9)


@also_compiled
def with_unit(units: StageUnits, in_root: bool, gathers: bool) -> StageUnits:
    """Return the units of a stage with the next one.

    Args:
        units: Those before.
        in_root, gathers: The unit is of the root; it gathers parameters before use.

    >>> units = NO_UNITS
    >>> for gathers in (False, False, True, True, False):
    ...     units = with_unit(units, False, gathers)
    >>> units.gathered_others, units.others_before, units.others_behind, units.before_whole, units.behind_whole
    (2, 2, 1, 0, 0)
    """
    num_others, num_root, gathered_others, gathered_root, before, behind, num_whole, before_whole, behind_whole = units
    if in_root:
        num_root, gathered_root = num_root + 1, gathered_root + (1 if gathers else 0)
    elif gathers:
        num_others, gathered_others, behind = num_others + 1, gathered_others + 1, 0
    else:
        num_others, behind = num_others + 1, behind + 1
        before += 1 if gathered_others == 0 else 0
    if not gathers:
        num_whole, behind_whole = num_whole + 1, 0
    else:
        behind_whole += 1
        before_whole += 1 if num_whole == 0 else 0
    return StageUnits(
        num_others, num_root, gathered_others, gathered_root, before, behind, num_whole, before_whole, behind_whole
    )


@also_compiled
def num_whole_reduced(units: StageUnits, is_mixed: bool) -> float:
    """Return by how many reductions gradients of whole parameters go where each unit is reduced by itself.

    The root's go at once.

    Args:
        units: Of the stage.
        is_mixed: Some units gather parameters; else none does.

    >>> units = StageUnits(16, 2, 4, 0, 0, 12, 14, 4, 0)
    >>> num_whole_reduced(units, True), num_whole_reduced(units, False)
    (13.0, 17.0)
    """
    if not is_mixed:
        return float(max(1, units.num_others + min(units.num_root, 1)))
    of_root = units.num_root - units.gathered_root
    return float(max(1, units.num_whole - of_root + min(of_root, 1)))


@also_compiled
def calls_of_unit(num_units: int, num_large: float, share: float) -> float:
    """Return by how many calls a unit's parameters are gathered: one, or one for each that is large.

    Args:
        num_units, num_large: Units of the stage, and its parameters that are gathered by calls of their own.
        share: What part of the stage's parameters is gathered so.

    >>> calls_of_unit(4, 24.0, 1.0), calls_of_unit(4, 24.0, 0.1), calls_of_unit(4, 0.0, 1.0)
    (6.0, 1.0, 1.0)
    """
    return max(1.0, num_large * share / num_units)


def filled_buckets(elements: float, bucket_elements: float) -> float:
    """Return what part of a bucket's reduction the gradient of a tensor is: one where it fills a bucket alone.

    Else as many go into one as it takes until it is full, as if all were of its size.

    >>> filled_buckets(100.0, 25.0), filled_buckets(10.0, 25.0), filled_buckets(10.0, float("inf"))
    (1.0, 0.3333333333333333, 0.0)
    """
    return 1.0 / ceil(bucket_elements / elements) if bucket_elements < float("inf") else 0.0


def bucket_shares(num_buckets: float, begun_share: float) -> tuple[float, float, float]:
    """Return in how many buckets a stage reduces its gradients, and ``first_share`` and ``last_share`` of ``Sent``.

    The last bucket has as many gradients as the others, or all of the stage's first parameters if that is more: a table
    of embeddings is not cut.

    Args:
        num_buckets: The sum of ``filled_buckets``.
        begun_share: Of the gradients, those of the first operator that has any.

    >>> bucket_shares(4.0, 0.1), bucket_shares(4.0, 0.4), bucket_shares(0.5, 0.1)
    ((4.0, 0.25, 0.25), (4.0, 0.25, 0.4), (1.0, 1.0, 1.0))
    """
    if num_buckets <= 1.0:
        return 1.0, 1.0, 1.0
    return num_buckets, 1.0 / num_buckets, max(1.0 / num_buckets, begun_share)


def unit_shares(num_others: int, num_root: int, begins_in_root: bool, root_share: float) -> tuple[float, float, float]:
    """Return what ``bucket_shares`` does where each unit is reduced by itself, and the root at once.

    Args:
        num_others, num_root: Units of the stage, without and of the root.
        begins_in_root: The first unit is of the root, whose gradients are complete when it has been passed.
        root_share: What part of the stage's parameters is of the root.

    >>> unit_shares(7, 0, False, 0.0), unit_shares(3, 2, True, 0.4)
    ((7.0, 0.14285714285714285, 0.14285714285714285), (4.0, 0.25, 0.4))
    """
    count = float(max(1, num_others + min(num_root, 1)))
    return count, 1.0 / count, root_share if begins_in_root and root_share > 0.0 else 1.0 / count


class ReductionShares(NamedTuple):
    """How reductions of gradients lie in a backward pass: attributes of these names of ``Sent``."""

    first_share: float
    last_share: float
    late_share: float = 0.0
    late_left: float = 1.0


@also_compiled
def level_shares(before: int, count: int, share: float) -> ReductionShares:
    """Return how reductions lie where those of each ZeRO level go at once, when the level's gradients are all there.

    Args:
        before: Operators of the stage before the first one of the level that begins last.
        count: Operators of the stage.
        share: What part of all reductions that of the level takes which begins first.

    Eight of 32 layers, of one level, before 24 of another:

    >>> tuple(level_shares(8, 32, 0.4))
    (0.75, 0.4, 0.0, 1.0)
    """
    return ReductionShares(1.0 - before / count, share, 0.0, 1.0)


@also_compiled
def unit_level_shares(
    shares: ReductionShares, num_units: float, before: float, share: float, elements: float
) -> ReductionShares:
    """Return how reductions lie where units are reduced by themselves, those of each ZeRO level by another collective.

    Args:
        shares: As if all took equally long.
        num_units: How many there are.
        before: What part of the stage lies before the first operator of the level that begins last.
        share: What part of all reductions that of the level takes which begins first.
        elements: What part of all gradients that level has.

    Half of 32 units, whose all-reduces take twice what the scatters of those behind do: when the first of them is
    through, 15 units of the pass are left, and two thirds of the seconds.

    >>> found = unit_level_shares(ReductionShares(1 / 32, 1 / 32), 32.0, 0.5, 2 / 3, 0.5)
    >>> [round(value, 4) for value in found]
    [0.0312, 0.0417, 0.6667, 0.4688]
    """
    late = share * min(1.0, before / elements) if elements > 0.0 else 0.0
    last = shares.last_share if before <= 0.0 else max(shares.last_share, late / max(1.0, before * num_units))
    return ReductionShares(shares.first_share, last, late, max(0.0, before - 1.0 / num_units) if late > 0.0 else 1.0)


@also_compiled
def mixed_shares(
    units: StageUnits, last_of_units: float, first_of_whole: float, last_of_whole: float, whole: float
) -> ReductionShares:
    """Return how reductions lie where some units are reduced by themselves, others not.

    Args:
        units: Of the stage; some are of either.
        last_of_units: ``last_share`` of those by themselves, as ``unit_shares`` has it.
        first_of_whole, last_of_whole: Of the others, as ``bucket_shares`` has them.
        whole: What part of all reductions theirs take.

    Four units by themselves before twelve, whose gradients are reduced at once when all are there; and behind them:

    >>> units = StageUnits(16, 0, 4, 0, 0, 12, 12, 4, 0)
    >>> tuple(mixed_shares(units, 0.25, 1.0, 1.0, 0.75))
    (0.75, 0.0625, 1.0, 0.25)
    >>> tuple(mixed_shares(units._replace(others_behind=0, before_whole=0, behind_whole=4), 0.25, 1.0, 1.0, 0.75))
    (0.0625, 0.75, 0.0, 1.0)
    """
    count, by_unit = max(1, units.num_others + units.num_root), 1.0 - whole
    first = (units.others_behind + 1.0) / count if units.gathered_others > 0 else 1.0
    if whole <= 0.0:
        return ReductionShares(first, last_of_units, 0.0, 1.0)
    span = count - units.before_whole - units.behind_whole
    first = min(first, (units.behind_whole + first_of_whole * span) / count)
    if units.before_whole == 0:
        return ReductionShares(first, whole * last_of_whole, 0.0, 1.0)
    late = whole * last_of_whole + by_unit * units.before_whole / max(1, count - units.num_whole)
    return ReductionShares(first, by_unit * last_of_units, late, units.before_whole / count)
