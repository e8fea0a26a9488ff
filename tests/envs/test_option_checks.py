"""Tests of `run=plan` on data: local rows are checked, rows of the hub are not."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.option_checks import has_local_prompts, hub_notes, option_problems, row_problems
from envs.task import make_task
from tests.script_runner import compose_run_config
from torchgrpo.run.build_rollout import prompt_problem

BAD = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": ""}\n'


@pytest.fixture
def bad_file(tmp_path: Path) -> str:
    (tmp_path / "rows.jsonl").write_text(BAD)
    return str(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(("overrides", "problem"), [
    (("env.dataset=jsonl", "env.data_files={bad_file}"), "{bad_file}:2: column 'answer' is empty"),
    (("eval.sets={{a:{{dataset:jsonl,data_files:{bad_file}}}}}",), "eval.sets.a: {bad_file}:2: column"),
    (
        ("env.dataset=mixture", "env.mixture={{gsm8k:1,mine:{{dataset:jsonl,data_files:{bad_file}}}}}"),
        "{bad_file}:2: column",
    ),
    (("env.dataset=tests.envs.user_tasks_and_tools:Failing",), "examples() failed: FileNotFoundError: words.txt"),
    (("env.curriculum.column=nothing",), "env.curriculum.column='nothing': row"),
    (("env.dataset=jsonl",), "env.dataset=jsonl reads local files; set env.data_files"),
])  # fmt: skip
def test_local_rows_are_checked(overrides: tuple[str, ...], problem: str, bad_file: str) -> None:
    config = compose_run_config(*(text.format(bad_file=bad_file) for text in overrides))
    (found,) = option_problems(config) or row_problems(config)
    assert problem.format(bad_file=bad_file) in found and "\n" not in found


def test_a_weight_of_an_unknown_component_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.reward_weights\.nopart: .*no such component"):
        make_task(EnvConfig(dataset="arithmetic", reward_weights={"nopart": 1.0}))


def test_rows_of_the_hub_are_not_read_and_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    config = compose_run_config(
        "env.dataset=mixture", "env.mixture={gsm8k:1,arithmetic:1}", "eval.sets={a:{dataset:math}}"
    )
    assert option_problems(config) == []
    assert list(row_problems(config)) == []
    assert hub_notes(config) == [
        "env.mixture.gsm8k: env.dataset=gsm8k is read from the hub: its rows were not checked",
        "eval.sets.a: env.dataset=math is read from the hub: its rows were not checked",
    ]
    assert hub_notes(compose_run_config()) == []


class FakeHub(ModuleType):
    """Hub module that records the requests of its rows."""

    def __init__(self) -> None:
        super().__init__("datasets")
        self.requests: list[tuple[str, str, str | None]] = []

    def load_dataset(self, name: str, config: str | None, split: str, revision: str | None) -> list[dict[str, str]]:
        self.requests.append((name, split, revision))
        return [{"question": "1+1?", "answer": "#### 2"}]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake_hub = FakeHub()
    monkeypatch.setitem(sys.modules, "datasets", fake_hub)
    return fake_hub


def test_a_revision_reaches_the_hub(hub: FakeHub) -> None:
    config = compose_run_config(
        *("env.dataset=gsm8k", "env.data_revision=abc"),
        "eval.sets={same:{dataset:gsm8k},own:{dataset:gsm8k,data_revision:v2},files:{dataset:gsm8k,data_files:x}}",
    )
    make_task(config.env).examples("train")
    for name in ("same", "own"):
        make_task(config.eval.sets[name].env(name, config.env)).examples("test")
    mixture: dict[str, Any] = {"gsm8k": {"data_revision": "v3"}, "plain": {"dataset": "gsm8k"}}
    make_task(EnvConfig(dataset="mixture", mixture=mixture)).examples("train")
    requests = [(split, revision) for _, split, revision in hub.requests]
    assert requests == [("train", "abc"), ("test", "abc"), ("test", "v2"), ("train", "v3"), ("train", None)]
    files = config.eval.sets["files"].env("files", config.env)
    assert (files.data_files, files.data_revision) == ("x", None)


def test_a_missing_revision_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"gsm8k .*env\.data_revision=abc\) could not be read"):
        make_task(EnvConfig(dataset="gsm8k", data_revision="abc")).examples("train")


@pytest.mark.parametrize("dataset", ["arithmetic", "countdown", "reasoning_gym", "mixture"])
@pytest.mark.parametrize("fields", [{"data_files": "rows.jsonl"}, {"data_revision": "abc"}])
def test_files_and_revisions_that_a_task_does_not_read_are_refused(dataset: str, fields: dict[str, Any]) -> None:
    options: dict[str, Any] = {"name": "chain_sum"} if dataset == "reasoning_gym" else {}
    (key,) = fields
    problem = (
        rf"env\.{key}=.*: env\.dataset={dataset} reads nothing from the hub"
        if key == "data_revision"
        else (rf"env\.{key}=.*: env\.dataset={dataset} reads no file")
    )
    with pytest.raises(ConfigError, match=f"^{problem}"):
        make_task(EnvConfig(dataset=dataset, options=options, **fields))
    if dataset != "mixture":
        member = {"dataset": dataset, "options": options} | fields
        with pytest.raises(ConfigError, match=rf"^env\.mixture\.one: {problem}"):
            make_task(EnvConfig(dataset="mixture", mixture={"one": member}))


def test_local_files_have_no_revision() -> None:
    for dataset, problem in (("gsm8k", "local files have no revision"), ("jsonl", "reads nothing from the hub")):
        with pytest.raises(ConfigError, match=rf"env\.data_revision=abc.*{problem}"):
            make_task(EnvConfig(dataset=dataset, data_files="rows.jsonl", data_revision="abc"))


@pytest.mark.parametrize(("overrides", "expected"), [
    (("env.max_prompt_tokens=2",), "all 1 prompts are longer than env.max_prompt_tokens"),
    (
        ("model.chat_template={strict}", "env.system_prompt=hi"),
        "row 0: the chat template refuses .*System role not supp",
    ),
    (("eval.sets={{held:{{dataset:jsonl,data_files:{two}}}}}",), "eval.sets.held: all 1 prompts are longer"),
])  # fmt: skip
def test_the_plan_refuses_prompts_as_a_run(overrides: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    strict = tmp_path / "strict.jinja"
    strict.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{{ messages[-1].content }}"
    )
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text('{"prompt": "1+1=", "answer": "2"}')
    two.write_text(json.dumps({"prompt": "1+" * 40, "answer": "2"}))
    local = ("env.dataset=jsonl", f"env.data_files={one}")
    config = compose_run_config(*local, *(text.format(strict=strict, two=two) for text in overrides))
    assert option_problems(config) == []
    assert re.search(expected, prompt_problem(config) or "")
    assert prompt_problem(compose_run_config(*local)) is None


def test_a_plan_checks_the_chat_template_for_the_tools_of_an_environment() -> None:
    config = compose_run_config("env.environment=tests.envs.user_environments:Wiki", "env.num_envs=4")
    assert has_local_prompts(config)
    assert re.search("the chat template does not write tools into the prompt", prompt_problem(config) or "")


def test_a_plan_checks_the_group_reward() -> None:
    config = compose_run_config("env.group_reward=tests.envs.user_environments:nobody")
    (problem,) = option_problems(config)
    assert "has no 'nobody'" in problem
