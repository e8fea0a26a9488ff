"""Tests of the rewards that agents report, and of the example that they read."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from envs.agents.example_record import example_of_record, example_record
from envs.agents.results import AgentResult, read_last_line, read_value
from envs.agents.runner import AgentRunner
from envs.environments.interface import EpisodeError
from envs.example import Example
from tests.envs.agents.agent_helpers import ANSWER, KEY, MODULE, URL, make_example, run_agent, shell, use_agent


@pytest.mark.parametrize(
    ("output", "result"),
    [
        ("", AgentResult(None)),
        ("text\n", AgentResult(None)),
        ('{"reward": 1}\nbye', AgentResult(None)),
        ('{"score": 1}', AgentResult(None)),
        ('text\n{"reward": 0.5}\n\n', AgentResult(0.5)),
        ('{"reward": -2, "components": {"a": 1}, "more": []}', AgentResult(-2.0, {"a": 1.0})),
        ('{"reward": null}', AgentResult(None)),
        ('{"text": "\\"reward\\""}', AgentResult(None)),
    ],
)
def test_last_line(output: str, result: AgentResult) -> None:
    assert read_last_line(output) == result


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"reward": 1', "no valid JSON"),
        ('{"reward": true}', "reward=True must be a finite number"),
        ('{"reward": NaN}', "reward=nan must be"),
        ('{"reward": 1e999}', "reward=inf must be"),
        (f'{{"reward": {10**400}}}', "must be a finite number"),
        ('{"reward": "1"}', "reward='1' must be"),
        ('{"reward": 1, "components": [1]}', "must be numbers by name"),
        ('{"reward": 1, "components": {"a": false}}', r"components\.a=False must be"),
        ('{"reward": ' + "[" * 100_000, "no valid JSON"),
        ('{"reward": 1e39}', r"reward=1e\+39 must be"),
        ('{"reward": 1, "components": {"mean": 1}}', "reward/mean is another metric; rename"),
        ('{"reward": 1, "components": {"": 1}}', "names of 1 to 100 characters"),
        (json.dumps({"reward": 1, "components": dict.fromkeys(map(str, range(65)), 1)}), "send at most 64"),
    ],
)
def test_faults_of_the_last_line(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_last_line(f"first\n{line}\n")


@pytest.mark.parametrize("value", ["text", (1, 2, 3), {"score": 1}, float("nan"), (0.5, 1), True, [1.0]])
def test_values_of_functions_that_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="return None, a number"):
        read_value(value)


def test_record_holds_no_answer() -> None:
    columns = {"level": 3, "copy": f" {ANSWER} ", "hidden": "x"}
    example = Example(({"role": "user", "content": "?"},), ANSWER, 5, "member", columns, "", (), "digest")
    record = example_record(example, ["level", "copy"])
    assert record == {
        "messages": [{"role": "user", "content": "?"}],
        "row": 5,
        "source": "member",
        "row_data": {"level": 3},
        "tools": [],
    }
    assert example_of_record(json.loads(json.dumps(record))) == Example(
        example.messages, None, 5, "member", {"level": 3}
    )


@pytest.mark.parametrize(
    ("function", "result"),
    [
        ("returns_nothing", AgentResult(None)),
        ("returns_number", AgentResult(1.0)),
        ("returns_components", AgentResult(0.5, {"row": 7.0})),
        ("returns_dictionary", AgentResult(1.0, {"columns": 1.0})),
        ("forks", AgentResult(0.25)),
    ],
)
def test_values_of_functions(function: str, result: AgentResult, tmp_path: Path) -> None:
    example = make_example(7, level=2, unseen=1)
    assert run_agent(f"{MODULE}:{function}", tmp_path, example=example, agent_columns=["level"]) == result


def test_reward_of_a_command(tmp_path: Path) -> None:
    agent = shell("""echo '{"reward": 0.75, "components": {"steps": 2}}'""")
    assert run_agent(agent, tmp_path) == AgentResult(0.75, {"steps": 2.0})
    assert run_agent(shell("echo done"), tmp_path) == AgentResult(None)


def test_missing_column(tmp_path: Path) -> None:
    with pytest.raises(EpisodeError, match=r"env\.agent_columns=\['level'\]: row 0 has no column 'level'.*are size"):
        run_agent(f"{MODULE}:returns_number", tmp_path, example=make_example(size=1), agent_columns=["level"])


PRINT_EVERYTHING = """
import json, os, sys
data = {"variables": dict(os.environ), "example": json.load(open(os.environ["GRPO_EXAMPLE"])), "folder": os.getcwd()}
data["temporary"] = os.listdir(os.environ["TMPDIR"])
open(os.environ["OUTPUT"], "w").write(json.dumps(data))
"""


def test_a_command_reads_its_example_and_few_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-the-run")
    monkeypatch.setenv("SEARCH_KEY", "search")
    program, output = tmp_path / "program.py", tmp_path / "seen.json"
    program.write_text(PRINT_EVERYTHING)
    variables = {"OUTPUT": str(output), "LIMIT": 3, "SEARCH_KEY": None}
    run_agent(f"{sys.executable} {program}", tmp_path, variables=variables)
    text = output.read_text()
    assert "secret-of-the-run" not in text and ANSWER not in text
    seen = json.loads(text)
    assert seen["example"] == {
        "messages": [{"role": "user", "content": "?"}],
        "row": 0,
        "source": "",
        "row_data": {},
        "tools": [],
    }
    assert seen["folder"] == os.getcwd() and seen["temporary"] == ["example.json"]
    expected = {
        "OPENAI_BASE_URL": "http://127.0.0.1:9/v1",
        "OPENAI_API_KEY": KEY,
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9",
        "ANTHROPIC_API_KEY": KEY,
        "LIMIT": "3",
        "SEARCH_KEY": "search",
        "PATH": os.environ["PATH"],
    }
    assert expected.items() <= seen["variables"].items()


def test_a_function_reads_no_answer_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-of-the-run")
    output = tmp_path / "seen.json"
    run_agent(f"{MODULE}:sees", tmp_path, variables={"OUTPUT": str(output)})
    text = output.read_text()
    assert "secret-of-the-run" not in text and ANSWER not in text
    seen = json.loads(text)
    assert seen["variables"]["OPENAI_API_KEY"] == KEY and "answer=None" in seen["example"]
    assert "OPENAI_API_KEY" not in seen["start"] and seen["folder"] == os.getcwd()


def test_episodes_of_a_function_do_not_share_random_numbers(tmp_path: Path) -> None:
    async def use(runner: AgentRunner) -> set[float | None]:
        return {(await runner.run(make_example(), URL, KEY)).reward for _ in range(3)}

    assert len(use_agent(f"{MODULE}:random_number", tmp_path, use)) == 3


def test_functions_with_faults(tmp_path: Path) -> None:
    for function, message in {
        "raises": r"LookupError: row 0 \(user_agents\.py:\d+\); the end of its standard error:\nbefore the end$",
        "returns_bool": "reward=True must be a finite number, at most .*; return None, a number",
        "exits": "it ended its process instead of returning",
        "aborts": "killed by SIGKILL",
    }.items():
        with pytest.raises(EpisodeError, match=rf"(?s)^env\.agent={MODULE}:{function}: .*{message}"):
            run_agent(f"{MODULE}:{function}", tmp_path)
