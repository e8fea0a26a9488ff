"""The overlapped script, whole: equal to lockstep at age 0, bounded above it, nothing lost by a kill."""

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo
import grpo_async
from config.schema import Config
from envs.task import Completion, Example, Reward
from grpo_utils import Parts, build, run
from tests.scripts import configured, finish, rows, start, wait_for, without_clocks

SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=160")


def test_at_age_zero_the_metrics_are_those_of_lockstep(tmp_path: Path) -> None:
    lockstep, overlapped = tmp_path / "lockstep", tmp_path / "overlapped"
    for folder in (lockstep, overlapped):
        folder.mkdir()
    run(configured(*SMALL), lockstep, grpo.train)
    run(configured(*SMALL, "train.max_policy_age=0"), overlapped, grpo_async.train)
    pairs = list(zip(without_clocks(rows(lockstep)), without_clocks(rows(overlapped)), strict=True))
    assert len(pairs) == 10
    for ours, theirs in pairs:
        for name, value in ours.items():
            assert theirs[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("stale", ["wait", "drop"])
@pytest.mark.parametrize(("max_age", "frequency"), [(1, 1), (2, 3)])
def test_no_token_is_older_than_the_bound(stale: str, max_age: int, frequency: int, tmp_path: Path) -> None:
    config = configured(
        *SMALL,
        f"train.max_policy_age={max_age}",
        f"train.stale_groups={stale}",
        f"train.weight_update_frequency={frequency}",
    )
    oldest: list[int] = []

    def train(config: Config, parts: Parts) -> None:
        step = parts.learner.step

        def checked(batch: Any) -> Any:
            ages = parts.weights.version - batch["policy_version"][batch["mask"]]
            oldest.append(int(ages.max()))
            return step(batch)

        parts.learner.step = checked
        grpo_async.train(config, parts)

    run(config, tmp_path, train)
    assert len(oldest) == 10
    assert max(oldest) <= max_age
    assert rows(tmp_path)[-1]["policy_version"] == 9 // frequency


def test_an_error_in_the_rollout_thread_is_raised_in_the_trainer(tmp_path: Path) -> None:
    parts = build(configured(*SMALL), tmp_path)

    def broken(completion: Completion, example: Example) -> Reward:
        raise ZeroDivisionError("a bug in my reward")

    parts.rollouts.env._step = broken
    with pytest.raises(Exception, match=r"bug in my reward|takes|positional"):
        grpo_async.train(parts.config, parts)
    parts.close("failed")


def test_a_silent_engine_is_named_when_the_deadline_passes(tmp_path: Path) -> None:
    parts = build(configured(*SMALL, "train.wait_timeout_s=0.5"), tmp_path)
    parts.rollouts.policy.engine.step = lambda timeout: time.sleep(0.05) or []  # an engine that never finishes
    with pytest.raises(TimeoutError, match=r"the learner waited .* for the engines: it has 0 of 4 groups, 4 are in"):
        grpo_async.train(parts.config, parts)
    parts.close("failed")


def test_ctrl_c_ends_in_seconds_with_a_checkpoint(tmp_path: Path) -> None:
    process = start("grpo_async.py", tmp_path, *SMALL[:2], "train.total_dialog_turns=1600000", "train.max_policy_age=2")
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists(), process)
    process.send_signal(signal.SIGINT)
    output = finish(process, timeout=60)
    assert process.returncode == 0, output
    assert "interrupted" in output
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def _epoch(run_dir: Path, ledger: Path, resume: bool, total: int) -> None:
    """Train on an epoch of 45 prompts, noting every prompt of every optimizer step beside its number."""
    torch.set_num_threads(1)
    run_dir.mkdir(exist_ok=True)
    config = configured(
        "env.num_envs=6",
        "env.repeats=2",
        f"train.total_dialog_turns={total}",
        "train.dialog_turns_per_batch=6",
        "env.options.max_operand=6",
        "train.checkpoint_frequency=1",
        "train.max_policy_age=2",
        "policy.kl_coef=0",
        *(["train.resume=auto"] if resume else []),
    )

    def train(config: Config, parts: Parts) -> None:
        step = parts.learner.step

        def noted(batch: Any) -> Any:
            report = step(batch)
            prompts = parts.rollouts.env.prompt_texts(batch[:: config.env.repeats])
            with ledger.open("a") as file:
                file.write(f"{parts.learner.optimizer_steps}\t{' '.join(prompts)}\n")
            return report

        parts.learner.step = noted
        grpo_async.train(config, parts)

    run(config, run_dir, train)


def trained(ledger: Path) -> list[str]:
    """The prompts of the last attempt at every optimizer step: a kill rolls back to the checkpoint."""
    last = dict(line.split("\t") for line in ledger.read_text().splitlines())
    return [prompt for line in last.values() for prompt in line.split()]


def test_after_random_kills_every_prompt_is_trained_on_exactly_once(tmp_path: Path) -> None:
    """20 SIGKILLs of real processes, each followed by train.resume=auto."""
    context = multiprocessing.get_context("fork")
    chance = random.Random(0)
    run_dir, ledger = tmp_path / "run", tmp_path / "ledger"
    total = 2 * 3 * 14  # 14 of the 15 batches of an epoch of 45 prompts, 3 prompts each
    kills = 0
    while kills < 20:
        process = context.Process(target=_epoch, args=(run_dir, ledger, kills > 0, total))
        process.start()
        process.join(chance.uniform(0.2, 1.6))
        if process.exitcode is None and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            kills += 1
            continue
        assert process.exitcode == 0
        assert_exactly_once(ledger)
        run_dir, ledger = tmp_path / f"run{kills}", tmp_path / f"ledger{kills}"
    process = context.Process(target=_epoch, args=(run_dir, ledger, True, total))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert_exactly_once(ledger)


def assert_exactly_once(ledger: Path) -> None:
    counts = Counter(trained(ledger))
    assert set(counts.values()) == {1}
    assert len(counts) == 42
