"""What a resumed run may change, and from where `auto` goes on."""

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
from tests.scripts import (
    QUICK,
    ROOT,
    begin,
    called,
    configured,
    finish,
    ran,
    rows,
    start,
    wait_for,
    without_clocks,
)
from tests.tiny import resized_quickstart
from torchgrpo.plan.disk import checkpoint_bytes
from torchgrpo.plan.model_shape import find_shape
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.run.overlapped import Overlapped
from torchgrpo.run.resume import (
    MISSING,
    NO_PART_OF_IT,
    Change,
    changed_settings,
    changes,
    find,
    siblings,
    under,
)
from torchgrpo.training.checkpoint import LEARNER, Saved, load_checkpoint
from torchgrpo.training.checkpoint_tensors import saved_tensors

SMALL = (*recorded_runs.SMALL, *recorded_runs.EVERY_SECOND)
"""Settings of the `lockstep_run`."""


@pytest.fixture
def halfway(lockstep_run: Path, tmp_path: Path) -> Path:
    """A copy of a run that was killed after the second iteration."""
    folder = shutil.copytree(lockstep_run, tmp_path / "halfway")
    shutil.rmtree(checkpoint_path(folder, 4))
    return folder


def rates(folder: Path) -> list[float]:
    return [row["lr"] for row in rows(folder) if "lr" in row]


def test_nothing_changed_says_nothing_and_is_the_same_run(
    lockstep_run: Path, halfway: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_job(configured(*SMALL, "train.resume=auto"), halfway, grpo.train, Lockstep)
    assert "applied" not in capsys.readouterr().err
    assert without_clocks(rows(halfway)) == without_clocks(rows(lockstep_run))


def test_a_changed_learning_rate_and_schedule_take_effect_and_are_said(
    lockstep_run: Path, halfway: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = (
        "optimizer.lr=1e-3",
        "optimizer.weight_decay=0.1",
        "optimizer.betas=[0.8,0.9]",
        "policy.kl_coef=0",
    )
    schedule = ("optimizer.schedule=linear", "optimizer.warmup_steps=0", "optimizer.min_lr_fraction=0")
    seen: list[dict[str, Any]] = []

    def train(working: Lockstep) -> None:
        learner = working.learner
        seen.extend({**group, "params": []} for group in learner.worker.optimizer.param_groups)
        grpo.train(working)

    run_job(
        configured(*SMALL, *changed, *schedule, "train.total_dialog_turns=128", "train.resume=auto"),
        halfway,
        train,
        Lockstep,
    )
    told = capsys.readouterr().err
    for line in ("optimizer.lr: 0.003 -> 0.001 applied", "optimizer.warmup_steps: 5 -> 0 applied"):
        assert line in told
    assert sorted({group["weight_decay"] for group in seen}) == [0.0, 0.1]
    assert all(tuple(group["betas"]) == (0.8, 0.9) for group in seen)
    assert rates(halfway)[:2] == rates(lockstep_run)[:2]
    assert rates(halfway)[2:] == pytest.approx([1e-3 * (1 - step / 8) for step in range(2, 8)])
    saved = load_checkpoint(checkpoint_path(halfway, 8))["config"]
    assert saved["optimizer"]["lr"] == 1e-3 and saved["policy"]["kl_coef"] == 0
    run_job(
        configured(*SMALL, *changed, *schedule, "train.total_dialog_turns=128", "train.resume=auto"),
        halfway,
        grpo.train,
        Lockstep,
    )
    assert "applied" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("train.seed=1", "train.seed: 0 -> 1"),
        ("env.repeats=8", "env.repeats: 4 -> 8"),
        (
            "env.num_envs=8",
            "completions of an iteration (env.num_envs, train.dialog_turns_per_batch): 16 -> 32",
        ),
        ("train.optim_batch_size=8", "completions of an optimizer step (train.optim_batch_size): 16 -> 8"),
        ("train.epochs=2", "train.epochs: 1 -> 2"),
        ("env.options.max_operand=9", "env.options.max_operand: "),
        ("env.system_prompt=Add.", "env.system_prompt: "),
        ("model.dtype=bfloat16", "model.dtype: float32 -> bfloat16"),
        ("optimizer=muon_adamw", "optimizer.name: adamw -> muon_adamw"),
        ("train_model.lora.enabled=true", "train_model.lora.enabled: False -> True"),
        ("optimizer.group_lr={model.*:1e-5}", "optimizer.group_lr.model.*: absent -> 1e-05"),
        ("train.total_dialog_turns=16", "it has done 2 iterations, and train.total_dialog_turns=16 makes 1"),
    ],
)
def test_what_a_run_began_with_is_refused_by_name_with_a_way_out(
    changed: str, said: str, halfway: Path
) -> None:
    before = {path.name: path.read_bytes() for path in halfway.iterdir() if path.is_file()}
    with pytest.raises(ConfigError) as refused:
        run_job(configured(*SMALL, changed, "train.resume=auto"), halfway, grpo.train, Lockstep)
    text = str(refused.value)
    assert said in text
    assert "checkpoint_000002" in text
    assert "model.name=" in text or "raise it" in text
    assert {path.name: path.read_bytes() for path in halfway.iterdir() if path.is_file()} == before


def test_what_a_refused_run_would_have_saved_is_not_saved(tmp_path: Path) -> None:
    """`.hydra` tells of the run that is there, and of a change once it takes effect."""
    folder = tmp_path / "run"

    def said(*overrides: str) -> tuple[int, str, float]:
        process = ran("grpo.py", folder, *SMALL, *overrides)
        composed = yaml.safe_load((folder / ".hydra/config.yaml").read_text())
        return process.returncode, process.output, composed["optimizer"]["lr"]

    assert said("optimizer.lr=1e-4")[::2] == (0, 1e-4)
    code, output, rate = said("optimizer.lr=1e-3", "train.seed=1", "train.resume=auto")
    assert (code, rate) == (2, 1e-4)
    assert "error: train.resume=" in output and "Traceback" not in output
    code, output, rate = said("optimizer.lr=1e-3", "train.resume=auto", "train.total_dialog_turns=80")
    assert (code, rate) == (0, 1e-3)
    assert "optimizer.lr: 0.0001 -> 0.001 applied" in output
    assert (folder / ".hydra/overrides.yaml").read_text().count("optimizer.lr=1e-3") == 1


def test_of_two_pushes_a_batch_count_is_kept(tmp_path: Path) -> None:
    run_job(configured(*SMALL), tmp_path, grpo_async.train, Overlapped)
    changed = configured(*SMALL, "train.weight_update_frequency=2", "train.resume=auto")
    with pytest.raises(
        ConfigError, match=r"batches between two pushes \(train\.weight_update_frequency\): 1 -> 2"
    ):
        run_job(changed, tmp_path, grpo_async.train, Overlapped)


@pytest.mark.parametrize("given", ["the run", "checkpoints"])
def test_the_folder_of_a_run_is_its_newest_checkpoint(
    given: str, lockstep_run: Path, halfway: Path, tmp_path: Path
) -> None:
    folder = halfway if given == "the run" else halfway / "checkpoints"
    run_job(configured(*SMALL, f"train.resume={folder}"), tmp_path / "new", grpo.train, Lockstep)
    assert without_clocks(rows(tmp_path / "new")) == without_clocks(rows(lockstep_run))


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
    saved, (told,) = find(configured(*SMALL, "train.resume=auto"), folder, Lockstep)
    assert saved is not None and saved.path == checkpoint_path(folder, 2)
    assert told.startswith(f"passed over, as it cannot be read: {newest}: ")


def test_where_none_can_be_read_the_run_does_not_begin_again(lockstep_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "torn"
    shutil.copytree(lockstep_run, folder)
    for path in (folder / "checkpoints").glob("*/run.pt"):
        path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"none of the 2 checkpoints in .* can be read"):
        run_job(configured(*SMALL, "train.resume=auto"), folder, grpo.train, Lockstep)


def outside(folder: Path, script: str, *overrides: str) -> str:
    """A script started with its default folder names, from a working directory of the user's own."""
    folder.mkdir(exist_ok=True)
    with chdir(folder):
        done = called(script, "--config-name", "grpo_quickstart", *QUICK, *SMALL, *overrides)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_section_that_one_side_lacks_or_has_as_a_value_is_one_change() -> None:
    section = {"lr": 0.1}
    assert [str(change) for change in changes({"optimizer": section}, {"optimizer": "adamw"})] == [
        "optimizer: {'lr': 0.1} -> adamw"
    ]
    assert changes({}, {"optimizer": section}) == [Change("optimizer", MISSING, section)]
    assert changes({"optimizer": section}, {}) == [Change("optimizer", section, MISSING)]
    assert changes({"optimizer": section}, {"optimizer": {"lr": 0.2}}) == [Change("optimizer.lr", 0.1, 0.2)]


def test_auto_looks_where_runs_land_outside_the_checkout_too(tmp_path: Path) -> None:
    first = outside(tmp_path, "grpo.py", "train.resume=auto")
    assert "no checkpoint of this run in " + str(tmp_path / "outputs/*/*") in first
    (landed,) = tmp_path.glob("outputs/*/*")
    more = "train.total_dialog_turns=80"
    second = outside(tmp_path, "grpo.py", "train.resume=auto", more)
    assert f"train.resume=auto takes {landed / 'checkpoints/checkpoint_000004'}" in second
    swept = outside(tmp_path, "grpo.py", "train.resume=auto", more, "--multirun")
    assert "resumed from " in swept and "at iteration 5" in swept
    other = outside(tmp_path, "grpo.py", "train.resume=auto", "optimizer.lr=1e-3")
    assert "differs in optimizer.lr: 0.003 -> 0.001" in other


def test_auto_reads_where_runs_land_from_the_name_of_this_one(tmp_path: Path) -> None:
    names = ["outputs/2026-01-01/00-00-00", "outputs/2026-01-02/00-00-00-1", "multirun/2026-01-01/00-00-00/0"]
    found = [tmp_path / name for name in names]
    by_hand = [
        tmp_path / "mine" / name for name in ("a", "b", "lr_2026-01-01_00-00-00", "lr_2026-01-01_00-00-01")
    ]
    for folder in (*found, *by_hand):
        folder.mkdir(parents=True)
    for folder in found:
        assert siblings(folder) == sorted(other for other in found if other != folder)
    assert siblings(by_hand[0]) == []
    assert set(siblings(by_hand[3])) == set(by_hand[:3])


def test_auto_leaves_a_run_that_is_at_work_alone(lockstep_run: Path, tmp_path: Path) -> None:
    landed = tmp_path / "outputs/2026-01-01/00-00-00"
    shutil.copytree(lockstep_run, landed)
    script = (
        "import sys; from pathlib import Path; from config.run_folder.folders import held\n"
        "with held(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    config = configured(*SMALL, "train.resume=auto")
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(landed)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None and other.stdout.readline()
    saved, told = find(config, tmp_path / "outputs/2026-01-01/00-00-01", Lockstep)
    other.communicate()
    assert saved is None
    assert f"{landed} is at work (process {other.pid} on " in told[0]
    saved, _ = find(config, tmp_path / "outputs/2026-01-01/00-00-01", Lockstep)
    assert saved is not None and saved.run_dir == landed


@pytest.mark.parametrize("script", ["grpo.py", pytest.param("grpo_async.py", marks=pytest.mark.long)])
def test_a_run_killed_before_its_first_checkpoint_starts_its_metrics_anew(
    script: str, tmp_path: Path
) -> None:
    given = ("env.num_envs=4", "env.repeats=4", "train.checkpoint_frequency=0", "train.resume=auto")
    killed = start(script, tmp_path, *given, "train.total_dialog_turns=1600000")
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and len(rows(tmp_path)) > 3, killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    again = ran(script, tmp_path, *given, "train.total_dialog_turns=32")
    output = again.output
    assert again.returncode == 0, output
    found = rows(tmp_path)
    assert [row["optimizer_step"] for row in found] == [1, 2]
    rewards = [row["reward/mean"] for row in found]
    summary = yaml.safe_load((tmp_path / "summary.json").read_text())
    assert (summary["first_reward"], summary["best_reward"]) == (rewards[0], max(rewards))


@pytest.mark.long
def test_runs_begun_at_once_get_folders_of_their_own(tmp_path: Path) -> None:
    """A run and a sweep, with their default names, which name microseconds."""
    given = [str(ROOT / "grpo.py"), "--config-name", "grpo_quickstart"]
    plans = ((), (), ("--multirun",), ("--multirun",))
    processes = [begin([*given, *more, *QUICK, *SMALL], tmp_path, stderr=subprocess.STDOUT) for more in plans]
    for process in processes:
        assert (output := finish(process)) and process.returncode == 0, output
    landed = [*tmp_path.glob("outputs/*/*"), *tmp_path.glob("multirun/*/*/0")]
    assert len(landed) == 4
    for folder in landed:
        assert [row["optimizer_step"] for row in rows(folder) if "lr" in row] == [1, 2, 3, 4]


def test_a_second_run_in_a_folder_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    endless = ("train.total_dialog_turns=1600000", "train.checkpoint_frequency=0", *SMALL[:2])
    first = start("grpo.py", folder, *endless, "train.seed=1")
    wait_for(lambda: (folder / "metrics.jsonl").exists(), first)
    settings = (folder / ".hydra/config.yaml").read_bytes()
    for more in ((), ("train.resume=auto",), ("run=eval", "eval.sets={a:{dataset:arithmetic}}")):
        second = ran("grpo.py", folder, *endless, "train.seed=2", *more)
        output = second.output
        assert second.returncode == 2, output
        assert re.search(rf"error: .*another run works in this folder \(process {first.pid} on ", output)
        assert "Traceback" not in output
    assert (folder / ".hydra/config.yaml").read_bytes() == settings
    first.send_signal(signal.SIGKILL)
    first.communicate()
    third = ran("grpo.py", folder, *SMALL, "train.seed=2")
    output = third.output
    assert third.returncode == 0, output
    assert not (folder / ".lock").exists()


def test_a_lora_checkpoint_is_what_the_plan_says(tmp_path: Path) -> None:
    """The adapter and its optimizer state, of a model whose base is far larger."""
    resized_quickstart(tmp_path / "model", hidden_size=384, intermediate_size=1024)
    given = (
        *SMALL[:2],
        *recorded_runs.LORA,
        f"model.name={tmp_path / 'model'}",
        "train.total_dialog_turns=16",
    )
    config = configured(*given)
    with pytest.raises(RunError, match="nothing was learned"):  # its weights are random
        run_job(config, tmp_path / "run", grpo.train, Lockstep)
    path = newest_checkpoint(tmp_path / "run")
    assert path is not None
    shape = find_shape(config.model.name)
    assert shape is not None
    planned = checkpoint_bytes(config, shape)
    tensors = saved_tensors(path / LEARNER)
    assert all("lora_" in name for name in tensors)
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert held == planned
    whole = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    written = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert written < planned + 200_000 < whole


def test_a_resumed_lora_run_is_the_same_run(lora_run: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(lora_run, tmp_path / "broken")
    shutil.rmtree(checkpoint_path(broken, 4))
    given = (*recorded_runs.SMALL, *recorded_runs.ADAPTER, "train.resume=auto")
    run_job(configured(*given), broken, grpo.train, Lockstep)
    recorded_runs.assert_same_run(broken, lora_run, 4)


def saved_by(*overrides: str) -> Saved:
    return Saved(Path("checkpoint_000002"), {"config": asdict(configured(*overrides)), "iteration": 2})


def test_another_frozen_model_is_refused() -> None:
    saved = saved_by("ref_model.name=models/quickstart")
    assert changed_settings(saved, configured("ref_model.name=models/quickstart"), Lockstep) == []
    with pytest.raises(ConfigError, match=r"ref_model.name: models/quickstart -> None. Give these as"):
        changed_settings(saved, configured(), Lockstep)
    with pytest.raises(ConfigError, match=r"ref_model.dtype: None -> bfloat16"):
        changed_settings(saved_by(), configured("ref_model.dtype=bfloat16"), Lockstep)


def test_devices_of_the_frozen_model_may_change() -> None:
    now = configured("ref_model.num_devices=2", "ref_model.shard_size=2")
    assert changed_settings(saved_by("ref_model.num_devices=4"), now, Lockstep) == [
        "ref_model.num_devices: 4 -> 2 applied",
        "ref_model.shard_size: None -> 2 applied",
    ]
    apart = [key for key in vars(now.ref_model) if not under(f"ref_model.{key}", NO_PART_OF_IT)]
    assert apart == ["name", "dtype"], "another run to train.resume=auto"


def test_a_checkpoint_from_before_there_were_names_is_as_one_without() -> None:
    saved = saved_by()
    del saved.state["config"]["ref_model"]["name"]
    assert changed_settings(saved, configured(), Lockstep) == []
    with pytest.raises(ConfigError, match=r"ref_model.name: absent -> models/quickstart"):
        changed_settings(saved, configured("ref_model.name=models/quickstart"), Lockstep)
