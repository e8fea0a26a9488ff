"""grpo_async.py killed again and again: every prompt of the epoch is trained on exactly once."""

import multiprocessing
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from config.run_folder.checkpoints import newest_checkpoint
from envs.prompts import PromptSource
from envs.task import make_task
from tests.generating import draw_from
from tests.killed_runs import CURRICULUM, one_epoch, train_noting_prompts
from torchgrpo.training.checkpoint import load_checkpoint


def finished_after_kills(
    stale: str, more: tuple[str, ...], run_dir: Path, ledger: Path, kills: int, chance: random.Random
) -> int:
    """Kill a run again and again, somewhat after a random event (training begins, an optimizer step, a checkpoint),
    then let it end. How often it was resumed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.killed_preload"])
    resumed = 0
    while True:
        events, deadline = context.Semaphore(0), time.monotonic() + 300
        resumed += newest_checkpoint(run_dir) is not None
        process = context.Process(target=train_noting_prompts, args=(stale, more, run_dir, ledger, events))
        process.start()
        for _ in range(1 + chance.randint(0, 3)):
            while not events.acquire(timeout=0.2) and process.exitcode is None:
                assert time.monotonic() < deadline, "nothing happened in the run for 300 s"
        process.join(chance.uniform(0.0, 0.2) if kills else 120)
        kills -= 1
        if process.exitcode is not None:
            assert process.exitcode == 0
            return resumed
        process.kill()
        process.join()


def prompts_of(ledger: Path) -> list[str]:
    """Prompts of the last attempt at every step: a kill rolls back to the checkpoint."""
    last = dict(line.split("\t") for line in ledger.read_text().splitlines())
    assert len(last) == 11
    return [prompt for line in last.values() for prompt in line.split()]


@pytest.mark.parametrize("stale", ["wait", pytest.param("drop", marks=pytest.mark.long)])
def test_after_random_kills_every_prompt_is_trained_on_exactly_once(stale: str, tmp_path: Path) -> None:
    """10 SIGKILLs of real processes in each mode, every one followed by train.resume=auto.

    What was trained on and what the last checkpoint hands back are together exactly what was drawn.
    """
    chance = random.Random(stale)
    run_dir, ledger = tmp_path / "run", tmp_path / "ledger"
    resumed = finished_after_kills(stale, (), run_dir, ledger, 10, chance)
    assert resumed >= 3
    path = newest_checkpoint(run_dir)
    assert path is not None
    left = load_checkpoint(path)["prompts"]
    examples = make_task(one_epoch(stale, run_dir).env).examples("train")
    source = PromptSource(examples, seed=0, keep=lambda example: True)
    drawn = draw_from(source, sum(left["source"]["drawn"].values()))
    trained = prompts_of(ledger)
    handed_back = [fields["messages"][-1]["content"] for fields in left["returned"]]
    assert Counter(trained) + Counter(handed_back) == Counter(e.messages[-1]["content"] for e in drawn)
    if stale == "wait":
        assert len(trained) == len(set(trained)) == 44


@pytest.mark.long
def test_with_a_curriculum_kills_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """Which prompt is next depends on the verdicts, so no list says it; but as many were trained on and are handed back
    as were drawn, and what is handed back was neither judged nor trained on since it was drawn, or waits ready."""
    run_dir, ledger = tmp_path / "run", tmp_path / "ledger"
    resumed = finished_after_kills("wait", CURRICULUM, run_dir, ledger, 6, random.Random(1))
    assert resumed >= 2
    path = newest_checkpoint(run_dir)
    assert path is not None
    left = load_checkpoint(path)["prompts"]
    trained, source = prompts_of(ledger), left["source"]
    assert source["drawn"][""] == len(trained) + len(left["returned"])
    config = one_epoch("wait", run_dir, *CURRICULUM).env
    prompts = PromptSource(
        make_task(config).examples("train"), 0, lambda example: True, curriculum=config.curriculum
    )
    prompts.load_state_dict(source)
    member = prompts.members[""]
    flying = Counter({row: known.flying for row, known in member.asked.items() if known.flying})
    returned = Counter(member.places[fields["row"]] for fields in left["returned"])
    assert flying <= returned
    asked = {prompts.examples[row].messages[-1]["content"] for row in member.asked}
    assert asked == set(trained) | {fields["messages"][-1]["content"] for fields in left["returned"]}
    assert member.levels.newest > 0 and member.num_solved > 0
