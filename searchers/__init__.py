"""Searchers: one module per published system that looks for a good plan.

`searchers.base` has the contract, `searchers.registry` finds searchers by name. A searcher sees the
problem, the shared cost tables and the simulator, and nothing of validation.
"""
