"""Ctrl-C and SIGTERM: one kind of exception wherever they fall, and an end in a word before there is anything to keep.

Little is imported here: the command line takes hold of Ctrl-C with this module before it loads the rest.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
"""Exit code after Ctrl-C, as of shells (128 and the signal's number)."""
SOON_S = 0.02
"""Until an interrupt that was lost is raised again: the callback that it fell into has ended by then."""


def end_at_interrupt() -> None:
    """Let Ctrl-C end the process in a word, until `raise_interrupts`; where it is ignored, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, and once more where it falls into what drops exceptions.

    Python reports and drops those of weak references' callbacks and of ``__del__``.
    """
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = _raised_again


def _raised_again(dropped: sys.UnraisableHookArgs) -> None:
    if isinstance(dropped.exc_value, KeyboardInterrupt):
        threading.Timer(SOON_S, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(dropped)


def _end(number: int, frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Raise every Ctrl-C as KeyboardInterrupt.

    A compiled function that is interrupted while it looks at its arguments raises a SystemError caused by one
    ("returned a result with an exception set": CPython, Objects/call.c; seen with numba 0.68), and a class that is
    being made, up to Python 3.11, a RuntimeError ("Error calling __set_name__": Objects/typeobject.c).
    """
    try:
        yield
    except (SystemError, RuntimeError) as error:
        if isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise


@contextmanager
def terminate_means_interrupt() -> Iterator[None]:
    """Take SIGTERM, which Slurm sends when a job's time is over, as Ctrl-C: what was found is kept."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
