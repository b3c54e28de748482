"""Fit the A100's 16-bit curves to published kernel measurements, and report the H100's on others.

A100 rows used: ``gemm_a100.csv`` (SimuMax dense and LLMCompass), ``memory_bound_ops.csv`` (LLMCompass rows,
PyTorch's kernels, that move more than 64 MB; Vidur's are vLLM's), ``attention_a100.csv`` (head size 128, 4 to 64
heads). Report: all A100 rows of ``gemm_vidur_a100_h100.csv`` with 128 tokens or more.
H100 (``experiments.fit_h100``) is reported alone: Vidur's rows of 128 tokens or more, forward, CUDA 12.1.

Run: ``python -m hardware_models.calibration.fit_a100 --data DIR``
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from datafiles.tables import load_table
from hardware_models.calibration.kernel_fit import KernelRow, Parameter, fit, report
from hardware_models.gpus import load_curves, load_gpu
from workloads.kernels import FlashAttention, Matmul, MemoryBound

ROLES = {
    "gemm_TN": "forward",
    "gemm_NN": "data_gradient",
    "gemm_NT_accum": "weight_gradient",
    "gemm": "forward",
}
PATTERNS = {"layernorm": "reduction", "softmax": "reduction", "gelu": "elementwise"}
MATMUL = (
    Parameter("limit.forward", 0.8, 0.3, 1.0),
    Parameter("half_waves", 0.1, 0.0, 5.0),
    Parameter("half_k", 100.0, 0.0, 1500.0),
    Parameter("bandwidth_fraction", 0.7, 0.2, 1.0),
)
GRADIENTS = (
    Parameter("limit.data_gradient", 0.8, 0.3, 1.0),
    Parameter("limit.weight_gradient", 0.8, 0.3, 1.0),
)
MEMORY = (
    Parameter("fraction.elementwise", 0.85, 0.2, 1.0),
    Parameter("fraction.reduction", 0.7, 0.2, 1.0),
    Parameter("ramp_bytes", 2e6, 0.0, 4e6),
)
ATTENTION = (
    Parameter("attention.forward", 0.6, 0.2, 1.0),
    Parameter("attention.backward", 0.5, 0.2, 1.0),
    Parameter("attention.forward_half_waves", 1.0, 0.0, 10.0),
    Parameter("attention.backward_half_waves", 1.0, 0.0, 10.0),
)
MIN_TOKENS = 128
CACHE_BYTES = 64e6
"""Passes over less may live in the level-2 cache (40 and 50 MB) from one repeat to the next."""

FITTED_MODELS = ("Llama-2-7b-hf", "Llama-2-70b-hf")


def main() -> None:
    """Fit the A100 and print constants and residuals of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds gpu_efficiency/")
    folder = parser.parse_args().data / "gpu_efficiency"
    a100 = load_gpu("a100-pcie-80gb")
    rows = [*_gemm_rows(folder), *_memory_rows(folder, "A100"), *_attention_rows(folder)]
    curves = fit(
        a100, load_curves("ampere"), "bf16", (*MATMUL, *GRADIENTS, *MEMORY, *ATTENTION), rows, "this run"
    )
    report("A100 fit rows", a100, curves, "bf16", rows)
    a100_sxm = load_gpu("a100-sxm4-80gb")
    report(
        "A100 report rows (Vidur)", a100_sxm, curves, "bf16", [row for _, row in _vidur_rows(folder, "A100")]
    )
    h100 = load_gpu("h100-sxm5-80gb")
    vidur = [row for _, row in _vidur_rows(folder, "H100")]
    report("H100 report rows (Vidur)", h100, load_curves("hopper"), "bf16", vidur)


def _gemm_rows(folder: Path) -> Iterator[KernelRow]:
    table = load_table(folder / "gemm_a100.csv", floats=("time_ms",), integers=("batch", "m", "n", "k"))
    for number, row in enumerate(table):
        if row["kind"] in ROLES:
            kernel = Matmul(row["m"], row["n"], row["k"], row["batch"], ROLES[row["kind"]])
            yield KernelRow(
                f"{row['kind']} {row['source'][:10]}", (kernel,), row["time_ms"] / 1e3, f"gemm_a100#{number}"
            )


def _vidur_rows(folder: Path, gpu: str) -> Iterator[tuple[str, KernelRow]]:
    table = load_table(
        folder / "gemm_vidur_a100_h100.csv", floats=("time_ms_median",), integers=("m_tokens", "n", "k")
    )
    for number, row in enumerate(table):
        if row["gpu"] == gpu and row["m_tokens"] >= MIN_TOKENS:
            kernel = Matmul(row["m_tokens"], row["n"], row["k"])
            yield (
                row["model"],
                KernelRow(row["op"], (kernel,), row["time_ms_median"] / 1e3, f"vidur#{number}"),
            )


def _memory_rows(folder: Path, gpu: str) -> Iterator[KernelRow]:
    table = load_table(folder / "memory_bound_ops.csv", floats=("time_ms", "GBps"))
    for number, row in enumerate(table):
        if row["gpu"] != gpu or row["op"] not in PATTERNS or row["source"] != "LLMCompass":
            continue
        seconds = row["time_ms"] / 1e3
        moved = row["GBps"] * 1e9 * seconds
        if moved > CACHE_BYTES:
            kernel = MemoryBound(moved / 2, moved / 2, PATTERNS[row["op"]])
            yield KernelRow(f"{row['op']} {row['source']}", (kernel,), seconds, f"memory_bound_ops#{number}")


def _attention_rows(folder: Path) -> Iterator[KernelRow]:
    table = load_table(
        folder / "attention_a100.csv",
        floats=("tflops_effective",),
        integers=("batch", "seq", "heads", "qk_dim", "v_dim"),
    )
    for number, row in enumerate(table):
        if row["qk_dim"] == row["v_dim"] == 128:
            backward = row["phase"] == "sdp_bwd"
            kernel = FlashAttention(row["batch"] * row["heads"], row["seq"], row["seq"], 128, True, backward)
            # The source counts full scores; the kernel skips the masked half.
            seconds = 2 * kernel.flop / (row["tflops_effective"] * 1e12)
            yield KernelRow(row["phase"], (kernel,), seconds, f"attention_a100#{number}")


if __name__ == "__main__":
    main()
