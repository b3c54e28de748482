"""Operators as chains of one kernel per operation, against a published layer profile of TensorFlow."""

from __future__ import annotations

from math import prod

import pytest

from datafiles.tables import load_table
from hardware_models.model import HardwareModel
from hardware_models.runtime_files import load_runtime
from tests.hardware_models.data_folder import data_folder
from workloads.kernels import MemoryBound
from workloads.kinds import elementary
from workloads.kinds.base import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Implementation
from workloads.local import localize, saved_tensors
from workloads.models.bert import BertSpec, build

WORKLOAD = build(BertSpec(name="bert-48-384", layers=2, hidden=1024, heads=16, seq_len=384), "plain")
CHAINS = Implementation(dtype="fp32", fused_softmax=False, fused_bias_activation=False, elementary=True)
TORCH = Implementation(dtype="fp32", fused_softmax=False, fused_bias_activation=False)


def _layer_seconds(phases: tuple[str, ...], samples: int) -> float:
    hardware = HardwareModel.from_name("v100-1gpu-25g:1x1")
    implementation = load_runtime("dapple-tensorflow").implementation
    total = 0.0
    for index, op in enumerate(WORKLOAD.operators):
        if op.layer == "layer1" or op.layer == 1:
            local = localize(op.definition, op.attributes, WORKLOAD.input_shapes(index, samples), [], implementation)
            for phase in phases:
                kernels = op.definition.kernels(phase, local)
                total += sum(hardware.kernel_time_s(hardware.gpu_type(0), kernel, "fp32") for kernel in kernels)
    return total


def test_a_bert_layer_takes_what_dapple_profiled_under_tensorflow() -> None:
    """No constant was fitted on the profile (V100, batch 2): 2.69 ms forward, 4.47 ms backward a layer."""
    table = load_table(data_folder("dapple") / "bert48_b2.csv", floats=("fw_ms", "bw_ms"))
    (layer,) = {(row["fw_ms"], row["bw_ms"]) for row in table if row["layer"].startswith("layer_")}
    assert _layer_seconds((FORWARD,), 2) * 1e3 == pytest.approx(layer[0], rel=0.05)
    assert _layer_seconds((BACKWARD_INPUT, BACKWARD_WEIGHT), 2) * 1e3 == pytest.approx(layer[1], rel=0.05)


@pytest.mark.parametrize("kind", ["gelu", "layer_norm", "dropout", "softmax", "dropout_add"])
@pytest.mark.parametrize("phase", [FORWARD, BACKWARD_INPUT])
def test_a_chain_moves_more_bytes_in_more_kernels_than_torch_does(kind: str, phase: str) -> None:
    index, op = next((i, op) for i, op in enumerate(WORKLOAD.operators) if op.kind == kind)
    moved = []
    for implementation in (TORCH, CHAINS):
        local = localize(op.definition, op.attributes, WORKLOAD.input_shapes(index, 1), [], implementation)
        kernels = op.definition.kernels(phase, local)
        moved.append((len(kernels), sum(k.total_bytes for k in kernels if isinstance(k, MemoryBound))))
    assert moved[1][0] > moved[0][0]
    assert moved[1][1] > moved[0][1]


def test_a_chain_of_gelu_keeps_three_tensors_and_dropout_its_factors() -> None:
    for kind, wanted in (("gelu", 3.0), ("dropout", 1.0)):
        index, op = next((i, op) for i, op in enumerate(WORKLOAD.operators) if op.kind == kind)
        local = localize(op.definition, op.attributes, WORKLOAD.input_shapes(index, 1), [], CHAINS)
        size = 4.0
        for extent in local.inputs[0]:
            size *= extent
        assert sum(item.size_bytes for item in saved_tensors(op.definition, local)) == wanted * size


def test_passes_count_tensors_read_and_written() -> None:
    (kernel,) = elementary.chain((elementary.ZIP,), 8.0)
    assert isinstance(kernel, MemoryBound)
    assert (kernel.read_bytes, kernel.write_bytes, kernel.pattern) == (16.0, 8.0, "elementwise")
    (reduction,) = elementary.chain((elementary.REDUCE,), 8.0)
    assert isinstance(reduction, MemoryBound)
    assert (reduction.total_bytes, reduction.pattern) == (8.0, "reduction")


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        # A quotient, erf, one more, a half, a product. Back two products, a half, erf's derivative (a square, its
        # negative, an exponential, a constant, a product), a quotient, a sum: four read two tensors.
        ("gelu", (5, 4 * 2 + 3), (10, 6 * 2 + 4 * 3)),
        # Scale, mask, maximum, sum, quotient. Back a product and its sum, a difference, a product, the scale's.
        ("softmax", (5, 3 * 2 + 2 * 1), (5, 2 * 3 + 1 + 2 * 2)),
        # A draw, three maps, a product. Back a product and the scaling's.
        ("dropout", (5, 1 + 3 * 2 + 3), (2, 3 + 2)),
    ],
)
def test_a_chain_has_a_kernel_for_each_operation_of_berts_graph(
    kind: str, forward: tuple[int, int], backward: tuple[int, int]
) -> None:
    """``gelu``, ``attention_layer`` and ``dropout`` of google-research/bert: kernels, and tensors moved."""
    index, op = next((i, op) for i, op in enumerate(WORKLOAD.operators) if op.kind == kind)
    local = localize(op.definition, op.attributes, WORKLOAD.input_shapes(index, 1), [], CHAINS)
    for phase, expected in ((FORWARD, forward), (BACKWARD_INPUT, backward), (BACKWARD_WEIGHT, (0, 0))):
        found = op.definition.kernels(phase, local)
        moved = sum(kernel.total_bytes for kernel in found if isinstance(kernel, MemoryBound))
        assert (len(found), moved) == (expected[0], expected[1] * 4 * prod(local.inputs[0])), phase
