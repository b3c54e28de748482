"""Executes a plan file, in as many processes as the plan has devices, or in those that torchrun started.

Run: ``python -m validation.run_plan plan.yaml``, or
``torchrun --nproc-per-node N -m validation.run_plan plan.yaml -o measurement.json``
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a plan file; print what was measured, and write it if asked to. Returns the exit code (2: a wrong input)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, help="plan file")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("-o", "--output", type=Path, help="JSON file")
    chosen = parser.parse_args(arguments)
    from datafiles.writer import check_file, dump_json, write_text_atomically  # what --help does not wait for
    from simulator.plan_file import load_plan
    from validation.execution.executor import execute, execute_here
    from validation.execution.launch import WorkerError, leave_group, worker_from_environment

    try:
        spec, plan = load_plan(chosen.plan)
        problem = spec.load()
        if chosen.output is not None:  # Before anything is measured.
            check_file(chosen.output)
            chosen.output.parent.mkdir(parents=True, exist_ok=True)
        is_first = True
        if "RANK" in os.environ:
            worker = worker_from_environment(chosen.device, timeout_s=chosen.timeout_s)
            is_first = worker.rank == 0
            measurement = execute_here(plan, problem, worker, iterations=chosen.iterations, warmup=chosen.warmup)
        else:
            measurement = execute(
                plan,
                problem,
                iterations=chosen.iterations,
                warmup=chosen.warmup,
                device=chosen.device,
                timeout_s=chosen.timeout_s,
            )
        if is_first:
            print(f"iteration time  {measurement.iteration_time_s * 1e3:.2f} ms (median of {chosen.iterations})")
            if chosen.output is not None:
                write_text_atomically(chosen.output, dump_json(measurement.to_mapping()))
    except (ValueError, OSError, WorkerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, WorkerError) else 2
    leave_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
