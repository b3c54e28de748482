"""Closed form of the passes of a stage: what its device computes, what its host launches, and what is sent beside.

Source: the engine's rules (``docs/model.md``).
"""

from __future__ import annotations

from typing import NamedTuple

from simulator.closed_forms.host_time import lags_s, longer_s
from simulator.closed_forms.overlap_time import Passes, SendingRules, Sent, gathered_s, inline_s, with_reductions_s
from simulator.closed_forms.step_time import ahead_s
from simulator.compiled_cache import also_compiled


class PassWork(NamedTuple):
    """What operators of a stage take for a microbatch, in seconds.

    Attributes:
        forward_s, backward_s: The device.
        forward_host_s, backward_host_s: A host that runs ahead, passes of the framework included.
        pass_s: Of what a pass takes such a host, what comes before its first launch.
        forward_left_s, backward_left_s: What the device has left of each unit when it was launched (``left_s``), all
            units together; 0 where no host waits for gathers.
    """

    forward_s: float
    backward_s: float
    forward_host_s: float
    backward_host_s: float
    pass_s: float
    forward_left_s: float = 0.0
    backward_left_s: float = 0.0


class SentHost(NamedTuple):
    """What sending beside its passes takes the host of a stage, in seconds.

    Attributes:
        forward_s, backward_s: Gathers of either pass.
        reduced_s: A reduction of all gradients.
    """

    forward_s: float
    backward_s: float
    reduced_s: float


class HostRules(NamedTuple):
    """How the host of a stage works.

    Attributes:
        runs_ahead: It launches what comes next while the device works.
        waits_to_receive, waits_for_gathers: But it waits for what a pass receives, and for each gather of parameters.
        apart: All forward passes come before the first backward pass.
        is_alone, is_first: The stage is the only one, or the first.
        num_microbatches: Of the plan.
    """

    runs_ahead: bool
    waits_to_receive: bool
    waits_for_gathers: bool
    apart: bool
    is_alone: bool
    is_first: bool
    num_microbatches: int


class StagePasses(NamedTuple):
    """Seconds of a stage.

    Attributes:
        passes: As ``overlap_time`` has them, but for what follows.
        behind: What a host that runs ahead takes longer for a microbatch than they do.
        forward_lag, backward_lag: What its device waits for such a host before either pass of a microbatch.
        ahead: How long before its last backward pass ends such a host has launched it, if the stage never waits for
            another.
        launching: What launching reductions of all sums takes such a host.
        last: Of these reductions, what comes behind the last launch.
    """

    passes: Passes
    behind: float
    forward_lag: float
    backward_lag: float
    ahead: float
    launching: float
    last: float


@also_compiled
def gradients_s(found: StagePasses) -> float:
    """Return what a microbatch's gradients take in all, with what is behind them."""
    return found.passes.backward + found.passes.reduced + found.behind


@also_compiled
def stage_passes_s(work: PassWork, sent: Sent, host: SentHost, sending: SendingRules, rules: HostRules) -> StagePasses:
    """Return what the passes of a stage take.

    A host that waits for each gather launches the next one when the device has nothing left to do, and waits for
    reductions that do; what the device has left of a unit hides the launches of reductions.

    Args:
        work: Its operators.
        sent, host: What is sent beside them, and what that takes the host.
        sending, rules: How.

    Two seconds and four, gathered in one each, by hosts that need three for either pass, or three more for gathers:

    >>> sent = Sent(0.0, 1.0, *[0.0] * 5, *[1.0] * 5)
    >>> work, sending = PassWork(2.0, 4.0, 3.0, 3.0, 0.0), SendingRules(False, True, False, False, False)
    >>> ahead = HostRules(True, False, False, False, True, True, 8)
    >>> found = stage_passes_s(work, sent, SentHost(0.0, 0.0, 0.0), sending, ahead)
    >>> found.passes.forward, found.passes.backward, found.behind, found.ahead
    (3.0, 5.0, 0.0, 16.0)
    >>> found = stage_passes_s(work, sent, SentHost(3.0, 3.0, 0.0), sending, ahead)
    >>> found.passes.forward, found.passes.backward, found.behind
    (3.0, 5.0, 4.0)
    >>> found = stage_passes_s(work, sent, SentHost(3.0, 3.0, 0.0), sending, ahead._replace(waits_for_gathers=True))
    >>> found.passes.forward, found.passes.backward, found.behind
    (6.0, 8.0, 0.0)

    Gradients reduced once in one second, by a host that is two seconds ahead and needs five to launch that:

    >>> sent = Sent(*[0.0] * 4, 1.0, 0.0, 0.0, *[1.0] * 5)
    >>> work, ahead = PassWork(2.0, 4.0, 2.0, 2.0, 0.0), ahead._replace(num_microbatches=1)
    >>> found = stage_passes_s(work, sent, SentHost(0.0, 0.0, 5.0), sending, ahead)
    >>> found.passes.once, found.ahead, found.launching, found.last
    (1.0, 2.0, 5.0, 1.0)
    """
    forward_s, backward_s = work.forward_s, work.backward_s
    passed_s, returned_s, gathering_s = gathered_s(forward_s, backward_s, sent, sending)
    behind_s, forward_lag_s, backward_lag_s, host_ahead_s = 0.0, 0.0, 0.0, 0.0
    if rules.runs_ahead:
        forward_host_s, backward_host_s = work.forward_host_s, work.backward_host_s
        if sending.reshards:
            forward_host_s += host.forward_s
            backward_host_s += host.backward_s
        if sending.every:
            backward_host_s += host.reduced_s
        inline, end_s = inline_s(sent, sending)
        gathers_and_waits = rules.waits_for_gathers and sent.gathered_s > 0.0
        waits_for_gathers = gathers_and_waits and sending.reshards
        if waits_for_gathers:
            passed_s += host.forward_s
            returned_s += host.backward_s
            forward_host_s += sent.gathered_share * work.forward_left_s
            left_s = sent.gathered_share * work.backward_left_s
            backward_host_s += max(0.0, left_s - (host.reduced_s if sending.every else 0.0))
            if sending.every:
                backward_host_s += inline - sent.copied_s
        waits = not rules.is_alone and (rules.waits_to_receive or waits_for_gathers)
        m = rules.num_microbatches
        apart, is_first = rules.apart, rules.is_first
        forward_lag_s, backward_lag_s = lags_s(
            passed_s, returned_s, forward_host_s, backward_host_s, work.pass_s, end_s, waits, apart, is_first, m
        )
        passed_s, returned_s, behind_s = longer_s(passed_s, returned_s, forward_host_s, backward_host_s, waits, apart)
        if gathers_and_waits and not sending.reshards:  # In the first forward pass alone.
            first_s = host.forward_s + max(gathering_s, forward_host_s + sent.gathered_share * work.forward_left_s)
            gathering_s = passed_s + max(0.0, first_s - max(passed_s, forward_host_s))
        host_ahead_s = ahead_s(passed_s, returned_s, forward_host_s, backward_host_s, waits, m)
    found = with_reductions_s(forward_s, backward_s, passed_s, returned_s + behind_s, gathering_s, sent, sending)
    launching_s, last_s = 0.0, 0.0
    if rules.runs_ahead and not sending.every:
        launching_s, last_s = host.reduced_s, sent.last_share * sent.reduced_s
    passes = Passes(found.forward, found.backward - behind_s, found.inline, found.reduced, found.first, found.once)
    return StagePasses(passes, behind_s, forward_lag_s, backward_lag_s, host_ahead_s, launching_s, last_s)
