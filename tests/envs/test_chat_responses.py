"""Tests of responses as messages: thoughts, content, calls and malformed calls."""

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from config.schema.errors import ConfigError
from envs.call_texts import MAX_ARGUMENT_DEPTH
from envs.chat_responses import PLAIN, ParsedResponse, ResponseParser, forms
from envs.chat_template import template_renders_tools
from tests.envs.chat_templates import (
    ADD_TOOL,
    CHATML,
    END_OF_CHAT,
    GOLDEN,
    NAMES_IN_TAGS,
    NINE_LETTER_IDS,
    TRIMMED_CONTENT,
    make_chat_tokenizer,
    user,
)
from tests.envs.test_control_tokens import byte_level

ADD = {"name": "add", "arguments": {"a": 1, "unit": "m"}}
NINE = {"name": "add", "arguments": {"a": 1}}
MARKS = re.compile(
    r"<[|｜][^<>'\"]{1,40}?[|｜]>|<\|tool_call>|<tool_call\|>|<\|channel>|<channel\|>|<turn\|>|\[[A-Z_/]+\]"
)
JSON = '{"name": "add", "arguments": {"a": 1, "unit": "m"}}'
BEGIN, END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
SINGLE_CALLS = {
    "hermes": f"<tool_call>\n{JSON}\n</tool_call>",
    "qwen_xml": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=unit>\nm\n</parameter>\n"
    "</function>\n</tool_call>",
    "llama3_json": '{"name": "add", "parameters": {"a": 1, "unit": "m"}}',
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1, "unit": "m"}',
    "deepseek": f'<｜tool▁calls▁begin｜>{BEGIN}add{SEPARATOR}{{"a": 1, "unit": "m"}}{END}<｜tool▁calls▁end｜>',
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>unit</arg_key>\n"
    "<arg_value>m</arg_value>\n</tool_call>",
    "gemma4": '<|tool_call>call:add{a:1,unit:<|"|>m<|"|>}<tool_call|>',
    "pythonic": "<|python_start|>[add(a=1, unit='m')]<|python_end|>",
    "lfm2": "<|tool_call_start|>[add(a=1, unit='m')]<|tool_call_end|>",
    "olmo3": "<function_calls>add(a=1, unit='m')</function_calls>",
    "kimi_k2": '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1, "unit": "m"}<|tool_call_end|>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
    '<parameter name="unit">m</parameter>\n</invoke>\n</minimax:tool_call>',
    "internlm": f"<|action_start|><|plugin|>{JSON}<|action_end|>",
    "phi4_mini": f"functools[{JSON}]",
    "gptoss": "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    '{"a": 1, "unit": "m"}<|call|>',
}
"""Form -> the call `ADD` in that form."""
MALFORMED = {
    "hermes": ["<tool_call>{oops}</tool_call>", "<tool_call>[1]</tool_call>",
               '<tool_call>{"arguments": {}}</tool_call>',
               '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', '<tool_call>{"name": "add", "argu',
               '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "<tool_call></tool_call>",
               '<tool_call>{"name": "add", "arguments": "{1}"}</tool_call>', "<tool_call>null</tool_call>"],
    "qwen_xml": ["<tool_call>\n<function=add>\n<parameter=a>\n1", '<tool_call>{"name": "add"}</tool_call>',
                 "<tool_call><function=add>{}</function></tool_call>", "<tool_call>add</tool_call>"],
    "llama3_json": ['{"name": "add", "parameters": {"a": 1', '{"name": "add", "parameters": [1]}',
                    '{"parameters": {"a": 1}}'],
    "mistral": ["[TOOL_CALLS]add[ARGS]{", "[TOOL_CALLS]add", "[TOOL_CALLS]", '[TOOL_CALLS][{"arguments": {}}]'],
    "deepseek": [f"{BEGIN}add{SEPARATOR}{{{END}", f"{BEGIN}add{END}", f"{BEGIN}add{SEPARATOR}[1]{END}"],
    "glm": ["<tool_call>add\n<arg_key>a</arg_key>", "<tool_call>add {}</tool_call>", "<tool_call></tool_call>"],
    "gemma4": ["<|tool_call>call:add{a:<tool_call|>", "<|tool_call>add<tool_call|>"],
    "pythonic": ["<|python_start|>[add(a=b)]<|python_end|>", "<|python_start|>[add(1)]", "[add(a=1",
                 "<|python_start|>[add(a=__import__('os').getcwd())]", "<|python_start|>import os",
                 "<|python_start|>[add(**{'a': 1})]", "<|python_start|>[add(a={1, 2})]", "<|python_start|>[f()()]"],
    "lfm2": ["<|tool_call_start|>[1, 2]<|tool_call_end|>"],
    "olmo3": ["<function_calls>add(</function_calls>", "<function_calls></function_calls>"],
    "kimi_k2": ["<|tool_call_begin|>add<|tool_call_end|>"],
    "minimax_m2": ['<minimax:tool_call><invoke name="add"></minimax:tool_call>'],
    "internlm": ["<|action_start|><|plugin|>{<|action_end|>"],
    "phi4_mini": ["functools[{]"],
    "gptoss": ["<|channel|>commentary to=functions.add<|message|>{<|call|>"],
}  # fmt: skip


def make_tokenizer() -> Any:
    """Makes a byte-level tokenizer whose control tokens are the marks of all forms."""
    texts = [*SINGLE_CALLS.values(), "<|im_end|><|eot_id|><|return|><|end|><turn|>[THINK][/THINK]<|channel>x<channel|>"]
    if GOLDEN.exists():
        texts += [case["text"] for case in recorded_cases()]
    control = ["<|im_end|>", *sorted({mark for text in texts for mark in MARKS.findall(text)} - {"<|im_end|>"})]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(control), eos_token="<|im_end|>")
    special = [AddedToken(text, special=True, normalized=False) for text in control]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = CHATML
    return tokenizer


def recorded_cases() -> list[dict[str, Any]]:
    return list(json.loads((GOLDEN / "tool_formats.json").read_text())["parsing"])


TOKENIZER = make_tokenizer()
PARSERS = {name: ResponseParser(TOKENIZER, name) for name in forms()}


def parse(form: str, text: str, prompt: str = "", tools: Any = (ADD_TOOL,), prefill: str = "") -> ParsedResponse:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return PARSERS[form].parse(ids, prompt, tools, prefill)


def functions(response: ParsedResponse) -> list[dict[str, Any]]:
    return [one["function"] for one in response.message.get("tool_calls", ())]


@pytest.mark.parametrize("form", SINGLE_CALLS)
def test_a_call_in_each_form(form: str) -> None:
    call = SINGLE_CALLS[form]
    assert functions(parse(form, call)) == [ADD]
    response = parse(form, f"{call}<|im_end|>")
    assert functions(response) == [ADD] and response.malformed == () and response.message["content"] == ""
    (made,) = response.message["tool_calls"]
    assert made["type"] == "function" and (len(made["id"]) == 9 or form == "kimi_k2")
    assert parse(form, call).message == response.message, "ids are the same in every run"


@pytest.mark.parametrize("form", sorted(set(SINGLE_CALLS) - {"llama3_json", "phi4_mini", "pythonic", "gptoss"}))
def test_several_calls_with_text_around_them(form: str) -> None:
    call = SINGLE_CALLS[form]
    response = parse(
        form,
        f"<think>sum</think>I will add.\n{call}\n{call}<|im_end|>"
        if form not in ("gemma4", "mistral")
        else f"I will add.\n{call}{call}<|im_end|>",
    )
    assert functions(response) == [ADD, ADD]
    assert response.message["content"] == "I will add." and response.malformed == ()
    first, second = response.message["tool_calls"]
    assert first["id"] != second["id"] or form == "kimi_k2"


@pytest.mark.parametrize(("form", "text"), [
    ("llama3_json", f"{SINGLE_CALLS['llama3_json']}; {SINGLE_CALLS['llama3_json']}"),
    ("llama3_json", f"[{SINGLE_CALLS['llama3_json']},\n{JSON}]"), ("phi4_mini", f"functools[{JSON},{JSON}]"),
    ("pythonic", "[add(a=1, unit='m'), add(unit='m', a=1)]"), ("mistral", f"[TOOL_CALLS] [{JSON}, {JSON}]"),
    ("olmo3", "<function_calls>add(a=1, unit='m')\nadd(a=1, unit='m')</function_calls>"),
])  # fmt: skip
def test_lists_of_calls(form: str, text: str) -> None:
    assert functions(parse(form, text)) == [ADD, ADD]


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in MALFORMED.items() for text in texts])
def test_malformed_calls_are_reported_and_kept(form: str, text: str) -> None:
    response = parse(form, text)
    assert functions(response) == [] and len(response.malformed) == 1
    assert response.malformed[0].startswith("call 1: ") and "\n" not in response.malformed[0]
    assert response.message["content"].replace(" ", "") == text.strip().replace(" ", ""), "the text stays"
    if form in ("llama3_json", "phi4_mini", "pythonic", "mistral", "gptoss", "gemma4"):
        return
    both = parse(form, f"{SINGLE_CALLS[form]}\n{text}")
    assert functions(both) == [ADD] and both.malformed[0].startswith("call 2: ")
    assert both.message["content"] == text.strip()


@pytest.mark.parametrize(("form", "text"), [
    ("llama3_json", '{"answer": 42}'), ("llama3_json", '{"name": "Ada", "age": 36}'), ("pythonic", "[1, 2, 3]"),
    ("pythonic", "see [add(a=1)]"), ("hermes", "a < b"), ("olmo3", "[add(a=1)]"), ("plain", SINGLE_CALLS["hermes"]),
])  # fmt: skip
def test_answers_that_are_no_calls(form: str, text: str) -> None:
    assert parse(form, text) == ParsedResponse({"role": "assistant", "content": text})


@pytest.mark.parametrize("text", ["", "  two  words\n", "<think>\nsum\n</think>\n\n2", "<think></think>2"])
def test_content_and_thoughts(text: str) -> None:
    message = parse("hermes", f"{text}<|im_end|>").message
    if "<think>" not in text:
        assert message == {"role": "assistant", "content": text}
    else:
        reasoning = "sum" if "sum" in text else ""
        assert message == {"role": "assistant", "content": "2", "reasoning_content": reasoning}


@pytest.mark.parametrize(("prompt", "text", "reasoning", "content"), [
    ("<|im_end|>assistant\n<think>\n", "sum</think>\n2", "sum", "2"),
    ("<|im_end|>assistant\n<think>", "a su", "a su", ""),
    ("<|im_end|>assistant\n<think>\nWell, ", "sum</think>2", "Well, sum", "2"),
    ("<think>\n\n</think>\n\n", "2", None, "2"), ("What is <think>?<|im_end|>assistant\n", "2", None, "2"),
    ("", "sum</think>2", "sum", "2"), ("", "<think>a <tool_call> here</think>2", "a <tool_call> here", "2"),
])  # fmt: skip
def test_thoughts_that_the_prompt_opens(prompt: str, text: str, reasoning: str | None, content: str) -> None:
    message = parse("hermes", text, prompt).message
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_the_prefill_belongs_to_the_response() -> None:
    prompt = "<|im_end|>assistant\nAnswer:"
    assert parse("hermes", " 2", prompt, prefill="Answer:").message["content"] == "Answer: 2"
    response = parse("hermes", f"sum</think>{SINGLE_CALLS['hermes']}", "<think>", prefill="<think>")
    assert response.message["reasoning_content"] == "sum" and functions(response) == [ADD]


@pytest.mark.parametrize("form", ["qwen_xml", "glm", "minimax_m2"])
def test_values_in_tags_get_the_types_of_the_schema(form: str) -> None:
    text = SINGLE_CALLS[form]
    assert functions(parse(form, text.replace("m\n</p", "7\n</p").replace(">m<", ">7<")))[0]["arguments"] == {
        "a": 1, "unit": "7"
    }  # fmt: skip
    assert functions(parse(form, text, tools=()))[0]["arguments"] == {"a": "1", "unit": "m"}


def test_ids_that_the_model_wrote_are_kept() -> None:
    (one,) = parse("kimi_k2", SINGLE_CALLS["kimi_k2"]).message["tool_calls"]
    assert one["id"] == "functions.add:0"
    (one,) = parse("mistral", '[TOOL_CALLS]add[CALL_ID]abc123def[ARGS]{"a": 1}').message["tool_calls"]
    assert one["id"] == "abc123def" and one["function"] == NINE


PIECES = [*SINGLE_CALLS.values(), *(text for texts in MALFORMED.values() for text in texts),
          "<think>", "</think>", "\\", '"', "\0", "{" * 300,
          "[" * 4000, "(" * 300, "<|im_end|>", "9" * 5000, "-" * 3000, "\ud800".encode("utf-8", "replace").decode(),
          "f(" * 150, "<parameter=a>", "{'a': 1}", "1e999", "é"]  # fmt: skip


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=8)), max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_any_text_gives_a_message(pieces: list[str], rng: random.Random) -> None:
    text = "".join(pieces).encode("utf-8", "replace").decode()
    if text and rng.random() < 0.5:  # a text with an error somewhere
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice(["", "<", "}", '"', "x"]) + text[place + 1 :]
    form = rng.choice(sorted(SINGLE_CALLS))
    response = parse(form, text, prompt=rng.choice(["", "<think>"]))
    assert isinstance(response.message["content"], str)
    assert all(isinstance(one["arguments"], dict) and one["name"] for one in functions(response))
    json.dumps(response.message)


def test_tokens_without_text() -> None:
    response = PARSERS["hermes"].parse([len(TOKENIZER) + 7], "", [])
    assert response.message["content"] == f"<no token: {len(TOKENIZER) + 7}>"


@pytest.mark.parametrize(("template", "form"), [
    (CHATML, "hermes"), (NAMES_IN_TAGS, "qwen_xml"), (NINE_LETTER_IDS, "mistral"), (END_OF_CHAT, PLAIN),
    ("<|start_header_id|>{{ messages[0].content }}", "llama3_json"), ("<arg_key><tool_call>", "glm"),
    ("<｜tool▁call▁begin｜>", "deepseek"), ("<|tool_call>", "gemma4"), ("<|python_start|>", "pythonic"),
])  # fmt: skip
def test_the_chat_template_selects_the_form(template: str, form: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    assert ResponseParser(tokenizer).form == form


def test_the_tokenizers_own_response_template_comes_first() -> None:
    tokenizer = make_tokenizer()
    tokenizer.response_template = {
        "start_anchor": "<|im_end|>",
        "fields": {
            "thinking": {"open": "((", "close": "))"},
            "tool_calls": {"open": "@", "close": "@", "repeats": True, "content": "json",
                           "transform": {"type": "function", "function": "{content}"}},
            "content": {},
        },
    }  # fmt: skip
    parser = ResponseParser(tokenizer)
    assert parser.form == "tokenizer"
    response = parser.parse(tokenizer.encode(f"((sum))Yes @{JSON}@ @{{@"), "", [])
    assert functions(response) == [ADD] and len(response.malformed) == 1
    assert response.message["reasoning_content"] == "sum" and response.message["content"] == "Yes  @{@"
    assert ResponseParser(tokenizer, "hermes").form == "hermes"
    tokenizer.response_template = {"fields": 3}
    with pytest.raises(ConfigError, match=r"response template cannot be read .*set env\.tool_parser to one of"):
        ResponseParser(tokenizer)


def test_unknown_forms_and_templates_without_tools_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.tool_parser=nope: no such form.*hermes.*vllm:NAME"):
        ResponseParser(TOKENIZER, "nope")
    ResponseParser(TOKENIZER).check_tools()
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ tools | tojson if tools }}{{ messages[0].content }}"
    with pytest.raises(ConfigError, match=r"env\.tool_parser=auto: .*calls of no known form"):
        ResponseParser(tokenizer).check_tools()
    tokenizer.chat_template = "{{ messages[0].content }}<tool_call>"
    with pytest.raises(ConfigError, match="does not write tools into the prompt"):
        ResponseParser(tokenizer).check_tools()


@pytest.mark.parametrize(("template", "expected"), [
    (CHATML, True), (TRIMMED_CONTENT, True), (END_OF_CHAT, False), ("{{ 1 // 0 }}", False),
])  # fmt: skip
def test_templates_with_tools(template: str, expected: bool) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    assert template_renders_tools(tokenizer) == expected
    tokenizer.chat_template = None
    assert not template_renders_tools(tokenizer)


def test_the_parsed_message_renders_to_what_was_sampled() -> None:
    tokenizer = make_chat_tokenizer(CHATML)
    question, text = [user("1+1=")], f"I will add.\n{SINGLE_CALLS['hermes']}<|im_end|>"
    message = ResponseParser(tokenizer).parse(tokenizer.encode(text, add_special_tokens=False), "", [ADD_TOOL]).message
    rendered = str(tokenizer.apply_chat_template([*question, message], tools=[ADD_TOOL], tokenize=False))
    assert rendered.endswith(text.replace("add.\n", "add.") + "\n")


FORM_OF_RECORDED = {
    "qwen3": "hermes", "granite4": "hermes", "qwen3_coder": "qwen_xml", "qwen3.5": "qwen_xml", "nemotron3": "qwen_xml",
    "llama3": "llama3_json", "xlam": "llama3_json", "deepseek_v3": "deepseek", "deepseek_v31": "deepseek",
    "deepseek-r1-distill": "deepseek", "glm47_moe": "glm", "glm4moe": "glm", "lfm2.5": "lfm2",
    "phi4_mini_json": "phi4_mini", "llama4_pythonic": "pythonic",
}  # fmt: skip


@pytest.mark.skipif(not GOLDEN.exists(), reason="no recorded responses")
def test_recorded_responses() -> None:
    tools = json.loads((GOLDEN / "tool_formats.json").read_text())["tools"]
    for case in recorded_cases():
        form = FORM_OF_RECORDED.get(case["format"], case["format"])
        response, expected = parse(form, case["text"], case.get("prefix") or "", tools), case["expected_calls"]
        if isinstance(expected, list):
            assert functions(response) == expected, case
        elif "no valid call" in expected:
            assert functions(response) == [] and (response.malformed or response.message["content"]), case


class TestVllm:
    """Tests of vLLM's parsers by their names."""

    @pytest.fixture(scope="class", autouse=True)
    def _vllm(self) -> None:
        pytest.importorskip("vllm")

    def test_calls_and_thoughts(self) -> None:
        parser = ResponseParser(TOKENIZER, "vllm:pythonic")
        ids = TOKENIZER.encode("<think>sum</think>[add(a=1, unit='m')]<|im_end|>")
        response = parser.parse(ids, "", [ADD_TOOL])
        assert functions(response) == [ADD] and response.message["reasoning_content"] == "sum"
        assert response == parser.parse(ids, "", [ADD_TOOL]), "ids are the same in every run"
        assert parser.parse(TOKENIZER.encode("oops"), "", []).message == {"role": "assistant", "content": "oops"}

    def test_a_reasoning_parser(self) -> None:
        tokenizer = make_chat_tokenizer(CHATML)
        parser = ResponseParser(tokenizer, "vllm:hermes+deepseek_r1")
        ids = tokenizer.encode(f"sum</think>{SINGLE_CALLS['hermes']}<|im_end|>")
        response = parser.parse(ids, "", [ADD_TOOL])
        assert functions(response) == [ADD] and response.message["reasoning_content"] == "sum"

    @pytest.mark.parametrize("name", ["nope", "hermes+nope"])
    def test_an_unknown_name(self, name: str) -> None:
        with pytest.raises(ConfigError, match=rf"env\.tool_parser=vllm:{re.escape(name)}: vLLM has no parser 'nope'; "):
            ResponseParser(make_chat_tokenizer(CHATML), f"vllm:{name}")


def test_a_missing_vllm_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm.tool_parsers", None)
    monkeypatch.setitem(__import__("sys").modules, "vllm.reasoning", None)
    with pytest.raises(ConfigError, match=r"env\.tool_parser=vllm:hermes: vLLM cannot be imported"):
        ResponseParser(TOKENIZER, "vllm:hermes")


def test_arguments_that_are_nested_too_deep_are_malformed() -> None:
    def call(depth: int) -> str:
        return f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * depth}{"]" * depth}}}}}</tool_call>'

    assert parse("hermes", call(MAX_ARGUMENT_DEPTH - 1)).message["tool_calls"]
    parsed = parse("hermes", call(MAX_ARGUMENT_DEPTH))
    assert parsed.malformed == ("call 1: the arguments of f are nested deeper than 64 levels",)
