"""For all tests: one thread each, since they run side by side; Ctrl-C interrupts, also in the background.

Workers of a run with nothing compiled compile side by side what most tests need, before any of them waits for it.
"""

from __future__ import annotations

import gc
import os
import signal

# Threads of torch and BLAS wait for each other by spinning: two test processes on two cores took twenty times as long.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# A shell starts background jobs with SIGINT ignored, and what they start inherits it; tests interrupt commands.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Most of what a collection walks is torch and the tests themselves, which stay: an eighth of their time went to it.
gc.set_threshold(20_000, 20, 50)


def pytest_sessionstart() -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) > 1:
        from tests.compiled_ahead import compile_share  # Not where one process runs a few tests: it takes numba's time.

        compile_share(int(worker.removeprefix("gw")))
