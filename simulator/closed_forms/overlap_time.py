"""Closed form of what a stage sends beside its passes: gathers one unit ahead, and reductions behind gradients.

While computation and communication both run, both are slower by the device's factors, as in the engine; what is left of
the longer then runs alone. Units count as equal, and gathers and reductions as sharing their links in full, or as
travelling in turn.

Source: the engine's rules (``docs/model.md``); slowing both sides down is Galvatron-BMW's (TKDE 2024, Section V).
"""

from __future__ import annotations

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


class SendingRules(NamedTuple):
    """How a stage sends.

    Attributes:
        prefetches: A unit's parameters are gathered while the one before computes.
        reshards: They are gathered for each pass; else for the first forward pass alone.
        overlaps: Passes go on while gradients are reduced.
        every: Each microbatch's gradients are reduced, not only the sums of all.
        waits: If so, the next pass waits for them.
        in_turn: Gathers and reductions have one communicator, so that a pass that begins with a gather waits for the
            reductions before it.
    """

    prefetches: bool
    reshards: bool
    overlaps: bool
    every: bool
    waits: bool
    in_turn: bool = False


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
    if sent.late_share > 0.0:
        early_pass_s, late_pass_s = (1.0 - sent.late_left) * reducing_pass_s, sent.late_left * reducing_pass_s
        early_s = min((1.0 - sent.late_share) * sent.reduced_s, early_pass_s)  # More waits, as above.
        late_s = beside_s(late_pass_s, sent.late_share * sent.reduced_s, slow_s, slow_sent_s)
        reducing_s = max(reducing_s, beside_s(early_pass_s, early_s, slow_s, slow_sent_s) + late_s)
    left_s = max(last_s, reducing_s - reducing_pass_s)
    left_s = max(left_s + sent.last_share * sent.copied_back_s, sent.copied_back_s)
    if not rules.every:
        return Passes(passed_s, returned_s, inline, 0.0, first_s, sent.copied_s + left_s)
    if rules.waits or (rules.in_turn and rules.reshards and sent.gathered_s > 0.0 and not sent.begins_whole):
        return Passes(passed_s, returned_s, inline, left_s, first_s, 0.0)
    # Reductions go on beside the passes of the next microbatch; the last one and the first gather share links.
    shared_s = min(root_s, last_s)
    both_s = root_s + 2.0 * alone_s + shared_s
    sent_s = together_s(2.0 * ahead_s, 2.0 * latency_s, sent.reduced_s - shared_s, reduced_latency_s)
    both_s += beside_s(forward_s + backward_s, sent_s, slow_s, slow_sent_s)
    reduced_s = max(0.0, both_s - passed_s - returned_s)
    return Passes(passed_s, returned_s, inline, reduced_s, first_s, max(0.0, left_s - reduced_s))
