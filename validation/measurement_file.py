"""Measurements as JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, fields
from typing import Annotated, Any

from pydantic import Field

from datafiles.errors import DataFileError
from datafiles.schema import FileModel, validated
from validation.measurement import OF_OPERATORS, DeviceTime, Measurement, RankMemory, TimedAction, TimedSpan

MAX_SPANS = 20_000
"""Of a plan; more than a reader of a timeline looks at."""

Text = Annotated[str, Field(max_length=10_000)]


class _Action(FileModel):
    rank: int
    kind: Text
    stage: int
    microbatch: int
    start_s: float
    end_s: float
    wait_s: float


class _Memory(FileModel):
    device: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


class _Device(FileModel):
    device: int
    passes_s: float
    waiting_s: float
    collectives_s: float
    collectives_after_s: float
    optimizer_s: float
    tail_s: float
    processor_s: float


class _Measurement(FileModel):
    iteration_time_s: float
    iteration_samples_s: tuple[float, ...]
    global_batch: int
    tokens_per_sample: int
    num_devices: int
    stage_forward_s: tuple[float, ...]
    stage_backward_s: tuple[float, ...]
    optimizer_s: float
    losses: tuple[float, ...]
    memory: tuple[_Memory, ...]
    actions: tuple[_Action, ...]
    operator_s: tuple[tuple[Text, int, float], ...]
    operator_host_s: tuple[tuple[Text, int, float], ...] = ()
    operator_taken_bytes: tuple[tuple[Text, int, float], ...] = ()
    plan_hash: Text
    device_type: Text
    backend: Text
    versions: Mapping[Text, Text]
    notes: tuple[Text, ...]
    devices: tuple[_Device, ...]
    traced_actions: tuple[_Action, ...]
    traced_spans: tuple[tuple[int, Text, int, Text, float, float], ...]
    out_of_memory: bool


def measurement_mapping(measured: Measurement, *, with_trace: bool) -> dict[str, Any]:
    """Return a measurement as plain data; the allocator's history is a file of its own.

    Args:
        measured: The measurement.
        with_trace: Keep single actions and the first MAX_SPANS spans as well.
    """
    mapping = {each.name: getattr(measured, each.name) for each in fields(Measurement)}
    actions, spans = mapping.pop("traced")
    del mapping["memory_history"]
    return {
        **mapping,
        "iteration_samples_s": list(measured.iteration_samples_s),
        "stage_forward_s": list(measured.stage_forward_s),
        "stage_backward_s": list(measured.stage_backward_s),
        "losses": list(measured.losses),
        "memory": [asdict(each) for each in measured.memory],
        "actions": [asdict(each) for each in measured.actions] if with_trace else [],
        **{
            name: [[phase, index, value] for (phase, index), value in sorted(getattr(measured, name).items())]
            for name in OF_OPERATORS
        },
        "versions": dict(measured.versions),
        "notes": list(measured.notes),
        "devices": [asdict(each) for each in measured.devices],
        "traced_actions": [asdict(each) for each in actions] if with_trace else [],
        "traced_spans": [list(astuple(each)) for each in spans[:MAX_SPANS]] if with_trace else [],
    }


def measurement_from_mapping(mapping: Mapping[str, Any], source: str) -> Measurement:
    """Return the measurement that plain data describe.

    Raises:
        DataFileError: If the data are not what :func:`measurement_mapping` writes.
    """
    file = validated(_Measurement, mapping, source)
    if not (file.iteration_time_s > 0 or file.out_of_memory):
        raise DataFileError(source, f"iteration_time_s must be above 0, got {file.iteration_time_s:g}")
    own = {name: getattr(file, name) for name in _Measurement.model_fields}
    actions, spans = own.pop("traced_actions"), own.pop("traced_spans")
    return Measurement(
        **{
            **own,
            "memory": tuple(RankMemory(**each.model_dump()) for each in file.memory),
            "actions": tuple(TimedAction(**each.model_dump()) for each in file.actions),
            **{
                name: {(phase, index): value for phase, index, value in getattr(file, name)}
                for name in OF_OPERATORS
            },
            "devices": tuple(DeviceTime(**each.model_dump()) for each in file.devices),
            "traced": (
                tuple(TimedAction(**each.model_dump()) for each in actions),
                tuple(TimedSpan(*each) for each in spans),
            ),
        }
    )
