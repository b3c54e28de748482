"""``windtunnel list``: what can be named."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from datafiles.names import nearest
from experiments.console import AsJson, all_writable, console, print_json, print_table

if TYPE_CHECKING:
    from hardware_models.cluster import Node

Row = tuple[str | int | float, ...]


class What(StrEnum):
    """Groups of names."""

    MODELS = "models"
    CLUSTERS = "clusters"
    GPUS = "gpus"
    LINKS = "links"
    NETWORKS = "networks"
    RUNTIMES = "runtimes"
    FIELDS = "fields"
    SEARCHERS = "searchers"
    EXPERIMENTS = "experiments"
    EFFECTS = "effects"
    STRATEGIES = "strategies"


def list_names(
    what: Annotated[str, typer.Argument(metavar="WHAT", help=f"One of {', '.join(What)}.")],
    runtime: Annotated[
        str | None,
        typer.Argument(metavar="RUNTIME", help="fields: of this runtime, a name or path.", show_default=False),
    ] = None,
    as_json: AsJson = False,
    gpus: Annotated[int, typer.Option(help="strategies: devices, a power of two.", min=1, max=1024)] = 8,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="strategies: draw them into this PNG.", show_default=False)
    ] = None,
) -> None:
    """List what can be named: models, clusters and their parts, runtimes, searchers, experiments, effects, strategies.

    fields is what a runtime is made of, each with its value and source.

    Example: windtunnel list strategies --gpus 8 -o trees.png
    """
    if what not in list(What):
        raise ValueError(f"unknown kind of names {what!r}; {nearest(what, [each.value for each in What])}")
    if what != What.STRATEGIES and output is not None:
        raise ValueError(f"only strategies are drawn, got {what} with --output; leave it out")
    if (what == What.FIELDS) != (runtime is not None):
        came = f"{what} {runtime}" if runtime is not None else "fields alone"
        raise ValueError(f"fields, and nothing else, are listed of a runtime (list fields NAME), got {came}")
    all_writable(pictures=[output])
    if what == What.STRATEGIES:
        rows = _strategies(gpus)
        if output is not None:
            from experiments.strategy_trees import save_trees

            save_trees(output, gpus)
    elif runtime is not None:
        rows = _fields(runtime)
    else:
        rows = _ROWS[What(what)]()
    if as_json:
        print_json([dict(zip(_COLUMNS[What(what)], row, strict=True)) for row in rows])
        return
    cells = [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    print_table(None, [(_head(column), "left") for column in _COLUMNS[What(what)]], cells)
    if what == What.STRATEGIES:
        console().print(f"each with and without activation checkpointing: {2 * len(rows)} strategies")
        if output is not None:
            console().print(f"written: {output}", markup=False)


_UNITS = {"1e9": "(1e9)", "gib": "GiB", "tflop per s": "TFLOP/s", "gb per s": "GB/s", "gbit per s": "Gbit/s"}


def _head(column: str) -> str:
    """Return a key of the JSON as the head of a column.

    >>> _head("memory_gb_per_s")
    'memory GB/s'
    """
    words = column.replace("_", " ")
    for plain, unit in _UNITS.items():
        words = words.replace(plain, unit)
    return words


def _models() -> list[Row]:
    from simulator.uniform import repeated_layers
    from workloads.registry import build_workload, model_names

    rows: list[Row] = []
    for name in model_names():
        workload = build_workload(name)
        parameters = round(workload.num_parameters / 1e9, 2)
        rows.append((name, workload.family, parameters, len(repeated_layers(workload)), workload.tokens_per_sample))
    return rows


def _clusters() -> list[Row]:
    from hardware_models.cluster import cluster_description, cluster_presets

    return [(f"{name}:NODESxGPUS", cluster_description(name)) for name in cluster_presets()]


def _gpus() -> list[Row]:
    from hardware_models.gpus import gpu_names, load_gpu

    nodes = _preset_nodes()
    rows: list[Row] = []
    for name in gpu_names():
        gpu = load_gpu(name)
        peaks = ", ".join(f"{dtype} {peak / 1e12:.4g}" for dtype, peak in gpu.peak_flop_per_s.items())
        size, rate = round(gpu.memory_bytes / 2**30, 1), round(gpu.memory_bytes_per_s / 1e9)
        rows.append((name, peaks, size, rate, _named(preset for preset, node in nodes if node.gpu.name == name)))
    return rows


def _links() -> list[Row]:
    from hardware_models.links import link_names, load_link

    nodes = _preset_nodes()
    rows: list[Row] = []
    for name in link_names():
        link = load_link(name)
        clusters = _named(preset for preset, node in nodes if node.links == link)
        rows.append((name, link.kind, round(link.link_bytes_per_s / 1e9, 2), clusters))
    return rows


def _networks() -> list[Row]:
    from hardware_models.links import load_network, network_names

    nodes = _preset_nodes()
    rows: list[Row] = []
    for name in network_names():
        network = load_network(name)
        nominal, reached = round(network.nominal_bytes_per_s * 8 / 1e9, 2), round(network.nic_bytes_per_s / 1e9, 2)
        rows.append((name, nominal, reached, _named(preset for preset, node in nodes if node.network == network)))
    return rows


def _preset_nodes() -> list[tuple[str, Node]]:
    from hardware_models.cluster import cluster_presets, parse_cluster

    return [(preset, parse_cluster(f"{preset}:1x1").nodes[0]) for preset in cluster_presets()]


def _named(presets: Iterable[str]) -> str:
    return ", ".join(presets) or "none"


def _runtimes() -> list[Row]:
    from hardware_models.runtime_files import runtime_description, runtime_names

    return [(name, runtime_description(name)) for name in runtime_names()]


def _fields(runtime: str) -> list[Row]:
    from hardware_models.runtime_files import runtime_fields

    return list(runtime_fields(runtime))


def _searchers() -> list[Row]:
    from searchers.registry import searcher_class, searcher_names

    rows: list[Row] = []
    for name in searcher_names():
        found = searcher_class(name)
        rows.append((name, (found.__doc__ or "").strip().partition("\n")[0], found.paper))
    return rows


def _experiments() -> list[Row]:
    from experiments.reproduce.registry import EXPERIMENTS

    return [(each.name, each.shows, each.source) for each in EXPERIMENTS.values()]


def _effects() -> list[Row]:
    import re
    from inspect import getdoc

    from simulator.fidelity import Fidelity

    # The docstring is the one place that says what each switch is; "name: text" per attribute.
    documented = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", getdoc(Fidelity) or "", flags=re.MULTILINE)
    words = {name.replace("_", "-"): re.sub(r"\s+", " ", text).replace("``", "") for name, text in documented}
    return [(name, words.get(name, "")) for name in Fidelity.names()]


def _strategies(gpus: int) -> list[Row]:
    from searchers.galvatron.strategies import decision_trees

    rows: list[Row] = []
    for degree, found in decision_trees(gpus).items():
        plain = [strategy for strategy in found if not strategy.checkpoint]
        rows += [(degree, number + 1, str(strategy)) for number, strategy in enumerate(plain)]
    return rows


_ROWS = {
    What.MODELS: _models,
    What.CLUSTERS: _clusters,
    What.GPUS: _gpus,
    What.LINKS: _links,
    What.NETWORKS: _networks,
    What.RUNTIMES: _runtimes,
    What.SEARCHERS: _searchers,
    What.EXPERIMENTS: _experiments,
    What.EFFECTS: _effects,
}
_COLUMNS = {
    What.MODELS: ("model", "family", "parameters_1e9", "repeated_layers", "tokens_per_sample"),
    What.CLUSTERS: ("cluster", "description"),
    What.GPUS: ("gpu", "peak_tflop_per_s", "memory_gib", "memory_gb_per_s", "clusters"),
    What.LINKS: ("links", "kind", "gb_per_s_of_one", "clusters"),
    What.NETWORKS: ("network", "nominal_gbit_per_s", "gb_per_s_of_collectives", "clusters"),
    What.RUNTIMES: ("runtime", "description"),
    What.FIELDS: ("field", "value", "source"),
    What.SEARCHERS: ("searcher", "what_it_does", "source"),
    What.EXPERIMENTS: ("experiment", "what_it_shows", "source"),
    What.EFFECTS: ("effect", "what_it_is"),
    What.STRATEGIES: ("pipeline_degree", "number", "levels_outermost_first"),
}
