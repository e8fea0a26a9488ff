"""Tests resumed runs whose data have changed."""

import json
from pathlib import Path

import pytest

import grpo
import grpo_async
from config.schema.errors import ConfigError
from tests.script_runner import SCHEDULE_CLASSES, compose_run_config, read_metrics
from torchgrpo.run.job import run_job

SMALL = ("env.num_envs=4", "env.repeats=2", "train.checkpoint_frequency=2", "env.dataset=jsonl")
SCRIPTS = {"grpo.py": grpo, "grpo_async.py": grpo_async}


def write_rows(path: Path, numbers: range, *changed_rows: int) -> None:
    lines = [{"prompt": f"{n}+{n}=", "answer": str(2 * n + (n in changed_rows))} for n in numbers]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def train(script: str, file: Path, folder: Path, turns: int, *overrides: str) -> None:
    module = SCRIPTS[script]
    config = compose_run_config(*SMALL, f"env.data_files={file}", f"train.total_dialog_turns={turns}", *overrides)
    run_job(config, folder, module.train, SCHEDULE_CLASSES[module])


@pytest.mark.parametrize("script", ["grpo.py", pytest.param("grpo_async.py", marks=pytest.mark.long)])
def test_mended_and_appended_rows_are_taken_and_said_and_the_run_resumes_again(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "rows.jsonl", tmp_path / "run"
    write_rows(file, range(10, 26))
    train(script, file, folder, 16)
    write_rows(file, range(10, 31), 14, 17)
    capsys.readouterr()
    train(script, file, folder, 32, "train.resume=auto")
    output = capsys.readouterr().err
    assert f"env.data_files={file}: 2 of 16 rows changed since the checkpoint (rows 4, 7)" in output
    assert "5 rows appended to 16" in output
    train(script, file, folder, 48, "train.resume=auto")
    assert "changed since" not in capsys.readouterr().err
    assert len(read_metrics(folder)) >= 6


@pytest.mark.parametrize("script", SCRIPTS)
def test_other_data_are_refused_before_anything_is_loaded(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = tmp_path / "rows.jsonl", tmp_path / "run"
    write_rows(file, range(10, 26))
    train(script, file, folder, 16)
    write_rows(file, range(30, 46))
    monkeypatch.setattr("torchgrpo.rollout.engines.build_engines.build_engine", None)
    with pytest.raises(ConfigError, match=rf"train\.resume=.*env\.data_files={file}: not the data of the"):
        train(script, file, folder, 32, "train.resume=auto")
