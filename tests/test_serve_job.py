"""Tests of `run=serve`, by the `openai` client."""

import json
import signal
import socket
from pathlib import Path

import openai
import pytest

from tests.script_runner import call_script, start_script, wait_until

ROOM = ("inference_model.max_tokens=64", "env.turn_tokens=8", "serve.port=0")


def test_turns_of_a_client_extend_one_sequence(tmp_path: Path) -> None:
    process = start_script("grpo.py", tmp_path, "run=serve", *ROOM)
    lines: list[str] = []

    def has_key() -> bool:
        assert process.stdout is not None
        lines.append(process.stdout.readline())
        return "OPENAI_API_KEY" in lines[-1]

    wait_until(has_key, process)
    values = dict(line.strip().split("=", 1) for line in lines if line.startswith("OPENAI_"))
    url, key = values["OPENAI_BASE_URL"], values["OPENAI_API_KEY"]
    assert url.startswith("http://127.0.0.1:")
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        messages = [{"role": "user", "content": "12+7="}]
        for question in ("1+2=", "3+4="):
            answer = client.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": question}]
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "5+6="}])
        with pytest.raises(openai.BadRequestError, match=r"env\.max_prompt_tokens"):
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "1" * 3000}])
    process.send_signal(signal.SIGINT)
    assert process.wait(600) == 0
    with socket.socket() as listener:  # the port is free again
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", int(url.removesuffix("/v1").rpartition(":")[2])))
    first, second, other = map(json.loads, (tmp_path / "turns.jsonl").read_text().splitlines())
    assert [(one["episode"], one["turn"]) for one in (first, second, other)] == [(0, 1), (0, 2), (1, 1)]
    before = [*first["prompt"], *first["token_ids"]]
    assert second["prompt"][: len(before)] == before and len(second["prompt"]) > len(before)
    assert second["messages"][-1]["role"] == "assistant" and second["messages"][-2]["content"] == "1+2="
    assert len(first["log_probs"]) == len(first["token_ids"])


def test_a_port_in_use_is_one_message(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        result = call_script(
            "grpo.py",
            "--config-name",
            "grpo_quickstart",
            "run=serve",
            f"serve.port={port}",
            f"hydra.run.dir={tmp_path}",
        )
    assert result.returncode == 2
    assert f"127.0.0.1:{port}" in result.stderr and "serve.port" in result.stderr and "Traceback" not in result.stderr
