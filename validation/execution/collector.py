"""Python's garbage collector stays out of iterations that are timed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Run the block without collections but those it asks for, which then look at its own objects alone.

    A full collection walks every object of torch and its like: 0.2 s, in whatever operator it falls. Trainers that
    care switch it off as well (torchtitan, Megatron-LM's manual collection).
    """
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()
