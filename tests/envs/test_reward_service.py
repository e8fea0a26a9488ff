"""Tests of the reward service with rewards that hang, crash, lie or leave processes behind."""

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError, DeadlineError
from envs.reward_workers.crash_attribution import RewardTicket
from envs.reward_workers.scoring import OUT_OF_MEMORY, ScoringResult
from envs.reward_workers.service import MAX_EARLY_DEATHS, RewardService
from envs.reward_workers.worker import IDLE, run_worker
from envs.reward_workers.worker_pool import PROCESS_DIED, LostWorker, WorkerHandle
from envs.task import Completion, Example, make_task
from envs.tasks.arithmetic import Arithmetic
from tests.envs.sandbox_helpers import WORKING_LEVELS
from tests.processes import is_alive, wait_for_exit

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "tests.envs.hostile_rewards"


@contextmanager
def serving(reward: str | None, **options: Any) -> Iterator[RewardService]:
    named = reward if reward is None or ":" in reward else f"{HOSTILE}:{reward}"
    given = {"reward_timeout_s": 5.0, "reward_workers": 2, "max_error_rate": 0.5, **options}
    env = EnvConfig(dataset="arithmetic", reward=named, **given)
    with closing(RewardService(make_task(env), env)) as service:
        yield service


def examples(count: int) -> list[Example]:
    return [Example(({"role": "user", "content": "?"},), "ok", row) for row in range(count)]


def outcomes(service: RewardService, *texts: str) -> list[str]:
    return [each.outcome for each in service.score([Completion(text) for text in texts], examples(len(texts)))]


def test_a_completion_that_breaks_the_verifier_is_invalid_and_harms_no_other() -> None:
    deeds = ("power", "regex", "sleep", "memory", "recurse", "die")
    with serving("bomb") as service:
        for deed in deeds:
            texts = ["a", "bb", deed, "ccc"] + ["dddd"] * 20
            scored = service.score([Completion(text) for text in texts], examples(len(texts)))
            assert [s.outcome for s in scored] == ["scored"] * 2 + ["invalid"] + ["scored"] * 21, deed
            assert [s.score for s in scored] == [1.0, 2.0, 0.0, 3.0] + [4.0] * 20, deed


def test_a_hanging_worker_does_not_stop_the_service_from_sending() -> None:
    with serving("bomb", reward_workers=1) as service:
        assert outcomes(service, "sleep", *["x" * 100_000] * 30) == ["invalid"] + ["scored"] * 30


def test_a_worker_that_hangs_before_it_begins_is_waited_for_no_longer_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The queue holds more than fits into the worker's socket, and every poll retries."""
    with serving("bomb", reward_workers=1, reward_timeout_s=600.0) as service:
        service.score([Completion("a")], examples(1))
        assert service._pool is not None
        (worker,) = service._pool.workers
        os.kill(worker.pid, signal.SIGSTOP)
        service.submit([Completion("a")], examples(1))
        ticket = service.submit([Completion("x" * 100_000) for _ in range(30)], examples(30))
        # Short only now, since the healthy score and each call of submit would be under the same deadline.
        monkeypatch.setattr("envs.reward_workers.service.STALLED_SECONDS", 0.5)
        service.env = replace(service.env, reward_timeout_s=0.5)
        with pytest.raises(DeadlineError, match="for any of 1 workers to score one of 31 completions"):
            service.wait(ticket)


def test_a_child_that_a_reward_leaves_behind_sends_no_verdict() -> None:
    texts = ["fork", "a", "fork", "bb"] * 10
    with serving("bomb", reward_workers=1) as service:
        scored = service.score([Completion(text) for text in texts], examples(len(texts)))
        assert [s.score for s in scored] == [4.0, 1.0, 4.0, 2.0] * 10
        assert service.metrics()["reward/workers_replaced"] == 0.0


def test_workers_that_retire_together_end_no_run() -> None:
    """Workers that had sent results are replaced by fresh ones."""
    with serving("bomb") as service:
        for _ in range(3):
            service._handle_lost_workers(
                [LostWorker(IDLE, 0.0, [], PROCESS_DIED, has_sent_results=True, has_retired=True)] * 5
            )
        assert service.metrics()["reward/workers_replaced"] == 0.0
        service._handle_lost_workers([LostWorker(IDLE, 0.0, [], PROCESS_DIED, has_sent_results=True)])
        assert service.metrics()["reward/workers_replaced"] == 1.0
        for _ in range(MAX_EARLY_DEATHS):
            service._handle_lost_workers([LostWorker(IDLE, 0.0, [], PROCESS_DIED)])
        with pytest.raises(ConfigError, match="times in a row reward workers ended before they scored"):
            service._handle_lost_workers([LostWorker(IDLE, 0.0, [], PROCESS_DIED)])


@pytest.mark.parametrize(("message", "retires"), [("", True), (OUT_OF_MEMORY, False)])
def test_a_worker_reports_its_retirement(message: str, retires: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envs.reward_workers.worker.RETIRE_AFTER", 3)
    monkeypatch.setattr(
        "envs.reward_workers.worker.score_completion", lambda *_: ScoringResult(0.0, {}, "scored", 0.0, message)
    )
    ours, theirs = Pipe()
    page = mmap.mmap(-1, mmap.PAGESIZE)
    worker = WorkerHandle(0, ours, page)
    thread = Thread(target=run_worker, args=(None, theirs, page))
    thread.start()
    retirements = []
    for batch in range(2):
        if retirements and message:
            break  # the worker ended after the first batch
        worker.send([(2 * batch + place, Completion("a"), one) for place, one in enumerate(examples(2))])
        worker.receive()
        retirements.append(worker.has_retired)
    thread.join(600)
    assert not thread.is_alive() and worker.has_sent_results
    assert retirements == ([False, True] if retires else [False])


def test_an_exception_is_an_error_and_never_a_silent_zero() -> None:
    deeds = ("fail", "exit", "nan", "text", "function", "words")
    with serving("bomb", max_error_rate=1.0) as service:
        assert outcomes(service, "a", *deeds) == ["scored"] + ["error"] * 6
        assert service.metrics()["reward/errors_total"] == 6.0


def test_a_row_that_hangs_whatever_is_said_is_an_error() -> None:
    with serving("bad_row") as service:
        assert outcomes(service, *"aaaa") == ["scored", "error", "scored", "scored"]
        assert service.score([Completion("b")], [examples(2)[1]])[0].outcome == "error"


def test_the_run_stops_above_the_error_rate() -> None:
    with (
        serving("bomb", max_error_rate=0.05) as service,
        pytest.raises(ConfigError, match=r"max_error_rate=0.05.*ZeroDivisionError.*hostile_rewards.py"),
    ):
        service.score([Completion("fail")] * 10, examples(10))


def test_it_stops_as_well_where_the_reward_is_judged_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arithmetic, "reward", lambda task, completion, example: 1 / 0)
    with (
        serving(None, max_error_rate=0.05) as service,
        pytest.raises(ConfigError, match=r"max_error_rate=0.05.*ZeroDivisionError"),
    ):
        service.submit([Completion("1")] * 10, examples(10))


def test_nothing_is_left_of_a_killed_worker_or_of_the_service(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with serving("bomb") as service:
        service.score([Completion("a")], examples(1))
        workers = [worker.pid for worker in service._pool.workers]
        fork_server = service._pool.process.pid
        assert all(is_alive(pid) for pid in workers)
        service.score([Completion(f"child {note}")], examples(1))
        assert not is_alive(int(note.read_text()))
    assert not any(is_alive(pid) for pid in [*workers, fork_server])


def test_async_rewards_and_polling() -> None:
    with serving("delayed_reward") as service:
        scored = service.poll(service.submit([Completion("ok"), Completion("no")], examples(2)), timeout=600.0)
    assert [s.score for s in scored or ()] == [1.0, 0.0]


def test_a_safe_reward_needs_no_process() -> None:
    with serving(None) as service:
        task = service.task.examples("train")
        assert [s.score for s in service.score([Completion(task[0].answer)], [task[0]])] == [1.0]
        assert service._pool is None
        assert service.metrics()["reward_latency/p99_s"] >= 0.0


@pytest.mark.parametrize(("cores", "workers"), [(8, 7), (1, 1), (None, 1)])
def test_one_core_is_left_free(cores: int | None, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    with serving(None, reward_workers=None) as service:
        assert service.num_workers == workers


def test_a_reward_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(ConfigError, match="no_such_module"), serving("no_such_module:f"):
        pass


def kill_workers(service: RewardService, by_their_fork_server: bool) -> None:
    """Kills the two workers, directly or by their fork server, and waits for their end."""
    pool = service._pool
    assert pool is not None
    workers = [worker.pid for worker in pool.workers]
    assert len(workers) == 2
    for pid in [pool.process.pid] if by_their_fork_server else workers:
        os.kill(pid, signal.SIGKILL)
    for pid in workers:
        wait_for_exit(pid)


@pytest.mark.parametrize("by_their_fork_server", [False, True])
def test_the_death_of_idle_workers_harms_no_verdict(by_their_fork_server: bool) -> None:
    with serving("bomb") as service:
        service.score([Completion("a")] * 8, examples(8))
        kill_workers(service, by_their_fork_server)
        scored = service.score([Completion("bb")] * 8, examples(8))
    assert [(s.outcome, s.score) for s in scored] == [("scored", 2.0)] * 8


def busy_workers(service: RewardService, ticket: RewardTicket, count: int) -> list[WorkerHandle]:
    """Waits until the service has `count` workers that all run a verification; returns them."""
    pool = service._pool
    assert pool is not None
    deadline = time.monotonic() + 600.0
    while len(pool.workers) != count or not all(
        is_alive(worker.pid) and worker.running_verification()[0] != IDLE for worker in pool.workers
    ):
        assert time.monotonic() < deadline, f"{count} workers are not busy after 600 s"
        assert service.poll(ticket) is None
    return pool.workers


@pytest.mark.parametrize("by_their_fork_server", [False, True])
def test_the_death_of_busy_workers_harms_no_verdict(by_their_fork_server: bool, tmp_path: Path) -> None:
    """One poll finds all workers dead, each during a verification."""
    with serving("bomb", reward_timeout_s=600.0) as service:
        ticket = service.submit([Completion(f"wait {tmp_path / 'on'}")] * 8, examples(8))
        busy_workers(service, ticket, 2)
        kill_workers(service, by_their_fork_server)
        (tmp_path / "on").touch()
        scored = service.wait(ticket)
    assert [s.outcome for s in scored] == ["scored"] * 8


def test_a_death_with_others_does_not_count_against_a_verification_whose_worker_dies_again(tmp_path: Path) -> None:
    """Two workers die with their fork server; then the single worker is killed."""
    with serving("bomb", reward_timeout_s=600.0) as service:
        ticket = service.submit([Completion(f"wait {tmp_path / 'on'}")] * 2, examples(2))
        busy_workers(service, ticket, 2)
        kill_workers(service, by_their_fork_server=True)
        (alone,) = busy_workers(service, ticket, 1)
        os.kill(alone.pid, signal.SIGKILL)
        (tmp_path / "on").touch()
        scored = service.wait(ticket)
    assert [s.outcome for s in scored] == ["scored"] * 2


def test_a_verification_that_kills_the_fork_server_is_invalid_and_the_service_goes_on() -> None:
    with serving("bomb") as service:
        assert outcomes(service, "a", "fork_server", "bb") == ["scored", "invalid", "scored"]
        assert service.score([Completion("ccc")], examples(1))[0].score == 3.0


def test_an_end_at_the_deadline_leaves_no_blame_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's progress shows a broken deadline once, then the next verification."""
    readings = iter([(0, 999.0)])
    monkeypatch.setattr(WorkerHandle, "running_verification", lambda worker: next(readings, (1, 0.1)))
    with serving("bomb", reward_workers=1, reward_timeout_s=600.0) as service:
        ticket = service.submit([Completion(f"wait {tmp_path / 'on'}"), Completion("slow")], examples(2))
        service.poll(ticket)
        assert service.metrics()["reward/workers_replaced"] == 1.0
        (tmp_path / "on").touch()  # only now, so that the first verification still ran at the first reading
        assert [s.outcome for s in service.wait(ticket)] == ["invalid", "scored"]


def test_an_accident_while_it_is_probed_makes_no_error_of_the_example(tmp_path: Path) -> None:
    prompted = Example(({"role": "user", "content": "?"},), str(tmp_path / "happened"), 0)
    with serving("die_once") as service:
        assert service.score([Completion("die")], [prompted])[0].outcome == "invalid"
    assert (tmp_path / "happened").exists()


def test_a_verdict_after_its_deadline_counts_as_none_though_nobody_looked_meanwhile(tmp_path: Path) -> None:
    with serving("bomb", reward_workers=1, reward_timeout_s=600.0) as service:
        service.score([Completion("a")], examples(1))
        ticket = service.submit([Completion(f"wait {tmp_path / 'on'}")], examples(1))
        assert service._pool is not None
        (worker,) = service._pool.workers
        give_up = time.monotonic() + 600.0
        while worker.running_verification()[0] == IDLE:  # a poll of the service would be a look
            assert time.monotonic() < give_up, "the worker is not busy after 600 s"
            time.sleep(0.01)
        time.sleep(1.5)
        (tmp_path / "on").touch()
        assert worker.connection.poll(600)
        service.env = replace(service.env, reward_timeout_s=1.0)
        assert service.poll(ticket) is None, "the verdict is late, and a probe follows"
        service.env = replace(service.env, reward_timeout_s=600.0)
        assert [s.outcome for s in service.wait(ticket)] == ["invalid"]


@pytest.mark.skipif("rlimits" not in WORKING_LEVELS, reason="no sandbox of this level here")
def test_a_killed_sandbox_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At level rlimits a process of the sandbox outlives the grader, to remove its files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving("bomb") as service:
        assert outcomes(service, *["sandbox"] * 3) == ["invalid"] * 3
        assert list(tmp_path.iterdir()) == []


def test_a_submitted_batch_starts_before_any_poll(tmp_path: Path) -> None:
    with serving("bomb") as service:
        service.score([Completion("a")], examples(1))
        service.submit([Completion(f"note {tmp_path / 'started'}")], examples(1))
        deadline = time.monotonic() + 600.0
        while not (tmp_path / "started").exists():
            assert time.monotonic() < deadline, "nothing has started after 600 s"
            time.sleep(0.02)


def test_a_verification_that_dies_with_the_fork_server_is_not_taken_for_its_killer() -> None:
    with serving("bomb", reward_timeout_s=600.0) as service:
        assert outcomes(service, "fork_server", *["slow"] * 8) == ["invalid"] + ["scored"] * 8
        service.score([Completion("a")] * 8, examples(8))
        assert len(service._pool.workers) == 2


def test_two_verifications_whose_workers_die_together_run_again_alone(tmp_path: Path) -> None:
    """One verification kills both workers whenever the two run together."""
    note = tmp_path / "judging"
    with serving("bomb", reward_timeout_s=600.0) as service:
        ticket = service.submit([Completion(f"along {note}"), Completion(f"beside {note}")], examples(2))
        deadline = time.monotonic() + 600.0
        while (scored := service.poll(ticket, timeout=1.0)) is None:
            assert time.monotonic() < deadline, "they were not distinguished in 600 s"
    assert [s.outcome for s in scored] == ["invalid", "scored"]


def test_a_fork_server_that_died_before_a_worker_was_missed_is_started_anew() -> None:
    """A hanging row leaves one worker; then the fork server and that worker die."""
    with serving("bad_row", reward_timeout_s=1.0) as service:
        assert service.score([Completion("a")], [examples(2)[1]])[0].outcome == "error"
        pool = service._pool
        assert pool is not None
        (worker,) = pool.workers
        os.kill(pool.process.pid, signal.SIGKILL)
        wait_for_exit(worker.pid)
        assert outcomes(service, "a") == ["scored"]


def test_workers_that_end_before_they_begin_are_not_started_for_ever() -> None:
    with (
        serving("bomb", reward_memory_gib=0.01) as service,
        pytest.raises(ConfigError, match=r"env\.reward_memory_gib=0\.01: .* in a row .* raise env\.reward_memory_gib"),
    ):
        service.score([Completion("a")], examples(1))


def test_no_process_outlives_a_killed_trainer_even_if_its_child_holds_the_socket() -> None:
    """A test kills a trainer that has hanging verifications and a forked child."""
    trainer = subprocess.Popen(
        [sys.executable, "-m", "tests.envs.killed_trainer"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    child, *ours = (int(pid) for pid in trainer.stdout.readline().split())
    try:
        assert len(ours) == 3
        assert all(is_alive(pid) for pid in ours)
        trainer.kill()
        trainer.wait()
        for pid in ours:
            wait_for_exit(pid)
        assert is_alive(child)
    finally:
        os.kill(child, signal.SIGKILL)
        trainer.stdout.close()


def test_what_a_reward_prints_stays_off_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    with serving("bomb") as service:
        service.score([Completion("print")], examples(1))
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "said a reward" in captured.err
