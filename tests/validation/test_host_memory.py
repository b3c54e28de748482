"""Freed memory is not faulted in again."""

from __future__ import annotations

import platform
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from validation.execution.launch import launch  # noqa: E402

if TYPE_CHECKING:
    from validation.execution.launch import Worker

MIB = 2**20


def faults_of_rounds(worker: Worker, rounds: int) -> list[tuple[int, int]]:
    """Fill and free 64 MiB in this thread and another, as forward and backward do.

    By round: page faults, and pages by which the process has grown.
    """
    import resource

    def fill() -> None:
        kept = [torch.ones(size // 4) for size in (MIB // 16, MIB, 15 * MIB, 48 * MIB - MIB // 16)]
        del kept

    def faults_and_pages() -> tuple[int, int]:
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt, resident

    found = []
    with ThreadPoolExecutor(1) as other:
        for _ in range(rounds):
            faults, pages = faults_and_pages()
            fill()
            other.submit(fill).result()
            faults_after, pages_after = faults_and_pages()
            found.append((faults_after - faults, pages_after - pages))
    return found


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such settings")
def test_what_is_freed_is_not_faulted_in_again() -> None:
    """A fault makes a page the process keeps: the heap grows until each size finds a place, and then rests.

    In which round it last grows is up to small blocks of the two threads, which split what is free.
    """
    (found,) = launch(faults_of_rounds, 40, num_processes=1, timeout_s=60, num_threads=1)
    pages = 64 * MIB // 4096
    assert found[0][0] > pages // 2
    assert sum(faults - grown for faults, grown in found[1:]) < pages // 20
    assert statistics.median(faults for faults, _ in found[20:]) < pages // 20
