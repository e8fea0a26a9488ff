"""Tests of the settings of agents, and of examples whose columns agents read."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.agents.runner import AgentRunner
from envs.environments.episode_environments import make_episode_environments
from envs.option_checks import option_problems
from envs.task import load_examples, make_task
from tests.config.test_schema import make_config


def agent_config(agent: str | None = "python agent.py", **fields: Any) -> EnvConfig:
    return EnvConfig(**{"dataset": "arithmetic", "agent": agent} | fields)


def test_agents_play_episodes_of_many_turns() -> None:
    env = agent_config()
    assert env.plays_episodes and env.turn_limit == 64 and agent_config(max_steps=1).turn_limit == 1
    assert make_episode_environments(env) is None
    assert not agent_config(None).plays_episodes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"agent": ""}, "name a command line such as"),
        ({"agent": "  "}, "name a command line such as"),
        ({"agent": "sh -c 'x"}, "No closing quotation; correct the quotation marks"),
        ({"environment": "sums_with_hints"}, "the agent itself replies to the model; unset all but one"),
        ({"tools": ["calculator"]}, "the agent itself replies to the model"),
        ({"reasoning": True}, "the agent itself replies to the model"),
        ({"agent": None, "agent_env": {"A": "b"}}, r"env\.agent_env=\['A'\].*there is no agent; set env\.agent"),
        ({"agent": None, "agent_columns": ["a"]}, r"env\.agent_columns=\['a'\]: there is no agent"),
        ({"agent_env": {"OPENAI_API_KEY": "x"}}, r"env\.agent_env\.OPENAI_API_KEY: the run sets this variable"),
        ({"agent_env": {"A=B": "x"}}, "is no name of an environment variable"),
        ({"agent_env": {"A": True}}, r"env\.agent_env\.A=True: must be text or a number, or null"),
        ({"agent_env": {"A": [1]}}, r"env\.agent_env\.A=\[1\]: must be text"),
        ({"agent_env": {"A": "x\0y"}}, "must be text"),
        ({"agent_columns": ["answer"]}, "'answer' holds the answer, which agents must not read"),
        ({"agent_columns": ["info"], "options": {"answer": "info.target"}}, "'info' holds the answer"),
        ({"environment_workers": 2}, r"there is no environment; set env\.environment"),
    ],
)
def test_faults_of_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        agent_config(**fields)


def test_a_variable_that_the_run_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ABSENT_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"env\.agent_env\.ABSENT_KEY=null: the run has no such variable"):
        AgentRunner(agent_config("true", agent_env={"ABSENT_KEY": None}))


def test_option_checks_report_a_missing_program() -> None:
    config = make_config("grpo_quickstart", "env.agent=no-such-program")
    assert option_problems(config) == [
        "env.agent=no-such-program: there is no program 'no-such-program'; correct its name or PATH"
    ]
    assert option_problems(make_config("grpo_quickstart", "env.agent='true'")) == []


def test_columns_of_agents_distinguish_problems(tmp_path: Path) -> None:
    rows = [{"prompt": "same", "answer": "1", "level": level, "hidden": index} for index, level in enumerate([1, 1, 2])]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    env = agent_config(dataset="jsonl", data_files=str(file), agent_columns=["level"])
    examples = load_examples(make_task(env), "train")
    first, second, third = (example.problem_id for example in examples)
    assert first == second != third and examples[2].row_data["level"] == 2
    without = load_examples(make_task(agent_config(dataset="jsonl", data_files=str(file))), "train")
    assert [example.problem_id for example in without] == [""] * 3 and without[0].row_data == {}
