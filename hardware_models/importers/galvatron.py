"""Galvatron's profile files: layer times, layer memory, bandwidths, transfers, overlap; told apart by their keys.

MB means MiB throughout, times are ms. All-reduce files come in two kinds: ms per MiB of ring traffic, where all groups
of a shape ran at once (version 1), and nccl-tests' bus bandwidth in GB/s of one group alone (later). Neither says a
message size; both are averages over large messages.

Source:
    PKU-DAIR/Hetu ``tools/Galvatron`` (version 1) and PKU-DAIR/Hetu-Galvatron; Miao et al., VLDB 2022.
    Every profile in the packages hetu-galvatron 1.0.0 and 2.0.0 reads; of 0.0.2 bandwidths and overlap do, its raw
    memory runs and ``fwd_time`` files do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from datafiles.errors import DataFileError
from datafiles.loader import load_mapping

MIB = float(2**20)
MS = 1e-3
SMALLEST = 1e-9
"""Least time in ms, rate in GB/s or coefficient in ms per MiB that somebody can have measured."""

_COEFFICIENT = re.compile(r"(\d{1,4})_(\d{1,4})_([01])")
_BANDWIDTH = re.compile(r"allreduce_size_(\d{1,4})_consec_([01])")
_TRANSFER = re.compile(r"pp_(deg|size)_(\d{1,4})")
_TIME = re.compile(r"(allreduce|all2all|allgather|reducescatter)_size_(\d{1,4})_(\d{1,6})MB_time")
_LAYERS = re.compile(r"layernum\[([\d,]{1,40})\]_bsz(\d{1,4})(?:_seq(\[?[\d,]{1,60}\]?))?")
_STATED = re.compile(r"layertype_(\d{1,2})(?:_bsz(\d{1,4}))?(?:_seq(\d{1,6}))?")
_LAYER_MEMORY = re.compile(r"layertype_(\d{1,2})(_sp)?")
_KINDS = {"allreduce": "all_reduce", "all2all": "all_to_all", "allgather": "all_gather",
          "reducescatter": "reduce_scatter"}  # fmt: skip


@dataclass(frozen=True)
class Bandwidth:
    """A measured rate of large messages.

    Attributes:
        kind: ``all_reduce`` or ``transfer``.
        stages: Pipeline degree (version 1), else 1: the cluster is cut into that many parts first.
        size: Ranks of a group; the pipeline degree of a transfer.
        consecutive: Ranks are neighbours; else they are spread over the part as far as it goes.
        bytes_per_s: All-reduce: of ring traffic, 2 (n-1) / n of the message. Transfer: of the message.
        all_at_once: All groups of the shape ran at once. Transfers did not: eight at the rate of version 1 are more
            than the network carries.
    """

    kind: str
    stages: int
    size: int
    consecutive: bool
    bytes_per_s: float
    all_at_once: bool


@dataclass(frozen=True)
class LayerTime:
    """Forward time of one layer on one GPU.

    Attributes:
        layer_type: 0, 1, ... as the profiler counts kinds of layers; -1 is everything outside the layers.
        samples: Batch.
        seconds: Of the whole batch.
        seq_len: Tokens; empty where the file does not say.
    """

    layer_type: int
    samples: int
    seconds: float
    seq_len: str = ""


@dataclass(frozen=True)
class LayerMemory:
    """Memory of one layer.

    Attributes:
        layer_type: As above.
        parameter_bytes: In fp32.
        saved_bytes: Activations of one sample by tensor-parallel degree.
        sequence_parallel: Norms are split as well.
        seq_len: Tokens; empty where the file does not say.
    """

    layer_type: int
    parameter_bytes: float
    saved_bytes: Mapping[int, float]
    sequence_parallel: bool
    seq_len: str = ""


@dataclass(frozen=True)
class GalvatronFile:
    """What one file holds; only one of the lists is filled.

    Attributes:
        bandwidths: All-reduces or transfers.
        times: ``(collective, ranks, bytes, seconds)`` on one node.
        overlap: Slowdown of both sides while computation and all-reduce run.
        layers: Layer times.
        memory: Layer memory.
    """

    bandwidths: tuple[Bandwidth, ...] = ()
    times: tuple[tuple[str, int, float, float], ...] = ()
    overlap: float | None = None
    layers: tuple[LayerTime, ...] = ()
    memory: tuple[LayerMemory, ...] = field(default_factory=tuple)

    @property
    def what(self) -> str:
        """The kind of file in words."""
        if self.overlap is not None:
            return "overlap coefficient"
        names = {"layers": "layer times", "memory": "layer memory", "times": "collective times"}
        for name, word in names.items():
            if getattr(self, name):
                return word
        return "transfer bandwidth" if self.bandwidths[0].kind == "transfer" else "all-reduce bandwidth"


def read_galvatron(path: str | Path) -> GalvatronFile:
    """Read one profile file.

    Raises:
        DataFileError: If its keys are those of no known kind, or a value is not what it must be.
    """
    mapping, source = load_mapping(path), str(path)
    keys = list(mapping)
    if keys == ["overlap_coe"]:
        value = _number(mapping["overlap_coe"], "overlap_coe", source)
        if not 1 <= value <= 10:
            raise DataFileError(source, f"overlap_coe must be a slowdown of 1 to 10, got {value}")
        return GalvatronFile(overlap=value)
    if any(_LAYER_MEMORY.fullmatch(key) and isinstance(mapping[key], dict) for key in keys):
        return GalvatronFile(memory=tuple(_memory(mapping, source)))
    if any(_LAYERS.fullmatch(key) for key in keys):
        return GalvatronFile(layers=tuple(_layers(mapping, source)))
    if keys and all(_TIME.fullmatch(key) for key in keys):
        return GalvatronFile(times=tuple(_time(key, value, source) for key, value in mapping.items()))
    found = [_bandwidth(key, value, source) for key, value in mapping.items()]
    if keys and all(each is not None for each in found):
        return GalvatronFile(bandwidths=tuple(each for each in found if each is not None))
    raise DataFileError(
        source,
        "must be a computation, memory, all-reduce or p2p bandwidth, collective time or overlap profile of Galvatron; "
        f"its keys ({', '.join(keys[:4])[:120]}) are those of none",
    )


def _number(value: Any, key: str, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e18:
        raise DataFileError(source, f"{key}: must be a number of 0 or more, got {value!r:.60}")
    return float(value)


def _positive(value: Any, key: str, source: str) -> float:
    number = _number(value, key, source)
    if number < SMALLEST:
        raise DataFileError(source, f"{key}: must be positive, {SMALLEST:g} or more, got {number:g}")
    return number


def _bandwidth(key: str, value: Any, source: str) -> Bandwidth | None:
    if isinstance(value, dict):  # Raw runs of the memory profiler are named like coefficients.
        return None
    if match := _COEFFICIENT.fullmatch(key):
        stages, size, consecutive = (int(word) for word in match.groups())
        rate = MIB / (_positive(value, key, source) * MS)
        return Bandwidth("all_reduce", max(1, stages), _group(size, key, source), bool(consecutive), rate, True)
    if match := _BANDWIDTH.fullmatch(key):
        rate = _positive(value, key, source) * 1e9
        return Bandwidth("all_reduce", 1, _group(int(match[1]), key, source), match[2] == "1", rate, False)
    if match := _TRANSFER.fullmatch(key):
        number = _positive(value, key, source)
        old = match[1] == "deg"
        rate = MIB / (number * MS) if old else number * 1e9
        return Bandwidth("transfer", 1, _group(int(match[2]), key, source), True, rate, False)
    return None


def _group(size: int, key: str, source: str) -> int:
    if size < 2:
        raise DataFileError(source, f"{key}: a group must have at least 2 ranks, got {size}")
    return size


def _time(key: str, value: Any, source: str) -> tuple[str, int, float, float]:
    match = _TIME.fullmatch(key)
    assert match is not None
    size, mib = _group(int(match[2]), key, source), int(match[3])
    if mib < 1:
        raise DataFileError(source, f"{key}: a message must have at least 1 MB")
    return _KINDS[match[1]], size, mib * MIB, _positive(value, key, source) * MS


def _layers(mapping: Mapping[str, Any], source: str) -> list[LayerTime]:
    """Solve ``T = other + sum over types of layers * layer`` for every batch; numbers of layers differ between runs."""
    runs: dict[tuple[int, str], list[tuple[list[int], float]]] = {}
    for key, value in mapping.items():
        match = _LAYERS.fullmatch(key)
        if match is None:
            if not key.startswith(("layertype_", "model_config")):
                raise DataFileError(source, f"unknown key {key!r:.60}; computation times are layernum, layertype")
            continue
        counts = [int(word) for word in match[1].split(",") if word]
        if not counts or int(match[2]) < 1:
            raise DataFileError(source, f"{key}: must name numbers of layers and a batch of at least 1")
        seconds = _positive(value, key, source) * MS
        runs.setdefault((int(match[2]), match[3] or ""), []).append((counts, seconds))
    found = []
    for (samples, seq), measured in sorted(runs.items()):
        width = len(measured[0][0])
        if any(len(counts) != width for counts, _ in measured):
            raise DataFileError(source, f"bsz{samples}: all runs must name as many kinds of layers")
        table = np.array([[1.0, *counts] for counts, _ in measured])
        if np.linalg.matrix_rank(table) < width + 1:
            found += _stated(mapping, samples, seq, source)
            continue
        solved = np.linalg.lstsq(table, np.array([seconds for _, seconds in measured]), rcond=None)[0]
        lengths = seq.strip("[]").split(",")
        for kind in range(width):
            length = lengths[kind] if len(lengths) == width else lengths[0]
            # A difference of noisy runs may be negative, which is as good as none.
            found.append(LayerTime(kind, samples, max(0.0, float(solved[kind + 1])), length))
        found.append(LayerTime(-1, samples, max(0.0, float(solved[0])), lengths[0]))
    return found


def _stated(mapping: Mapping[str, Any], samples: int, seq: str, source: str) -> list[LayerTime]:
    """Return the layer times that the file itself derived, where it does not hold the runs they came from."""
    found = []
    for key, value in mapping.items():
        match = _STATED.fullmatch(key)
        if match and match[2] in (None, str(samples)) and (match[3] is None or match[3] in seq.strip("[]").split(",")):
            seconds = _positive(value, key, source) * MS * samples
            found.append(LayerTime(int(match[1]), samples, seconds, match[3] or ""))
    if not found:
        rule = "runs must differ in the number of layers of each kind; one layer is their difference"
        raise DataFileError(source, f"bsz{samples}: {rule}")
    return found


def _memory(mapping: Mapping[str, Any], source: str) -> list[LayerMemory]:
    found = []
    for key, value in mapping.items():
        match = _LAYER_MEMORY.fullmatch(key)
        if match is None or not isinstance(value, dict):
            continue
        by_length = value.items() if all(isinstance(part, dict) for part in value.values()) else [("", value)]
        for length, part in by_length:
            table = part.get("tp_activation_per_bsz_dict")
            if not isinstance(table, dict) or "parameter_size" not in part:
                raise DataFileError(source, f"{key}: must hold parameter_size and tp_activation_per_bsz_dict")
            saved = {
                int(degree): _number(mib, f"{key}.{degree}", source) * MIB
                for degree, mib in table.items()
                if degree.isdecimal() and 0 < len(degree) <= 4 and int(degree) > 0
            }
            size = _number(part["parameter_size"], f"{key}.parameter_size", source) * MIB
            found.append(LayerMemory(int(match[1]), size, saved, match[2] is not None, str(length)))
    if not found:
        raise DataFileError(source, "a memory profile must hold the parameter_size and activations of a layer")
    return found
