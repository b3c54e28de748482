"""Plans, what they cost, and what simulating them gives.

Here stand a plan and its problem (`plan`, `problem`, `validate`), the cost tables (`costs`) and a simulation with its
result (`simulate`, `result`). The parts, each of which imports only from those before it:

- `schedules`: the order of passes on each pipeline rank;
- `lowering`: from a plan to a task graph;
- `memory`: what is allocated when, and what the allocators make of it;
- `engines`: the task graph in time, in SimPy and compiled; `closed_forms`: estimates without a graph, for searchers;
  `reports`: what a result shows;
- `fast`: the closed forms over arrays; `batch`: thousands of plans, pass by pass.
"""
