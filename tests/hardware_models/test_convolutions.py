"""Convolutions: the products they amount to, split sums, Winograd's algorithm, and the measured ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware_models.calibration.aceso_rows import convolution_rows
from hardware_models.calibration.check_convolutions import errors
from hardware_models.calibration.fit_convolutions import (
    FITTED,
    PARAMETERS,
    factors_of,
    predicted_s,
    shipped_factors,
)
from hardware_models.calibration.kernel_fit import least
from hardware_models.compute import convolution_factors, convolution_s, kernel_time_s
from hardware_models.gpus import ConvolutionFactors, EfficiencyCurves, GpuType, MatmulCurve, load_curves, load_gpu
from hardware_models.model import HardwareModel
from tests.hardware_models.data_folder import data_folder
from workloads.kernels import Convolution, Matmul

V100 = HardwareModel.from_name("v100-32g-dgx1:1x1")
A100 = HardwareModel.from_name("a100-80g-dgx:1x1")
V100_GPU, A100_GPU = V100.gpu_type(0), A100.gpu_type(0)
ROLES = ("forward", "data_gradient", "weight_gradient")
AS_THE_PRODUCT = ConvolutionFactors(
    slowness=dict.fromkeys(ROLES, 1.0), half_k_share=1.0, few_channels_slowness=1.0, transform_fraction=1.0,
    source="by hand",
)  # fmt: skip
WHOLE = MatmulCurve(
    limit=dict.fromkeys(ROLES, 1.0), half_waves=0.1, half_k=100.0, tile_m=128, tile_n=64, bandwidth_fraction=1.0,
    source="by hand",
)  # fmt: skip


def machine(flop_per_s: float = 100e12, bytes_per_s: float = 1e15) -> GpuType:
    """Return a GPU of 100 multiprocessors."""
    changed = {
        "peak_flop_per_s": {"fp32": flop_per_s}, "memory_bytes_per_s": bytes_per_s, "num_multiprocessors": 100
    }  # fmt: skip
    return V100.gpu(V100_GPU).model_copy(update=changed)


def convolution(role: str, kernel: int = 3, stride: int = 2, samples: int = 4) -> Convolution:
    return Convolution(samples, 16, 32, 28 * 28 * stride**2, 28 * 28, kernel, stride, role)


def test_products_have_the_sum_of_their_role_inside() -> None:
    """4 images of 28x28 output pixels are 3136 rows; a window of 16 channels has 144 elements."""
    assert convolution("forward").product == Matmul(3136, 32, 144)
    assert convolution("weight_gradient").product == Matmul(32, 144, 3136, role="weight_gradient")
    # Every one of the 56x56 pixels gets a gradient, from 32 channels and a quarter of the nine taps.
    assert convolution("data_gradient").product == Matmul(12544, 16, 72, role="data_gradient")
    # A 1x1 window with stride 2 reads every fourth pixel: the others have no gradient.
    assert convolution("data_gradient", kernel=1).product == Matmul(3136, 16, 32, role="data_gradient")
    assert convolution("data_gradient", stride=1).product == Matmul(3136, 16, 288, role="data_gradient")


@pytest.mark.parametrize(("side", "tiles"), [(56, 14 * 14), (28, 7 * 7), (14, 4 * 4), (7, 2 * 2)])
def test_winograds_products_cover_the_image_in_tiles_of_four_by_four(side: int, tiles: int) -> None:
    kernel = Convolution(2, 16, 32, side**2, side**2, 3)
    assert kernel.winograd_product == Matmul(2 * tiles, 32, 16, batch=36)
    weight = replace(kernel, role="weight_gradient").winograd_product
    assert weight == Matmul(32, 16, 2 * tiles, batch=36, role="weight_gradient")
    # 36 multiplications for 16 places of nine taps, where tiles fit: a quarter of the direct algorithm's.
    assert kernel.winograd_product.flop == pytest.approx(kernel.flop / 4 * tiles * 16 / side**2)


def test_a_weight_gradient_is_split_where_its_tiles_do_not_fill_the_gpu() -> None:
    """128 x 64 elements of one tile, 0.01 waves of 100 multiprocessors, a sum over 1,000,000 pixels.

    Whole: 2 x 128 x 64 x (1e6 + 100) flop at 100e12, 163.9 us, times 1 + 0.1 / 0.01. In s parts: (1e6 + 100 s) (1 +
    10 / s), and 65,536 bytes of partial sums each at 1e15 byte/s: 65.5 ps, as much as 0.4 of the sum's pixels take.
    So s = sqrt(1e6 x 10 / (100 + 0.4)) = 315.6; 316 parts take 163.84 us x 1.0316 x 1.031646 = 174.37 us, + 0.02 us.
    """
    kernel = Convolution(1_000_000, 64, 128, 1, 1, 1, role="weight_gradient")
    seconds = convolution_s(machine(), WHOLE, kernel, "fp32", AS_THE_PRODUCT)
    assert seconds == pytest.approx(163.84e-6 * 1.0316 * (1 + 10 / 316) + 316 * 65536 / 1e15, rel=1e-9)
    forward = convolution_s(machine(), WHOLE, Convolution(128, 1_000_000, 64, 1, 1, 1), "fp32", AS_THE_PRODUCT)
    assert forward == pytest.approx(163.84e-6 * 1.0001 * 11, rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(
    channels=st.tuples(st.integers(5, 600), st.integers(1, 600)),
    pixels=st.integers(1, 200_000),
    half_k=st.floats(0, 300),
    bandwidth=st.floats(1e11, 1e13),
)
def test_no_other_number_of_parts_is_quicker(
    channels: tuple[int, int], pixels: int, half_k: float, bandwidth: float
) -> None:
    gpu, curve = machine(bytes_per_s=bandwidth), WHOLE.model_copy(update={"half_k": half_k})
    kernel = Convolution(pixels, *channels, 1, 1, 1, role="weight_gradient")
    rows = channels[1] if channels[1] < 128 else -(-channels[1] // 128) * 128
    columns = channels[0] if channels[0] < 64 else -(-channels[0] // 64) * 64
    waves = rows * columns / (128 * 64) / 100
    partial_s = channels[0] * channels[1] * 8 / bandwidth

    def split_s(parts: int) -> float:
        seconds = 2 * rows * columns / 100e12 * (pixels + parts * half_k) * (1 + 0.1 / (parts * waves))
        return seconds + (parts * partial_s if parts > 1 else 0.0)

    best = min(split_s(parts) for parts in (*range(1, 200), *(2**power for power in range(8, 24))))
    traffic = kernel.num_elements() * 4 / bandwidth
    seconds = convolution_s(gpu, curve, kernel, "fp32", AS_THE_PRODUCT)
    assert seconds <= max(best, traffic) * (1 + 1e-12)
    assert seconds >= min(traffic, kernel.flop / 100e12) * (1 - 1e-12)


shapes = st.tuples(
    st.integers(1, 128), st.integers(1, 2048), st.integers(1, 2048), st.sampled_from([7, 14, 28, 56, 112]),
    st.sampled_from([1, 3, 7]), st.sampled_from([1, 2]), st.sampled_from(ROLES),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(shape=shapes, dtype=st.sampled_from(["fp32", "fp16"]))
def test_no_convolution_beats_the_peaks_of_the_gpu(
    shape: tuple[int, int, int, int, int, int, str], dtype: str
) -> None:
    """Winograd's algorithm does a quarter of the multiplications at best."""
    samples, into, out, side, window, stride, role = shape
    kernel = Convolution(samples, into, out, (side * stride) ** 2, side**2, window, stride, role)
    seconds = V100.kernel_time_s(V100_GPU, kernel, dtype)
    winograd = dtype == "fp32" and window == 3 and stride == 1
    assert seconds >= kernel.flop / (4 if winograd else 1) / V100.peak_flop_per_s(V100_GPU, dtype)
    assert seconds >= kernel.num_elements() * (4 if dtype == "fp32" else 2) / 900e9


@settings(max_examples=200, deadline=None)
@given(shape=shapes, dtype=st.sampled_from(["fp32", "fp16"]))
def test_more_images_never_take_less(shape: tuple[int, int, int, int, int, int, str], dtype: str) -> None:
    """The inner dimension of a weight gradient, whatever the number of parts."""
    samples, into, out, side, window, stride, role = shape
    seconds = [
        V100.kernel_time_s(
            V100_GPU, Convolution(count, into, out, (side * stride) ** 2, side**2, window, stride, role), dtype
        )
        for count in (samples, samples + 1)
    ]
    assert seconds[0] <= seconds[1] * (1 + 1e-12)


def test_the_first_layer_of_resnet_50_is_not_left_to_three_tiles() -> None:
    """128 images on V100: 4.6 ms in PipeDream's profile (of an unnamed GPU), 34 ms as one product of 64 x 147."""
    kernel = Convolution(128, 3, 64, 224 * 224, 112 * 112, 7, 2, "weight_gradient")
    assert 2e-3 < V100.kernel_time_s(V100_GPU, kernel, "fp32") < 8e-3


def test_winograds_algorithm_is_taken_where_it_is_quicker_and_exists() -> None:
    """448 channels of 28x28 pixels, whose tiles fit: between the direct algorithm's time at the peak and a quarter."""
    kernel = Convolution(64, 448, 896, 28 * 28, 28 * 28, 3)
    peak_s = kernel.flop / V100.peak_flop_per_s(V100_GPU, "fp32")
    assert peak_s / 4 < V100.kernel_time_s(V100_GPU, kernel, "fp32") < peak_s / 2
    assert A100.kernel_time_s(A100_GPU, kernel, "fp16") > kernel.flop / A100.peak_flop_per_s(A100_GPU, "fp16")
    strided = replace(kernel, in_pixels=56 * 56, stride=2)
    assert V100.kernel_time_s(V100_GPU, strided, "fp32") > peak_s


def test_colour_images_are_charged_for_loads_that_are_not_vectors() -> None:
    colours, more = (Convolution(64, channels, 64, 112**2, 112**2, 1) for channels in (3, 5))
    slower = shipped_factors()
    plain = slower.model_copy(update={"few_channels_slowness": 1.0})
    gpu, curve = machine(bytes_per_s=1e18), WHOLE
    ratio = convolution_s(gpu, curve, colours, "fp32", slower) / convolution_s(gpu, curve, colours, "fp32", plain)
    assert ratio == pytest.approx(slower.few_channels_slowness)
    assert convolution_s(gpu, curve, more, "fp32", slower) == convolution_s(gpu, curve, more, "fp32", plain)
    # In 16 bits three channels are padded to eight, 2.7 times the work: more than 1.96.
    ampere = machine(bytes_per_s=1e18).model_copy(update={"peak_flop_per_s": {"fp16": 100e12}})
    assert convolution_s(ampere, curve, colours, "fp16", slower) == convolution_s(ampere, curve, colours, "fp16", plain)
    worse = slower.model_copy(update={"few_channels_slowness": 8.0})
    ratio = convolution_s(ampere, curve, colours, "fp16", worse) / convolution_s(ampere, curve, colours, "fp16", plain)
    assert ratio == pytest.approx(3.0)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("window", "stride"), [(3, 2), (3, 1), (1, 2), (1, 1)])
def test_tensor_cores_work_on_whole_groups_of_channels_in_a_layout_of_their_own(
    role: str, window: int, stride: int
) -> None:
    """60 channels are worked on as 64, 3 as 8. Unless a pixel is a window, both images are copied: of 4 samples, 60
    channels of 56x56 and 3 of 56x56 or 28x28 pixels, once as they are and once padded, two bytes each."""
    after = 56 // stride
    kernel = Convolution(4, 60, 3, 56**2, after**2, window, stride, role)
    gpu = machine().model_copy(update={"peak_flop_per_s": {"fp16": 100e12, "fp32": 100e12}})
    curve = WHOLE.model_copy(update={"misaligned_fraction": 0.5})
    whole = replace(kernel, in_channels=64, out_channels=8)
    own_s, whole_s = (convolution_s(gpu, curve, each, "fp16", AS_THE_PRODUCT) for each in (kernel, whole))
    copied = 4 * ((60 + 64) * 56**2 + (3 + 8) * after**2) * 2
    of_whole = 4 * (2 * 64 * 56**2 + 2 * 8 * after**2) * 2
    is_copied = (window, stride) != (1, 1)
    assert own_s == pytest.approx(whole_s + (copied - of_whole) * is_copied / 1e15)
    half = AS_THE_PRODUCT.model_copy(update={"transform_fraction": 0.5})
    slower_s = convolution_s(gpu, curve, kernel, "fp16", half)
    assert slower_s - own_s == pytest.approx(copied * is_copied / 1e15, abs=1e-18)
    # Nothing is copied where images lie so already.
    last = replace(kernel, channels_last=True)
    already_s = [convolution_s(gpu, curve, last, "fp16", each) for each in (AS_THE_PRODUCT, half)]
    assert already_s[0] == already_s[1] == pytest.approx(own_s - copied * is_copied / 1e15, rel=1e-6)
    # In fp32 nothing is padded; Winograd's own transforms are slower then.
    single_s = [convolution_s(gpu, curve, kernel, "fp32", each) for each in (AS_THE_PRODUCT, half)]
    if (window, stride) != (3, 1):
        assert single_s[0] == single_s[1]


def test_a_library_that_never_takes_winograds_algorithm_takes_the_products_time() -> None:
    kernel = Convolution(64, 448, 896, 28 * 28, 28 * 28, 3)
    some = [
        AS_THE_PRODUCT.model_copy(update={"winograd_share": dict.fromkeys(ROLES, share)}) for share in (1.0, 0.5, 0.0)
    ]
    taken_s, half_s, never_s = (convolution_s(machine(), WHOLE, kernel, "fp32", each) for each in some)
    assert taken_s < never_s and half_s == pytest.approx((taken_s + never_s) / 2)
    strided = replace(kernel, stride=2, in_pixels=56 * 56)
    assert len({convolution_s(machine(), WHOLE, strided, "fp32", each) for each in some}) == 1


def test_the_shipped_factors_are_those_of_the_fit_and_as_close_as_stated() -> None:
    rows = list(convolution_rows(data_folder("aceso_v100") / "ops.csv.gz", size=FITTED))
    assert len(rows) == 392
    found = factors_of(least(PARAMETERS, rows, lambda values: predicted_s(rows, factors_of(values)), lambda line: None))
    shipped = shipped_factors()
    for role in ROLES:
        assert found.slowness[role] == pytest.approx(shipped.slowness[role], rel=0.01)
    for name in ("half_k_share", "few_channels_slowness", "transform_fraction"):
        assert getattr(found, name) == pytest.approx(getattr(shipped, name), rel=0.02), name
    errors = [abs(own / row.seconds - 1) for own, row in zip(predicted_s(rows, shipped), rows, strict=True)]
    assert sum(errors) / len(errors) < 0.075


def test_convolutions_of_other_sizes_are_met_within_a_tenth() -> None:
    found = errors(data_folder("aceso_v100") / "ops.csv.gz")
    assert [each.size for each in found if each.is_fitted] == [FITTED] * 2
    reported = [abs(error) for each in found if not each.is_fitted for error in each.rows]
    assert len(reported) == 3 * 392 + 800
    assert sum(reported) / len(reported) < 0.10


def test_a_gpu_without_factors_of_its_own_has_the_v100s() -> None:
    volta, hopper = load_curves("volta").convolutions, load_curves("hopper").convolutions
    for dtype in ("bf16", "fp16", "tf32", "fp32"):
        assert convolution_factors(A100.gpu(A100_GPU), load_curves("ampere"), dtype) == volta["fp32"]
    assert convolution_factors(load_gpu("h100-sxm5-80gb"), load_curves("hopper"), "bf16") == hopper["bf16"]


def test_a_calibration_that_knows_nothing_of_convolutions_keeps_the_gpus() -> None:
    hopper = load_curves("hopper")
    calibrated = hopper.model_copy(update={"convolutions": {}})
    gpu = load_gpu("h100-sxm5-80gb").model_copy(update={"calibrated_curves": calibrated})
    kernel = Convolution(64, 256, 256, 28 * 28, 28 * 28, 3)
    for dtype in ("bf16", "fp32"):
        assert kernel_time_s(gpu, kernel, dtype) == kernel_time_s(load_gpu("h100-sxm5-80gb"), kernel, dtype)


def test_factors_of_a_type_that_the_gpu_does_not_multiply_are_refused() -> None:
    mapping = load_curves("hopper").model_dump()
    with pytest.raises(ValueError, match=r"convolutions must be of types that matmul has \(bf16, .*got bf61"):
        EfficiencyCurves.model_validate({**mapping, "convolutions": {"bf61": mapping["convolutions"]["bf16"]}})
