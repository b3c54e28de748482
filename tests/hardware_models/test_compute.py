"""Kernel times: monotone, never above the peaks, and close to measured ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datafiles.tables import load_table
from hardware_models.compute import is_misaligned, kernel_time_s, memory_bound_s
from hardware_models.gpus import PATTERNS, curves_of, gpu_names, load_curves, load_gpu
from hardware_models.model import HardwareModel
from tests.hardware_models.data_folder import data_folder
from workloads.kernels import Convolution, FlashAttention, Matmul, MemoryBound

V100 = HardwareModel.from_name("v100-32g-dgx1:1x8")
A100 = HardwareModel.from_name("a100-80g-dgx:1x8")
GPU, A100_GPU = V100.gpu_type(0), A100.gpu_type(0)
sizes = st.integers(1, 20000)


@settings(max_examples=200, deadline=None)
@given(m=sizes, n=sizes, k=sizes, batch=st.integers(1, 64), role=st.sampled_from(["forward", "data_gradient"]))
def test_no_matmul_beats_the_peak_of_the_gpu(m: int, n: int, k: int, batch: int, role: str) -> None:
    kernel = Matmul(m, n, k, batch, role)
    seconds = V100.kernel_time_s(GPU, kernel, "fp16")
    assert seconds >= kernel.flop / V100.peak_flop_per_s(GPU, "fp16")
    assert seconds >= kernel.num_elements() * 2 / 900e9
    assert seconds >= V100.gpu(GPU).kernel_floor_s


@settings(max_examples=100, deadline=None)
@given(m=sizes, n=sizes, k=sizes)
def test_twice_the_batch_never_takes_less_nor_more_than_twice(m: int, n: int, k: int) -> None:
    once = V100.kernel_time_s(GPU, Matmul(m, n, k, 1), "fp16")
    twice = V100.kernel_time_s(GPU, Matmul(m, n, k, 2), "fp16")
    assert once <= twice * (1 + 1e-12)
    assert twice <= 2 * once * (1 + 1e-12)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_memory_bound_kernels_stay_below_the_bandwidth(pattern: str) -> None:
    assert V100.kernel_time_s(GPU, MemoryBound(1e9, 1e9, pattern), "fp16") > 2e9 / 900e9


def test_causal_attention_takes_half_of_full_attention() -> None:
    """And half of the 32 tiles on the diagonal; and what its longest tiles leave idle, which only few heads notice."""
    for heads, rel in ((32, 0.07), (32_000, 1e-4)):
        full, causal = (
            A100.kernel_time_s(A100_GPU, FlashAttention(heads, 4096, 4096, 128, causal=causal), "bf16")
            for causal in (False, True)
        )
        half = full / 2 * (1 + 1 / 32)
        assert half < causal == pytest.approx(half, rel=rel)


@pytest.mark.parametrize(
    ("generation", "head_dim", "worked_on"), [(2, 64, 64), (2, 80, 96), (2, 112, 128), (1, 80, 128), (1, 64, 64)]
)
def test_attention_works_on_whole_tiles_and_head_sizes(generation: int, head_dim: int, worked_on: int) -> None:
    def seconds(length: int, dim: int) -> float:
        kernel = FlashAttention(4096, length, length, dim, False, generation=generation)
        return A100.kernel_time_s(A100_GPU, kernel, "bf16")

    assert seconds(512, head_dim) == pytest.approx(seconds(512, worked_on))
    assert seconds(385, head_dim) == pytest.approx(seconds(512, head_dim))
    assert seconds(513, head_dim) > 1.2 * seconds(512, head_dim)


def test_passes_with_strides_are_priced_as_others_where_they_were_not_measured() -> None:
    h100 = HardwareModel.from_name("h100-dgx:1x1")
    for hardware, gpu, slower in ((A100, A100_GPU, 1.0), (h100, "h100-sxm5-80gb", 0.9 / 0.52)):
        dense, strided = (
            hardware.kernel_time_s(gpu, MemoryBound(1e9, 1e9, word), "bf16") for word in ("elementwise", "strided")
        )
        assert strided == pytest.approx(slower * dense)


def test_blocks_of_threads_take_their_time_with_each_row_where_it_was_measured() -> None:
    """On an H100, and an H200 with its curves; on an A100 as an H100 with 108 multiprocessors at 1.41 GHz would."""
    for name, gpu, row_norm_s, column_sum_s in (
        ("h100-dgx:1x1", "h100-sxm5-80gb", 7.9e-10, 2.43e-9),
        ("h200-dgx:1x1", "h200-sxm5-141gb", 7.9e-10, 2.43e-9),
        ("a100-80g-dgx:1x1", "a100-sxm4-80gb", 7.9e-10 * 132 * 1.755 / 108 / 1.41, 2.43e-9 * 1.755 / 1.41),
        ("local-cpu:1x1", "local-cpu-process", 0.0, 0.0),
    ):
        hardware = HardwareModel.from_name(name)
        plain, norm, sums = (
            hardware.kernel_time_s(gpu, kernel, "fp32")
            for kernel in (
                MemoryBound(1e9, 1e9, "reduction"),
                MemoryBound(1e9, 1e9, "row_norm", rows=1e5),
                MemoryBound(1e9, 1e9, "column_sum", rows=1e5),
            )
        )
        assert norm - plain == pytest.approx(1e5 * row_norm_s, rel=0.02, abs=1e-12)
        assert sums - plain == pytest.approx(1e5 * column_sum_s, rel=0.02, abs=1e-12)


def test_curves_that_know_nothing_of_rows_have_those_of_the_shipped_ones() -> None:
    gpu, curves = load_gpu("h100-sxm5-80gb"), load_curves("hopper")
    older = curves.memory.model_copy(update={"row_s": {}})
    kernel = MemoryBound(1e8, 1e8, "row_norm", rows=1e5)
    assert memory_bound_s(gpu, older, kernel) == memory_bound_s(gpu, curves.memory, kernel)


def test_a_product_whose_rows_are_not_aligned_moves_them_as_slowly_as_it_multiplies() -> None:
    """ViT's scores: 197 tokens, heads of 64, which the memory bounds."""
    aligned, odd = (A100.kernel_time_s(A100_GPU, Matmul(192, n, 64, 4096), "bf16") for n in (192, 191))
    assert odd / aligned == pytest.approx(1 / 0.403, rel=0.02)


@pytest.mark.parametrize(("backward", "measured"), [(False, 160.4 / 370.3), (True, 210.5 / 313.6)])
def test_attention_of_few_heads_leaves_multiprocessors_idle(backward: bool, measured: float) -> None:
    """4 heads of 4,096 tokens are 128 tiles of unequal length for 108 multiprocessors; 64 heads fill them.

    Measured: gpu_efficiency/attention_a100.csv, rates of 4 and 64 query heads (SimuMax).
    """
    kernels = [FlashAttention(heads, 4096, 4096, 128, True, backward) for heads in (4, 64)]
    few, many = (A100.kernel_time_s(A100_GPU, kernel, "bf16") for kernel in kernels)
    assert (many / 64) / (few / 4) == pytest.approx(measured, rel=0.25)


def test_a_convolution_never_moves_the_windows_of_its_pixels() -> None:
    """A 3x3 convolution of 64 channels reads each pixel nine times, but on the chip: 51 MB are moved, not 257."""
    kernel = Convolution(32, 64, 64, 56 * 56, 56 * 56, 3)
    seconds = A100.kernel_time_s(A100_GPU, kernel, "tf32")
    windows_s = kernel.product.num_elements() * 4 / 2039e9
    assert kernel.flop / A100.peak_flop_per_s(A100_GPU, "tf32") < seconds < windows_s


def test_h100_passes_over_memory_reach_what_a100_ones_do() -> None:
    """As kernel_curves.yaml says of them; Vidur's residual adds reach 0.88 (A100) and 0.96 (H100) of the bandwidth."""
    h100 = HardwareModel.from_name("h100-dgx:1x1")
    for pattern in ("elementwise", "reduction", "random", "gather"):
        kernel = MemoryBound(2e9, 1e9, pattern)
        share = [
            3e9 / model.kernel_time_s(gpu, kernel, "bf16") / model.gpu(gpu).memory_bytes_per_s
            for model, gpu in ((A100, A100_GPU), (h100, h100.gpu_type(0)))
        ]
        assert share[1] == pytest.approx(share[0], rel=1e-3)


@pytest.mark.parametrize("name", gpu_names())
def test_host_seconds_are_a_runtimes_own_unless_a_calibration_says_else(name: str) -> None:
    assert load_gpu(name).host_factor == 1 and load_gpu(name).is_its_own_host == (name == "local-cpu-process")


def test_the_optimizer_runs_at_its_share_of_the_bandwidth() -> None:
    gpu = V100.gpu(GPU)
    assert V100.optimizer_step_s(GPU, 9e9) == pytest.approx(9e9 / (900e9 * gpu.optimizer_bandwidth_fraction))


@pytest.mark.parametrize("name", [name for name in gpu_names() if "fp16" in load_gpu(name).peak_flop_per_s])
def test_every_tensor_core_wants_aligned_rows(name: str) -> None:
    """A vocabulary of 50,257 takes longer than one of 50,304: cuBLAS asks 16 bytes of all of them."""
    gpu = load_gpu(name)
    odd, padded = (kernel_time_s(gpu, Matmul(8192, vocab, 1024), "fp16") for vocab in (50257, 50304))
    assert (odd > 2 * padded) == (gpu.curves != "cpu")


@pytest.mark.parametrize(
    ("kernel", "misaligned"),
    [
        (Matmul(4096, 50257, 2048), True),  # logits: each row of the product starts two bytes further
        (Matmul(4096, 2048, 50257, role="data_gradient"), True),
        (Matmul(50257, 2048, 4096, role="weight_gradient"), True),
        (Matmul(4096, 50304, 2048), False),
        (Matmul(4095, 50304, 2048), False),  # tokens are rows, not what rows are made of
        (Matmul(50304, 2048, 4095, role="weight_gradient"), False),
        (Matmul(4096, 50260, 2048), True),  # 8 bytes are not enough
        (Matmul(4096, 50264, 2048), False),
    ],
)
def test_rows_that_start_off_sixteen_bytes_are_misaligned(kernel: Matmul, misaligned: bool) -> None:
    assert is_misaligned(kernel, 2) is misaligned
    assert not is_misaligned(kernel, 4)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("role", ["forward", "data_gradient"])
def test_a_misaligned_product_takes_as_much_longer_as_its_curve_says(dtype: str, role: str) -> None:
    curve = curves_of(A100.gpu(A100_GPU)).matmul[dtype]
    even, odd = (
        A100.kernel_time_s(A100_GPU, Matmul(8192, *sizes, role=role), dtype)
        for sizes in (((50304, 2048), (50303, 2048)) if role == "forward" else ((2048, 50304), (2048, 50303)))
    )
    assert odd / even == pytest.approx(1 / curve.misaligned_fraction, rel=1e-4)
    for sizes in ((50304, 2048), (50303, 2048)):
        single = A100.kernel_time_s(A100_GPU, Matmul(8192, *sizes), "tf32")
        assert single == pytest.approx(A100.kernel_time_s(A100_GPU, Matmul(8192, 50304, 2048), "tf32"), rel=1e-4)


def test_an_unknown_dtype_pattern_or_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype must be one"):
        V100.kernel_time_s(GPU, Matmul(8, 8, 8), "bf16")
    with pytest.raises(ValueError, match="pattern must be one"):
        V100.kernel_time_s(GPU, MemoryBound(8, 8, "stride"), "fp16")
    with pytest.raises(ValueError, match="GPU type must be one of"):
        V100.kernel_time_s("a100", Matmul(8, 8, 8), "fp16")


def test_a100_matmuls_that_no_fit_saw_are_predicted_within_a_tenth() -> None:
    folder = data_folder("gpu_efficiency")
    table = load_table(folder / "gemm_vidur_a100_h100.csv", floats=("time_ms_median",), integers=("m_tokens", "n", "k"))
    errors = [
        abs(A100.kernel_time_s(A100_GPU, Matmul(row["m_tokens"], row["n"], row["k"]), "bf16")
            / (row["time_ms_median"] / 1e3) - 1)
        for row in table
        if row["gpu"] == "A100" and row["m_tokens"] >= 1024
    ]  # fmt: skip
    assert len(errors) > 400
    assert sum(errors) / len(errors) < 0.10


def test_v100_operators_that_no_fit_saw_are_predicted_as_stated() -> None:
    from hardware_models.calibration.aceso_rows import gpt_rows

    rows = list(gpt_rows(data_folder("aceso_v100") / "ops.csv.gz", sizes=("6_7B",), tensor_sizes=(1,)))
    rows = [row for row in rows if row.group.split()[0] not in ("embedding", "final_norm")]
    predicted = sum(V100.kernel_time_s(GPU, kernel, "fp16") for row in rows for kernel in row.kernels)
    assert predicted == pytest.approx(sum(row.seconds for row in rows), rel=0.06)


def test_rows_that_hold_a_collective_are_no_rows_of_kernels() -> None:
    """Megatron-LM reduces behind row-parallel products forward, and before column-parallel ones backward."""
    from hardware_models.calibration.aceso_rows import gpt_rows

    table = data_folder("aceso_v100") / "ops.csv.gz"
    alone, parallel = ({row.group for row in gpt_rows(table, sizes=("6_7B",), tensor_sizes=(n,))} for n in (1, 4))
    assert alone - parallel >= {
        "attention_dense forward", "mlp_linear_2 forward", "attention_qkv backward", "mlp_linear_1 backward",
        "embedding forward", "lm_loss forward", "lm_loss backward",  # vocabularies are cut
    }  # fmt: skip
    assert alone & parallel >= {
        "attention_dense backward", "mlp_linear_2 backward", "attention_qkv forward", "mlp_linear_1 forward"
    }  # fmt: skip


def test_the_triton_port_is_slower_than_flash_attention_two_by_the_published_factors() -> None:
    for backward, low, high in ((False, 1.3, 1.5), (True, 1.9, 2.1)):
        first, second = (
            A100.kernel_time_s(A100_GPU, FlashAttention(64, 4096, 4096, 128, True, backward, generation), "bf16")
            for generation in (1, 2)
        )
        assert low <= first / second <= high
