"""Tests of tokens spelled in messages, arguments and schemas: they stay text."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from envs.chat import encode_prompt
from envs.control_tokens import control_tokens
from envs.spelled_tokens import token_edges
from envs.task import Example
from tests.envs.chat_templates import (
    ADD_TOOL,
    CHATML,
    GOLDEN,
    NAMES_IN_TAGS,
    NEXT_ROLE_ENDS,
    PLAIN_TOKENS,
    THOUGHTS_OF_LAST_TURN,
    TOKENS,
    hostile_chats,
    make_chat_tokenizer,
    user,
)

TEMPLATES = {"chatml": CHATML, "thoughts": THOUGHTS_OF_LAST_TURN, "roles": NEXT_ROLE_ENDS, "tags": NAMES_IN_TAGS}
TOKENIZERS = {name: make_chat_tokenizer(template) for name, template in TEMPLATES.items()}


def encode(tokenizer: Any, messages: Any, tools: Any = (), prefill: str = "") -> list[int]:
    return encode_prompt(tokenizer, Example(tuple(messages), "", 0, prefill=prefill, tools=tuple(tools)))


def added_ids(tokenizer: Any, ids: list[int]) -> list[int]:
    return [token for token in ids if token in tokenizer.added_tokens_decoder]


def own_ids(tokenizer: Any, messages: Any, tools: Any) -> list[int]:
    text = tokenizer.apply_chat_template(
        list(messages), tools=list(tools) or None, add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def parts_of(token: str) -> list[str]:
    """Returns hostile texts with a token, a part of it, and the token in itself."""
    middle = len(token) // 2
    nested = token[:middle] + token + token[middle:]
    return [token, f"x{token}y", token[:-1], token[1:], token[1:-1], nested, token * 2, f"{token[1:]} {token[:-1]}"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_place_of_a_chat_can_forge_a_token(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    benign = {place: added_ids(tokenizer, encode(tokenizer, *chat)) for place, chat in hostile_chats("hello").items()}
    for token in (*TOKENS[TEMPLATES[name]], *PLAIN_TOKENS):
        for text in parts_of(token):
            for place, chat in hostile_chats(text).items():
                assert added_ids(tokenizer, encode(tokenizer, *chat)) == benign[place], (place, text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_without_spelled_tokens_has_the_templates_own_ids(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    control = control_tokens(tokenizer)
    for text in ("hello", "a < b > c", "<", ">", "|", "tool", "[1, 2]", " two  words\n", "äöü 你好", "type", "system"):
        for place, (messages, tools) in hostile_chats(text).items():
            assert encode(tokenizer, messages, tools) == own_ids(tokenizer, messages, tools), (place, text)
            private = control.encode_rendered(control.render_with_private_names(messages, tools))
            assert private == own_ids(tokenizer, messages, tools), (place, text)


@given(
    st.lists(st.sampled_from(["<", "|", ">", "im_end", "/", "tool_call", "think", " ", "\n", "<|im_end|>"])).map(
        "".join
    )
)
@settings(max_examples=60, deadline=None)
def test_any_text_decodes_to_itself(text: str) -> None:
    tokenizer = TOKENIZERS["chatml"]
    ids = encode(tokenizer, [user(text)])
    assert added_ids(tokenizer, ids) == added_ids(tokenizer, encode(tokenizer, [user("hello")]))
    assert tokenizer.decode(ids) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_the_edges_of_a_template_without_open_texts_are_empty() -> None:
    edges = token_edges(("<|im_end|>", "<tool_call>"), CHATML)
    assert not any(map(edges.touches, ("<|im_end|", "im_end|>", "tool_call", "|im_end|>")))
    edges = token_edges(("<|im_end|>", "<tool_call>"), "{{ '<' ~ name ~ '>' }}")
    assert all(map(edges.touches, ("a <tool_call", "tool_call> b", "tool_call", "|im_end|")))
    assert not any(map(edges.touches, ("tool_calls", "a tool_call", "<tool", "end")))


def test_words_and_white_space_are_text_everywhere() -> None:
    tokenizer = make_chat_tokenizer(CHATML)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("\n\n", "Kubernetes", "naïve_word")])
    assert not control_tokens(tokenizer).spells_control_token([user("Kubernetes\n\nnaïve_word")])
    ids = encode(tokenizer, [user("Kubernetes\n\n<|im_end|>")])
    assert tokenizer.convert_tokens_to_ids("Kubernetes") in ids
    assert tokenizer.convert_tokens_to_ids("\n\n") in ids


def test_a_prefill_holds_tokens_but_no_control_tokens() -> None:
    tokenizer = make_chat_tokenizer(CHATML)
    think, end = (tokenizer.convert_tokens_to_ids(text) for text in ("<think>", "<|im_end|>"))
    for question in ("1+1=", "What is <think>?"):
        bare = encode(tokenizer, [user(question)])
        assert encode(tokenizer, [user(question)], prefill="<think>") == [*bare, think]
        ids = encode(tokenizer, [user(question)], prefill="<think><|im_end|>")[len(bare) :]
        assert ids[0] == think and end not in ids and tokenizer.decode(ids) == "<think><|im_end|>"


def test_a_sampled_turn_may_have_tokens_that_are_no_control_tokens() -> None:
    tokenizer = make_chat_tokenizer(CHATML)
    turn = tokenizer.encode("<think>a</think><tool_call>{}</tool_call><|im_end|>", add_special_tokens=False)
    control = control_tokens(tokenizer)
    assert not control.has_control_tokens(turn, [tokenizer.eos_token_id])
    assert control.has_control_tokens(turn, [])
    assert control.first_spelled_token("<think>") is None


@pytest.mark.parametrize("content", ["<think>\nsum\n</think>\n\n2", "sum</think>2", "<think>sum</think>\n2"])
def test_thoughts_in_content_are_separated_as_the_template_does(content: str) -> None:
    """The template's own tokens enclose the thoughts, and the text of the message makes none."""
    tokenizer = make_chat_tokenizer(THOUGHTS_OF_LAST_TURN)
    messages = [user("1+1="), {"role": "assistant", "content": content}]
    control = control_tokens(tokenizer)
    assert control.spells_control_token(messages)
    text = control.render_with_private_names(messages, (), add_generation_prompt=False)
    own = tokenizer.apply_chat_template(messages, tokenize=False)
    assert control.encode_rendered(text) == tokenizer.encode(own, add_special_tokens=False)
    earlier = [*messages, user("Sure?")]
    assert encode(tokenizer, earlier) == own_ids(tokenizer, earlier, [])


def test_thoughts_are_text_where_the_template_does_not_search_them() -> None:
    tokenizer = make_chat_tokenizer(CHATML)
    messages = [user("1+1="), {"role": "assistant", "content": "<think>sum</think>2"}, user("Sure?")]
    ids = encode(tokenizer, messages)
    assert "<think>sum</think>2" in tokenizer.decode(ids)
    assert tokenizer.convert_tokens_to_ids("<think>") not in ids


def test_the_tokenizer_itself_encodes_a_chat_without_spelled_tokens() -> None:
    tokenizer = copy.copy(TOKENIZERS["chatml"])
    assert encode(tokenizer, [user("1+1=")], [ADD_TOOL])
    assert "_private_tokenizer" not in vars(control_tokens(tokenizer))


@pytest.mark.skipif(not GOLDEN.exists(), reason="no recorded families")
@pytest.mark.parametrize("is_special", [True, False])
def test_recorded_families(is_special: bool) -> None:
    template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}BEFORE{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + ']' }}{{ c.function.arguments | tojson }}"
        "{% endfor %}"
        "{% endfor %}AFTER"
    )
    for family in json.loads((GOLDEN / "special_tokens.json").read_text())["families"]:
        before, _, after = family["benign_render"].partition("hello")
        tokens = tuple(family["control_tokens"])
        quoted = ("{{ %s }}" % json.dumps(text) for text in (before, after))  # noqa: UP031
        own = template.replace("BEFORE", next(quoted)).replace("AFTER", next(quoted))
        split = len(tokens) if is_special else 1
        tokenizer = make_chat_tokenizer(own, tokens[:split], tokens[split:])
        benign = {
            place: added_ids(tokenizer, encode(tokenizer, *chat)) for place, chat in hostile_chats("hello").items()
        }
        for number, hostile in enumerate(family["hostile"]):
            places = list(hostile_chats(hostile["text"]).items())
            for place, chat in places[number % 3 :: 3]:
                assert added_ids(tokenizer, encode(tokenizer, *chat)) == benign[place], (
                    family["family"],
                    place,
                    hostile,
                )
