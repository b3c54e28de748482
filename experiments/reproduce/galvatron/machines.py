"""The machines of the paper's tables beyond the eight TITANs of Table II, and how training ran there."""

from __future__ import annotations

TITANS_16, A100S_16, A100S_64 = "titan-rtx-pcie:2x8", "a100-40g-dgx-100g:2x8", "a100-40g-dgx-100g:8x8"
A100S_80GB = "a100-80g-dgx-400g:4x8"
A100_RUNTIME = "galvatron-v1-tf32"
LLM_RUNTIME = "galvatron-v1-bf16"
FULL_TF32 = (
    "Matrix products run in TF32, PyTorch's default of the time: the printed speeds are above the A100's fp32 peak."
)
