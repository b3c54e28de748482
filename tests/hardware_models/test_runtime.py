"""Runtimes: files load, every field has a source, bad files are refused."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from hardware_models.runtime import RUNTIMES, load_runtime, runtime_description, runtime_names


@pytest.mark.parametrize("name", runtime_names())
def test_every_runtime_loads(name: str) -> None:
    runtime = load_runtime(name)
    assert runtime.name == name
    assert runtime.sources["attention"]
    assert runtime_description(name)
    assert runtime.outside_allocator_bytes > 2**28


def test_megatron_keeps_sixteen_bytes_per_parameter_as_aceso_counts() -> None:
    assert load_runtime("megatron-lm-2021").state_bytes_per_parameter == 16


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("parameter_bytes: 2", "parameter_bytes: -2", "parameter_bytes"),
        ("parameter_bytes: 2", "parameter_bytes: 0", "parameter_bytes: must be greater than 0, got 0"),
        ("parameter_bytes: 2", "parameter_bytes: .inf", "(?i)inf"),
        ("attention: plain", "attention: fancy", "attention"),
        ("attention: plain", "attention: plain\nspeed: 1", "speed: unknown key"),
        ("  gradient_clipping: ", "  clipping: ", "missing: gradient_clipping; unknown: clipping"),
    ],
)
def test_a_bad_runtime_file_names_the_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (RUNTIMES / "megatron-lm-2021.yaml").read_text()
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        load_runtime(path)


def test_an_unknown_runtime_gets_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="megatron-lm-2021"):
        load_runtime("megatron-2021")


def test_megatron_of_2022_still_scatters_transfers_and_lets_outputs_go() -> None:
    of_2022, of_2023 = (asdict(load_runtime(f"megatron-lm-{year}")) for year in ("2022", "2023-fp16"))
    other = {name for name, value in of_2022.items() if value != of_2023[name]} - {"name", "description", "sources"}
    assert other == {"scatters_transfers", "keeps_stage_outputs"}
