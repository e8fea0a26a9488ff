"""Tests that `run=replay` recomputes optimizer steps from the ledger, to the bit."""

import json
import shutil
from pathlib import Path

import orjson
import pytest

import grpo_async
from config.schema.errors import ConfigError
from envs.example import Example
from envs.group import SampledCompletion, SequenceStart, Turn
from tests.recorded_runs import LORA, STEPS, recorded_run
from tests.script_runner import call_script, compose_run_config, read_metrics
from torchgrpo.monitoring.ledger_storage import ledger_files, read_lines, read_records
from torchgrpo.monitoring.metrics import without_timings
from torchgrpo.rollout.engines.interface import Request
from torchgrpo.rollout.group_rollout import GroupRollout
from torchgrpo.run.jobs.replay import checkpoint_before, replay_report, replay_steps, replayed_config

OPD = ("policy.kl_coef=0", "policy.distill_coef=1")
TEACHER_PROMPT = "policy.teacher_prompt='{answer} {prompt}'"

ROUNDING = 2e-5
"""Rounding error of a log-prob near 10 after summation in another order: 20 float32 ulps."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_same_bits(run: Path, iteration: int, step: int, scratch: Path, start_name: str | None) -> None:
    """Checks that recomputed steps have the recorded metrics, up to this step.

    start_name: the checkpoint to start from; None: the initial weights.
    """
    start = checkpoint_before(run, iteration)
    assert (None if start is None else start.path.name) == start_name
    recorded = {row["optimizer_step"]: without_timings(row) for row in read_metrics(run) if "reward/mean" in row}
    config = replayed_config(run, [])
    steps = list(replay_steps(run, config, start, (iteration, step), scratch))
    assert steps[-1].number == step
    assert steps[0].number == (1 if start is None else start.counters[1] + 1)
    for replayed in steps:
        row = recorded[replayed.number]
        computed = without_timings(replayed.metrics(int(row["policy_version"])))
        assert computed["loss/objective"] == row["loss/objective"]
        shared_names = computed.keys() & row.keys()
        assert {name: computed[name] for name in shared_names} == {name: row[name] for name in shared_names}
        assert len(shared_names) > 30


def test_from_a_checkpoint(lora_run: Path, tmp_path: Path) -> None:
    before = contents(lora_run)
    assert_same_bits(lora_run, 4, 15, tmp_path, "checkpoint_000002")
    assert "bit-identical" in replay_report(lora_run, 16, [])
    assert contents(lora_run) == before


def test_from_the_initial_weights(lora_run: Path, tmp_path: Path) -> None:
    """Steps are recomputed from the initial weights, with the same random numbers.

    Random initial adapters and dropout are the same as in the run.
    """
    assert_same_bits(lora_run, 2, 7, tmp_path, None)
    bare = shutil.copytree(lora_run, tmp_path / "bare", ignore=shutil.ignore_patterns("checkpoints"))
    assert_same_bits(bare, 4, 16, tmp_path, None)


def test_full_weights_with_a_reference_and_replaced_groups(tmp_path: Path) -> None:
    sampling = ("policy.dynamic_batching=true", "policy.filter_range=[0.01,0.99]", "policy.filter_attempts=3")
    trainer = ("policy.kl_coef=0.1", "policy.old_log_prob=trainer", "env.oversample=8")
    run = recorded_run(tmp_path / "run", *STEPS, *sampling, *trainer)
    assert any(record["fate"] == "replaced" for record in read_records(run))
    assert any(not completion["chosen"] for record in read_records(run) for completion in record["completions"])
    assert_same_bits(run, 4, 16, tmp_path, None)


def test_with_a_teacher(tmp_path: Path) -> None:
    """The teacher is the policy as it began, from which rewards lead away.

    Every token has an advantage of its own.
    """
    teacher = f"ref_model.name={compose_run_config().model.name}"
    coefs = ("policy.reward_coef=0.5", "policy.distill_coef=0.2")
    run = recorded_run(tmp_path / "run", *STEPS, "policy=opd", teacher, *coefs)
    advantages = [completion["advantage"] for record in read_records(run) for completion in record["completions"]]
    assert all(isinstance(each, list) for each in advantages) and any(len(set(each)) > 1 for each in advantages)
    assert read_metrics(run)[-1]["kl/teacher"] > 0
    assert_same_bits(run, 4, 16, tmp_path, None)
    report = replay_report(run, 16, [])
    assert "bit-identical" in report and "advantage " not in report


def test_a_teacher_that_is_shown_the_answer(tmp_path: Path) -> None:
    """The ledger holds the teacher's prompt."""
    run = recorded_run(tmp_path / "run", *OPD, TEACHER_PROMPT)
    for record in read_records(run):
        more = len(record["answer"]) + 1
        assert len(record["teacher_prompt_tokens"]) == len(record["prompt_tokens"]) + more
    assert_same_bits(run, 4, 4, tmp_path, None)


def test_completions_of_several_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits every completion of at least two tokens into two sequences."""
    generate = GroupRollout.generate

    async def generate_two_sequences(
        group_rollout: GroupRollout, request: Request, example: Example
    ) -> list[SampledCompletion]:
        completions = await generate(group_rollout, request, example)
        for one in completions:
            if len(one.token_ids) > 1:
                second = SequenceStart(1, (*request.prompt, one.token_ids[0]))
                one.sequence_starts = [SequenceStart(0, request.prompt), second]
            one.turns = [Turn({"role": "assistant", "content": "sum"}, 0, len(one.token_ids), reward=0.5)]
        return completions

    monkeypatch.setattr(GroupRollout, "generate", generate_two_sequences)
    run = recorded_run(tmp_path / "run", *STEPS, script=grpo_async)
    records = list(read_records(run))
    assert any(len(completion["sequence_starts"]) == 2 for record in records for completion in record["completions"])
    rows = [row for row in read_metrics(run) if "reward/mean" in row]
    assert all(1 < row["agent/sequences"] <= 2 and row["reward/turn/1"] == 0.5 for row in rows)
    assert_same_bits(run, 8, 16, tmp_path, None)
    report = replay_report(run, 16, [])
    assert "bit-identical" in report and "advantage " not in report


@pytest.mark.parametrize(
    "settings",
    [("train.packing=false",), pytest.param((*LORA, "train_model.lora.quantization=nf4"), marks=pytest.mark.long)],
    ids=["whole rows", "nf4"],
)
def test_other_ways_to_compute(settings: tuple[str, ...], tmp_path: Path) -> None:
    if "train_model.lora.quantization=nf4" in settings:
        pytest.importorskip("bitsandbytes")
    run = recorded_run(tmp_path / "run", *settings, "train.checkpoint_frequency=2")
    assert_same_bits(run, 4, 4, tmp_path, "checkpoint_000002")


@pytest.mark.long
def test_several_ranks_agree_to_rounding(ranked_run: Path, tmp_path: Path) -> None:
    (computed,) = (
        replayed.metrics(3)
        for replayed in replay_steps(
            ranked_run, replayed_config(ranked_run, []), checkpoint_before(ranked_run, 4), (4, 4), tmp_path
        )
        if replayed.number == 4
    )
    recorded = next(row for row in read_metrics(ranked_run) if row["optimizer_step"] == 4)
    for name in ("loss/objective", "grad_norm", "entropy"):
        assert computed[name] == pytest.approx(recorded[name], rel=1e-4, abs=1e-6), name
    # The difference of log-probs is rounding error, which depends on the processor.
    assert max(computed["logprob_diff/max"], recorded["logprob_diff/max"]) < ROUNDING


def test_beside_generation_with_old_tokens(overlapped_run: Path, tmp_path: Path) -> None:
    assert max(row.get("age/max", 0) for row in read_metrics(overlapped_run)) > 0
    total = read_metrics(overlapped_run)[-1]["optimizer_step"]
    assert_same_bits(overlapped_run, total // 2, total, tmp_path, None)


def test_a_resumed_run(tmp_path: Path) -> None:
    """A resumed run is replayed from a checkpoint in the first run's folder."""
    first = recorded_run(tmp_path / "first", *STEPS)
    more = (f"train.resume={first}", "train.total_dialog_turns=96")
    second = recorded_run(tmp_path / "second", *STEPS, *more)
    shutil.rmtree(second / "checkpoints")
    assert_same_bits(second, 6, 23, tmp_path, "checkpoint_000004")
    shutil.rmtree(first / "checkpoints")
    with pytest.raises(ConfigError, match="does not hold iteration 1, and no later checkpoint exists"):
        replay_report(second, 23, [])


def test_the_first_differing_step_is_named(lora_run: Path, tmp_path: Path) -> None:
    """A changed reward in the ledger is found at the first step that used it."""
    changed_run = shutil.copytree(lora_run, tmp_path / "changed", ignore=shutil.ignore_patterns("checkpoints"))
    files = [file for file in ledger_files(changed_run) if not file.eval_set]
    records = [orjson.loads(line) for file in files for line in read_lines(file.path)]
    changed_record = next(record for record in records if record["optimizer_steps"] == [2, 3])
    changed_record["completions"][1]["verdict"]["score"] += 0.5
    for path in (changed_run / "rollouts").glob("train_*"):
        path.unlink()
    lines = b"".join(orjson.dumps(record) + b"\n" for record in records)
    (changed_run / "rollouts/train_000001.jsonl").write_bytes(lines)
    text = replay_report(changed_run, 2, [])
    assert "metrics differ from step 2 on: reward/mean was" in text
    assert f"group {changed_record['group_id']}, completion 1: advantage" in text
    assert text.count(f"group {changed_record['group_id']}, completion") == 4
    assert all(len(line) <= 80 for line in text.splitlines()[1:-6])
    assert "metrics differ from step 2 on" in replay_report(changed_run, 3, [])


@pytest.mark.parametrize(
    ("step", "overrides", "expected"),
    [
        (None, [], "needs replay.step=N"),
        (17, [], "replay.step=17: the ledger of .* holds no such optimizer step, but those from 1 to 16"),
        (3, ["optimizer.lr=1"], "run=replay optimizer.lr=1: the step is computed with the settings of its run"),
        (3, ["policy=dr_grpo"], "run=replay policy=dr_grpo: .*Settings that may differ: device, model.name"),
    ],
)
def test_what_cannot_be_replayed(lora_run: Path, step: int | None, overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        replay_report(lora_run, step, overrides)


def test_a_run_without_a_ledger(lora_run: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(lora_run, tmp_path / "bare", ignore=shutil.ignore_patterns("rollouts"))
    with pytest.raises(ConfigError, match=r"the folder has no rollouts/.* logging\.rollouts_gb=0"):
        replay_report(bare, 3, [])


def test_on_the_command_line_it_leaves_no_folder(lora_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "new"
    words = ["run=replay", "replay.step=2", f"run_dir={lora_run}", f"hydra.run.dir={folder}"]
    process = call_script("grpo.py", *words, "device=cpu", "logging.progress=false")
    assert process.returncode == 0, process.stderr
    assert "bit-identical" in process.stdout
    assert not folder.exists()
    assert json.loads((lora_run / "summary.json").read_text())["outcome"] == "finished"
