"""Plans and results of Aceso's public code are read, or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.cases.aceso import plan_of
from searchers.aceso.import_plan import import_plan
from simulator.validate import validate
from tests.searchers.aceso.problems import FOLDER, needs_profile, profiled_problem
from tests.searchers.tiny import tiny_problem


@needs_profile
def test_collected_and_public_plan_files_are_read(tmp_path: Path) -> None:
    problem = profiled_problem("1_3B", 4)
    entries = json.loads((FOLDER / "reference_plans.json").read_text())
    entry = next(each for each in entries if each["size"] == "1_3B" and each["num_stages"] == 4)
    collected = tmp_path / "collected.json"
    collected.write_text(json.dumps(entry))
    expected = validate(plan_of(entry, problem), problem)
    found = import_plan(collected, problem)
    assert validate(found, problem).stages == expected.stages
    public = {
        "micro_batch_size": entry["aggregate_micro_batch"],
        "model_parallel_size_of_each_op": [_decoded(stage["tp"]) for stage in entry["stages"]],
        "data_parallel_size_of_each_op": [_decoded(stage["dp"]) for stage in entry["stages"]],
        "recompute_ops": [_decoded(stage["recompute"]) for stage in entry["stages"]],
        "algo_of_each_op": [_decoded(stage["algo"]) for stage in entry["stages"]],
    }
    file = tmp_path / "public.json"
    file.write_text(json.dumps(public))
    assert import_plan(file, problem) == found


def _decoded(text: str) -> list[int]:
    return [int(value) for run in text.split() for value, _, count in [run.partition("x")] for _ in range(int(count))]


@pytest.mark.parametrize(("content", "message"), [
    ('{"a": 1}', "must have micro_batch_size"),
    ('{"aggregate_micro_batch": 1, "stages": [{"tp": "1x3", "dp": "1x3", "algo": "0x3"}]}', "recompute is missing"),
    ('{"aggregate_micro_batch": 1, "stages": [{"tp": "1x3", "dp": "1x3", "algo": "0x3", "recompute": "0x2"}]}',
     "one entry per operator"),
    ('{"aggregate_micro_batch": 1, "stages": [{"tp": "1x9999999", "dp": "1x3", "algo": "0x3", "recompute": "0x3"}]}',
     "at most 100000 entries"),
    ('{"aggregate_micro_batch": 1, "stages": [{"tp": "1x3", "dp": "1x3", "algo": "0x3", "recompute": "0x3"}]}',
     "must have the 29 operators"),
    ('{"aggregate_micro_batch": 1, "stages": [{"tp": "1x29", "dp": "1x29", "algo": "9x29", "recompute": "0x29"}]}',
     "algo must be a number below 2, got 9"),
    ('{"aggregate_micro_batch": true, "stages": [{"tp": "1x29", "dp": "1x29", "algo": "0x29", "recompute": "0x29"}]}',
     "the microbatch must divide the global batch 4, got True"),
    ('{"aggregate_micro_batch": 1, "global_batch": 7, "stages": '
     '[{"tp": "1x29", "dp": "1x29", "algo": "0x29", "recompute": "0x29"}]}',
     "the file's batch is 7, which must be the batch, got 4"),
    ('{"aggregate_micro_batch": 1, "stages": 3}', "stages must be a list, got a number"),
    ('{"aggregate_micro_batch": 1, "stages": [null]}', "stage 0 must be a mapping, got nothing"),
    ('{"aggregate_micro_batch": 1, "stages": [{"tp": "1x29", "dp": "1x29", "algo": "0x29", "recompute": "7x29"}]}',
     "stage 0: recompute must be 0 or 1, got 7"),
    ('{"aggregate_micro_batch": 1, "stages": [{"tp": "1x' + "9" * 5000 + '"}]}', "must be runs VALUExCOUNT"),
    ('{"aggregate_micro_batch": 1, "stages": [{"tp": "999999999x29", "dp": "999999999x29", "algo": "0x29", '
     '"recompute": "0x29"}]}', "the cluster must have the 999,999,998,000,000,001 devices of the plan, got 2"),
    ('{"aggregate_micro_batch": 1, "stages": ['
     '{"tp": "1x100000", "dp": "1x100000", "algo": "0x100000", "recompute": "0x100000"}, '
     '{"tp": "1x1", "dp": "1x1", "algo": "0x1", "recompute": "0x1"}]}',
     "must have at most 100000 operators, got more in 2 stages"),
    ('{"micro_batch_size": 1, "tensor_parallel_size_of_each_op": 1, "data_parallel_size_of_each_op": [[1]]}',
     "tensor_parallel_size_of_each_op must be a list, got a number"),
    ('{"micro_batch_size": 1, "tensor_parallel_size_of_each_op": [[1]], "data_parallel_size_of_each_op": [1]}',
     "data_parallel_size_of_each_op, stage 0 must be a list, got a number"),
    ('{"micro_batch_size": 1, "tensor_parallel_size_of_each_op": [[1]], "data_parallel_size_of_each_op": [[1]], '
     '"recompute_ops": null}', "recompute_ops must be a list, got nothing"),
])  # fmt: skip
def test_a_wrong_plan_file_is_refused_with_the_reason(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        import_plan(file, tiny_problem(2))
