"""A run's settings come back from its folder, and `run_dir=` finds that folder."""

from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from config.cli.command_line import _with_list
from config.cli.saved_settings import chosen_run, chosen_runs, saved_config
from config.schema.errors import ConfigError
from tests.scripts import configured


def a_run(folder: Path) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    settings = asdict(configured("optimizer.lr=0.125"))
    (folder / ".hydra" / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(settings)))
    return folder


def test_settings_come_back_and_can_be_changed(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    assert saved_config(folder) == configured("optimizer.lr=0.125")
    assert saved_config(folder, ["policy.kl_coef=0.5"]).policy.kl_coef == 0.5
    assert saved_config(folder) == configured("optimizer.lr=0.125")
    with pytest.raises(ConfigError, match="no run has left its settings"):
        saved_config(tmp_path)


def test_a_file_of_settings_that_has_changed_is_read_again(tmp_path: Path) -> None:
    file = a_run(tmp_path) / ".hydra" / "config.yaml"
    assert saved_config(tmp_path).optimizer.lr == 0.125
    file.write_text(file.read_text().replace("lr: 0.125", "lr: 0.25"))
    assert saved_config(tmp_path).optimizer.lr == 0.25
    file.write_text("- no settings")
    with pytest.raises(ConfigError, match=r"config\.yaml: keys and values are wanted here"):
        saved_config(tmp_path)


def test_the_newest_run_is_taken_where_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no run has been made here"):
        chosen_run(None)
    first = a_run(Path("outputs/2026-01-01/10-00-00"))
    second = a_run(Path("multirun/2026-01-01/11-00-00/0"))
    assert chosen_run(None) in (first, second)
    assert chosen_runs([str(first), str(second)]) == [first, second]
    with pytest.raises(ConfigError, match="one run's folder is wanted"):
        chosen_run([str(first), str(second)])
    with pytest.raises(ConfigError, match=r"run_dir=nowhere: no run's folder .* the newest runs here: "):
        chosen_run("nowhere")


@pytest.mark.parametrize(("word", "read"), [
    ("run_dir=a,b/c d", 'run_dir=["a","b/c d"]'), ("run_dir=a", "run_dir=a"),
    ("run_dir=[a,b]", "run_dir=[a,b]"), ("optimizer.lr=1,2", "optimizer.lr=1,2"),
])  # fmt: skip
def test_several_folders_are_a_list(word: str, read: str) -> None:
    assert _with_list(word) == read
