"""What docs/rewards.md and docs/judges.md say, done: rows are read, tasks, rewards and judges judge."""

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from config.schema.env import EnvConfig
from envs.judging.judge import least_score, make_judge
from envs.judging.outcome import judged as judged_here
from envs.judging.service import RewardService
from envs.rewards import known_rewards
from envs.task import Completion, checked_examples, known_tasks, make_task
from envs.tool_calls import make_tools
from tests.scripts import ENVIRONMENT, ROOT, ended

PAGES = {
    name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("rewards", "judges", "turns", "coming_from")
}
README = (ROOT / "README.md").read_text(encoding="utf-8")
SUM = {"prompt": "Write 12.", "answer": "12"}


def block(kind: str, having: str, text: str = PAGES["rewards"]) -> str:
    (found,) = [body for body in re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) if having in body]
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a run is started: its modules can be named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def module_of(folder: Path, having: str, page: str = "rewards") -> str:
    """A block of Python of the page as a module, under a name of its own."""
    name = re.sub(r"\W+", "_", f"{page} {having}")
    (folder / f"{name}.py").write_text(block("python", having, PAGES[page]), encoding="utf-8")
    return name


def env_of(folder: Path, row: Any, **fields: Any) -> EnvConfig:
    (folder / "rows.jsonl").write_text(row if isinstance(row, str) else json.dumps(row), encoding="utf-8")
    return EnvConfig(**{"dataset": "jsonl", "data_files": str(folder / "rows.jsonl")} | fields)


def judged(env: EnvConfig, text: str) -> float | str:
    """The score of an answer to the first prompt, or what its error says."""
    task = make_task(env)
    result = judged_here(make_judge(task), Completion(text), checked_examples(task, "train")[0])
    return result.message if result.outcome == "error" else result.score


def test_the_rows_of_the_text_are_read(folder: Path) -> None:
    task = make_task(env_of(folder, block("json", '"gt_answer"')))
    examples = task.examples("train")
    assert len(examples) == 4
    for example in examples:
        assert [task.reward(Completion(f"#### {text}"), example).score for text in "45"] == [1.0, 0.0]
    tested = make_task(env_of(folder, block("json", '"test_cases"')))
    (example,) = tested.examples("train")
    assert example.answer["outputs"] == ["4\n"]
    assert tested.reward(Completion("no program"), example).score == 0.0


def test_the_task_of_the_text_judges(folder: Path) -> None:
    assert len(block("python", "class Spelling").strip().splitlines()) <= 18
    dataset = f"{module_of(folder, 'class Spelling')}:Spelling"
    task = make_task(env_of(folder, {"word": "river", "kind": "noun"}, dataset=dataset))
    (example,) = task.examples("train")
    assert example.row_data["kind"] == "noun"
    assert [message["role"] for message in example.messages] == ["system", "user"]
    assert [task.reward(Completion(text), example).score for text in ("r-i-v-e-r\n", "river")] == [1.0, 0.0]


def test_the_reward_of_the_text_judges_in_workers(folder: Path) -> None:
    reward = f"{module_of(folder, 'def brief')}:brief"
    env = EnvConfig(dataset="arithmetic", reward=reward, reward_workers=1)
    task = make_task(env)
    example = task.examples("train")[0]
    said = [Completion(example.answer, 100), Completion(example.answer, 0), Completion("?", 0)]
    with closing(RewardService(task, env)) as service:
        long, short, wrong = service.score(said, [example] * 3)
    assert (long.score, short.score, wrong.score) == (0.5, 1.0, 0.0)
    assert short.parts == {"accuracy": 1.0, "short": 1.0}


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
    page: str, name: str, row: dict[str, Any], scores: dict[str, float], folder: Path
) -> None:
    env = env_of(folder, row, reward=f"{module_of(folder, f'def {name}(', page)}:{name}")
    assert {text: judged(env, text) for text in scores} == pytest.approx(scores)


def test_the_reward_of_the_text_runs_programs(folder: Path) -> None:
    reward = f"{module_of(folder, 'def short_programs(')}:short_programs"
    env = env_of(
        folder, block("json", '"test_cases"'), reward=reward, reward_timeout_s=600, sandbox="rlimits"
    )
    assert judged(env, "```python\nprint(2 * int(input()))\n```") == 1.0
    assert least_score(make_task(env)) == -0.1


@contextmanager
def answering(monkeypatch: pytest.MonkeyPatch, replies: dict[str, Any]) -> Iterator[list[tuple[str, Any]]]:
    """A server on loopback, which the judges of the text ask. Replies by path; what it was asked is kept."""
    asked: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(replies[self.path]).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("JUDGE_URL", f"{address}/score")
        monkeypatch.setenv("JUDGE_SERVER", f"{address}/v1")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield asked
        server.shutdown()


def test_the_http_judge_of_the_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(monkeypatch, {"/score": {"score": 0.7}}) as asked:
        env = EnvConfig(
            dataset="arithmetic", reward=f"{module_of(folder, 'def http_judge', 'judges')}:http_judge"
        )
        assert judged(env, "five") == 0.7
    question = make_task(env).examples("train")[0]
    said = {"question": question.messages[-1]["content"], "answer": "five", "gold": question.answer}
    assert asked == [("/score", said)]
    assert "Connection refused" in str(judged(env, "five"))


def test_the_language_model_of_the_text_judges(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"prompt": "Be kind.", "answer": "Hello!", "rubric": "It greets."}
    replied: dict[str, Any] = {"choices": [{"message": {"content": " 8\n"}}]}
    with answering(monkeypatch, {"/v1/chat/completions": replied}) as asked:
        reward = f"{module_of(folder, 'def llm_judge', 'judges')}:llm_judge"
        env = env_of(folder, row, reward=reward, reward_timeout_s=600)
        assert judged(env, "Good day ------ Grade: 10") == 0.8
        replied["choices"][0]["message"]["content"] = "I would say 8"
        assert "the judge replied 'I would say 8'" in str(judged(env, "Good day"))
    (path, body), _ = asked
    assert path == "/v1/chat/completions" and body["temperature"] == 0
    assert "Rubric: It greets." in body["messages"][0]["content"]
    assert body["messages"][0]["content"].count("------") == 2


def test_the_tool_of_the_text_answers(folder: Path) -> None:
    named = f"{module_of(folder, 'def capital', 'turns')}:capital"
    (tool,) = make_tools(EnvConfig(dataset="x", max_steps=3, tools=[named]))
    assert tool.reply("<capital>Peru</capital>") == "capital: Lima"


def test_the_task_of_the_readme_trains_as_it_is_printed(tmp_path: Path) -> None:
    (tmp_path / "my_tasks.py").write_text(block("python", "class Reverse", README), encoding="utf-8")
    (rest,) = re.findall(r"^python grpo\.py (.*my_tasks:Reverse.*)$", README, re.MULTILINE)
    command = ["grpo.py", *rest.split(), f"hydra.run.dir={tmp_path / 'run'}", "train.total_dialog_turns=768"]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    done = ended([*command, "logging.progress=false"], environment=environment)
    assert done.returncode == 0, done.stderr
    assert "finished: 3 optimizer steps" in done.stderr
