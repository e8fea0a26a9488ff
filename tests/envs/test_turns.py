"""Tests of replies between turns, as text and token ids: tools by tags, and reflection."""

import asyncio
import copy
import threading
from collections.abc import Iterator

import pytest
from transformers import PreTrainedTokenizerBase

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.chat_suffix import appended_suffix_ids, check_user_replies
from envs.environments.episode_environments import EpisodeEnvironments, with_tools
from envs.environments.interface import Environment, Step
from envs.environments.tool_environment import TagsEnvironment
from envs.task import Example
from envs.tool_calls import Tool
from tests.envs.environment_helpers import reply_ids, suffix_ids, turn
from tests.envs.user_tasks_and_tools import Counter
from tests.tiny_models import numbered_examples

EOS = 2


def calculator(**fields: object) -> EnvConfig:
    return EnvConfig(dataset="x", max_steps=3, tools=["calculator"], tool_format="tags", **fields)  # type: ignore[arg-type]


def make_environment(env: EnvConfig) -> Environment:
    return asyncio.run(EpisodeEnvironments(env).make())


@pytest.mark.parametrize(("text", "reply"), [
    ("I need <calculator>2*3</calculator>", "calculator: 2*3"),
    ("<calculator>1</calculator> then <calculator>2</calculator>\n ", "calculator: 2"),
    ("<calculator>1</calculator> is one", None), ("1</calculator>", None), ("no call", None),
])  # fmt: skip
def test_a_call_ends_the_turn(text: str, reply: str | None) -> None:
    echo = Tool("calculator", run=str, is_slow=False, close=lambda: None)
    assert echo.reply(text) == reply


def test_the_stream_reads_as_the_template_would_have_written_it(tokenizer: PreTrainedTokenizerBase) -> None:
    environment = make_environment(calculator())
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "6*7?"}], add_generation_prompt=True, return_dict=False
    )
    call = tokenizer.encode("<calculator>6*7</calculator>", add_special_tokens=False)
    whole = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "6*7?"},
            {"role": "assistant", "content": "<calculator>6*7</calculator>"},
            {"role": "user", "content": "calculator: 42"},
        ],
        add_generation_prompt=True,
        return_dict=False,
    )
    replies = reply_ids(tokenizer, environment, "<calculator>6*7</calculator>")
    assert [*prompt, *call, EOS, *replies] == whole
    assert reply_ids(tokenizer, environment, "It is 42.") == []


def test_an_end_token_of_no_template_stays_in_the_stream(tokenizer: PreTrainedTokenizerBase) -> None:
    """The template rewrites another end token than its own, or writes its own behind it."""
    before = [{"role": "user", "content": "6*7?"}, turn("42")]
    after = [*before, {"role": "user", "content": "?"}]
    replies = suffix_ids(tokenizer, before, after, (), EOS)
    assert replies is not None and replies == appended_suffix_ids(tokenizer, before, after, (), EOS)
    assert suffix_ids(tokenizer, before, after, (), 7) is None
    assert appended_suffix_ids(tokenizer, before, after, (), 7) == [EOS, *replies]


def test_tools_reply_before_the_reflection_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    environment = make_environment(calculator(reasoning=True, reasoning_prompt="Sure?"))
    replies = [
        tokenizer.decode(reply_ids(tokenizer, environment, text))
        for text in ("<calculator>1/0</calculator>", "It is 3.")
    ]
    assert replies == ["<user>calculator: error: division by zero<assistant>", "<user>Sure?<assistant>"]


def test_the_last_turn_gets_no_reply(tokenizer: PreTrainedTokenizerBase) -> None:
    environment = make_environment(EnvConfig(dataset="x", max_steps=2, reasoning=True))
    assert reply_ids(tokenizer, environment, "1")
    assert reply_ids(tokenizer, environment, "2") == []


def test_slow_replies_run_in_parallel_with_generation(tokenizer: PreTrainedTokenizerBase) -> None:
    release = threading.Event()

    def slow(request: str) -> str:
        assert release.wait(600)
        if request == "break":
            raise RuntimeError("the tool is broken")
        return request.upper()

    tool = Tool("python", slow, is_slow=True, close=lambda: None)

    def reply_to(request: str) -> "asyncio.Task[Step]":
        return asyncio.ensure_future(TagsEnvironment([tool]).step(turn(f"<python>{request}</python>")))

    async def converse() -> list[Step]:
        reply_tasks = [reply_to("a"), reply_to("b")]
        for _ in range(10):
            await asyncio.sleep(0)  # the event loop runs
        assert not any(task.done() for task in reply_tasks)
        release.set()
        answers = [await task for task in reply_tasks]
        with pytest.raises(RuntimeError, match="the tool is broken"):
            await reply_to("break")
        return answers

    assert [step.messages for step in asyncio.run(converse())] == [
        ({"role": "user", "content": "python: A"},),
        ({"role": "user", "content": "python: B"},),
    ]


def test_tools_of_all_episodes_are_closed_at_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counter, "closed_counts", [])
    path = "tests.envs.user_tasks_and_tools:Counter"
    environments = EpisodeEnvironments(EnvConfig(dataset="x", max_steps=2, tools=[path], tool_format="tags"))

    async def play_two_episodes() -> list[int]:
        for _ in range(2):
            environment = await environments.make()
            await environment.step(turn("<Counter>3</Counter>"))
            await environment.close()
        closed_before = list(Counter.closed_counts)
        await environments.close()
        return closed_before

    assert asyncio.run(play_two_episodes()) == []
    assert Counter.closed_counts == [1 + 2 * 3]


def test_a_template_without_a_second_question_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    other = copy.copy(tokenizer)
    other.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(ConfigError, match=r"does not render a message \(user\) .*env\.max_steps=1"):
        check_user_replies(other)
    check_user_replies(tokenizer)


@pytest.mark.parametrize(("fields", "is_expected"), [
    ({"max_steps": 2, "reasoning": True}, True),
    ({"max_steps": 2, "tools": ["calculator"], "tool_format": "tags"}, True),
    ({"max_steps": 2, "tools": ["calculator"]}, False),
    ({"environment": "tests.envs.user_environments:AsyncCounter"}, False),
])  # fmt: skip
def test_only_some_environments_need_user_messages(fields: dict[str, object], is_expected: bool) -> None:
    environments = EpisodeEnvironments(EnvConfig(dataset="x", **fields))  # type: ignore[arg-type]
    assert environments.sends_user_messages == is_expected
    asyncio.run(environments.close())


def test_the_system_prompt_has_the_tool_instructions() -> None:
    with_system = Example(({"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}), "", 0)
    examples = with_tools([with_system, *numbered_examples(2)], calculator(), None)
    assert len(examples) == 3
    first, second = examples[0].messages, examples[1].messages
    assert first[0]["content"].startswith("Be brief.\n\nYou have a calculator")
    assert "<calculator>...</calculator>" in first[0]["content"]
    assert [message["role"] for message in second] == ["system", "user"]
    assert [example.row for example in examples[1:]] == [0, 1]
    plain = numbered_examples(2)
    assert with_tools(plain, EnvConfig(dataset="x"), None) is plain


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
def python() -> Iterator[Environment]:
    from envs.sandbox.sandbox import LEVELS, unavailable_reason

    if all(unavailable_reason(level) for level in LEVELS):
        pytest.skip("no sandbox works here")
    env = EnvConfig(dataset="x", max_steps=2, tools=["python"], tool_format="tags")
    environments = EpisodeEnvironments(env)
    yield asyncio.run(environments.make())
    asyncio.run(environments.close())


def test_python_runs_in_the_sandbox(python: Environment, tokenizer: PreTrainedTokenizerBase) -> None:
    programs = {
        "print(6*7)": "python: 42",
        "x = 1": "python: (no output; print the result)",
        "print(1)\n1/0": "python: 1\nZeroDivisionError: division by zero",
        "print('a'*9000)": f"python: {'a' * 985}\n[... 7031 characters cut ...]\n{'a' * 984}",
        "import socket; socket.create_connection(('127.0.0.1', 1))": "Error",
    }
    for source, expected in programs.items():
        ids = reply_ids(tokenizer, python, f"<python>{source}</python>")
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
    program: str, python: Environment, tokenizer: PreTrainedTokenizerBase
) -> None:
    ids = reply_ids(tokenizer, python, f"<python>{program}</python>")
    reply = tokenizer.decode(ids)
    assert "python: " in reply
    assert len(reply) < 3 * EnvConfig(dataset="x").tool_result_characters
