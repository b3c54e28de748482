"""Peak memory that Galvatron's maintainers measured for their planner: GPT and LLaMA of a few layers on eight A100s.

Its profiler (hetu-galvatron 1.0.0, core/profiler.py) runs models of one and two layers, or of one for each pipeline
stage, under ZeRO-3: eight samples in one microbatch, layers split over tensor-parallel neighbours, embedding and head
sharded over all devices of their stage. Of the first and the last device it keeps what was allocated after the fourth
backward pass (``ms``) and how much more had been at most since the iteration began (``act_peak``); the larger sum of
the two devices is a case.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datafiles.errors import DataFileError
from datafiles.loader import load_mapping
from experiments.cases.case import Case, Measured, Skipped, data_file, problem_of
from simulator.plan import Axis, Plan, Sharding, Stage
from simulator.problem import Problem
from workloads.model_file import spec_from_mapping

GROUP = "galvatron-a100-memory"
SOURCE = "Hetu-Galvatron, memory profiles of bf16 models (galvatron/profiles_raw)"
FOLDER = "galvatron/profiles_raw"
RUNTIME, CLUSTER, NUM_GPUS, SAMPLES = "hetu-galvatron", "a100-80g-dgx:1x8", 8, 8
MIB = 2**20

GPT: Mapping[str, object] = {"family": "gpt", "vocab": 50257, "heads": 32}
LLAMA: Mapping[str, object] = {"family": "llama", "vocab": 32000, "hidden": 4096, "heads": 32, "ffn": 11008}
UNTIED: Mapping[str, object] = {"tied_embeddings": False, "vocab_multiple": 1}
"""Modules are wrapped one by one, so that embedding and head each have their own copy of the words."""

FILES: Mapping[str, Mapping[str, object]] = {
    "gpt_fa__memory_profiling_bf16_hidden1600_head32_seqlen1024@ce9205a": {
        **GPT, **UNTIED, "hidden": 1600, "seq_len": 1024,
    },
    "gpt_fa__memory_profiling_bf16_hidden2560_head32_seqlen2048@d38537c": {
        **GPT, **UNTIED, "hidden": 2560, "seq_len": 2048,
    },
    "gpt_fa__memory_profiling_bf16_hidden4096_head32_seqlen2048@79b5eef": {
        **GPT, **UNTIED, "hidden": 4096, "seq_len": 2048,
    },
    "llama_fa__memory_profiling_bf16_hidden4096_head32_seqlen2048@7e4d6c0": {**LLAMA, "seq_len": 2048},
    "baichuan__memory_profiling_bf16_hidden4096_head32_seqlen2048@4ebdbea": {
        **LLAMA, "vocab": 64000, "seq_len": 2048,
    },
}  # fmt: skip
"""Models by file: those whose code is in the package, each set of runs once."""

_KEY = re.compile(r"(\d+)_(\d+)_(\d+)(_c)?")
_LAYERS = re.compile(r"layernum\[(\d+)\]_bsz8_rank0_ms")


@dataclass(frozen=True)
class Run:
    """One measured run: layers, degrees, and whether each layer is computed again."""

    layers: int
    pp: int
    tp: int
    recompute: bool

    def plan(self, problem: Problem) -> Plan:
        """Return what was run: as many layers on each stage."""
        size = NUM_GPUS // self.pp
        whole, split = self._mesh(size, 1), self._mesh(size, self.tp)
        (embedding, *layers, head), each = problem.workload.layers, self.layers // self.pp
        stages = []
        for number in range(self.pp):
            own = layers[number * each : (number + 1) * each]
            start, stop = own[0][0], own[-1][1]
            runs = [(stop - start, split)]
            if number == 0:
                start, runs = 0, [(embedding[1], whole), *runs]
            if number == self.pp - 1:
                stop, runs = head[1], [*runs, (head[1] - head[0], whole)]
            devices = tuple(range(number * size, (number + 1) * size))
            stages.append(Stage(((start, stop),), devices, tuple(runs), tuple(own) if self.recompute else ()))
        return Plan(
            stages=tuple(stages),
            microbatch_size=SAMPLES,
            num_microbatches=1,
            schedule="gpipe",
            gradient_reduction="every",
            overlap_gradient_sync=True,
        )

    @staticmethod
    def _mesh(size: int, tensor: int) -> Sharding:
        axes = Axis("batch", size // tensor, 3 if size > tensor else 0), Axis("tensor", tensor)
        return tuple(axis for axis in axes if axis.size > 1)


def runs_of(content: Mapping[str, Any], source: str) -> Iterator[tuple[str, Run, float]]:
    """Yield the key, the run and the peak in bytes of everything that a file measured without sequence parallelism.

    Raises:
        DataFileError: If a run lacks a figure.
    """
    for key, figures in content.items():
        degrees = _KEY.fullmatch(key)
        if degrees is None:
            continue
        pp, tp, _ = (int(degrees[place]) for place in (1, 2, 3))
        for layers in (int(found[1]) for name in figures if (found := _LAYERS.fullmatch(name))):
            peaks = []
            for rank in (0, NUM_GPUS - 1):
                names = [f"layernum[{layers}]_bsz8_rank{rank}_{what}" for what in ("ms", "act_peak")]
                missing = [name for name in names if not isinstance(figures.get(name), int | float)]
                if missing:
                    raise DataFileError(source, f"{key} must have a number for {missing[0]}, which is missing")
                peaks.append(sum(figures[name] for name in names))
            yield key, Run(layers, pp, tp, degrees[4] is not None), max(peaks) * MIB


def cases(data: Path | None) -> Iterator[Case | Skipped]:
    """Yield one case per run."""
    folder = data_file(data, FOLDER, (GROUP,))
    if isinstance(folder, Skipped):
        yield folder
        return
    for name, shape in FILES.items():
        path = data_file(data, f"{FOLDER}/{name}.json", (GROUP,))
        if isinstance(path, Skipped):
            yield path
            continue
        for key, run, peak_bytes in runs_of(load_mapping(path), str(path)):
            spec = spec_from_mapping({**shape, "layers": run.layers}, name)
            yield Case(
                row_id=f"{FOLDER}/{path.name}#{key}-{run.layers}",
                groups=(GROUP,),
                problem=problem_of(model=spec, cluster=CLUSTER, runtime=RUNTIME, global_batch=SAMPLES),
                plan=run.plan,
                measured=Measured(out_of_memory=False, peak_bytes=peak_bytes),
                source=SOURCE,
                features={
                    "model": f"{shape['family']} {shape['hidden']}",
                    "layers": run.layers,
                    "pp": run.pp,
                    "tp": run.tp,
                    "recompute": "full" if run.recompute else "none",
                },
            )
