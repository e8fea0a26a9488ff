"""A reference model with another vocabulary than the policy's is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from config.schema.config import Config
from config.schema.errors import ConfigError
from tests.script_runner import ROOT, compose_run_config
from tests.tiny_models import resized_quickstart
from torchgrpo.run.checkpoint_model import resolve_checkpoint_models
from torchgrpo.run.jobs.plan import _token_problems
from torchgrpo.training.model_loading import load_tokenizer
from torchgrpo.training.reference_model_files import check_reference_files, has_tokenizer

TINY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
Vocabulary = dict[str, int]


def save_teacher(folder: Path, rows: int = 263, change: Callable[[Vocabulary], object] = len) -> Path:
    """Saves a small model whose vocabulary is the quickstart's after `change`."""
    resized_quickstart(folder, vocab_size=rows, num_key_value_heads=2, **TINY)
    path = folder / "tokenizer.json"
    state: dict[str, Any] = json.loads(path.read_text())
    change(state["model"]["vocab"])
    path.write_text(json.dumps(state))
    return folder


def config_of(folder: Path, *overrides: str) -> Config:
    return compose_run_config("policy.kl_coef=0.1", f"ref_model.name={folder}", *overrides)


def check(folder: Path, *overrides: str) -> None:
    config = config_of(folder, *overrides)
    check_reference_files(load_tokenizer(config.model), config)


def test_the_same_tokens_with_more_rows(tmp_path: Path) -> None:
    check(save_teacher(tmp_path / "same"))
    check(save_teacher(tmp_path / "more", rows=300))
    check(ROOT / "torchgrpo" / "models" / "quickstart", f"model.name={tmp_path / 'more'}")
    assert _token_problems(config_of(tmp_path / "same")) == []


def test_more_tokens_do_no_harm(tmp_path: Path) -> None:
    folder = save_teacher(tmp_path / "more", rows=270)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(folder)
    check(folder)


def test_the_first_token_that_differs_is_named(tmp_path: Path) -> None:
    def swap(vocabulary: Vocabulary) -> None:
        vocabulary["3"], vocabulary["4"] = vocabulary["4"], vocabulary["3"]

    folder = save_teacher(tmp_path / "other", change=swap)
    own = AutoTokenizer.from_pretrained(ROOT / "torchgrpo" / "models" / "quickstart")
    message = (
        rf"ref_model.name={folder}: the tokens differ from those of model.name=models/quickstart: id "
        rf"{own.convert_tokens_to_ids('3')} is '4' to the reference and '3' to the policy\. .*leave ref_model.name out"
    )
    with pytest.raises(ConfigError, match=message):
        check(folder)
    with pytest.raises(ConfigError, match=r"family, or distil from the policy itself \(policy=opsd\)$"):
        check(folder, "policy=opd")
    (problem,) = _token_problems(config_of(folder))
    assert "the tokens differ from those of" in problem


def test_a_token_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"id 262 is no token to the reference and '.' to the policy"):
        check(save_teacher(tmp_path / "fewer", change=lambda vocabulary: vocabulary.popitem()))


def test_an_added_token_counts_where_the_policy_can_sample_it(tmp_path: Path) -> None:
    folder = save_teacher(tmp_path / "policy", rows=264)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.save_pretrained(folder)
    policy = f"model.name={folder}"
    with pytest.raises(ConfigError, match=r"id 263 is no token to the reference and '<end>' to the policy"):
        check(ROOT / "torchgrpo" / "models" / "quickstart", policy)
    shutil.copytree(ROOT / "torchgrpo" / "models" / "quickstart", tmp_path / "small")
    tokenizer.eos_token = "<eos>"
    tokenizer.save_pretrained(tmp_path / "small")
    with pytest.raises(
        ConfigError, match=r"has 263 rows, and the policy .* 1 tokens beyond those rows \('<end>' is 263\)"
    ):
        check(tmp_path / "small", policy)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    folder = save_teacher(tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ConfigError, match=rf"ref_model.name={folder}: its tokenizer could not be loaded") as error:
        check(folder)
    assert "\n" not in str(error.value) and " model.name" not in str(error.value)


def test_files_that_are_no_model_are_named_as_the_reference(tmp_path: Path) -> None:
    folder = save_teacher(tmp_path / "broken")
    shutil.copy(ROOT / "torchgrpo" / "models" / "quickstart" / "model.safetensors", folder)
    with pytest.raises(ConfigError, match=rf"^ref_model.name={folder}: the model has no .* tensors"):
        check(folder)


def test_a_teacher_that_no_objective_reads_is_not_checked() -> None:
    config = compose_run_config("policy.kl_coef=0", "ref_model.name=nobody/nothing")
    check_reference_files(load_tokenizer(config.model), config)
    assert _token_problems(config) == []


def test_a_plan_downloads_no_tokenizer() -> None:
    assert not has_tokenizer("nobody/nothing")
    assert _token_problems(compose_run_config("policy.kl_coef=0.1", "ref_model.name=nobody/nothing")) == []


def test_the_folder_of_a_run_is_its_model(tmp_path: Path) -> None:
    model = save_teacher(tmp_path / "run" / "model")
    config, messages = resolve_checkpoint_models(config_of(tmp_path / "run"))
    assert config.ref_model.name == str(model) and config.model.name == "models/quickstart" and messages == []
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"ref_model\.name="):
        resolve_checkpoint_models(config_of(tmp_path / "empty"))
