"""Agents of whole runs in tests, given as `env.agent=tests.run_agents:NAME`."""

import json
import os
import re
import signal
import socket
import urllib.parse
import urllib.request
from typing import Any

from envs.example import Example, Message

MUL = {
    "type": "function",
    "function": {
        "name": "mul",
        "description": "Multiplies two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "the first factor"},
                "b": {"type": "integer", "description": "the second factor"},
            },
            "required": ["a", "b"],
        },
    },
}


def request_turn(messages: list[Message], **fields: Any) -> Message:
    """Sends a chat to the run's server; returns the model's message."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "policy", "messages": messages, **fields}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        message: Message = json.load(reply)["choices"][0]["message"]
    return message


def _right_sum(question: str) -> str:
    first, second = re.findall(r"\d+", question)
    return str(int(first) + int(second))


def play_sums(example: Example) -> float:
    """Plays as `WaitingSums` of three turns; returns the number of right answers."""
    return _play_sums(example, window=False)


def play_sums_in_a_window(example: Example) -> float:
    """Plays as `WaitingSums`, and sends the question and the last reply only."""
    return _play_sums(example, window=True)


def _play_sums(example: Example, window: bool) -> float:
    messages, right = list(example.messages), 0.0
    for _ in range(3):
        answer = request_turn(messages)
        right += (answer["content"] or "").strip() == _right_sum(example.messages[-1]["content"])
        history = list(example.messages) if window else [*messages, answer]
        messages = [*history, {"role": "user", "content": "+?"}]
    return right


def play_products(example: Example) -> dict[str, Any]:
    """Plays as the environment `products_by_tool`: answers one call of `mul`, and checks the last turn."""
    first, second = map(int, re.findall(r"\d+", example.messages[-1]["content"]))
    messages, num_calls = list(example.messages), 0
    answer = request_turn(messages, tools=[MUL])
    if calls := answer.get("tool_calls"):
        results = []
        for call in calls:
            num_calls += 1
            arguments = json.loads(call["function"]["arguments"])
            result = str(int(arguments["a"]) * int(arguments["b"]))
            results.append({"role": "tool", "tool_call_id": call["id"], "name": "mul", "content": result})
        answer = request_turn([*messages, answer, *results], tools=[MUL])
    right = float(num_calls == 1 and (answer["content"] or "").strip() == str(first * second))
    return {"reward": right, "components": {"accuracy": right}}


def play_sums_on_a_bad_line(example: Example) -> float:
    """Plays as `play_sums`; breaks off some requests, and kills its process in some episodes."""
    row = example.row
    if row % 20 == 0:
        _break_off_request(list(example.messages))
    if row % 50 == 1:
        _break_off_request(list(example.messages))
        os.kill(os.getpid(), signal.SIGKILL)
    return play_sums(example)


def play_sums_or_send_nothing(example: Example) -> float:
    """Plays as `play_sums`, or sends a chat without messages, whose reply urllib does not show."""
    return play_sums(example) if example.row % 2 else float(bool(request_turn([])))


def _break_off_request(messages: list[Message]) -> None:
    """Sends a whole request, and closes the connection without reading the reply."""
    url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    assert url.hostname is not None and url.port is not None
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    head = (
        f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {len(body)}\r\n"
        f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\r\n\r\n"
    )
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(head.encode() + body)
