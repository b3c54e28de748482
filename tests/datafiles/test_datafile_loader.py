"""What files the loader accepts, and what it says about the others."""

from __future__ import annotations

import contextlib
import gzip
import pickle
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datafiles.errors import DataFileError
from datafiles.loader import load_mapping, load_table, parse_mapping

GOOD_YAML = """\
# a cluster
name: v100-32g-dgx1
links:
  - {kind: nvlink, bytes_per_s: 25e9, latency_s: 4e-6}
  - kind: "ib"
    bytes_per_s: 12.5e9
notes: >
  folded
  text
sizes: [1, 2, 0x10]
"""


def refusal(text: str, format: Any = "yaml") -> DataFileError:
    with pytest.raises(DataFileError) as caught:
        parse_mapping(text, source="file", format=format)
    return caught.value


@pytest.mark.parametrize(
    ("spelling", "value"),
    [
        ("1e9", 1e9), ("4e-6", 4e-6), ("1.", 1.0), (".5", 0.5), ("-1.5E+3", -1500.0), ("+3", 3), ("012", 12),
        ("0x1F", 31), ("0o17", 15), ("1_000", "1_000"), ("1:30", "1:30"), ("yes", "yes"), ("on", "on"),
        ("No", "No"), ("y", "y"), ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
        ("2021-04-09", "2021-04-09"),
        ("'1e9'", "1e9"), ('"true"', "true"), ("0b101", "0b101"), ("=", "="), ("<<", "<<"), ("e5", "e5"),
        (".", "."), ("-", [None]), ("9223372036854775807", 2**63 - 1), ("1\u0663", "1\u0663"),
    ],
)  # fmt: skip
def test_plain_scalars_follow_yaml_1_2(spelling: str, value: object) -> None:
    text = f"key:\n  {spelling}" if spelling == "-" else f"key: {spelling}"
    read = parse_mapping(text, source="x")["key"]
    assert read == value
    assert type(read) is type(value)


def test_a_good_file_is_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_text("\ufeff" + GOOD_YAML)
    read = load_mapping(path)
    assert list(read) == ["name", "links", "notes", "sizes"]
    assert read["links"][0] == {"kind": "nvlink", "bytes_per_s": 25e9, "latency_s": 4e-6}
    assert read["notes"] == "folded text\n"
    assert read["sizes"] == [1, 2, 16]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "duplicate key 'a', first on line 1"),
        ("a:\n  b: 1\n  b: 1\n", 3, "duplicate key 'b', first on line 2"),
        ("a: 1\n'a': 2\n", 2, "duplicate key 'a'"),
        ("a: &x 1\nb: *x\n", 1, "anchors are not allowed, got &x"),
        ("b: *x\n", 1, "aliases are not allowed, got *x"),
        ("a: 1\nb: !!python/object:os.system x\n", 2, "tags are not allowed"),
        ("a: !!int 3\n", 1, "tags are not allowed"),
        ("a: ! b\n", 1, "tags are not allowed"),
        ("a: 1\nb: .nan\n", 2, "b: a number must be finite, got .nan"),
        ("a: -.inf\n", 1, "finite"),
        ("a: 1e999\n", 1, "finite"),
        ("a: 9223372036854775808\n", 1, "integer must lie within"),
        (f"a: {'9' * 10000}\n", 1, "integer must lie within"),
        ("a: 1\nb: [1, 2\nc: 3\n", 3, "malformed YAML"),
        ("a: 1\n\tb: 2\n", 2, "malformed YAML"),
        ("a: b: c\n", 1, "malformed YAML"),
        ("a: 1\n1: 2\n", 2, "a key must be a string, got a number 1; quote it"),
        ("true: 2\n", 1, "a key must be a string, got a boolean"),
        ("? [a]\n: 2\n", 1, "a key must be a string, got a list or mapping"),
        ("- 1\n", 1, "top level must be a mapping (key: value), got a list"),
        ("", 1, "got nothing"),
        ("just text", 1, "got a string"),
        ("a: 1\n---\nb: 2\n", 2, "one document"),
        ("a: " + "[" * 64 + "]" * 64, 1, "nesting must be at most 64 deep"),
        ("a: " + "[" * 100_000, 1, "nesting"),
        ("a: 1\nb: \x07\n", 2, "character U+0007 is not allowed"),
        ("a: \ud800\n", 1, "malformed YAML"),
    ],
)
def test_bad_yaml_is_refused_with_its_line(text: str, line: int, words: str) -> None:
    error = refusal(text)
    assert words in error.message
    assert error.line == line
    assert str(error).startswith(f"file:{line}: ")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('{"a": 1,\n "b": {"a": 1},\n "a": 2}', 3, "duplicate key 'a'"),
        ('{"a": [{"b": 1},\n {"b": 1, "\\u0062": 1}]}', 2, "duplicate key 'b'"),
        ('{"a": 1,\n "b": NaN}', 2, "finite, got NaN"),
        ('{"a": "Infinity",\n "b": -Infinity}', 2, "finite, got -Infinity"),
        ('{"a": [1, {"b": 1e999}]}', None, "a.1.b: a number must be finite"),
        ('{"a": 1e9,\n"b"}', 2, "malformed JSON"),
        ("[1]", 1, "got a list"),
        ('{"a": 9223372036854775808}', None, "a: an integer must lie within"),
        (f'{{"a": {"9" * 5000}}}', None, "an integer must lie within"),
        ('{"a": "\\ud800"}', None, "a: half a surrogate pair"),
        ('{"\\ud800": 1}', None, "half a surrogate pair"),
        ('{"a": ' + "[" * 64 + "]" * 64 + "}", None, "nesting must be at most 64 deep"),
        ('{"a": ' * 100_000, None, "nesting must be at most 64 deep"),
        ("", 1, "malformed JSON"),
    ],
)
def test_bad_json_is_refused(text: str, line: int | None, words: str) -> None:
    error = refusal(text, "json")
    assert words in error.message
    assert error.line == line


def test_nesting_is_allowed_up_to_the_cap() -> None:
    text = "a: " + "[" * 63 + "]" * 63
    assert parse_mapping(text, source="x") == parse_mapping(
        text.replace("a", '{"a"') + "}", source="x", format="json"
    )


def test_json_and_gzip_are_recognised_by_name(tmp_path: Path) -> None:
    for name in ("a.json", "A.JSON", "a.yaml", "a.json.gz", "a.yaml.gz"):
        data = b'{"a": [1e9, "yes"]}'
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        assert load_mapping(tmp_path / name) == {"a": [1e9, "yes"]}


def test_sizes_are_capped_before_and_after_decompression(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.yaml.gz"
    bomb.write_bytes(gzip.compress(b"a" * 10_000_000))
    with pytest.raises(DataFileError, match="decompressed content must have at most 100000 bytes"):
        load_mapping(bomb, max_bytes=100_000)
    plain = tmp_path / "plain.yaml"
    plain.write_text("a: " + "b" * 98)
    with pytest.raises(DataFileError, match="at most 100 bytes"):
        load_mapping(plain, max_bytes=100)
    assert load_mapping(plain, max_bytes=101) == {"a": "b" * 98}


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.yaml.gz", b"not gzip", "not a valid gzip"),
        ("a.yaml.gz", gzip.compress(b"a: 1", mtime=0)[:-9], "not a valid gzip"),
        ("a.yaml", b"a: 1\nb: \xff", ":2: must be UTF-8 text, got byte 0xff"),
    ],
)
def test_bad_bytes_are_refused(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataFileError, match=words):
        load_mapping(tmp_path / name)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match="no such file"):
        load_mapping(tmp_path / "none.yaml")
    with pytest.raises(DataFileError, match="cannot be read"):
        load_mapping(tmp_path)
    with pytest.raises(DataFileError):
        load_mapping("a\0b")


def test_the_number_of_values_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datafiles.yaml_reader.MAX_VALUES", 5)
    monkeypatch.setattr("datafiles.json_reader.MAX_VALUES", 5)
    assert "at most 5 values" in refusal("a: [1, 2, 3, 4]").message
    assert "at most 5 values" in refusal('{"a": [1, 2, 3, 4]}', "json").message


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(DataFileError("a", "b", line=3)))
    assert (error.path, error.message, error.line, str(error)) == ("a", "b", 3, "a:3: b")


FORMATS: tuple[Literal["yaml", "json"], ...] = ("yaml", "json")
INSERTIONS = [*"&*!|>%@`{}[]:,-?#'\"\n\t\0\x85\ud800", "<<: ", "--- ", "1e400", "\ufeff"]
MUTATIONS = st.lists(
    st.tuples(st.integers(0, len(GOOD_YAML)), st.integers(0, 8), st.sampled_from(INSERTIONS)), max_size=6
)


@settings(max_examples=300, deadline=None)
@given(MUTATIONS, st.sampled_from(["yaml", "json"]))
def test_any_mutated_text_is_read_or_refused(mutations: list[tuple[int, int, str]], format: Any) -> None:
    text = GOOD_YAML if format == "yaml" else '{"a": [1, 2.5, {"b": null}], "c": "text", "d": {"e": true}}'
    for start, length, inserted in mutations:
        text = text[:start] + inserted + text[start + length :]
    try:
        assert isinstance(parse_mapping(text, source="x", format=format), dict)
    except DataFileError as error:
        assert error.path == "x"
        assert len(error.message) < 2000


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=300),
    st.sampled_from(["a.yaml", "a.json", "a.yaml.gz", "a.json.gz", "a.csv", "a.csv.gz"]),
)
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    load: Any = load_table if ".csv" in name else load_mapping
    for content in (data, gzip.compress(data)) if name.endswith("gz") else (data,):
        path.write_bytes(content)
        try:
            load(path)
        except DataFileError as error:
            assert error.path == str(path)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="{}[]:,-?\"'\n #&*!|>a1.e", max_size=60))
def test_any_yaml_like_text_is_read_or_refused(text: str) -> None:
    for format in FORMATS:
        with contextlib.suppress(DataFileError):
            parse_mapping(text, source="x", format=format)


def test_a_table_is_read_with_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('# source\n\na,b,c\nx,1e3,2\n\n"y\nz",,3.0\n')
    assert load_table(path, floats=["b"], integers=["c"]) == [
        {"a": "x", "b": 1000.0, "c": 2},
        {"a": "y\nz", "b": None, "c": 3},
    ]
    assert load_table(path)[0] == {"a": "x", "b": "1e3", "c": "2"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "header row"),
        ("a,n\n1\n", ":2: a row must have the header's 2 cells, got 1"),
        ("a,a\n1,2\n", ":1: duplicate column 'a'"),
        ("a,\n1,2\n", ":1: every column must have a name"),
        ("a,n\n1,2\n1,nan\n", ":3: n must be a number, got 'nan'"),
        ("a,n\n1,1e999\n", ":2: n: a number must be finite"),
        ("a,n\n1,true\n", ":2: n must be a number, got 'true'"),
        ("a,b\n1,2\n", ":1: column 'n' is missing"),
        ("a;n\n1;2\n", ":1: column 'n' is missing; the header has a;n; cells must be separated by commas"),
        ('a,n\n1,"2\n', "malformed CSV"),
        ('# c\na,n\n"\n",x\n', ":4: n must be a number"),
        ("a,n\n1," + "x" * 200_000, "malformed CSV"),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(DataFileError, match=re.escape(words)):
        load_table(path, floats=["n"])


def test_a_column_that_is_not_there_is_named_when_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,n\nx,1\n")
    (row,) = load_table(path, floats=["n"])
    assert pickle.loads(pickle.dumps(row)) == row == {"a": "x", "n": 1.0}
    for each in (row, pickle.loads(pickle.dumps(row))):
        with pytest.raises(DataFileError, match=r"t\.csv: column 'db' is missing; the header has a, n"):
            each["db"]
    assert row.get("db") is None


def test_cells_that_must_not_be_empty_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,n\nx,1\ny,\n")
    assert load_table(path, floats=["n"])[1]["n"] is None
    with pytest.raises(DataFileError, match=r":3: n must be a number, got an empty cell"):
        load_table(path, floats=["n"], required=["n"])


def test_whole_numbers_are_checked_in_integer_columns(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("n\n2.5\n")
    with pytest.raises(DataFileError, match=r":2: n must be an integer, got '2\.5'"):
        load_table(path, integers=["n"])


def test_the_cells_of_a_table_are_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datafiles.tables.MAX_VALUES", 5)
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(DataFileError, match="at most 5 cells"):
        load_table(path)
