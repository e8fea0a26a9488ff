"""`run=eval` of a checkpoint says what its run said of it, whatever generates; a checkpoint is a model to train on."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import grpo
from config.schema.errors import ConfigError
from config.schema.models import ModelConfig
from tests.recorded_runs import ADAPTER, EVERY_SECOND, SETS, SMALL
from tests.scripts import configured, ran, rows
from tests.tiny import resized_quickstart
from torchgrpo.plan.machine import installed_vllm
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.training.model_loading import load_tokenizer

GIVEN = {"lockstep_run": (*SMALL, *EVERY_SECOND), "lora_run": (*SMALL, *ADAPTER)}
Trained = tuple[Path, tuple[str, ...]]


@pytest.fixture(params=GIVEN)
def trained(request: pytest.FixtureRequest) -> Trained:
    """A run's folder and its settings."""
    return request.getfixturevalue(request.param), GIVEN[request.param]


def completions(run_dir: Path, iteration: int) -> list[dict[str, Any]]:
    text = (run_dir / f"eval/held_out/iteration_{iteration}.jsonl").read_text()
    return sorted(map(json.loads, text.splitlines()), key=lambda line: (line["row"], line["sample"]))


def evaluation(run_dir: Path, iteration: int) -> dict[str, Any]:
    (row,) = (row for row in rows(run_dir) if row.get("iteration") == iteration)
    return row


@pytest.mark.parametrize("iteration", [2, 4])
def test_a_checkpoint_says_what_its_run_said(
    trained: Trained, iteration: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, given = tmp_path / "run", trained[1]
    tmp_path /= "eval"
    tmp_path.mkdir()
    shutil.copytree(trained[0], folder, symlinks=True)
    shutil.rmtree(folder / "models")  # one is made of the checkpoint, and removed
    path = folder / f"checkpoints/checkpoint_{iteration:06d}"
    run_job(configured("run=eval", *given, f"train.resume={path}"), tmp_path, grpo.train, Lockstep)
    assert f"evaluating checkpoint_{iteration:06d} of {folder}" in capsys.readouterr().err
    assert completions(tmp_path, iteration) == completions(folder, iteration)
    assert completions(folder, iteration) != completions(folder, 0)
    ours, theirs = evaluation(tmp_path, iteration), evaluation(folder, iteration)
    for key in ("optimizer_step", "policy_version", "eval/held_out/pass@1"):
        assert ours[key] == theirs[key], key
    left = {"eval", "events.jsonl", "metrics.jsonl", "report.html", "rollouts", "summary.json"}
    assert {path.name for path in tmp_path.iterdir()} == left


@pytest.mark.parametrize("key", ["train.resume", "model.name"])
def test_the_folder_of_a_run_is_its_newest_checkpoint(trained: Trained, key: str, tmp_path: Path) -> None:
    folder, given = trained
    run_job(configured("run=eval", *given, f"{key}={folder}"), tmp_path, grpo.train, Lockstep)
    assert completions(tmp_path, 4) == completions(folder, 4)


@pytest.mark.long
@pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")
def test_on_vllm_in_ray_actors(trained: Trained, tmp_path: Path) -> None:
    """Draws of vLLM differ, what the policy can do does not."""
    folder, given = trained
    greedy = "eval.sets={held_out:{dataset:arithmetic,n:1,temperature:0,limit:20}}"
    asked = ("run=eval", *given, f"train.resume={folder}", greedy)
    process = ran("grpo.py", tmp_path, *asked, "inference_model.backend=vllm", "ray.enabled=true")
    assert process.returncode == 0, process.output
    by_transformers = tmp_path / "transformers"
    run_job(configured(*asked), by_transformers, grpo.train, Lockstep)
    texts = [[line["completion"] for line in completions(where, 4)] for where in (tmp_path, by_transformers)]
    assert sum(a == b for a, b in zip(*texts, strict=True)) >= 19  # of 20: equal but for a tie


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("train.resume=/nope", "train.resume=/nope: no such folder"),
        ("train.resume=config", "no checkpoints/checkpoint_* in this folder"),
        ("train.resume=auto", "train.resume=auto: no checkpoint of this run"),
        ("model.name=/checkpoint_000004", "model.name=/checkpoint_000004: no such folder"),
    ],
)
def test_what_is_not_there_is_refused(given: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        run_job(configured("run=eval", SETS, given), tmp_path, grpo.train, Lockstep)
    assert expected in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_auto_takes_the_newest_run_beside(trained: Trained, tmp_path: Path) -> None:
    folder, given = trained
    landed, new = (tmp_path / "outputs/2026-01-01" / time for time in ("00-00-01", "00-00-02"))
    shutil.copytree(folder, landed)
    run_job(configured("run=eval", "train.resume=auto", *given), new, grpo.train, Lockstep)
    assert completions(new, 4) == completions(folder, 4)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_hidden_layers": 1}, "num_hidden_layers is"),
        ({"rms_norm_eps": 0.5}, "rms_norm_eps is"),
        ({}, "its run began from other weights"),
    ],
)
@pytest.mark.parametrize("what", ["run=eval", "run=train"])
def test_a_checkpoint_of_another_model_is_refused_by_name(
    trained: Trained, what: str, settings: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    folder, given = trained
    resized_quickstart(tmp_path / "other", **settings)
    other = (what, *given, f"model.name={tmp_path / 'other'}", f"train.resume={folder}")
    with pytest.raises(ConfigError) as refused:
        run_job(configured(*other), tmp_path / "run", grpo.train, Lockstep)
    assert "checkpoint_000004" in str(refused.value)
    assert expected in str(refused.value)


def test_an_evaluation_leaves_the_folder_of_a_training_run_alone(trained: Trained) -> None:
    folder, given = trained
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="is the folder of a training run"):
        run_job(configured("run=eval", *given, "train.resume=auto"), folder, grpo.train, Lockstep)
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_training_goes_on_from_the_weights_of_a_checkpoint(trained: Trained, tmp_path: Path) -> None:
    """With a fresh optimizer and iterations from 1; resumed where it stopped, though the checkpoint has gone."""
    source = tmp_path / "source"
    shutil.copytree(trained[0], source)
    checkpoint = source / "checkpoints/checkpoint_000002"
    given = (*trained[1], "train_model.lora.dropout=0", f"model.name={checkpoint}")
    run_job(configured(*given), tmp_path / "run", grpo.train, Lockstep)
    first = evaluation(tmp_path / "run", 0)
    assert first["eval/held_out/pass@1"] == evaluation(source, 2)["eval/held_out/pass@1"]
    assert rows(tmp_path / "run")[1]["optimizer_step"] == 1
    assert rows(tmp_path / "run")[1]["kl/ref"] == pytest.approx(0, abs=1e-5)  # the reference began there too
    model = source / "models/checkpoint_000002"
    assert load_tokenizer(ModelConfig(name=str(model))).chat_template
    shutil.rmtree(checkpoint)
    more = ("train.total_dialog_turns=80", "train.resume=auto")
    run_job(configured(*given, *more), tmp_path / "run", grpo.train, Lockstep)
    assert rows(tmp_path / "run")[-1]["optimizer_step"] == 5 * rows(source)[-1]["optimizer_step"] // 4


def test_a_plan_for_a_checkpoint_makes_no_folder(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, given = tmp_path / "run", trained[1]
    shutil.copytree(trained[0], folder, symlinks=True)
    shutil.rmtree(folder / "models")
    (tmp_path / "plan").mkdir()
    named = (f"model.name={folder}", f"ref_model.name={folder}", "policy.kl_coef=0.1")
    run_job(configured("run=plan", *given, *named), tmp_path / "plan", grpo.train, Lockstep)
    told = capsys.readouterr().out
    assert "checkpoints" in told and f"; {folder} (of models/quickstart), float32" in told
    assert not (folder / "models").exists()
