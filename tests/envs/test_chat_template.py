"""Prompts with a chat template, another one or none; answers that a prompt begins."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from config.schema.errors import ConfigError
from config.schema.models import ModelConfig
from envs.chat import Encoder, answer_prefill, encode_prompt
from envs.chat_template import render_prompt
from envs.control_tokens import turn_end
from envs.group import SampledCompletion
from envs.prompt_checks import check_prompts
from envs.task import Example
from envs.turns import Conversation
from tests.logged import Logged
from torchgrpo.training.model_loading import load_saved_tokenizer, load_tokenizer

QUICKSTART = "torchgrpo/models/quickstart"
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "1+1="}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": "<eos>"}}}],
}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call_1", "content": "2"}
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKING = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
CALLING = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<user>{{ m['content'] }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ c.function.name }}({{ ARGUMENTS }}){% endfor %}{% endif %}"
    "{% if m.role == 'tool' %}[{{ m.name }} {{ m.tool_call_id }}]{% endif %}{% endfor %}<assistant>"
)


def with_template(folder: Path, text: str) -> PreTrainedTokenizerBase:
    (folder / "other.jinja").write_text(text)
    return load_tokenizer(ModelConfig(name=QUICKSTART, chat_template=str(folder / "other.jinja")))


def without_template() -> PreTrainedTokenizerBase:
    return load_tokenizer(ModelConfig(name=QUICKSTART, chat_template="none"))


def example(*messages: dict[str, Any], **fields: Any) -> Example:
    return Example(messages, "2", 0, **fields)


def test_a_template_of_a_file_takes_the_place_of_the_tokenizers(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    assert render_prompt(tokenizer, example(ASKED)) == "[1+1=]"
    saved = load_saved_tokenizer(ModelConfig(name=QUICKSTART, chat_template=str(tmp_path / "other.jinja")))
    assert saved.chat_template == tokenizer.chat_template


@pytest.mark.parametrize(("text", "expected"), [
    ("{% for %}", r"other\.jinja: it cannot render a message"),
    ("{{ 1 // 0 }}", r"other\.jinja: it cannot render a message \(.*division"),
    ("{% include 'x' %}", r"other\.jinja: it cannot render a message"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", r"it cannot render a message \(.*recursion"),
    ("", r"other\.jinja: it leaves the message of the user out"),
    ("{{ bos_token }}", r"leaves the message of the user out"),
    (None, r"model\.chat_template=.*other\.jinja: no such file .*give a file of Jinja, or none"),
])  # fmt: skip
def test_a_file_that_is_no_template_is_refused(text: str | None, expected: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "other.jinja").write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load_tokenizer(ModelConfig(name=QUICKSTART, chat_template=str(tmp_path / "other.jinja")))


def test_a_model_without_template_takes_prompts_as_they_are(tmp_path: Path) -> None:
    shutil.copytree(QUICKSTART, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(ModelConfig(name=str(tmp_path / "base"), chat_template="none"))
    assert render_prompt(tokenizer, example(SYSTEM, ASKED, prefill="2")) == "Be brief.\n\n1+1=2"
    text = {"role": "user", "content": "<user>1+1=<assistant>"}
    control = [token for token in encode_prompt(tokenizer, example(text)) if token < 7]
    assert control == [4, 5], "the text is the user's own template"
    assert turn_end(tokenizer) is None
    with pytest.raises(ConfigError, match=r"one message of the user"):
        render_prompt(tokenizer, example(ASKED, CALLED, RESULT))
    with pytest.raises(ConfigError, match=r"env\.max_steps > 1 .*model\.chat_template=FILE"):
        Conversation(tokenizer, [], 2)


def test_a_text_that_is_a_prompt_begins_once() -> None:
    tokenizer = without_template()
    tokenizer.add_bos_token = True
    bare = encode_prompt(tokenizer, example(ASKED))
    begun = encode_prompt(tokenizer, example({"role": "user", "content": f"{tokenizer.bos_token}1+1="}))
    assert begun.count(tokenizer.bos_token_id) == 1
    assert [token for token in bare if token != tokenizer.bos_token_id] == begun[1:]


def test_a_text_that_is_a_prompt_does_not_end() -> None:
    bare = encode_prompt(without_template(), example(ASKED))
    tokenizer = without_template()
    tokenizer.add_eos_token = True
    assert tokenizer.encode("1+1=")[-1] == tokenizer.eos_token_id
    assert encode_prompt(tokenizer, example(ASKED)) == bare


@pytest.mark.parametrize(("messages", "expected"), [
    ((SYSTEM, ASKED), r"\(system, user\): System role not supported; env\.system_prompt='' leaves"),
    ((ASKED, ASKED), r"\(user, user\): Conversation roles must alternate; join messages of one role"),
])  # fmt: skip
def test_roles_that_are_refused(messages: tuple[dict[str, Any], ...], expected: str, tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, STRICT)
    rows = [example(ASKED)] * 3 + [Example(messages, "2", 7)]
    with pytest.raises(ConfigError, match=rf"^row 7: .* {expected}.*model\.chat_template=FILE$"):
        check_prompts(tokenizer, rows, "jsonl")
    check_prompts(tokenizer, rows[:3], "jsonl")


def test_a_template_that_refuses_what_a_call_holds_is_found_before_a_run(tmp_path: Path) -> None:
    one_call = (
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}{{ 1 // 0 }}{% endif %}"
    )
    tokenizer = with_template(tmp_path, one_call + "{{ m['content'] }}{% endfor %}")
    single = example(ASKED, CALLED, RESULT)
    double = Example((ASKED, CALLED | {"tool_calls": CALLED["tool_calls"] * 2}, RESULT), "2", 7)
    check_prompts(tokenizer, [single], "jsonl")
    with pytest.raises(ConfigError, match=r"^row 7: .*zero; mend or remove the row"):
        check_prompts(tokenizer, [single, double], "jsonl")


@pytest.mark.parametrize(("arguments", "expected"), [
    ("c.function.arguments | tojson", 'add({"a": "<eos>"})'),
    ("'' + c.function.arguments", 'add({"a": "<eos>"})'),
])  # fmt: skip
def test_tools_and_calls_reach_the_template(arguments: str, expected: str, tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, CALLING.replace("ARGUMENTS", arguments))
    tools = ({"type": "function", "function": {"name": "add"}},)
    called = example(ASKED, CALLED, RESULT, tools=tools)
    text = render_prompt(tokenizer, called)
    assert text == f"{json.dumps(tools[0])}<user>1+1=<user>{expected}<user>2[add call_1]<assistant>"
    ids = encode_prompt(tokenizer, called)
    assert tokenizer.eos_token_id not in ids, "what a call spells is text"
    assert tokenizer.decode(ids) == text


def test_keys_of_objects_are_text_too(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "{{ tools | tojson }}{{ messages[0].content }}")
    ids = encode_prompt(tokenizer, example(ASKED, tools=({"<eos>": {"<user>": 1}},)))
    assert not [token for token in ids if token < 7]
    assert tokenizer.decode(ids) == '[{"<eos>": {"<user>": 1}}]1+1='


def test_a_prefill_is_part_of_the_prompt_and_text() -> None:
    tokenizer = load_tokenizer(ModelConfig(name=QUICKSTART))
    bare = encode_prompt(tokenizer, example(ASKED))
    begun = encode_prompt(tokenizer, example(ASKED, prefill="2"))
    assert begun[: len(bare)] == bare
    assert tokenizer.decode(begun[len(bare) :]) == "2"
    hostile = encode_prompt(tokenizer, example(ASKED, prefill="<eos>"))
    assert tokenizer.eos_token_id not in hostile[len(bare) :]
    assert tokenizer.decode(hostile[len(bare) :]) == "<eos>"


@pytest.mark.parametrize(("prompt", "prefill", "expected"), [
    ("<user>1+1=<assistant>", "", ""), ("<user>1+1=<assistant><think>\n", "", "<think>\n"),
    ("<user>Write <think>.<assistant>", "", ""), ("<assistant><think>\n\n</think>\n\n", "", ""),
    ("<assistant><think>\nWell, ", "Well, ", "<think>\nWell, "),
    ("<assistant>So <think>", "So <think>", "So <think>"),
])  # fmt: skip
def test_an_answer_that_the_prompt_begins(prompt: str, prefill: str, expected: str) -> None:
    assert answer_prefill(prompt, prefill) == expected


def test_a_reward_sees_what_the_template_opened(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, THINKING)
    encoder = Encoder(tokenizer)
    prompt = encoder.encode(example(ASKED))
    end = tokenizer.eos_token_id
    ids = [*tokenizer.encode("2", add_special_tokens=False), end]
    one = SampledCompletion(ids, [0.0] * len(ids), [0] * len(ids), "stop")
    encoder.decode([one], answer_prefill(encoder.prompt_text(prompt)))
    assert one.shown is not None
    assert (one.text, one.shown.text, one.shown.full_text) == ("2", "2", "<think>\n2")
    reply = tokenizer.encode("<user>again<assistant><think>\n", add_special_tokens=False)
    whole = [*ids, *reply, *ids]
    sampled = [True] * len(ids) + [False] * len(reply) + [True] * len(ids)
    two = SampledCompletion(whole, [0.0] * len(whole), [0] * len(whole), "stop", sampled)
    encoder.decode([two], "So ")
    assert two.shown is not None
    assert two.shown.prefill == "<think>\n", "that of its last turn"


def test_prompts_that_are_rendered_already_are_counted(logged: Logged) -> None:
    rendered = Example(({"role": "user", "content": "<user>1+1=<eos><assistant>"},), "2", 5)
    rows = [example(ASKED), rendered, rendered]
    check_prompts(load_tokenizer(ModelConfig(name=QUICKSTART)), rows, "jsonl")
    (message,) = logged.messages
    assert "2 of 3 prompts spell control tokens of this model (row 5: '<user>')" in message
    assert "model.chat_template=none" in message
    logged.messages.clear()
    check_prompts(without_template(), rows, "jsonl")
    assert not logged.messages
