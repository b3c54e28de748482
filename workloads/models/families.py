"""The model families: specification, builder and presets of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workloads.models import bert, gnmt, gpt, llama, resnet, swin, t5, vgg, vit, xlnet
from workloads.models.fields import ModelSpec
from workloads.operators import Workload


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        spec: Class of its specifications.
        build: From a specification and the attention (``"plain"``, ``"flash"``) to the workload.
        presets: Its named models.
    """

    spec: type[ModelSpec]
    build: Callable[[Any, str], Workload]
    presets: Mapping[str, ModelSpec]


FAMILIES: Mapping[str, Family] = {
    "gpt": Family(gpt.GPTSpec, gpt.build, gpt.PRESETS),
    "llama": Family(llama.LlamaSpec, llama.build, llama.PRESETS),
    "bert": Family(bert.BertSpec, bert.build, bert.PRESETS),
    "t5": Family(t5.T5Spec, t5.build, t5.PRESETS),
    "vit": Family(vit.ViTSpec, vit.build, vit.PRESETS),
    "resnet": Family(resnet.ResNetSpec, resnet.build, resnet.PRESETS),
    "vgg": Family(vgg.VggSpec, vgg.build, vgg.PRESETS),
    "gnmt": Family(gnmt.GnmtSpec, gnmt.build, gnmt.PRESETS),
    "xlnet": Family(xlnet.XLNetSpec, xlnet.build, xlnet.PRESETS),
    "swin": Family(swin.SwinSpec, swin.build, swin.PRESETS),
}
