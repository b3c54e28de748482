"""From a plan to the task graph."""
