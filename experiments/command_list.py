"""``windtunnel list``: what can be named."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from experiments.console import AsJson, console, print_json, table, writable


class What(StrEnum):
    """Groups of names."""

    MODELS = "models"
    CLUSTERS = "clusters"
    GPUS = "gpus"
    RUNTIMES = "runtimes"
    SEARCHERS = "searchers"
    EXPERIMENTS = "experiments"
    EFFECTS = "effects"
    STRATEGIES = "strategies"


def list_names(
    what: Annotated[What, typer.Argument(help="What to list.")],
    as_json: AsJson = False,
    gpus: Annotated[int, typer.Option(help="strategies: devices, a power of two.", min=1, max=1024)] = 8,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="strategies: draw them into this PNG.", show_default=False)
    ] = None,
) -> None:
    """List models, clusters, GPUs, runtimes, searchers, experiments, effects to switch off, or Galvatron's strategies.

    Example: windtunnel list strategies --gpus 8 -o trees.png
    """
    if what is What.STRATEGIES:
        rows = _strategies(gpus)
        if output is not None:
            from experiments.strategy_trees import save_trees

            save_trees(writable(output), gpus)
    else:
        rows = _ROWS[what]()
    if as_json:
        print_json([dict(zip(_COLUMNS[what], row, strict=True)) for row in rows])
        return
    console().print(table(None, [(column.replace("_", " "), "left") for column in _COLUMNS[what]], rows))
    if what is What.STRATEGIES:
        console().print(f"each with and without activation checkpointing: {2 * len(rows)} strategies")
        if output is not None:
            console().print(f"written: {output}", markup=False)


def _models() -> list[tuple[str, ...]]:
    from workloads.registry import build_workload, model_names

    rows: list[tuple[str, ...]] = []
    for name in model_names():
        workload = build_workload(name)
        rows.append(
            (
                name,
                workload.family,
                f"{workload.num_parameters / 1e9:.2f}",
                str(len(workload.layers)),
                str(workload.tokens_per_sample),
            )
        )
    return rows


def _clusters() -> list[tuple[str, ...]]:
    from hardware_models.cluster import cluster_description, cluster_presets

    return [(f"{name}:NODESxGPUS", cluster_description(name)) for name in cluster_presets()]


def _gpus() -> list[tuple[str, ...]]:
    from hardware_models.cluster import cluster_presets, parse_cluster
    from hardware_models.gpus import gpu_names, load_gpu

    presets: dict[str, list[str]] = {}
    for preset in cluster_presets():
        for gpu_type in set(parse_cluster(f"{preset}:1x1").gpu_types):
            presets.setdefault(gpu_type, []).append(preset)
    rows: list[tuple[str, ...]] = []
    for name in gpu_names():
        gpu = load_gpu(name)
        peaks = ", ".join(f"{dtype} {peak / 1e12:.4g}" for dtype, peak in gpu.peak_flop_per_s.items())
        size, rate = f"{gpu.memory_bytes / 2**30:.1f}", f"{gpu.memory_bytes_per_s / 1e9:.0f}"
        rows.append((name, peaks, size, rate, ", ".join(presets.get(name, ("none",)))))
    return rows


def _runtimes() -> list[tuple[str, ...]]:
    from hardware_models.runtime import runtime_description, runtime_names

    return [(name, runtime_description(name)) for name in runtime_names()]


def _searchers() -> list[tuple[str, ...]]:
    from searchers.registry import searcher_class, searcher_names

    rows: list[tuple[str, ...]] = []
    for name in searcher_names():
        found = searcher_class(name)
        rows.append((name, (found.__doc__ or "").strip().partition("\n")[0], found.paper))
    return rows


def _experiments() -> list[tuple[str, ...]]:
    from experiments.reproduce.registry import EXPERIMENTS

    return [(each.name, each.shows, each.source) for each in EXPERIMENTS.values()]


def _effects() -> list[tuple[str, ...]]:
    import re

    from simulator.fidelity import Fidelity

    # The docstring is the one place that says what each switch is; "name: text" per attribute.
    documented = re.findall(r"^ {8}(\w+): (.+(?:\n {12}.+)*)", Fidelity.__doc__ or "", flags=re.MULTILINE)
    words = {name.replace("_", "-"): re.sub(r"\s+", " ", text).replace("``", "") for name, text in documented}
    return [(name, words.get(name, "")) for name in Fidelity.names()]


def _strategies(gpus: int) -> list[tuple[str, ...]]:
    from searchers.galvatron.strategies import decision_trees

    rows: list[tuple[str, ...]] = []
    for degree, found in decision_trees(gpus).items():
        plain = [strategy for strategy in found if not strategy.checkpoint]
        rows += [(str(degree), str(number + 1), str(strategy)) for number, strategy in enumerate(plain)]
    return rows


_ROWS = {
    What.MODELS: _models,
    What.CLUSTERS: _clusters,
    What.GPUS: _gpus,
    What.RUNTIMES: _runtimes,
    What.SEARCHERS: _searchers,
    What.EXPERIMENTS: _experiments,
    What.EFFECTS: _effects,
}
_COLUMNS = {
    What.MODELS: ("model", "family", "parameters_1e9", "layers", "tokens_per_sample"),
    What.CLUSTERS: ("cluster", "description"),
    What.GPUS: ("gpu", "peak_tflop_per_s", "memory_gib", "memory_gb_per_s", "clusters"),
    What.RUNTIMES: ("runtime", "description"),
    What.SEARCHERS: ("searcher", "what_it_does", "source"),
    What.EXPERIMENTS: ("experiment", "what_it_shows", "source"),
    What.EFFECTS: ("effect", "what_it_is"),
    What.STRATEGIES: ("pipeline_degree", "number", "levels_outermost_first"),
}
