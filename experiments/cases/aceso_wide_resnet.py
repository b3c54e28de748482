"""Wide-ResNet in Aceso's evaluation: Megatron-LM's runs, with the uniform plans that reproduce their estimates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path

from datafiles.tables import load_table
from experiments.cases.case import Case, Measured, Skipped, cluster_string, data_file, problem_of
from hardware_models.cluster import parse_cluster
from hardware_models.collective_table import CollectiveTable
from hardware_models.import_aceso import import_collectives, import_table
from hardware_models.model import HardwareModel
from simulator.plan import Axis, Plan, Stage
from simulator.problem import Problem

LIKELY, MODELLED = "aceso-wide-resnet-likely", "aceso-wide-resnet-modelled"
SOURCE = "Aceso (EuroSys 2024), Table 4 and the artifact's results/ref"
RUNTIME = "megatron-lm-2021-fp32"
GLOBAL_BATCH = 1536
GPUS_PER_NODE = 8

# Size, model, GPUs, and the uniform plan: stages' first operators, tensor degree, samples, recomputed. Estimated by
# the public model at 66.99, 73.19, 90.49, 83.81 and 81.82 s, which the release's model here makes of them too; each is
# the fastest uniform plan that fits by that model. Stages end with a block, and the last takes what is left over.
PLANS = (
    ("500M", "wide-resnet-500m", 1, (0,), 1, 64, True),
    ("2B", "wide-resnet-2b", 4, (0, 68), 2, 16, False),
    ("4B", "wide-resnet-4b", 8, (0,), 8, 16, False),
    ("6_8B", "wide-resnet-6.8b", 16, (0,), 8, 16, True),
    ("13B", "wide-resnet-13b", 32, (0, 132), 8, 16, True),
)
CALIBRATED = ("500M",)
"""The convolution factors are fitted on this size's profile, so it is not reported on modelled kernels."""


def cases(data: Path | None) -> Iterator[Case | Skipped]:
    """Yield each run on the profile, and on modelled kernels where no constant was fitted on its operators."""
    folder = data_file(data, "aceso_v100", (LIKELY, MODELLED))
    if isinstance(folder, Skipped):
        yield folder
        return
    seconds = {
        row["size"]: row["iter_s"]
        for row in load_table(folder / "measured_e2e.csv", floats=("iter_s",))
        if (row["model"], row["system"]) == ("resnet", "megatron")
    }
    for size, model, gpus, starts, tp, samples, recomputed in PLANS:
        for group in (LIKELY, MODELLED):
            if group == MODELLED and size in CALIBRATED:
                continue
            profile = size if group == LIKELY else None
            yield Case(
                row_id=f"aceso_v100/measured_e2e.csv#megatron-wide-resnet-{size}"
                + (" on our kernels" if group == MODELLED else ""),
                groups=(group,),
                problem=_problem(model, gpus, folder, profile),
                plan=partial(_plan, starts, tp, samples, recomputed, gpus),
                measured=Measured(iteration_time_s=seconds[size], out_of_memory=False),
                source=SOURCE,
                features={"system": "megatron", "model": size, "gpus": gpus, "stages": len(starts)},
            )


def _problem(model: str, gpus: int, folder: Path, profile: str | None) -> Callable[[], Problem]:
    def build() -> Problem:
        cluster = cluster_string("v100-32g-ndv2", gpus, GPUS_PER_NODE)
        if profile is None:
            return problem_of(model=model, cluster=cluster, runtime=RUNTIME, global_batch=GLOBAL_BATCH)()
        hardware = HardwareModel(
            cluster=parse_cluster(cluster),
            operator_profile=import_table(folder / "ops.csv.gz", model="resnet", size=profile),
            collective_table=_collectives(folder / "comm.csv"),
        )
        return problem_of(model=model, cluster=hardware, runtime=RUNTIME, global_batch=GLOBAL_BATCH)()

    return build


@lru_cache(maxsize=2)
def _collectives(path: Path) -> CollectiveTable:
    return import_collectives(path)


def _plan(starts: tuple[int, ...], tp: int, samples: int, recomputed: bool, gpus: int, problem: Problem) -> Plan:
    stops = (*starts[1:], len(problem.workload))
    per_stage = gpus // len(starts)
    replicas = per_stage // tp
    sharding = (Axis("batch", replicas), Axis("tensor", tp))
    stages = tuple(
        Stage(
            operators=((start, stop),),
            devices=tuple(range(number * per_stage, (number + 1) * per_stage)),
            shardings=((stop - start, sharding),),
            recompute=tuple(
                (first, last) for first, last in problem.workload.layers[1:-1] if start <= first and last <= stop
            )
            if recomputed
            else (),
        )
        for number, (start, stop) in enumerate(zip(starts, stops, strict=True))
    )
    microbatch = samples * replicas
    return Plan(stages, microbatch, problem.global_batch // microbatch, overlap_gradient_sync=False)
