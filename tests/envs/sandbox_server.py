"""Local substitute for a SandboxFusion server, with its interface `POST /run_code`.

Programs run in processes of this machine, without a container. Requests are checked against SandboxFusion's
types (422 for wrong ones), and replies have its fields. `canned_replies` makes the next requests fail.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def is_publicly_executable(program: str) -> bool:
    path = Path(program).resolve()
    return path.exists() and all(each.stat().st_mode & 0o001 for each in (path, *path.parents))


PUBLIC_PYTHON = next(filter(is_publicly_executable, (sys.executable, "/usr/bin/python3")), None)
COMMANDS = {"python": [sys.executable], "bash": ["bash"], "nodejs": ["node"]}
FIELDS = {
    "compile_timeout": (int, float), "run_timeout": (int, float), "memory_limit_MB": int, "code": str,
    "stdin": (str, type(None)), "language": str, "files": dict, "fetch_files": list,
}  # fmt: skip
MAX_BYTES = 1 << 20
NOBODY = 65534


def run_code(request: dict[str, Any]) -> dict[str, Any]:
    """Runs a request's program in a private directory; returns the reply."""
    folder = Path(tempfile.mkdtemp(prefix="server-"))
    script = folder / "program"
    script.write_text(request["code"])
    start = time.monotonic()
    nobody_options = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if request.get("nobody") else {}
    if nobody_options:
        folder.chmod(0o755)
        script.chmod(0o644)
    command = [str(PUBLIC_PYTHON)] if nobody_options else COMMANDS[request["language"]]
    started = subprocess.Popen(
        [*command, str(script)], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={"PATH": os.environ["PATH"]}, start_new_session=True, **nobody_options,
    )  # fmt: skip
    try:
        out, err = started.communicate((request.get("stdin") or "").encode(), request.get("run_timeout", 10))
        status = "Finished"
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, 9)
        out, err = started.communicate()
        status = "TimeLimitExceeded"
    shutil.rmtree(folder)
    finished = status == "Finished"
    return {
        "status": "Success" if finished and started.returncode == 0 else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": {
            "status": status,
            "execution_time": time.monotonic() - start,
            "return_code": started.returncode if finished else None,
            "stdout": out[:MAX_BYTES].decode(errors="replace"),
            "stderr": err[:MAX_BYTES].decode(errors="replace"),
        },
        "executor_pod_name": None,
        "files": {},
    }


class Server(ThreadingHTTPServer):
    """HTTP server that records its requests.

    canned_replies: (status, body) for each of the next requests, in place of a run. nobody: whether programs
    run as user nobody.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.canned_replies: list[tuple[int, Any]] = []
        self.nobody = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._reply(*self._answer(body))

    def _answer(self, body: bytes) -> tuple[int, Any]:
        if self.path != "/run_code":
            return 404, {"detail": "Not Found"}
        request = json.loads(body)
        self.server.requests.append(request)
        if self.server.canned_replies:
            return self.server.canned_replies.pop(0)
        wrong = [key for key, value in request.items() if not isinstance(value, FIELDS.get(key, ()))]
        if wrong or not {"code", "language"} <= request.keys() or request["language"] not in COMMANDS:
            return 422, {"detail": f"wrong: {wrong or request}"}
        return 200, run_code({**request, "nobody": self.server.nobody})

    def _reply(self, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: Any) -> None:
        pass


@contextmanager
def run_server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)
