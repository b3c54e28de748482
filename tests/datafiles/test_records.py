"""Records are read as they were written, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from datafiles.records import read_record, write_record

CONTENT = {"row": {"seconds": 1 / 3, "curve": [(1, 2.5e-8)], "none": None}, "code": "a1", "big": 2**62}


def test_a_record_is_read_as_it_was_written_whatever_its_layout(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    plain = write_record(path, CONTENT)
    assert plain == json.loads(json.dumps(CONTENT)) == read_record(path)
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    assert read_record(path) == plain


@pytest.mark.parametrize(
    ("old", "new"),
    [("0.333", "0.334"), ("null", "0"), ('"sha256"', '"s"'), ('"a1"', "[]"), ("}", ""), ('"row"', '"code": 1, "row"')],
)
def test_a_changed_record_is_none(tmp_path: Path, old: str, new: str) -> None:
    write_record(path := tmp_path / "record.json", CONTENT)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    assert read_record(path) is None


def test_what_is_no_file_of_text_is_no_record(tmp_path: Path) -> None:
    assert read_record(tmp_path / "missing.json") is None and read_record(tmp_path) is None
    (path := tmp_path / "record.json").write_bytes(b"\xff\xfe\x00")
    assert read_record(path) is None
