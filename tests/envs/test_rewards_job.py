"""Tests of `run=rewards`, which scores saved completions."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from config.schema.jobs import RewardsConfig
from config.schema.models import ModelConfig
from tests.episodes import rewritten_episode, tool_episode
from tests.groups import make_group
from torchgrpo.monitoring.ledger import Ledger
from torchgrpo.run.jobs.rewards import score_completions


def run(
    tmp_path: Path, samples: str, model: ModelConfig | None = None, completions: Path | None = None, **options: object
) -> tuple[int, list[dict[str, object]], str]:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(5)))
    (tmp_path / "samples.jsonl").write_text(samples)
    env = EnvConfig(
        dataset="jsonl", data_files=str(data), reward_timeout_s=60.0,
        **options,
    )  # fmt: skip
    out, report = io.StringIO(), io.StringIO()
    rewards = RewardsConfig(str(completions or tmp_path / "samples.jsonl"))
    code = score_completions(env, rewards, out, report, model)
    return code, [json.loads(line) for line in out.getvalue().splitlines()], report.getvalue()


def sample(row: int, completion: str) -> str:
    return json.dumps({"row": row, "completion": completion}) + "\n"


def test_one_line_each_in_order_and_a_table(tmp_path: Path) -> None:
    code, lines, table = run(tmp_path, sample(4, "8") + sample(1, "#### 3") + sample(0, "0"))
    assert code == 0
    assert [(line["row"], line["score"], line["outcome"]) for line in lines] == [
        (4, 1.0, "scored"),
        (1, 0.0, "scored"),
        (0, 1.0, "scored"),
    ]
    assert set(lines[0]) == {"row", "score", "outcome", "components", "seconds"}
    assert "mean accuracy" in table
    assert "0.6667" in table


def test_a_thought_that_the_template_opens_is_open(tmp_path: Path) -> None:
    template = tmp_path / "thinking.jinja"
    template.write_text("{{ messages[-1].content }}{% if add_generation_prompt %}<think>\n{% endif %}")
    model = ModelConfig(name="models/quickstart", chat_template=str(template))
    samples = sample(1, "perhaps \\boxed{2}") + sample(1, "perhaps \\boxed{3}</think> \\boxed{2}")
    _, open_thought, _ = run(tmp_path, samples, model, reward="boxed")
    assert [line["score"] for line in open_thought] == [0.0, 1.0]
    _, no_thought, _ = run(tmp_path, samples, reward="boxed")
    assert [line["score"] for line in no_thought] == [1.0, 1.0]
    _, lines, report = run(tmp_path, samples, ModelConfig(name="nobody/nothing"), reward="boxed")
    assert lines[0]["score"] == 1.0
    assert "is not on this machine: the reward cannot detect a thought that the chat template opens" in report


def test_a_sample_that_closes_a_thought_has_a_prompt_that_opened_it(tmp_path: Path) -> None:
    samples = sample(1, "It is 2.</think><answer>2</answer>") + sample(1, "<answer>2</answer>")
    _, lines, _ = run(tmp_path, samples, reward="think_answer_tags")
    assert [line["score"] for line in lines] == [1.0, 0.0]


def test_rewards_read_the_messages_of_a_sample(tmp_path: Path) -> None:
    messages = [{"role": "assistant", "content": "1"}, {"role": "user", "content": "again"}]
    lines = json.dumps({"row": 1, "completion": "2", "messages": messages}) + "\n" + sample(1, "2")
    _, scores, _ = run(tmp_path, lines, reward="tests.envs.simple_rewards:count_messages")
    assert [line["score"] for line in scores] == [2.0, 0.0]


def write_ledger(run_dir: Path, row: int) -> Path:
    """Writes the ledger of a run with two episodes; returns the run's folder."""
    group = make_group(row, [tool_episode(), rewritten_episode()])
    for one, text in zip(group.completions, ("2", "3"), strict=True):
        assert one.reward_input is not None
        one.reward_input = replace(one.reward_input, text=text)
    ledger = Ledger(run_dir, 1 << 30, pytest.fail)
    ledger.write_iteration(1, [group])
    ledger.close()
    return run_dir


def test_completions_of_a_run_are_scored_again(tmp_path: Path) -> None:
    """Scores the inputs that the run's reward had, with all messages of the episodes."""
    (tmp_path / "run").mkdir()
    path = write_ledger(tmp_path / "run", 1)
    _, lines, table = run(tmp_path, "", completions=path)
    assert [(line["row"], line["score"]) for line in lines] == [(1, 1.0), (1, 0.0)] and "mean accuracy" in table
    _, lines, _ = run(tmp_path, "", completions=path, reward="tests.envs.simple_rewards:count_messages")
    assert [line["score"] for line in lines] == [5.0, 5.0]


def test_a_run_of_other_data_or_without_a_ledger_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the folder has no rollouts/ of a run"):
        run(tmp_path, "", completions=tmp_path)
    with pytest.raises(ConfigError, match=r"group 7: row 7 is not among the 5 prompts"):
        run(tmp_path, "", completions=write_ledger(tmp_path, 7))


@pytest.mark.long
def test_bombs_are_invalid_and_failures_are_errors_with_an_exit_code(tmp_path: Path) -> None:
    code, lines, table = run(
        tmp_path, sample(0, "sleep") + sample(1, "fail") + sample(2, "fine"), reward="tests.envs.hostile_rewards:bomb"
    )
    assert code == 1
    assert [line["outcome"] for line in lines] == ["invalid", "error", "scored"]
    assert "ZeroDivisionError" in table


@pytest.mark.parametrize(("line", "message"), [
    ("{", r"samples.jsonl:1: not valid JSON"), ('{"row": 0}', r"samples.jsonl:1: a sample must be"),
    ('{"row": 0, "completion": "1", "messages": ["x"]}', r"messages=.* must be a list"),
    (sample(9, "x"), r"row 9 is not among the 5 prompts \(rows 0 to 4\)"), ("", "no lines"),
])  # fmt: skip
def test_bad_samples_are_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, line)
