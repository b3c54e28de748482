"""Papers' figures and tables, ours beside theirs: one folder per paper, one module per experiment.

Each folder lists its experiments in ``EXPERIMENTS``; `registry` joins the lists, `report` writes what they find.
"""
