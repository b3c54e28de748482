"""nccl-tests' text: what is read, and every way in which a log can contradict itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datafiles.errors import DataFileError
from datafiles.tables import load_table
from hardware_models.collectives import bus_factor
from hardware_models.group_shapes import GroupShape
from hardware_models.importers.nccl_tests import PROGRAMS, read_nccl_log
from tests.hardware_models.data_folder import data_folder

HEADER = """#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
SIZES = [8, 1024, 1048576, 67108864, 1073741824]


def log(
    program: str = "all_reduce",
    ranks: int = 8,
    hosts: int = 1,
    *,
    named: bool = True,
    groups: int = 1,
    latency_us: float = 20.0,
    rate: float = 100e9,
) -> str:
    """Return what a program prints for a latency and a bandwidth; in place is 1 us quicker."""
    kind = PROGRAMS[program]
    factor = 1.0 if kind == "transfer" else bus_factor(kind, ranks)
    lines = [f"# Collective test starting: {program}_perf"] if named else []
    lines += [
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20",
        "# Using devices",
    ]
    per_host = ranks * groups // hosts
    for rank in range(ranks * groups):
        host, device = rank // per_host, rank % per_host
        lines.append(f"#  Rank {rank:2d} Group {rank // ranks:2d} Pid  {4000 + rank} on  node{host} device {device:2d} "
                     "[0x07] NVIDIA A100-SXM4-80GB")  # fmt: skip
    rows = []
    for size in SIZES:
        cells = ""
        for us in (latency_us + 1e6 * size / rate, latency_us - 1 + 1e6 * size / rate):
            algbw = size / us / 1e3
            cells += f" {us:8.2f} {algbw:7.2f} {algbw * factor:7.2f}      0"
        redop = "sum" if kind in ("all_reduce", "reduce_scatter") else "none"
        rows.append(f"{size:12d} {size // 4:13d}     float  {redop:>6}      -1 {cells}")
    end = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 57.4\n"
    return "\n".join(lines) + "\n" + HEADER + "\n".join(rows) + "\n" + end


def written(tmp_path: Path, text: str, name: str = "log.txt") -> Path:
    (tmp_path / name).write_text(text)
    return tmp_path / name


@pytest.mark.parametrize("program", list(PROGRAMS))
def test_a_log_is_read_with_its_group_and_the_quicker_of_both_columns(tmp_path: Path, program: str) -> None:
    found = read_nccl_log(written(tmp_path, log(program)))
    kind = PROGRAMS[program]
    assert found.collective == ("transfer_intra_node" if kind == "transfer" else kind)
    assert found.shape == (GroupShape(2) if kind == "transfer" else GroupShape(8, 1, 1))
    assert found.device == "NVIDIA A100-SXM4-80GB"
    assert found.rows[0] == (8.0, pytest.approx(19e-6))
    assert found.rows[-1] == (2.0**30, pytest.approx(19e-6 + 2**30 / 100e9, rel=1e-4))


def test_nodes_strides_and_groups_at_once_come_from_the_list_of_ranks(tmp_path: Path) -> None:
    assert read_nccl_log(written(tmp_path, log(ranks=16, hosts=2))).shape == GroupShape(16, 2, 1)
    assert read_nccl_log(written(tmp_path, log(ranks=2, groups=4))).shape == GroupShape(2, 1, 1, 4)
    two = log("sendrecv", ranks=2, hosts=2)
    found = read_nccl_log(written(tmp_path, two))
    assert (found.collective, found.shape) == ("transfer_inter_node", GroupShape(2, 2))


def test_without_its_name_a_log_is_told_by_its_file_or_its_factor(tmp_path: Path) -> None:
    text = log("all_gather", named=False)
    assert read_nccl_log(written(tmp_path, text, "a100_all_gather.txt")).collective == "all_gather"
    with pytest.raises(ValueError, match="--collective"):
        read_nccl_log(written(tmp_path, text))
    assert read_nccl_log(written(tmp_path, text), collective="all_gather").collective == "all_gather"
    for word in ("all_gather", "all_gather_perf"):
        assert read_nccl_log(written(tmp_path, log("all_gather")), collective=word).collective == "all_gather"
    with pytest.raises(ValueError, match="the log is of all_gather_perf, got --collective reduce_scatter; leave"):
        read_nccl_log(written(tmp_path, log("all_gather")), collective="reduce_scatter")
    for program in ("all_reduce", "reduce_scatter"):
        assert read_nccl_log(written(tmp_path, log(program, named=False))).collective == program


def test_an_older_log_without_the_column_redop_is_read(tmp_path: Path) -> None:
    text = log("all_gather").replace("   none ", "        ")
    assert read_nccl_log(written(tmp_path, text)).collective == "all_gather"


def test_ranks_can_be_said_where_the_log_does_not_list_them(tmp_path: Path) -> None:
    text = "\n".join(line for line in log().splitlines() if "Rank" not in line)
    with pytest.raises(ValueError, match="--ranks"):
        read_nccl_log(written(tmp_path, text))
    assert read_nccl_log(written(tmp_path, text), num_ranks=8).shape.size == 8
    with pytest.raises(ValueError, match=r"busbw / algbw of all_reduce over 4 ranks must be 1\.500, got 1\.75"):
        read_nccl_log(written(tmp_path, text), num_ranks=4)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("      0\n# Out", "      7\n# Out", "results must be right"),
        ("all_reduce_perf", "gather_perf", "the program must be one of"),
        ("all_reduce_perf", "all_gather_perf", r"busbw / algbw of all_gather over 8 ranks must be 0\.875"),
        ("67108864 ", "134217728 ", "algbw must be size / time"),
        ("     float  ", "", "type must be one of"),
        ("#       size ", "#       bytes ", "rows must follow the header"),
        (" -1 ", " -1 -1 ", "a row must have 13 cells, got 14"),
        ("node0 device  7", "node1 device  7", "equally many ranks on each of its nodes"),
    ],
)
def test_a_log_that_contradicts_itself_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = log()
    assert old in text
    with pytest.raises(DataFileError, match=message):
        read_nccl_log(written(tmp_path, text.replace(old, new)))


@pytest.mark.parametrize("text", ["", "# nothing\n", "hello\n", "\0", "8 2 float sum -1 1 1 1 0 1 1 1 0\n"])
def test_a_file_without_rows_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataFileError):
        read_nccl_log(written(tmp_path, text))


@given(data=st.one_of(st.binary(max_size=300), st.integers(0, 10**6).map(lambda seed: _damaged(seed))))
def test_any_bytes_end_in_success_or_a_clear_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "all_reduce.txt"
    path.write_bytes(data)
    try:
        assert read_nccl_log(path, num_ranks=None).rows
    except ValueError as error:
        assert "all_reduce.txt" in str(error)


def _damaged(seed: int) -> bytes:
    """Return a log with a piece cut out or replaced."""
    text = log(ranks=2).encode()
    at, length = seed % len(text), seed % 97
    middle = bytes(str(seed * 7919), "ascii") if seed % 3 else b"\xff nan -1 1e999 "[: seed % 17]
    return text[:at] + middle + text[at + length :]


def test_a_published_log_of_eight_a100_is_read(tmp_path: Path) -> None:
    table = load_table(
        data_folder("galvatron") / "a100" / "nccl_tests_allreduce_8gpu_A100-SXM4-40GB.csv",
        floats=("time_us_out_of_place", "algbw_GB_s", "busbw_GB_s", "time_us_in_place"),
        integers=("bytes",),
    )
    rows = [
        f"{row['bytes']} {row['bytes'] // 4} float sum -1 {row['time_us_out_of_place']} {row['algbw_GB_s']} "
        f"{row['busbw_GB_s']} 0 {row['time_us_in_place']} {row['bytes'] / row['time_us_in_place'] / 1e3:.2f} "
        f"{1.75 * row['bytes'] / row['time_us_in_place'] / 1e3:.2f} 0"
        for row in table
    ]
    found = read_nccl_log(written(tmp_path, HEADER + "\n".join(rows), "all_reduce.txt"), num_ranks=8)
    assert len(found.rows) == len(table)
    assert found.rows[0] == (2.0**20, pytest.approx(78.77e-6))
    assert 1.75 * found.rows[-1][0] / found.rows[-1][1] == pytest.approx(230.8e9, rel=0.01)  # 1 GiB, as printed
