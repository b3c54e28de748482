"""Runtimes: files load, every field has a source, bad files are refused."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from datafiles.loader import load_mapping
from hardware_models.runtime_files import (
    RUNTIMES,
    files_of_runtime,
    load_runtime,
    runtime_description,
    runtime_fields,
    runtime_names,
)


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


BASED = """
description: "ours"
base: megatron-lm-2023
implementation: {fused_gate: true}
gradient_clipping: false
sources: {implementation: "read", gradient_clipping: "read", attention: "read anew"}
"""


def test_a_file_says_what_it_does_otherwise_than_its_base(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(BASED)
    (tmp_path / "below").mkdir()
    later = 'description: "later"\nbase: ../ours.yaml\nattention: flash\nsources: {attention: "read"}\n'
    (tmp_path / "below" / "later.yaml").write_text(later)
    base, ours = load_runtime("megatron-lm-2023"), load_runtime(tmp_path / "ours.yaml")
    implementation = replace(base.implementation, fused_gate=True)
    sources = {**base.sources, "implementation": "read", "gradient_clipping": "read", "attention": "read anew"}
    assert base.gradient_clipping and not base.implementation.fused_gate
    assert ours == replace(
        base, name="ours", implementation=implementation, gradient_clipping=False, sources=sources
    )
    of_it = load_runtime(tmp_path / "below" / "later.yaml")
    assert of_it == replace(ours, name="later", attention="flash", sources={**sources, "attention": "read"})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("base: megatron-lm-2023", "base: megatron-lm-203", r"mine.yaml: base must be a known one .*-2023"),
        ("base: megatron-lm-2023", "base: mine.yaml", "mine.yaml: base must not lead back .* mine.yaml -> mine"),
        ("base: megatron-lm-2023", "base: other.yaml", r"mine.yaml: base .* there is no file .*other.yaml"),
        ("base: megatron-lm-2023", "base: [megatron-lm-2023]", "base: must be the name of a runtime or a path, got "),
        ("base: megatron-lm-2023", "base: null", "attention: is required"),
        ('description: "ours"', "", "description: is required"),
        ("fused_gate: true", "fused_gates: true", "implementation.fused_gates: unknown key, did you mean 'fused_gate'"),
        ('implementation: "read", ', "", "missing: implementation; unknown: none"),
        ('attention: "read anew"', 'atention: "read anew"', "missing: none; unknown: atention"),
        ("gradient_clipping: false", "gradient_clipping: 3", "gradient_clipping: must be a valid boolean, got 3"),
        ("{implementation: ", "[implementation: ", "sources: must be a mapping"),
    ],
)
def test_a_bad_file_with_a_base_names_the_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in BASED
    text = BASED.replace(old, new, 1)
    (path := tmp_path / "mine.yaml").write_text(text.replace('anew"}', 'anew"]') if "[implementation" in new else text)
    with pytest.raises(ValueError, match=message):
        load_runtime(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"host_runs_ahead": "false"}, "needs host_runs_ahead.* of its base megatron-lm-2023"),
        ({"transfer_mode": "overlapped"}, "must not have receive where transfer_mode is overlapped"),
        ({"refreshes_in_forward": "true", "copies_gathered": "true"}, "goes with neither gather .* copies_gathered"),
        ({"bucket_bytes": "4"}, "needs copies_gradients"),
        ({"bucket_bytes": "8", "copies_gradients": "true"}, "must be part of gradient_bytes"),
    ],
)
def test_fields_that_contradict_what_the_base_says_are_refused(
    tmp_path: Path, fields: dict[str, str], message: str
) -> None:
    said = "".join(f"{name}: {value}\n" for name, value in fields.items())
    sources = "".join(f'  {name}: "read"\n' for name in fields)
    (path := tmp_path / "mine.yaml").write_text(
        f'description: "ours"\nbase: megatron-lm-2023\n{said}sources:\n{sources}'
    )
    with pytest.raises(ValueError, match=message):
        load_runtime(path)


def test_the_files_of_a_runtime_are_those_that_it_is_based_on_too(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "below" / "b.yaml"
    second.parent.mkdir()
    first.write_text(BASED.replace("base: megatron-lm-2023", "base: below/b.yaml"))
    assert files_of_runtime(first) == [first, second]  # there or not
    second.write_text(BASED)
    assert files_of_runtime(first) == [first, second]
    second.write_text(BASED.replace("base: megatron-lm-2023", "base: ../a.yaml"))
    assert files_of_runtime(first) == [first, second]
    with pytest.raises(ValueError, match=r"got a.yaml -> b.yaml -> a.yaml"):
        load_runtime(first)
    assert not files_of_runtime("megatron-lm-2023")


@pytest.mark.parametrize("name", runtime_names())
def test_shipped_files_repeat_nothing_of_their_base(name: str) -> None:
    own = load_mapping(RUNTIMES / f"{name}.yaml")
    if "base" in own:
        base = asdict(load_runtime(own["base"]))
        found = asdict(load_runtime(name))
        assert [field for field in set(own) & set(base) - {"sources"} if found[field] == base[field]] == []
        chosen = own.get("implementation", {})
        assert [each for each, value in chosen.items() if value == base["implementation"][each]] == []
        told = {field: (f"as {own['base']}", base["sources"].get(field)) for field in set(own["sources"]) - set(own)}
        assert [field for field in told if own["sources"][field] in told[field]] == []


def test_all_fields_of_a_runtime_are_listed_with_their_sources() -> None:
    fields = {name: (value, source) for name, value, source in runtime_fields("megatron-lm-2022")}
    runtime = load_runtime("megatron-lm-2022")
    assert fields["base"] == ("megatron-lm-2023-fp16", "")
    assert fields["scatters_transfers"] == ("true", runtime.sources["scatters_transfers"])
    assert fields["implementation.dtype"] == ("fp16", "")
    listed = {name.removeprefix("implementation.") for name in fields} - {"base"}
    assert listed == set(asdict(runtime)) - {"name", "sources"} | set(asdict(runtime.implementation))


def test_an_unknown_runtime_gets_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="megatron-lm-2021"):
        load_runtime("megatron-2021")


def test_megatron_of_2022_still_scatters_transfers_and_lets_outputs_go() -> None:
    of_2022, of_2023 = (asdict(load_runtime(f"megatron-lm-{year}")) for year in ("2022", "2023-fp16"))
    other = {name for name, value in of_2022.items() if value != of_2023[name]} - {"name", "description", "sources"}
    assert other == {"scatters_transfers", "keeps_stage_outputs"}
