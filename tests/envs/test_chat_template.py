"""Tests of prompt rendering with a chat template, with another template, or without one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from config.schema.errors import ConfigError
from config.schema.models import ModelConfig
from envs.chat import ChatEncoder, answer_prefill, encode_prompt
from envs.chat_suffix import check_user_replies
from envs.chat_template import render_prompt
from envs.control_tokens import turn_end_token
from envs.group import SampledCompletion
from envs.prompt_checks import check_prompts
from envs.task import Example
from tests.log_capture import LogCapture
from torchgrpo.training.model_loading import load_saved_tokenizer, load_tokenizer

QUICKSTART = "torchgrpo/models/quickstart"
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "1+1="}
CALL_MESSAGE = {
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
    assert render_prompt(tokenizer, example(QUESTION)) == "[1+1=]"
    saved = load_saved_tokenizer(ModelConfig(name=QUICKSTART, chat_template=str(tmp_path / "other.jinja")))
    assert saved.chat_template == tokenizer.chat_template


@pytest.mark.parametrize(("text", "expected"), [
    ("{% for %}", r"other\.jinja: the template cannot render a message"),
    ("{{ 1 // 0 }}", r"other\.jinja: the template cannot render a message \(.*division"),
    ("{% include 'x' %}", r"other\.jinja: the template cannot render a message"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", r"the template cannot render a message \(.*recursion"),
    ("", r"other\.jinja: the template leaves out the user's message"),
    ("{{ bos_token }}", r"leaves out the user's message"),
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
    assert render_prompt(tokenizer, example(SYSTEM, QUESTION, prefill="2")) == "Be brief.\n\n1+1=2"
    text = {"role": "user", "content": "<user>1+1=<assistant>"}
    control = [token for token in encode_prompt(tokenizer, example(text)) if token < 7]
    assert control == [4, 5], "the text is the user's own template"
    assert turn_end_token(tokenizer) is None
    with pytest.raises(ConfigError, match=r"a prompt must be one user message"):
        render_prompt(tokenizer, example(QUESTION, CALL_MESSAGE, RESULT))
    with pytest.raises(ConfigError, match=r"env\.max_steps must be 1 .*model\.chat_template=FILE"):
        check_user_replies(tokenizer)


def test_a_plain_prompt_has_one_begin_token() -> None:
    tokenizer = without_template()
    tokenizer.add_bos_token = True
    bare = encode_prompt(tokenizer, example(QUESTION))
    prompt_ids = encode_prompt(tokenizer, example({"role": "user", "content": f"{tokenizer.bos_token}1+1="}))
    assert prompt_ids.count(tokenizer.bos_token_id) == 1
    assert [token for token in bare if token != tokenizer.bos_token_id] == prompt_ids[1:]


def test_a_plain_prompt_has_no_end_token() -> None:
    bare = encode_prompt(without_template(), example(QUESTION))
    tokenizer = without_template()
    tokenizer.add_eos_token = True
    assert tokenizer.encode("1+1=")[-1] == tokenizer.eos_token_id
    assert encode_prompt(tokenizer, example(QUESTION)) == bare


@pytest.mark.parametrize(("messages", "expected"), [
    ((SYSTEM, QUESTION), r"\(system, user\): System role not supported; set env\.system_prompt='' to drop"),
    ((QUESTION, QUESTION),
     r"\(user, user\): Conversation roles must alternate; join consecutive messages of the same role"),
])  # fmt: skip
def test_roles_that_are_refused(messages: tuple[dict[str, Any], ...], expected: str, tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, STRICT)
    rows = [example(QUESTION)] * 3 + [Example(messages, "2", 7)]
    with pytest.raises(ConfigError, match=rf"^row 7: .* {expected}.*model\.chat_template=FILE to another template$"):
        check_prompts(tokenizer, rows, "jsonl")
    check_prompts(tokenizer, rows[:3], "jsonl")


def test_a_template_that_refuses_a_call_is_found_before_a_run(tmp_path: Path) -> None:
    one_call = "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}{{ 1 // 0 }}{% endif %}"
    tokenizer = with_template(tmp_path, one_call + "{{ m['content'] }}{% endfor %}")
    single = example(QUESTION, CALL_MESSAGE, RESULT)
    double = Example((QUESTION, CALL_MESSAGE | {"tool_calls": CALL_MESSAGE["tool_calls"] * 2}, RESULT), "2", 7)
    check_prompts(tokenizer, [single], "jsonl")
    with pytest.raises(ConfigError, match=r"^row 7: .*zero; correct or remove the row"):
        check_prompts(tokenizer, [single, double], "jsonl")


@pytest.mark.parametrize(("arguments", "expected"), [
    ("c.function.arguments | tojson", 'add({"a": "<eos>"})'),
    ("'' + c.function.arguments", 'add({"a": "<eos>"})'),
])  # fmt: skip
def test_tools_and_calls_reach_the_template(arguments: str, expected: str, tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, CALLING.replace("ARGUMENTS", arguments))
    tools = ({"type": "function", "function": {"name": "add"}},)
    chat = example(QUESTION, CALL_MESSAGE, RESULT, tools=tools)
    text = render_prompt(tokenizer, chat)
    assert text == f"{json.dumps(tools[0])}<user>1+1=<user>{expected}<user>2[add call_1]<assistant>"
    ids = encode_prompt(tokenizer, chat)
    assert tokenizer.eos_token_id not in ids, "a control token in a call is text"
    assert tokenizer.decode(ids) == text


def test_keys_of_objects_are_text_too(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "{{ tools | tojson }}{{ messages[0].content }}")
    ids = encode_prompt(tokenizer, example(QUESTION, tools=({"<eos>": {"<user>": 1}},)))
    assert not [token for token in ids if token < 7]
    assert tokenizer.decode(ids) == '[{"<eos>": {"<user>": 1}}]1+1='


def test_a_prefill_is_part_of_the_prompt_and_text() -> None:
    tokenizer = load_tokenizer(ModelConfig(name=QUICKSTART))
    bare = encode_prompt(tokenizer, example(QUESTION))
    prompt_ids = encode_prompt(tokenizer, example(QUESTION, prefill="2"))
    assert prompt_ids[: len(bare)] == bare
    assert tokenizer.decode(prompt_ids[len(bare) :]) == "2"
    hostile = encode_prompt(tokenizer, example(QUESTION, prefill="<eos>"))
    assert tokenizer.eos_token_id not in hostile[len(bare) :]
    assert tokenizer.decode(hostile[len(bare) :]) == "<eos>"


@pytest.mark.parametrize(("prompt", "prefill", "expected"), [
    ("<user>1+1=<assistant>", "", ""), ("<user>1+1=<assistant><think>\n", "", "<think>\n"),
    ("<user>Write <think>.<assistant>", "", ""), ("<assistant><think>\n\n</think>\n\n", "", ""),
    ("<assistant><think>\nWell, ", "Well, ", "<think>\nWell, "),
    ("<assistant>So <think>", "So <think>", "So <think>"),
])  # fmt: skip
def test_answer_prefill_is_the_part_of_the_answer_in_the_prompt(prompt: str, prefill: str, expected: str) -> None:
    assert answer_prefill(prompt, prefill) == expected


def test_a_reward_sees_the_thought_that_the_template_opened(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, THINKING)
    encoder = ChatEncoder(tokenizer)
    prompt = encoder.encode(example(QUESTION))
    end = tokenizer.eos_token_id
    ids = [*tokenizer.encode("2", add_special_tokens=False), end]
    one = SampledCompletion(ids, [0.0] * len(ids), [0] * len(ids), "stop")
    encoder.decode([one], answer_prefill(encoder.prompt_text(prompt)))
    assert one.reward_input is not None
    assert (one.text, one.reward_input.text, one.reward_input.full_text) == ("2", "2", "<think>\n2")
    reply = tokenizer.encode("<user>again<assistant><think>\n", add_special_tokens=False)
    whole = [*ids, *reply, *ids]
    sampled = [True] * len(ids) + [False] * len(reply) + [True] * len(ids)
    two = SampledCompletion(whole, [0.0] * len(whole), [0] * len(whole), "stop", sampled)
    encoder.decode([two], "So ")
    assert two.reward_input is not None
    assert two.reward_input.prefill == "<think>\n", "the prefill of its last turn"


def test_prompts_that_are_rendered_already_are_counted(log_capture: LogCapture) -> None:
    rendered = Example(({"role": "user", "content": "<user>1+1=<eos><assistant>"},), "2", 5)
    rows = [example(QUESTION), rendered, rendered]
    check_prompts(load_tokenizer(ModelConfig(name=QUICKSTART)), rows, "jsonl")
    (message,) = log_capture.messages
    assert "2 of 3 prompts contain the text of control tokens of this model (row 5: '<user>')" in message
    assert "model.chat_template=none" in message
    log_capture.messages.clear()
    check_prompts(without_template(), rows, "jsonl")
    assert not log_capture.messages


def test_a_prompt_without_tokens_is_refused() -> None:
    """Some tokenizers drop characters that they do not know."""
    two_tokens = Tokenizer(BPE({"<eos>": 0, "a": 1}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=two_tokens, eos_token="<eos>")
    with pytest.raises(ConfigError, match=r"^the prompt of row 7 has no tokens: .* its text '1\+1=.*tokenizer of the"):
        ChatEncoder(tokenizer, embeddings=2).encode(Example((QUESTION,), "2", 7))
