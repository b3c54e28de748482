"""Shipped link constants against published collectives that no constant was fitted on."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from hardware_models.calibration.check_collectives import LARGE, MIDDLE, Check, band, checks, tabulate
from hardware_models.calibration.collective_rows import (
    CollectiveRow,
    Predictor,
    aceso_rows,
    alpa_rows,
    galvatron_rows,
    measured_rows,
)
from hardware_models.calibration.fit_collectives import LINKS, V100, Constant, fit, is_fitted
from hardware_models.cluster import parse_cluster
from hardware_models.model import HardwareModel
from tests.hardware_models.data_folder import data_folder

RINGS = ("all_reduce", "all_gather", "reduce_scatter")


@pytest.fixture(scope="module")
def alpa() -> dict[str, Check]:
    data = data_folder("alpa_v100").parent
    return {check.preset: check for check in checks(data) if check.preset}


@pytest.mark.parametrize("preset", ["p3.16xlarge", "a100-80g-dgx"])
def test_rows_not_fitted_are_met_within_the_targets(alpa: dict[str, Check], preset: str) -> None:
    """8 % from 4 MB on and 15 % between 64 KB and 4 MB, median over all group shapes; reached: 5 and 8 %."""
    errors = [(row, error) for row, error in alpa[preset].errors() if row.kind in RINGS]
    found = {size: median(abs(error) for row, error in errors if band(row) == size) for size in (LARGE, MIDDLE)}
    assert found[LARGE] < 0.06
    assert found[MIDDLE] < 0.09
    for (_, size), (_, typical, _) in tabulate(errors, lambda row: row.kind).items():
        assert typical < {LARGE: 0.10, MIDDLE: 0.12}.get(size, 1.0)


def test_acesos_all_reduces_are_the_quickest_of_each_size_without_empty_ones(tmp_path: Path) -> None:
    path = tmp_path / "comm.csv"
    path.write_text(
        "db,collective,group_size,message_mib,ms\neurosys,all_reduce,4,0,0.05\neurosys,all_reduce,4,2,0.8\n"
        "eurosys,all_reduce,4,2,0.5\neurosys,all_reduce,4,2,0.6\neurosys,all_gather,4,2,0.1\n"
        "miniset,all_reduce,4,2,0.1\n"
    )
    (row,) = aceso_rows(path, "eurosys", "v100-32g-dgx1")
    assert (row.cluster, row.groups, row.num_bytes) == ("v100-32g-dgx1:1x4", ((0, 1, 2, 3),), 2_097_152)
    assert row.seconds == pytest.approx(0.5e-3)


def test_alpas_rows_are_of_all_groups_at_once_without_the_measuring_loop(tmp_path: Path) -> None:
    """An all-to-all is stated by the whole tensor, of which each of four ranks holds a quarter."""
    path = tmp_path / "collectives.csv"
    columns = "mesh,collective,group_size,stride,num_groups,gpus_per_node_in_group,dtype,bytes,seconds"
    rows = [f"2x4,{kind},4,2,2,2,f16,{2**20},0.001" for kind in ("all-reduce", "all-to-all")]
    left_out = ("2x4,all-reduce,4,2,2,2,f16,0,0.000016", "2x4,broadcast,4,2,2,2,f16,8,1")
    path.write_text("\n".join([columns, *rows, *left_out]))
    reduced, exchanged = alpa_rows(path, "p3.16xlarge")
    assert (reduced.num_bytes, exchanged.num_bytes) == (2**20, 2**18)
    for row in (reduced, exchanged):
        assert (row.cluster, row.groups) == ("p3.16xlarge:2x4", ((0, 2, 4, 6), (1, 3, 5, 7)))
        assert (row.ranks_per_process, row.seconds) == (2, pytest.approx(0.001 - 16e-6))


def test_measured_rows_are_all_reduces_inside_a_node(tmp_path: Path) -> None:
    path = tmp_path / "collectives_measured.csv"
    path.write_text(
        "gpu,source,op,num_gpus,gpus_per_node,bytes,time_ms\nA100,vTrain x,all_reduce,8,8,1048576,0.1\n"
        "A100,vTrain x,all_reduce,16,8,1048576,0.2\nA100,vTrain x,all_gather,8,8,1048576,0.3\n"
        "A100,Vidur,all_reduce,8,8,1048576,0.4\nV100,vTrain x,all_reduce,8,8,1048576,0.5\n"
    )
    (row,) = measured_rows(path, "A100", "vTrain", "a100-80g-dgx")
    assert (row.cluster, row.groups, row.num_bytes) == ("a100-80g-dgx:1x8", (tuple(range(8)),), 2**20)
    assert (row.ranks_per_process, row.seconds) == (0, pytest.approx(1e-4))


def test_galvatrons_rows_are_of_one_group_each(tmp_path: Path) -> None:
    path = tmp_path / "collective_time_by_size.csv"
    path.write_text("op,group_size,message_MiB,time_ms\nallreduce,8,1,0.079\nall2all,2,64,0.25\n")
    reduced, exchanged = galvatron_rows(path, "a100-40g-dgx")
    assert (reduced.cluster, reduced.kind, reduced.groups) == ("a100-40g-dgx:1x8", "all_reduce", (tuple(range(8)),))
    assert (exchanged.kind, exchanged.groups, exchanged.num_bytes) == ("all_to_all", ((0, 1),), 67_108_864)
    assert exchanged.seconds == pytest.approx(0.25e-3)


def test_no_row_is_fitted_and_reported(alpa: dict[str, Check]) -> None:
    assert sum(len(check.rows) for check in alpa.values()) > 4000
    assert not any(is_fitted(row) for check in alpa.values() for row in check.rows)


def test_strided_pairs_share_a_nic_equally_as_measured() -> None:
    """8 pairs over one NIC take twice as long as 4 groups of 4 would with the same bytes leaving: all as measured."""
    folder = data_folder("alpa_v100")
    rows = [
        row
        for row in alpa_rows(folder / "collectives_p3_16xlarge_osdi22.csv", "p3.16xlarge")
        if (row.cluster, row.kind, row.num_bytes, row.dtype) == ("p3.16xlarge:2x8", "all_reduce", 2**28, "f32")
    ]
    strided = {len(row.groups): row for row in rows if row.groups[0][-1] >= 8 and len(row.groups) > 1}
    assert sorted(strided) == [2, 4, 8]
    predictor = Predictor({"p3.16xlarge:2x8": parse_cluster("p3.16xlarge:2x8")}, 0.0)
    for row in strided.values():
        alone = CollectiveRow(row.cluster, row.kind, row.groups[:1], row.num_bytes, row.seconds)
        # Each group moves the buffer once through the NIC: k groups take k times one.
        assert predictor.seconds(row) == pytest.approx(len(row.groups) * predictor.seconds(alone), rel=0.02)
        assert row.seconds / len(row.groups) == pytest.approx(predictor.seconds(alone), rel=0.17)


def test_a_fit_finds_the_constants_that_made_its_rows() -> None:
    cluster = parse_cluster("p3.16xlarge:1x8")
    hardware = HardwareModel(cluster)
    rows = [
        CollectiveRow(
            cluster=cluster.name,
            kind=kind,
            groups=(group,),
            num_bytes=float(2**exponent),
            seconds=hardware.collective(kind, 2**exponent, group).alone_s,
        )
        for kind in RINGS
        for group in ((0, 1), (0, 1, 2, 3), tuple(range(8)))
        for exponent in range(14, 31, 2)
    ]
    constants: tuple[Constant, ...] = tuple(each for each in V100 if each.place != "launch_per_rank_s")
    found = fit(constants, rows)
    links = cluster.nodes[0].links
    assert found["link_bytes_per_s"] == pytest.approx(links.link_bytes_per_s, rel=0.01)
    assert found["simple.step_s"] == pytest.approx(links.protocols[1].step_s, rel=0.05)
    assert found["local.reduce_scatter"] == pytest.approx(links.local_bytes_per_s["reduce_scatter"], rel=0.05)
    assert len(LINKS) + 7 <= 12


def test_the_own_part_of_a_gather_costs_a_copy() -> None:
    links = parse_cluster("a100-80g-dgx:1x8").nodes[0].links
    hardware = HardwareModel.from_name("a100-80g-dgx:1x8")
    for n in (2, 4, 8):
        work = hardware.collective("all_gather", 1e9, range(n)).work_s
        wire = (n - 1) / n * 1e9 / links.link_bytes_per_s
        assert work - wire == pytest.approx(1e9 / n / links.local_bytes_per_s["all_gather"])
