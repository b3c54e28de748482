"""Residual networks: published parameter counts, operations and Aceso's operator list."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from datafiles.tables import load_table
from tests.workloads.graphs import EAGER_FP32, SHARED_DATA, local_operator
from workloads import build_workload
from workloads.kernels import Convolution, MemoryBound
from workloads.kinds.base import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from workloads.local import matmul_flop
from workloads.models.resnet import ResNetSpec
from workloads.operators import Workload
from workloads.registry import build_from_spec

PROFILE = SHARED_DATA / "aceso_v100" / "ops.csv.gz"


def test_resnet_50_has_the_released_parameters_and_operations() -> None:
    """25,557,032 parameters and 4.09 billion multiply-adds at 224 pixels: torchvision's model card."""
    workload = build_workload("resnet-50")
    assert workload.num_parameters == 25_557_032
    assert flop(workload, FORWARD) / 2e9 == pytest.approx(4.09, abs=0.01)
    # Every product twice in backward, but the images need no gradient.
    first = local_operator(workload, 0, EAGER_FP32)
    backward = flop(workload, BACKWARD_INPUT) + flop(workload, BACKWARD_WEIGHT)
    stem = matmul_flop(workload.operators[0].definition.kernels(FORWARD, first))
    assert backward == pytest.approx(2 * flop(workload, FORWARD) - stem)


def flop(workload: Workload, phase: str) -> float:
    return sum(
        matmul_flop(op.definition.kernels(phase, local_operator(workload, index, EAGER_FP32)))
        for index, op in enumerate(workload.operators)
    )


@pytest.mark.parametrize(
    ("size", "billions", "operators"),
    [("500m", 0.5, 134), ("2b", 2, 134), ("4b", 4, 134), ("6.8b", 6.8, 134), ("13b", 13, 270)],
)
def test_wide_resnets_have_acesos_sizes_and_operators(size: str, billions: float, operators: int) -> None:
    workload = build_workload(f"wide-resnet-{size}")
    assert len(workload) == operators
    assert workload.num_parameters / 1e9 == pytest.approx(billions, rel=0.03)


@pytest.mark.parametrize("size", ["500M", "2B", "4B", "6_8B", "13B"])
def test_names_weights_and_images_are_those_of_the_profile(size: str) -> None:
    if not PROFILE.exists():
        pytest.skip("Aceso's profile is not here: it is not part of the repository")
    workload = build_workload(f"wide-resnet-{size.lower().replace('_', '.')}")
    rows = [
        row
        for row in load_table(PROFILE, floats=("weight_mib",), integers=("mbs", "tp", "algo"))
        if (row["db"], row["model"], row["size"], row["mbs"], row["tp"], row["algo"])
        == ("eurosys", "resnet", size, 16, 1, 0)
    ]
    assert [op.role for op in workload.operators] == [row["op"] for row in rows]
    for index, row in enumerate(rows):
        count = sum(parameter_size(workload, index, parameter) for parameter in range(len(workload.parameters(index))))
        # The profile leaves out the norm inside a shortcut; it prints three decimals of MiB.
        expected = row["weight_mib"] * 2**20 / 4
        assert count == pytest.approx(expected, rel=0.02, abs=200), row["op"]


def parameter_size(workload: Workload, index: int, number: int) -> int:
    size = 1
    for extent in workload.parameters(index)[number].shape:
        size *= extent
    return size


def test_a_convolution_does_the_same_operations_in_all_three_roles() -> None:
    for role in ("forward", "data_gradient", "weight_gradient"):
        kernel = Convolution(4, 16, 32, 56 * 56, 28 * 28, 3, 2, role)
        assert kernel.product.flop == kernel.flop == 2 * 4 * 28 * 28 * 32 * 16 * 9


def test_an_image_that_does_not_halve_is_refused() -> None:
    with pytest.raises(ValueError, match="image must be a multiple of 32"):
        ResNetSpec(name="x", blocks=(1, 1, 1, 1), channels=8, image=100)


def test_more_blocks_than_fit_into_memory_are_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks\.0: must be less than or equal to 16384, got 16777216"):
        build_workload("resnet-50", overrides={"blocks": [2**24, 4, 6, 3]})


def test_batch_norms_in_bf16_load_two_bytes_as_slowly_as_four() -> None:
    """PyTorch's own; in fp16, which cuDNN has, half of fp32's bytes."""
    workload = build_workload("resnet-50")
    index = next(number for number, op in enumerate(workload.operators) if op.kind == "batch_norm")

    def moved(dtype: str) -> float:
        local = local_operator(workload, index, replace(EAGER_FP32, dtype=dtype))
        (kernel,) = workload.operators[index].definition.kernels(FORWARD, local)
        assert isinstance(kernel, MemoryBound)
        return kernel.total_bytes

    assert moved("bf16") == moved("fp32") == 2 * moved("fp16")


def test_images_that_lie_as_tensor_cores_want_them_are_not_copied() -> None:
    """96 to 96 channels of 64x64 pixels, 48 images in bf16: 72 MiB of both, as seen on an H100 (72.2)."""
    spec = ResNetSpec(name="small", blocks=(1,), channels=96, image=256)
    workload = build_from_spec(spec)
    index = next(number for number, op in enumerate(workload.operators) if op.role == "block-0-0-conv2")
    definition = workload.operators[index].definition
    for channels_last, copied in ((False, 72 * 2**20), (True, 0)):
        of = replace(EAGER_FP32, dtype="bf16", channels_last=channels_last)
        local = local_operator(workload, index, of, samples=48)
        for phase in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT):
            assert sum(2 * prod(shape) for shape, _ in definition.workspace(phase, local)) == copied
