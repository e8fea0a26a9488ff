"""Tests of user tasks and tools: lookup by path, checks, and use in runs."""

import asyncio
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from config.schema.env import TOOLS, EnvConfig
from config.schema.errors import ConfigError
from envs.duplicates import distinct_examples
from envs.environments.episode_environments import EpisodeEnvironments, with_tools
from envs.example import MixedExamples
from envs.option_checks import option_problems
from envs.prompts import PromptQueue, PromptSource
from envs.reward_workers.service import RewardService
from envs.task import Completion, load_examples, make_task
from envs.tool_calls import find_tools, make_tools, tool_instructions
from envs.user_code import describe_exception, load_user_object
from tests.envs.environment_helpers import suffix_ids, turn
from tests.log_capture import LogCapture
from tests.script_runner import ENVIRONMENT, ROOT, compose_run_config, read_metrics, run_python

USER_MODULE = "tests.envs.user_tasks_and_tools"


def test_a_prefill_of_a_task_goes_before_that_of_the_config() -> None:
    task = make_task(EnvConfig(dataset=f"{USER_MODULE}:PrefilledTask", prefill="So"))
    assert [example.prefill for example in load_examples(task, "train")] == ["own", "So", "So"]


def test_a_user_task_is_scored_in_workers() -> None:
    env = EnvConfig(dataset=f"{USER_MODULE}:Reverse", reward_workers=1)
    task = make_task(env)
    examples = distinct_examples(task, "train")
    assert task.name == f"{USER_MODULE}:Reverse"
    assert examples[0].messages[0]["content"] == "Spell it backwards."
    with closing(RewardService(task, env)) as service:
        verdicts = service.score([Completion("no"), Completion("on")], [examples[0]] * 2)
    assert [each.score for each in verdicts] == [1.0, 0.0]


def test_a_user_task_in_a_mixture_and_in_an_evaluation(tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text(json.dumps({"word": "tip", "kind": "noun"}))
    member = {"dataset": f"{USER_MODULE}:Words", "data_files": str(tmp_path / "words.jsonl"), "weight": 2}
    config = compose_run_config(
        "env.dataset=mixture",
        f"env.mixture={{arithmetic: 1, words: {{{', '.join(f'{k}: {v}' for k, v in member.items())}}}}}",
        f"eval.sets={{held: {{dataset: {USER_MODULE}:Reverse}}}}",
        "env.options={}",
    )
    examples = make_task(config.env).examples("train")
    assert isinstance(examples, MixedExamples)
    (start, _) = examples.bounds["words"]
    assert examples[start].row_data == {"word": "tip", "kind": "noun"}
    held = make_task(config.eval.sets["held"].env("eval.sets.held", config.env))
    assert [example.answer for example in held.examples("test")] == ["pu"]


def test_examples_returned_by_a_checkpoint_have_their_columns(tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text("\n".join(json.dumps({"word": f"w{n}", "n": n}) for n in range(5)))
    env = EnvConfig(dataset=f"{USER_MODULE}:Words", data_files=str(tmp_path / "words.jsonl"))

    def queue() -> PromptQueue:
        return PromptQueue(PromptSource(make_task(env).examples("train"), 0, lambda example: True))

    first, second = queue(), queue()
    examples = [example for _, example in first.next_prompts(3)]
    state = first.state_dict(outstanding=examples)
    assert "n" not in json.dumps(state["returned"][0]["row_data"])
    second.load_state_dict(json.loads(json.dumps(state["returned"])) and state)
    assert [example for _, example in second.next_prompts(3)] == examples


@pytest.mark.parametrize(("name", "message"), [
    ("Nobody", r"has no 'Nobody'"),
    ("search", "is not a task class; derive a class from envs.task.Task"),
    ("EnvConfig", "is not a task class; derive a class"),
    ("Abstract", "the class lacks reward"),
    ("Unmakable", r"creating the task failed: KeyError: 'size' \(user_tasks_and_tools\.py:\d+\)"),
    ("Failing", r"examples\(\) failed: FileNotFoundError: words\.txt \(user_tasks_and_tools\.py:\d+\)"),
])  # fmt: skip
def test_an_invalid_task_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"env\.dataset={USER_MODULE}:{name}: .*{message}|{message}"):
        distinct_examples(make_task(EnvConfig(dataset=f"{USER_MODULE}:{name}")), "train")


@pytest.mark.parametrize(("kind", "message"), [
    ("generator", "returned generator; return a list of envs.task.Example"),
    ("texts", "example 0 is str; return an envs.task.Example"),
    ("no messages", "example 0 has no messages"),
    ("no content", "a message needs a role and a content"),
    ("half a character", r"half a character \(a lone surrogate\) in its prompt: '\\ud800'"),
    ("a text for a row", "example 0 has row='0'; a whole number is needed"),
    ("one row twice", "example 1 has row=0, the same as example 0"),
])  # fmt: skip
def test_invalid_examples_are_refused(kind: str, message: str) -> None:
    env = EnvConfig(dataset=f"{USER_MODULE}:InvalidExamples", options={"examples": kind})
    with pytest.raises(ConfigError, match=message):
        distinct_examples(make_task(env), "train")


def tools(*names: str, seconds: float = 10.0) -> EnvConfig:
    paths = [name if name in TOOLS.names else f"{USER_MODULE}:{name}" for name in names]
    return EnvConfig(dataset="arithmetic", max_steps=3, tools=paths, tool_format="tags", tool_timeout_s=seconds)


def test_the_system_prompt_has_the_first_paragraph_of_a_tools_docstring() -> None:
    assert tool_instructions(tools("search")) == (
        "You can look words up in a dictionary. To use it, end your message with <search>...</search>; the result "
        "comes in the next message."
    )
    plain = make_task(EnvConfig(dataset="arithmetic")).examples("train")
    examples = with_tools(plain, tools("search", "Counter"), None)
    assert "<Counter>...</Counter>" in examples[0].messages[0]["content"]
    assert [name for name, _ in find_tools(tools(*TOOLS.names))] == list(TOOLS.names)


def tool_replies(env: EnvConfig, *turns: str) -> list[str | None]:
    all_tools = make_tools(env)
    replies = [next((text for tool in all_tools if (text := tool.reply(turn)) is not None), None) for turn in turns]
    for tool in all_tools:
        tool.close()
    return replies


def test_functions_and_classes_answer() -> None:
    env = tools("search", "later", "Counter", "calculator")
    turns = ["<search>owl</search>", "<later>a</later>", "<Counter>2</Counter>", "<Counter>3</Counter>"]
    assert tool_replies(env, *turns, "<calculator>6*7</calculator>", "owl") == [
        "search: owl is a word", "later: A", "Counter: 6", "Counter: 9", "calculator: 42", None,
    ]  # fmt: skip


def test_exceptions_of_a_tool_are_replies_and_counted(log_capture: LogCapture) -> None:
    replies = tool_replies(tools("search"), *(f"<search>{word}</search>" for word in ("break", "exit", "owl", "break")))
    assert replies == [
        "search: error: ZeroDivisionError: division by zero",
        "search: error: SystemExit: 3",
        "search: owl is a word",
        "search: error: ZeroDivisionError: division by zero",
    ]
    first, last = log_capture.messages
    assert "tool search failed" in first and "user_tasks_and_tools.py:" in first
    assert last == "tool search: 3 of 4 calls failed"


def test_any_result_is_text() -> None:
    replies = tool_replies(
        tools("search"), *(f"<search>{word}</search>" for word in ("nothing", "number", "half", "long"))
    )
    assert replies == [
        "search: (no result)", "search: 3", "search: a?b",
        f"search: {'a' * 985}\n[... 7031 characters cut ...]\n{'a' * 984}",
    ]  # fmt: skip


def test_a_tool_that_hangs_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    source = (
        "from tests.envs.test_user_code import tool_replies, tools\n"
        "print(tool_replies(tools('search', seconds=0.2), '<search>hang</search>'))\n"
    )
    (tmp_path / "script.py").write_text(source)
    done = run_python([str(tmp_path / "script.py")], ROOT, {**ENVIRONMENT, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert "error: TimeoutError: took longer than 0.2 s" in done.stdout


def test_tools_reply_in_parallel_with_generation(tokenizer: Any) -> None:
    environments = EpisodeEnvironments(tools("search"))

    async def reply_to(word: str) -> list[int]:
        before = [{"role": "user", "content": "?"}, turn(f"<search>{word}</search>")]
        environment = await environments.make()
        step = await environment.step(before[-1])
        return suffix_ids(tokenizer, before, [*before, *step.messages], (), tokenizer.eos_token_id) or []

    async def reply_to_calls() -> list[list[int]]:
        async with asyncio.timeout(30):
            return await asyncio.gather(reply_to("owl"), reply_to("break"))

    replies = [tokenizer.decode(ids) for ids in asyncio.run(reply_to_calls())]
    asyncio.run(environments.close())
    assert "owl is a word" in replies[0] and "ZeroDivisionError" in replies[1]


@pytest.mark.parametrize(("name", "message"), [
    ("undocumented_tool", "no docstring; write a docstring whose first paragraph describes the tool to the model"),
    ("numbers_tool", "query is annotated <class 'int'>; annotate the model's request as str"),
    ("Reverse", "has no method run"),
    ("WithoutClose", "has no method close"),
    ("UnmakableTool", r"creating the tool failed: OSError: no such index \(user_tasks_and_tools\.py:\d+\)"),
    ("not_a_tool", "3 is neither a function nor a class"),
    ("nothing", "has no 'nothing'"),
])  # fmt: skip
def test_an_invalid_tool_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"env\.tools={USER_MODULE}:{name}: .*{message}"):
        make_tools(tools(name))


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools are called calculator"):
        find_tools(
            EnvConfig(dataset="x", max_steps=2, tools=["calculator", f"{USER_MODULE}:calculator"], tool_format="tags")
        )


def test_a_plan_checks_tasks_rewards_and_tools() -> None:
    config = compose_run_config(
        f"env.dataset={USER_MODULE}:Nobody",
        "env.reward=[exact,nowhere:f]",
        f"env.tools=[{USER_MODULE}:undocumented_tool]",
        "env.max_steps=2",
    )
    found = "\n".join(option_problems(config))
    for expected in ("has no 'Nobody'", "importing 'nowhere' failed", "no docstring"):
        assert expected in found


OUTSIDE = '''
from envs.task import Example, Reward, Task

class Digits(Task):
    def examples(self, split):
        return [Example(self.messages(f"{n}+0="), str(n), n) for n in range(10, 20)]

    def reward(self, completion, example):
        right = float(completion.text.strip() == example.answer)
        return Reward(right, {"accuracy": right})

def look(query: str) -> str:
    """You can look."""
    return query

def short(completion, example):
    return sum(map(ord, completion.text)) % 7 / 7
'''


@pytest.mark.long
def test_a_run_from_a_folder_with_a_user_task_tool_and_rewards(tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(OUTSIDE)
    mixture = "{digits: {dataset: outside:Digits, reward: [exact, outside:short]}, arithmetic: 1}"
    settings = f"""hydra.run.dir=run model.name={ROOT / "torchgrpo" / "models" / "quickstart"} logging.progress=false
        env.num_envs=4 env.repeats=4 env.max_prompt_tokens=150 env.reward_workers=1 env.dataset=mixture env.options={{}}
        env.max_steps=2 env.tools=[outside:look] env.tool_format=tags train.total_dialog_turns=32
        inference_model.max_tokens=40"""
    sets = "eval.sets={held: {dataset: outside:Digits, limit: 2}}"
    command = [str(ROOT / "grpo.py"), "--config-name", "grpo_quickstart", *settings.split()]
    done = run_python([*command, f"env.mixture={mixture}", sets], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    logged = [row for row in read_metrics(tmp_path / "run") if "reward/mean" in row]
    assert len(logged) == 2
    for row in logged:
        assert {"reward/short", "reward/exact", "reward/accuracy"} <= set(row)
        assert row["completions/digits"] + row["completions/arithmetic"] == 16.0
        assert {"reward/mean/digits", "length/response_mean/digits"} <= set(row)


def test_a_mixture_with_tool_instructions_is_sampled_by_weight() -> None:
    env = tools("search")
    mixed = EnvConfig(
        dataset="mixture",
        mixture={"arithmetic": 3, f"{USER_MODULE}:Reverse": 1},
        max_steps=3,
        tools=env.tools,
        tool_format="tags",
    )
    all_examples = with_tools(make_task(mixed).examples("train"), mixed, None)
    source = PromptSource(all_examples, 0, lambda example: True)
    examples = [source.next_example() for _ in range(8)]
    assert [example.source for example in examples].count(f"{USER_MODULE}:Reverse") == 2
    assert all("<search>" in example.messages[0]["content"] for example in examples)


@pytest.mark.parametrize("name", ["config", "envs", "torchgrpo.plan", "random", "numpy"])
def test_a_module_that_an_installed_one_hides_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / Path(*name.split(".")).with_suffix(".py")
    file.parent.mkdir(exist_ok=True)
    file.write_text("def reward(completion, example):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"env\.reward={name}:reward: {file} is hidden by .*another name"):
        load_user_object("env.reward", f"{name}:reward")


@pytest.mark.parametrize("name", ["training", "plan", "run", "models.mine"])
def test_a_user_module_may_have_the_name_of_a_package_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / Path(*name.split(".")).with_suffix(".py")
    file.parent.mkdir(exist_ok=True)
    file.write_text("def reward(completion, example):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in (name, name.partition(".")[0]):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert load_user_object("env.reward", f"{name}:reward")(None, None) == 1.0


def test_the_place_of_an_exception_is_in_the_users_file() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise ValueError

    with pytest.raises(json.JSONDecodeError) as failed:
        json.loads("{")
    assert describe_exception(failed.value).endswith(f"({Path(__file__).name}:{failed.tb.tb_lineno})")
    assert describe_exception(Unprintable()) == "Unprintable: (its message cannot be read)"
