"""What a workload runs on: GPUs, links, collectives, compute efficiency, runtimes; no workloads, no plans."""
