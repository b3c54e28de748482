"""Where the search starts: an even configuration, and the two uneven ones of Exp#7."""

from __future__ import annotations

from math import inf

from searchers.aceso.configuration import Configuration, Run, StageChoice, respects_nodes
from searchers.aceso.model import PerformanceModel

INITIALS = ("balanced", "imbalance-op", "imbalance-gpu")


def even_gpus(total: int, num_stages: int, per_node: int) -> list[int] | None:
    """Return GPUs per stage: all start with one and are doubled in turn, from the first, until all are used.

    None where that cannot use them all without a stage across nodes.

    >>> even_gpus(8, 3, 8), even_gpus(32, 3, 8)
    ([4, 2, 2], None)
    """
    gpus = [1] * num_stages
    while sum(gpus) < total:
        before = sum(gpus)
        for position in range(num_stages):
            if gpus[position] < per_node and sum(gpus) + gpus[position] <= total:
                gpus[position] *= 2
        if sum(gpus) == before:
            return None
    return gpus if sum(gpus) == total and respects_nodes(gpus, per_node) else None


def uneven_gpus(total: int, num_stages: int, per_node: int) -> list[int] | None:
    """Return GPUs per stage where the first stages have as many as they can.

    >>> uneven_gpus(8, 4, 8)
    [4, 2, 1, 1]
    """
    gpus: list[int] = []
    left = total
    for position in range(num_stages):
        others = num_stages - position - 1
        size = 1
        while size * 2 <= min(per_node, left - others):
            size *= 2
        if not others and size != left:
            return None
        while size > 1 and not _can_follow(left - size, others, per_node):
            size //= 2
        gpus.append(size)
        left -= size
    return gpus if left == 0 and respects_nodes(gpus, per_node) else None


def _can_follow(left: int, stages: int, per_node: int) -> bool:
    return stages <= left <= stages * per_node


def initial_configuration(model: PerformanceModel, num_stages: int, kind: str = "balanced") -> Configuration | None:
    """Return the configuration to start from; None if the devices cannot be dealt to that many stages.

    Operators are dealt by number, the remainder to the last stage; tensor degree is the stage's GPUs where the
    tables have it, data degree what remains; the smallest microbatch. ``imbalance-op`` gives the first stage half of
    all operators, ``imbalance-gpu`` the first stages the most devices.

    Raises:
        ValueError: If ``kind`` is unknown.
    """
    if kind not in INITIALS:
        raise ValueError(f"initial must be one of {', '.join(INITIALS)}, got {kind!r}")
    if num_stages > model.num_operators:
        return None
    deal = uneven_gpus if kind == "imbalance-gpu" else even_gpus
    gpus = deal(model.num_devices, num_stages, model.per_node)
    if gpus is None:
        return None
    counts = _counts(model.num_operators, num_stages, kind)
    for microbatch in _microbatches(model):
        stages = []
        for size, count in zip(gpus, counts, strict=True):
            fitting = [tp for tp in reversed(model.space.degrees) if model.allows(size, tp, microbatch)]
            if not fitting:
                break
            stages.append(StageChoice(size, (Run(count, fitting[0]),)))
        if len(stages) == num_stages:
            return Configuration(microbatch, tuple(stages))
    return None


def _counts(num_operators: int, num_stages: int, kind: str) -> list[int]:
    if kind == "imbalance-op" and num_stages > 1:
        first = max(1, min(num_operators // 2, num_operators - (num_stages - 1)))
        rest = _counts(num_operators - first, num_stages - 1, "balanced")
        return [first, *rest]
    each = num_operators // num_stages
    return [each] * (num_stages - 1) + [num_operators - each * (num_stages - 1)]


def uniform_relatives(model: PerformanceModel, start: Configuration) -> list[Configuration]:
    """Return the same stages with every tensor degree and microbatch that suits all, fastest by a rough estimate first.

    A stage with fewer GPUs than the degree takes all of its own.
    """
    found: dict[Configuration, None] = {}
    for microbatch in _microbatches(model):
        for degree in model.space.degrees:
            stages = [stage.with_degree(min(degree, stage.gpus)) for stage in start.stages]
            if all(model.allows(stage.gpus, stage.runs[0].tp, microbatch) for stage in stages):
                found[Configuration(microbatch, tuple(stages))] = None
    rough_s = {each: model.rough_s(each) for each in found}
    return sorted((each for each in found if rough_s[each] < inf), key=rough_s.__getitem__)


def _microbatches(model: PerformanceModel) -> list[int]:
    largest = max(model.space.samples) * model.per_node
    return [size for size in range(1, largest + 1) if model.problem.global_batch % size == 0]
