"""Tests `run=eval` of checkpoints, and training from a checkpoint's weights.

An evaluation of a checkpoint has the same results as the evaluation in the checkpoint's run.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import grpo
from config.schema.errors import ConfigError
from config.schema.models import ModelConfig
from tests.recorded_runs import ADAPTER, EVERY_SECOND, SETS, SMALL
from tests.script_runner import compose_run_config, read_metrics, run_script
from tests.tiny_models import resized_quickstart
from torchgrpo.plan.machine import installed_vllm
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.training.model_loading import load_tokenizer

SETTINGS = {"lockstep_run": (*SMALL, *EVERY_SECOND), "lora_run": (*SMALL, *ADAPTER)}
TrainedRun = tuple[Path, tuple[str, ...]]


@pytest.fixture(params=SETTINGS)
def trained_run(request: pytest.FixtureRequest) -> TrainedRun:
    """Returns a trained run's folder and its settings."""
    return request.getfixturevalue(request.param), SETTINGS[request.param]


def completions(run_dir: Path, iteration: int) -> list[dict[str, Any]]:
    text = (run_dir / f"eval/held_out/iteration_{iteration}.jsonl").read_text()
    return sorted(map(json.loads, text.splitlines()), key=lambda line: (line["row"], line["sample"]))


def evaluation(run_dir: Path, iteration: int) -> dict[str, Any]:
    (row,) = (row for row in read_metrics(run_dir) if row.get("iteration") == iteration)
    return row


@pytest.mark.parametrize("iteration", [2, 4])
def test_an_evaluation_of_a_checkpoint_equals_that_of_its_run(
    trained_run: TrainedRun, iteration: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, settings = tmp_path / "run", trained_run[1]
    tmp_path /= "eval"
    tmp_path.mkdir()
    shutil.copytree(trained_run[0], folder, symlinks=True)
    shutil.rmtree(folder / "models")  # a temporary model is written instead
    path = folder / f"checkpoints/checkpoint_{iteration:06d}"
    run_job(compose_run_config("run=eval", *settings, f"train.resume={path}"), tmp_path, grpo.train, LockstepRun)
    assert f"evaluating checkpoint_{iteration:06d} of {folder}" in capsys.readouterr().err
    assert completions(tmp_path, iteration) == completions(folder, iteration)
    assert completions(folder, iteration) != completions(folder, 0)
    ours, theirs = evaluation(tmp_path, iteration), evaluation(folder, iteration)
    for key in ("optimizer_step", "policy_version", "eval/held_out/pass@1"):
        assert ours[key] == theirs[key], key
    left = {"eval", "events.jsonl", "metrics.jsonl", "report.html", "rollouts", "summary.json"}
    assert {path.name for path in tmp_path.iterdir()} == left


@pytest.mark.parametrize("key", ["train.resume", "model.name"])
def test_the_folder_of_a_run_is_its_newest_checkpoint(trained_run: TrainedRun, key: str, tmp_path: Path) -> None:
    folder, settings = trained_run
    run_job(compose_run_config("run=eval", *settings, f"{key}={folder}"), tmp_path, grpo.train, LockstepRun)
    assert completions(tmp_path, 4) == completions(folder, 4)


@pytest.mark.long
@pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")
def test_on_vllm_in_ray_actors(trained_run: TrainedRun, tmp_path: Path) -> None:
    """Greedy completions of vLLM and transformers agree but for ties."""
    folder, settings = trained_run
    greedy = "eval.sets={held_out:{dataset:arithmetic,n:1,temperature:0,limit:20}}"
    overrides = ("run=eval", *settings, f"train.resume={folder}", greedy)
    process = run_script("grpo.py", tmp_path, *overrides, "inference_model.backend=vllm", "ray.enabled=true")
    assert process.returncode == 0, process.output
    by_transformers = tmp_path / "transformers"
    run_job(compose_run_config(*overrides), by_transformers, grpo.train, LockstepRun)
    texts = [[line["completion"] for line in completions(where, 4)] for where in (tmp_path, by_transformers)]
    assert sum(a == b for a, b in zip(*texts, strict=True)) >= 19  # 20 completions, equal but for a tie


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.resume=/nope", "train.resume=/nope: no such folder"),
        ("train.resume=config", "the folder has no checkpoints/checkpoint_*"),
        ("train.resume=auto", "train.resume=auto: no checkpoint of this run"),
        ("model.name=/checkpoint_000004", "model.name=/checkpoint_000004: no such folder"),
    ],
)
def test_a_missing_checkpoint_is_refused(override: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        run_job(compose_run_config("run=eval", SETS, override), tmp_path, grpo.train, LockstepRun)
    assert expected in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_auto_takes_the_newest_run_beside(trained_run: TrainedRun, tmp_path: Path) -> None:
    folder, settings = trained_run
    earlier_run, new = (tmp_path / "outputs/2026-01-01" / time for time in ("00-00-01", "00-00-02"))
    shutil.copytree(folder, earlier_run)
    run_job(compose_run_config("run=eval", "train.resume=auto", *settings), new, grpo.train, LockstepRun)
    assert completions(new, 4) == completions(folder, 4)


@pytest.mark.parametrize(
    ("model_settings", "expected"),
    [
        ({"num_hidden_layers": 1}, "num_hidden_layers is"),
        ({"rms_norm_eps": 0.5}, "rms_norm_eps is"),
        ({}, "the run of the checkpoint started from other weights"),
    ],
)
@pytest.mark.parametrize("job", ["run=eval", "run=train"])
def test_a_checkpoint_of_another_model_is_refused_by_name(
    trained_run: TrainedRun, job: str, model_settings: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    folder, settings = trained_run
    resized_quickstart(tmp_path / "other", **model_settings)
    other = (job, *settings, f"model.name={tmp_path / 'other'}", f"train.resume={folder}")
    with pytest.raises(ConfigError) as refused:
        run_job(compose_run_config(*other), tmp_path / "run", grpo.train, LockstepRun)
    assert "checkpoint_000004" in str(refused.value)
    assert expected in str(refused.value)


def test_an_evaluation_leaves_the_folder_of_a_training_run_alone(trained_run: TrainedRun) -> None:
    folder, settings = trained_run
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="would replace the metrics of this training run"):
        run_job(compose_run_config("run=eval", *settings, "train.resume=auto"), folder, grpo.train, LockstepRun)
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_training_goes_on_from_the_weights_of_a_checkpoint(trained_run: TrainedRun, tmp_path: Path) -> None:
    """Training from a checkpoint's weights starts a new run, which can be resumed.

    The optimizer is fresh and iterations count from 1. The run resumes after the checkpoint has been removed.
    """
    source = tmp_path / "source"
    shutil.copytree(trained_run[0], source)
    checkpoint = source / "checkpoints/checkpoint_000002"
    settings = (*trained_run[1], "train_model.lora.dropout=0", f"model.name={checkpoint}")
    run_job(compose_run_config(*settings), tmp_path / "run", grpo.train, LockstepRun)
    first = evaluation(tmp_path / "run", 0)
    assert first["eval/held_out/pass@1"] == evaluation(source, 2)["eval/held_out/pass@1"]
    assert read_metrics(tmp_path / "run")[1]["optimizer_step"] == 1
    assert read_metrics(tmp_path / "run")[1]["kl/ref"] == pytest.approx(0, abs=1e-5)  # same initial weights
    model = source / "models/checkpoint_000002"
    assert load_tokenizer(ModelConfig(name=str(model))).chat_template
    shutil.rmtree(checkpoint)
    more = ("train.total_dialog_turns=80", "train.resume=auto")
    run_job(compose_run_config(*settings, *more), tmp_path / "run", grpo.train, LockstepRun)
    assert read_metrics(tmp_path / "run")[-1]["optimizer_step"] == 5 * read_metrics(source)[-1]["optimizer_step"] // 4


def test_a_plan_for_a_checkpoint_makes_no_folder(
    trained_run: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, settings = tmp_path / "run", trained_run[1]
    shutil.copytree(trained_run[0], folder, symlinks=True)
    shutil.rmtree(folder / "models")
    (tmp_path / "plan").mkdir()
    model_overrides = (f"model.name={folder}", f"ref_model.name={folder}", "policy.kl_coef=0.1")
    run_job(compose_run_config("run=plan", *settings, *model_overrides), tmp_path / "plan", grpo.train, LockstepRun)
    output = capsys.readouterr().out
    assert "checkpoints" in output and f"; {folder} (of models/quickstart), float32" in output
    assert not (folder / "models").exists()
