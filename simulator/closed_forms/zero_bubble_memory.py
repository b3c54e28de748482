"""Closed form of memory under zb-h1: what a stage holds while input and weight gradients come in turn.

The input pass of microbatch b finds the forward passes that are ahead of it, and what the weight passes still need of
those before it: one more with each, until weight passes begin after that of microbatch i on stage i. Both grow and fall
in lines, so only their ends are looked at.

Source: the order that ``simulator.schedules.zero_bubble`` makes.
"""

from __future__ import annotations


def zero_bubble_peak_bytes(
    kept: float,
    for_weights: float,
    input_pass: float,
    weight_pass: float,
    last: float,
    anew: float,
    stage: int,
    num_stages: int,
    num_microbatches: int,
) -> float:
    """Return the most that a stage holds beyond its states, less gradients that no weight pass has begun to make.

    Args:
        kept: Bytes of a microbatch between its forward and its input pass.
        for_weights: Between its input and its weight pass.
        input_pass: What its input pass needs besides ``kept``.
        weight_pass: What its weight pass needs besides ``for_weights``.
        last: What the end of a pass needs.
        anew: Gradients that the first weight pass makes.
        stage, num_stages, num_microbatches: Of the pipeline.

    >>> [zero_bubble_peak_bytes(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, stage, 4, 8) for stage in range(4)]
    [4.0, 4.0, 4.0, 4.0]
    >>> [zero_bubble_peak_bytes(1.0, 5.0, 0.0, 0.0, 0.0, 0.0, stage, 4, 8) for stage in range(4)]
    [8.0, 12.0, 16.0, 20.0]
    """
    depth = min(num_stages - stage, num_microbatches)
    # As many as no weight pass comes before wait at most; those that are left at the end make gradients one by one.
    waiting = min(stage, num_microbatches - 1)
    highest = max((waiting + 1) * for_weights + weight_pass, anew + waiting * for_weights + last)
    if num_microbatches > 1:
        highest = max(highest, anew + waiting * for_weights + weight_pass)
    for microbatch in (0, stage, num_microbatches - depth, stage + 1, num_microbatches - 1):
        if 0 <= microbatch < num_microbatches:
            held = (min(num_microbatches, depth + microbatch) - microbatch) * kept
            held += min(microbatch, stage) * for_weights
            held += anew if microbatch > stage else 0.0
            highest = max(highest, held + input_pass)
            if microbatch >= stage:
                highest = max(highest, held - kept + for_weights + weight_pass)
    return highest
