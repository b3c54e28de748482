"""Freed memory is not faulted in again."""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from validation.execution.launch import launch  # noqa: E402

if TYPE_CHECKING:
    from validation.execution.launch import Worker

MIB = 2**20


def faults_of_rounds(worker: Worker, rounds: int) -> list[int]:
    """Fill and free 64 MiB in this thread and another, as forward and backward do; return page faults by round."""
    import resource

    def fill() -> None:
        kept = [torch.ones(size // 4) for size in (MIB // 16, MIB, 15 * MIB, 48 * MIB - MIB // 16)]
        del kept

    found = []
    with ThreadPoolExecutor(1) as other:
        for _ in range(rounds):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            fill()
            other.submit(fill).result()
            found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return found


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such settings")
def test_what_is_freed_is_not_faulted_in_again() -> None:
    (faults,) = launch(faults_of_rounds, 5, num_processes=1, timeout_s=60, num_threads=1)
    pages = 64 * MIB // 4096
    assert faults[0] > pages // 2
    assert faults[-1] < pages // 20
