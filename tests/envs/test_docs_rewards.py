"""Tests of the rows, tasks, rewards, judges and tools in docs/rewards.md, judges.md and turns.md."""

import json
import re
import shlex
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from config.schema.env import EnvConfig
from envs.reward_workers.scoring import score_completion
from envs.reward_workers.service import RewardService
from envs.reward_workers.task_scorer import make_scorer, minimum_score
from envs.rewards import known_rewards
from envs.task import Completion, known_tasks, load_examples, make_task
from envs.tool_calls import make_tools
from tests.script_runner import ENVIRONMENT, ROOT, compose_run_config, run_python

PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("rewards", "judges", "turns", "coming_from")}
README = (ROOT / "README.md").read_text(encoding="utf-8")
SUM = {"prompt": "Write 12.", "answer": "12"}


def page_block(kind: str, having: str, text: str = PAGES["rewards"]) -> str:
    (found,) = [body for body in re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) if having in body]
    return found


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Changes to a folder of a run, whose modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def write_page_module(run_folder: Path, having: str, page: str = "rewards") -> str:
    """Writes a Python block of a page as a module; returns the module's name."""
    name = re.sub(r"\W+", "_", f"{page} {having}")
    (run_folder / f"{name}.py").write_text(page_block("python", having, PAGES[page]), encoding="utf-8")
    return name


def make_env(run_folder: Path, row: Any, **fields: Any) -> EnvConfig:
    (run_folder / "rows.jsonl").write_text(row if isinstance(row, str) else json.dumps(row), encoding="utf-8")
    return EnvConfig(**{"dataset": "jsonl", "data_files": str(run_folder / "rows.jsonl")} | fields)


def score_first_row(env: EnvConfig, text: str) -> float | str:
    """Returns the score of an answer to the first prompt, or the error message."""
    task = make_task(env)
    result = score_completion(make_scorer(task), Completion(text), load_examples(task, "train")[0])
    return result.message if result.outcome == "error" else result.score


def test_the_rows_of_the_text_are_read(run_folder: Path) -> None:
    task = make_task(make_env(run_folder, page_block("json", '"gt_answer"')))
    examples = task.examples("train")
    assert len(examples) == 4
    for example in examples:
        assert [task.reward(Completion(f"#### {text}"), example).score for text in "45"] == [1.0, 0.0]
    tested = make_task(make_env(run_folder, page_block("json", '"test_cases"')))
    (example,) = tested.examples("train")
    assert example.answer["outputs"] == ["4\n"]
    assert tested.reward(Completion("no program"), example).score == 0.0


def test_the_task_of_the_text_judges(run_folder: Path) -> None:
    assert len(page_block("python", "class Spelling").strip().splitlines()) <= 18
    dataset = f"{write_page_module(run_folder, 'class Spelling')}:Spelling"
    task = make_task(make_env(run_folder, {"word": "river", "kind": "noun"}, dataset=dataset))
    (example,) = task.examples("train")
    assert example.row_data["kind"] == "noun"
    assert [message["role"] for message in example.messages] == ["system", "user"]
    assert [task.reward(Completion(text), example).score for text in ("r-i-v-e-r\n", "river")] == [1.0, 0.0]


def test_the_reward_of_the_text_judges_in_workers(run_folder: Path) -> None:
    reward = f"{write_page_module(run_folder, 'def brief')}:brief"
    env = EnvConfig(dataset="arithmetic", reward=reward, reward_workers=1)
    task = make_task(env)
    example = task.examples("train")[0]
    completions = [Completion(example.answer, 100), Completion(example.answer, 0), Completion("?", 0)]
    with closing(RewardService(task, env)) as service:
        long, short, wrong = service.score(completions, [example] * 3)
    assert (long.score, short.score, wrong.score) == (0.5, 1.0, 0.0)
    assert short.components == {"accuracy": 1.0, "short": 1.0}


def test_every_task_and_reward_is_in_the_text() -> None:
    for name in (*known_tasks(), *known_rewards()):
        assert f"`{name}`" in PAGES["rewards"], name


@pytest.mark.parametrize(("page", "name", "row", "scores"), [
    ("rewards", "mentions", {"prompt": "Write.", "answer": "x", "must_mention": ["cat", "hat"]}, {"a cat": 0.5}),
    ("rewards", "compute_score", SUM | {"data_source": "sums"}, {"12": 1.0, "13": -1.0}),
    ("rewards", "near_in_length", SUM, {"13": 1.0, "": 1 / 3}),
    ("rewards", "reward_func", SUM, {"so 12": 1.0, "12 or 13": 0.0}),
    ("rewards", "harsh", SUM, {"12 ": 1.0, "13": -3.0}),
    ("rewards", "shorter_in_time", SUM, {"12": 1.0, "13": 0.0}),
    ("rewards", "boxed_or_bare", SUM, {"\\boxed{12}": 1.0, "12.0": 0.1, "so 12": 0.0}),
    ("rewards", "liked", SUM, {"good bad good": 1.0}),
    ("coming_from", "brief", SUM, {" 12": 1.0}),
])  # fmt: skip
def test_the_functions_of_the_text(
    page: str, name: str, row: dict[str, Any], scores: dict[str, float], run_folder: Path
) -> None:
    env = make_env(run_folder, row, reward=f"{write_page_module(run_folder, f'def {name}(', page)}:{name}")
    assert {text: score_first_row(env, text) for text in scores} == pytest.approx(scores)


def test_the_reward_of_the_text_runs_programs(run_folder: Path) -> None:
    reward = f"{write_page_module(run_folder, 'def short_programs(')}:short_programs"
    env = make_env(
        run_folder, page_block("json", '"test_cases"'), reward=reward, reward_timeout_s=600, sandbox="rlimits"
    )
    assert score_first_row(env, "```python\nprint(2 * int(input()))\n```") == 1.0
    assert minimum_score(make_task(env)) == -0.1


@contextmanager
def reward_server(monkeypatch: pytest.MonkeyPatch, replies: dict[str, Any]) -> Iterator[list[tuple[str, Any]]]:
    """Runs a server on loopback for the rewards of the pages; yields its requests.

    replies: the reply for each path.
    """
    requests: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, body))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(replies[self.path]).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("REWARD_URL", f"{address}/score")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield requests
        server.shutdown()


def test_the_http_reward_of_the_text(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with reward_server(monkeypatch, {"/score": {"score": 0.7}}) as requests:
        env = EnvConfig(
            dataset="arithmetic", reward=f"{write_page_module(run_folder, 'def http_reward', 'judges')}:http_reward"
        )
        assert score_first_row(env, "five") == 0.7
    question = make_task(env).examples("train")[0]
    body = {"question": question.messages[-1]["content"], "answer": "five", "reference_answer": question.answer}
    assert requests == [("/score", body)]
    assert "Connection refused" in str(score_first_row(env, "five"))


def test_the_settings_of_the_judge_page_are_accepted() -> None:
    commands = [shlex.split(line) for line in re.findall(r"^python grpo\.py (.+)$", PAGES["judges"], re.MULTILINE)]
    with_models = [command for command in commands if "judge" in str(command) or "reward_model" in str(command)]
    assert len(with_models) == 3
    for overrides in with_models:
        assert compose_run_config(*(one for one in overrides if not one.startswith("--"))).reward_names


def test_the_tool_of_the_text_answers(run_folder: Path) -> None:
    tool_path = f"{write_page_module(run_folder, 'def capital', 'turns')}:capital"
    (tool,) = make_tools(EnvConfig(dataset="x", max_steps=3, tools=[tool_path], tool_format="tags"))
    assert tool.reply("<capital>Peru</capital>") == "capital: Lima"


def test_the_task_of_the_readme_trains_as_it_is_printed(tmp_path: Path) -> None:
    (tmp_path / "my_tasks.py").write_text(page_block("python", "class Reverse", README), encoding="utf-8")
    (rest,) = re.findall(r"^python grpo\.py (.*my_tasks:Reverse.*)$", README, re.MULTILINE)
    command = ["grpo.py", *rest.split(), f"hydra.run.dir={tmp_path / 'run'}", "train.total_dialog_turns=768"]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    done = run_python([*command, "logging.progress=false"], environment=environment)
    assert done.returncode == 0, done.stderr
    assert "finished: 3 optimizer steps" in done.stderr
