"""Plans, cost tables, lowering to tasks, engines, memory, results."""
