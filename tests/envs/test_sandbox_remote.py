"""Tests of `env.sandbox=remote` with a local substitute for a SandboxFusion server."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.example import Completion, Example
from envs.sandbox.limits import Limits
from envs.sandbox.remote_sandbox import RemoteSandbox
from envs.sandbox.sandbox_selection import check_sandbox
from envs.sandbox.supervisor_client import SandboxError
from envs.tools.builtin.python import PythonTool
from envs.verifiers.assertion_tests import Assertions
from envs.verifiers.code import CodeOptions, Tests, code_reward, run_tests
from tests.envs.sandbox_helpers import NEEDS_LINUX
from tests.envs.sandbox_server import PUBLIC_PYTHON, Server, run_server

pytestmark = [NEEDS_LINUX, pytest.mark.long]
LIMITS = Limits(wall_seconds=20.0)


@pytest.fixture(scope="module")
def module_server() -> Iterator[Server]:
    with run_server() as made:
        yield made


@pytest.fixture
def server(module_server: Server) -> Server:
    module_server.requests.clear()
    module_server.canned_replies.clear()
    module_server.nobody = False
    return module_server


@pytest.fixture
def remote(server: Server) -> Iterator[RemoteSandbox]:
    made = RemoteSandbox(server.url + "/", LIMITS)
    yield made
    made.close()


def reward(server: Server, program: str, answer: Any, **env: Any) -> Any:
    config = EnvConfig(dataset="code", sandbox="remote", sandbox_url=server.url, **env)
    example = Example(({"role": "user", "content": "?"},), answer, 0)
    return code_reward(Completion(f"```python\n{program}\n```", 1, 0, True), example, config)


def test_a_script_reads_its_input_and_prints(remote: RemoteSandbox, server: Server) -> None:
    run = remote.run("print(int(input()) + 1)", b"41\n")
    assert (run.status, run.code, run.stdout, run.value) == ("finished", 0, b"42\n", b"")
    assert server.requests[0]["memory_limit_MB"] == LIMITS.memory_mib


def test_failures_are_distinguished(remote: RemoteSandbox) -> None:
    assert remote.run("import sys; sys.exit(3)").code == 3
    failed = remote.run("raise ValueError('so')")
    assert failed.code == 1 and b"ValueError: so" in failed.stderr
    slow = remote.run("while True: pass", wall_seconds=0.3)
    assert slow.status == "time" and not slow.is_success


def test_functions_take_and_return_json(remote: RemoteSandbox) -> None:
    run = remote.call_function(
        "print('noise')\ndef add(a, b):\n    print('more')\n    return [a + b, input is None]", "add", [1, 2]
    )
    assert (json.loads(run.value), run.stdout) == ([3, False], b"noise\nmore\n")
    method = remote.call_function("class Solution:\n    def twice(self, x): return 2 * x", "twice", ["é\u2028"])
    assert json.loads(method.value) == "é\u2028é\u2028"
    missing = remote.call_function("def f(): return 1", "g", [])
    assert missing.code != 0 and b"NameError: name 'g' is not defined" in missing.stderr
    assert remote.call_function("import os\ndef f(): os._exit(0)", "f", []).value == b""


def test_the_reward_and_its_tests(server: Server) -> None:
    doubles = {"inputs": ["2\n", "1234567\n"], "outputs": ["4\n", "2469134\n"]}
    assert reward(server, "print(2 * int(input()))", doubles).score == 1.0
    assert reward(server, "print(4)", doubles, options={"credit": "share"}).score == 0.5
    called = {"inputs": [[2]], "outputs": [4], "fn_name": "f"}
    assert reward(server, "def f(x): return x + x", called).score == 1.0
    assert not any("2469134" in str(request) for request in server.requests), "an expected output was sent"


SPY = """
import glob, os, subprocess, sys
LOOK = '''
import glob, os, sys
seen = []
for pattern in ("fd/*", "mem", "environ", "maps"):
    for path in glob.glob(f"/proc/{sys.argv[1]}/{pattern}"):
        try:
            os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            seen.append(path)
        except OSError: pass
print(len(seen))
'''
def add(a, b):
    parent = str(os.getppid())
    child = subprocess.run([sys.executable, "-c", LOOK, parent], capture_output=True, text=True)
    try: os.setresuid(0, 0, 0)
    except OSError: pass
    sys.argv = ["", parent]
    here = __import__("io").StringIO()
    __import__("contextlib").redirect_stdout(here).__enter__()
    exec(LOOK, {})
    return 42 if (child.stdout.strip(), here.getvalue().strip()) == ("0", "0") else 0
"""
"""A program that is right if neither it nor its children can look into the process of its tests."""
ADD = {"entry_point": "add", "test": "def check(candidate):\n    assert candidate(20, 22) == 42"}
CHEATING_PROGRAMS = [
    "import os; os._exit(0)",
    "import sys; sys.exit(0)",
    "class Equal:\n    def __eq__(self, other): return True\ndef add(a, b): return Equal()",
    "import builtins\nbuiltins.AssertionError = Exception\ndef add(a, b): return 0",
    "print('\\n\"\"\\n' * 9)\ndef add(a, b): return 0",
    "import sys\nsys.stdout.write('\"\"\\n')\ndef add(a, b):\n    import os; os._exit(0)",
]


@pytest.mark.parametrize("nobody", [False, True])
def test_programs_cannot_look_at_assertions(remote: RemoteSandbox, server: Server, nobody: bool) -> None:
    if nobody and (os.geteuid() != 0 or PUBLIC_PYTHON is None):
        pytest.skip("only root can run the server's programs as somebody else, and with a Python that all may run")
    server.nobody = nobody
    right = run_tests(remote, "def add(a, b): return a + b", Assertions.parse(ADD), CodeOptions(), 20.0)
    assert (right.num_passed, right.failure) == (1, "")
    unseen = run_tests(remote, SPY, Assertions.parse(ADD), CodeOptions(), 20.0)
    assert (unseen.num_passed, unseen.failure) == (1, "")
    for cheat in CHEATING_PROGRAMS:
        fooled = run_tests(remote, cheat, Assertions.parse(ADD), CodeOptions(), 20.0)
        assert fooled.num_passed == 0, cheat


def test_what_a_process_may_look_into_is_seen(remote: RemoteSandbox) -> None:
    """`SPY` does find entries of a process that is not hidden: its own."""
    run = remote.call_function(SPY.replace("os.getppid()", "os.getpid()"), "add", [20, 22])
    assert run.value == b"0"


def test_each_assertion_counts_and_preambles_are_run(remote: RemoteSandbox) -> None:
    row = {
        "test_list": ["assert f(1) == base()", "assert f(2) == 0", "assert f([3]) == [3]"],
        "test_setup_code": "def base(): return 1",
    }
    verdict = run_tests(remote, "def f(x): return x", Assertions.parse(row), CodeOptions(credit="share"), 20.0)
    assert (verdict.num_passed, verdict.num_tests) == (2, 3) and verdict.failure.startswith("AssertionError")


@pytest.mark.parametrize(("language", "program", "needs"), [
    ("bash", "read n; echo $((2 * n))", "bash"),
    ("javascript", "console.log(2 * +require('fs').readFileSync(0, 'utf8'))", "node"),
])  # fmt: skip
def test_other_languages(server: Server, language: str, program: str, needs: str) -> None:
    if shutil.which(needs) is None:
        pytest.skip(f"{needs} is not installed")
    remote = RemoteSandbox(server.url, LIMITS, language)
    tests = Tests.parse({"inputs": ["4"], "outputs": ["8"], "language": language})
    assert run_tests(remote, program, tests, CodeOptions(), 20.0).num_passed == 1
    remote.close()


def test_a_request_to_a_busy_server_is_retried(remote: RemoteSandbox, server: Server) -> None:
    server.canned_replies += [
        (503, "busy"),
        (429, "busy"),
        (200, {"status": "SandboxError", "message": "no container"}),
    ]
    assert remote.run("print(1)").stdout == b"1\n"
    assert len(server.requests) == 4


@pytest.mark.parametrize(("status", "body", "message"), [
    (422, {"detail": "no such language"}, "HTTP status 422: .*no such language"),
    (200, "<html>", "the reply is not JSON: '<html>'"),
    (200, [1], "the reply is not a JSON object"),
    (
        200, {"status": "Failed", "message": "", "run_result": {"status": "Error", "stderr": "fork"}},
        "was not run: .*fork",
    ),
    (200, {"status": "Failed", "compile_result": {"stderr": "bad"}, "run_result": None}, "was not run: bad"),
])  # fmt: skip
def test_odd_replies_are_errors(remote: RemoteSandbox, server: Server, status: int, body: Any, message: str) -> None:
    server.canned_replies.append((status, body))
    with pytest.raises(SandboxError, match=message):
        remote.run("print(1)")
    assert len(server.requests) == 1


def test_a_server_that_stays_busy_or_silent_is_named(server: Server) -> None:
    server.canned_replies += [(503, "busy")] * 50
    start = time.monotonic()
    with pytest.raises(SandboxError, match=rf"{server.url}/run_code: .*503: busy \(\d+ requests"):
        RemoteSandbox(server.url, Limits(wall_seconds=0.3)).run("print(1)")
    assert time.monotonic() - start < 10
    with pytest.raises(SandboxError, match=r"http://127.0.0.1:9/run_code: ConnectError"):
        RemoteSandbox("http://127.0.0.1:9", Limits(wall_seconds=0.3)).run("print(1)")


def test_the_start_finds_out_whether_the_server_works(server: Server) -> None:
    check_sandbox(EnvConfig(sandbox="remote", sandbox_url=server.url))
    check_sandbox(EnvConfig(sandbox="remote", sandbox_url=server.url))
    assert len(server.requests) == 1
    with pytest.raises(ConfigError, match=r"sandbox_url=.*/elsewhere: .*status 404.*start SandboxFusion"):
        check_sandbox(EnvConfig(sandbox="remote", sandbox_url=f"{server.url}/elsewhere"))
    server.canned_replies.append(
        (200, {"run_result": {"status": "Finished", "return_code": 0, "stdout": "hello", "stderr": ""}})
    )
    with pytest.raises(ConfigError, match=r"a test program in python printed b'hello'"):
        check_sandbox(EnvConfig(sandbox="remote", sandbox_url=f"{server.url}//"))


def test_the_tool_runs_there_too(server: Server) -> None:
    tool = PythonTool(EnvConfig(sandbox="remote", sandbox_url=server.url))
    assert tool.run("print(6 * 7)") == "42"
    assert "ZeroDivisionError" in tool.run("1 / 0")
    tool.close()


@pytest.mark.parametrize(("fields", "message"), [
    ({"sandbox": "remote"}, "env.sandbox_url=None: env.sandbox=remote needs the address of a server"),
    ({"sandbox": "remote", "sandbox_url": "localhost:8080"}, "env.sandbox_url=localhost:8080: .*http://HOST:PORT"),
    ({"sandbox_url": "http://127.0.0.1:8080"}, "the server is unused with env.sandbox=auto; set env.sandbox=remote"),
])  # fmt: skip
def test_the_address_goes_with_the_choice(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnvConfig(**fields)


def test_a_reward_leaves_the_server_time() -> None:
    env = EnvConfig(
        sandbox="remote", sandbox_url="http://127.0.0.1:8080", reward_timeout_s=3, options={"test_seconds": 1.0}
    )
    with pytest.raises(ConfigError, match=r"env.reward_timeout_s=3: .*must be at least 5"):
        CodeOptions.from_config(env)
