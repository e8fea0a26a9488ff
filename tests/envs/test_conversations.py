"""Tests of reading rows of other trainers: conversations, nested answers and tools."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from config.schema.evaluation import EvalSetConfig
from envs.task import Example, make_task
from tests.log_capture import LogCapture

QUESTION = {"role": "user", "content": "1+1="}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
VERL = {
    "data_source": "openai/gsm8k", "prompt": [QUESTION], "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0, "answer": "1+1=2", "split": "train"},
}  # fmt: skip
OWN_REWARD = "tests.envs.simple_rewards:brief"


def message_with_call(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}


def read(folder: Path, *rows: dict[str, Any], parquet: bool = False, **settings: Any) -> list[Example]:
    path = folder / "rows"
    if parquet:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(make_task(EnvConfig(dataset="jsonl", data_files=str(path), **settings)).examples("train"))


def roles(example: Example) -> list[str]:
    return [message["role"] for message in example.messages]


@pytest.mark.parametrize("parquet", [False, True])
def test_a_row_of_verl_is_read_as_it_is(parquet: bool, tmp_path: Path) -> None:
    (example,) = read(tmp_path, VERL, parquet=parquet)
    assert example.messages == (QUESTION,)
    assert example.answer == "2"
    (nested,) = read(tmp_path, VERL, parquet=parquet, options={"answer": "extra_info.answer"})
    assert nested.answer == "1+1=2"


def test_objects_that_a_column_holds_as_json_are_opened(tmp_path: Path) -> None:
    row = {"prompt": json.dumps([QUESTION]), "reward_model": json.dumps({"ground_truth": "2"})}
    (example,) = read(tmp_path, row)
    assert example.messages == (QUESTION,)
    assert example.answer == "2"
    for text in ('[{"a": 1}] has how many keys?', '[{"a": 1}]', '{"role": "king"}', "[1, 2]", "[" * 9000):
        (kept,) = read(tmp_path, {"prompt": text, "answer": "1"})
        assert kept.messages == ({"role": "user", "content": text},)


@pytest.mark.parametrize("indent", [None, 1])
def test_a_conversation_as_json_text_is_read(indent: int | None, tmp_path: Path) -> None:
    chat = [QUESTION, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "1+1="}]}]
    for messages, expected in ((chat, ["user", "assistant", "tool"]), (parts, ["user"]), (QUESTION, ["user"])):
        (example,) = read(tmp_path, {"prompt": json.dumps(messages, indent=indent), "answer": "2"})
        assert roles(example) == expected
        assert example.messages[0] == QUESTION


def test_a_null_of_a_json_file_is_kept(tmp_path: Path) -> None:
    chat = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL | {"days": None}]}, QUESTION]
    tool = {"name": "add", "default": None}
    (example,) = read(tmp_path, {"prompt": chat, "tools": [tool], "answer": "2"})
    assert "days" in example.messages[1]["tool_calls"][0]
    assert example.tools == (tool,)


def test_the_columns_of_prompt_and_answer_can_be_named(tmp_path: Path) -> None:
    row = {"conversation": [QUESTION], "meta": json.dumps({"a": {"b": 3}})}
    (example,) = read(tmp_path, row, options={"prompt": "conversation", "answer": "meta.a.b"})
    assert example.messages == (QUESTION,)
    assert example.answer == "3"


@pytest.mark.parametrize(("path", "expected"), [
    ("reward_model.label", r"rows:1: no 'reward_model\.label': 'reward_model' has no 'label' \(fields: style, ground"),
    ("reward_model.style.x", r"'reward_model\.style' has no 'x' \(value: 'rule'\)"),
    ("solution", r"rows:1: no column 'solution' \(columns: ability"),
])  # fmt: skip
def test_a_missing_answer_path_is_named(path: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=expected):
        read(tmp_path, VERL, options={"answer": path})


@pytest.mark.parametrize("answer", [{"a": [1, 2]}, [1, {"b": None}], True, 3.5, None])
def test_a_reward_of_the_user_gets_any_answer_or_none(answer: Any, tmp_path: Path) -> None:
    row = {"prompt": [QUESTION], "reward_model": {"ground_truth": answer}}
    (example,) = read(tmp_path, row, reward=OWN_REWARD)
    assert example.answer == answer
    (without,) = read(tmp_path, {"prompt": "1+1="}, reward=OWN_REWARD)
    assert without.answer is None
    with pytest.raises(ConfigError, match="no column 'nowhere'"):
        read(tmp_path, row, reward=OWN_REWARD, options={"answer": "nowhere"})
    if answer != 3.5:
        with pytest.raises(ConfigError, match=r"rows:1: (column 'reward_model|no column 'answer')"):
            read(tmp_path, row)
        with pytest.raises(ConfigError, match=r"rows:1: (column 'reward_model|no column 'answer')"):
            read(tmp_path, row, reward=[OWN_REWARD, "exact"])


def test_an_answer_of_parquet_is_a_value_of_json(tmp_path: Path) -> None:
    row = {"prompt": [QUESTION], "answer": {"day": date(2024, 5, 17)}}
    (example,) = read(tmp_path, row, parquet=True, reward=OWN_REWARD)
    assert example.answer == {"day": "2024-05-17"}


@pytest.mark.parametrize("as_text", [False, True])
def test_tests_of_verls_code_rows_are_run(as_text: bool, tmp_path: Path) -> None:
    tests = {"inputs": ["2\n"], "outputs": ["4\n"]}
    truth = json.dumps(tests) if as_text else tests
    (example,) = read(tmp_path, VERL | {"reward_model": {"ground_truth": truth}})
    assert example.answer == tests
    if as_text:
        (text,) = read(tmp_path, VERL | {"reward_model": {"ground_truth": truth}}, reward="exact")
        assert text.answer == truth
    with pytest.raises(ConfigError, match=r"rows:1: .*outputs"):
        read(tmp_path, VERL | {"reward_model": {"ground_truth": tests | {"outputs": []}}})


def test_a_date_of_parquet_is_an_answer(tmp_path: Path) -> None:
    (example,) = read(tmp_path, {"prompt": "When?", "answer": date(2024, 5, 17)}, parquet=True)
    assert example.answer == "2024-05-17"


def test_calls_and_results_of_tools_are_kept(tmp_path: Path) -> None:
    chat = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "tool_call_id": "call_1", "content": "2"},
    ]
    for parquet in (False, True):
        (example,) = read(tmp_path, {"prompt": chat, "tools": [TOOL], "answer": "2"}, parquet=parquet)
        _, call_message, result = example.messages
        assert call_message["content"] == ""
        assert call_message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 1}}
        assert result == chat[2]
        assert example.messages[0] == QUESTION  # without the nulls of parquet
        assert example.tools[0]["function"]["name"] == "add"
    (as_text,) = read(tmp_path, {"prompt": chat, "tools": json.dumps([TOOL]), "answer": "2"})
    assert as_text.tools == (TOOL,)


@pytest.mark.parametrize(("row", "expected"), [
    ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, r"content of the type 'image'"),
    ({"prompt": [{"role": "user", "content": 3}]}, r"messages whose content is text, but is 3"),
    ({"prompt": [{"content": "a"}]}, r'"prompt" must be \{"role"'),
    ({"prompt": [QUESTION, {"role": "assistant", "content": "a"}]}, r'the beginning of the response into "prefill"'),
    ({"prompt": [{"role": "assistant", "content": "", "tool_calls": "add"}, QUESTION]}, r'"tool_calls" must be'),
    ({"prompt": [QUESTION], "tools": "[1]"}, r"column 'tools' must be a list of schemas, but is \[1\]"),
    ({"prompt": [QUESTION], "tools": "[1"}, r"column 'tools': not valid JSON"),
    ({"prompt": [QUESTION], "prefill": 3}, r"column 'prefill' must be text, but is 3"),
    ({"prompt": [QUESTION], "tools": '[{"name": "\\ud83d"}]'}, r"column 'tools' has half a character"),
    ({"prompt": [QUESTION], "tools": "[" * 900 + "]" * 900}, r"column 'tools' is nested deeper"),
    ({"prompt": [message_with_call('{"a": "\\ud83d"}'), QUESTION]}, r"the arguments of a call has half a character"),
    ({"prompt": str([QUESTION])}, r"the messages are in Python's notation, .*; write JSON"),
    ({"prompt": [QUESTION], "reward_model": '{"ground_truth": NaN}'}, r"NaN is not valid JSON"),
    ({"prompt": [QUESTION], "reward_model": '{"ground_truth": "\\ud83d"}'}, r"has half a character"),
])  # fmt: skip
def test_an_invalid_conversation_is_refused(row: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"rows:1: .*{expected}"):
        read(tmp_path, row | {"answer": "2"})


def test_texts_in_parts_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "1+1"}, {"type": "text", "text": "=?"}]
    (example,) = read(tmp_path, {"prompt": [{"role": "user", "content": parts}], "answer": "2"})
    assert example.messages[-1]["content"] == "1+1\n=?"


LONG = [{"role": "system", "content": "Be brief."}, QUESTION, {"role": "assistant", "content": "2"}, QUESTION]


@pytest.mark.parametrize("start", [0, 1])
def test_the_system_prompt_of_the_config_replaces_adds_or_removes(start: int, tmp_path: Path) -> None:
    row = {"messages": LONG[start:], "answer": "2"}
    (kept,) = read(tmp_path, row)
    assert kept.messages == tuple(LONG[start:])
    (other,) = read(tmp_path, row, system_prompt="Think.")
    assert other.messages == ({"role": "system", "content": "Think."}, *LONG[1:])
    (without,) = read(tmp_path, row, system_prompt="")
    assert without.messages == tuple(LONG[1:])
    twice = [*LONG[:2], LONG[0], QUESTION]
    (one,) = read(tmp_path, {"messages": twice, "answer": "2"}, system_prompt="Think.")
    assert roles(one) == ["system", "user", "user"]


def test_the_system_prompt_of_the_reward_is_added_to_a_conversation(tmp_path: Path) -> None:
    (added,) = read(tmp_path, {"messages": LONG[1:], "answer": "2"}, reward="boxed")
    assert roles(added)[0] == "system"
    assert "\\boxed{}" in added.messages[0]["content"]
    (joined,) = read(tmp_path, {"messages": LONG, "answer": "2"}, reward="boxed")
    assert joined.messages[0]["content"] == f"Be brief.\n\n{added.messages[0]['content']}"
    chat = [{**QUESTION, "content": added.messages[0]["content"]}, *LONG[2:]]
    (unchanged,) = read(tmp_path, {"messages": chat, "answer": "2"}, reward="boxed")
    assert unchanged.messages == tuple(chat)
    (single,) = read(tmp_path, {"prompt": chat[:1], "answer": "2"}, reward="boxed")
    assert single.messages == tuple(chat[:1])


def test_columns_of_images_are_named_once_and_not_kept(tmp_path: Path, log_capture: LogCapture) -> None:
    rows = [VERL | {"images": [{"bytes": b"\x89PNG"}], "raw": b"abc"}] * 3
    examples = read(tmp_path, *rows, parquet=True, reward=OWN_REWARD)
    assert [message.split(": ")[1].split(" holds")[0] for message in log_capture.messages] == [
        "column 'images'",
        "column 'raw'",
    ]
    assert sorted(examples[0].row_data) == sorted(VERL)


def test_names_of_files_in_a_column_of_images_are_left_to_rewards(tmp_path: Path, log_capture: LogCapture) -> None:
    (example,) = read(tmp_path, VERL | {"image": "cat.png"}, reward=OWN_REWARD)
    assert example.row_data["image"] == "cat.png"
    assert "column 'image' holds images" in log_capture.text
    deep = VERL | {"pics": [{"data": b"abc"}], "extra": {"img": {"raw": b"abc"}}}
    (without,) = read(tmp_path, deep, parquet=True, reward=OWN_REWARD)
    assert sorted(without.row_data) == sorted(VERL)


def test_a_prefill_of_the_row_goes_before_that_of_the_config(tmp_path: Path) -> None:
    from envs.task import load_examples

    path = tmp_path / "rows"
    rows = [{"prompt": "a", "answer": "2", "prefill": each} for each in (None, "So", "")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = make_task(EnvConfig(dataset="jsonl", data_files=str(path), prefill="<think>\n"))
    assert [example.prefill for example in load_examples(task, "train")] == ["<think>\n", "So", ""]


def test_a_prefill_is_that_of_the_set_and_of_the_member() -> None:
    training = EnvConfig(dataset="arithmetic", prefill="So")
    same, other = (EvalSetConfig(dataset=name).env("eval.sets.a", training) for name in ("arithmetic", "gsm8k"))
    assert (same.prefill, other.prefill) == ("So", None)
    assert EvalSetConfig(dataset="gsm8k", prefill="A").env("eval.sets.a", training).prefill == "A"
    members = {"a": {"dataset": "arithmetic", "prefill": "A"}, "b": {"dataset": "arithmetic"}}
    mixture = make_task(EnvConfig(dataset="mixture", mixture=members, prefill="So"))
    assert {example.prefill for example in mixture.examples("test") if example.source == "a"} == {"A"}
    assert {example.prefill for example in mixture.examples("test") if example.source == "b"} == {"So"}
