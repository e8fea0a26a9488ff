"""Tasks and tools that live outside the checkout: found by name, checked at once, run as the project's own are."""

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
from envs.example import Mixed
from envs.judging.service import RewardService
from envs.option_checks import option_problems
from envs.prompts import PromptQueue, PromptSource
from envs.task import Completion, checked_examples, make_task
from envs.tool_calls import find_tools, instructions, make_tools
from envs.turns import Conversation, make_repliers, with_instructions
from envs.user_code import load_own
from tests.logged import Logged
from tests.scripts import ENVIRONMENT, ROOT, configured, ended, rows

HERE = "tests.envs.own_code"


def test_a_prefill_of_a_task_goes_before_that_of_the_config() -> None:
    task = make_task(EnvConfig(dataset=f"{HERE}:Begun", prefill="So"))
    assert [example.prefill for example in checked_examples(task, "train")] == ["own", "So", "So"]


def test_a_task_of_ones_own_is_judged_in_workers() -> None:
    env = EnvConfig(dataset=f"{HERE}:Reverse", reward_workers=1)
    task = make_task(env)
    examples = distinct_examples(task, "train")
    assert task.name == f"{HERE}:Reverse"
    assert examples[0].messages[0]["content"] == "Spell it backwards."
    with closing(RewardService(task, env)) as service:
        scored = service.score([Completion("no"), Completion("on")], [examples[0]] * 2)
    assert [each.score for each in scored] == [1.0, 0.0]


def test_a_task_of_ones_own_in_a_mixture_and_in_an_evaluation(tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text(json.dumps({"word": "tip", "kind": "noun"}))
    member = {"dataset": f"{HERE}:Words", "data_files": str(tmp_path / "words.jsonl"), "weight": 2}
    config = configured(
        "env.dataset=mixture",
        f"env.mixture={{arithmetic: 1, words: {{{', '.join(f'{k}: {v}' for k, v in member.items())}}}}}",
        f"eval.sets={{held: {{dataset: {HERE}:Reverse}}}}",
        "env.options={}",
    )
    examples = make_task(config.env).examples("train")
    assert isinstance(examples, Mixed)
    (start, _) = examples.bounds["words"]
    assert examples[start].row_data == {"word": "tip", "kind": "noun"}
    held = make_task(config.eval.sets["held"].env("eval.sets.held", config.env))
    assert [example.answer for example in held.examples("test")] == ["pu"]


def test_examples_put_back_by_a_checkpoint_have_their_columns_again(tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text("\n".join(json.dumps({"word": f"w{n}", "n": n}) for n in range(5)))
    env = EnvConfig(dataset=f"{HERE}:Words", data_files=str(tmp_path / "words.jsonl"))

    def queue() -> PromptQueue:
        return PromptQueue(PromptSource(make_task(env).examples("train"), 0, lambda example: True))

    first, second = queue(), queue()
    drawn = [example for _, example in first.begin(3)]
    state = first.state_dict(outstanding=drawn)
    assert "n" not in json.dumps(state["returned"][0]["row_data"])
    second.load_state_dict(json.loads(json.dumps(state["returned"])) and state)
    assert [example for _, example in second.begin(3)] == drawn


@pytest.mark.parametrize(("name", "message"), [
    ("Nobody", r"has no 'Nobody'"),
    ("search", "is no task; derive a class from envs.task.Task"),
    ("EnvConfig", "is no task; derive a class"),
    ("Abstract", "the class lacks reward"),
    ("Unmakable", r"making one failed: KeyError: 'size' \(own_code\.py:\d+\)"),
    ("Failing", r"examples\(\) failed: FileNotFoundError: words\.txt \(own_code\.py:\d+\)"),
])  # fmt: skip
def test_a_task_that_is_none_gives_one_message(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"env\.dataset={HERE}:{name}: .*{message}|{message}"):
        distinct_examples(make_task(EnvConfig(dataset=f"{HERE}:{name}")), "train")


@pytest.mark.parametrize(("kind", "message"), [
    ("generator", "gave generator; a list of envs.task.Example is needed"),
    ("texts", "example 0 is str; envs.task.Example is needed"),
    ("no messages", "example 0 has no messages"),
    ("no content", "it needs a role and a content"),
    ("half a character", r"half a character \(a lone surrogate\) in its prompt: '\\ud800'"),
    ("a text for a row", "example 0 has row='0'; a whole number is needed"),
    ("one row twice", "example 1 has row=0, as example 0 has"),
])  # fmt: skip
def test_examples_that_are_none_are_named(kind: str, message: str) -> None:
    env = EnvConfig(dataset=f"{HERE}:Given", options={"examples": kind})
    with pytest.raises(ConfigError, match=message):
        distinct_examples(make_task(env), "train")


def tools(*names: str, seconds: float = 10.0) -> EnvConfig:
    paths = [name if name in TOOLS.names else f"{HERE}:{name}" for name in names]
    return EnvConfig(dataset="arithmetic", max_steps=3, tools=paths, tool_timeout_s=seconds)


def test_the_system_prompt_tells_of_a_tool_in_the_first_paragraph_of_its_docstring() -> None:
    assert instructions(tools("search")) == (
        "You can look words up in a dictionary. To use it, end your message with <search>...</search>; the result "
        "comes in the next message."
    )
    told = with_instructions(
        make_task(EnvConfig(dataset="arithmetic")).examples("train"), tools("search", "Counter")
    )
    assert "<Counter>...</Counter>" in told[0].messages[0]["content"]
    assert [name for name, _ in find_tools(tools(*TOOLS.names))] == list(TOOLS.names)


def answers(env: EnvConfig, *turns: str) -> list[str | None]:
    made = make_tools(env)
    said = [next((text for tool in made if (text := tool.reply(turn)) is not None), None) for turn in turns]
    for tool in made:
        tool.close()
    return said


def test_functions_and_classes_answer() -> None:
    env = tools("search", "later", "Counter", "calculator")
    turns = ["<search>owl</search>", "<later>a</later>", "<Counter>2</Counter>", "<Counter>3</Counter>"]
    assert answers(env, *turns, "<calculator>6*7</calculator>", "owl") == [
        "search: owl is a word", "later: A", "Counter: 6", "Counter: 9", "calculator: 42", None,
    ]  # fmt: skip


def test_what_a_tool_raises_is_told_and_counted(logged: Logged) -> None:
    told = answers(
        tools("search"), *(f"<search>{word}</search>" for word in ("break", "exit", "owl", "break"))
    )
    assert told == [
        "search: error: ZeroDivisionError: division by zero",
        "search: error: SystemExit: 3",
        "search: owl is a word",
        "search: error: ZeroDivisionError: division by zero",
    ]
    first, last = logged.messages
    assert "tool search failed" in first and "own_code.py:" in first
    assert last == "tool search: 3 of 4 calls failed"


def test_any_result_is_text() -> None:
    told = answers(
        tools("search"), *(f"<search>{word}</search>" for word in ("nothing", "number", "half", "long"))
    )
    assert told == [
        "search: (no result)", "search: 3", "search: a?b", f"search: {'a' * 1000}\n...\n{'a' * 1000}",
    ]  # fmt: skip


def test_a_tool_that_hangs_is_left_behind_and_does_not_keep_the_process(tmp_path: Path) -> None:
    source = (
        "from tests.envs.test_user_code import answers, tools\n"
        "print(answers(tools('search', seconds=0.2), '<search>hang</search>'))\n"
    )
    (tmp_path / "script.py").write_text(source)
    done = ended([str(tmp_path / "script.py")], ROOT, {**ENVIRONMENT, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert "error: TimeoutError: took longer than 0.2 s" in done.stdout


def test_tools_answer_beside_generation(tokenizer: Any) -> None:
    conversation = Conversation(tokenizer, make_repliers(tools("search")), 3)
    calls = [
        tokenizer.encode(f"<search>{word}</search>", add_special_tokens=False) for word in ("owl", "break")
    ]

    async def ask() -> list[list[int]]:
        async with asyncio.timeout(30):
            return await asyncio.gather(*(conversation.reply([*ids, 2], 1) for ids in calls))

    said = [tokenizer.decode(ids) for ids in asyncio.run(ask())]
    conversation.close()
    assert "owl is a word" in said[0] and "ZeroDivisionError" in said[1]


@pytest.mark.parametrize(("name", "message"), [
    ("undocumented", "no docstring; its first paragraph is what the model is told"),
    ("of_numbers", "query is annotated <class 'int'>; the model's request is str"),
    ("Reverse", "has no method run"),
    ("WithoutClose", "has no method close"),
    ("UnmakableTool", r"making one failed: OSError: no such index \(own_code\.py:\d+\)"),
    ("not_a_tool", "3 is neither a function nor a class"),
    ("nothing", "has no 'nothing'"),
])  # fmt: skip
def test_a_tool_that_is_none_gives_one_message(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"env\.tools={HERE}:{name}: .*{message}"):
        make_tools(tools(name))


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two are called calculator"):
        find_tools(EnvConfig(dataset="x", max_steps=2, tools=["calculator", f"{HERE}:calculator"]))


def test_a_plan_looks_at_tasks_rewards_and_tools() -> None:
    config = configured(
        f"env.dataset={HERE}:Nobody",
        "env.reward=[exact,nowhere:f]",
        f"env.tools=[{HERE}:undocumented]",
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
def test_a_run_from_a_folder_with_ones_own_task_tool_and_rewards(tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(OUTSIDE)
    mixture = "{digits: {dataset: outside:Digits, reward: [exact, outside:short]}, arithmetic: 1}"
    settings = f"""hydra.run.dir=run model.name={ROOT / "torchgrpo" / "models" / "quickstart"} logging.progress=false
        env.num_envs=4 env.repeats=4 env.max_prompt_tokens=150 env.reward_workers=1 env.dataset=mixture env.options={{}}
        env.max_steps=2 env.tools=[outside:look] train.total_dialog_turns=32 inference_model.max_tokens=40"""
    sets = "eval.sets={held: {dataset: outside:Digits, limit: 2}}"
    command = [str(ROOT / "grpo.py"), "--config-name", "grpo_quickstart", *settings.split()]
    done = ended([*command, f"env.mixture={mixture}", sets], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    logged = [row for row in rows(tmp_path / "run") if "reward/mean" in row]
    assert len(logged) == 2
    for row in logged:
        assert {"reward/short", "reward/exact", "reward/accuracy"} <= set(row)
        assert row["completions/digits"] + row["completions/arithmetic"] == 16.0
        assert {"reward/mean/digits", "length/response_mean/digits"} <= set(row)


def test_a_mixture_that_is_told_of_tools_is_still_drawn_by_weight() -> None:
    env = tools("search")
    mixed = EnvConfig(
        dataset="mixture", mixture={"arithmetic": 3, f"{HERE}:Reverse": 1}, max_steps=3, tools=env.tools
    )
    told = with_instructions(make_task(mixed).examples("train"), mixed)
    source = PromptSource(told, 0, lambda example: True)
    drawn = [source.draw() for _ in range(8)]
    assert [example.source for example in drawn].count(f"{HERE}:Reverse") == 2
    assert all("<search>" in example.messages[0]["content"] for example in drawn)


@pytest.mark.parametrize("name", ["config", "envs", "torchgrpo.plan", "random", "numpy"])
def test_a_module_that_an_installed_one_hides_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / Path(*name.split(".")).with_suffix(".py")
    file.parent.mkdir(exist_ok=True)
    file.write_text("def reward(completion, example):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"env\.reward={name}:reward: {file} is hidden by .*another name"):
        load_own("env.reward", f"{name}:reward")


@pytest.mark.parametrize("name", ["training", "plan", "run", "models.mine"])
def test_a_module_with_a_name_of_a_folder_of_ours_is_the_users(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / Path(*name.split(".")).with_suffix(".py")
    file.parent.mkdir(exist_ok=True)
    file.write_text("def reward(completion, example):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in (name, name.partition(".")[0]):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert load_own("env.reward", f"{name}:reward")(None, None) == 1.0
