"""What is written is whole, readable and reads back exactly."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from datafiles.loader import parse_mapping
from datafiles.writer import LINE_WIDTH, dump_json, dump_yaml, write_bytes_atomically, write_text_atomically

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ["", "yes", "1e9", "1_000", "null", "~", "- a", "a: b", "#", "a #b", " a", "a ", "0x1", ".inf",
     "=", "a\nb", "---", "\x85", "\u2028", "?", "x" * 900]
)  # fmt: skip
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=30,
)


def same(first: Any, second: Any) -> bool:
    """Equality that tells 1 from 1.0 and True, 0.0 from -0.0, and key orders apart."""
    return type(first) is type(second) and repr(first) == repr(second)


@settings(max_examples=250, deadline=None)
@given(st.dictionaries(TEXT, VALUES, max_size=6))
def test_yaml_and_json_read_back_exactly(mapping: dict[str, Any]) -> None:
    assert same(parse_mapping(dump_yaml(mapping), source="x"), mapping)
    assert same(parse_mapping(dump_json(mapping), source="x", format="json"), mapping)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(TEXT, st.lists(TEXT | st.integers(-(2**63) + 1, 2**63 - 1), max_size=8), max_size=6))
def test_other_yaml_readers_agree_on_strings_and_integers(mapping: dict[str, Any]) -> None:
    assert same(yaml.safe_load(dump_yaml(mapping)), mapping)


def test_the_layout_is_compact_and_readable() -> None:
    mapping = {
        "windtunnel": 1,
        "name": "gpt3-1.3b on v100",
        "version": "1e9",
        "stages": [
            {"operators": [0, 100], "devices": (0, 1), "mesh": [["batch", 2, 0], ["column", 4, 0]]},
            {"devices": list(range(100, 130)), "recompute": []},
        ],
        "runtime": {"fused": True, "options": {}},
    }
    assert dump_yaml(mapping) == (
        "windtunnel: 1\n"
        "name: gpt3-1.3b on v100\n"
        'version: "1e9"\n'
        "stages:\n"
        "  - {operators: [0, 100], devices: [0, 1], mesh: [[batch, 2, 0], [column, 4, 0]]}\n"
        "  - devices:\n"
        "      [100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111, 112, 113, 114, 115, 116, 117,\n"
        "       118, 119, 120, 121, 122, 123, 124, 125, 126, 127, 128, 129]\n"
        "    recompute: []\n"
        "runtime:\n"
        "  fused: true\n"
        "  options: {}\n"
    )
    assert max(map(len, dump_yaml(mapping).splitlines())) <= LINE_WIDTH
    assert parse_mapping(dump_yaml(mapping), source="x")["stages"][1]["devices"] == list(range(100, 130))


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 2**63, object(), {1: 2}, b"x", "\ud800", {"k" * 1001: 1}]
)
def test_what_cannot_be_read_back_is_not_written(value: object) -> None:
    with pytest.raises(ValueError, match="must"):
        dump_yaml({"a": value})


def test_nesting_beyond_the_loaders_cap_is_not_written() -> None:
    deepest: Any = {"k": 1}
    for _ in range(60):
        deepest = {"k": deepest}
    for value in (deepest, {"k": deepest}, {"k": [deepest]}, {"k": {"k": {"k": deepest}}}):
        try:
            text = dump_yaml(value)
        except ValueError:
            continue
        assert parse_mapping(text, source="x") == value
    with pytest.raises(ValueError, match="nesting"):
        dump_yaml({"k": {"k": {"k": {"k": deepest}}}})


def test_a_failed_write_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.yaml"
    write_text_atomically(path, "old\n")

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full") as refused:
        write_text_atomically(path, "new\n")
    assert refused.value.filename == str(path), "not the partial file"
    assert path.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_text_atomically(path, "é\n")
    assert path.read_bytes() == "é\n".encode()
    write_bytes_atomically(path, b"\0")
    assert path.read_bytes() == b"\0"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path: Path) -> None:
    (target := tmp_path / "kept.yaml").write_text("old")
    (link := tmp_path / "latest.yaml").symlink_to("kept.yaml")
    write_text_atomically(link, "new")
    assert link.is_symlink() and target.read_text() == "new"


def test_no_file_takes_the_place_of_a_pipe_or_a_folder(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    for path, what in ((pipe, "the device or pipe"), (tmp_path, "the folder")):
        with pytest.raises(ValueError, match=f"output must be a file, got {what} "):
            write_text_atomically(path, "new")
    assert pipe.is_fifo()
