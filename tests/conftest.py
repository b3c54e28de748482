"""For all tests: one thread each, since they run side by side; Ctrl-C interrupts, also in the background."""

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
