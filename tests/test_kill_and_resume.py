"""Tests that repeated kills of grpo_async.py lose and repeat no prompt."""

import itertools
import multiprocessing
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from config.run_folder.checkpoints import newest_checkpoint
from envs.prompts import PromptSource
from envs.task import make_task
from tests.group_collection import next_examples
from tests.killed_runs import CURRICULUM, EPISODES, one_epoch, train_noting_prompts
from torchgrpo.training.checkpoint import load_checkpoint


def run_with_kills(
    stale: str, overrides: tuple[str, ...], run_dir: Path, ledger: Path, kills: int, random_source: random.Random
) -> tuple[int, int]:
    """Kills a run after random events until it finishes.

    Returns the number of resumes, and of kills. Events: training begins, an optimizer step, the start of writing a
    checkpoint. The last kill waits for a complete checkpoint, so that the run resumes at least once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.killed_preload"])
    resumes = done_kills = 0
    while True:
        events, deadline = context.Semaphore(0), time.monotonic() + 300
        resumes += newest_checkpoint(run_dir) is not None
        process = context.Process(target=train_noting_prompts, args=(stale, overrides, run_dir, ledger, events))
        process.start()
        for _ in range(1 + random_source.randint(0, 3)):
            while not events.acquire(timeout=0.2) and process.exitcode is None:
                assert time.monotonic() < deadline, "nothing happened in the run for 300 s"
        while done_kills == kills - 1 and newest_checkpoint(run_dir) is None and process.exitcode is None:
            assert time.monotonic() < deadline, "no checkpoint after 300 s"
            time.sleep(0.05)
        process.join(random_source.uniform(0.0, 0.2) if done_kills < kills else 600)
        if process.exitcode is not None:
            assert process.exitcode == 0
            return resumes, done_kills
        process.kill()
        process.join()
        assert done_kills < kills, "the run did not end in 600 s"
        done_kills += 1


def prompts_of(ledger: Path) -> list[str]:
    """Returns the prompts of the last attempt at every step.

    A kill rolls back to the checkpoint.
    """
    last = dict(line.split("\t") for line in ledger.read_text().splitlines())
    assert len(last) == 11
    return [prompt for line in last.values() for prompt in line.split()]


@pytest.mark.parametrize("stale", ["wait", pytest.param("drop", marks=pytest.mark.long)])
def test_after_random_kills_every_prompt_is_trained_on_exactly_once(stale: str, tmp_path: Path) -> None:
    """After up to 10 SIGKILLs a run has trained on every prompt once."""
    random_source, num_resumes = random.Random(stale), 0
    for number in itertools.count():
        run_dir, ledger = tmp_path / f"run_{number}", tmp_path / f"ledger_{number}"
        num_resumes += run_with_kills(stale, (), run_dir, ledger, 10, random_source)[0]
        check_every_prompt_is_trained_on_once(stale, (), run_dir, ledger)
        if num_resumes >= 3:
            break


def check_every_prompt_is_trained_on_once(stale: str, overrides: tuple[str, ...], run_dir: Path, ledger: Path) -> None:
    """Asserts that prompts trained on and prompts returned are the sampled prompts."""
    path = newest_checkpoint(run_dir)
    assert path is not None
    saved_prompts = load_checkpoint(path)["prompts"]
    examples = make_task(one_epoch(stale, run_dir, *overrides).env).examples("train")
    source = PromptSource(examples, seed=0, fits_limit=lambda example: True)
    sampled = next_examples(source, sum(saved_prompts["source"]["drawn"].values()))
    trained_prompts = prompts_of(ledger)
    handed_back = [fields["messages"][-1]["content"] for fields in saved_prompts["returned"]]
    assert Counter(trained_prompts) + Counter(handed_back) == Counter(e.messages[-1]["content"] for e in sampled)
    if stale == "wait":
        assert len(trained_prompts) == len(set(trained_prompts)) == 44


@pytest.mark.parametrize("kills", [5, pytest.param(40, marks=pytest.mark.long)])
def test_kills_with_episodes_in_flight_lose_and_repeat_nothing(kills: int, tmp_path: Path) -> None:
    """Runs start until there were so many SIGKILLs and resumes, which leave unfinished episodes."""
    random_source, num_killed, num_resumes = random.Random(kills), 0, 0
    events_file = tmp_path / "episodes"
    overrides = (*EPISODES, f"env.environment_options.log_file={events_file}")
    for number in range(4 * kills):
        run_dir, ledger = tmp_path / f"run_{number}", tmp_path / f"ledger_{number}"
        kills_left = max(1, kills - num_killed)
        resumes, done_kills = run_with_kills("wait", overrides, run_dir, ledger, kills_left, random_source)
        check_every_prompt_is_trained_on_once("wait", overrides, run_dir, ledger)
        num_killed, num_resumes = num_killed + done_kills, num_resumes + resumes
        events = Counter(events_file.read_text().splitlines())
        if num_killed >= kills and num_resumes >= kills // 4 and events["begin"] > events["end"]:
            break
    assert num_killed >= kills and num_resumes >= kills // 4
    assert events["begin"] > events["end"] >= 2 * 44


@pytest.mark.long
def test_with_a_curriculum_kills_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """With a curriculum, a run with up to 6 kills loses and repeats nothing."""
    random_source, num_resumes = random.Random(1), 0
    for number in itertools.count():
        run_dir, ledger = tmp_path / f"run_{number}", tmp_path / f"ledger_{number}"
        num_resumes += run_with_kills("wait", CURRICULUM, run_dir, ledger, 6, random_source)[0]
        check_prompts_of_a_curriculum(run_dir, ledger)
        if num_resumes >= 2:
            break


def check_prompts_of_a_curriculum(run_dir: Path, ledger: Path) -> None:
    """Asserts that prompts trained on and prompts returned add up to the prompts sampled.

    The next prompt depends on verdicts, so there is no fixed list. Every returned prompt was neither scored nor trained
    on since it was sampled, or waits in the buffer.
    """
    path = newest_checkpoint(run_dir)
    assert path is not None
    saved_prompts = load_checkpoint(path)["prompts"]
    trained_prompts, source = prompts_of(ledger), saved_prompts["source"]
    assert source["drawn"][""] == len(trained_prompts) + len(saved_prompts["returned"])
    config = one_epoch("wait", run_dir, *CURRICULUM).env
    prompts = PromptSource(make_task(config).examples("train"), 0, lambda example: True, curriculum=config.curriculum)
    prompts.load_state_dict(source)
    member = prompts.members[""]
    in_flight = Counter(
        {row: stats.groups_in_flight for row, stats in member.prompt_stats.items() if stats.groups_in_flight}
    )
    returned = Counter(member.row_indices[fields["row"]] for fields in saved_prompts["returned"])
    assert in_flight <= returned
    asked_prompts = {prompts.examples[row].messages[-1]["content"] for row in member.prompt_stats}
    assert asked_prompts == set(trained_prompts) | {
        fields["messages"][-1]["content"] for fields in saved_prompts["returned"]
    }
    assert member.levels.newest_level > 0 and member.num_solved > 0
