"""What can become of a search, in the words of every table."""

from __future__ import annotations

STATUSES = ("ok", "out of memory", "no plan", "not applicable", "failed")
"""``out of memory``: a plan was found, but does not fit when simulated. ``no plan``: the searcher found none
that fits. ``not applicable``: it refused the problem. ``failed``: an error, or the process died."""
SIMULATED = STATUSES[:2]
"""Of searches that a plan was simulated of; the others have a reason alone."""
BUDGET_ENDED = "the budget ended the search"
"""Behind the plan of a search that was not through when its budget was."""
