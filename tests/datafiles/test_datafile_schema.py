"""Messages about files whose content does not fit its model."""

from __future__ import annotations

import enum
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, field_validator

from datafiles.errors import DataFileError
from datafiles.names import nearest
from datafiles.schema import FileModel, validated


class Recompute(enum.Enum):
    FULL = "full"
    NONE = "none"


class Stage(FileModel):
    devices: tuple[int, ...]
    recompute: Recompute = Recompute.NONE
    num_layers: Annotated[int, Field(ge=1, le=100_000)] = 1

    @field_validator("devices")
    @classmethod
    def _not_empty(cls, devices: tuple[int, ...]) -> tuple[int, ...]:
        if not devices:
            raise ValueError("a stage must have a device")
        return devices


class Link(FileModel):
    kind: Literal["link"]
    bytes_per_s: Annotated[float, Field(gt=0)]


class Plan(FileModel):
    stages: tuple[Stage, ...]
    latency_s: float = 0.0
    by_name: dict[str, Stage] = Field(default_factory=dict)
    extra: Stage | Link | None = None
    memory_bytes: int = Field(default=0, le=2**60)
    flag: bool = False
    name: str = Field(default="x", min_length=1, max_length=8)
    pair: tuple[int, int] = (0, 0)
    degrees: Annotated[int, Field(ge=1)] | tuple[Annotated[int, Field(ge=1)], ...] = 1
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)


def refusal(mapping: dict[str, object]) -> str:
    with pytest.raises(DataFileError) as caught:
        validated(Plan, mapping, "plan.yaml")
    assert caught.value.path == "plan.yaml"
    return str(caught.value)


def test_a_good_mapping_becomes_a_frozen_model() -> None:
    plan = validated(Plan, {"stages": [{"devices": [0, 1], "recompute": "full"}], "memory_bytes": 32e9}, "x")
    assert plan.stages == (Stage(devices=(0, 1), recompute=Recompute.FULL),)
    assert plan.memory_bytes == 32_000_000_000
    assert type(plan.memory_bytes) is int
    with pytest.raises(ValueError, match="frozen"):
        plan.flag = True


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({}, "plan.yaml: stages: is required, but missing"),
        ({"stages": 3}, "stages: must be a list, got 3"),
        ({"stages": [{"devices": ["0"]}]}, "stages.0.devices.0: must be a valid integer, got '0'"),
        ({"stages": [{"devices": [True]}]}, "stages.0.devices.0: must be a valid integer, got True"),
        ({"stages": [{"devices": [0.5]}]}, "stages.0.devices.0: must be a valid integer, got 0.5"),
        ({"stages": [{"devices": []}]}, "stages.0.devices: a stage must have a device"),
        ({"stages": [{"devices": [0], "device": 1}]}, ".device: unknown key, did you mean 'devices'? known:"),
        ({"stages": [], "by_name": {"a": {"devices": [1], "recompte": 1}}}, "name.a.recompte: unknown key"),
        ({"stages": [], "extra": {"kind": "link", "bytes_per_sec": 1}}, "did you mean 'bytes_per_s'"),
        ({"stages": [], "extra": {"kind": "link", "bytes_per_s": -1.0}}, "must be greater than 0, got -1.0"),
        ({"stages": [{"devices": [0], "recompute": "ful"}]}, "must be 'full' or 'none', got 'ful'"),
        ({"stages": [{"devices": [0], "num_layers": 1e12}]}, "or equal to 100000, got 1000000000000"),
        ({"stages": [], "latency_s": float("nan")}, "latency_s: must be a finite number, got nan"),
        ({"stages": [], "latency_s": "4e-6"}, "latency_s: must be a valid number, got '4e-6'"),
        ({"stages": [], "flag": 1}, "flag: must be a valid boolean, got 1"),
        ({"stages": [], "by_name": [1]}, "by_name: must be a mapping, got a list of 1"),
        ({"stages": None}, "stages: must be a list, got nothing (null)"),
        ({"stages": [], "name": ""}, "name: must have at least 1 character, got ''"),
        ({"stages": [], "name": "abcdefghi"}, "name: must have at most 8 characters, got 'abcdefghi'"),
        ({"stages": [], "pair": [1, 2, 3]}, "pair: must have at most 2 values, got a list of 3"),
        ({"stages": [], "seeds": []}, "seeds: must have at least 1 value, got a list of 0"),
        ({"stages": [], "memory_bytes": 1e308, "pair": ["x"]}, "memory_bytes: must be less than or equal to"),
        ({"stages": [], "memory_bytes": 1e308}, "got 1e+308"),
        ({"stages": [], "degrees": "x"}, "\n  degrees: must be a valid integer, got 'x'\n  degrees: must be a list"),
    ],
)  # fmt: skip
def test_each_error_names_the_field_the_rule_and_what_came(mapping: dict[str, object], words: str) -> None:
    assert words in refusal(mapping)


def test_all_errors_come_at_once() -> None:
    message = refusal({"stages": [{"devices": ["x", "y"]}], "flag": "yes", "latency": 1})
    assert message.startswith("plan.yaml: 4 errors\n  stages.0.devices.0: ")
    assert len(message.splitlines()) == 5


def test_a_list_of_wrong_values_is_not_called_short_too() -> None:
    assert refusal({"stages": [], "seeds": [None]}) == (
        "plan.yaml: seeds.0: must be a valid integer, got nothing (null)"
    )


def test_long_lists_of_errors_are_cut() -> None:
    message = refusal({"stages": [{"devices": ["x"] * 500}]})
    assert len(message.splitlines()) == 22
    assert message.endswith("and 480 more")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_pass_unchanged(value: float) -> None:
    assert repr(validated(Plan, {"stages": [], "latency_s": value}, "x").latency_s) == repr(value)


def test_models_are_built_in_python_with_their_own_types() -> None:
    with pytest.raises(ValueError, match="tuple"):
        Stage(devices=[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="finite"):
        Plan(stages=(), latency_s=float("inf"))


def test_many_names_are_cut_to_the_nearest() -> None:
    known = [f"gpt3-{size}b" for size in range(50)]
    assert nearest("gpt3-7B", known) == (
        "did you mean 'gpt3-7b'? nearest: gpt3-7b, gpt3-47b, gpt3-37b (50 are known)"
    )
    assert nearest("zzz", known).startswith("nearest: ")
    assert nearest("a", []) == "none are known here"
    assert nearest("x" * 10**6, ["x" * 10**6])
