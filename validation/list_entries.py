"""What the host spends on each entry of a list of tensors that a collective is given, one of each rank.

DeepSpeed's ZeRO-3 of 2021 gathers so (``parameter_calls_above`` of a runtime): it cuts a view for every rank, asks
which is its own, and torch copies every entry out of one tensor. Both are measured, in a few seconds.

Run: ``python -m validation.list_entries``
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

RANKS = 1024
ELEMENTS = 64
REPEATS = 15


def seconds_per_entry() -> tuple[float, float]:
    """Return seconds of making an entry, and of dispatching its copy, on one core: the best of some repeats."""
    import torch.distributed as dist  # torch, which --help does not wait for

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            return _measured()
        finally:
            dist.destroy_process_group()


def _measured() -> tuple[float, float]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    group = dist.new_group([0])
    flat, own = torch.zeros(RANKS * ELEMENTS), torch.zeros(ELEMENTS)
    entries: list[torch.Tensor] = []

    def make() -> None:
        entries.clear()
        for rank in range(RANKS):
            entries.append(flat.narrow(0, ELEMENTS * rank, ELEMENTS))
            if rank == dist.get_rank(group=group):
                entries[rank].copy_(own)

    def copy() -> None:
        for entry in entries:
            entry.copy_(own)

    return _best_s(make) / RANKS, _best_s(copy) / RANKS


def _best_s(action: Callable[[], None]) -> float:
    found = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        action()
        found.append(time.perf_counter() - began_s)
    return min(found)


def main() -> None:
    """Print the two times."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    made_s, copied_s = seconds_per_entry()
    print(f"an entry {1e6 * made_s:.1f} us, its copy {1e6 * copied_s:.1f} us")


if __name__ == "__main__":
    main()
