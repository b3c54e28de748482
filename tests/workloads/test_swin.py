"""Swin: sizes against Galvatron's Table I and released measurements, windows against their definition."""

from __future__ import annotations

import pytest

from tests.workloads.graphs import EAGER_FP32, layer_saved
from workloads import build_workload
from workloads.models.swin import SwinSpec
from workloads.registry import build_from_spec

MIB = 2**20


@pytest.mark.parametrize(("name", "parameters"), [("swin-huge-32", 701_253_272), ("swin-huge-48", 1_016_178_840)])
def test_parameters_are_those_of_the_published_configuration(name: str, parameters: int) -> None:
    """Table I says 701M and 1016M."""
    assert build_workload(name).num_parameters == parameters


@pytest.mark.parametrize(
    ("layer", "measured_mib"), [(1, {1: 72.584, 2: 43.318}), (4, {1: 36.423, 2: 21.33}), (7, {1: 18.317, 4: 7.561})]
)
def test_layers_keep_what_was_measured(layer: int, measured_mib: dict[int, float]) -> None:
    """Second layers of the first three stages, fp32, RTX TITAN (Galvatron's released profile)."""
    workload = build_workload("swin-huge-32")
    for ways, measured in measured_mib.items():
        features, statistics = layer_saved(workload, layer, EAGER_FP32, ways=ways)
        assert (features + statistics) / MIB == pytest.approx(measured, rel=0.06)


def test_every_second_layer_is_shifted_but_not_where_one_window_is_all() -> None:
    workload = build_workload("swin-huge-32")
    shifts = [op.attributes["shift"] for op in workload.operators if op.role == "window_partition"]
    assert shifts == [0, 3] * 15 + [0, 0]


def test_stages_halve_the_image_and_double_the_width() -> None:
    workload = build_workload("swin-huge-32")
    merges = [workload.tensors[op.outputs[0]] for op in workload.operators if op.role == "merge_linear"]
    assert merges == [(784, 640), (196, 1280), (49, 2560)]
    scores = [workload.tensors[op.outputs[0]] for op in workload.operators if op.role == "attention_score"]
    assert scores[0] == (8, 3136, 49) and scores[-1] == (64, 49, 49)


def test_flash_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="relative position bias"):
        build_workload("swin-huge-32", attention="flash")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": (2,)}, "one number per stage"),
        ({"image": 30}, "window must divide the side"),
        ({"patch": 5}, "patch must divide image"),
        ({"heads": (3, 4)}, "heads must divide hidden"),
        ({"window": 3, "image": 18}, "odd side"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(fields: dict[str, object], message: str) -> None:
    shape = {"name": "x", "depths": (2, 2), "hidden": 16, "heads": (2, 4), "image": 16, "patch": 2, "window": 4}
    with pytest.raises(ValueError, match=message):
        SwinSpec.model_validate({**shape, **fields})


def test_windows_and_masks_are_those_of_the_definition() -> None:
    """A token attends to those of its window of the rolled image that were near it before the roll."""
    torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")
    from tests.validation.saving import Example, context_of, executor_implementation
    from validation.kinds.attention import _window_mask
    from validation.kinds.torch_kinds import build

    spec = SwinSpec(name="w", depths=(2,), hidden=4, heads=(1,), image=16, patch=2, window=4)
    workload = build_from_spec(spec, "plain")
    partition = [index for index, op in enumerate(workload.operators) if op.role == "window_partition"][1]
    context = context_of(Example(workload, partition, "replicate"), executor_implementation("fp32"))
    side, width, shift = 8, 4, 2
    tokens = torch.arange(side * side, dtype=torch.float32).view(1, -1, 1).expand(2, -1, 4)
    (ordered,) = build(context)([tokens], [])
    mask = _window_mask(side, width**2, shift, torch.float32, torch.device("cpu"))
    places = ordered[0, :, 0].long().tolist()
    for place, token in enumerate(places):
        window = place // 16
        row, column = divmod(token, side)
        assert window == ((row - shift) % side // width) * 2 + (column - shift) % side // width
        for other in range(16):
            row2, column2 = divmod(places[16 * window + other], side)
            near = abs(row - row2) < width and abs(column - column2) < width
            assert (mask[place, other] == 0) == near
