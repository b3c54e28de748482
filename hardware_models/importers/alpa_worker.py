"""Reads Alpa's pickled profiling database in a process of its own, with limits, and prints JSON.

Run by ``alpa_database`` as a script, isolated (``python -I``): it imports nothing of this project. The unpickler
knows a handful of harmless names; each is a stand-in of this file, so nothing in the pickle is ever called.

Run: ``python -I hardware_models/importers/alpa_worker.py 4000000000 60 < prof_database.pkl``
"""

from __future__ import annotations

import argparse
import io
import json
import math
import pickle
import resource
import struct
import sys
from typing import Any

MAX_NUMBERS = 2_000_000

COSTS = (
    "all_reduce_cost_dict", "all_gather_cost_dict", "reduce_scatter_cost_dict", "all_to_all_cost_dict",
    "dot_cost_dict",
)  # fmt: skip


class RefusedError(Exception):
    """The pickle is not what it should be."""


class MeshResult:
    """Stands for ``alpa.mesh_profiling.MeshProfilingResult``: a bag of fields."""

    def __setstate__(self, state: Any) -> None:
        self.fields = state if isinstance(state, dict) else {}


class Dtype:
    """Stands for ``numpy.dtype``."""

    def __init__(self, code: Any = "", *ignored: Any) -> None:
        self.code = str(code)
        self.order = "<"

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
            self.order = ">" if state[1] == ">" else "<"

    def numbers(self, data: bytes) -> list[Any]:
        """Return what raw bytes stand for."""
        codes = {"f2": "e", "f4": "f", "f8": "d", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H",
                 "u4": "I", "u8": "Q", "b1": "?"}  # fmt: skip
        if self.code not in codes:
            raise RefusedError(f"an array must hold plain numbers, got dtype {self.code[:40]!r}")
        letter = codes[self.code]
        count = len(data) // struct.calcsize(letter)
        if count > MAX_NUMBERS:
            raise RefusedError(f"an array must have at most {MAX_NUMBERS} numbers, got {count}")
        return list(struct.unpack(f"{self.order}{count}{letter}", data[: count * struct.calcsize(letter)]))


class Array:
    """Stands for ``numpy.ndarray``."""

    def __init__(self, *ignored: Any) -> None:
        self.items: list[Any] = []

    def __setstate__(self, state: Any) -> None:
        if not (isinstance(state, tuple) and len(state) == 5 and isinstance(state[2], Dtype)):
            raise RefusedError("an array of another numpy layout")
        _, shape, dtype, fortran, data = state
        if fortran or not isinstance(data, bytes) or not isinstance(shape, tuple) or len(shape) > 2:
            raise RefusedError("an array must be plain, of one or two dimensions")
        flat = dtype.numbers(data)
        if len(shape) < 2:
            self.items = flat
        else:
            self.items = [flat[i * shape[1] : (i + 1) * shape[1]] for i in range(shape[0])]


def reconstruct(*ignored: Any) -> Array:
    """Stand for ``numpy.core.multiarray._reconstruct``."""
    return Array()


def scalar(dtype: Any, data: Any = b"") -> Any:
    """Stand for ``numpy.core.multiarray.scalar``."""
    if not isinstance(dtype, Dtype) or not isinstance(data, bytes):
        raise RefusedError("a scalar must be a plain number")
    numbers = dtype.numbers(data)
    return numbers[0] if numbers else 0


def encode(text: Any = "", coding: Any = "") -> bytes:
    """Stand for ``_codecs.encode`` as pickles of bytes use it."""
    if not isinstance(text, str) or coding != "latin1":
        raise RefusedError("bytes must be written as latin1 text")
    return text.encode("latin1")


class Ordered(dict):  # type: ignore[type-arg]
    """Stands for ``collections.OrderedDict`` and ``defaultdict``."""

    def __init__(self, *ignored: Any) -> None:
        super().__init__()


ALLOWED = {
    ("alpa.mesh_profiling", "MeshProfilingResult"): MeshResult,
    ("collections", "OrderedDict"): Ordered,
    ("collections", "defaultdict"): Ordered,
    ("builtins", "list"): lambda *ignored: [],
    ("builtins", "dict"): lambda *ignored: {},
    ("numpy", "dtype"): Dtype,
    ("numpy", "ndarray"): Array,
    ("_codecs", "encode"): encode,
}
for _package in ("numpy.core.multiarray", "numpy._core.multiarray"):
    ALLOWED[_package, "_reconstruct"] = reconstruct
    ALLOWED[_package, "scalar"] = scalar


class Unpickler(pickle.Unpickler):
    """Knows only what is allowed."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in of an allowed name."""
        try:
            return ALLOWED[module, name]
        except KeyError:
            named = f"{module}.{name}"[:80]
            raise RefusedError(f"the pickle names {named!r}, which a database does not hold") from None


def items(value: Any) -> list[Any]:
    """Return the elements of a list, tuple or array."""
    if isinstance(value, Array):
        return value.items
    if isinstance(value, (list, tuple)):
        return list(value)
    raise RefusedError(f"a list must stand where the layout has one, got {type(value).__name__}")


def whole(value: Any) -> int:
    """Return a whole number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**62 or value != int(value):
        raise RefusedError(f"a whole number must stand where the layout has one, got {str(value)[:40]!r}")
    return int(value)


class Converter:
    """Turns the unpickled database into plain data, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def points(self, value: Any) -> list[list[float]]:
        """Return ``[size, seconds]`` pairs; failed ones (infinite) are left out."""
        found = []
        for pair in items(value):
            size, seconds = items(pair)[:2] if len(items(pair)) >= 2 else (None, None)
            if not isinstance(size, (int, float)) or not isinstance(seconds, (int, float)):
                raise RefusedError("every point must be (size, seconds)")
            self.count += 2
            if self.count > MAX_NUMBERS:
                raise RefusedError(f"a database must have at most {MAX_NUMBERS} numbers")
            if math.isfinite(size) and math.isfinite(seconds):
                found.append([float(size), float(seconds)])
        return found

    def groups(self, value: Any) -> list[list[int]]:
        """Return device ids by group."""
        found = []
        for group in items(value):
            found.append([whole(rank) for rank in items(group)])
            self.count += len(found[-1])
            if self.count > MAX_NUMBERS:
                raise RefusedError(f"a database must have at most {MAX_NUMBERS} numbers")
        return found

    def mesh(self, key: Any, result: Any) -> dict[str, Any]:
        """Return one mesh's tables."""
        if not (isinstance(key, tuple) and len(key) == 2 and isinstance(result, MeshResult)):
            raise RefusedError("a database must map (cluster, mesh shape) to MeshProfilingResult")
        cluster, mesh = key
        found: dict[str, Any] = {"cluster": str(cluster)[:100], "mesh": [whole(part) for part in items(mesh)]}
        fields = getattr(result, "fields", {})
        for name in COSTS:
            table = fields.get(name) or {}
            if not isinstance(table, dict):
                raise RefusedError(f"{name} must be a mapping")
            rows = []
            for group_and_dtype, points in table.items():
                if not (isinstance(group_and_dtype, tuple) and len(group_and_dtype) >= 2):
                    raise RefusedError(f"{name} must be keyed by (groups, dtype)")
                groups, dtype = group_and_dtype[:2]
                rows.append([self.groups(groups), str(dtype)[:20], self.points(points)])
            found[name] = rows
        return found


def answer(data: bytes) -> dict[str, Any]:
    """Return the content of a pickle, or what was wrong with it."""
    try:
        found = Unpickler(io.BytesIO(data)).load()
        if not isinstance(found, dict):
            raise RefusedError(f"a database must be a mapping, got {type(found).__name__}")
        converter = Converter()
        return {"meshes": [converter.mesh(key, value) for key, value in found.items()]}
    except RefusedError as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"refused": "it needs more memory than a database may"}
    except RecursionError:
        return {"refused": "it is nested too deeply"}
    except Exception as error:  # a broken pickle may raise anything
        return {"refused": f"it is no valid pickle of a database ({type(error).__name__}: {str(error)[:120]})"}


def main() -> int:
    """Read a pickle from standard input and print its content, or what was wrong, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("memory_bytes", type=int, help="at most")
    parser.add_argument("seconds", type=int, help="of the processor, at most")
    limits = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.seconds, limits.seconds))
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    sys.stdout.write(json.dumps(answer(sys.stdin.buffer.read())))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
