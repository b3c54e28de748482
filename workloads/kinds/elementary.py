"""Operators as chains of one kernel per operation, as TensorFlow 1 runs them.

Counted from what BERT's ``modeling.py`` (google-research) calls and from the gradients that ``tf.gradients`` builds. A
pass is written as the tensors it reads and writes; ``n`` is one activation tensor. A pass that reduces a tensor writes
next to nothing.

Source:
    TensorFlow 1.12: ``nn.dropout``, ``nn.softmax`` (three kernels on GPUs), ``contrib.layers.layer_norm``
    (``nn.moments`` and ``nn.batch_normalization``); ``gelu`` of google-research/bert, ``0.5 * (1 + erf(x / sqrt(2)))``.
"""

from __future__ import annotations

from workloads.kernels import Kernel, MemoryBound

Pass = tuple[int, int]

MAP: Pass = (1, 1)
ZIP: Pass = (2, 1)
REDUCE: Pass = (1, 0)
FILL: Pass = (0, 1)

DROPOUT_FORWARD = (MAP, MAP, MAP, ZIP)
"""Shift the random numbers, round, scale the input, multiply; the draw itself comes before."""

DROPOUT_BACKWARD = (ZIP, MAP)
SOFTMAX_FORWARD = (MAP, MAP, REDUCE, REDUCE, MAP)
"""Scale, add the mask; maximum, sum of exponentials, quotient."""

SOFTMAX_BACKWARD = (ZIP, REDUCE, MAP, ZIP, MAP)
"""Product, its sum, difference, product; the scale's gradient."""

GELU_FORWARD = (MAP, MAP, MAP, MAP, ZIP)
GELU_BACKWARD = (ZIP, ZIP, MAP, MAP, MAP, MAP, MAP, ZIP, MAP, ZIP)
"""Two products; half; the derivative of erf (square, negate, exp, constant, product); quotient; sum of both ways."""

NORM_FORWARD = (REDUCE, MAP, REDUCE, FILL, ZIP, MAP, MAP, ZIP)
"""Mean, squared difference, its mean; gain over deviation at full size; products, difference, sum."""

NORM_BACKWARD = (ZIP, ZIP, MAP, ZIP, REDUCE, MAP, ZIP, MAP, REDUCE, REDUCE, MAP, MAP, MAP, (4, 1))
"""Of both products, of the sum; of gain and deviation (reductions); of the squared difference; sum of four ways."""


def chain(passes: tuple[Pass, ...], size_bytes: float) -> list[Kernel]:
    """Return one kernel per pass over tensors of ``size_bytes``."""
    return [
        MemoryBound(reads * size_bytes, writes * size_bytes, "elementwise" if writes else "reduction")
        for reads, writes in passes
    ]
