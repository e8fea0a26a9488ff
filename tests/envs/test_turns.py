"""Tests of the environment's replies between turns, as text and token ids."""

import asyncio
import copy
import threading
from collections.abc import Iterator

import pytest
from transformers import PreTrainedTokenizerBase

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.task import Example
from envs.tool_calls import Tool
from envs.turns import Conversation, ReflectionPrompt, make_responders, with_tool_instructions
from tests.tiny_models import numbered_examples

EOS = 2


def encode_turn(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Returns the tokens of a finished turn."""
    return [*tokenizer.encode(text, add_special_tokens=False), EOS]


def calculator() -> EnvConfig:
    return EnvConfig(dataset="x", max_steps=3, tools=["calculator"], tool_format="tags")


@pytest.mark.parametrize(("text", "reply"), [
    ("I need <calculator>2*3</calculator>", "calculator: 2*3"),
    ("<calculator>1</calculator> then <calculator>2</calculator>\n ", "calculator: 2"),
    ("<calculator>1</calculator> is one", None), ("1</calculator>", None), ("no call", None),
])  # fmt: skip
def test_a_call_ends_the_turn(text: str, reply: str | None) -> None:
    echo = Tool("calculator", run=str, is_slow=False, close=lambda: None)
    assert echo.reply(text) == reply


def test_the_stream_reads_as_the_template_would_have_written_it(tokenizer: PreTrainedTokenizerBase) -> None:
    conversation: Conversation = Conversation(tokenizer, make_responders(calculator()), 3)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "6*7?"}], add_generation_prompt=True, return_dict=False
    )
    turn = encode_turn(tokenizer, "<calculator>6*7</calculator>")
    whole = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "6*7?"},
            {"role": "assistant", "content": "<calculator>6*7</calculator>"},
            {"role": "user", "content": "calculator: 42"},
        ],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert [*prompt, *turn, *conversation.reply_sync(turn)] == whole
    assert conversation.reply_sync(encode_turn(tokenizer, "It is 42.")) == []


def test_an_end_token_of_no_template_stays_in_the_stream(tokenizer: PreTrainedTokenizerBase) -> None:
    conversation: Conversation = Conversation(tokenizer, [ReflectionPrompt("?")], 2)
    other = [25, 22, 7]  # ended by an end token other than the template's
    assert conversation.reply_sync(other) == [EOS, *conversation.reply_sync([25, 22, EOS])]


def test_tools_reply_before_the_reflection_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    env = EnvConfig(
        dataset="x", max_steps=3, tools=["calculator"], tool_format="tags", reasoning=True, reasoning_prompt="Sure?"
    )
    conversation: Conversation = Conversation(tokenizer, make_responders(env), 3)
    replies = [
        tokenizer.decode(conversation.reply_sync(encode_turn(tokenizer, text)))
        for text in ("<calculator>1/0</calculator>", "It is 3.")
    ]
    assert replies == ["<user>calculator: error: division by zero<assistant>", "<user>Sure?<assistant>"]


def test_the_last_turn_gets_no_reply(tokenizer: PreTrainedTokenizerBase) -> None:
    conversation = Conversation(tokenizer, [ReflectionPrompt("?")], 2)
    assert asyncio.run(conversation.reply(encode_turn(tokenizer, "1"), turn=1))
    assert asyncio.run(conversation.reply(encode_turn(tokenizer, "2"), turn=2)) == []


def test_slow_replies_run_in_parallel_with_generation(tokenizer: PreTrainedTokenizerBase) -> None:
    release = threading.Event()

    def slow(request: str) -> str:
        assert release.wait(600)
        if request == "break":
            raise RuntimeError("the tool is broken")
        return request.upper()

    close_calls: list[bool] = []
    tool = Tool("python", slow, is_slow=True, close=lambda: close_calls.append(True))
    conversation = Conversation(tokenizer, [tool], 2)

    def reply_to(request: str) -> "asyncio.Task[list[int]]":
        return asyncio.ensure_future(conversation.reply(encode_turn(tokenizer, f"<python>{request}</python>"), 1))

    async def converse() -> list[list[int]]:
        reply_tasks = [reply_to("a"), reply_to("b")]
        for _ in range(10):
            await asyncio.sleep(0)  # the event loop runs
        assert not any(task.done() for task in reply_tasks)
        release.set()
        answers = [await task for task in reply_tasks]
        with pytest.raises(RuntimeError, match="the tool is broken"):
            await reply_to("break")
        return answers

    assert [tokenizer.decode(ids) for ids in asyncio.run(converse())] == [
        "<user>python: A<assistant>",
        "<user>python: B<assistant>",
    ]
    conversation.close()
    assert close_calls == [True]


def test_a_template_without_a_second_question_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    other = copy.copy(tokenizer)
    other.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(ConfigError, match=r"does not render a user message .*env\.max_steps=1"):
        Conversation(other, [ReflectionPrompt("?")], 2)


def test_the_system_prompt_has_the_tool_instructions() -> None:
    with_system = Example(({"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}), "", 0)
    examples = with_tool_instructions([with_system, *numbered_examples(2)], calculator())
    assert len(examples) == 3
    first, second = examples[0].messages, examples[1].messages
    assert first[0]["content"].startswith("Be brief.\n\nYou have a calculator")
    assert "<calculator>...</calculator>" in first[0]["content"]
    assert [message["role"] for message in second] == ["system", "user"]
    assert [example.row for example in examples[1:]] == [0, 1]
    plain = numbered_examples(2)
    assert with_tool_instructions(plain, EnvConfig(dataset="x")) is plain


@pytest.mark.parametrize(("fields", "expected"), [
    ({"max_steps": 2}, r"env\.max_steps=2: there is no reply between turns"),
    ({"reasoning": True}, r"env\.reasoning=True.*set env\.max_steps=2"),
    ({"max_steps": 2, "tools": ["abacus"]}, r"env\.tools=\['abacus'\]: no such tool; choose from calculator, python"),
    ({"max_steps": 0}, r"env\.max_steps=0: must be at least 1"),
])  # fmt: skip
def test_inconsistent_settings_are_refused(fields: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        EnvConfig(dataset="x", **fields)


@pytest.fixture
def python(tokenizer: PreTrainedTokenizerBase) -> Iterator[Conversation]:
    from envs.sandbox.sandbox import LEVELS, unavailable_reason

    if all(unavailable_reason(level) for level in LEVELS):
        pytest.skip("no sandbox works here")
    env = EnvConfig(dataset="x", max_steps=2, tools=["python"], tool_format="tags")
    conversation: Conversation = Conversation(tokenizer, make_responders(env), 2)
    yield conversation
    conversation.close()


def test_python_runs_in_the_sandbox(python: Conversation, tokenizer: PreTrainedTokenizerBase) -> None:
    programs = {
        "print(6*7)": "python: 42",
        "x = 1": "python: (no output; print the result)",
        "print(1)\n1/0": "python: 1\nZeroDivisionError: division by zero",
        "print('a'*9000)": f"python: {'a' * 985}\n[... 7031 characters cut ...]\n{'a' * 984}",
        "import socket; socket.create_connection(('127.0.0.1', 1))": "Error",
    }
    for source, expected in programs.items():
        ids = python.reply_sync(encode_turn(tokenizer, f"<python>{source}</python>"))
        assert expected in tokenizer.decode(ids), source


HOSTILE_PROGRAMS = (
    "import sys; sys.stdout.buffer.write(bytes(range(256)) * 20)", "print(chr(0xD800))",
    "import sys; sys.stdout.buffer.write(b'\\xed\\xa0\\x80' + b'\\0' * 3000)",
    "print('<python>print(1)</python>' * 50)", "while True: print('x' * 1000)",
    "raise Exception('\\0' * 5000)", "import os; os._exit(7)", "import os; os.close(1); os.close(2)",
    "print('\\u202e' * 3000)",
)  # fmt: skip


@pytest.mark.parametrize("program", HOSTILE_PROGRAMS)
def test_any_program_output_gives_a_reply(
    program: str, python: Conversation, tokenizer: PreTrainedTokenizerBase
) -> None:
    ids = python.reply_sync(encode_turn(tokenizer, f"<python>{program}</python>"))
    reply = tokenizer.decode(ids)
    assert "python: " in reply
    assert len(reply) < 3 * EnvConfig(dataset="x").tool_result_characters
