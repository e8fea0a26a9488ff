"""Tests of `model.chat_template_kwargs`: arguments of the chat template."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from config.schema.errors import ConfigError
from config.schema.models import ModelConfig
from envs.chat import ChatEncoder
from envs.task import Example
from torchgrpo.run.resume import FIXED_SETTINGS, find_changes, is_under
from torchgrpo.training.model_loading import load_saved_tokenizer, load_tokenizer

QUICKSTART = "torchgrpo/models/quickstart"
MESSAGES = [{"role": "user", "content": "1+1="}]
SWITCH = (
    "  {% for m in messages %}<user>{{ m.content }}{% endfor %}<assistant>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{{ note }}"
)


def load(folder: Path, template: str, **arguments: Any) -> PreTrainedTokenizerBase:
    (folder / "other.jinja").write_text(template)
    path = str(folder / "other.jinja")
    return load_tokenizer(ModelConfig(name=QUICKSTART, chat_template=path, chat_template_kwargs=arguments))


def render(tokenizer: PreTrainedTokenizerBase, **arguments: Any) -> str:
    return str(tokenizer.apply_chat_template(MESSAGES, tokenize=False, **arguments))


def test_every_rendering_has_the_arguments(tmp_path: Path) -> None:
    plain = load(tmp_path, SWITCH)
    tokenizer = load(tmp_path, SWITCH, enable_thinking=False)
    assert render(tokenizer) == render(plain, enable_thinking=False) == "<user>1+1=<assistant><think></think>"
    prompt = ChatEncoder(tokenizer).encode(Example(tuple(MESSAGES), "2", 0))
    assert tokenizer.decode(prompt) == "<user>1+1=<assistant><think></think>"
    assert render(tokenizer, enable_thinking=True) == render(plain), "an argument of one rendering has priority"


def test_an_exported_tokenizer_keeps_the_arguments(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, SWITCH, enable_thinking=False, note="!")
    tokenizer.save_pretrained(tmp_path / "exported")
    name = str(tmp_path / "exported")
    assert render(load_saved_tokenizer(ModelConfig(name=name))) == "<user>1+1=<assistant><think></think>!"
    changed = ModelConfig(name=name, chat_template_kwargs={"enable_thinking": True})
    assert render(load_saved_tokenizer(changed)) == "<user>1+1=<assistant>!"


@pytest.mark.parametrize("value", ["text", "a 'quoted' \"text\" %} {{\n😀", None, True, -1.5, [1, {"a": None}], {}])
@pytest.mark.parametrize("head", ["", "\n", "  {% if note %}{% endif %}", "{% generation %}{% endgeneration %}"])
def test_values_and_templates_stay_as_they_are(value: Any, head: str, tmp_path: Path) -> None:
    template = head + "{{ (note if note is defined else 0) | tojson }}{{ messages[0].content }}"
    expected = render(load(tmp_path, template), note=value)
    assert render(load(tmp_path, template, note=value)) == expected


@pytest.mark.parametrize(("fields", "expected"), [
    ({"enable_thinkin": False}, r"model\.chat_template_kwargs\.enable_thinkin: .*; it reads enable_thinking, note$"),
    ({"messages": []}, r"model\.chat_template_kwargs\.messages: the chat template does not read"),
    ({"eos_token": ""}, r"model\.chat_template_kwargs\.eos_token: the chat template does not read"),
])  # fmt: skip
def test_a_name_that_the_template_does_not_read_is_refused(
    fields: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(tmp_path, SWITCH + "{{ eos_token }}", **fields)


def test_arguments_need_a_template() -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template_kwargs=.*leave out model\.chat_template=none"):
        ModelConfig(name=QUICKSTART, chat_template="none", chat_template_kwargs={"a": 1})


def test_a_resumed_run_keeps_the_arguments() -> None:
    old, new = (asdict(ModelConfig(name="x", chat_template_kwargs=one)) for one in ({}, {"enable_thinking": False}))
    (change,) = find_changes({"model": old}, {"model": new})
    assert is_under(change.key, FIXED_SETTINGS)
    del old["chat_template_kwargs"]
    assert find_changes({"model": old}, {"model": asdict(ModelConfig(name="x"))}) == []
