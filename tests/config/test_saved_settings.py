"""Tests that a run's settings are loaded from its folder, which `run_dir=` finds."""

from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from config.cli.command_line import _quote_run_dir_list
from config.cli.saved_settings import chosen_run, chosen_runs, saved_config
from config.schema.errors import ConfigError
from tests.script_runner import compose_run_config


def make_run_folder(folder: Path) -> Path:
    """Creates the folder of a run with `optimizer.lr=0.125`."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    settings = asdict(compose_run_config("optimizer.lr=0.125"))
    (folder / ".hydra" / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(settings)))
    return folder


def test_settings_are_loaded_and_can_be_changed(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "run")
    assert saved_config(folder) == compose_run_config("optimizer.lr=0.125")
    assert saved_config(folder, ["policy.kl_coef=0.5"]).policy.kl_coef == 0.5
    assert saved_config(folder) == compose_run_config("optimizer.lr=0.125")
    with pytest.raises(ConfigError, match="the folder has no settings of a run"):
        saved_config(tmp_path)


def test_a_file_of_settings_that_has_changed_is_read_again(tmp_path: Path) -> None:
    file = make_run_folder(tmp_path) / ".hydra" / "config.yaml"
    assert saved_config(tmp_path).optimizer.lr == 0.125
    file.write_text(file.read_text().replace("lr: 0.125", "lr: 0.25"))
    assert saved_config(tmp_path).optimizer.lr == 0.25
    file.write_text("- no settings")
    with pytest.raises(ConfigError, match=r"config\.yaml: the settings of a run must be keys and values"):
        saved_config(tmp_path)


def test_the_newest_run_is_taken_where_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no run was found here"):
        chosen_run(None)
    first = make_run_folder(Path("outputs/2026-01-01/10-00-00"))
    second = make_run_folder(Path("multirun/2026-01-01/11-00-00/0"))
    assert chosen_run(None) in (first, second)
    assert chosen_runs([str(first), str(second)]) == [first, second]
    with pytest.raises(ConfigError, match="several folders; name the folder of one run"):
        chosen_run([str(first), str(second)])
    with pytest.raises(ConfigError, match=r"run_dir=nowhere: not the folder of a run .* the newest runs here: "):
        chosen_run("nowhere")


@pytest.mark.parametrize(("word", "read"), [
    ("run_dir=a,b/c d", 'run_dir=["a","b/c d"]'), ("run_dir=a", "run_dir=a"),
    ("run_dir=[a,b]", "run_dir=[a,b]"), ("optimizer.lr=1,2", "optimizer.lr=1,2"),
])  # fmt: skip
def test_several_folders_are_a_list(word: str, read: str) -> None:
    assert _quote_run_dir_list(word) == read
