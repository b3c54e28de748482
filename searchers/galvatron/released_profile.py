"""What the first release measured on eight RTX TITANs: seconds of layers and collectives, memory outside the layers.

A layer is named by its family and its millions of parameters.

Source: Galvatron data README (``titan_v1``: ``layer_profiles.csv``, ``collective_coefficients.csv``,
``embedding_head_memory.csv``).
"""

from __future__ import annotations

from collections.abc import Mapping

GPU, GPUS_PER_NODE = "titan-rtx-24gb", 8

LayerName = tuple[str, int]

FORWARD_MS: Mapping[LayerName, float] = {
    ("bert", 13): 1.458333,
    ("bert", 20): 2.291667,
    ("t5", 13): 1.458333,
    ("t5", 17): 2.708333,
    ("vit", 13): 0.5,
    ("vit", 20): 0.75,
    ("swin", 1): 1.25,
    ("swin", 5): 0.8875,
    ("swin", 20): 0.8,
    ("swin", 79): 1.225,
}
"""Milliseconds of a layer's forward pass per sample in fp32."""

OUTSIDE_MIB: Mapping[LayerName, tuple[float, float]] = {
    ("bert", 13): (640.0, 300.0),
    ("bert", 20): (790.0, 300.0),
}
"""Embedding and head of the models that begin with such a layer: model states, and activations of a sample, as of
November 2022 (793 and 313 in June). With these the shipped plans of BERT-Huge are what the planner finds, with shapes
they are not. No shipped plan tells of the other models, whose shapes are taken (T5 is published with 900 and 350 MiB,
627 and 325 by its shapes)."""

Shape = tuple[int, int, bool]
"""Stages, group size, and whether the ranks of a group are consecutive."""

MS_PER_MIB: Mapping[int, Mapping[Shape, float]] = {
    8: {
        (1, 8, True): 0.21530878, (1, 4, False): 0.220138889, (1, 4, True): 0.226519097, (1, 2, False): 0.271614583,
        (1, 2, True): 0.277994792, (2, 4, True): 0.230750868, (2, 2, False): 0.224153646, (2, 2, True): 0.275195313,
        (4, 2, True): 0.264908854,
    },
    16: {
        (1, 16, True): 0.214375, (1, 8, False): 0.299107143, (1, 8, True): 0.216517857, (1, 4, False): 0.505555556,
        (1, 4, True): 0.222660417, (1, 2, False): 0.86149375, (1, 2, True): 0.272153125, (2, 8, True): 0.208482143,
        (2, 4, False): 0.189566667, (2, 4, True): 0.224122569, (2, 2, False): 0.19699375, (2, 2, True): 0.266765625,
        (4, 4, True): 0.227439236, (4, 2, False): 0.187001042, (4, 2, True): 0.312235417, (8, 2, True): 0.26348125,
    },
}  # fmt: skip
"""By number of GPUs: milliseconds per MiB of a ring's traffic, 2 (n - 1) / n times the message, all groups at once."""
