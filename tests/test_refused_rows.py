"""Runs with rows or rewards that are refused: exit code 2 and a one-line error."""

import json
import shutil
from pathlib import Path

import pytest

from tests.script_runner import run_script
from torchgrpo.monitoring.ledger_storage import read_records

SHORT = ("train.total_dialog_turns=96", "env.num_envs=4", "env.max_prompt_tokens=400")
TEMPLATE_WITHOUT_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)


def write_rows(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("script", ["grpo.py", "grpo_async.py"])
def test_a_reward_that_takes_a_missing_column(script: str, tmp_path: Path) -> None:
    process = run_script(script, tmp_path / "run", *SHORT, "env.reward=tests.envs.user_rewards:compute_score")
    output = process.output
    assert process.returncode == 2, output
    assert "Traceback" not in output
    last = output.strip().splitlines()[-1]
    assert last.startswith("error: env.reward=tests.envs.user_rewards:compute_score: the function takes data_source")
    assert "accepted forms are (completion, example)" in last


def test_a_template_that_refuses_the_system_prompt(tmp_path: Path) -> None:
    shutil.copytree("torchgrpo/models/quickstart", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE_WITHOUT_SYSTEM)
    rows = write_rows(tmp_path / "rows.jsonl", {"prompt": "1+1=", "answer": 2})
    local = ("env.dataset=jsonl", f"env.data_files={rows}", f"model.name={tmp_path / 'model'}")
    process = run_script("grpo.py", tmp_path / "run", *SHORT, *local, "env.system_prompt=hi")
    output = process.output
    assert process.returncode == 2, output
    assert "Traceback" not in output
    assert output.strip().splitlines()[-1].startswith("error: row 0: the chat template refuses the messages")


def test_the_system_prompt_of_the_config_replaces_that_of_conversations(tmp_path: Path) -> None:
    question = {"role": "user", "content": "1+1="}
    chats = (
        [{"role": "system", "content": "Be brief."}, question],
        [question, {**question, "role": "assistant"}, question],
    )
    rows = write_rows(tmp_path / "rows.jsonl", *({"messages": chat, "answer": 2} for chat in chats))
    local = ("env.dataset=jsonl", f"env.data_files={rows}", "env.system_prompt=ABCDEF")
    run_script("grpo.py", tmp_path / "run", *SHORT, *local)
    system_prompts = {record["messages"][0]["content"] for record in read_records(tmp_path / "run")}
    assert system_prompts == {"ABCDEF"}
