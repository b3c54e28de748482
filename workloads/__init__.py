"""What is trained: operator kinds, the operator graph, model families. Knows no hardware."""

from workloads import kinds as _kinds  # registers every kind
from workloads.operators import Operator, Workload
from workloads.registry import build_workload, model_names

__all__ = ["Operator", "Workload", "build_workload", "model_names"]

del _kinds
