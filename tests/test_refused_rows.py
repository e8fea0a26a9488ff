"""Rows and rewards that users bring, in runs of their own: an exit code, one line, no traceback."""

import json
import shutil
from pathlib import Path

import pytest

from tests.scripts import ran
from torchgrpo.monitoring.ledger_storage import read_records

SHORT = ("train.total_dialog_turns=96", "env.num_envs=4", "env.max_prompt_tokens=400")
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)


def written(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("script", ["grpo.py", "grpo_async.py"])
def test_a_reward_that_asks_for_a_column_that_no_row_has(script: str, tmp_path: Path) -> None:
    process = ran(script, tmp_path / "run", *SHORT, "env.reward=tests.envs.users_rewards:compute_score")
    output = process.output
    assert process.returncode == 2, output
    assert "Traceback" not in output
    last = output.strip().splitlines()[-1]
    assert last.startswith(
        "error: env.reward=tests.envs.users_rewards:compute_score: it asks for data_source"
    )
    assert "accepted are (completion, example)" in last


def test_a_template_that_refuses_the_system_prompt(tmp_path: Path) -> None:
    shutil.copytree("torchgrpo/models/quickstart", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(NO_SYSTEM)
    rows = written(tmp_path / "rows.jsonl", {"prompt": "1+1=", "answer": 2})
    local = ("env.dataset=jsonl", f"env.data_files={rows}", f"model.name={tmp_path / 'model'}")
    process = ran("grpo.py", tmp_path / "run", *SHORT, *local, "env.system_prompt=hi")
    output = process.output
    assert process.returncode == 2, output
    assert "Traceback" not in output
    assert output.strip().splitlines()[-1].startswith("error: row 0: the chat template refuses its messages")


def test_the_system_prompt_of_the_config_is_that_of_conversations(tmp_path: Path) -> None:
    asked = {"role": "user", "content": "1+1="}
    chats = (
        [{"role": "system", "content": "Be brief."}, asked],
        [asked, {**asked, "role": "assistant"}, asked],
    )
    rows = written(tmp_path / "rows.jsonl", *({"messages": chat, "answer": 2} for chat in chats))
    local = ("env.dataset=jsonl", f"env.data_files={rows}", "env.system_prompt=ABCDEF")
    ran("grpo.py", tmp_path / "run", *SHORT, *local)
    first = {record["messages"][0]["content"] for record in read_records(tmp_path / "run")}
    assert first == {"ABCDEF"}
