"""Aceso's GPT runs on V100s: on its own operator profile where a copy is at hand, on our kernel model anyway.

Its peaks are of what PyTorch's allocator holds: they are set against predictions that add the allocator's reserve to
live bytes (section 3.3 and Exp#9; that sum gives the printed mean error of 14.26 %).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from datafiles.loader import load_mapping, parse_mapping
from datafiles.tables import load_table
from experiments.cases.case import PRINTED, Case, Measured, Skipped, data_file, problem_of
from hardware_models.cluster import parse_cluster
from hardware_models.collective_table import CollectiveTable
from hardware_models.import_aceso import import_collectives, import_table
from hardware_models.model import HardwareModel
from simulator.plan import Axis, Plan, Stage, run_lengths
from simulator.problem import Problem
from workloads.models.gpt import GPTSpec
from workloads.registry import model_spec

CERTAIN, LIKELY, MODELLED = "aceso-gpt-certain", "aceso-gpt-likely", "aceso-gpt-modelled"
LIKELY_MODELLED = "aceso-gpt-likely-modelled"
SOURCE = "Aceso (EuroSys 2024), Table 3 and the artifact's results/ref"
MEMORY_LIMIT_BYTES = 28000 << 20
MODELS = {"350M": "gpt3-350m", "1_3B": "gpt3-1.3b", "2_6B": "gpt3-2.6b", "6_7B": "gpt3-6.7b", "13B": "gpt3-13b"}
GPUS_PER_NODE = 8


def cases(data: Path | None) -> Iterator[Case | Skipped]:
    """Yield the one certain plan on modelled kernels; with data, all plans with and without the profile."""
    printed = load_mapping(PRINTED / "aceso_gpt_1_3b.yaml")
    spec = model_spec(MODELS[printed["size"]])
    assert isinstance(spec, GPTSpec)
    seconds = reported_flop(spec, printed["global_batch"]) / (printed["gpus"] * printed["tflop_per_s_per_gpu"] * 1e12)
    measured = Measured(
        iteration_time_s=seconds, out_of_memory=False, peak_bytes=printed["peak_mib"] * 2.0**20, peak_is_reserved=True
    )
    yield _case(printed, MODELLED, "aceso_gpt_1_3b.yaml#1", measured, None)
    folder = data_file(data, "aceso_v100", (CERTAIN, LIKELY, LIKELY_MODELLED))
    if isinstance(folder, Skipped):
        yield folder
        return
    yield _case(printed, CERTAIN, "aceso_gpt_1_3b.yaml#1 on its profile", measured, folder)
    figures = {
        (row["system"], row["size"]): row
        for row in load_table(folder / "measured_e2e.csv", floats=("iter_s", "peak_mem_mib"))
        if row["model"] == "gpt"
    }
    for system, entry in _best_plans(folder / "reference_plans.json"):
        figure = figures[system, entry["size"]]
        if (system, entry["size"]) == ("aceso", printed["size"]):
            continue
        peak = figure["peak_mem_mib"]
        seen = Measured(
            iteration_time_s=figure["iter_s"],
            out_of_memory=False,
            peak_bytes=peak * 2.0**20 if peak is not None else None,
            peak_is_reserved=True,
        )
        row_id = f"aceso_v100/measured_e2e.csv#{system}-{entry['size']}"
        yield _case(entry, LIKELY, row_id, seen, folder, system=system)
        yield _case(entry, LIKELY_MODELLED, f"{row_id} on our kernels", seen, None, system=system)


def reported_flop(spec: GPTSpec, global_batch: int) -> float:
    """Return the FLOP of one iteration in Aceso's TFLOP/s, recomputation not counted.

    Source:
        Aceso (EuroSys 2024), Table 3: 72 B s l h^2 (1 + s / 6h) + 6 B s h V reproduces the measured times to 0.02 s.
    """
    return (
        72.0 * global_batch * spec.seq_len * spec.layers * spec.hidden**2 * (1 + spec.seq_len / (6 * spec.hidden))
        + 6.0 * global_batch * spec.seq_len * spec.hidden * spec.vocab
    )


def _best_plans(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the fastest GPT plan (by its searcher's estimate) of each system and size."""
    text = path.read_text()
    plans = parse_mapping(f'{{"plans": {text}}}', source=str(path), format="json")["plans"]
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in plans:
        if entry["model"] == "gpt":
            system = "megatron" if entry["searcher"] == "megatron_grid" else "aceso"
            key = (system, entry["size"])
            if key not in best or entry["est_iter_s"] < best[key]["est_iter_s"]:
                best[key] = entry
    for (system, _), entry in best.items():
        yield system, entry


def _case(
    entry: Mapping[str, Any],
    group: str,
    row_id: str,
    measured: Measured,
    folder: Path | None,
    system: str = "aceso",
) -> Case:
    size, gpus = entry["size"], entry["gpus"]
    return Case(
        row_id=row_id,
        groups=(group,),
        problem=partial(problem_on, MODELS[size], ("gpt", size), gpus, entry["global_batch"], folder),
        plan=partial(plan_of, entry),
        measured=measured,
        source=SOURCE,
        rivals=f"gpt {size}" if group in (LIKELY, LIKELY_MODELLED) else None,
        features={"system": system, "model": size, "gpus": gpus, "stages": len(entry["stages"])},
    )


def problem_on(
    model: str, profile: tuple[str, str], gpus: int, global_batch: int, folder: Path | None
) -> Problem:
    """Return a problem on Aceso's cluster.

    Args:
        model: Ours.
        profile: Model and size as Aceso's profile names them.
        gpus: V100s, eight a node.
        global_batch: Samples per iteration.
        folder: Of the profile; None for modelled kernels.
    """
    nodes = max(1, gpus // GPUS_PER_NODE)
    cluster = f"v100-32g-ndv2:{nodes}x{min(gpus, GPUS_PER_NODE)}"
    hardware: str | HardwareModel = cluster
    if folder is not None:
        hardware = HardwareModel(
            cluster=parse_cluster(cluster),
            operator_profile=import_table(folder / "ops.csv.gz", model=profile[0], size=profile[1]),
            collective_table=_collectives(folder / "comm.csv"),
        )
    return problem_of(
        model=model,
        cluster=hardware,
        runtime="megatron-lm-2021",
        global_batch=global_batch,
        memory_limit_bytes=MEMORY_LIMIT_BYTES,
    )()


@lru_cache(maxsize=4)
def _collectives(path: Path) -> CollectiveTable:
    return import_collectives(path)


def plan_of(entry: Mapping[str, Any], problem: Problem) -> Plan:
    """Return the plan of an entry: Aceso's stages of operators with degrees, splits and recompute flags."""
    stages: list[Stage] = []
    first_operator, first_device = 0, 0
    for stage in entry["stages"]:
        count, gpus = stage["num_ops"], stage["gpus"]
        columns = (_decoded(stage[name]) for name in ("tp", "dp", "algo"))
        shardings = run_lengths(
            (Axis("batch", dp), Axis("tensor_alternative" if algorithm else "tensor", tp))
            for tp, dp, algorithm in zip(*columns, strict=True)
        )
        stages.append(
            Stage(
                operators=((first_operator, first_operator + count),),
                devices=tuple(range(first_device, first_device + gpus)),
                shardings=shardings,
                recompute=_segments(_decoded(stage["recompute"]), first_operator, problem),
            )
        )
        first_operator, first_device = first_operator + count, first_device + gpus
    microbatch = entry["aggregate_micro_batch"]
    return Plan(
        stages=tuple(stages),
        microbatch_size=microbatch,
        num_microbatches=entry["global_batch"] // microbatch,
        overlap_gradient_sync=False,
    )


def _decoded(text: str) -> list[int]:
    """Return the values of ``VALUExCOUNT`` runs.

    >>> _decoded("0x3 1x2")
    [0, 0, 0, 1, 1]
    """
    values: list[int] = []
    for run in text.split():
        value, _, count = run.partition("x")
        values += [int(value)] * int(count)
    return values


def _segments(flags: Sequence[int], first: int, problem: Problem) -> tuple[tuple[int, int], ...]:
    """Return recompute segments: maximal runs of flagged operators, cut where a layer ends."""
    layer_ends = {stop for _, stop in problem.workload.layers}
    segments, start = [], None
    for offset, flag in enumerate(flags):
        index = first + offset
        if flag and start is None:
            start = index
        following = flags[offset + 1] if offset + 1 < len(flags) else 0
        if start is not None and (not following or index + 1 in layer_ends):
            segments.append((start, index + 1))
            start = None
    return tuple(segments)
