"""Plans as Alpa's benchmark files state them: layer groups, submeshes, logical meshes, forced data parallelism.

``{"n_auto_layers": 8, "layers": [[0, 1], [2, 3], ...], "submesh": [[1, 2], ...], "logical": [[2, 1], ...],
"force_dp": [1, ...], "num_microbatches": 128}``; layers may be ``"16x1"``: sixteen stages of one group each.
Only plans whose operators' splits are implied are complete: batch over the rows, tensor parallel over the columns.
"""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from datafiles.loader import load_mapping
from datafiles.schema import FileModel, validated
from datafiles.values import short
from datafiles.words import counted
from simulator.plan import Axis, Plan, Stage
from simulator.problem import Problem
from simulator.uniform import recompute_segments, repeated_layers

Count = Annotated[int, Field(ge=1, le=2**20)]
Mesh = tuple[Count, Count]
MOST_GROUPS = 2**16


def _in_full(layers: object) -> object:
    """Return the groups of each stage, listed too where ``"16x1"`` says how many.

    >>> _in_full("2x3")
    ((0, 1, 2), (3, 4, 5))
    """
    if isinstance(layers, list):
        return tuple(tuple(groups) if isinstance(groups, list) else groups for groups in layers)
    if not isinstance(layers, str):
        return layers
    words = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", layers)
    stages, each = (int(word) for word in words.groups()) if words else (0, 0)
    if not 0 < stages * each <= MOST_GROUPS:
        raise ValueError('must be a list of groups for each stage, or stages and groups of each as in "16x1"')
    return tuple(tuple(range(stage * each, stage * each + each)) for stage in range(stages))


class StatedPlan(FileModel):
    """The file format.

    Attributes:
        layers: Groups of layers of each stage, in order; or stages and groups of each, as in ``"16x1"``.
        submesh: Nodes and devices of each stage.
        logical: Rows and columns of its mesh.
        force_dp: 1 for stages whose rows share the batch; for all of them unless meshes are single devices.
        n_auto_layers: Groups that the layers are in: as many as are named, unless said.
        num_microbatches: Of an iteration.
    """

    layers: Annotated[
        tuple[Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)], ...],
        Field(min_length=1),
        BeforeValidator(_in_full),
    ]
    submesh: tuple[Mesh, ...]
    logical: tuple[Mesh, ...]
    force_dp: tuple[Literal[0, 1], ...] = ()
    n_auto_layers: Count | None = None
    num_microbatches: Count | None = None

    @property
    def groups(self) -> list[int]:
        """Groups of layers of each stage."""
        return [len(group) for group in self.layers]

    @property
    def is_complete(self) -> bool:
        """Whether the splits inside stages follow from what is stated."""
        single = all(mesh == (1, 1) for mesh in self.logical)
        return single or (len(self.force_dp) == len(self.logical) and 0 not in self.force_dp)


def import_plan(path: Path, problem: Problem) -> Plan:
    """Read a plan.

    Raises:
        ValueError: If the file does not say enough, or what it says does not fit the problem.
    """
    stated = validated(StatedPlan, load_mapping(path), str(path))
    count = stated.num_microbatches
    if count is None or problem.global_batch % count:
        raise ValueError(
            f"{path}: num_microbatches must be a divisor of the global batch {problem.global_batch}, got {count!r}"
        )
    return plan_of(stated, problem, count)


def plan_of(stated: StatedPlan, problem: Problem, num_microbatches: int) -> Plan:
    """Return the plan that is stated, layers recomputed.

    Raises:
        ValueError: If meshes and layers do not fit together.
    """
    submeshes, logical, groups = stated.submesh, stated.logical, stated.groups
    if len(submeshes) != len(logical) or any(
        a * b != rows * columns for (a, b), (rows, columns) in zip(logical, submeshes, strict=True)
    ):
        raise ValueError(
            f"logical and physical meshes must have equal sizes, got {short(str(logical))} and {short(str(submeshes))}"
        )
    num_devices = sum(rows * columns for rows, columns in logical)
    if num_devices > problem.num_devices:
        raise ValueError(
            f"the cluster must have the {counted(num_devices, 'device')} of the plan, got {problem.num_devices}"
        )
    if not stated.is_complete:
        raise ValueError("the splits of a stage must follow from its mesh: force_dp must be 1 for every stage")
    number = stated.n_auto_layers or sum(groups)
    if list(chain(*stated.layers)) != list(range(number)):
        named = short(str(stated.layers))
        raise ValueError(f"stages must hold the groups of layers 0 to {number - 1} in order, got {named}")
    layers = repeated_layers(problem.workload)
    if len(layers) % number:
        raise ValueError(f"n_auto_layers must divide the {counted(len(layers), 'layer')} of the model, got {number}")
    sizes = [count * (len(layers) // number) for count in groups]
    if sum(sizes) != len(layers) or len(sizes) != len(logical):
        raise ValueError(
            f"stages must hold {counted(len(layers), 'layer')} on {counted(len(logical), 'mesh', 'meshes')}, got "
            f"{short(str(sizes))}"
        )
    found: list[Stage] = []
    start, taken, device = 0, 0, 0
    for size, (rows, columns) in zip(sizes, logical, strict=True):
        taken += size
        stop = layers[taken][0] if taken < len(layers) else len(problem.workload)
        found.append(
            Stage(
                operators=((start, stop),),
                devices=tuple(range(device, device + rows * columns)),
                shardings=((stop - start, (Axis("batch", rows), Axis("tensor", columns))),),
                recompute=recompute_segments(problem.workload, start, stop, "full"),
            )
        )
        start, device = stop, device + rows * columns
    return Plan(
        stages=tuple(found),
        microbatch_size=problem.global_batch // num_microbatches,
        num_microbatches=num_microbatches,
        overlap_gradient_sync=problem.runtime.overlap_gradient_sync,
    )
