"""Plans and plan files: exact round trip, one hash for every spelling."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datafiles.errors import DataFileError
from datafiles.loader import parse_mapping
from datafiles.writer import dump_json, dump_yaml
from simulator.fast.estimate import FastEstimator
from simulator.plan import Axis, Plan, Stage, merge_ranges, plan_to_mapping, resolve, run_lengths
from simulator.plan_file import load_plan, plan_document, plan_from_mapping, save_plan
from simulator.problem import ProblemSpec
from simulator.uniform import uniform_plan
from tests.simulator.problems import small_problem

AXES = st.builds(
    Axis,
    st.sampled_from(["batch", "replicate", "tensor", "tensor_sequence", "column", "head"]),
    st.integers(1, 64),
    st.integers(0, 3),
)
RANGES = st.tuples(st.integers(0, 50), st.integers(1, 20)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@st.composite
def stages(draw: st.DrawFn) -> Stage:
    operators = merge_ranges(draw(st.lists(RANGES, min_size=1, max_size=3)))
    total = sum(stop - start for start, stop in operators)
    shardings = []
    while total:
        count = draw(st.integers(1, total))
        shardings.append((count, tuple(draw(st.lists(AXES, max_size=3)))))
        total -= count
    return Stage(
        operators=operators,
        devices=tuple(draw(st.lists(st.integers(0, 4000), min_size=1, max_size=8, unique=True))),
        shardings=tuple(shardings),
        recompute=tuple(draw(st.lists(RANGES, max_size=3))),
    )


PLANS = st.builds(
    Plan,
    stages=st.lists(stages(), min_size=1, max_size=4).map(tuple),
    microbatch_size=st.integers(1, 10**6),
    num_microbatches=st.integers(1, 10**6),
    schedule=st.sampled_from(["1f1b", "gpipe", "interleaved", "zb-h1"]),
    warmup=st.none() | st.lists(st.integers(1, 99), min_size=1, max_size=4).map(tuple),
    gradient_reduction=st.sampled_from(["last", "every"]),
    overlap_gradient_sync=st.booleans(),
    reshard_after_forward=st.booleans(),
    replica_assignment=st.sampled_from(["slice", "round_robin"]),
    last_microbatch_size=st.none() | st.integers(1, 10**6),
)
SPEC = ProblemSpec(model="gpt3-1.3b", cluster="v100-32g-dgx1:1x4", runtime="megatron-lm-2021", global_batch=64)


@settings(max_examples=150, deadline=None)
@given(PLANS, st.sampled_from(["yaml", "json"]))
def test_a_plan_written_and_read_is_the_same_plan(plan: Plan, form: str) -> None:
    document = plan_document(SPEC, plan)
    text = dump_yaml(document) if form == "yaml" else dump_json(document)
    assert plan_from_mapping(parse_mapping(text, source="test", format=form)["plan"]) == plan  # type: ignore[arg-type]


def test_a_saved_plan_loads_with_its_problem(tmp_path: Path) -> None:
    problem = SPEC.load()
    plan = uniform_plan(problem, tp=2, pp=2, recompute="selective")
    for name in ("plan.yaml", "plan.json"):
        save_plan(tmp_path / name, SPEC, plan, fingerprint=problem.workload.fingerprint)
        assert load_plan(tmp_path / name) == (SPEC, plan)


@pytest.mark.parametrize(
    ("key", "file", "named"),
    [
        ("model", "own.yaml", "own.yaml"),
        ("model", "vgg.csv", "vgg.csv@32"),
        ("cluster", "node.yaml", "v100-32g-dgx1:1x4+node.yaml:2x4"),
        ("runtime", "own.yaml", "own.yaml"),
        ("profile", "measured.json", "measured.json"),
    ],
)
def test_what_a_plan_names_as_a_file_may_lie_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, file: str, named: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    spec = replace(SPEC, **{key: named})
    save_plan(tmp_path / "plan.yaml", spec, uniform_plan(SPEC.load()))
    with pytest.raises(DataFileError) as missing:
        load_plan("../plan.yaml")
    assert f"../plan.yaml: problem.{key}: no such file: {file}" in str(missing.value)
    assert f"looked in {here} and beside the plan in {tmp_path}" in str(missing.value)
    (tmp_path / file).touch()
    assert getattr(load_plan("../plan.yaml")[0], key) == named.replace(file, f"../{file}")
    (here / file).touch()
    assert load_plan("../plan.yaml")[0] == spec, "what stands as it is named comes first"


@pytest.mark.parametrize(
    ("key", "named"),
    [("model", "own.yaml"), ("cluster", "node.yaml:2x4"), ("runtime", "own.yaml"), ("profile", "measured.json")],
)
def test_a_problem_says_where_it_looked_for_a_file(key: str, named: str) -> None:
    with pytest.raises(ValueError, match=rf"^{key}: no such file: {named.partition(':')[0]}; looked in /"):
        replace(SPEC, **{key: named}).load()


def test_on_a_mixed_cluster_the_limit_may_bind_on_the_larger_gpus_only() -> None:
    mixed = replace(SPEC, cluster="v100-32g-dgx1:1x2+v100-16g-dgx1:1x2", memory_limit_bytes=20 << 30)
    problem = mixed.load()
    outside = problem.runtime.outside_allocator_bytes
    assert problem.capacity_bytes(0) == (20 << 30) - outside
    assert problem.capacity_bytes(2) == problem.hardware.memory_bytes(2) - outside
    called = replace(mixed, memory_limit_bytes=32 << 30).load()  # 32 GB on the box, 31.75 GiB in use
    assert called.capacity_bytes(0) == called.hardware.memory_bytes(0) - outside
    with pytest.raises(ValueError, match=r"at most the 31\.75 GiB of v100-sxm2-32gb, got 34\.00 GiB"):
        replace(mixed, memory_limit_bytes=34 << 30).load()


def test_a_plan_made_for_another_graph_is_refused(tmp_path: Path) -> None:
    save_plan(tmp_path / "p.yaml", SPEC, uniform_plan(SPEC.load()), fingerprint="0123456789abcdef")
    with pytest.raises(DataFileError, match=r"another version of model gpt3-1\.3b"):
        load_plan(tmp_path / "p.yaml")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_microbatches": 10**12}, "num_microbatches"),
        ({"microbatch_size": 0}, "microbatch_size"),
        ({"microbatchsize": 1}, "microbatch_size"),
        ({"stages": [{"operators": [[0, 10**12]], "devices": [0], "shardings": []}]}, r"stages\.0\.operators"),
        ({"stages": [{"operators": [[0, 5]], "devices": [0], "shardings": [{"count": 4, "axes": []}]}]}, "add up to"),
        (
            {"stages": [{"operators": [[0, 5]], "devices": [0], "shardings": [{"count": 5, "axes": [["batch"]]}]}]},
            r"axes\.0: an axis must be \[split, size\] or \[split, size, zero\], got \['batch'\]$",
        ),
        (
            {"stages": [{"operators": [[0, 5]], "devices": [0], "shardings": [{"count": 5, "axes": [["a", 1, 9]]}]}]},
            r"axes\.0\.2: must be less than or equal to 3, got 9$",
        ),
        (
            {"stages": [{"operators": [[5, 0]], "devices": [0], "shardings": [{"count": 5, "axes": []}]}]},
            r"stages\.0\.operators: a range must be \[first, one after the last\], got \[5, 0\]",
        ),
    ],
)
def test_a_malformed_plan_names_the_place(change: dict, words: str) -> None:
    mapping = plan_to_mapping(uniform_plan(SPEC.load())) | change
    with pytest.raises(DataFileError, match=words):
        plan_from_mapping(mapping)


def test_every_spelling_of_a_plan_has_one_hash() -> None:
    problem = small_problem("gpt")
    plan = uniform_plan(problem, dp=4, recompute="full")
    (stage,) = plan.stages
    count = len(problem.workload)
    spellings = [
        replace(stage, shardings=((count, (Axis("batch", 2), Axis("batch", 2), Axis("tensor", 1))),)),
        replace(stage, shardings=((3, (Axis("batch", 4),)), (count - 3, (Axis("replicate", 1), Axis("batch", 4))))),
        replace(stage, operators=((5, count), (0, 5)), recompute=stage.recompute[::-1]),
    ]
    expected = plan.canonical_hash(problem.workload)
    for other in spellings:
        assert replace(plan, stages=(other,)).canonical_hash(problem.workload) == expected
    assert replace(plan, schedule="gpipe").canonical_hash(problem.workload) != expected


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_whether_parameters_stay_gathered_is_of_no_account_where_none_are(zero: int) -> None:
    problem = small_problem("gpt", runtime="deepspeed-zero3-2021")
    frees = uniform_plan(problem, dp=4, zero=zero)
    stays = replace(frees, reshard_after_forward=False)
    hashes = {plan.canonical_hash(problem.workload) for plan in (frees, stays)}
    assert len(hashes) == (2 if zero == 3 else 1)
    found = {FastEstimator(problem).estimate(plan).iteration_time_s for plan in (frees, stays)}
    assert len(found) == (2 if zero == 3 else 1)


def test_a_tensor_word_and_the_splits_it_stands_for_have_one_hash() -> None:
    problem = small_problem("gpt")
    plan = uniform_plan(problem, tp=2, dp=2)
    spelled = tuple((1, (Axis("batch", 2), Axis(operator.tensor_split, 2))) for operator in problem.workload.operators)
    explicit = replace(plan, stages=(replace(plan.stages[0], shardings=spelled),))
    assert explicit.canonical_hash(problem.workload) == plan.canonical_hash(problem.workload)


@given(st.lists(AXES, max_size=4))
def test_canonical_shardings_keep_the_number_of_devices_and_do_not_change_again(axes: list[Axis]) -> None:
    from math import prod

    operator = small_problem("gpt").workload.operators[2]
    once = resolve(tuple(axes), operator)
    assert prod(axis.size for axis in once) == prod(axis.size for axis in axes)
    assert resolve(once, operator) == once


@given(st.lists(st.sampled_from([(), (Axis("batch", 2),), (Axis("batch", 4),)])))
def test_run_lengths_expand_to_what_they_were_made_of(shardings: list) -> None:
    runs = run_lengths(shardings)
    assert [sharding for count, sharding in runs for _ in range(count)] == shardings
    assert all(a[1] != b[1] for a, b in pairwise(runs))
