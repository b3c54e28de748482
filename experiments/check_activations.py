"""What a layer keeps for its backward pass, beside what ``torch.cuda.memory_allocated`` said on A100s.

The maintainers of Galvatron measured models of one and of two layers on eight A100s, after the forward pass, for their
planner (bf16, flash attention, eight samples, tp 1 to 8); the difference is a layer. Their models are made of two
packages' layers, which differ in what they fuse and copy: of flash-attn and of Megatron-LM. Nothing is fitted.

Run: ``python -m experiments.check_activations --data DIR``
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from datafiles.loader import load_mapping
from experiments.cases.galvatron_memory import FOLDER, GPT, LLAMA, MIB
from hardware_models.cluster import parse_cluster
from hardware_models.model import HardwareModel
from hardware_models.runtime_files import load_runtime
from simulator.problem import Problem
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from workloads.model_file import spec_from_mapping
from workloads.registry import build_from_spec

SAMPLES = 8
LAYERS = (2, 4)
DEGREES = (1, 2, 4, 8)

FLASH_ATTN: Mapping[str, Any] = {"sequence_first": False, "fused_rotary": True}
"""Layers of flash-attn 2 keep samples first (flash_attn/modules/mha.py) and rotate in place (layers/rotary.py)."""
MEGATRON_2024: Mapping[str, Any] = {"fused_gate": True, "fused_rotary": True}
"""Its later defaults: bias_swiglu_fusion and apply_rope_fusion (arguments.py)."""


@dataclass(frozen=True)
class Profile:
    """One measured layer.

    Attributes:
        name: For people.
        file: How the file's name begins.
        shape: The model without its layers.
        code: Changes to the implementation of ``megatron-lm-2023-flash``.
        code_name: Whose layers these are.
        sequence_parallel: Under tensor parallelism.
        derived: The file has figures of layers alone, not of runs.
    """

    name: str
    file: str
    shape: Mapping[str, object]
    code: Mapping[str, Any] = field(default_factory=dict)
    code_name: str = "Megatron-LM"
    sequence_parallel: bool = False
    derived: bool = False


def _gpt(hidden: int, seq_len: int) -> dict[str, object]:
    return {**GPT, "hidden": hidden, "seq_len": seq_len}


def _grouped(hidden: int, heads: int, ffn: int, seq_len: int, **more: object) -> dict[str, object]:
    return {**LLAMA, "hidden": hidden, "heads": heads, "kv_heads": 8, "ffn": ffn, "seq_len": seq_len, **more}


GPT_FA = "gpt_fa__memory_profiling_bf16_hidden"
PROFILES = (
    Profile("GPT 1600 (heads of 50)", f"{GPT_FA}1600", _gpt(1600, 1024), FLASH_ATTN, "flash-attn"),
    Profile("GPT 2560", f"{GPT_FA}2560", _gpt(2560, 2048), FLASH_ATTN, "flash-attn"),
    Profile("GPT 4096", f"{GPT_FA}4096_head32_seqlen2048@f94f95f", _gpt(4096, 2048), FLASH_ATTN, "flash-attn"),
    Profile(
        "GPT 4096", f"{GPT_FA}4096_head32_seqlen2048@f94f95f", _gpt(4096, 2048), FLASH_ATTN, "flash-attn", True
    ),
    Profile(
        "GPT 4096", "gpt_hf__memory_profiling_bf16_hidden4096_head32_seqlen2048@d6da7e7", _gpt(4096, 2048),
        sequence_parallel=True,
    ),
    Profile("LLaMA 7B", "llama_fa__memory_profiling_bf16_hidden4096_head32_seqlen2048@17e3678",
            {**LLAMA, "seq_len": 2048}, FLASH_ATTN, "flash-attn"),
    Profile("LLaMA 7B", "llama_fa__memory_profiling_bf16_hidden4096_head32_seqlen2048@17e3678",
            {**LLAMA, "seq_len": 2048}, FLASH_ATTN, "flash-attn", True),
    Profile("Baichuan 7B", "baichuan__memory", {**LLAMA, "seq_len": 2048}, FLASH_ATTN, "flash-attn"),
    Profile("LLaMA 7B", "llama_hf__memory_profiling_bf16_llama-7b_all", {**LLAMA, "seq_len": 4096}, MEGATRON_2024,
            "Megatron-LM, rotary and gate fused", True),
    Profile("LLaMA 2 70B", "visualizer__memory_profiling_bf16_llama2-70b", _grouped(8192, 64, 28672, 4096),
            sequence_parallel=True, derived=True),
    Profile("LLaMA 3 8B", "visualizer__memory_profiling_bf16_llama3-8b", _grouped(4096, 32, 14336, 8192),
            sequence_parallel=True, derived=True),
    Profile("Qwen 2.5 32B", "visualizer__memory_profiling_bf16_qwen2.5-32b",
            _grouped(5120, 40, 27648, 8192, qkv_bias=True), sequence_parallel=True, derived=True),
)  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """A layer's activations, MiB a sample, under one tensor-parallel degree."""

    profile: Profile
    tp: int
    predicted_mib: float
    measured_mib: float

    @property
    def error(self) -> float:
        """Signed relative error."""
        return self.predicted_mib / self.measured_mib - 1


def predicted_mib(profile: Profile, tp: int) -> float:
    """Return what a layer keeps of a sample, as simulated: the difference of four layers and two, halved."""
    microbatch = SAMPLES * tp // DEGREES[-1]
    kept = [_kept_bytes(profile, tp, microbatch, layers) for layers in LAYERS]
    return (kept[1] - kept[0]) / (LAYERS[1] - LAYERS[0]) / microbatch / MIB


def _kept_bytes(profile: Profile, tp: int, microbatch: int, layers: int) -> float:
    runtime = load_runtime("megatron-lm-2023-flash")
    problem = Problem(
        workload=build_from_spec(spec_from_mapping({**profile.shape, "layers": layers}, profile.file), "flash"),
        hardware=HardwareModel(parse_cluster(f"a100-80g-dgx:1x{tp}")),
        runtime=replace(runtime, implementation=replace(runtime.implementation, **profile.code)),
        global_batch=microbatch,
    )
    sequence_parallel = profile.sequence_parallel and tp > 1
    plan = uniform_plan(problem, tp=tp, microbatch=microbatch, sequence_parallel=sequence_parallel)
    return float(simulate(plan, problem).memory[0].consumers["saved activations"])


def measured_mib(profile: Profile, tp: int, folder: Path) -> float:
    """Return the same as measured."""
    content = _content(profile.file, folder)
    suffix = "_sp" if profile.sequence_parallel else ""
    if profile.derived:
        (by_degree,) = content[f"layertype_0{suffix}"].values()
        return float(by_degree["tp_activation_per_bsz_dict"][str(tp)])
    runs = content[f"1_{tp}_{DEGREES[-1] // tp}{suffix}"]
    after_forward = {key: value for key, value in runs.items() if key.endswith("rank0_act")}
    one, two = (
        next(value for key, value in after_forward.items() if key.startswith(f"layernum[{layers}]"))
        for layers in (1, 2)
    )
    return float(two - one) / (SAMPLES * tp // DEGREES[-1])


@lru_cache(maxsize=8)
def _content(file: str, folder: Path) -> Mapping[str, Any]:
    (path,) = folder.glob(f"{file}*.json")
    return load_mapping(path)


def compared(data: Path) -> Iterator[Compared]:
    """Compare every profile and degree.

    Args:
        data: Folder of public sets.
    """
    folder = data / FOLDER
    for profile in PROFILES:
        for tp in DEGREES:
            yield Compared(profile, tp, predicted_mib(profile, tp), measured_mib(profile, tp, folder))


def markdown(data: Path) -> list[str]:
    """Return the table of `compared`, and the means of what was measured and what is derived."""
    found = list(compared(data))
    lines = [
        "| model, layers of | sequence parallel | tp 1: MiB a sample, error | tp 2 | tp 4 | tp 8 |",
        "|---|---|---|---|---|---|",
    ]
    for profile in PROFILES:
        cells = [f"{each.measured_mib:.1f}, {each.error:+.1%}" for each in found if each.profile is profile]
        note = " (derived)" if profile.derived else ""
        parallel = "yes" if profile.sequence_parallel else "no"
        lines.append(f"| {profile.name}, {profile.code_name}{note} | {parallel} | {' | '.join(cells)} |")
    means = [
        f"{fmean(errors):.2%} of {len(errors)} {word} figures, at most {max(errors):.2%}"
        for word, derived in (("measured", False), ("derived", True))
        if (errors := [abs(each.error) for each in found if each.profile.derived is derived])
    ]
    return [*lines, "", f"Mean absolute error: {'; '.join(means)}."]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of public sets")
    print("\n".join(markdown(parser.parse_args().data)))


if __name__ == "__main__":
    main()
