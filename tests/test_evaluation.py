"""Tests evaluation beside training and alone, and that training is unchanged."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo
import grpo_async
from config.run_folder.checkpoints import checkpoint_path
from config.schema.errors import ConfigError
from envs.task import make_task
from tests.checkpoint_helpers import saved_model
from tests.log_capture import LogCapture
from tests.recorded_runs import EVERY_SECOND, recorded_run
from tests.recorded_runs import SETS as HELD_OUT
from tests.script_runner import compose_run_config, find_callback, read_metrics, without_timings
from torchgrpo.evaluation.eval_sets import load_eval_sets
from torchgrpo.run.build_rollout import make_prompts
from torchgrpo.run.callbacks import EvaluationCallback
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.run.overlapped_run import OverlappedRun
from torchgrpo.training.model_loading import load_tokenizer

SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=64")
SETS = "eval.sets={held_out:{dataset:arithmetic,n:4,limit:20},greedy:{dataset:arithmetic,temperature:0,limit:10}}"


def write_rows(path: Path, questions: range) -> str:
    lines = [json.dumps({"prompt": f"{n} + {n} =", "answer": str(2 * n)}) for n in questions]
    path.write_text("\n".join(lines))
    return str(path)


def test_prompts_that_are_trained_on_are_said_of_every_set(tmp_path: Path, log_capture: LogCapture) -> None:
    trained_file, other = (write_rows(tmp_path / "a.jsonl", range(20)), write_rows(tmp_path / "b.jsonl", range(15, 25)))
    apart = write_rows(tmp_path / "c.jsonl", range(30, 40))
    sets = f"mixed:{{dataset:jsonl,data_files:{other}}},apart:{{dataset:jsonl,data_files:{apart}}}"
    trained_set = f"asked:{{dataset:jsonl,data_files:{trained_file},split:train}}"
    config = compose_run_config(
        "env.dataset=jsonl", f"env.data_files={trained_file}", f"eval.sets={{{sets},{trained_set}}}"
    )
    tokenizer = load_tokenizer(config.model)
    prompts = make_prompts(config, make_task(config.env), tokenizer, None)
    load_eval_sets(config, tokenizer, None, prompts.source.examples)
    (warning,) = [line for line in log_capture.messages if "trained on" in line]
    assert warning.startswith("eval.sets.mixed: 5 of the 10 prompts are trained on")


def optimizer_rows(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in without_timings(read_metrics(run_dir)) if "reward/mean" in row]


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run_dir) if "reward/mean" not in row]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def last_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return saved_model(checkpoint_path(run_dir, 4))


def test_training_has_the_same_bits_with_and_without(lockstep_run: Path, tmp_path: Path) -> None:
    plain = recorded_run(tmp_path, *EVERY_SECOND[2:])
    assert optimizer_rows(lockstep_run) == optimizer_rows(plain)
    after = last_weights(lockstep_run)
    for name, tensor in last_weights(plain).items():
        assert torch.equal(tensor, after[name]), name
    found = evaluations(lockstep_run)
    assert [(row["iteration"], row["optimizer_step"]) for row in found] == [(0, 0), (2, 2), (4, 4)]
    assert [row["policy_version"] for row in found] == [0, 2, 4]
    assert {f"eval/held_out/pass@{k}" for k in range(1, 5)} <= set(found[0])
    assert found[-1]["eval/held_out/pass@1"] != found[0]["eval/held_out/pass@1"]
    summary = json.loads((lockstep_run / "summary.json").read_text())
    assert summary["evaluation"]["eval/held_out/pass@1"] == found[-1]["eval/held_out/pass@1"]
    assert summary["first_reward"] == optimizer_rows(plain)[0]["reward/mean"]


def test_every_completion_is_written(lockstep_run: Path) -> None:
    folder = lockstep_run / "eval/held_out"
    assert sorted(path.name for path in folder.iterdir()) == [f"iteration_{i}.jsonl" for i in (0, 2, 4)]
    written = lines(folder / "iteration_0.jsonl")
    assert set(Counter(line["row"] for line in written).values()) == {4}
    assert len(written) == 80
    row = evaluations(lockstep_run)[0]
    assert row["eval/held_out/pass@1"] == pytest.approx(sum(line["correct"] for line in written) / 80)
    for line in written:
        a, b = line["prompt"].removeprefix("<bos><user>").removesuffix("=<assistant>").split("+")
        assert line["correct"] == (line["completion"] == str(int(a) + int(b)))


def test_evaluation_beside_running_generation(tmp_path: Path) -> None:
    """Training at age 0 is equal with and without evaluation.

    With groups in flight every set is still complete.
    """
    plain, settings, ahead = (tmp_path / name for name in ("plain", "evaluated", "ahead"))
    run_job(compose_run_config(*SMALL, "train.max_policy_age=0"), plain, grpo_async.train, OverlappedRun)
    run_job(
        compose_run_config(*SMALL, "train.max_policy_age=0", SETS, "eval.frequency=2"),
        settings,
        grpo_async.train,
        OverlappedRun,
    )
    for ours, theirs in zip(optimizer_rows(settings), optimizer_rows(plain), strict=True):
        for name, value in ours.items():
            assert theirs[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    beside = "train.max_policy_age=2", "train.weight_update_frequency=3", SETS, "eval.frequency=1"
    run_job(compose_run_config(*SMALL, *beside), ahead, grpo_async.train, OverlappedRun)
    found = evaluations(ahead)
    assert [row["iteration"] for row in found] == list(range(5))
    assert found[-1]["policy_version"] == 2  # a push for the last evaluation, though none was due
    for iteration in range(5):
        assert len(lines(ahead / f"eval/held_out/iteration_{iteration}.jsonl")) == 80


def test_an_evaluation_alone_equals_that_before_the_first_iteration(
    lockstep_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = ("ref_model.name=no/such/folder", "ref_model.num_devices=2", "policy.kl_coef=0.1")
    run_job(compose_run_config("run=eval", HELD_OUT, *teacher), tmp_path, grpo.train, LockstepRun)  # without teacher
    assert "held_out: 20 problems, 4 completions each" in capsys.readouterr().out
    ours, theirs = (
        sorted(lines(folder / "eval/held_out/iteration_0.jsonl"), key=lambda line: (line["row"], line["sample"]))
        for folder in (lockstep_run, tmp_path)
    )
    assert ours == theirs
    assert evaluations(tmp_path)[0]["eval/held_out/pass@1"] > 0
    assert not (tmp_path / "checkpoints").exists()


def test_a_stop_gives_the_evaluation_up(tmp_path: Path) -> None:
    def train(working: OverlappedRun) -> None:
        evaluation = find_callback(working, EvaluationCallback).evaluation
        run_one = evaluation.run

        def stopping(iteration: int, is_stopped: Callable[[], bool]) -> Any:
            working.stop.is_requested = iteration == 2
            return run_one(iteration, is_stopped)

        evaluation.run = stopping  # type: ignore[method-assign]
        grpo_async.train(working)

    run_job(compose_run_config(*SMALL, SETS, "eval.frequency=2"), tmp_path, train, OverlappedRun)
    assert [row["iteration"] for row in evaluations(tmp_path)] == [0]
    assert not (tmp_path / "eval/held_out/iteration_2.jsonl").exists()
    assert (tmp_path / "checkpoints/checkpoint_000002").exists()
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "interrupted"


AIME = Path(__file__).resolve().parents[1] / ".." / "shared" / "data" / "aime2024.jsonl"


@pytest.mark.skipif(not AIME.exists(), reason="the AIME file is not here")
def test_aime_is_thirty_problems_however_often_the_file_repeats_them(tmp_path: Path) -> None:
    repeated = tmp_path / "aime.jsonl"
    repeated.write_text(AIME.read_text() * 8)
    override = f"eval.sets={{aime:{{dataset:aime,data_files:{repeated},n:2,max_tokens:4}}}}"
    run_job(compose_run_config("run=eval", override, "env.max_prompt_tokens=2040"), tmp_path, grpo.train, LockstepRun)
    assert evaluations(tmp_path)[0]["eval/aime/problems"] == 30
    assert len(lines(tmp_path / "eval/aime/iteration_0.jsonl")) == 60


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("{a:{dataset:nonsense}}", r"eval\.sets\.a: .*nonsense.*choose one of"),
        ("{a:{dataset:jsonl,data_files:nowhere.jsonl}}", r"eval\.sets\.a: .*nowhere\.jsonl: no such file"),
        ("{a:{dataset:arithmetic,options:{max_operand:0}}}", r"eval\.sets\.a: .*max_operand=0"),
    ],
)
def test_a_set_that_cannot_be_read_is_named_before_anything_is_loaded(
    override: str, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=expected):
        run_job(compose_run_config(f"eval.sets={override}"), tmp_path, grpo.train, LockstepRun)


def test_a_resumed_run_keeps_its_evaluations_and_repeats_none(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    settings = (*SMALL[:2], SETS, "eval.frequency=1", "train.checkpoint_frequency=1")
    run_job(compose_run_config(*settings, "train.total_dialog_turns=32"), first, grpo.train, LockstepRun)
    checkpoint = first / "checkpoints/checkpoint_000001"
    run_job(
        compose_run_config(*settings, "train.total_dialog_turns=48", f"train.resume={checkpoint}"),
        second,
        grpo.train,
        LockstepRun,
    )
    assert [row["iteration"] for row in evaluations(second)] == [0, 1, 2, 3]
