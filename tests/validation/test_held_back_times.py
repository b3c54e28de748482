"""Kernels and their host timed apart, on a GPU and a clock that are made up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from validation import held_back_times, timers  # noqa: E402
from validation.held_back_times import CYCLES_PER_S, FIRST_WAIT_S, LEAST_WAIT_S, MARGIN, HeldBackTimes  # noqa: E402


class Machine:
    """A host and a GPU whose queue runs as soon as it may.

    Attributes:
        host_s: The host's clock.
        gpu_s: When the GPU is through with what is queued.
        waits_s: What it was told to wait.
        events: Moments of the GPU, in order.
        held, most_held: Bytes of the allocator, now and at most since its peak was forgotten.
        times_asked: How often that was.
    """

    def __init__(self) -> None:
        self.host_s = self.gpu_s = 0.0
        self.waits_s: list[float] = []
        self.held = self.most_held = self.times_asked = 0

    def launch(self, host_s: float, kernel_s: float) -> None:
        """Let the host work, then launch a kernel."""
        self.host_s += host_s
        self.gpu_s = max(self.gpu_s, self.host_s) + kernel_s

    def take(self, num_bytes: int) -> None:
        """Allocate, or below 0 give back."""
        self.held += num_bytes
        self.most_held = max(self.most_held, self.held)

    def forget_peak(self, device: object = None) -> None:
        self.most_held = self.held
        self.times_asked += 1

    def wait(self, cycles: int) -> None:
        self.waits_s.append(cycles / CYCLES_PER_S)
        self.launch(0.0, cycles / CYCLES_PER_S)

    def synchronize(self, device: object = None) -> None:
        self.host_s = max(self.host_s, self.gpu_s)

    def event(self, enable_timing: bool = False) -> Event:
        return Event(self)


class Event:
    def __init__(self, machine: Machine) -> None:
        self.machine, self.at_s = machine, 0.0

    def record(self) -> None:
        self.at_s = max(self.machine.gpu_s, self.machine.host_s)

    def query(self) -> bool:
        return self.machine.host_s >= self.at_s

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at_s - self.at_s)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    found = Machine()
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "_sleep", found.wait)
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronize)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", found.forget_peak)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: found.held)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: found.most_held)
    for module in (held_back_times, timers):
        monkeypatch.setattr(module.time, "perf_counter", lambda: found.host_s)
    return found


class _Cuda:
    type = "cuda"


def times() -> HeldBackTimes:
    device: Any = _Cuda()
    return HeldBackTimes(device)


def one_pass(machine: Machine, of: HeldBackTimes, host_s: float = 1e-3) -> None:
    """Two operators of two kernels each; the second one's host takes thrice as long, and so does what is between."""
    with of.one_pass("forward"):
        for index, factor in enumerate((1, 3)):
            machine.launch(factor * host_s / 4, 1e-5)
            with of.measure("forward", index):
                machine.launch(factor * host_s / 2, 2e-5)
                machine.launch(factor * host_s / 4, 4e-5)
        machine.launch(host_s, 8e-5)


def test_kernels_have_no_gaps_and_hosts_no_waits(machine: Machine) -> None:
    found = times()
    one_pass(machine, found)
    kernels, hosts = found.drain()
    assert kernels == {("forward", 0): pytest.approx([7e-5]), ("forward", 1): pytest.approx([15e-5])}
    assert hosts == {("forward", 0): pytest.approx([1e-3]), ("forward", 1): pytest.approx([4e-3])}
    assert found.drain() == ({}, {})


def test_the_gpu_waits_for_what_the_host_took_before_and_a_half(machine: Machine) -> None:
    found = times()
    for _ in range(2):
        one_pass(machine, found)
    first, second = machine.waits_s[:3], machine.waits_s[3:]
    assert first == pytest.approx([FIRST_WAIT_S] * 3)
    assert second == pytest.approx([MARGIN * 1e-3, MARGIN * 3e-3, MARGIN * 1e-3])
    one_pass(machine, found, host_s=1e-6)
    one_pass(machine, found, host_s=1e-6)
    assert machine.waits_s[-3:] == pytest.approx([LEAST_WAIT_S] * 3)


def test_kernels_of_a_gpu_that_did_not_wait_long_enough_count_where_there_are_no_others(machine: Machine) -> None:
    found = times()
    one_pass(machine, found, host_s=10e-3)
    kernels, hosts = found.drain()
    assert kernels["forward", 0][0] > 1e-3, "gaps in which the GPU waited for its host"
    assert hosts["forward", 0] == pytest.approx([10e-3])
    for _ in range(2):
        one_pass(machine, found, host_s=10e-3)
    assert found.drain()[0]["forward", 0] == pytest.approx([7e-5] * 2)
    one_pass(machine, found, host_s=50e-3)
    one_pass(machine, found, host_s=10e-3)
    kernels, hosts = found.drain()
    assert kernels["forward", 0] == pytest.approx([7e-5]) and len(hosts["forward", 0]) == 2


def test_bytes_that_an_operator_takes_are_counted_until_its_times_count(machine: Machine) -> None:
    """Of two passes the one that takes more; what was there before, and what a host has to ask for, is not in it."""
    found = times()
    machine.take(1000)
    for more in (0, 50):
        with found.one_pass("forward"):
            machine.take(500)
            machine.take(-500)
            with found.measure("forward", 0):
                machine.take(200 + more)
                machine.take(-150)
    found.drain()
    assert found.taken_bytes == {("forward", 0): 250} and machine.times_asked == 2
    with found.one_pass("forward"), found.measure("forward", 0):
        machine.take(10**6)
    assert found.taken_bytes == {("forward", 0): 250} and machine.times_asked == 2


def test_collectives_count_with_no_operator(machine: Machine) -> None:
    found = times()
    with found.one_pass("forward"):
        machine.launch(1e-3, 1e-5)
        with found.outside():
            machine.launch(5e-3, 7e-3)
        with found.measure("forward", 0):
            machine.launch(1e-3, 2e-5)
            with found.outside():
                machine.launch(5e-3, 7e-3)
            machine.launch(1e-3, 4e-5)
    with found.outside():
        machine.launch(5e-3, 7e-3)
    kernels, hosts = found.drain()
    assert kernels == {("forward", 0): pytest.approx([7e-5])} and hosts == {("forward", 0): pytest.approx([3e-3])}
