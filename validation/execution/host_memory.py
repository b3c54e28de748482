"""On the CPU, what tensors free stays with the process, as a GPU's caching allocator keeps it."""

from __future__ import annotations

import ctypes
import platform

_MALLOPT = {
    "M_ARENA_MAX": (-8, 1),  # Backward runs in a thread of its own; arenas of threads return memory by themselves.
    "M_MMAP_MAX": (-4, 0),  # Large blocks would be mapped, and unmapped when freed.
    "M_TRIM_THRESHOLD": (-1, -1),
}
"""glibc's numbers of its settings (malloc.h), and ours: nothing is given back to the system."""


def keep_freed_memory() -> None:
    """Let this process keep what it frees, where its C library can.

    glibc returns large blocks to the system. The next iteration then gets them page by page, zeroed by the kernel
    as they are first written, inside whatever operator writes: seconds that follow from the order of frees, not from
    the plan, and that no device has whose allocator caches.
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        for number, value in _MALLOPT.values():
            library.mallopt(number, value)
