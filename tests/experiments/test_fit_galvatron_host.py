"""What Galvatron's host spends per operator: the runtimes hold what the fit gives."""

from __future__ import annotations

from statistics import mean

import pytest

from experiments.fit_galvatron_host import KINDS, host_seconds_per_operator, measured_s, operators_and_kernels
from hardware_models.runtime_files import load_runtime
from tests.hardware_models.data_folder import data_folder


def test_a_layer_has_the_operators_of_the_models_table() -> None:
    """Thirteen in an encoder layer of BERT and T5, eight more in a decoder layer (a norm and cross attention)."""
    assert [operators_and_kernels(*KINDS[key])[0] for key in KINDS] == [13, 13, 13, 21]


def test_the_runtimes_hold_the_fit() -> None:
    path = data_folder("galvatron") / "a100" / "layer_forward_times.csv"
    found = host_seconds_per_operator(path)
    assert set(found) == set(KINDS)
    for name in ("galvatron-v1-tf32", "galvatron-v1-bf16"):
        forward_s, backward_s = load_runtime(name).host_seconds_per_operator
        assert forward_s == backward_s == pytest.approx(mean(found.values()), rel=0.01)
    # The pace is the host's: eight times the tokens take a tenth longer.
    for key, times in measured_s(path).items():
        if key[0] == "bert_hf":
            assert max(times) < 1.2 * min(times)
