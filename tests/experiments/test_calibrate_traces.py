"""What ``windtunnel calibrate`` takes from traces and layer files, and what it leaves out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.calibrate.galvatron import galvatron
from experiments.calibrate.layer_kinds import layers_by_kind, outside_kinds
from experiments.calibrate.layers import calibrate_layers
from experiments.calibrate.sources import _trace_rows, kineto
from hardware_models.calibration.outcome import Outcome
from hardware_models.gpus import load_curves, load_gpu
from hardware_models.group_shapes import GroupShape
from hardware_models.importers.galvatron import GalvatronFile, LayerTime
from hardware_models.importers.kineto import Collective
from simulator.problem import ProblemSpec
from tests.hardware_models.test_importer_kineto import GEMM, REDUCE, Maker, collective
from workloads.operators import Workload

GPU = "a100-sxm4-80gb"


def calibrated(maker: Maker, path: Path) -> Outcome:
    return kineto(maker.write(path / "t.json"), preset=None, gpu=GPU, gpus_per_node=8)


def test_the_optimizer_moves_as_much_as_what_memory_rules(tmp_path: Path) -> None:
    """Copies at half the shipped share of the peak: the optimizer's share is halved."""
    gpu, maker = load_gpu(GPU), Maker()
    share = load_curves(gpu.curves).memory.fraction["elementwise"]
    for power in range(28, 31):
        seconds = 2 * 2.0**power / (0.5 * share * gpu.memory_bytes_per_s)
        maker.kernel("Memcpy DtoD (Device -> Device)", seconds, cat="gpu_memcpy", bytes=2**power)
    constants = calibrated(maker, tmp_path).calibration.gpus[GPU]
    assert constants.optimizer_bandwidth_fraction == pytest.approx(0.5 * gpu.optimizer_bandwidth_fraction, rel=0.02)


def test_slowdowns_are_the_medians_of_kinds_of_work_each_on_its_own_side(tmp_path: Path) -> None:
    """Three products that take 1.1, 1.2 and 1.9 times as long beside an all-reduce, which takes 1.5 times as long."""
    maker, slower, us = Maker(), (1.1, 1.2, 1.9), 1e-6
    for number in range(3):
        maker.kernel(f"{GEMM}_{number}", 100 * us)
    all_reduce = collective("allreduce", 1 << 20, 1 << 20)
    maker.kernel(REDUCE, 280 * us, **all_reduce)
    at = maker.clock
    maker.kernel(REDUCE, 420 * us, start=at, **all_reduce)
    for number, factor in enumerate(slower):
        maker.kernel(f"{GEMM}_{number}", 100 * factor * us, start=at + sum(100 * each for each in slower[:number]))
    constants = calibrated(maker, tmp_path).calibration.gpus[GPU]
    assert constants.overlap_slowdown_computation == pytest.approx(1.2)
    assert constants.overlap_slowdown_communication == pytest.approx(1.5)


def test_collectives_of_a_trace_are_placed_by_their_ranks() -> None:
    """On nodes of four; nobody knows where a group without ranks lies that is larger than one."""

    def of(ranks: tuple[int, ...], size: int, kind: str = "all_reduce") -> Collective:
        return Collective(kind, 2.0**20, size, ranks, 0.0, 1e-3)

    known = [of((0, 2), 2), of((1, 5), 2), of((0, 1, 4, 5), 4), of((), 4)]
    rows, notes = _trace_rows([*known, of((), 8), of((0, 1, 4), 3), of((0, 4), 2, "send")], gpus_per_node=4)
    assert rows == [
        ("all_reduce", shape, 2.0**20, 1e-3)
        for shape in (GroupShape(2, 1, 2), GroupShape(2, 2), GroupShape(4, 2, 1), GroupShape(4))
    ]
    assert sorted(notes) == [
        "1 collective was not used: groups over several nodes without their ranks",
        "2 collectives were not used: transfers and uneven groups",
    ]


def layer_files(folder: Path, contents: dict[str, object]) -> Outcome:
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    files = [folder / name for name in contents]
    return galvatron(files, preset="titan-rtx-pcie", model="bert-huge-32", runtime="galvatron-v1")


@pytest.mark.parametrize(("batches", "is_told"), [((1, 8), False), ((1, 2, 8), True)])
def test_a_line_through_two_batches_says_nothing_of_itself(
    tmp_path: Path, batches: tuple[int, ...], is_told: bool
) -> None:
    times = {f"layernum[{n}]_bsz{b}_seq512": 5.0 + n * (0.5 + 2.0 * b) for n in (2, 4) for b in batches}
    fits = layer_files(tmp_path, {"layers.json": times}).calibration.fits
    assert ("layer kind 0: time over batch" in [fit.what for fit in fits]) == is_told


def test_activations_of_every_tensor_parallel_degree_are_compared(tmp_path: Path) -> None:
    """BERT-Huge-32 as released, at degrees 1 and 2: two points, and parameters."""
    part = {"parameter_size": 76.98, "tp_activation_per_bsz_dict": {"1": 94.07, "2": 52.5}}
    points = layer_files(tmp_path, {"memory.json": {"layertype_0": part}}).points
    assert [point.group for point in points].count("layer kind 0: activations of a sample") == 2


def of_kinds(model: str, *times: LayerTime) -> tuple[dict[str, float], Workload, tuple[str, ...]]:
    """Return forward seconds by role that layers of a model make, the model, and the notes."""
    found = calibrate_layers([GalvatronFile(layers=times)], model, "titan-rtx-pcie:1x1", "galvatron-v1", "t")
    assert found.operators is not None
    workload = ProblemSpec(model, "titan-rtx-pcie:1x1", "galvatron-v1", 1).load().workload
    return {row.role: row.forward_s for row in found.operators.rows}, workload, found.notes


def test_each_stage_of_swin_is_a_kind_of_layers_with_times_of_its_own() -> None:
    """As Galvatron's files number them, of 2, 2, 26 and 2 layers; patch merging lies outside."""
    seconds = (0.05, 0.04, 0.02, 0.03)
    taken, workload, notes = of_kinds("swin-huge-32", *(LayerTime(kind, 8, each) for kind, each in enumerate(seconds)))
    kinds = layers_by_kind(workload)
    assert [len(layers) for layers in kinds] == [2, 2, 26, 2]
    for layers, each in zip(kinds, seconds, strict=True):
        whole = sum(taken[workload.profile_roles[index]] for members in layers for index in members)
        assert whole == pytest.approx(len(layers) * each, rel=1e-9)
    outside = {workload.operators[index].role for index in outside_kinds(workload, kinds)}
    assert {"merge", "merge_norm", "merge_linear", "final_norm", "loss"} <= outside
    assert not outside & {"norm_1", "attention_qkv", "mlp_linear_2"} and not any("same work" in note for note in notes)


def test_operators_that_do_the_same_work_in_several_kinds_have_their_mean_and_a_note(tmp_path: Path) -> None:
    """GNMT's sums, where source and target are of one length: in 6 layers of the encoder and 6 of the decoder."""
    path = tmp_path / "gnmt.yaml"
    path.write_text(
        "{family: gnmt, encoder_layers: 8, decoder_layers: 8, hidden: 64, vocab: 512, seq_len: 16, decoder_seq_len: 16}"
    )
    taken, workload, notes = of_kinds(str(path), LayerTime(0, 8, 0.04), LayerTime(1, 8, 0.02))
    kinds = layers_by_kind(workload)
    assert [len(layers) for layers in kinds] == [6, 6]
    both_s = sum(taken[workload.profile_roles[index]] for layers in kinds for layer in layers for index in layer)
    assert both_s == pytest.approx(6 * 0.04 + 6 * 0.02, rel=1e-9)
    assert any("operators that do the same work were measured in layers of several kinds" in note for note in notes)
    assert not any("same work" in note for note in of_kinds(str(path), LayerTime(0, 8, 0.04))[2])


def test_layers_of_other_sequences_beside_the_models_own_are_left_out(tmp_path: Path) -> None:
    own = {"layernum[2]_bsz8_seq512": 20.0, "layernum[4]_bsz8_seq512": 30.0}
    longer = {"layernum[2]_bsz8_seq1024": 40.0, "layernum[4]_bsz8_seq1024": 62.0}
    taken = [layer_files(tmp_path, {"layers.json": times}) for times in (own, {**own, **longer})]
    rows = [each.calibration.operators.rows for each in taken if each.calibration.operators is not None]
    assert rows[0] == rows[1] and not any("same work" in note for note in taken[1].notes)


def test_one_kind_measured_twice_has_its_mean_without_a_note() -> None:
    times = (LayerTime(0, 8, 0.04), LayerTime(0, 8, 0.02))
    both, first = (
        calibrate_layers([GalvatronFile(layers=some)], "bert-large", "titan-rtx-pcie:1x1", "galvatron-v1", "t")
        for some in (times, times[:1])
    )
    assert both.operators is not None and first.operators is not None
    taken, alone = (sum(row.forward_s for row in each.operators.rows) for each in (both, first) if each.operators)
    assert taken == pytest.approx(0.75 * alone) and not any("same work" in note for note in both.notes)


def test_a_layer_with_a_pool_behind_it_is_of_the_kind_of_those_without() -> None:
    """VGG-19 (configuration E): of 256 maps three convolutions are alike, of 512 three and, on 14 x 14, four."""
    seconds = (0.05, 0.03, 0.01)
    taken, workload, _ = of_kinds("vgg-19", *(LayerTime(kind, 8, each) for kind, each in enumerate(seconds)))
    kinds = layers_by_kind(workload)
    assert [len(layers) for layers in kinds] == [3, 3, 4]
    for layers, each in zip(kinds, seconds, strict=True):
        for members in layers:
            assert sum(taken[workload.profile_roles[index]] for index in members) == pytest.approx(each, rel=1e-9)
