"""DAPPLE's three placement policies, and the states of the cluster that their compositions reach.

GPUs of a machine are taken lowest id first, so a state is how many of each machine are used. Applying for six
GPUs on three machines of eight, two of the first and four of the second in use::

    Fresh First    2 4 0 -> 2 4 6     a machine that nobody uses yet
    Append First   2 4 0 -> 8 4 0     machines in use, one after the other
    Scatter First  2 4 0 -> 5 7 0     machines in use, evenly (all machines, if none is in use)

Source:
    Fan et al., "DAPPLE", PPoPP 2021, Section 4.2. Its released planner scatters over all machines that have a
    free GPU, used or not: ``scatter="all"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from datafiles.words import counted

POLICIES = ("fresh", "append", "scatter")
SCATTERS = ("used", "all")

Used = tuple[int, ...]


def place(policy: str, used: Used, sizes: Sequence[int], count: int, scatter: str = "used") -> Used | None:
    """Return the state after taking ``count`` GPUs, or None if the policy cannot.

    Args:
        policy: ``fresh``, ``append`` or ``scatter``.
        used: GPUs in use per machine.
        sizes: GPUs per machine.
        count: GPUs wanted, >= 1.
        scatter: Machines that ``scatter`` takes from: those in ``used``, all fresh ones if none is; or ``all``.

    >>> [place(policy, (2, 4, 0), (8, 8, 8), 6) for policy in POLICIES]
    [(2, 4, 6), (8, 4, 0), (5, 7, 0)]
    """
    machines = range(len(sizes))
    if policy == "fresh":
        allowed = [machine for machine in machines if used[machine] == 0]
    elif policy == "append":
        allowed = [machine for machine in machines if 0 < used[machine] < sizes[machine]]
    elif policy == "scatter":
        in_use = [machine for machine in machines if used[machine] > 0]
        allowed = in_use if in_use and scatter == "used" else list(machines)
    else:
        raise ValueError(f"a placement policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    free = {machine: sizes[machine] - used[machine] for machine in allowed}
    if sum(free.values()) < count:
        return None
    after = list(used)
    if policy == "scatter":
        while count:
            for machine in allowed:
                if count and after[machine] < sizes[machine]:
                    after[machine] += 1
                    count -= 1
        return tuple(after)
    for machine in allowed:
        taken = min(count, free[machine])
        after[machine] += taken
        count -= taken
    return tuple(after)


MAX_STATES = 20_000
"""Four machines of eight GPUs have 4,680; time and memory of planning grow with layers times pairs of states."""


@dataclass(frozen=True, eq=False)
class PlacementGraph:
    """Every state that compositions of policies reach from an empty cluster.

    Attributes:
        sizes: GPUs per machine.
        states: States in order of discovery; the first is the empty cluster. Full clusters are left out, since
            one stage always takes what remains.
        successors: Per state, the states one stage further on, without doubles, and the GPUs taken.
    """

    sizes: tuple[int, ...]
    states: tuple[Used, ...]
    successors: tuple[tuple[tuple[int, int], ...], ...]


def reachable(
    sizes: Sequence[int], policies: Sequence[str] = POLICIES, scatter: str = "used", largest: int | None = None
) -> PlacementGraph:
    """Return the states that stages of 1 to ``largest`` GPUs reach.

    Raises:
        ValueError: If a policy or the scatter rule is unknown, or there are more than MAX_STATES states.
    """
    if scatter not in SCATTERS:
        raise ValueError(f"scatter must be one of {', '.join(SCATTERS)}, got {scatter!r}")
    total = sum(sizes)
    number: dict[Used, int] = {tuple(0 for _ in sizes): 0}
    states = list(number)
    successors: list[tuple[tuple[int, int], ...]] = []
    while len(successors) < len(states):
        used = states[len(successors)]
        found: dict[int, int] = {}
        for count in range(1, min(total - sum(used) - 1, largest or total) + 1):
            for policy in policies:
                after = place(policy, used, sizes, count, scatter)
                if after is None:
                    continue
                if after not in number:
                    number[after] = len(states)
                    states.append(after)
                found.setdefault(number[after], count)
        successors.append(tuple(found.items()))
        if len(states) > MAX_STATES:
            raise ValueError(
                f"placements must have at most {MAX_STATES:,} states of GPUs in use, got more on {len(sizes)} machines "
                f"of {counted(max(sizes), 'GPU')}; plan for fewer machines, or with fewer policies"
            )
    return PlacementGraph(tuple(sizes), tuple(states), tuple(successors))


def devices_between(before: Used, after: Used, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the ids of the GPUs taken from one state to the next; machines are numbered one after the other.

    >>> devices_between((2, 4, 0), (5, 7, 0), (8, 8, 8))
    (2, 3, 4, 12, 13, 14)
    """
    ids: list[int] = []
    first = 0
    for low, high, size in zip(before, after, sizes, strict=True):
        ids += range(first + low, first + high)
        first += size
    return tuple(ids)
