"""Plans as Alpa's benchmark files state them: layer groups, submeshes, logical meshes, forced data parallelism.

``{"n_auto_layers": 8, "layers": [[0, 1], [2, 3], ...], "submesh": [[1, 2], ...], "logical": [[2, 1], ...],
"force_dp": [1, ...], "num_microbatches": 128}``; layers may be ``"16x1"``: sixteen stages of one group each.
Only plans whose operators' splits are implied are complete: batch over the rows, tensor parallel over the columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datafiles.loader import load_mapping
from simulator.plan import Axis, Plan, Stage
from simulator.problem import Problem
from simulator.uniform import recompute_segments, repeated_layers


def import_plan(path: Path, problem: Problem) -> Plan:
    """Read a plan.

    Raises:
        ValueError: If the file does not say enough, or what it says does not fit the problem.
    """
    stated = load_mapping(path)
    count = stated.get("num_microbatches")
    if not isinstance(count, int) or count < 1 or problem.global_batch % count:
        raise ValueError(
            f"{path}: num_microbatches must be a divisor of the global batch {problem.global_batch}, got {count!r}"
        )
    return plan_of(stated, problem, count)


def is_complete(stated: Mapping[str, Any]) -> bool:
    """Return whether the splits inside stages follow from what is stated."""
    forced = stated.get("force_dp", [])
    single = all(mesh == [1, 1] for mesh in stated["logical"])
    return single or (len(forced) == len(stated["logical"]) and 0 not in forced)


def plan_of(stated: Mapping[str, Any], problem: Problem, num_microbatches: int) -> Plan:
    """Return the plan that a mapping states, layers recomputed.

    Raises:
        ValueError: If meshes and layers do not fit together.
    """
    for name in ("layers", "submesh", "logical"):
        if name not in stated:
            raise ValueError(f"an Alpa plan must state layers, submesh and logical, {name} is missing")
    submeshes, logical = stated["submesh"], stated["logical"]
    if len(submeshes) != len(logical) or any(
        a * b != rows * columns for (a, b), (rows, columns) in zip(logical, submeshes, strict=False)
    ):
        raise ValueError(f"logical and physical meshes must have equal sizes, got {logical} and {submeshes}")
    if not is_complete(stated):
        raise ValueError("the splits of a stage must follow from its mesh: force_dp must be 1 for every stage")
    layers = repeated_layers(problem.workload)
    groups = stated.get("n_auto_layers", 1)
    if len(layers) % groups:
        raise ValueError(f"n_auto_layers must divide the {len(layers)} layers of the model, got {groups}")
    per_group = len(layers) // groups
    if isinstance(stated["layers"], str):
        stages, each = (int(word) for word in stated["layers"].split("x"))
        sizes = [each * per_group] * stages
    else:
        sizes = [len(group) * per_group for group in stated["layers"]]
    if sum(sizes) != len(layers) or len(sizes) != len(logical):
        raise ValueError(f"stages must hold {len(layers)} layers on {len(logical)} meshes, got {sizes}")
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
