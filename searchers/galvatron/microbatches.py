"""How many microbatches a batch is cut into: the choice that changes Galvatron's results more than any other.

Rules by name (B samples, P stages, b samples of a replica, which spans t = b N / (B P) tensor ranks):

- ``released``: one for a single stage; else four samples at a time but at most eight microbatches, as in the
  releases of 2023, which have BMW: min(8, ceil(b / t / 4)). So larger batches need more memory, and one is the largest;
- ``formula``: likewise, by the formulas that the release of 2022 has for sixteen devices: sixteen samples at a time of
  images (32 on sixteen stages and more), four of text;
- ``table``: one for a single stage; else as in the release of 2022: hand tables of b on eight devices (BERT under
  tensor and pipeline parallelism alone: b / 4), its formulas on others, however many that makes;
- ``free``: every number that divides the batch, gradients accumulated on a single stage too;
- ``divisors``: the same, at least P (the third release).

Where a rule's number does not divide the batch it is moved to the nearest that does, or the batch is cut as the release
lets PyTorch cut it: into parts of ceil(b / m) samples, the last one smaller. Parts are multiples of a stage's devices,
so that every strategy divides them; under tensor parallelism, where b is larger, that can leave fewer than m.

Source: Galvatron data README (``titan_v1``); ``optimal_chunk_func`` of hetu-galvatron 0.0.2 and 1.0.0 (both of November
2023, the same for every model); Hetu-Galvatron release 3 (divisors).
"""

from __future__ import annotations

from math import ceil, log
from typing import NamedTuple

from simulator.divisors import divisors

RULES = ("released", "formula", "table", "free", "divisors")
TABLE_DEVICES = 8
MOST, EACH = 8, 4
"""Microbatches of a batch, and samples of a microbatch, in the releases of 2023."""
IMAGE_FAMILIES = ("vit", "swin")


class Cut(NamedTuple):
    """How a batch is cut: ``parts`` microbatches of ``samples`` each; of ``last`` the last one, unless that is None."""

    parts: int
    samples: int
    last: int | None = None

    @property
    def batch(self) -> int:
        """Samples of all microbatches."""
        return self.samples * (self.parts - 1) + (self.last or self.samples)


def cuts(
    rule: str, family: str, batch: int, num_stages: int, num_devices: int, *, tensor: int = 1, unequal: bool = False
) -> list[Cut]:
    """Return the ways to cut a batch under a rule, fewest microbatches first.

    Args:
        rule: One of RULES.
        family: The workload's family.
        batch: Samples per iteration.
        num_stages, num_devices: P and N.
        tensor: Tensor-parallel degree of the replica with the most samples.
        unequal: Let the last microbatch be smaller as above, rather than moving the rule's number.

    >>> cuts("table", "bert", 8, 8, 8), cuts("table", "bert", 8, 8, 8, unequal=True)
    ([Cut(parts=4, samples=2, last=None)], [Cut(parts=3, samples=3, last=2)])
    """
    counts = microbatch_counts(rule, family, batch, num_stages, num_devices, tensor)
    if not unequal or num_stages == 1 or rule in ("free", "divisors"):
        return [Cut(count, batch // count) for count in counts]
    samples = batch * num_stages * tensor / num_devices
    parts = max(1, ceil(replica_count(rule, family, samples, tensor, num_stages, num_devices)))
    return [chunked(batch, parts, num_devices // num_stages)]


def chunked(batch: int, parts: int, width: int = 1) -> Cut:
    """Return how PyTorch cuts a batch: ``width`` replicas' samples into at most ``parts`` of equal size, but the last.

    Source:
        torch.chunk: parts of ceil(b / m) samples, of which there may be fewer than m.

    >>> chunked(24, 5), chunked(8, 5), chunked(64, 3, width=4)
    (Cut(parts=5, samples=5, last=4), Cut(parts=4, samples=2, last=None), Cut(parts=3, samples=24, last=16))
    """
    samples = min(batch, width * ceil(ceil(batch / width) / parts))
    count = ceil(batch / samples)
    left = batch - (count - 1) * samples
    return Cut(count, samples, None if left == samples else left)


def microbatch_counts(
    rule: str, family: str, batch: int, num_stages: int, num_devices: int, tensor: int = 1
) -> list[int]:
    """Return the numbers of microbatches to try, ascending; each divides the batch. Arguments as for `cuts`.

    Raises:
        ValueError: If the rule is unknown.

    >>> microbatch_counts("released", "bert", 64, 2, 8), microbatch_counts("divisors", "bert", 8, 4, 8)
    ([4], [4, 8])
    """
    if rule not in RULES:
        raise ValueError(f"microbatches must be one of {', '.join(RULES)}, got {rule!r}")
    if rule == "free":
        return divisors(batch)
    if rule == "divisors":
        return [count for count in divisors(batch) if count >= num_stages]
    if num_stages == 1:
        return [1]
    samples = batch * num_stages * tensor / num_devices
    return [nearest_divisor(batch, replica_count(rule, family, samples, tensor, num_stages, num_devices))]


def formula_count(family: str, samples: float, num_stages: int) -> float:
    """Return ceil(b / 4) for text, ceil(b / 16) for images (ceil(b / 32) on sixteen stages and more)."""
    if family in IMAGE_FAMILIES:
        return ceil(samples / (16 if num_stages <= 8 else 32))
    return ceil(samples / 4)


def table_count(family: str, samples: float, num_stages: int) -> float:
    """Return the hand table's count for eight devices; fractional where the release's formula is.

    >>> table_count("bert", 24, 8), table_count("swin", 40, 4), table_count("t5", 2, 2)
    (5.0, 3, 1)
    """
    if family == "vit":
        return 1 if samples <= 8 else 2
    if family == "swin":
        return 1 if samples <= 8 else 2 if samples < 32 else 3 if samples <= 96 else 4
    if family == "t5":
        return 1 if samples <= 2 else 3 if num_stages == 8 else 2
    return samples / 2 if samples < 6 else samples / 8 + 2


def replica_count(rule: str, family: str, samples: float, tensor: int, num_stages: int, num_devices: int) -> float:
    """Return the count that a rule gives a layer whose replicas have that many samples each; a fraction where it does.

    The hand tables ask for a replica's samples, whatever its tensor degree; the formulas divide them by it.
    BERT with pipeline and tensor but no data parallelism has a formula of its own, b / 4.
    """
    if rule == "released":
        return min(MOST, ceil(samples / tensor / EACH))
    if rule == "formula":
        return min(MOST, formula_count(family, samples / tensor, num_stages))
    if num_devices != TABLE_DEVICES:
        return formula_count(family, samples / tensor, num_stages)
    if family == "bert" and tensor > 1 and tensor * num_stages == num_devices:
        return samples / 4
    return table_count(family, samples, num_stages)


def nearest_divisor(batch: int, wanted: float) -> int:
    """Return the divisor of a batch with the least ratio to what is wanted; of two equal ones the larger.

    >>> nearest_divisor(24, 5), nearest_divisor(136, 34)
    (6, 34)
    """
    return min(reversed(divisors(batch)), key=lambda count: round(abs(log(count / max(1.0, wanted))), 12))
