"""For all tests: Ctrl-C interrupts, also where they were started in the background."""

from __future__ import annotations

import signal

# A shell starts background jobs with SIGINT ignored, and what they start inherits it; tests interrupt commands.
signal.signal(signal.SIGINT, signal.default_int_handler)
