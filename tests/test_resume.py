"""Tests which settings a resumed run may change, and the search of `auto`."""

import re
import shutil
import signal
import subprocess
import sys
from contextlib import chdir
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

import grpo
import grpo_async
from config.run_folder.checkpoints import checkpoint_path, newest_checkpoint
from config.schema.errors import ConfigError, RunError
from tests import recorded_runs
from tests.script_runner import (
    QUICK,
    ROOT,
    call_script,
    compose_run_config,
    read_metrics,
    run_script,
    start_python,
    start_script,
    wait_for_output,
    wait_until,
    without_timings,
)
from tests.tiny_models import resized_quickstart
from torchgrpo.plan.disk import checkpoint_bytes
from torchgrpo.plan.model_shape import find_shape
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.run.overlapped_run import OverlappedRun
from torchgrpo.run.resume import (
    ABSENT,
    AUTO_IGNORED_SETTINGS,
    SettingChange,
    changed_settings,
    find_changes,
    find_checkpoint,
    is_under,
    sibling_runs,
)
from torchgrpo.training.checkpoint import LEARNER, Checkpoint, load_checkpoint
from torchgrpo.training.checkpoint_tensors import saved_tensors

SMALL = (*recorded_runs.SMALL, *recorded_runs.EVERY_SECOND)
"""Settings of the `lockstep_run`."""


@pytest.fixture
def halfway(lockstep_run: Path, tmp_path: Path) -> Path:
    """Returns a copy of a run that was killed after the second iteration."""
    folder = shutil.copytree(lockstep_run, tmp_path / "halfway")
    shutil.rmtree(checkpoint_path(folder, 4))
    return folder


def rates(folder: Path) -> list[float]:
    return [row["lr"] for row in read_metrics(folder) if "lr" in row]


def test_nothing_changed_says_nothing_and_is_the_same_run(
    lockstep_run: Path, halfway: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_job(compose_run_config(*SMALL, "train.resume=auto"), halfway, grpo.train, LockstepRun)
    assert "applied" not in capsys.readouterr().err
    assert without_timings(read_metrics(halfway)) == without_timings(read_metrics(lockstep_run))


def test_a_changed_learning_rate_and_schedule_take_effect_and_are_said(
    lockstep_run: Path, halfway: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ("optimizer.lr=1e-3", "optimizer.weight_decay=0.1", "optimizer.betas=[0.8,0.9]", "policy.kl_coef=0")
    schedule = ("optimizer.schedule=linear", "optimizer.warmup_steps=0", "optimizer.min_lr_fraction=0")
    param_groups: list[dict[str, Any]] = []

    def train(working: LockstepRun) -> None:
        learner = working.learner
        param_groups.extend({**group, "params": []} for group in learner.worker.optimizer.param_groups)
        grpo.train(working)

    settings = (*SMALL, *overrides, *schedule, "train.total_dialog_turns=128", "train.resume=auto")
    run_job(compose_run_config(*settings), halfway, train, LockstepRun)
    output = capsys.readouterr().err
    for line in ("optimizer.lr: 0.003 -> 0.001 applied", "optimizer.warmup_steps: 5 -> 0 applied"):
        assert line in output
    assert sorted({group["weight_decay"] for group in param_groups}) == [0.0, 0.1]
    assert all(tuple(group["betas"]) == (0.8, 0.9) for group in param_groups)
    assert rates(halfway)[:2] == rates(lockstep_run)[:2]
    assert rates(halfway)[2:] == pytest.approx([1e-3 * (1 - step / 8) for step in range(2, 8)])
    saved_config = load_checkpoint(checkpoint_path(halfway, 8))["config"]
    assert saved_config["optimizer"]["lr"] == 1e-3 and saved_config["policy"]["kl_coef"] == 0
    run_job(compose_run_config(*settings), halfway, grpo.train, LockstepRun)
    assert "applied" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.seed=1", "train.seed: 0 -> 1"),
        ("env.repeats=8", "env.repeats: 4 -> 8"),
        ("env.num_envs=8", "completions of an iteration (env.num_envs, train.dialog_turns_per_batch): 16 -> 32"),
        ("train.optim_batch_size=8", "completions of an optimizer step (train.optim_batch_size): 16 -> 8"),
        ("train.epochs=2", "train.epochs: 1 -> 2"),
        ("env.options.max_operand=9", "env.options.max_operand: "),
        ("env.system_prompt=Add.", "env.system_prompt: "),
        ("model.dtype=bfloat16", "model.dtype: float32 -> bfloat16"),
        ("optimizer=muon_adamw", "optimizer.name: adamw -> muon_adamw"),
        ("train_model.lora.enabled=true", "train_model.lora.enabled: False -> True"),
        ("optimizer.group_lr={model.*:1e-5}", "optimizer.group_lr.model.*: absent -> 1e-05"),
        (
            "train.total_dialog_turns=16",
            "has done 2 iterations, and train.total_dialog_turns=16 amounts to 1 iterations: raise",
        ),
    ],
)
def test_what_a_run_began_with_is_refused_by_name_with_a_way_out(override: str, expected: str, halfway: Path) -> None:
    before = {path.name: path.read_bytes() for path in halfway.iterdir() if path.is_file()}
    with pytest.raises(ConfigError) as refused:
        run_job(compose_run_config(*SMALL, override, "train.resume=auto"), halfway, grpo.train, LockstepRun)
    text = str(refused.value)
    assert expected in text
    assert "checkpoint_000002" in text
    assert "model.name=" in text or "raise train.total_dialog_turns" in text
    assert {path.name: path.read_bytes() for path in halfway.iterdir() if path.is_file()} == before


def test_what_a_refused_run_would_have_saved_is_not_saved(tmp_path: Path) -> None:
    """Saved settings change only when a new setting takes effect."""
    folder = tmp_path / "run"

    def run_small(*overrides: str) -> tuple[int, str, float]:
        process = run_script("grpo.py", folder, *SMALL, *overrides)
        composed = yaml.safe_load((folder / ".hydra/config.yaml").read_text())
        return process.returncode, process.output, composed["optimizer"]["lr"]

    assert run_small("optimizer.lr=1e-4")[::2] == (0, 1e-4)
    code, output, rate = run_small("optimizer.lr=1e-3", "train.seed=1", "train.resume=auto")
    assert (code, rate) == (2, 1e-4)
    assert "error: train.resume=" in output and "Traceback" not in output
    code, output, rate = run_small("optimizer.lr=1e-3", "train.resume=auto", "train.total_dialog_turns=80")
    assert (code, rate) == (0, 1e-3)
    assert "optimizer.lr: 0.0001 -> 0.001 applied" in output
    assert (folder / ".hydra/overrides.yaml").read_text().count("optimizer.lr=1e-3") == 1


def test_batches_between_two_pushes_must_not_change(tmp_path: Path) -> None:
    run_job(compose_run_config(*SMALL), tmp_path, grpo_async.train, OverlappedRun)
    new_config = compose_run_config(*SMALL, "train.weight_update_frequency=2", "train.resume=auto")
    with pytest.raises(ConfigError, match=r"batches between two pushes \(train\.weight_update_frequency\): 1 -> 2"):
        run_job(new_config, tmp_path, grpo_async.train, OverlappedRun)


@pytest.mark.parametrize("source", ["the run", "checkpoints"])
def test_the_folder_of_a_run_is_its_newest_checkpoint(
    source: str, lockstep_run: Path, halfway: Path, tmp_path: Path
) -> None:
    folder = halfway if source == "the run" else halfway / "checkpoints"
    run_job(compose_run_config(*SMALL, f"train.resume={folder}"), tmp_path / "new", grpo.train, LockstepRun)
    assert without_timings(read_metrics(tmp_path / "new")) == without_timings(read_metrics(lockstep_run))


@pytest.mark.parametrize("file", ["run.pt", "learner/.metadata", "learner/__0_0.distcp"])
@pytest.mark.parametrize("damage", [b"", b"no checkpoint", b"half", None])
def test_a_newest_checkpoint_that_cannot_be_read_is_passed_over(
    damage: bytes | None, file: str, lockstep_run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "torn"
    shutil.copytree(lockstep_run, folder)
    newest = checkpoint_path(folder, 4)
    damaged = newest / file
    if damage is None:
        damaged.unlink()
    else:
        damaged.write_bytes(damaged.read_bytes()[:1000] if damage == b"half" else damage)
    checkpoint, (notice,) = find_checkpoint(compose_run_config(*SMALL, "train.resume=auto"), folder, LockstepRun)
    assert checkpoint is not None and checkpoint.path == checkpoint_path(folder, 2)
    assert notice.startswith(f"skipped an unreadable checkpoint: {newest}: ")


def test_where_none_can_be_read_the_run_does_not_begin_again(lockstep_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "torn"
    shutil.copytree(lockstep_run, folder)
    for path in (folder / "checkpoints").glob("*/run.pt"):
        path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"none of the 2 checkpoints in .* can be read"):
        run_job(compose_run_config(*SMALL, "train.resume=auto"), folder, grpo.train, LockstepRun)


def run_outside(folder: Path, script: str, *overrides: str) -> str:
    """Runs a script with default folder names in another working directory; returns stderr."""
    folder.mkdir(exist_ok=True)
    with chdir(folder):
        done = call_script(script, "--config-name", "grpo_quickstart", *QUICK, *SMALL, *overrides)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_section_that_one_side_lacks_or_has_as_a_value_is_one_change() -> None:
    section = {"lr": 0.1}
    assert [str(change) for change in find_changes({"optimizer": section}, {"optimizer": "adamw"})] == [
        "optimizer: {'lr': 0.1} -> adamw"
    ]
    assert find_changes({}, {"optimizer": section}) == [SettingChange("optimizer", ABSENT, section)]
    assert find_changes({"optimizer": section}, {}) == [SettingChange("optimizer", section, ABSENT)]
    (change,) = find_changes({"optimizer": section}, {"optimizer": {"lr": 0.2}})
    assert change == SettingChange("optimizer.lr", 0.1, 0.2)


def test_auto_looks_where_runs_land_outside_the_checkout_too(tmp_path: Path) -> None:
    first = run_outside(tmp_path, "grpo.py", "train.resume=auto")
    assert "no checkpoint of this run in " + str(tmp_path / "outputs/*/*") in first
    (landed,) = tmp_path.glob("outputs/*/*")
    more = "train.total_dialog_turns=80"
    second = run_outside(tmp_path, "grpo.py", "train.resume=auto", more)
    assert f"train.resume=auto: resuming from {landed / 'checkpoints/checkpoint_000004'}" in second
    swept = run_outside(tmp_path, "grpo.py", "train.resume=auto", more, "--multirun")
    assert "resumed from " in swept and "at iteration 5" in swept
    other = run_outside(tmp_path, "grpo.py", "train.resume=auto", "optimizer.lr=1e-3")
    assert "differs in optimizer.lr: 0.003 -> 0.001" in other


def test_auto_reads_where_runs_land_from_the_name_of_this_one(tmp_path: Path) -> None:
    names = ["outputs/2026-01-01/00-00-00", "outputs/2026-01-02/00-00-00-1", "multirun/2026-01-01/00-00-00/0"]
    found = [tmp_path / name for name in names]
    by_hand = [tmp_path / "mine" / name for name in ("a", "b", "lr_2026-01-01_00-00-00", "lr_2026-01-01_00-00-01")]
    for folder in (*found, *by_hand):
        folder.mkdir(parents=True)
    for folder in found:
        assert sibling_runs(folder) == sorted(other for other in found if other != folder)
    assert sibling_runs(by_hand[0]) == []
    assert set(sibling_runs(by_hand[3])) == set(by_hand[:3])


def test_auto_leaves_a_run_that_is_at_work_alone(lockstep_run: Path, tmp_path: Path) -> None:
    landed = tmp_path / "outputs/2026-01-01/00-00-00"
    shutil.copytree(lockstep_run, landed)
    script = (
        "import sys; from pathlib import Path; from config.run_folder.folders import lock_folder\n"
        "with lock_folder(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    config = compose_run_config(*SMALL, "train.resume=auto")
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(landed)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None and other.stdout.readline()
    checkpoint, notices = find_checkpoint(config, tmp_path / "outputs/2026-01-01/00-00-01", LockstepRun)
    other.communicate()
    assert checkpoint is None
    assert f"{landed} is in use (process {other.pid} on " in notices[0]
    checkpoint, _ = find_checkpoint(config, tmp_path / "outputs/2026-01-01/00-00-01", LockstepRun)
    assert checkpoint is not None and checkpoint.run_dir == landed


@pytest.mark.parametrize("script", ["grpo.py", pytest.param("grpo_async.py", marks=pytest.mark.long)])
def test_a_run_killed_before_its_first_checkpoint_starts_its_metrics_anew(script: str, tmp_path: Path) -> None:
    overrides = ("env.num_envs=4", "env.repeats=4", "train.checkpoint_frequency=0", "train.resume=auto")
    killed = start_script(script, tmp_path, *overrides, "train.total_dialog_turns=1600000")
    metrics = tmp_path / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 3, killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    again = run_script(script, tmp_path, *overrides, "train.total_dialog_turns=32")
    output = again.output
    assert again.returncode == 0, output
    found = read_metrics(tmp_path)
    assert [row["optimizer_step"] for row in found] == [1, 2]
    rewards = [row["reward/mean"] for row in found]
    summary = yaml.safe_load((tmp_path / "summary.json").read_text())
    assert (summary["first_reward"], summary["best_reward"]) == (rewards[0], max(rewards))


@pytest.mark.long
def test_runs_begun_at_once_get_folders_of_their_own(tmp_path: Path) -> None:
    """Runs and sweeps that start at once get different default folder names."""
    overrides = [str(ROOT / "grpo.py"), "--config-name", "grpo_quickstart"]
    plans = ((), (), ("--multirun",), ("--multirun",))
    processes = [
        start_python([*overrides, *more, *QUICK, *SMALL], tmp_path, stderr=subprocess.STDOUT) for more in plans
    ]
    for process in processes:
        assert (output := wait_for_output(process)) and process.returncode == 0, output
    landed = [*tmp_path.glob("outputs/*/*"), *tmp_path.glob("multirun/*/*/0")]
    assert len(landed) == 4
    for folder in landed:
        assert [row["optimizer_step"] for row in read_metrics(folder) if "lr" in row] == [1, 2, 3, 4]


def test_a_second_run_in_a_folder_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    endless = ("train.total_dialog_turns=1600000", "train.checkpoint_frequency=0", *SMALL[:2])
    first = start_script("grpo.py", folder, *endless, "train.seed=1")
    wait_until(lambda: (folder / "metrics.jsonl").exists(), first)
    settings = (folder / ".hydra/config.yaml").read_bytes()
    for more in ((), ("train.resume=auto",), ("run=eval", "eval.sets={a:{dataset:arithmetic}}")):
        second = run_script("grpo.py", folder, *endless, "train.seed=2", *more)
        output = second.output
        assert second.returncode == 2, output
        assert re.search(rf"error: .*another run uses this folder \(process {first.pid} on ", output)
        assert "Traceback" not in output
    assert (folder / ".hydra/config.yaml").read_bytes() == settings
    first.send_signal(signal.SIGKILL)
    first.communicate()
    third = run_script("grpo.py", folder, *SMALL, "train.seed=2")
    output = third.output
    assert third.returncode == 0, output
    assert not (folder / ".lock").exists()


def test_a_lora_checkpoint_is_what_the_plan_says(tmp_path: Path) -> None:
    """A LoRA checkpoint holds only the adapter and its optimizer state, not the larger base."""
    resized_quickstart(tmp_path / "model", hidden_size=384, intermediate_size=1024)
    overrides = (*SMALL[:2], *recorded_runs.LORA, f"model.name={tmp_path / 'model'}", "train.total_dialog_turns=16")
    config = compose_run_config(*overrides)
    with pytest.raises(RunError, match="nothing was learned"):  # its weights are random
        run_job(config, tmp_path / "run", grpo.train, LockstepRun)
    path = newest_checkpoint(tmp_path / "run")
    assert path is not None
    shape = find_shape(config.model.name)
    assert shape is not None
    planned = checkpoint_bytes(config, shape)
    tensors = saved_tensors(path / LEARNER)
    assert all("lora_" in name for name in tensors)
    adapter_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert adapter_bytes == planned
    whole = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    written = sum(file.stat().st_size for file in (path / LEARNER).rglob("*") if file.is_file())
    assert written < planned + 200_000 < whole


def test_a_resumed_lora_run_is_the_same_run(lora_run: Path, tmp_path: Path) -> None:
    resumed = shutil.copytree(lora_run, tmp_path / "broken")
    shutil.rmtree(checkpoint_path(resumed, 4))
    overrides = (*recorded_runs.SMALL, *recorded_runs.ADAPTER, "train.resume=auto")
    run_job(compose_run_config(*overrides), resumed, grpo.train, LockstepRun)
    recorded_runs.assert_same_run(resumed, lora_run, 4)


def make_checkpoint(*overrides: str) -> Checkpoint:
    return Checkpoint(Path("checkpoint_000002"), {"config": asdict(compose_run_config(*overrides)), "iteration": 2})


def test_another_frozen_model_is_refused() -> None:
    checkpoint = make_checkpoint("ref_model.name=models/quickstart")
    same_model = compose_run_config("ref_model.name=models/quickstart")
    assert changed_settings(checkpoint, same_model, LockstepRun) == []
    with pytest.raises(ConfigError, match=r"ref_model.name: models/quickstart -> None. Set them back"):
        changed_settings(checkpoint, compose_run_config(), LockstepRun)
    with pytest.raises(ConfigError, match=r"ref_model.dtype: None -> bfloat16"):
        changed_settings(make_checkpoint(), compose_run_config("ref_model.dtype=bfloat16"), LockstepRun)


def test_devices_of_the_frozen_model_may_change() -> None:
    new_config = compose_run_config("ref_model.num_devices=2", "ref_model.shard_size=2")
    assert changed_settings(make_checkpoint("ref_model.num_devices=4"), new_config, LockstepRun) == [
        "ref_model.num_devices: 4 -> 2 applied",
        "ref_model.shard_size: None -> 2 applied",
    ]
    fixed_keys = [key for key in vars(new_config.ref_model) if not is_under(f"ref_model.{key}", AUTO_IGNORED_SETTINGS)]
    assert fixed_keys == ["name", "dtype"], "another run to train.resume=auto"


def test_a_checkpoint_from_before_there_were_names_is_as_one_without() -> None:
    checkpoint = make_checkpoint()
    del checkpoint.state["config"]["ref_model"]["name"]
    assert changed_settings(checkpoint, compose_run_config(), LockstepRun) == []
    with pytest.raises(ConfigError, match=r"ref_model.name: absent -> models/quickstart"):
        changed_settings(checkpoint, compose_run_config("ref_model.name=models/quickstart"), LockstepRun)
