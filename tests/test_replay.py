"""`run=replay`: what a run computed is computed again to the bit, from the ledger."""

import json
import shutil
from pathlib import Path

import orjson
import pytest

from config.schema.errors import ConfigError
from tests.recorded_runs import LORA, STEPS, recorded_run
from tests.scripts import called, configured, rows
from torchgrpo.monitoring.ledger_storage import ledger_files, lines_of, read_records
from torchgrpo.monitoring.metrics import without_clocks
from torchgrpo.run.jobs.replay import computed_again, replay, replayed_config, start_before

OPD = ("policy.kl_coef=0", "policy.distill_coef=1")
SHOWN = "policy.teacher_prompt='{answer} {prompt}'"

ROUNDING = 2e-5
"""Of a log-prob near 10, whose parts are added up in another order: 20 of its last places in float32."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_same_bits(run: Path, iteration: int, step: int, scratch: Path, started: str | None) -> None:
    """Every step from a checkpoint (None: the initial weights) to this one has the recorded metrics."""
    start = start_before(run, iteration)
    assert (None if start is None else start.path.name) == started
    recorded = {row["optimizer_step"]: without_clocks(row) for row in rows(run) if "reward/mean" in row}
    config = replayed_config(run, [])
    steps = list(computed_again(run, config, start, (iteration, step), scratch))
    assert steps[-1].number == step
    assert steps[0].number == (1 if start is None else start.place[1] + 1)
    for one in steps:
        row = recorded[one.number]
        computed = without_clocks(one.metrics(int(row["policy_version"])))
        assert computed["loss/objective"] == row["loss/objective"]
        shared = computed.keys() & row.keys()
        assert {name: computed[name] for name in shared} == {name: row[name] for name in shared}
        assert len(shared) > 30


def test_from_a_checkpoint(lora_run: Path, tmp_path: Path) -> None:
    before = contents(lora_run)
    assert_same_bits(lora_run, 4, 15, tmp_path, "checkpoint_000002")
    assert "bit-identical" in replay(lora_run, 16, [])
    assert contents(lora_run) == before


def test_from_the_initial_weights(lora_run: Path, tmp_path: Path) -> None:
    """Also where the run has kept no checkpoint: what was drawn for adapters and dropout is drawn again."""
    assert_same_bits(lora_run, 2, 7, tmp_path, None)
    bare = shutil.copytree(lora_run, tmp_path / "bare", ignore=shutil.ignore_patterns("checkpoints"))
    assert_same_bits(bare, 4, 16, tmp_path, None)


def test_full_weights_with_a_reference_and_replaced_groups(tmp_path: Path) -> None:
    sampling = ("policy.dynamic_batching=true", "policy.filter_range=[0.01,0.99]", "policy.filter_attempts=3")
    trainer = ("policy.kl_coef=0.1", "policy.old_log_prob=trainer", "env.oversample=8")
    run = recorded_run(tmp_path / "run", *STEPS, *sampling, *trainer)
    assert any(record["fate"] == "replaced" for record in read_records(run))
    assert any(not one["chosen"] for record in read_records(run) for one in record["completions"])
    assert_same_bits(run, 4, 16, tmp_path, None)


def test_with_a_teacher(tmp_path: Path) -> None:
    """The teacher is the policy as it began, from which rewards lead away.

    Every token has an advantage of its own.
    """
    teacher = f"ref_model.name={configured().model.name}"
    coefs = ("policy.reward_coef=0.5", "policy.distill_coef=0.2")
    run = recorded_run(tmp_path / "run", *STEPS, "policy=opd", teacher, *coefs)
    kept = [one["advantage"] for record in read_records(run) for one in record["completions"]]
    assert all(isinstance(each, list) for each in kept) and any(len(set(each)) > 1 for each in kept)
    assert rows(run)[-1]["kl/teacher"] > 0
    assert_same_bits(run, 4, 16, tmp_path, None)
    told = replay(run, 16, [])
    assert "bit-identical" in told and "advantage " not in told


def test_a_teacher_that_is_shown_the_answer(tmp_path: Path) -> None:
    """The ledger holds the prompt that the teacher saw."""
    run = recorded_run(tmp_path / "run", *OPD, SHOWN)
    for record in read_records(run):
        more = len(record["answer"]) + 1
        assert len(record["teacher_prompt_tokens"]) == len(record["prompt_tokens"]) + more
    assert_same_bits(run, 4, 4, tmp_path, None)


@pytest.mark.parametrize(
    "settings",
    [
        ("train.packing=false",),
        pytest.param((*LORA, "train_model.lora.quantization=nf4"), marks=pytest.mark.long),
    ],
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
        one.metrics(3)
        for one in computed_again(
            ranked_run, replayed_config(ranked_run, []), start_before(ranked_run, 4), (4, 4), tmp_path
        )
        if one.number == 4
    )
    recorded = next(row for row in rows(ranked_run) if row["optimizer_step"] == 4)
    for name in ("loss/objective", "grad_norm", "entropy"):
        assert computed[name] == pytest.approx(recorded[name], rel=1e-4, abs=1e-6), name
    # Of log-probs it is the rounding itself, of which processors have each their own.
    assert max(computed["mismatch/max"], recorded["mismatch/max"]) < ROUNDING


def test_beside_generation_with_old_tokens(overlapped_run: Path, tmp_path: Path) -> None:
    assert max(row.get("age/max", 0) for row in rows(overlapped_run)) > 0
    total = rows(overlapped_run)[-1]["optimizer_step"]
    assert_same_bits(overlapped_run, total // 2, total, tmp_path, None)


def test_a_resumed_run(tmp_path: Path) -> None:
    """Its second part begins from the checkpoint of the first, which another folder holds."""
    first = recorded_run(tmp_path / "first", *STEPS)
    more = (f"train.resume={first}", "train.total_dialog_turns=96")
    second = recorded_run(tmp_path / "second", *STEPS, *more)
    shutil.rmtree(second / "checkpoints")
    assert_same_bits(second, 6, 23, tmp_path, "checkpoint_000004")
    shutil.rmtree(first / "checkpoints")
    with pytest.raises(ConfigError, match="does not hold iteration 1, and there is no checkpoint after it"):
        replay(second, 23, [])


def test_it_says_where_numbers_part(lora_run: Path, tmp_path: Path) -> None:
    """One reward of the ledger is another one than the run had."""
    changed = shutil.copytree(lora_run, tmp_path / "changed", ignore=shutil.ignore_patterns("checkpoints"))
    files = [file for file in ledger_files(changed) if not file.evaluated]
    records = [orjson.loads(line) for file in files for line in lines_of(file.path)]
    touched = next(record for record in records if record["optimizer_steps"] == [2, 3])
    touched["completions"][1]["verdict"]["score"] += 0.5
    for path in (changed / "rollouts").glob("train_*"):
        path.unlink()
    lines = b"".join(orjson.dumps(record) + b"\n" for record in records)
    (changed / "rollouts/train_000001.jsonl").write_bytes(lines)
    text = replay(changed, 2, [])
    assert "numbers part at step 2: reward/mean was" in text
    assert f"group {touched['group_id']}, completion 1: advantage" in text
    assert text.count(f"group {touched['group_id']}, completion") == 4
    assert all(len(line) <= 80 for line in text.splitlines()[1:-6])
    assert "numbers part at step 2" in replay(changed, 3, [])


@pytest.mark.parametrize(
    ("step", "typed", "expected"),
    [
        (None, [], "needs step=N"),
        (17, [], "step=17: the ledger of .* holds no such optimizer step, but those from 1 to 16"),
        (
            3,
            ["optimizer.lr=1"],
            "run=replay optimizer.lr=1: the step is computed with the settings of its run",
        ),
        (3, ["policy=dr_grpo"], "run=replay policy=dr_grpo: .*What may differ: device, model.name"),
    ],
)
def test_what_cannot_be_replayed(lora_run: Path, step: int | None, typed: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        replay(lora_run, step, typed)


def test_a_run_without_a_ledger(lora_run: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(lora_run, tmp_path / "bare", ignore=shutil.ignore_patterns("rollouts"))
    with pytest.raises(ConfigError, match=r"there is no rollouts/ .* logging\.rollouts_gb=0"):
        replay(bare, 3, [])


def test_on_the_command_line_it_leaves_no_folder(lora_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "new"
    words = ["run=replay", "step=2", f"run_dir={lora_run}", f"hydra.run.dir={folder}"]
    process = called("grpo.py", *words, "device=cpu", "logging.progress=false")
    assert process.returncode == 0, process.stderr
    assert "bit-identical" in process.stdout
    assert not folder.exists()
    assert json.loads((lora_run / "summary.json").read_text())["outcome"] == "finished"
