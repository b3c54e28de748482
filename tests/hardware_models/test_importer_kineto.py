"""PyTorch profiler traces: classes of kernels, work with shapes, collectives with sizes, overlap."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardware_models.calibration.kernel_calibration import fit_curves, num_of_another, overlap_slowdowns
from hardware_models.calibration.kernel_fit import predict_s
from hardware_models.compute import kernel_time_s
from hardware_models.gpus import load_curves, load_gpu
from hardware_models.importers.kineto import Collective, GpuKernel, kernel_class, read_trace
from workloads.kernels import Matmul, MemoryBound

GEMM = "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn"
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"


BACKWARD = "autograd::engine::evaluate_function: MmBackward0"


class Maker:
    """Builds a trace event by event, as Kineto writes them."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.clock = 0.0

    def operator(self, name: str, dims: list[Any], dtype: str, *, backward: bool = False) -> int:
        number = len(self.events) + 1
        if backward:
            self.events.append({"ph": "X", "cat": "cpu_op", "tid": 2, "ts": self.clock, "dur": 5.0,
                                "name": "autograd::engine::evaluate_function: AddmmBackward0", "args": {}})  # fmt: skip
        self.events.append({
            "ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 2 if backward else 1, "ts": self.clock + 1,
            "dur": 3.0, "args": {"External id": number, "Input Dims": dims, "Input type": [dtype] * len(dims)},
        })  # fmt: skip
        return number

    def kernel(
        self, name: str, seconds: float, *, start: float | None = None, cat: str = "kernel", **arguments: Any
    ) -> None:
        at = self.clock if start is None else start
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": at, "dur": 1e6 * seconds,
                            "args": {"device": 0, "stream": 7, **arguments}})  # fmt: skip
        self.clock = max(self.clock, at + 1e6 * seconds + 10)

    def write(self, path: Path) -> Path:
        document = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}],
                    "traceEvents": [{"ph": "M", "name": "process_name"}, *self.events]}  # fmt: skip
        data = json.dumps(document).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def collective(kind: str, sent: int, received: int, n: int = 8, dtype: str = "BFloat16") -> dict[str, Any]:
    return {"Collective name": kind, "In msg nelems": sent, "Out msg nelems": received, "Group size": n, "dtype": dtype,
            "Process Group Ranks": str(list(range(n)))}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (GEMM, "matmul"),
        (REDUCE, "collective"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nt_align8>", "matmul"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4> >(Flash_fwd_params)", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16> >",
            "elementwise",
        ),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>", "reduction"),
        ("void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 10>", "reduction"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("void at::native::indexSelectLargeIndex<c10::BFloat16, long>", "other"),
    ],
)
def test_kernels_are_told_apart_by_their_names(name: str, kind: str) -> None:
    assert kernel_class(name) == kind


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_gives_kernels_with_their_work(tmp_path: Path, name: str) -> None:
    maker = Maker()
    number = maker.operator("aten::addmm", [[4096], [2048, 1024], [1024, 4096]], "c10::BFloat16")
    maker.kernel(GEMM, 1e-4, **{"External id": number})
    number = maker.operator("aten::mm", [[1024, 2048], [2048, 4096]], "c10::BFloat16", backward=True)
    maker.kernel(GEMM, 2e-4, **{"External id": number})
    number = maker.operator("aten::bmm", [[16, 128, 64], [16, 64, 128]], "c10::Half")
    maker.kernel(GEMM, 3e-5, **{"External id": number})
    number = maker.operator("aten::add", [[1024, 1024], [1024, 1024], []], "float")
    maker.kernel("void at::native::vectorized_elementwise_kernel<4>", 3e-5, **{"External id": number})
    maker.kernel("Memcpy DtoD (Device -> Device)", 1e-5, cat="gpu_memcpy", bytes=1 << 20)
    maker.kernel("some kernel", 1e-5)
    found = read_trace(maker.write(tmp_path / name))
    assert found.gpu == "NVIDIA A100-SXM4-80GB"
    assert [kernel.work for kernel in found.kernels] == [
        Matmul(2048, 4096, 1024),
        Matmul(1024, 4096, 2048, role="weight_gradient"),
        Matmul(128, 128, 64, batch=16),
        MemoryBound(2 * 4 * 2.0**20, 4 * 2.0**20),
        MemoryBound(2.0**20, 2.0**20),
        None,
    ]
    assert [kernel.dtype for kernel in found.kernels[:3]] == ["bf16", "bf16", "fp16"]
    totals = found.seconds_by_kind()
    assert totals["matmul"] == (3, pytest.approx(3.3e-4))
    assert totals["other"] == (1, pytest.approx(1e-5))


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [("double", 8), ("long", 8), ("int", 4), ("c10::Half", 2), ("bool", 1), ("unsigned char", 1), ("Char", 1)],
)
def test_passes_move_the_bytes_of_their_types_where_their_operator_says_what_is_read(
    tmp_path: Path, dtype: str, num_bytes: int
) -> None:
    maker = Maker()
    for name in ("aten::copy_", "aten::where"):
        number = maker.operator(name, [[1024, 512], [1024, 512]], dtype)
        maker.kernel("void at::native::vectorized_elementwise_kernel<4>", 3e-5, **{"External id": number})
    size = num_bytes * 2.0**19
    assert [kernel.work for kernel in read_trace(maker.write(tmp_path / "t.json")).kernels] == [
        MemoryBound(size, size), None
    ]  # fmt: skip


def test_sizes_of_collectives_are_those_of_the_hardware_model(tmp_path: Path) -> None:
    maker = Maker()
    for kind, sent, received in (
        ("allreduce", 1000, 1000), ("_allgather_base", 1000, 8000), ("_reduce_scatter_base", 8000, 1000),
        ("all_to_all", 8000, 8000), ("broadcast", 500, 500),
    ):  # fmt: skip
        maker.kernel(REDUCE, 1e-4, **collective(kind, sent, received))
    maker.kernel(REDUCE, 1e-4)
    maker.kernel(REDUCE, 1e-4, **collective("barrier", 1, 1))
    found = read_trace(maker.write(tmp_path / "t.json"))
    assert [(each.kind, each.num_bytes) for each in found.collectives] == [
        ("all_reduce", 2000), ("all_gather", 16000), ("reduce_scatter", 16000), ("all_to_all", 16000),
        ("broadcast", 1000),
    ]  # fmt: skip
    assert found.collectives[0].ranks == tuple(range(8))
    assert found.num_unsized == 2


def test_curves_are_fitted_back_from_kernels_that_follow_them() -> None:
    gpu = load_gpu("a100-sxm4-80gb")
    true = load_curves(gpu.curves)
    slow = {role: 0.6 * share for role, share in true.matmul["bf16"].limit.items()}
    matmul = true.matmul["bf16"].model_copy(update={"limit": slow})
    memory = true.memory.model_copy(update={"fraction": {**true.memory.fraction, "elementwise": 0.5}})
    curves = true.model_copy(update={"matmul": {**true.matmul, "bf16": matmul}, "memory": memory})
    kernels = [Matmul(m, n, 4096) for m in (2048, 4096, 8192) for n in (1024, 4096, 12288)]
    passes = [MemoryBound(float(size), float(size)) for size in (2**26, 2**27, 2**28)]
    rows = [(kernel, "bf16" if isinstance(kernel, Matmul) else "", predict_s(gpu, curves, "bf16", [kernel]))
            for kernel in [*kernels, *passes]]  # fmt: skip
    found = fit_curves(gpu, rows, "test")
    assert found is not None
    fitted, constants, points = found
    assert constants["bf16.limit.forward"] == pytest.approx(slow["forward"], rel=0.05)
    assert constants["fraction.elementwise"] == pytest.approx(0.5, rel=0.05)
    assert max(abs(point.predicted / point.measured - 1) for point in points) < 0.03
    # Gradients were not recorded: their limit moves with the forward one.
    ratio = fitted.matmul["bf16"].limit["weight_gradient"] / true.matmul["bf16"].limit["weight_gradient"]
    assert ratio == pytest.approx(constants["bf16.limit.forward"] / true.matmul["bf16"].limit["forward"])
    calibrated = gpu.model_copy(update={"calibrated_curves": fitted})
    assert kernel_time_s(calibrated, kernels[0], "bf16") > 1.5 * kernel_time_s(gpu, kernels[0], "bf16")


def test_matmuls_above_the_fp32_peak_were_tf32_and_those_above_any_peak_are_left_out() -> None:
    gpu = load_gpu("a100-sxm4-80gb")
    kernels = [Matmul(4096, n, 4096) for n in (1024, 2048, 4096, 8192)]
    rows = [(kernel, "fp32", kernel.flop / 100e12) for kernel in kernels]
    assert all(kernel.flop / 100e12 >= 20e-6 for kernel in kernels)
    found = fit_curves(gpu, rows, "test")
    assert found is not None
    assert {name.split(".")[0] for name in found[1]} == {"tf32"}
    quick = [(kernel, "bf16", kernel.flop / 1e15) for kernel in kernels]
    assert fit_curves(gpu, quick, "test") is None
    assert (num_of_another(gpu, rows), num_of_another(gpu, quick)) == (0, len(quick))


def test_overlap_is_the_ratio_of_covered_to_lonely_kernels_of_equal_work(tmp_path: Path) -> None:
    maker = Maker()
    for _ in range(3):
        maker.kernel(GEMM, 100e-6)
        maker.kernel(REDUCE, 400e-6, **collective("allreduce", 1 << 20, 1 << 20))
        at = maker.clock
        maker.kernel(REDUCE, 500e-6, start=at, **collective("allreduce", 1 << 20, 1 << 20))
        for part in range(4):
            maker.kernel(GEMM, 124e-6, start=at + 1 + 125 * part)
        maker.clock += 1000
    found = read_trace(maker.write(tmp_path / "t.json"))
    computing, talking = overlap_slowdowns(found.kernels, found.collectives)
    assert computing == [pytest.approx(1.24)]
    assert talking == [pytest.approx(1.25)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must hold GPU kernels"),
        ("3", "must be a chrome trace"),
        ('{"traceEvents": 3}', "must be a chrome trace"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "x", "ts": 1}]}', "ts and dur"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "x", "ts": 1, "dur": -1}]}', "must not be negative"),
        ('{"traceEvents": [{"ph": "X"', "malformed JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[" + "1" * 5000 + "]", "too many digits"),
        ('[{"ph": "X", "cat": "kernel", "ts": NaN, "dur": 1}]', "ts and dur"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(tmp_path / "t.json")


leaf = st.one_of(st.none(), st.booleans(), st.integers(-5, 2**70), st.floats(), st.text(max_size=4))
flat = st.one_of(leaf, st.lists(leaf, max_size=3))
junk = st.one_of(flat, st.lists(flat, max_size=3), st.dictionaries(st.text(max_size=4), flat, max_size=2))
event = st.fixed_dictionaries(
    {"ph": st.just("X")},
    optional={
        "cat": st.sampled_from(["kernel", "gpu_memcpy", "cpu_op"]),
        "name": st.one_of(st.sampled_from([GEMM, REDUCE, "aten::mm", "aten::add", BACKWARD]), junk),
        "ts": st.one_of(st.floats(0, 1e6), junk), "dur": st.one_of(st.floats(0, 1e6), junk), "tid": junk,
        "args": st.one_of(junk, st.fixed_dictionaries({}, optional={
            "External id": st.one_of(st.just(1), junk), "Input Dims": junk, "Input type": junk, "bytes": junk,
            "Collective name": st.one_of(st.just("allreduce"), junk), "Group size": st.one_of(st.just(8), junk),
            "dtype": st.one_of(st.just("Float"), junk), "In msg nelems": junk, "Out msg nelems": junk,
            "Process Group Ranks": junk,
        })),
    },
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.one_of(st.lists(event, max_size=4).map(lambda events: json.dumps(events).encode()), st.binary(max_size=99)))
def test_any_bytes_end_in_success_or_a_clear_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "trace.json"
    path.write_bytes(data)
    try:
        assert read_trace(path).kernels
    except ValueError as error:
        assert "trace.json" in str(error)


def product(start_us: float, us: float) -> GpuKernel:
    """Return a run of one and the same product."""
    return GpuKernel("gemm", "matmul", start_us * 1e-6, us * 1e-6, ("gemm", 1))


def reduction(start_us: float, us: float) -> GpuKernel:
    return GpuKernel("nccl", "collective", start_us * 1e-6, us * 1e-6, ("nccl",))


def test_the_medians_of_covered_and_of_lonely_kernels_are_compared_and_partly_covered_ones_are_neither() -> None:
    """Covered 140, 150 and 190 us, alone 90, 100 and 110; one of 400 us covered by a quarter says nothing."""
    talking = [reduction(0, 700), reduction(10, 50), reduction(2_300, 1_000)]  # the second ends within the first
    covered = [product(100, 140), product(250, 150), product(450, 190)]
    alone = [product(800, 90), product(900, 100), product(1_050, 110)]
    computing, _ = overlap_slowdowns([*talking, *covered, *alone, product(2_000, 400)], [])
    assert computing == [pytest.approx(150 / 100)]


def test_copies_beside_a_collective_do_not_slow_it_as_computation_does() -> None:
    """400 us beside a product of 500; a copy of as long beside another collective leaves that alone."""
    copy = GpuKernel("Memcpy DtoD", "copy", 2e-3, 500e-6, ("copy",))
    spans = (5e-5, 4e-4), (2.05e-3, 3e-4)
    beside = [Collective("all_reduce", 1e6, 8, (), start_s, seconds) for start_s, seconds in spans]
    _, talking = overlap_slowdowns([product(0, 500), copy], beside)
    assert talking == [pytest.approx(4 / 3)]
    assert overlap_slowdowns([copy, reduction(2_010, 400)], []) == ([], [])


def test_repeats_of_one_kernel_tell_its_rate_and_no_curve() -> None:
    """Eight runs of one product and of one copy: how rates change with size is not in them."""
    gpu = load_gpu("a100-sxm4-80gb")
    rows: list[tuple[Matmul | MemoryBound, str, float]] = []
    for number in range(8):
        rows += [(Matmul(4096, 4096, 4096), "bf16", 7e-4 * (1 + 0.01 * number))]
        rows += [(MemoryBound(2.0**27, 2.0**27), "", 2e-4 * (1 + 0.01 * number))]
    found = fit_curves(gpu, rows, "test")
    assert found is not None and set(found[1]) == {"bf16.limit.forward", "fraction.elementwise"}


def test_a_recorded_gradient_is_the_guide_to_the_other_and_forward_to_fused_attention() -> None:
    """Forward at 0.9 of the shipped rate, what backward passes record at 0.5: the data gradient is as slow as that."""
    gpu = load_gpu("a100-sxm4-80gb")
    shipped = load_curves(gpu.curves)
    rows = []
    for n in range(2048, 8193, 1024):
        for role, slower in (("forward", 0.9), ("weight_gradient", 0.5)):
            each = Matmul(n, n, n, role=role)
            rows.append((each, "bf16", predict_s(gpu, shipped, "bf16", [each]) / slower))
    found = fit_curves(gpu, rows, "test")
    assert found is not None
    moved = {role: share / shipped.matmul["bf16"].limit[role] for role, share in found[0].matmul["bf16"].limit.items()}
    assert moved == pytest.approx({"forward": 0.9, "data_gradient": 0.5, "weight_gradient": 0.5}, rel=0.06)
    for name in ("forward", "backward"):
        assert getattr(found[0].attention, name) / getattr(shipped.attention, name) == pytest.approx(0.9, rel=0.06)


def test_formats_that_no_row_is_about_follow_the_one_of_most_rows() -> None:
    """Seven sizes in bf16 at 0.6 of the shipped rate, two in tf32 at 0.9: fp16 is as slow as bf16."""
    gpu = load_gpu("a100-sxm4-80gb")
    shipped = load_curves(gpu.curves)
    rows = []
    for dtype, sizes, slower in (("bf16", range(2048, 8193, 1024), 0.6), ("tf32", (4096, 8192), 0.9)):
        for each in (Matmul(n, n, n) for n in sizes):
            rows.append((each, dtype, predict_s(gpu, shipped, dtype, [each]) / slower))
    found = fit_curves(gpu, rows, "test")
    assert found is not None
    moved = [found[0].matmul[dtype].limit["forward"] / shipped.matmul[dtype].limit["forward"]
             for dtype in ("bf16", "fp16", "tf32")]  # fmt: skip
    assert moved == pytest.approx([0.6, 0.6, 0.9], rel=0.06)
