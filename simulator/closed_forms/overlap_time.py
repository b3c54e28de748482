"""Closed form of what a stage sends beside its passes: gathers one unit ahead, and reductions behind gradients.

While computation and communication both run, both are slower by the device's factors, as in the engine; what is left of
the longer then runs alone. Units count as equal, and gathers and reductions as sharing their links in full.

Source: the engine's rules (``docs/model.md``); slowing both sides down is Galvatron-BMW's (TKDE 2024, Section V).
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from simulator.compiled_cache import also_compiled

NEXT_TO_NOTHING_BYTES = 1.0
"""Of a collective that shows what one more call takes, beside what its bytes do."""


class Sent(NamedTuple):
    """What a stage sends beside its passes, and what it copies for that, in seconds.

    Attributes:
        root_s: Gathers before a forward pass that nothing hides.
        gathered_s: The other gathers of either pass of a microbatch.
        root_copied_s, gathered_copied_s: Copying what either gathered into parameters.
        reduced_s: A reduction of all gradients.
        copied_s, copied_back_s: Copying them for it, and back.
        unit_share: What a unit is of a pass, all units alike.
        first_share: What part of a backward pass has gone before the first gradients are reduced.
        last_share: What part of the gradients is there when it has ended, and not before.
        computation_slowdown, communication_slowdown: Factors while both run.
        gathered_latency_s, reduced_latency_s: Of ``gathered_s`` and ``reduced_s``, before bytes move.
        gathered_share: What part of a pass the units are that gather.
        begins_whole, ends_whole: The first of them has a unit before it that does not, or the last one behind it.
        late_share, late_left: Where only some units gather, what part of the gradients is reduced once no more than
            that of a backward pass is left: those of the other units that are there last.
    """

    root_s: float
    gathered_s: float
    root_copied_s: float
    gathered_copied_s: float
    reduced_s: float
    copied_s: float
    copied_back_s: float
    unit_share: float
    first_share: float
    last_share: float
    computation_slowdown: float
    communication_slowdown: float
    gathered_latency_s: float = 0.0
    reduced_latency_s: float = 0.0
    gathered_share: float = 1.0
    begins_whole: bool = False
    ends_whole: bool = False
    late_share: float = 0.0
    late_left: float = 1.0


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
def together_s(gathered_s: float, gathered_latency_s: float, reduced_s: float, reduced_latency_s: float) -> float:
    """Return the seconds of gathers and reductions that begin together and share their links.

    While the longer of them is on its way the other's bytes delay it, but for what falls into its latencies.

    Args:
        gathered_s, reduced_s: Either alone, one call after the other.
        gathered_latency_s, reduced_latency_s: Of these, before bytes move.

    >>> together_s(2.0, 0.0, 1.0, 0.0), together_s(2.0, 1.0, 1.0, 0.0), together_s(2.0, 1.0, 1.0, 1.0)
    (3.0, 2.5, 2.0)
    """
    if gathered_s < reduced_s:
        return reduced_s + max(0.0, gathered_s - gathered_latency_s) * max(0.0, 1.0 - reduced_latency_s / reduced_s)
    if gathered_s <= 0.0:
        return 0.0
    return gathered_s + max(0.0, reduced_s - reduced_latency_s) * max(0.0, 1.0 - gathered_latency_s / gathered_s)


@also_compiled
def beside_s(computed_s: float, sent_s: float, computation_slowdown: float, communication_slowdown: float) -> float:
    """Return the seconds until both are through that begin together.

    >>> beside_s(4.0, 1.0, 1.0, 1.0), beside_s(4.0, 1.0, 2.0, 1.0), beside_s(1.0, 5.0, 1.0, 2.0)
    (4.0, 4.5, 5.5)
    """
    if sent_s * communication_slowdown <= computed_s * computation_slowdown:
        return computed_s + sent_s * communication_slowdown * (1.0 - 1.0 / computation_slowdown)
    return sent_s + computed_s * computation_slowdown * (1.0 - 1.0 / communication_slowdown)


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


class SendingRules(NamedTuple):
    """How a stage sends.

    Attributes:
        prefetches: A unit's parameters are gathered while the one before computes.
        reshards: They are gathered for each pass; else for the first forward pass alone.
        overlaps: Passes go on while gradients are reduced.
        every: Each microbatch's gradients are reduced, not only the sums of all.
        waits: If so, the next pass waits for them.
    """

    prefetches: bool
    reshards: bool
    overlaps: bool
    every: bool
    waits: bool


class Passes(NamedTuple):
    """What the passes of a stage take, in seconds.

    Attributes:
        forward, backward: Of a microbatch.
        inline: Of that, reductions and copies of gradients within the backward pass.
        reduced: Reductions of a microbatch that the stage waits for behind its backward pass.
        first: What the first forward pass takes besides.
        once: Reductions that are left when all microbatches are through.
    """

    forward: float
    backward: float
    inline: float
    reduced: float
    first: float
    once: float


@also_compiled
def inline_s(sent: Sent, rules: SendingRules) -> tuple[float, float]:
    """Return the seconds of what a backward pass has to do with gradients, and of that, at its end."""
    if not rules.every:
        return 0.0, 0.0
    if rules.overlaps:
        return sent.copied_s, 0.0
    reduced_s = sent.reduced_s + sent.copied_back_s
    return sent.copied_s + reduced_s, sent.last_share * reduced_s


@also_compiled
def hidden_share(sent: Sent, begins_whole: bool) -> float:
    """Return what part of a pass the units are beside which the next one is gathered.

    Args:
        sent: What the stage sends.
        begins_whole: In the pass's order, a unit without gathers comes before the first one that has some.

    >>> sent = Sent(0.0, 1.0, *[0.0] * 5, 1 / 8, *[1.0] * 4)
    >>> hidden_share(sent, False), hidden_share(sent._replace(gathered_share=0.5), True)
    (0.875, 0.5)
    """
    if sent.gathered_s <= 0.0:
        return 0.0
    return sent.gathered_share if begins_whole else max(0.0, sent.gathered_share - sent.unit_share)


@also_compiled
def gathered_s(forward_s: float, backward_s: float, sent: Sent, rules: SendingRules) -> tuple[float, float, float]:
    """Return the seconds of a forward and a backward pass with the gathers of each, and of one that gathers for all.

    Args:
        forward_s, backward_s: What a microbatch computes.
        sent, rules: What is sent beside, and how.

    Three layers, each gathered in a second, computed in one and two:

    >>> sent = Sent(0.0, 3.0, 0.0, 0.0, 3.0, 0.0, 0.0, 1 / 3, 1 / 3, 1 / 3, 1.0, 1.0)
    >>> gathered_s(3.0, 6.0, sent, SendingRules(False, True, False, False, False))
    (6.0, 9.0, 0.0)
    >>> gathered_s(3.0, 6.0, sent, SendingRules(True, True, False, False, False))
    (4.0, 7.0, 0.0)
    >>> gathered_s(3.0, 6.0, sent, SendingRules(True, False, False, True, False))  # and reduced in three
    (3.0, 9.0, 4.0)

    Behind three more, that do not gather:

    >>> sent = sent._replace(unit_share=1 / 6, gathered_share=0.5, begins_whole=True)
    >>> gathered_s(6.0, 12.0, sent, SendingRules(True, True, False, False, False))
    (6.0, 13.0, 0.0)
    """
    slow_s, slow_sent_s = sent.computation_slowdown, sent.communication_slowdown
    gathering_s = forward_s + sent.gathered_copied_s
    returning_s = backward_s + (sent.gathered_copied_s if rules.reshards else 0.0)
    passed_s, returned_s = gathering_s + sent.gathered_s, returning_s + sent.gathered_s
    if rules.prefetches and sent.gathered_s > 0.0:
        # Whichever way, each unit's gather beside the unit before it, if there is one.
        hidden = hidden_share(sent, sent.begins_whole)
        ahead_s = hidden / sent.gathered_share * sent.gathered_s
        passed_s = (1.0 - hidden) * gathering_s + sent.gathered_s - ahead_s
        passed_s += beside_s(hidden * gathering_s, ahead_s, slow_s, slow_sent_s)
        hidden = hidden_share(sent, sent.ends_whole)
        ahead_s = hidden / sent.gathered_share * sent.gathered_s
        returned_s = (1.0 - hidden) * returning_s + sent.gathered_s - ahead_s
        returned_s += beside_s(hidden * returning_s, ahead_s, slow_s, slow_sent_s)
    passed_s += sent.root_s + sent.root_copied_s
    inline, _ = inline_s(sent, rules)
    if rules.reshards:
        return passed_s, returned_s + inline, 0.0
    return forward_s, backward_s + inline, passed_s


@also_compiled
def after_head_start_s(first_s: float, sent: Sent, forward_s: float, prefetches: bool) -> float:
    """Return what the first forward pass takes besides where its first unit, or two, were gathered before it began.

    Args:
        first_s: What it would, were they gathered like the others (``Passes.first``).
        sent: What the stage sends.
        forward_s: What a forward pass computes.
        prefetches: Units are gathered one ahead, so two of them; else one.

    Three units of one second, each gathered in two, take 7 s in all, and 4 with the head start, for 3:

    >>> after_head_start_s(4.0, Sent(0.0, 6.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1 / 3, 1.0, 1.0, 1.0, 1.0), 3.0, True)
    1.0
    """
    if sent.begins_whole:
        return first_s
    unit_s, computed_s = sent.unit_share / sent.gathered_share * sent.gathered_s, sent.unit_share * forward_s
    return max(0.0, first_s - (max(unit_s, 2.0 * unit_s - computed_s) if prefetches else unit_s))


@also_compiled
def with_reductions_s(
    forward_s: float,
    backward_s: float,
    passed_s: float,
    returned_s: float,
    gathering_s: float,
    sent: Sent,
    rules: SendingRules,
) -> Passes:
    """Return what the passes of a stage take with what it sends beside them.

    Args:
        forward_s, backward_s: What a microbatch computes.
        passed_s, returned_s, gathering_s: As ``gathered_s`` has them, or of a host that takes longer.
        sent, rules: What is sent beside, and how.

    Three layers, each computed in one and two seconds, and reduced in one:

    >>> sent = Sent(0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 1.0, 1 / 3, 1 / 3, 1.0, 1.0)
    >>> with_reductions_s(3.0, 6.0, 3.0, 6.0, 0.0, sent, SendingRules(False, True, False, False, False)).once
    3.0
    >>> with_reductions_s(3.0, 6.0, 3.0, 6.0, 0.0, sent, SendingRules(False, True, True, False, False)).once
    1.0
    >>> with_reductions_s(3.0, 6.0, 3.0, 6.0, 4.0, sent, SendingRules(False, False, True, True, True))
    Passes(forward=3.0, backward=6.0, inline=0.0, reduced=1.0, first=1.0, once=0.0)
    """
    slow_s, slow_sent_s = sent.computation_slowdown, sent.communication_slowdown
    first_s, (inline, _) = max(0.0, gathering_s - passed_s), inline_s(sent, rules)
    if not rules.overlaps:
        once_s = 0.0 if rules.every else sent.copied_s + sent.reduced_s + sent.copied_back_s
        return Passes(passed_s, returned_s, inline, 0.0, first_s, once_s)
    root_s, ahead_s, alone_s, gathered_copied_s = 0.0, 0.0, 0.0, 0.0
    if rules.reshards:
        root_s, gathered_copied_s = sent.root_s, sent.gathered_copied_s
        forward_s += sent.root_copied_s + gathered_copied_s
        ahead_s = sent.gathered_s if rules.prefetches else 0.0
        alone_s = sent.gathered_s - ahead_s
    # The pass that reduces, of the device; then what travels once the first gradients are there, if hosts take longer.
    backward_s += gathered_copied_s + sent.copied_s
    reducing_pass_s = returned_s if rules.every else returned_s + sent.copied_s
    share, last_s = sent.first_share, sent.last_share * sent.reduced_s
    one = 1.0 - hidden_share(sent, sent.ends_whole) / sent.gathered_share
    latency_s, reduced_latency_s = sent.gathered_latency_s, sent.reduced_latency_s
    before, ahead, rest = share * (1.0 - one), (1.0 - share) * (1.0 - one), 1.0 - sent.last_share
    meanwhile_s = together_s(ahead * ahead_s, ahead * latency_s, rest * sent.reduced_s, rest * reduced_latency_s)
    reducing_s = alone_s + one * ahead_s + beside_s(share * backward_s, before * ahead_s, slow_s, slow_sent_s)
    reducing_s += beside_s((1.0 - share) * backward_s, meanwhile_s, slow_s, slow_sent_s) + last_s
    reducing_s = max(reducing_s, share * reducing_pass_s + meanwhile_s + last_s)
    reducing_s = max(reducing_s, (1.0 - sent.late_left) * reducing_pass_s + sent.late_share * sent.reduced_s)
    left_s = max(last_s, reducing_s - reducing_pass_s)
    left_s = max(left_s + sent.last_share * sent.copied_back_s, sent.copied_back_s)
    if not rules.every:
        return Passes(passed_s, returned_s, inline, 0.0, first_s, sent.copied_s + left_s)
    if rules.waits:
        return Passes(passed_s, returned_s, inline, left_s, first_s, 0.0)
    # Reductions go on beside the passes of the next microbatch; the last one and the first gather share links.
    shared_s = min(root_s, last_s)
    both_s = root_s + 2.0 * alone_s + shared_s
    sent_s = together_s(2.0 * ahead_s, 2.0 * latency_s, sent.reduced_s - shared_s, reduced_latency_s)
    both_s += beside_s(forward_s + backward_s, sent_s, slow_s, slow_sent_s)
    reduced_s = max(0.0, both_s - passed_s - returned_s)
    return Passes(passed_s, returned_s, inline, reduced_s, first_s, max(0.0, left_s - reduced_s))
