"""``windtunnel calibrate``: others' measurements, or this machine's, become data that the simulator takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.console import AsJson, CommonCluster, CommonModel, CommonRuntime, all_writable, messages, print_json
from experiments.progress import steps_progress

if TYPE_CHECKING:
    from hardware_models.calibration.outcome import Outcome

app = typer.Typer(
    name="calibrate",
    help="""Turn measurements into a file for --profile: operators, collectives, constants of links and GPUs.

    One command per source. Each shows what was fitted, from how many points, and how far off the result is:
    the median, 90 % and the worst of the absolute relative residuals.
    """,
    no_args_is_help=True,
    rich_markup_mode="rich",
)


Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Calibration file (.yaml or .json) to write.",
        show_default=False,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", help="Picture (.png): measured against model.", show_default=False),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--cluster", "-c", help="Cluster preset that was measured; its links are fitted.", show_default=False
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option("--gpu", help="GPU type (windtunnel list gpus) whose kernel constants are fitted.",
                 show_default=False),
]  # fmt: skip
Files = Annotated[list[Path], typer.Argument(help="Files.", show_default=False)]
File = Annotated[Path, typer.Argument(help="The file.", show_default=False)]
Model = Annotated[str | None, typer.Option("--model", "-m", help="Model the files are about.", show_default=False)]


@app.command("aceso")
def aceso(
    folder: Annotated[Path, typer.Argument(help="Folder of its CSVs, or with ops.csv.gz.", show_default=False)],
    model: Annotated[str | None, typer.Option(help="gpt, t5 or resnet.", show_default=False)] = None,
    size: Annotated[str | None, typer.Option(help="As in the file names: 1_3B.", show_default=False)] = None,
    database: Annotated[str, typer.Option(help="eurosys (V100, NVLink) or miniset (V100, PCIe).")] = "eurosys",
    cluster: Preset = None,
    output: Output = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Aceso's profile: operators of one model, and collectives of one machine.

    Example: windtunnel calibrate aceso profiled-time-eurosys --model gpt --size 1_3B -c v100-32g-dgx1 -o aceso.json
    """
    from experiments.calibrate import sources
    from simulator.problem_files import files_of

    all_writable(read=files_of(cluster=cluster), data=[output], pictures=[plot])
    make = partial(sources.aceso, folder, model=model, size=size, database=database, preset=cluster)
    _finish(make, output, plot, as_json)


@app.command("galvatron")
def galvatron(
    files: Files,
    cluster: Preset = None,
    model: Model = None,
    runtime: Annotated[str, typer.Option("--runtime", "-r", help="Whose kernels and precision.")] = "galvatron-v1",
    output: Output = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Galvatron's JSONs: layer times and memory, all-reduce and p2p bandwidth, overlap coefficient.

    Example: windtunnel calibrate galvatron allreduce_bandwidth.json overlap_coefficient.json -c titan-rtx-pcie
    """
    from experiments.calibrate.galvatron import galvatron as calibrate
    from simulator.problem_files import files_of

    all_writable(read=[*files, *files_of(model, cluster, runtime)], data=[output], pictures=[plot])
    make = partial(calibrate, files, preset=cluster, model=model, runtime=runtime)
    _finish(make, output, plot, as_json)


@app.command("alpa")
def alpa(
    file: File,
    cluster: Preset = None,
    gpu: Gpu = None,
    output: Output = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Alpa's prof_database.pkl (read in a process of its own, nothing in it is run), or its table as CSV.

    Example: windtunnel calibrate alpa prof_database.pkl -c p3.16xlarge --gpu v100-sxm2-16gb -o alpa.json
    """
    from experiments.calibrate import sources
    from simulator.problem_files import files_of

    all_writable(read=[file, *files_of(cluster=cluster)], data=[output], pictures=[plot])
    _finish(partial(sources.alpa, file, preset=cluster, gpu=gpu), output, plot, as_json)


@app.command("nccl-tests")
def nccl_tests(
    files: Files,
    cluster: Preset = None,
    collective: Annotated[
        str | None, typer.Option(help="Where no log says it: all_reduce, alltoall, ...", show_default=False)
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Where no log lists them.", show_default=False, min=2)] = None,
    output: Output = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Text output of nccl-tests, one file per run.

    Example: windtunnel calibrate nccl-tests all_reduce_perf.txt all_gather_perf.txt -c a100-80g-dgx -o nccl.json
    """
    from experiments.calibrate import sources
    from simulator.problem_files import files_of

    all_writable(read=[*files, *files_of(cluster=cluster)], data=[output], pictures=[plot])
    make = partial(sources.nccl_tests, files, preset=cluster, collective=collective, ranks=ranks)
    _finish(make, output, plot, as_json)


@app.command("kineto")
def kineto(
    file: File,
    cluster: Preset = None,
    gpu: Gpu = None,
    gpus_per_node: Annotated[int, typer.Option(help="Ranks on a node.", min=1)] = 8,
    output: Output = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """A trace of the PyTorch profiler: kernels by class, matmul and memory constants, collectives, overlap.

    Example: windtunnel calibrate kineto trace.json.gz --gpu a100-sxm4-80gb -o trace.yaml
    """
    from experiments.calibrate import sources
    from simulator.problem_files import files_of

    all_writable(read=[file, *files_of(cluster=cluster)], data=[output], pictures=[plot])
    make = partial(sources.kineto, file, preset=cluster, gpu=gpu, gpus_per_node=gpus_per_node)
    _finish(make, output, plot, as_json)


@app.command("runs")
def runs(
    table: Annotated[
        Path,
        typer.Argument(
            help="CSV of runs (as windtunnel predict) that were timed: a plan file or degrees, iteration_time_s.",
            show_default=False,
        ),
    ],
    constants: Annotated[
        str | None,
        typer.Option(
            help="Fit constants of the machine in place of operators' times: all, or some of products, memory, host, "
            "links, network, overlap, comma-separated. Plans may then be of any models.",
            show_default=False,
        ),
    ] = None,
    cluster: CommonCluster = None,
    runtime: CommonRuntime = None,
    model: CommonModel = None,
    output: Output = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Logs of whole iterations: operators' times (of plans whose layers are alike) or a machine's constants.

    Example: windtunnel calibrate runs runs.csv --constants all -o mine.json
    """
    from experiments.calibrate import runs as measured_runs
    from experiments.run_files import files_of_runs
    from experiments.run_table import Common
    from hardware_models.machine_factors import named

    common = Common(cluster=cluster, runtime=runtime, model=model)
    all_writable(output, plot)
    all_writable(read=files_of_runs(table, common), data=[output], pictures=[plot])
    if constants is None:
        _finish(partial(measured_runs.runs, table, common), output, plot, as_json)
        return
    names = named(constants)
    with steps_progress("constants") as say:
        found = measured_runs.constants(table, names, say, common)
    _finish(lambda: found, output, plot, as_json)


@app.command("machine")
def machine(
    file: File, cluster: Preset = None, output: Output = None, plot: Plot = None, as_json: AsJson = False
) -> None:
    """A profile of this machine (windtunnel profile): keep what was measured, fit laws and links to it.

    Example: windtunnel calibrate machine machine.json -c local-cpu -o here.json
    """
    from experiments.calibrate import sources
    from simulator.problem_files import files_of

    all_writable(read=[file, *files_of(cluster=cluster)], data=[output], pictures=[plot])
    _finish(partial(sources.machine, file, preset=cluster), output, plot, as_json)


def _finish(make: Callable[[], Outcome], output: Path | None, plot: Path | None, as_json: bool) -> None:
    from experiments.calibrate import report
    from hardware_models.calibration_file import save_calibration

    with messages().status("reading and fitting ..."):
        outcome = make()
    if output is not None:
        save_calibration(outcome.calibration, output)
    if plot is not None:
        report.plot(outcome, plot)
    if as_json:
        print_json(report.outcome_mapping(outcome, output))
        return
    report.show(outcome)
    for what, path in (("calibration", output), ("plot", plot)):
        if path is not None:
            messages().print(f"{what}: {path}", markup=False)
    if output is None:
        messages().print("nothing was written: -o names a file for --profile")
