"""`run=replay`: what a run computed is computed again to the bit, from the ledger, and under another objective."""

import json
import shutil
from pathlib import Path

import orjson
import pytest

import grpo_async
from config.errors import ConfigError
from config.policy import PolicyConfig
from monitoring.ledger_storage import ledger_files, lines_of, read_records
from monitoring.metrics import without_clocks
from run.replay import computed_again, replay, start_before
from run.replayed_objective import configs, preset, preset_changes
from tests.recorded_runs import LORA, SETS, STEPS, recorded_run
from tests.scripts import configured, ended, rows

DR_GRPO = (
    *("policy.name=dr_grpo", "policy.scale=none", "policy.aggregation=constant_length"),
    *("policy.count_empty=true", "policy.kl_coef=0"),
)
OPD = ("policy.kl_coef=0", "policy.distill_coef=1")
SHOWN = "policy.teacher_prompt='{answer} {prompt}'"

ROUNDING = 2e-5
"""Of a log-prob near 10, whose parts are added up in another order: 20 of its last places in float32."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four iterations of four steps, adapters with dropout, a checkpoint after every second one."""
    checkpoints = ("train.checkpoint_frequency=2", "train_model.lora.dropout=0.1")
    return recorded_run(tmp_path_factory.mktemp("run"), *STEPS, *LORA, *checkpoints, SETS)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_same_bits(run: Path, iteration: int, step: int, scratch: Path, started: str | None) -> None:
    """Every step from a checkpoint (None: the initial weights) to this one has the recorded metrics."""
    start = start_before(run, iteration)
    assert (None if start is None else start.path.name) == started
    recorded = {row["optimizer_step"]: without_clocks(row) for row in rows(run) if "reward/mean" in row}
    config = configs(run, [])[0]
    steps = list(computed_again(run, config, start, (iteration, step), scratch, keep=False))
    assert steps[-1].number == step
    assert steps[0].number == (1 if start is None else start.place[1] + 1)
    for one in steps:
        row = recorded[one.number]
        computed = without_clocks(one.metrics(int(row["policy_version"])))
        assert computed["loss/objective"] == row["loss/objective"]
        shared = computed.keys() & row.keys()
        assert {name: computed[name] for name in shared} == {name: row[name] for name in shared}
        assert len(shared) > 30


def test_from_a_checkpoint(run: Path, tmp_path: Path) -> None:
    before = contents(run)
    assert_same_bits(run, 4, 15, tmp_path, "checkpoint_000002")
    assert "bit-identical" in replay(run, 16, [])
    assert contents(run) == before


def test_from_the_initial_weights(run: Path, tmp_path: Path) -> None:
    """Also where the run has kept no checkpoint: what was drawn for adapters and dropout is drawn again."""
    assert_same_bits(run, 2, 7, tmp_path, None)
    bare = shutil.copytree(run, tmp_path / "bare", ignore=shutil.ignore_patterns("checkpoints"))
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


def test_a_teacher_in_the_place_of_rewards(run: Path) -> None:
    """A replay takes another objective, with a model that the run did not have."""
    told = replay(run, 3, ["policy=opd", f"ref_model.name={configured().model.name}"])
    assert "policy.distill_coef: 0.0 -> 1.0" in told and "kl/teacher" in told
    with pytest.raises(ConfigError, match=r"policy.distill_coef=1.0 .*without a teacher"):
        replay(run, 3, ["policy=opd"])


def test_a_teacher_that_is_shown_the_answer(tmp_path: Path) -> None:
    """The ledger holds the prompt that the teacher saw.

    An objective whose reference is shown nothing leaves it there.
    """
    run = recorded_run(tmp_path / "run", *OPD, SHOWN)
    for record in read_records(run):
        more = len(record["answer"]) + 1
        assert len(record["teacher_prompt_tokens"]) == len(record["prompt_tokens"]) + more
    assert_same_bits(run, 4, 4, tmp_path, None)
    assert "kl/ref" in replay(
        run, 4, ["policy.kl_coef=0.1", "policy.distill_coef=0", "policy.teacher_prompt=null"]
    )
    with pytest.raises(
        ConfigError, match=r"those of policy\.teacher_prompt='\{answer\} \{prompt\}' alone: leave"
    ):
        replay(run, 4, ["policy.teacher_prompt='{prompt} {answer}'"])


@pytest.mark.parametrize(
    "settings",
    [("train.packing=false",), (*LORA, "train_model.lora.quantization=nf4")],
    ids=["whole rows", "nf4"],
)
def test_other_ways_to_compute(settings: tuple[str, ...], tmp_path: Path) -> None:
    if "train_model.lora.quantization=nf4" in settings:
        pytest.importorskip("bitsandbytes")
    run = recorded_run(tmp_path / "run", *settings, "train.checkpoint_frequency=2")
    assert_same_bits(run, 4, 4, tmp_path, "checkpoint_000002")


@pytest.mark.usefixtures("local_ray")
def test_several_ranks_agree_to_rounding(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", "train_model.num_devices=2", "train.checkpoint_frequency=2")
    (computed,) = (
        one.metrics(3)
        for one in computed_again(
            run, configs(run, [])[0], start_before(run, 4), (4, 4), tmp_path, keep=False
        )
        if one.number == 4
    )
    recorded = next(row for row in rows(run) if row["optimizer_step"] == 4)
    for name in ("loss/objective", "grad_norm", "entropy"):
        assert computed[name] == pytest.approx(recorded[name], rel=1e-4, abs=1e-6), name
    # Of log-probs it is the rounding itself, of which processors have each their own.
    assert max(computed["mismatch/max"], recorded["mismatch/max"]) < ROUNDING


def test_beside_generation_with_old_tokens(tmp_path: Path) -> None:
    ahead = ("train.max_policy_age=2", "train.weight_update_frequency=3", "train.checkpoint_frequency=4")
    run = recorded_run(tmp_path / "run", "train.epochs=2", *ahead, script=grpo_async)
    assert max(row["age/max"] for row in rows(run)) > 0
    total = rows(run)[-1]["optimizer_step"]
    assert_same_bits(run, total // 2, total, tmp_path, None)


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


def test_another_objective_is_what_a_run_of_it_has(run: Path, tmp_path: Path) -> None:
    """The first step of two runs is on the same weights and completions."""
    settings = ("train_model.lora.dropout=0.1", "policy.clip_epsilon_low=0.05")
    other = recorded_run(tmp_path / "other", *STEPS, *LORA, *settings, SETS, *DR_GRPO)
    text = replay(run, 1, ["policy=dr_grpo", "policy.clip_epsilon_low=0.05"])
    assert "policy.scale: std_unbiased -> none" in text
    theirs = next(row for row in rows(other) if row.get("optimizer_step") == 1)
    ours = next(row for row in rows(run) if row.get("optimizer_step") == 1)
    for name in ("loss/objective", "grad_norm", "advantage/std", "reward/mean"):
        line = next(line for line in text.splitlines() if line.startswith(f"{name} "))
        assert line.split()[1:3] == [f"{ours[name]:.9g}", f"{theirs[name]:.9g}"]
    assert ours["loss/objective"] != theirs["loss/objective"]


def test_the_recorded_objective_as_another_one_changes_nothing(run: Path) -> None:
    """In the middle of an iteration: the weights before it, and those before the step, come back with their draws."""
    text = replay(run, 15, ["policy.kl_coef=0.001"])
    table = text.split("difference\n")[1].split("\n\n")[0]
    assert all(len(line.split()) == 3 for line in table.splitlines())
    assert "the same objective" in text and "bit-identical" in text
    text = replay(run, 15, ["policy.kl_coef=0.5"])
    assert "policy.kl_coef: 0.001 -> 0.5" in text
    assert next(line for line in text.splitlines() if line.startswith("loss/kl")).split()[3].startswith("+")
    assert all(len(line) <= 80 for line in text.splitlines()[1:])


def test_it_says_where_numbers_part(run: Path, tmp_path: Path) -> None:
    """One reward of the ledger is another one than the run had."""
    changed = shutil.copytree(run, tmp_path / "changed", ignore=shutil.ignore_patterns("checkpoints"))
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
        (3, ["policy=nonsense"], "policy=nonsense: no such preset; known: .*dapo"),
        (3, [*OPD, SHOWN], "holds no prompts of a teacher: set .*=null"),
    ],
)
def test_what_cannot_be_replayed(run: Path, step: int | None, typed: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        replay(run, step, typed)


def test_a_run_without_a_ledger(run: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(run, tmp_path / "bare", ignore=shutil.ignore_patterns("rollouts"))
    with pytest.raises(ConfigError, match=r"there is no rollouts/ .* logging\.rollouts_gb=0"):
        replay(bare, 3, [])


def test_a_preset_keeps_what_the_run_set_by_itself(run: Path) -> None:
    """Of `policy=dapo policy.clip_epsilon_low=0.3` comes what `policy=dr_grpo policy.clip_epsilon_low=0.3` would be."""
    recorded = PolicyConfig(**preset("dapo") | {"clip_epsilon_low": 0.3})
    changes = dict(change.split("=", 1) for change in preset_changes(recorded, "dr_grpo"))
    assert changes["policy.clip_epsilon_low"] == "0.3"
    assert (changes["policy.clip_epsilon_high"], changes["policy.scale"]) == ("0.2", '"none"')
    config, changed = configs(run, ["policy=dapo", "+policy.dual_clip=3"])
    assert changed is not None and changed.policy.filter_range == [0.01, 0.99]
    assert (changed.policy.dual_clip, config.policy.dual_clip) == (3, None)
    assert configs(run, ["run=replay", "step=3", "run_dir=x", "logging.progress=false"])[1] is None


def test_on_the_command_line_it_leaves_no_folder(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "new"
    words = ["grpo.py", "run=replay", "step=2", f"run_dir={run}", f"hydra.run.dir={folder}"]
    process = ended([*words, "policy.clip_epsilon_low=0.1"])
    assert process.returncode == 0, process.stderr
    assert "policy.clip_epsilon_low: 0.2 -> 0.1" in process.stdout
    assert not folder.exists()
    assert json.loads((run / "summary.json").read_text())["outcome"] == "finished"
