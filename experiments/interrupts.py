"""Ctrl-C, as one kind of exception wherever it falls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Raise every Ctrl-C as KeyboardInterrupt.

    A compiled function that is interrupted while it looks at its arguments raises a SystemError caused by one
    ("returned a result with an exception set": CPython, Objects/call.c; seen with numba 0.68).
    """
    try:
        yield
    except SystemError as error:
        if isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
