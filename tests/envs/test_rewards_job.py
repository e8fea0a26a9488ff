"""Grading saved completions: one line each, a table, and what a bad file says."""

import io
import json
from pathlib import Path

import pytest

from config.env import EnvConfig
from config.errors import ConfigError
from run.rewards import run_rewards


def run(tmp_path: Path, samples: str, **options: object) -> tuple[int, list[dict[str, object]], str]:
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(5))
    )
    (tmp_path / "samples.jsonl").write_text(samples)
    env = EnvConfig(
        dataset="jsonl",
        data_files=str(data),
        samples=str(tmp_path / "samples.jsonl"),
        reward_timeout_s=3.0,
        **options,  # type: ignore[arg-type]
    )
    out, report = io.StringIO(), io.StringIO()
    code = run_rewards(env, out, report)
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
    assert set(lines[0]) == {"row", "score", "outcome", "parts", "seconds"}
    assert "mean accuracy" in table
    assert "0.6667" in table


def test_bombs_are_invalid_and_failures_are_errors_with_an_exit_code(tmp_path: Path) -> None:
    code, lines, table = run(
        tmp_path,
        sample(0, "sleep") + sample(1, "fail") + sample(2, "fine"),
        reward="tests.envs.hostile_rewards:bomb",
    )
    assert code == 1
    assert [line["outcome"] for line in lines] == ["invalid", "error", "scored"]
    assert "ZeroDivisionError" in table


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"samples.jsonl:1: not valid JSON"),
        ('{"row": 0}', r"samples.jsonl:1: a sample is"),
        (sample(9, "x"), r"row 9 is not among the 5 prompts \(rows 0 to 4\)"),
        ("", "no lines"),
    ],
)
def test_bad_samples_are_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, line)
