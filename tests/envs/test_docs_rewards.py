"""What docs/rewards.md and docs/judges.md say, done: rows are read, tasks, rewards and judges judge."""

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from config.env import EnvConfig
from envs.judging.judge import least_score
from envs.judging.service import RewardService
from envs.rewards import known_rewards
from envs.task import Completion, known_tasks, make_task
from envs.tools.tool import make_tools
from tests.scripts import ENVIRONMENT, ended

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
JUDGES = (ROOT / "docs" / "judges.md").read_text(encoding="utf-8")


def block(kind: str, having: str, text: str = TEXT) -> str:
    (found,) = [body for body in re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) if having in body]
    return found


def test_the_rows_of_the_text_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(block("json", '"gt_answer"'), encoding="utf-8")
    task = make_task(EnvConfig(dataset="jsonl", data_files=str(tmp_path / "rows.jsonl")))
    examples = task.examples("train")
    assert len(examples) == 4
    for example in examples:
        assert task.reward(Completion("#### 4"), example).score == 1.0
        assert task.reward(Completion("#### 5"), example).score == 0.0


def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> str:
    """Source of the text as a module in the folder where the run is started; under a name of its own."""
    (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def test_the_task_of_the_text_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = block("python", "class Spelling")
    assert len(source.strip().splitlines()) <= 18
    module = beside(tmp_path, monkeypatch, "spelling_of_the_text", source)
    (tmp_path / "words.jsonl").write_text(json.dumps({"word": "river", "kind": "noun"}), encoding="utf-8")
    task = make_task(EnvConfig(dataset=f"{module}:Spelling", data_files=str(tmp_path / "words.jsonl")))
    (example,) = task.examples("train")
    assert example.row_data["kind"] == "noun"
    assert [message["role"] for message in example.messages] == ["system", "user"]
    scores = [task.reward(Completion(text), example).score for text in ("r-i-v-e-r\n", "river")]
    assert scores == [1.0, 0.0]


def test_the_reward_of_the_text_judges_in_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(block("python", "def brief"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    env = EnvConfig(dataset="arithmetic", reward="my_rewards:brief", reward_workers=1)
    task = make_task(env)
    example = task.examples("train")[0]
    service = RewardService(task, env)
    try:
        long, short, wrong = service.score(
            [Completion(example.answer, 100), Completion(example.answer, 0), Completion("?", 0)],
            [example] * 3,
        )
    finally:
        service.close()
    assert (long.score, short.score, wrong.score) == (0.5, 1.0, 0.0)
    assert short.parts == {"accuracy": 1.0, "short": 1.0}


def test_the_test_cases_of_the_text_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(block("json", '"test_cases"'), encoding="utf-8")
    task = make_task(EnvConfig(dataset="jsonl", data_files=str(tmp_path / "rows.jsonl")))
    (example,) = task.examples("train")
    assert example.answer["outputs"] == ["4\n"]
    assert task.reward(Completion("no program"), example).score == 0.0


@pytest.mark.parametrize("known", [known_tasks, known_rewards])
def test_every_task_and_reward_is_in_the_text(known: object) -> None:
    assert callable(known)
    for name in known():
        assert f"`{name}`" in TEXT, name


def test_the_reward_of_the_text_reads_other_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = beside(tmp_path, monkeypatch, "mentions_of_the_text", block("python", "def mentions"))
    row = {"prompt": "Write.", "answer": "x", "must_mention": ["cat", "hat"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row), encoding="utf-8")
    env = EnvConfig(dataset="jsonl", data_files=str(tmp_path / "rows.jsonl"), reward=f"{module}:mentions")
    assert judged(env, "a cat") == 0.5


SUM = {"prompt": "Write 12.", "answer": "12"}


@pytest.mark.parametrize(("name", "row", "scores"), [
    ("compute_score", SUM | {"data_source": "sums"}, {"12": 1.0, "13": -1.0}),
    ("near_in_length", SUM, {"13": 1.0, "": 1 / 3}),
    ("reward_func", SUM, {"so 12": 1.0, "12 or 13": 0.0}),
    ("harsh", SUM, {"12 ": 1.0, "13": -3.0}),
    ("shorter_in_time", SUM, {"12": 1.0, "13": 0.0}),
    ("boxed_or_bare", SUM, {"\\boxed{12}": 1.0, "12.0": 0.1, "so 12": 0.0}),
    ("liked", SUM, {"good bad good": 1.0}),
])  # fmt: skip
def test_the_functions_of_the_text(
    name: str, row: dict[str, str], scores: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = beside(tmp_path, monkeypatch, f"{name}_of_the_text", block("python", f"def {name}("))
    (tmp_path / "rows.jsonl").write_text(json.dumps(row), encoding="utf-8")
    for text, score in scores.items():
        env = EnvConfig(dataset="jsonl", data_files=str(tmp_path / "rows.jsonl"), reward=f"{module}:{name}")
        assert judged(env, text) == pytest.approx(score)


def test_the_reward_of_the_text_runs_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = beside(
        tmp_path, monkeypatch, "short_programs_of_the_text", block("python", "def short_programs(")
    )
    (tmp_path / "rows.jsonl").write_text(block("json", '"test_cases"'), encoding="utf-8")
    env = EnvConfig(
        dataset="jsonl",
        data_files=str(tmp_path / "rows.jsonl"),
        reward=f"{module}:short_programs",
        reward_timeout_s=60,
        sandbox="rlimits",
    )
    assert judged(env, "```python\nprint(2 * int(input()))\n```") == 1.0
    assert least_score(make_task(env)) == -0.1


def test_the_reward_of_the_page_for_users_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    module = beside(tmp_path, monkeypatch, "brief_of_trl", block("python", "def brief(completions", text))
    (tmp_path / "rows.jsonl").write_text(json.dumps(SUM), encoding="utf-8")
    env = EnvConfig(dataset="jsonl", data_files=str(tmp_path / "rows.jsonl"), reward=f"{module}:brief")
    assert judged(env, " 12") == 1.0


def judged(env: EnvConfig, text: str) -> float | str:
    """The score of an answer to the first prompt, given in a worker; or what its error says."""
    env.reward_workers, env.max_error_rate = 1, 1.0
    task = make_task(env)
    service = RewardService(task, env)
    try:
        (scored,) = service.score([Completion(text)], task.examples("train")[:1])
    finally:
        service.close()
    return service.last_error if scored.outcome == "error" else scored.score


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


def test_the_http_judge_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(monkeypatch, {"/score": {"score": 0.7}}) as asked:
        module = beside(
            tmp_path, monkeypatch, "http_judge_of_the_text", block("python", "def http_judge", JUDGES)
        )
        env = EnvConfig(dataset="arithmetic", reward=f"{module}:http_judge")
        assert judged(env, "five") == 0.7
    question = make_task(env).examples("train")[0]
    said = {"question": question.messages[-1]["content"], "answer": "five", "gold": question.answer}
    assert asked == [("/score", said)]
    refused = judged(env, "five")
    assert isinstance(refused, str) and "Connection refused" in refused


def test_the_language_model_of_the_text_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"prompt": "Be kind.", "answer": "Hello!", "rubric": "It greets."}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row), encoding="utf-8")
    replied: dict[str, Any] = {"choices": [{"message": {"content": " 8\n"}}]}
    with answering(monkeypatch, {"/v1/chat/completions": replied}) as asked:
        module = beside(
            tmp_path, monkeypatch, "llm_judge_of_the_text", block("python", "def llm_judge", JUDGES)
        )
        env = EnvConfig(
            dataset="jsonl",
            data_files=str(tmp_path / "rows.jsonl"),
            reward=f"{module}:llm_judge",
            reward_timeout_s=60,
        )
        assert judged(env, "Good day ------ Grade: 10") == 0.8
        replied["choices"][0]["message"]["content"] = "I would say 8"
        no_grade = judged(env, "Good day")
    assert isinstance(no_grade, str) and "the judge replied 'I would say 8'" in no_grade
    (path, body), _ = asked
    assert path == "/v1/chat/completions" and body["temperature"] == 0
    assert "Rubric: It greets." in body["messages"][0]["content"]
    assert body["messages"][0]["content"].count("------") == 2


def test_the_tool_of_the_text_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "turns.md").read_text(encoding="utf-8")
    module = beside(tmp_path, monkeypatch, "tool_of_the_text", block("python", "def capital", text))
    (tool,) = make_tools(EnvConfig(dataset="x", max_steps=3, tools=[f"{module}:capital"]))
    assert tool.reply("<capital>Peru</capital>") == "capital: Lima"


def test_the_task_of_the_readme_trains_as_it_is_printed(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "my_tasks.py").write_text(block("python", "class Reverse", text), encoding="utf-8")
    (rest,) = re.findall(r"^python grpo\.py (.*my_tasks:Reverse.*)$", text, re.MULTILINE)
    command = ["grpo.py", *rest.split(), f"hydra.run.dir={tmp_path / 'run'}", "train.total_dialog_turns=768"]
    command += ["logging.progress=false"]
    found = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    done = ended(command, environment=found)
    assert done.returncode == 0, done.stderr
    assert "finished: 3 optimizer steps" in done.stderr
