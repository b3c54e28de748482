"""Reading the strategy files that Galvatron's releases write.

One JSON mapping; lists are strings of comma-separated numbers, one per layer: ``tp_sizes_enc`` and whether their
ranks are neighbours (``tp_consecutive_flags``), ``dp_types_enc`` (1: sharded parameters, 0: ``default_dp_type``),
``checkpoint`` and ``use_sp``; ``pp_deg`` stages of ``pp_division`` layers; ``chunks`` microbatches of
``global_bsz`` samples; ``pipeline_type``; and of embedding and head ``vtp`` (tensor degree) and ``embed_sdp``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datafiles.errors import DataFileError
from datafiles.loader import load_mapping
from datafiles.words import counted
from searchers.galvatron.layer_profiles import Layer, LayerProfiles
from searchers.galvatron.microbatches import Cut, chunked
from searchers.galvatron.partitions import even
from searchers.galvatron.pipeline_plan import split
from searchers.galvatron.plans import runs_of_layer, spread
from simulator.costs import CostTables
from simulator.plan import Axis, Plan, Sharding, Stage
from simulator.problem import Problem

SCHEDULES = {"gpipe": "gpipe", "pipedream_flush": "1f1b"}
DATA_TYPES = {"ddp": 0, "zero2": 2, "zero3": 3}
_NUMBER = re.compile(r"\s*[0-9]{1,9}\s*")
KEYS = {
    "pp_deg", "tp_sizes_enc", "tp_consecutive_flags", "dp_types_enc", "use_sp", "checkpoint", "global_bsz", "chunks",
    "pp_division", "pipeline_type", "default_dp_type", "vtp", "vsp", "embed_sdp",
}  # fmt: skip


def import_plan(path: Path, problem: Problem) -> Plan:
    """Return the plan of a strategy file.

    Args:
        path: The file.
        problem: Its model must have as many layers; its batch must be the file's.

    Raises:
        DataFileError: If the file breaks a rule, or does not fit the problem.
    """
    content = load_mapping(path)
    unknown = sorted(set(content) - KEYS)
    if unknown:
        raise DataFileError(str(path), f"unknown key {unknown[0]!r}; known are {', '.join(sorted(KEYS))}")
    return _Reader(str(path), content, problem).plan()


class _Reader:
    def __init__(self, source: str, content: Mapping[str, Any], problem: Problem) -> None:
        self.source, self.content, self.problem = source, content, problem
        self.layers = LayerProfiles(CostTables(problem)).layers
        self.num_stages = self._whole("pp_deg")
        if problem.num_devices % self.num_stages:
            self._refuse(
                f"pp_deg must divide the cluster's {counted(problem.num_devices, 'device')}, got {self.num_stages}"
            )
        self.size = problem.num_devices // self.num_stages

    def plan(self) -> Plan:
        parts, batch = self._whole("chunks"), self._whole("global_bsz")
        cut = chunked(batch, parts, self.size) if batch % parts else Cut(parts, batch // parts)
        if self.problem.global_batch != batch:
            self._refuse(
                f"the file's global_bsz is {batch}, which must be the batch, got {self.problem.global_batch}; "
                f"try -b {batch}"
            )
        kind = self.content.get("pipeline_type", "gpipe")
        if not isinstance(kind, str) or kind not in SCHEDULES:
            self._refuse(f"pipeline_type must be one of {', '.join(SCHEDULES)}, got {kind!r}")
        division = self._partition()
        shardings = [self._sharding(number) for number in range(len(self.layers))]
        flags = self._flags("checkpoint", default=0)
        stages = []
        for number, layers in enumerate(split(self.layers, division)):
            start = number * self.size
            stages.append(
                Stage(
                    operators=((layers[0].span[0], layers[-1].span[1]),),
                    devices=tuple(range(start, start + self.size)),
                    shardings=tuple(run for layer in layers for run in self._runs(layer, shardings[layer.number], cut)),
                    recompute=tuple(layer.core for layer in layers if flags[layer.number]),
                )
            )
        return Plan(
            stages=tuple(stages),
            microbatch_size=cut.samples,
            num_microbatches=cut.parts,
            last_microbatch_size=cut.last,
            schedule=SCHEDULES[kind],
            gradient_reduction="last",
            overlap_gradient_sync=True,
        )

    def _runs(self, layer: Layer, own: Sharding, cut: Cut) -> list[tuple[int, Sharding]]:
        return runs_of_layer(layer, own, self._vocabulary_sharding() or spread(self.size, cut, own))

    def _vocabulary_sharding(self) -> Sharding | None:
        """Return how embedding and head are cut; the first releases have no word for it and never cut their weights."""
        if "vtp" not in self.content:
            return None
        tensor = self._whole("vtp")
        if self.size % tensor:
            self._refuse(f"vtp must divide the {counted(self.size, 'device')} of a stage, got {tensor}")
        sharded = self.content.get("embed_sdp", 0)
        if type(sharded) is not int or sharded not in (0, 1):
            self._refuse(f"embed_sdp must be 0 or 1, got {sharded!r:.60}")
        return self._axes(tensor, neighbours=True, sharded=bool(sharded))

    def _sharding(self, layer: int) -> Sharding:
        tensor = self._numbers("tp_sizes_enc")[layer]
        if tensor < 1 or self.size % tensor:
            self._refuse(
                f"tp_sizes_enc must divide the {counted(self.size, 'device')} of a stage, got {tensor} in layer {layer}"
            )
        if tensor > 1 and self._flags("use_sp", default=0)[layer]:
            self._refuse(f"layer {layer} uses Ulysses sequence parallelism (use_sp), for which plans have no split")
        neighbours = bool(self._flags("tp_consecutive_flags", default=1)[layer])
        return self._axes(tensor, neighbours=neighbours, sharded=bool(self._flags("dp_types_enc", default=0)[layer]))

    def _axes(self, tensor: int, *, neighbours: bool, sharded: bool) -> Sharding:
        word = self.content.get("default_dp_type", "ddp")
        if not isinstance(word, str) or word not in DATA_TYPES:
            self._refuse(f"default_dp_type must be one of {', '.join(DATA_TYPES)}, got {word!r}")
        data = Axis("batch", self.size // tensor, 3 if sharded else DATA_TYPES[word])
        axes = (data, Axis("tensor", tensor)) if neighbours else (Axis("tensor", tensor), data)
        return tuple(axis for axis in axes if axis.size > 1)

    def _partition(self) -> tuple[int, ...]:
        if "pp_division" not in self.content:
            return even(len(self.layers), self.num_stages)
        division = tuple(self._split("pp_division"))
        if len(division) != self.num_stages or min(division) < 1 or sum(division) != len(self.layers):
            self._refuse(
                f"pp_division must be {counted(self.num_stages, 'positive number')} that add up to the "
                f"{counted(len(self.layers), 'layer')} of {self.problem.workload.name}, got {list(division)}"
            )
        return division

    def _numbers(self, key: str, default: int | None = None) -> list[int]:
        """Return one number per layer."""
        if key not in self.content and default is not None:
            return [default] * len(self.layers)
        found = self._split(key)
        if len(found) != len(self.layers):
            self._refuse(
                f"{key} must have a number for each of the {counted(len(self.layers), 'layer')} of "
                f"{self.problem.workload.name}, got {len(found)}"
            )
        return found

    def _flags(self, key: str, default: int) -> list[int]:
        """Return 0 or 1 per layer."""
        found = self._numbers(key, default)
        if max(found) > 1:
            self._refuse(f"{key} must be 0 or 1 for each layer, got {max(found)}")
        return found

    def _split(self, key: str) -> list[int]:
        text = self.content.get(key)
        if not isinstance(text, str) or not all(_NUMBER.fullmatch(word) for word in text.split(",")):
            self._refuse(f"{key} must be whole numbers between commas, got {text!r:.60}")
        return [int(word) for word in str(text).split(",")]

    def _whole(self, key: str) -> int:
        value = self.content.get(key)
        if type(value) is not int or value < 1:
            self._refuse(f"{key} must be a whole number of at least 1, got {value!r:.60}")
        assert isinstance(value, int), "refused otherwise"
        return value

    def _refuse(self, message: str) -> None:
        raise DataFileError(self.source, message)
