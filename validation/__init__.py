"""Runs plans for real and compares prediction with measurement. Only this package imports torch.

Here stand a measurement and its file, and what is started by hand (`run_plan`, `memory_check`, `list_entries`). The
parts, each of which imports only from those before it:

- `kinds`: operators as torch modules, by kind;
- `execution`: a plan on processes: groups, stages, passes, gradients;
- `profiling`: what a machine takes: operators, memory, collectives, overlap, launches;
- `campaigns`: many plans measured and predicted, and what is shipped of these.
"""
