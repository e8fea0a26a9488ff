"""Every rule of the doctor has a run that triggers it, and real runs that learn trigger none.

REAL are runs of a few seconds, some with an engine that has a FAULT. CHANGED is for what depends on how busy a machine
is: the rows that a real run recorded, in which the numbers that are named are changed and nothing else.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import grpo
import grpo_async
from config.saved_settings import saved_config
from monitoring.doctor import diagnose
from monitoring.doctor.doctor import RULES, Doctor
from monitoring.events import read_events
from rollout.engines.running_decoder import RunningDecoder
from rollout.engines.transformers_engine import TransformersEngine
from rollout.generate import Generation
from run.overlapped import Overlapped
from tests.doctor.running import run
from tests.scripts import rows
from training.split_learner import SplitLearner

SMALL = ("env.num_envs=8", "env.repeats=8")
FEW = ("env.num_envs=2", "env.repeats=2")
BABBLING = ("inference_model.temperature=5", "inference_model.max_tokens=48")
DAPO = ("policy=dapo", "policy.overlong_cache=8")
QUICK_TO_CHANGE = (*SMALL, "optimizer.lr=1e-3")
REWARD = "env.reward=tests.doctor.rewards:"
STILL_STEPS = 52


def steps(count: int) -> str:
    """The length of a run with the batches of `SMALL`."""
    return f"train.total_dialog_turns={64 * count}"


HELD_OUT = ("eval.sets={held_out:{dataset:arithmetic,n:4,limit:48,reward:null}}", "eval.frequency=20")
REAL: dict[str, tuple[ModuleType, tuple[str, ...], set[str]]] = {
    "paid for form": (
        grpo,
        (*QUICK_TO_CHANGE, f"{REWARD}form_alone", steps(36), *HELD_OUT),
        {"part_hacked", "evaluation_falls", "kl_far", "zero_variance"},
    ),
    "paid for length": (
        grpo,
        (*QUICK_TO_CHANGE, f"{REWARD}length_alone", steps(34)),
        {"end_token_vanished", "truncation"},
    ),
    "paid for brevity": (
        grpo,
        (*QUICK_TO_CHANGE, f"{REWARD}brevity_alone", steps(36)),
        {"length_collapse", "entropy_collapse"},
    ),
    "a reward that fails": (
        grpo,
        (*SMALL, f"{REWARD}failing_at_times", steps(3), "env.max_error_rate=1.0"),
        {"reward_errors"},
    ),
    "answers cut": (
        grpo,
        (*SMALL, "inference_model.max_tokens=1", steps(6)),
        {"truncation", "nothing_taught"},
    ),
    "cold": (grpo, (*SMALL, "inference_model.temperature=0.01", steps(8)), {"duplicated_completions"}),
    "steps too large": (
        grpo,
        (*SMALL, "optimizer.lr=1e-1", "optimizer.warmup_steps=0", "train.epochs=4", steps(2)),
        {"low_ess", "clip_share", "kl_far"},
    ),
    "one row many times": (
        grpo,
        (*SMALL, "env.dataset=jsonl", "env.data_files=ROWS", steps(16)),
        {"duplicated_prompts", "favoured_prompt"},
    ),
    "standing still": (
        grpo,
        (*SMALL, "optimizer.lr=1e-12", steps(STILL_STEPS), "train.seed=3"),
        {"reward_flat"},
    ),
    "hot": (
        grpo,
        (*SMALL, *BABBLING, steps(4)),
        {"control_tokens"},
    ),
    "below zero": (
        grpo,
        (*SMALL, *BABBLING, f"{REWARD}always_minus_three", steps(2)),
        {"invalid_unpunished"},
    ),
    "a judge that gives up in time": (
        grpo,
        (*SMALL, f"{REWARD}gives_up_in_time", "optimizer.lr=1e-12", steps(22)),
        {"invalid_growth"},
    ),
    "a reward that crashes": (
        grpo,
        (*SMALL, f"{REWARD}ends_its_worker", steps(7), "env.max_error_rate=1.0"),
        {"workers_replaced"},
    ),
    "a slow reward": (
        grpo,
        (*FEW, f"{REWARD}slow", "env.reward_timeout_s=0.36", "train.total_dialog_turns=16"),
        {"slow_rewards"},
    ),
    "judged slowly": (
        grpo_async,
        ("env.num_envs=1", "env.repeats=2", "train.max_policy_age=0", "train.total_dialog_turns=24"),
        {"idle_both"},
    ),
    "many epochs": (grpo_async, (*SMALL, "train.epochs=16", steps(11)), {"idle_engines"}),
    "a slow engine": (
        grpo_async,
        ("env.num_envs=4", "env.repeats=4", *BABBLING, "train.total_dialog_turns=176"),
        {"idle_learner"},
    ),
    "an engine that computes something else": (
        grpo,
        (*SMALL, steps(3), "train.on_mismatch=say"),
        {"engine_trainer_kl", "engine_trainer_gap"},
    ),
    "old tokens": (
        grpo_async,
        (
            *SMALL,
            "optimizer.lr=3e-2",
            "optimizer.warmup_steps=0",
            "train.epochs=2",
            "train.max_policy_age=4",
            steps(6),
        ),
        {"low_ess_by_age", "clip_share"},
    ),
    "numbers that overflow": (
        grpo,
        (*SMALL, f"{REWARD}overflowing", "policy=dr_grpo", steps(3)),
        {"nonfinite"},
    ),
    "answers into the limit": (
        grpo,
        (*SMALL, *DAPO, "policy.dynamic_batching=false", "inference_model.temperature=5", steps(6)),
        {"overlong", "nothing_taught"},
    ),
    "most groups refused": (
        grpo,
        (*SMALL, *DAPO, "inference_model.temperature=0.05", steps(6)),
        {"many_replaced", "duplicated_completions"},
    ),
    "noise": (
        grpo,
        (*QUICK_TO_CHANGE, "policy.entropy_coef=1.0", steps(34)),
        {"length_growth", "kl_growth", "end_token_vanished", "nothing_taught"},
    ),
    "paid for the question": (
        grpo,
        (*SMALL, "optimizer.lr=5e-4", f"{REWARD}echo", "env.dataset=jsonl", "env.data_files=ONE", steps(40)),
        {"repeats_question"},
    ),
    "nothing left": (
        grpo,
        (
            *FEW,
            "env.repeats=8",
            "env.options.max_operand=3",
            "optimizer.lr=5e-4",
            "train.total_dialog_turns=3200",
        ),
        {"nothing_left"},
    ),
    "far from where it drew": (
        grpo,
        (
            *SMALL,
            "policy=dr_grpo",
            "optimizer.lr=3e-2",
            "optimizer.warmup_steps=0",
            "train.epochs=8",
            steps(2),
        ),
        {"ratio_far", "low_ess"},
    ),
}


def _slow(patch: pytest.MonkeyPatch) -> None:
    """A token takes an eighth of the learner's last step, so that a busy machine, where both are slow, is no excuse."""
    token, update = TransformersEngine.step, SplitLearner.step
    last = [0.1]

    def timed(*arguments: Any) -> Any:
        began = time.monotonic()
        done = update(*arguments)
        last[0] = time.monotonic() - began
        return done

    def slow(engine: TransformersEngine, timeout: float) -> Any:
        time.sleep(last[0] / 8)
        return token(engine, timeout)

    patch.setattr(SplitLearner, "step", timed)
    patch.setattr(TransformersEngine, "step", slow)


def _judged_slowly(patch: pytest.MonkeyPatch) -> None:
    """A verdict takes five times as long as the learner was busy between its last two batches, and nothing is begun
    before it is done with one: so both wait for verdicts on a busy machine, too."""
    take, judged = Overlapped.take, Generation.judged
    busy, since = [0.1], [time.monotonic()]

    def timed(schedule: Overlapped) -> Any:
        busy[0] = time.monotonic() - since[0]
        groups = take(schedule)
        since[0] = time.monotonic()
        return groups

    async def slow(*arguments: Any) -> Any:
        await asyncio.sleep(5 * busy[0])
        return await judged(*arguments)

    patch.setattr(Overlapped, "take", timed)
    patch.setattr(Generation, "judged", slow)


def _biased(patch: pytest.MonkeyPatch) -> None:
    """What it draws has other probabilities than it says; what it is asked to score is right."""
    extend = RunningDecoder._extend
    patch.setattr(
        RunningDecoder,
        "_extend",
        lambda engine, row, token, log_prob: extend(engine, row, token, log_prob - 0.3),
    )


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a slow engine": _slow,
    "judged slowly": _judged_slowly,
    "an engine that computes something else": _biased,
}

Change = float | Callable[[int], float]
CHANGED: dict[str, dict[str, Change]] = {
    "stale_drops": {"groups/dropped_stale": lambda step: 10.0 * step},
}
"""By rule, what is changed in the rows of "standing still"."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run of `REAL`, which is made when it is first asked for."""
    home = tmp_path_factory.mktemp("runs")
    data, one = home / "rows.jsonl", home / "one.jsonl"
    one.write_text(json.dumps({"prompt": "11111111", "answer": "1"}) + "\n")
    asked = [(f"{a}+{a + 3}=", str(2 * a + 3)) for a in range(10, 40)] + [("10+20=", "30")] * 20
    data.write_text("".join(json.dumps({"prompt": each, "answer": gold}) + "\n" for each, gold in asked))

    def folder(name: str) -> Path:
        made = home / name.replace(" ", "_")
        if not made.exists():
            script, overrides, _ = REAL[name]
            words = [word.replace("ROWS", str(data)).replace("ONE", str(one)) for word in overrides]
            with pytest.MonkeyPatch.context() as patch:
                FAULTS.get(name, lambda patch: None)(patch)
                run(made, *words, script=script)
        return made

    return folder


def test_every_rule_has_a_run_that_triggers_it() -> None:
    assert set().union(*[rules for _, _, rules in REAL.values()], CHANGED) == {rule.name for rule in RULES}


@pytest.mark.parametrize("name", REAL)
def test_a_real_run_triggers_its_rules(name: str, folders: Callable[[str], Path]) -> None:
    found = {finding.rule for finding in diagnose(folders(name))}
    assert found >= REAL[name][2]


@pytest.mark.parametrize("name", REAL)
def test_what_was_said_live_is_what_is_found_afterwards(name: str, folders: Callable[[str], Path]) -> None:
    said = [(event["rule"], event["optimizer_step"], event["text"]) for event in _alarms(folders(name))]
    found = [(finding.rule, finding.first_step, finding.line) for finding in diagnose(folders(name))]
    assert sorted(said) == sorted(found) and said


def _alarms(folder: Path) -> Iterator[dict[str, Any]]:
    return (event for event in read_events(folder) if event["event"] == "alarm")


@pytest.mark.parametrize("rule", CHANGED)
def test_changed_rows_of_a_real_run_trigger_the_rule(rule: str, folders: Callable[[str], Path]) -> None:
    folder = folders("standing still")
    before, after = Doctor(saved_config(folder)), Doctor(saved_config(folder))
    for row in rows(folder):
        step = row["optimizer_step"]
        change = {name: to(step) if callable(to) else to for name, to in CHANGED[rule].items()}
        before.see(row)
        after.see(row | change)
    assert rule in after.findings and rule not in before.findings


@pytest.mark.parametrize("script", [grpo, grpo_async], ids=["lockstep", "overlapped"])
def test_a_run_that_learns_is_no_reason_to_worry(script: ModuleType, tmp_path: Path) -> None:
    """The quickstart with 50 of its 120 steps, evaluated: nothing but where the time went is said of it."""
    run(tmp_path, "train.total_dialog_turns=12800", *HELD_OUT, script=script)
    assert len([row for row in rows(tmp_path) if "reward/mean" in row]) == 50
    assert [finding for finding in diagnose(tmp_path) if finding.severity != "info"] == []


def test_an_overlapped_run_with_several_epochs_is_one_at_each_of_its_steps(tmp_path: Path) -> None:
    """Only the row of a batch's first epoch says how long engines waited; none of them is one of a lockstep run."""
    run(tmp_path, *SMALL, "train.epochs=3", steps(3), script=grpo_async)
    doctor = Doctor(saved_config(tmp_path))
    doctor.remember(rows(tmp_path))
    assert sum("idle/engines" in row for row in rows(tmp_path)) == 3 and len(rows(tmp_path)) == 9
    assert doctor.history.overlapped and not doctor.history.on_policy
