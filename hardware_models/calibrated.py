"""What was calibrated, as one object with optional parts, and a hardware model that uses it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import TypeVar

from hardware_models.cluster import Cluster, Node, cluster_presets, same_preset
from hardware_models.collective_table import CollectiveTable
from hardware_models.gpus import EfficiencyCurves
from hardware_models.links import LinkType, NetworkType
from hardware_models.model import HardwareModel
from hardware_models.profile import OperatorProfile

Part = TypeVar("Part")


@dataclass(frozen=True)
class GpuConstants:
    """Measured constants of a GPU type; None keeps the shipped one. As in ``hardware_models.gpus.GpuType``."""

    curves: EfficiencyCurves | None = None
    kernel_floor_s: float | None = None
    launch_s: float | None = None
    host_factor: float | None = None
    optimizer_bandwidth_fraction: float | None = None
    overlap_slowdown_computation: float | None = None
    overlap_slowdown_communication: float | None = None

    def given(self) -> dict[str, object]:
        """Return what is not None."""
        return {name: value for name, value in self.__dict__.items() if value is not None}


@dataclass(frozen=True)
class PipelineConstants:
    """What passes of a pipeline take beyond operators that were measured outside one (``windtunnel validate``).

    Attributes:
        operator_factor: What operators take in a pipeline over what they took in the profiling run.
        pass_overhead_s: What a pass of one microbatch takes beyond its operators; not below 0.
        fitted_on: The calibration plans in words.
    """

    operator_factor: float
    pass_overhead_s: float
    fitted_on: str


@dataclass(frozen=True)
class Quantity:
    """One thing that was measured and that nothing but a reader (or a later fit) uses.

    Attributes:
        name: What, e.g. ``overlap: computation alone``.
        value: In ``unit``.
        unit: SI.
        repeats: Samples behind the value.
        spread: Half the range of the middle half of them, as a share of the value.
    """

    name: str
    value: float
    unit: str
    repeats: int = 1
    spread: float = 0.0


@dataclass(frozen=True)
class FitRecord:
    """One line of a calibration's summary.

    Attributes:
        what: Of what, e.g. ``all_reduce, 8 ranks``.
        how: ``fitted`` (constants below), ``interpolated`` (measured points; the residual leaves one out),
            ``imported`` (taken as it is) or ``checked`` (compared with the model, nothing taken).
        num_points: Measured points.
        constants: By name with unit.
        median, p90, worst: Absolute relative residuals; None where there is nothing to compare.
    """

    what: str
    how: str
    num_points: int
    constants: Mapping[str, float] = field(default_factory=dict)
    median: float | None = None
    p90: float | None = None
    worst: float | None = None


@dataclass(frozen=True)
class Calibration:
    """Everything one calibration found; every part may be missing.

    Attributes:
        source: Whose data, in words, with the files.
        operators: Measured operators.
        collectives: Measured collectives and transfers, of ``collectives_of`` (a preset's measured name; None: any).
        gpus: Constants by GPU type.
        links, networks: By measured name of a cluster preset (``hardware_models.cluster.measured_name``).
        pipeline: Of this machine's own executor.
        measurements: What else was measured.
        fits: The summary.
        fitted_on: What tells the runs that constants or operators were fitted to from others, if they were.
        machine, date, versions: Where and when it was measured, with what; empty where the source does not say.
    """

    source: str
    operators: OperatorProfile | None = None
    collectives: CollectiveTable | None = None
    collectives_of: str | None = None
    gpus: Mapping[str, GpuConstants] = field(default_factory=dict)
    links: Mapping[str, LinkType] = field(default_factory=dict)
    networks: Mapping[str, NetworkType] = field(default_factory=dict)
    pipeline: PipelineConstants | None = None
    measurements: tuple[Quantity, ...] = ()
    fits: tuple[FitRecord, ...] = ()
    fitted_on: tuple[str, ...] = ()
    machine: str = ""
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def hardware(self, cluster: Cluster) -> HardwareModel:
        """Return the hardware model of a cluster with the parts that are about it.

        Raises:
            ValueError: If none is: a calibration of other hardware would change nothing, without a word. So would
                links of a cluster file that says other than those in use, whose GPU constants may still be taken.
        """
        presets, types = {node.preset for node in cluster.nodes}, set(cluster.gpu_types)
        self._check_files(presets)
        operators = self.operators if self.operators is not None and self.operators.gpu_type in types else None
        of = self.collectives_of
        table = self.collectives if of is None or any(same_preset(of, preset) for preset in presets) else None
        constants = types & set(self.gpus) or any(
            _of_preset(parts, preset) is not None for parts in (self.links, self.networks) for preset in presets
        )
        if operators is None and table is None and not constants:
            if not self.about:
                raise ValueError("the calibration holds nothing that prices anything; leave --profile out")
            raise ValueError(
                f"the calibration must be about the cluster: {cluster.name} has {', '.join(sorted(types))} in "
                f"{', '.join(sorted(presets))}, got one of {self.about}; calibrate for this cluster, or leave "
                "--profile out"
            )
        nodes = tuple(self._node(node) for node in cluster.nodes)
        return HardwareModel(
            replace(cluster, nodes=nodes),
            operator_profile=operators,
            collective_table=table,
            table_of=self.collectives_of,
            left_out=self._left_out(presets, types),
        )

    def _left_out(self, presets: Set[str], types: Set[str]) -> tuple[str, ...]:
        """Return which parts are of other hardware than that in use, or of pipelines on the machine, in sentences."""
        measured: dict[str, tuple[str, ...]] = {
            "links": tuple(self.links),
            "networks": tuple(self.networks),
            "collectives": (self.collectives_of,) if self.collectives and self.collectives_of is not None else (),
        }
        found: dict[tuple[str, ...], list[str]] = {}
        for part, of in measured.items():
            others = tuple(each for each in of if not _is_among(each, presets))
            if others and not all(_is_among(preset, of) for preset in presets):
                found.setdefault(others, []).append(part)
        words = [(parts, of, presets) for of, parts in found.items()]
        if self.operators is not None and self.operators.gpu_type not in types:
            words.append((["operators"], (self.operators.gpu_type,), types))
        if self.gpus and not types & set(self.gpus):
            words.append((["GPU constants"], tuple(self.gpus), types))
        of_pipelines: tuple[str, ...] = ()
        if self.pipeline is not None and (self.pipeline.operator_factor != 1 or self.pipeline.pass_overhead_s):
            of_pipelines = (
                "the profile's constants of pipelines (operators take "
                f"{self.pipeline.operator_factor:.3g} times as long there, a pass "
                f"{1e3 * self.pipeline.pass_overhead_s:.3g} ms more) are left out: they are of the machine under load, "
                "and windtunnel validate alone has them",
            )
        return of_pipelines + tuple(
            f"{', '.join(parts)} of the calibration are left out: they are of {', '.join(of)}, not of "
            f"{', '.join(sorted(own))}, whose shipped ones are used; calibrate for it"
            for parts, of, own in words
        )

    def _node(self, node: Node) -> Node:
        constants = self.gpus.get(node.gpu.name)
        given = constants.given() if constants is not None else {}
        if "curves" in given:
            given["calibrated_curves"] = given.pop("curves")
        return replace(
            node,
            gpu=node.gpu.model_copy(update=given) if given else node.gpu,
            links=_of_preset(self.links, node.preset) or node.links,
            network=_of_preset(self.networks, node.preset) or node.network,
        )

    def _check_files(self, presets: Set[str]) -> None:
        """Refuse links, networks and collectives of cluster files where a file in use says none of what those said."""
        shipped, measured = cluster_presets(), self._measured_presets
        others = [each for each in measured if each not in shipped and not _is_among(each, presets)]
        unknown = [each for each in sorted(presets) if each not in shipped and not _is_among(each, measured)]
        if not others or not unknown:
            return
        raise ValueError(
            "links, networks and collectives of the calibration must be of the cluster file, now "
            f"{', '.join(unknown)} (its name and a digest of what it says), got those of {', '.join(others)}: it was "
            "edited since, is another, or the calibration is of an earlier version, which wrote no digest; calibrate "
            "for it, or write its name in the place of theirs if they were measured on it, or take these parts out"
        )

    @property
    def _measured_presets(self) -> tuple[str, ...]:
        collectives_of = [self.collectives_of] if self.collectives_of is not None else []
        return tuple(dict.fromkeys([*collectives_of, *self.links, *self.networks]))

    @property
    def about(self) -> str:
        """GPU types and cluster presets this is about, in words; empty if it is about none."""
        found = [self.operators.gpu_type] if self.operators is not None else []
        found += [*self.gpus, *self._measured_presets]
        return ", ".join(dict.fromkeys(found))


def _of_preset(parts: Mapping[str, Part], preset: str) -> Part | None:
    return next((part for measured, part in parts.items() if same_preset(measured, preset)), None)


def _is_among(measured: str, others: Iterable[str]) -> bool:
    return any(same_preset(measured, other) for other in others)
