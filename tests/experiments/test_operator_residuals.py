"""Where the model misses profiled operators: sums by unit and kind, and every operator of a kind."""

from __future__ import annotations

import sys
from math import prod

import pytest

from experiments.cases.campaign_operators import measured_operators
from experiments.cases.campaigns import FOLDER
from experiments.operator_residuals import main, residuals
from workloads.kernels import MemoryBound

CAMPAIGN = "single-gpu-convolutions"


def test_kinds_are_the_sums_of_their_operators() -> None:
    operators = [each for each in measured_operators(FOLDER / f"{CAMPAIGN}.yaml") if each.unit == "vgg-48 fp32"]
    by_kind = residuals(operators)
    assert sum(each.share for each in by_kind) == pytest.approx(1)
    for whole in by_kind:
        parts = [each for each in residuals(operators, whole.kind) if each.phase == whole.phase]
        assert sum(each.measured_s for each in parts) == pytest.approx(whole.measured_s)
        assert sum(each.modelled_s for each in parts) == pytest.approx(whole.modelled_s)
        assert sum(each.share for each in parts) == pytest.approx(whole.share)
    measured_s = sum(each.count * (each.row.forward_s + each.row.backward_s) for each in operators)
    assert sum(each.measured_s for each in by_kind) == pytest.approx(measured_s)


def test_a_line_says_what_an_operator_took_and_would_by_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """VGG's first two ReLUs, 96 images of 48 x 160 x 160 in fp32: two passes over 472 MB at 0.9 of 3.35 TB/s each."""
    monkeypatch.setattr(
        sys, "argv", ["operator_residuals", "--campaign", CAMPAIGN, "--unit", "vgg-48 fp32", "--kind", "relu"]
    )
    main()
    lines = capsys.readouterr().out.splitlines()
    (first,) = (line for line in lines if "forward" in line and "2 x relu.1 (96, 48, 160, 160)" in line)
    *_, measured, _, modelled, _, error = first.split()
    assert float(modelled) == pytest.approx(2 * 2 * 96 * 48 * 160**2 * 4 / (0.9 * 3.35e12) * 1e3, rel=0.01)
    assert float(error.rstrip("%")) == pytest.approx(100 * (float(modelled) / float(measured) - 1), abs=0.3)


def test_sums_of_gradients_are_with_the_operator_that_goes_backward_next() -> None:
    """Where they were profiled: of packed queries, keys and values two sums before the projection's own backward.

    With flash attention, whose keys and values meet inside, it is one. Of the encoder's output, which all decoder
    layers read, one is made behind each projection of it, and so before the norm that comes before that.
    """
    found = {}
    plain, flash, t5 = "bert-large bf16", "gpt-350m bf16-flash", "t5 bf16"
    for campaign, unit in (("single-gpu", plain), ("single-gpu", flash), ("single-gpu-families", t5)):
        for each in measured_operators(FOLDER / f"{campaign}.yaml"):
            if each.unit == unit:
                size = each.local.element_bytes * prod(each.local.outputs[0])
                sums = [kernel for kernel in each.backward if kernel == MemoryBound(2.0 * size, 1.0 * size)]
                found[unit, each.row.role] = len(sums)
    assert found[plain, "attention_qkv"] == 2 and found[flash, "attention_qkv"] == 1
    assert found[plain, "norm_1"] == found[plain, "norm_2"] == 1
    assert found[plain, "post_attention_dropout"] == 0 and found[flash, "post_attention_dropout"] == 1
    assert found[t5, "decoder_norm_2"] == 1 and found[t5, "encoder_final_norm"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--unit", "t5"], "--unit must be part of a name that the campaign has (resnet-96 bf16, "),
        (["--kind", "conv3d"], "--kind must be one that these units have (add, batch_norm, classifier_loss, conv2d, "),
    ],
)
def test_what_a_campaign_does_not_have_is_refused(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["operator_residuals", "--campaign", CAMPAIGN, *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and message in capsys.readouterr().err
