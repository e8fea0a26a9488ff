"""Judge server on loopback, which checks requests as strictly as OpenAI's API."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL, KEY = "judge-model", "secret-key"
_FIELDS = {"model": str, "messages": list, "max_tokens": int, "temperature": (int, float)}


@dataclass(frozen=True)
class JudgeRequest:
    """Request that passed the checks. number: counted from 1."""

    number: int
    body: dict[str, Any]

    @property
    def code(self) -> str:
        """Code that the line of the grade must repeat."""
        (code,) = re.findall(r"^Grade ([0-9a-f]{8}): N$", self.body["messages"][0]["content"], re.MULTILINE)
        return str(code)

    @property
    def data(self) -> dict[str, Any]:
        """Data between the two lines with the mark."""
        first, data, last = self.body["messages"][1]["content"].split("\n")
        assert first == last and first in self.body["messages"][0]["content"]
        content: dict[str, Any] = json.loads(data)
        return content


@dataclass(frozen=True)
class Reply:
    """HTTP reply. status 0: the server closes the connection without a reply."""

    status: int
    body: str
    headers: dict[str, str] = field(default_factory=dict)


def completion(text: Any, finish_reason: str = "stop") -> Reply:
    """Returns the reply with a completion of the judge."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return Reply(200, json.dumps({"object": "chat.completion", "model": MODEL, "choices": [choice]}))


def failure(status: int, message: str, **headers: str) -> Reply:
    """Returns the reply of a refused request."""
    return Reply(status, json.dumps({"error": {"message": message}}), headers)


def grade(number: int) -> Callable[[JudgeRequest], Reply]:
    """Returns a judge that gives every answer the same grade."""
    return lambda request: completion(f"It says something.\n\nGrade {request.code}: {number}\n")


def compare(request: JudgeRequest) -> Reply:
    """Gives the grade 10 to an answer that contains the reference answer, else 0."""
    right = str(request.data["reference_answer"]) in request.data["answer"]
    return grade(10 * right)(request)


@dataclass(eq=False)
class JudgeServer:
    """Running server.

    respond: may be replaced at any time; runs in a thread of the request. refusals: why requests were refused.
    """

    url: str
    respond: Callable[[JudgeRequest], Reply]
    requests: list[JudgeRequest] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, headers: Any, content: bytes) -> Reply:
        try:
            assert path == "/v1/chat/completions", path
            assert headers["Content-Type"] == "application/json", headers["Content-Type"]
            body = json.loads(content)
            assert {"model", "messages"} <= body.keys() <= _FIELDS.keys(), sorted(body)
            for name, value in body.items():
                assert isinstance(value, _FIELDS[name]), f"{name}={value!r}"
            assert [message["role"] for message in body["messages"]] == ["system", "user"]
            assert all(message.keys() == {"role", "content"} for message in body["messages"])
            assert body["model"] == MODEL, body["model"]
        except (AssertionError, ValueError, KeyError) as error:
            self.refusals.append(repr(error))
            return failure(400, repr(error))
        with self.lock:
            request = JudgeRequest(len(self.requests) + 1, body)
            self.requests.append(request)
            self.keys.add(headers["Authorization"])
        return self.respond(request)


@contextmanager
def judge_server(respond: Callable[[JudgeRequest], Reply] = compare) -> Iterator[JudgeServer]:
    """Runs a judge server for the block; every request must have passed the checks."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            content = self.rfile.read(length)
            if len(content) < length:  # the client cancelled the request
                self.close_connection = True
                return
            reply = server.answer(self.path, self.headers, content)
            if reply.status == 0:
                self.close_connection = True
                return
            with suppress(ConnectionError):  # the client cancelled the request
                self.send(reply)

        def send(self, reply: Reply) -> None:
            body = reply.body.encode()
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(body)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Logs nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server = JudgeServer(f"http://127.0.0.1:{http.server_address[1]}/v1", respond)
        thread = threading.Thread(target=http.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
    assert not server.refusals
