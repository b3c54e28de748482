"""Saved activation bytes against the published formulas, to the byte."""

from dataclasses import replace

import pytest

from hardware_models.runtime_files import load_runtime
from tests.workloads.graphs import EAGER_FP32, MEGATRON, layer_saved, local_operator
from workloads import build_workload
from workloads.kinds.base import Implementation
from workloads.local import output_bytes, saved_tensors
from workloads.model_file import spec_from_mapping
from workloads.registry import build_from_spec

MIB = 2**20


def norm_statistics_bytes(*, norms: int, tokens: int, per_token: int = 2) -> int:
    """fp32 mean and deviation per token and norm, which the formulas neglect."""
    return norms * per_token * 4 * tokens


@pytest.mark.parametrize("ways", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("model", ["bert-large", "bert-huge-32"])
def test_bert_layer_keeps_what_galvatron_measured(model: str, ways: int) -> None:
    """4 s h (4.5 + 12/t) + 13 a s^2 / t bytes in fp32; reproduces Galvatron Table I within 1 %."""
    h, a, s = {"bert-large": (1024, 16, 512), "bert-huge-32": (1280, 16, 512)}[model]
    features, statistics = layer_saved(build_workload(model), 2, EAGER_FP32, ways=ways)
    assert features == 4 * s * h * 4.5 + 4 * s * h * 12 / ways + 13 * a * s * s / ways
    assert statistics == norm_statistics_bytes(norms=2, tokens=s)


def test_bert_layer_agrees_with_the_measured_megabytes() -> None:
    measured_mib = {1: 94.07, 2: 52.475, 4: 31.754, 8: 21.612, 16: 16.451}
    for ways, measured in measured_mib.items():
        features, statistics = layer_saved(build_workload("bert-huge-32"), 2, EAGER_FP32, ways=ways)
        assert (features + statistics) / MIB == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("ways", [1, 2, 4, 8])
@pytest.mark.parametrize("model", ["vit-large", "vit-huge-48"])
def test_vit_layer_keeps_what_galvatron_measured(model: str, ways: int) -> None:
    """4 s h (4 + 12/t) + 8 a s^2 / t bytes in fp32, no dropout; Table I's slope exactly."""
    h, a, s = {"vit-large": (1024, 16, 197), "vit-huge-48": (1280, 16, 197)}[model]
    features, statistics = layer_saved(build_workload(model), 2, EAGER_FP32, ways=ways)
    assert features == 4 * s * h * 4 + 4 * s * h * 12 / ways + 8 * a * s * s / ways
    assert statistics == norm_statistics_bytes(norms=2, tokens=s)


def test_vit_layer_agrees_with_the_slope_of_galvatrons_table() -> None:
    features, statistics = layer_saved(build_workload("vit-huge-32"), 2, EAGER_FP32)
    assert (features + statistics) / MIB == pytest.approx((968.59 - 646.5) / 16, rel=1e-3)


@pytest.mark.parametrize(("layer", "measured_mib"), [(2, 91.003), (20, 157.755)])
def test_t5_layers_agree_with_the_measured_megabytes(layer: int, measured_mib: float) -> None:
    """Encoder: 4 s h (6.5 + 13/t) + 13 a s^2 / t; the decoder has the cross attention besides.

    What no other layer of that sort keeps: the encoder's output is shared by all decoder layers.
    """
    workload = build_workload("t5-large-32")
    features, statistics = layer_saved(workload, layer, EAGER_FP32)
    if layer == 20:
        features -= 4 * 512 * 1024
    assert (features + statistics) / MIB == pytest.approx(measured_mib, rel=0.005)


@pytest.mark.parametrize("ways", [1, 2, 4, 8])
@pytest.mark.parametrize("samples", [1, 3])
def test_gpt_layer_keeps_what_korthikanti_says(ways: int, samples: int) -> None:
    """s b h (10 + 24/t + 5 a s / (h t)) in fp16 with fused kernels: Korthikanti et al. 2022, Equation 2."""
    s, h, a = 2048, 2048, 32
    features, statistics = layer_saved(build_workload("gpt3-1.3b"), 3, MEGATRON, samples=samples, ways=ways)
    assert features == s * samples * h * (10 + 24 / ways) + 5 * a * s * s * samples / ways
    assert statistics == norm_statistics_bytes(norms=2, tokens=s * samples)
    if ways == 1:
        assert features == s * samples * h * (34 + 5 * a * s / h)


@pytest.mark.parametrize("ways", [2, 8])
def test_sequence_parallelism_divides_all_but_the_inputs_of_column_splits(ways: int) -> None:
    """Korthikanti's Equation 4 is s b h (34 + 5 a s / h) / t: Megatron gathers them again in backward.

    Here the column splits keep the gathered ones: two tensors of 2 s b h that are not divided.
    """
    s, h, a = 2048, 2048, 32
    features, _ = layer_saved(build_workload("gpt3-1.3b"), 3, MEGATRON, ways=ways, split="sequence_split")
    divided = s * h * (34 + 5 * a * s / h) / ways
    assert features == divided + 2 * 2 * s * h * (1 - 1 / ways)


@pytest.mark.parametrize("ways", [1, 4])
def test_a_llama_layer_of_megatrons_core_keeps_what_its_torch_code_keeps(ways: int) -> None:
    """Inputs of two norms and of both column splits, q, k and v packed, q and k rotated, what goes into the row splits.

    s h (4 x 2 + (6 + 4 + 2) / t) + s f (4 + 2 + 2) / t + 2 a s^2 / t, the SiLU's result among them; counted with
    saved-tensor hooks on the layer of hetu-galvatron 0.0.2 (model/transformer.py).
    """
    s, h, a, f = 4096, 4096, 32, 11008
    features, _ = layer_saved(
        build_workload("llama2-7b"), 3, load_runtime("megatron-lm-2023").implementation, ways=ways
    )
    assert features == s * h * (8 + 12 / ways) + s * f * 8 / ways + 2 * a * s * s / ways


@pytest.mark.parametrize("runtime", ["megatron-lm-2023", "windtunnel-executor"])
@pytest.mark.parametrize("ways", [1, 8])
def test_grouped_keys_and_values_are_kept_for_every_query_head(runtime: str, ways: int) -> None:
    """Queries, keys and values of all heads, 3 x 2 s h / t, where the packed tensor has (64 + 2 x 8) / 64 of 2 s h.

    Megatron's core copies all three out of it (``reshape``, ``repeat_interleave``), torch as ``matmul`` broadcasts;
    fused attention reads the packed one, but for the executor, which copies queries of several groups, so that what is
    made of them is copied for the projection: 2 x 2 s h / t more.
    """
    s, h, f, a = 4096, 8192, 28672, 64
    how = replace(load_runtime(runtime).implementation, fused_norm=True, fused_softmax=True, fused_gate=False)
    features, _ = layer_saved(build_workload("llama2-70b"), 3, how, ways=ways)
    assert features == s * h * (8 + 8 / ways) + s * f * 8 / ways + 2 * a * s * s / ways
    fused = replace(how, packed_rotary=False)
    features, _ = layer_saved(build_workload("llama2-70b", attention="flash"), 3, fused, ways=ways)
    copies = 4 if how.copies_groups and ways < 8 else 0
    assert features == s * h * (8 + (2 * 80 / 64 + 2 + copies) / ways) + s * f * 8 / ways + 4 * a * s / ways


def test_a_gpt_layer_under_autocast_keeps_fp32_residuals_and_the_weights_it_cast() -> None:
    """Norms keep 4 s h instead of 2, products 2 bytes a weight; the rest is as in bf16 throughout (torch 2.13.0)."""
    s, h = 2048, 2048
    workload, autocast = build_workload("gpt3-1.3b", attention="flash"), load_runtime("pytorch-ddp").implementation
    features, _ = layer_saved(workload, 3, autocast)
    throughout, _ = layer_saved(workload, 3, replace(autocast, autocast=False))
    assert features - throughout == 2 * 2 * s * h + 2 * 12 * h * h


def test_flash_attention_keeps_no_scores() -> None:
    """Without the 5 a s^2: qkv, output and one fp32 number per head and query remain."""
    s, h, a = 2048, 2048, 32
    features, _ = layer_saved(build_workload("gpt3-1.3b", attention="flash"), 3, MEGATRON)
    assert features == 34 * s * h + 4 * a * s


def _flash_layer(samples: int = 1, **changes: bool) -> float:
    """Return what a layer of LLaMA 3 8B keeps of a token, in bytes a feature."""
    implementation = replace(load_runtime("megatron-lm-2023-flash").implementation, **changes)
    workload = build_workload("llama3-8b", attention="flash")
    features, _ = layer_saved(workload, 3, implementation, samples=samples)
    tokens = workload.tokens_per_sample * samples
    return (features - 4 * 32 * tokens) / (tokens * 4096)  # less a log-sum-exp for each head


def test_megatron_copies_what_flash_attention_made_of_several_samples() -> None:
    """LLaMA 3 8B: four norm tensors, queries and repeated keys and values, output; gate, up, SiLU, product of 3.5 h."""
    one = 4 * 2 + 3 * 2 + 2 + 4 * 2 * 3.5
    assert _flash_layer() == one
    assert _flash_layer(2) == one + 2
    assert _flash_layer(2, sequence_first=False) == one


def test_grouped_keys_and_values_are_kept_as_they_come_or_repeated() -> None:
    """Eight heads of keys and of values for 32 of queries: a quarter of the size each."""
    assert _flash_layer() - _flash_layer(repeats_groups=False) == 2 * 2 * 0.75


def test_flash_attention_keeps_heads_padded_to_a_multiple_of_eight_features() -> None:
    """32 heads of 50: queries, keys and values with 56 features, and the output, beside that of 50 that is read on."""
    s, h, a = 64, 1600, 32
    spec = spec_from_mapping({"family": "gpt", "layers": 2, "hidden": h, "heads": a, "seq_len": s, "vocab": 128}, "x")
    features, _ = layer_saved(build_from_spec(spec, "flash"), 2, MEGATRON)
    assert features == 34 * s * h + 4 * a * s + 2 * s * a * (3 * 6 + 56)


def test_unfused_softmax_leaves_an_fp32_result_beside_its_output() -> None:
    """Aceso's profile: alone, the softmax of GPT 13B at tensor parallel 4 leaves 160 MiB more where it falls back.

    In a layer the fp16 output is let go once the dropout has read it, so that half of it is the difference there.
    """
    workload = build_workload("gpt3-13b")
    picky = Implementation(dtype="fp16", fused_softmax_multiple=4)
    softmax = next(index for index, op in enumerate(workload.operators) if op.role == "attention_softmax")
    left = {}
    for implementation in (MEGATRON, picky):
        local = local_operator(workload, softmax, implementation, ways=4)
        kind = workload.operators[softmax].definition
        sizes = {saved.ref: saved.size_bytes for saved in saved_tensors(kind, local)}
        left[implementation] = sum((sizes | {"output:0": output_bytes(kind, local)[0]}).values())
    assert left[picky] - left[MEGATRON] == 160 * MIB
    fused, _ = layer_saved(workload, 1, MEGATRON, ways=4)
    assert layer_saved(workload, 1, picky, ways=4)[0] - fused == 80 * MIB
    assert layer_saved(workload, 1, picky, ways=2)[0] == layer_saved(workload, 1, MEGATRON, ways=2)[0]


def test_what_tensorflow_keeps_of_a_bert_layer() -> None:
    """Masks are numbers (4 bytes instead of 1), GELU keeps three tensors, a norm two; scores 12 a s^2.

    4 s h (4.5 + 12) becomes 4 s h (4 + 2 (masks) + 2 (norms) + 12 + 8 (GELU)).
    """
    h, a, s = 1024, 16, 512
    chains = Implementation(dtype="fp32", fused_softmax=False, fused_bias_activation=False, elementary=True)
    features, _ = layer_saved(build_workload("bert-large"), 2, chains)
    assert features == 4 * s * h * (4 + 2 + 2 + 12 + 8) + 12 * a * s * s
