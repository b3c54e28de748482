"""Alpa's database: read as it was pickled, and nothing else is."""

from __future__ import annotations

import os
import pickle
import re
import statistics
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datafiles.errors import DataFileError
from hardware_models.collective_table import CollectiveTable, leave_one_size_out
from hardware_models.group_shapes import GroupShape
from hardware_models.importers import alpa_database, alpa_worker
from hardware_models.importers.alpa_database import read_alpa_pickle, read_alpa_table
from tests.hardware_models.data_folder import data_folder

MAX_MEDIAN_ERROR = 0.03
"""What a measured table must reach at a size that was left out."""


@pytest.fixture
def result_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """Put a class where Alpa's is, so that pickles name it."""
    module = types.ModuleType("alpa.mesh_profiling")
    result = type("MeshProfilingResult", (), {"__module__": "alpa.mesh_profiling"})
    vars(module)["MeshProfilingResult"] = result
    monkeypatch.setitem(sys.modules, "alpa", types.ModuleType("alpa"))
    monkeypatch.setitem(sys.modules, "alpa.mesh_profiling", module)
    yield result


def database(result_class: type, *, number: Any = float) -> dict[Any, Any]:
    """Return a database of 1x2 and 2x2 with a latency of 10 us and 1 ns for every element."""

    def points(sizes: list[int]) -> list[tuple[Any, Any]]:
        return [(number(size), number(1e-5 + 1e-9 * size)) for size in sizes]

    one, two = result_class(), result_class()
    pair, strided = ((0, 1),), ((0, 2), (1, 3))
    vars(one).update(
        all_reduce_cost_dict={(pair, "f16"): points([0, 1024, 4096]), (pair, "f32"): points([2048])},
        all_gather_cost_dict={(pair, "f16"): points([1024])},
        reduce_scatter_cost_dict={(pair, "f16"): points([1024])},
        all_to_all_cost_dict={(pair, "f16"): points([1024])},
        dot_cost_dict={((), "f16"): [(number(2.0 * 512**3), number(1e-4))]},
        available_memory_per_device=1e10,
        conv_cost_dict=[],
    )
    vars(two).update(
        all_reduce_cost_dict=OrderedDict({(strided, "f32"): [*points([1024]), (number(2048), number("inf"))]}),
        all_gather_cost_dict=[], reduce_scatter_cost_dict=[], all_to_all_cost_dict=[], dot_cost_dict=[],
    )  # fmt: skip
    return {("default", (1, 2)): one, ("default", (2, 2)): two}


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("number", [float, np.float64, np.float32])
def test_a_database_is_read_with_sizes_in_bytes(result_class: type, tmp_path: Path, protocol: int, number: Any) -> None:
    path = tmp_path / "prof_database.pkl"
    path.write_bytes(pickle.dumps(database(result_class, number=number), protocol=protocol))
    found = read_alpa_pickle(path)
    rows = {(kind, shape, size): seconds for kind, shape, size, seconds in found.rows}
    pair, strided = GroupShape(2, 1, 1), GroupShape(2, 2, None, 2)
    assert found.meshes == ("1x2", "2x2")
    assert rows["all_reduce", pair, 2048.0] == pytest.approx(1e-5 + 1024e-9, rel=1e-5)
    assert rows["all_reduce", pair, 8192.0] == pytest.approx(1e-5 + (4096 + 2048) / 2 * 1e-9, rel=1e-5)  # f16 and f32
    assert rows["all_gather", pair, 2048.0] == rows["reduce_scatter", pair, 2048.0]
    assert ("all_to_all", pair, 1024.0) in rows  # each rank holds half of the tensor
    assert rows["all_reduce", strided, 4096.0] == pytest.approx(1e-5 + 1024e-9, rel=1e-5)
    assert not any(size == 0 or seconds == float("inf") for (_, _, size), seconds in rows.items())
    assert [(each.n, each.dtype) for each in found.matmuls] == [(512, "f16")]


def test_arrays_of_points_are_read_too(result_class: type, tmp_path: Path) -> None:
    result = result_class()
    vars(result)["all_reduce_cost_dict"] = {(((0, 1),), "f16"): np.array([[1024.0, 1e-5], [2048.0, 2e-5]])}
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({("x", (1, 2)): result}))
    assert [(size, seconds) for _, _, size, seconds in read_alpa_pickle(tmp_path / "a.pkl").rows] == [
        (2048.0, 1e-5), (4096.0, 2e-5)
    ]  # fmt: skip


class Calls:
    """Pickles as a call of anything."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def refused(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "evil.pkl"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="refused") as caught:
        read_alpa_pickle(path)
    return str(caught.value)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_that_would_run_a_command_is_refused_and_does_not(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "mark"
    for evil in (
        Calls(os.system, f"touch {mark}"),
        Calls(eval, f"open({str(mark)!r}, 'w')"),
        Calls(exec, f"open({str(mark)!r}, 'w')"),
        Calls(__import__, "subprocess"),
        Calls(getattr, os, "system") if protocol else Calls(open, str(mark), "w"),
        {("a", (1, 2)): Calls(os.remove, str(tmp_path))},
    ):
        try:
            data = pickle.dumps(evil, protocol=protocol)
        except TypeError:
            continue  # modules do not pickle
        text = refused(tmp_path, data)
        assert "which a database does not hold" in text
        assert not mark.exists()


def test_a_name_inside_an_allowed_module_is_refused(tmp_path: Path) -> None:
    assert "numpy.fromfile" in refused(tmp_path, pickle.dumps(Calls(np.fromfile, "/etc/hostname"), protocol=2))
    for raw in (b"cnumpy.core.multiarray\nfromstring\n.", b"ccollections\nOrderedDict.fromkeys\n.", b"\x82\x01."):
        refused(tmp_path, raw)


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, b"(" * 3_000_000 + b"t" * 3_000_000 + b".")
    refused(tmp_path, b"]" * 1_000_000 + b"a" * 999_999 + b".")


def test_a_pickle_that_wants_much_memory_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x.")
    doubling = b"(lp0\n0" + b"".join(b"(g%dg%dlp%d\n0" % (i, i, i + 1) for i in range(60)) + b"g60\n."
    refused(tmp_path, doubling)


def test_shared_lists_do_not_grow_without_bound(result_class: type, tmp_path: Path) -> None:
    points = [(1.0, 1.0)] * 1000
    result = result_class()
    vars(result)["all_reduce_cost_dict"] = {(((0, 1),), f"f16{index}"): points for index in range(1500)}
    assert "at most" in refused(tmp_path, pickle.dumps({("x", (1, 2)): result}))


def test_a_process_that_ends_without_an_answer_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alpa_database, "CPU_S", "no")  # a limit that the process does not know
    assert "the process that read it ended with 2 (limits: " in refused(tmp_path, pickle.dumps({}))


@pytest.mark.parametrize(
    ("key", "table", "words"),
    [
        ("1x2", {}, r"must map \(cluster, mesh shape\) to MeshProfilingResult"),
        (("x", (1, 2)), {"f16": []}, r"all_reduce_cost_dict must be keyed by \(groups, dtype\)"),
        (("x", (1, 2)), [1], "all_reduce_cost_dict must be a mapping"),
    ],
)
def test_what_has_not_the_form_of_a_database_is_said(
    result_class: type, tmp_path: Path, key: Any, table: Any, words: str
) -> None:
    result = result_class()
    vars(result)["all_reduce_cost_dict"] = table
    assert re.search(f"refused: .*{words}", refused(tmp_path, pickle.dumps({key: result})))


def test_a_stride_is_that_inside_a_node_where_there_is_one(tmp_path: Path) -> None:
    """Pairs over two nodes have one GPU on each; groups of four over two have two."""
    head = "mesh,collective,dtype,group_size,stride,num_groups,nodes_per_group,gpus_per_node_in_group,bytes,seconds"
    path = tmp_path / "table.csv"
    path.write_text(f"{head}\n2x4,all-gather,f16,2,4,4,2,1,1024,1e-5\n2x4,all-gather,f16,4,2,2,2,2,1024,1e-5\n")
    assert [shape for _, shape, _, _ in read_alpa_table(path)] == [
        GroupShape(2, 2, None, 4), GroupShape(4, 2, 2, 2)
    ]  # fmt: skip


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alpa_database, "TIMEOUT_S", 0.001)
    assert "not read within" in refused(tmp_path, pickle.dumps({}))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alpa_database, "MAX_PICKLE_BYTES", 10)
    (tmp_path / "big.pkl").write_bytes(b"0" * 11)
    with pytest.raises(ValueError, match="at most 10 bytes"):
        read_alpa_pickle(tmp_path / "big.pkl")


def test_every_truncation_is_refused(result_class: type) -> None:
    data = pickle.dumps(database(result_class))
    for cut in range(len(data) - 1):
        assert "refused" in alpa_worker.answer(data[:cut])


@given(st.binary(max_size=200))
def test_any_bytes_end_in_an_answer(data: bytes) -> None:
    assert set(alpa_worker.answer(data)) <= {"meshes", "refused"}


@settings(max_examples=8, deadline=None)
@given(st.binary(max_size=60))
def test_any_file_ends_in_success_or_a_clear_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "x.pkl"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"x\.pkl"):
        read_alpa_pickle(path)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("1x8,allreduce,2,1,1,1,2,f16,1024,1e-5", "row 2: collective must be one of all_reduce, .*, got 'allreduce'"),
        ("1x8,all-reduce,2,1,1,1,2,f16,1024,0", "row 2: seconds must be above 0, got 0"),
        ("1x8,all-reduce,1,1,1,1,1,f16,1024,1e-5", "row 2: a group must have at least 2 ranks"),
        ("x,all-reduce,2,1,1,1,2,f16,1024,1e-5", "row 2 must have a mesh like 2x8"),
        ("1x8,all-reduce,8,1,1,1,3,f16,1024,1e-5", "row 2 must have .* GPUs of a node that make up a group"),
        ("1x8,all-reduce,0,1,1,0,2,f16,1024,1e-5", "row 2 must have a mesh like 2x8 that holds its groups"),
        ("1x8,all-reduce,2,1,-7,1,2,f16,1024,1e-5", "row 2 must have a mesh like 2x8 that holds its groups"),
        ("1x8,all-reduce,2,1,5,1,2,f16,1024,1e-5", "row 2 must have a mesh like 2x8 that holds its groups"),
        ("1x8,all-reduce,2,1,1,1,2,f16,-4,1e-5", "row 2 must have .* 0 to 1.13e"),
        ("1x8,all-reduce,2,1,1,1,2,f16,1024,1e300", "row 2 must have .* at most 3600 s"),
        ("1x8,all-reduce,2,1,1,1,2,f16,,1e-5", r"t\.csv:3: bytes must be a number, got an empty cell"),
    ],
)
def test_a_wrong_row_of_a_table_is_refused_by_its_number(tmp_path: Path, row: str, words: str) -> None:
    head = "mesh,collective,group_size,stride,num_groups,nodes_per_group,gpus_per_node_in_group,dtype,bytes,seconds"
    (tmp_path / "t.csv").write_text(f"{head}\n1x8,all-reduce,2,1,1,1,2,f16,1024,1e-5\n{row}\n")
    with pytest.raises(ValueError, match=words):
        read_alpa_table(tmp_path / "t.csv")


@pytest.mark.parametrize("name", ["collectives_p3_16xlarge_osdi22.csv", "collectives_a100_8gpu.csv"])
def test_a_measured_table_is_right_at_sizes_that_were_left_out(name: str) -> None:
    table = CollectiveTable.from_rows(read_alpa_table(data_folder("alpa_v100") / name), name)
    errors: dict[str, list[tuple[float, float]]] = {}
    for kind, _, size, measured, predicted in leave_one_size_out(table):
        errors.setdefault(kind, []).append((size, abs(predicted / measured - 1)))
    ranges = ((0, 2**16), (2**16, 2**22), (2**22, 2**27), (2**27, 2**40))
    print(f"\n{name}: median (90 %) absolute error, each size left out")
    for kind, own in errors.items():
        parts = [sorted(error for size, error in own if low < size <= high) for low, high in ranges]
        words = ", ".join(
            f"{100 * statistics.median(part):.1f} ({100 * part[int(0.9 * len(part))]:.0f}) %" for part in parts
        )
        print(f"  {kind:<15}{len(own):5d} points {100 * statistics.median(e for _, e in own):.2f} %; "
              f"to 64 KiB, 4 MiB, 128 MiB, above: {words}")  # fmt: skip
        assert statistics.median(error for _, error in own) <= MAX_MEDIAN_ERROR, kind
    assert set(errors) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}


@pytest.mark.parametrize(
    ("table", "point", "message"),
    [
        ("all_reduce_cost_dict", (1024.0, 4e15), r"all_reduce: a point must have at most .* got 2.05e\+03 and 4e\+15"),
        ("all_gather_cost_dict", (1e300, 1e-3), r"all_gather: a point must have at most 1.13e\+15 bytes and 3600 s"),
        ("dot_cost_dict", (2.0 * 512**3, 1e9), r"a product must take at most 3600 s, got 1e\+09"),
    ],
)
def test_times_and_sizes_of_no_machine_are_refused(
    result_class: type, tmp_path: Path, table: str, point: tuple[float, float], message: str
) -> None:
    content = database(result_class)
    vars(content["default", (1, 2)])[table][((0, 1),), "f16"] = [point]
    (path := tmp_path / "prof_database.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(DataFileError, match=f"prof_database.pkl: {message}"):
        read_alpa_pickle(path)
