"""What goes wrong says so clearly, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from simulator.plan import Axis, Plan, Stage  # noqa: E402
from simulator.plan_file import save_plan  # noqa: E402
from simulator.problem import ProblemSpec  # noqa: E402
from simulator.uniform import uniform_plan  # noqa: E402
from tests.validation import fault_worker  # noqa: E402
from tests.validation.tiny import axes, problem, stage  # noqa: E402
from validation.execution.executable import check_executable  # noqa: E402
from validation.execution.executor import execute  # noqa: E402
from validation.execution.launch import WorkerError, launch  # noqa: E402
from validation.profiling.jobs import execute_rounds, plan_job  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def workers_of(parent: int) -> list[int]:
    """Return the processes that ``parent`` had started by its fork server and that are alive."""
    children: dict[int, list[int]] = {}
    servers = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            is_server = b"multiprocessing.forkserver" in (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(entry.name))
        if is_server:
            servers.add(int(entry.name))
    return [worker for server in children.get(parent, []) if server in servers for worker in children.get(server, [])]


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = workers_of(os.getpid())
    yield
    assert workers_of(os.getpid()) == before


def test_processes_that_work_are_seen() -> None:
    """Else that none is left would say nothing."""
    rest = {"num_processes": 2, "timeout_s": 60, "num_threads": 1}
    working = threading.Thread(target=launch, args=(fault_worker.rest, 3.0), kwargs=rest)
    working.start()
    wait_until(lambda: len(workers_of(os.getpid())) == 2, 60)
    working.join()
    assert not workers_of(os.getpid())


def test_what_a_process_is_told_by_its_environment_is_of_its_own_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("first", "second"):
        monkeypatch.setenv("WINDTUNNEL_TEST_WORD", word)
        assert launch(fault_worker.environment, "WINDTUNNEL_TEST_WORD", num_processes=2, num_threads=1) == [word] * 2
    monkeypatch.delenv("WINDTUNNEL_TEST_WORD")
    assert launch(fault_worker.environment, "WINDTUNNEL_TEST_WORD", num_processes=1, num_threads=1) == [None]


def test_a_rank_that_dies_mid_iteration_is_named() -> None:
    with pytest.raises(WorkerError) as caught:
        launch(fault_worker.die_in_backward, 1, num_processes=2, timeout_s=120, num_threads=1)
    text = str(caught.value)
    assert "rank 1 of 2 failed at iteration 1, B(stage 1, microbatch 0): killed by SIGKILL" in text
    assert "all 2 processes were stopped" in text


def test_a_rank_that_raises_is_named_with_its_error_not_the_echo_of_the_others() -> None:
    with pytest.raises(WorkerError, match="rank 0 of 2 failed at start-up: ArithmeticError: the sky is falling"):
        launch(fault_worker.fail, 0, num_processes=2, timeout_s=120, num_threads=1)


@pytest.mark.measured
def test_a_rank_that_hangs_is_named_after_the_time_limit() -> None:
    with pytest.raises(WorkerError, match=r"no answer within 12 s from .*rank 1 \(start-up\)"):
        launch(fault_worker.sleep, 1, num_processes=2, timeout_s=12, num_threads=1)


def test_a_job_without_memory_on_one_rank_is_left_out_and_the_others_are_run() -> None:
    of = problem("gpt")
    kept, large = (plan_job(uniform_plan(of, dp=2, microbatch=size), of, iterations=1) for size in (2, 4))
    hungry = replace(large, traced_iterations=fault_worker.Failing("NCCL: Cuda failure 2 'out of memory'"))
    found = execute_rounds([kept, hungry, kept], rounds=2)
    assert [[each.out_of_memory for each in turn] for turn in found] == [[False, True, False]] * 2
    assert all(len(each.losses) == 2 for turn in found for each in (turn[0], turn[2]))


def test_no_other_failure_of_a_job_is_taken_for_a_lack_of_memory() -> None:
    of = problem("gpt")
    job = plan_job(uniform_plan(of, dp=2, microbatch=2), of, iterations=1)
    with pytest.raises(WorkerError, match=r"rank 1 of 2 failed .*: RuntimeError: no such file"):
        execute_rounds([replace(job, traced_iterations=fault_worker.Failing("no such file"))])


def test_a_port_in_use_is_said_to_be() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"port must be free .* got {port}: Address already in use"):
            launch(fault_worker.sleep, 0, num_processes=2, port=port)


def test_a_plan_for_more_processes_than_there_are_says_how_many_it_needs() -> None:
    of = problem("gpt")
    plan = uniform_plan(of, pp=2, dp=2)
    with pytest.raises(ValueError, match="uses 4 devices, but there are 2 processes; start 4"):
        check_executable(plan, of, device="cpu", num_processes=2)
    if torch.cuda.device_count() < 4:
        with pytest.raises(ValueError, match="4 processes on cuda need 4 GPUs, got"):
            execute(plan, of, device="cuda")


@pytest.mark.measured
def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    code = (
        "from validation.execution.launch import launch\n"
        "from tests.validation.fault_worker import write_pid_and_sleep\n"
        "if __name__ == '__main__':\n"
        f"    launch(write_pid_and_sleep, {str(tmp_path)!r}, num_processes=2)\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(code)
    parent = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT)
    pids = [tmp_path / "rank0", tmp_path / "rank1"]
    wait_until(lambda: all(path.exists() and path.read_text() for path in pids), 120)
    numbers = [int(path.read_text()) for path in pids]
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not any(Path(f"/proc/{number}").exists() for number in numbers), 30)


def wait_until(condition, limit_s: float) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.mark.measured
def test_torchrun_can_launch_a_plan_file(tmp_path: Path) -> None:
    model = tmp_path / "model.yaml"
    model.write_text(
        "family: gpt\nname: small\nlayers: 2\nhidden: 32\nheads: 2\nseq_len: 8\nvocab: 64\n"
        "dropout: 0.0\nattention_dropout: 0.0\n"
    )
    spec = ProblemSpec(str(model), "local-cpu:1x2", "windtunnel-executor-fp32", 4)
    plan = uniform_plan(spec.load(), pp=2, microbatch=2)
    save_plan(tmp_path / "plan.yaml", spec, plan)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
        "-m", "validation.run_plan", str(tmp_path / "plan.yaml"), "--iterations", "2",
        "-o", str(tmp_path / "measurement.json"),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("iteration time") == 1
    assert '"stage_forward_s"' in (tmp_path / "measurement.json").read_text()


def refusal(of, plan) -> str:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="cannot be executed") as caught:
        check_executable(plan, of, device="cpu")
    return str(caught.value)


def test_what_only_simulates_is_refused_by_name() -> None:
    gpt = problem("gpt")
    plan = uniform_plan(gpt, dp=2)
    assert "runtime windtunnel-executor-fp32: gradient_clipping" in refusal(
        problem("gpt", gradient_clipping=True), plan
    )
    megatron = ProblemSpec("gpt3-350m", "a100-80g-dgx:1x8", "megatron-lm-2021", 8).load()
    text = refusal(megatron, uniform_plan(megatron, dp=2))
    assert "dtype fp16 on cpu" in text
    assert "implementation.fused_softmax True" in text


def test_replicas_in_turn_with_moving_batch_axes_are_refused_by_name() -> None:
    llama = problem("llama")
    count = len(llama.workload)
    runs = (
        (count // 2, (Axis("batch", 2), Axis("tensor", 2))),
        (count - count // 2, (Axis("tensor", 2), Axis("batch", 2))),
    )
    plan = Plan((Stage(((0, count),), (0, 1, 2, 3), runs),), 2, 4, replica_assignment="round_robin")
    assert "stage 0: replica_assignment round_robin with operators whose batch axes lie differently" in refusal(
        llama, plan
    )


def test_an_embedding_cut_twice_is_refused_by_name() -> None:
    of = problem("gpt")
    mixed = axes(("tensor", 2), ("tensor_sequence", 2))
    plan = Plan((stage((0, len(of.workload)), range(4), mixed),), 4, 2)
    with pytest.raises(ValueError, match=r"'embedding\.embedding': split by vocab and vocab_sequence; use one of them"):
        check_executable(plan, of, device="cpu")
