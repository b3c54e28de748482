"""Chrome traces of the PyTorch profiler (Kineto): GPU kernels by class, matmuls with shapes, collectives with sizes.

What a trace holds depends on how it was recorded: shapes need ``record_shapes=True``; NCCL kernels carry their
message sizes since PyTorch 2.2. Nothing is guessed: what has no size is counted and summed, not fitted.

Source:
    pytorch/kineto, ``libkineto/src/output_json.cpp`` (event categories and arguments).
    Keys of operators as torch 2.13 writes them, of collectives as named in its ``libtorch_cpu.so``.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datafiles.content import read_text
from datafiles.errors import DataFileError
from workloads.kernels import Kernel, Matmul, MemoryBound

MAX_TRACE_BYTES = 256 * 2**20
"""Traces are far larger than other data files; a step of a large model takes tens of MB."""

CLASSES = ("collective", "attention", "matmul", "reduction", "elementwise", "copy", "other")

_WORDS = (
    ("collective", r"nccl"),
    ("attention", r"flash|fmha|attention"),
    ("matmul", r"gemm|cutlass|xmma|cublas|matmul|_tn_|_nt_|_nn_|s\d{3,5}(gemm|bf16|f16)"),
    ("reduction", r"reduce|softmax|layer_?norm|norm_kernel|rms_?norm|welford"),
    ("copy", r"memcpy|memset|copy"),
    ("elementwise", r"elementwise|vectorized|dropout|gelu|relu|silu|adam|multi_tensor|fused_|triton_poi|cat"),
)
_PATTERNS = tuple((name, re.compile(words, re.IGNORECASE)) for name, words in _WORDS)

_COLLECTIVES = {
    "allreduce": "all_reduce", "all_reduce": "all_reduce", "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather", "_allgather_base": "all_gather", "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather", "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all": "all_to_all", "all_to_allv": "all_to_all", "alltoall": "all_to_all", "broadcast": "broadcast",
    "send": "send", "recv": "recv",
}  # fmt: skip
DTYPES = {
    "Float": 4, "float": 4, "float32": 4, "BFloat16": 2, "c10::BFloat16": 2, "Half": 2, "c10::Half": 2, "Double": 8,
    "double": 8, "Int": 4, "int": 4, "Long": 8, "long": 8, "Byte": 1, "unsigned char": 1, "Char": 1, "Bool": 1,
    "bool": 1,
}  # fmt: skip
MATMUL_DTYPES = {"c10::BFloat16": "bf16", "BFloat16": "bf16", "c10::Half": "fp16", "Half": "fp16", "float": "fp32",
                 "Float": "fp32"}  # fmt: skip
_STREAMED = {"aten::add": 2, "aten::add_": 2, "aten::mul": 2, "aten::mul_": 2, "aten::copy_": 1, "aten::gelu": 1,
             "aten::relu": 1, "aten::silu": 1, "aten::clone": 1}  # fmt: skip
"""Elementwise operators whose traffic follows from their inputs, and how many of those are read."""


@dataclass(frozen=True)
class GpuKernel:
    """One kernel as it ran.

    Attributes:
        name, kind: Its name and class.
        start_s, seconds: When and for how long.
        key: Kernels with equal keys do equal work (name, launch grid, operator, shapes).
        work: What it did, where the operator that launched it says; its role is ``forward``, or
            ``weight_gradient`` inside a backward pass (which of the two gradients is not recorded).
        dtype: Of a matmul's operands.
    """

    name: str
    kind: str
    start_s: float
    seconds: float
    key: tuple[Any, ...]
    work: Kernel | None = None
    dtype: str = ""


@dataclass(frozen=True)
class Collective:
    """One NCCL kernel with its recorded size, in bytes as ``HardwareModel.collective`` counts them."""

    kind: str
    num_bytes: float
    group_size: int
    ranks: tuple[int, ...]
    start_s: float
    seconds: float


@dataclass(frozen=True)
class Trace:
    """What one trace holds.

    Attributes:
        gpu: The GPU's name, empty where not recorded.
        kernels: In order of start.
        collectives: Those with sizes.
        num_unsized: NCCL kernels without.
    """

    gpu: str
    kernels: tuple[GpuKernel, ...]
    collectives: tuple[Collective, ...]
    num_unsized: int

    def seconds_by_kind(self) -> dict[str, tuple[int, float]]:
        """Return kernels and seconds by class."""
        found = {}
        for kind in CLASSES:
            own = [kernel.seconds for kernel in self.kernels if kernel.kind == kind]
            if own:
                found[kind] = (len(own), sum(own))
        return found


def kernel_class(name: str) -> str:
    """Return the class of a kernel by its name.

    >>> kernel_class("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn")
    'matmul'
    >>> kernel_class("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)")
    'collective'
    """
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), "other")


def read_trace(path: str | Path) -> Trace:
    """Read a trace (``.json`` or ``.json.gz``).

    Raises:
        DataFileError: If the file is no trace, or holds no GPU kernel.
    """
    source = str(path)
    document = _parsed(read_text(path, MAX_TRACE_BYTES), source)
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise DataFileError(source, "must be a chrome trace: an object with traceEvents, or a list of events")
    complete = [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]
    operators = _operators(complete)
    backward = _backward_spans(complete)
    kernels, collectives, unsized = [], [], 0
    for event in complete:
        if event.get("cat") not in ("kernel", "Kernel", "gpu_memcpy", "gpu_memset"):
            continue
        start_s, seconds = _times(event, source)
        name, arguments = str(event.get("name", "")), _mapping(event.get("args"))
        kind = "copy" if event["cat"] in ("gpu_memcpy", "gpu_memset") else kernel_class(name)
        if kind == "collective":
            found = _collective(arguments, start_s, seconds)
            collectives += [found] if found is not None else []
            unsized += found is None
        operator = operators.get(_external(arguments))
        work, dtype = _work(kind, operator, arguments, backward)
        shapes = str(operator["args"].get("Input Dims")) if operator is not None else ""
        grid = str(arguments.get("grid")), str(arguments.get("bytes", arguments.get("In msg nelems")))
        kernels.append(GpuKernel(name, kind, start_s, seconds, (name, *grid, shapes), work, dtype))
    if not kernels:
        raise DataFileError(source, "must hold GPU kernels; record with ProfilerActivity.CUDA")
    devices = document.get("deviceProperties") if isinstance(document, dict) else None
    first = devices[0] if isinstance(devices, list) and devices else {}
    gpu = str(_mapping(first).get("name", ""))
    kernels.sort(key=lambda kernel: kernel.start_s)
    return Trace(gpu, tuple(kernels), tuple(collectives), unsized)


def _parsed(text: str, source: str) -> Any:
    """Return the document; traces hold more values than other data files may, and every value is checked where used."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataFileError(source, f"malformed JSON: {error.msg}", line=error.lineno) from None
    except RecursionError:
        raise DataFileError(source, "is nested too deeply for a trace") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise DataFileError(source, "holds an integer of too many digits for a trace") from None


def _times(event: Mapping[str, Any], source: str) -> tuple[float, float]:
    start, duration = event.get("ts"), event.get("dur")
    for value in (start, duration):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e18:
            raise DataFileError(source, f"an event must have ts and dur in microseconds, got {value!r:.40}")
    assert isinstance(start, (int, float)) and isinstance(duration, (int, float))
    if duration < 0:
        raise DataFileError(source, f"a duration must not be negative, got {duration}")
    return start * 1e-6, duration * 1e-6


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _external(arguments: Mapping[str, Any]) -> Any:
    found = arguments.get("External id", arguments.get("external id"))
    return found if isinstance(found, (int, str)) else None


def _operators(events: Iterable[Mapping[str, Any]]) -> dict[Any, Mapping[str, Any]]:
    """Return operators with recorded shapes by their external id."""
    return {
        _external(event["args"]): event
        for event in events
        if event.get("cat") == "cpu_op" and isinstance(event.get("args"), dict) and "Input Dims" in event["args"]
    }


def _backward_spans(events: Iterable[Mapping[str, Any]]) -> dict[Any, list[tuple[float, float]]]:
    """Return by thread when autograd was computing gradients."""
    found: dict[Any, list[tuple[float, float]]] = {}
    for event in events:
        if str(event.get("name", "")).startswith("autograd::engine::evaluate_function"):
            start, duration = event.get("ts"), event.get("dur")
            if isinstance(start, (int, float)) and isinstance(duration, (int, float)):
                found.setdefault(str(event.get("tid")), []).append((start, start + duration))
    return {thread: sorted(spans) for thread, spans in found.items()}


def _is_backward(operator: Mapping[str, Any], spans: Mapping[Any, list[tuple[float, float]]]) -> bool:
    start = operator.get("ts")
    own = spans.get(str(operator.get("tid")), [])
    if not isinstance(start, (int, float)) or not own:
        return False
    place = bisect_right(own, (start, float("inf"))) - 1
    return place >= 0 and own[place][0] <= start <= own[place][1]


def _work(
    kind: str, operator: Mapping[str, Any] | None, arguments: Mapping[str, Any], spans: Mapping[Any, Any]
) -> tuple[Kernel | None, str]:
    if kind == "copy" and isinstance(arguments.get("bytes"), (int, float)):
        size = float(arguments["bytes"])
        return (MemoryBound(size, size), "") if 0 < size < 1e15 else (None, "")
    if operator is None:
        return None, ""
    recorded = operator["args"]
    dims, types = _shapes(recorded.get("Input Dims")), recorded.get("Input type", recorded.get("Input types"))
    name = str(operator.get("name", ""))
    if kind == "matmul":
        types = types if isinstance(types, list) else []
        dtype = next((MATMUL_DTYPES[word] for word in types if isinstance(word, str) and word in MATMUL_DTYPES), "")
        return _matmul(name, dims, "weight_gradient" if _is_backward(operator, spans) else "forward"), dtype
    if kind in ("elementwise", "copy") and name in _STREAMED and dims and isinstance(types, list) and types:
        element = DTYPES.get(types[0]) if isinstance(types[0], str) else None
        read = [shape for shape in dims[: _STREAMED[name]] if shape]
        if name == "aten::copy_":
            read = dims[1:2]
        if element and read and all(shape == dims[0] for shape in read):
            size = float(element)
            for length in dims[0]:
                size *= length
            return (MemoryBound(size * len(read), size) if size > 0 else None), ""
    return None, ""


def _shapes(value: Any) -> list[list[int]]:
    """Return shapes of tensors; anything else (numbers, lists of tensors) is an empty one."""
    if not isinstance(value, list):
        return []
    return [
        shape if isinstance(shape, list) and all(type(length) is int and 0 < length < 2**40 for length in shape) else []
        for shape in value
    ]


def _matmul(name: str, dims: list[list[int]], role: str) -> Matmul | None:
    """Return the product that an operator's input shapes say."""
    if name in ("aten::addmm", "aten::baddbmm"):
        dims = dims[1:]
    if len(dims) < 2:
        return None
    left, right = dims[0], dims[1]
    if name in ("aten::mm", "aten::addmm") and len(left) == len(right) == 2 and left[1] == right[0]:
        return Matmul(m=left[0], n=right[1], k=left[1], role=role)
    if name in ("aten::bmm", "aten::baddbmm") and len(left) == len(right) == 3 and left[2] == right[1]:
        return Matmul(m=left[1], n=right[2], k=left[2], batch=left[0], role=role)
    return None


def _collective(arguments: Mapping[str, Any], start_s: float, seconds: float) -> Collective | None:
    kind = _COLLECTIVES.get(str(arguments.get("Collective name", "")).lower())
    size, element = arguments.get("Group size"), DTYPES.get(str(arguments.get("dtype", "")))
    sent, received = arguments.get("In msg nelems"), arguments.get("Out msg nelems")
    counts = [count for count in (sent, received) if type(count) is int and 0 < count < 2**50]
    if kind is None or element is None or type(size) is not int or not 2 <= size < 2**20 or len(counts) != 2:
        return None
    # An all-gather is as large as its result, a reduce-scatter as its input.
    elements = max(counts) if kind in ("all_gather", "reduce_scatter") else counts[0]
    ranks = [int(word) for word in re.findall(r"\d{1,7}", str(arguments.get("Process Group Ranks", ""))[:100_000])]
    return Collective(
        kind, float(elements * element), size, tuple(ranks) if len(ranks) == size else (), start_s, seconds
    )
