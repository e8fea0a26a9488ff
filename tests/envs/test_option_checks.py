"""Messages of `run=plan` on data: local rows are read, rows of the hub are not."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.option_checks import hub_notes, option_problems, row_problems
from envs.task import make_task
from tests.scripts import configured
from torchgrpo.run.build_rollout import prompt_problem

BAD = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": ""}\n'


@pytest.fixture
def bad(tmp_path: Path) -> str:
    (tmp_path / "rows.jsonl").write_text(BAD)
    return str(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(("overrides", "problem"), [
    (("env.dataset=jsonl", "env.data_files={bad}"), "{bad}:2: column 'answer' is empty"),
    (("eval.sets={{a:{{dataset:jsonl,data_files:{bad}}}}}",), "eval.sets.a: {bad}:2: column"),
    (("env.dataset=mixture", "env.mixture={{gsm8k:1,mine:{{dataset:jsonl,data_files:{bad}}}}}"), "{bad}:2: column"),
    (("env.dataset=tests.envs.own_code:Failing",), "examples() failed: FileNotFoundError: words.txt"),
    (("env.curriculum.column=nothing",), "env.curriculum.column='nothing': row"),
    (("env.dataset=jsonl",), "env.dataset=jsonl reads local files: set env.data_files"),
])  # fmt: skip
def test_rows_are_looked_at(overrides: tuple[str, ...], problem: str, bad: str) -> None:
    config = configured(*(text.format(bad=bad) for text in overrides))
    (found,) = option_problems(config) or row_problems(config)
    assert problem.format(bad=bad) in found and "\n" not in found


def test_a_weight_of_no_part_is_refused_when_the_task_is_made() -> None:
    with pytest.raises(ConfigError, match=r"env\.reward_weights\.nopart: .*no such part"):
        make_task(EnvConfig(dataset="arithmetic", reward_weights={"nopart": 1.0}))


def test_rows_of_the_hub_are_not_read_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    config = configured(
        "env.dataset=mixture", "env.mixture={gsm8k:1,arithmetic:1}", "eval.sets={a:{dataset:math}}"
    )
    assert option_problems(config) == []
    assert list(row_problems(config)) == []
    assert hub_notes(config) == [
        "env.mixture.gsm8k: env.dataset=gsm8k is read from the hub: its rows were not looked at",
        "eval.sets.a: env.dataset=math is read from the hub: its rows were not looked at",
    ]
    assert hub_notes(configured()) == []


class Hub(ModuleType):
    """A hub whose rows say how they were asked for."""

    def __init__(self) -> None:
        super().__init__("datasets")
        self.asked: list[tuple[str, str, str | None]] = []

    def load_dataset(
        self, name: str, config: str | None, split: str, revision: str | None
    ) -> list[dict[str, str]]:
        self.asked.append((name, split, revision))
        return [{"question": "1+1?", "answer": "#### 2"}]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub()
    monkeypatch.setitem(sys.modules, "datasets", found)
    return found


def test_a_revision_reaches_the_hub(hub: Hub) -> None:
    config = configured(
        *("env.dataset=gsm8k", "env.data_revision=abc"),
        "eval.sets={same:{dataset:gsm8k},own:{dataset:gsm8k,data_revision:v2},files:{dataset:gsm8k,data_files:x}}",
    )
    make_task(config.env).examples("train")
    for name in ("same", "own"):
        make_task(config.eval.sets[name].env(name, config.env)).examples("test")
    mixture: dict[str, Any] = {"gsm8k": {"data_revision": "v3"}, "plain": {"dataset": "gsm8k"}}
    make_task(EnvConfig(dataset="mixture", mixture=mixture)).examples("train")
    asked = [(split, revision) for _, split, revision in hub.asked]
    assert asked == [("train", "abc"), ("test", "abc"), ("test", "v2"), ("train", "v3"), ("train", None)]
    files = config.eval.sets["files"].env("files", config.env)
    assert (files.data_files, files.data_revision) == ("x", None)


def test_a_revision_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"gsm8k .*env\.data_revision=abc\) could not be read"):
        make_task(EnvConfig(dataset="gsm8k", data_revision="abc")).examples("train")


@pytest.mark.parametrize("dataset", ["arithmetic", "countdown", "reasoning_gym", "mixture"])
@pytest.mark.parametrize("given", [{"data_files": "rows.jsonl"}, {"data_revision": "abc"}])
def test_what_a_task_does_not_read_is_refused(dataset: str, given: dict[str, Any]) -> None:
    options: dict[str, Any] = {"name": "chain_sum"} if dataset == "reasoning_gym" else {}
    (key,) = given
    refused = (
        rf"env\.{key}=.*: env\.dataset={dataset} reads nothing from the hub"
        if key == "data_revision"
        else (rf"env\.{key}=.*: env\.dataset={dataset} reads no file")
    )
    with pytest.raises(ConfigError, match=f"^{refused}"):
        make_task(EnvConfig(dataset=dataset, options=options, **given))
    if dataset != "mixture":
        member = {"dataset": dataset, "options": options} | given
        with pytest.raises(ConfigError, match=rf"^env\.mixture\.one: {refused}"):
            make_task(EnvConfig(dataset="mixture", mixture={"one": member}))


def test_local_files_have_no_revision() -> None:
    for dataset, why in (("gsm8k", "local files have no revision"), ("jsonl", "reads nothing from the hub")):
        with pytest.raises(ConfigError, match=rf"env\.data_revision=abc.*{why}"):
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
    config = configured(*local, *(text.format(strict=strict, two=two) for text in overrides))
    assert option_problems(config) == []
    assert re.search(expected, prompt_problem(config) or "")
    assert prompt_problem(configured(*local)) is None
