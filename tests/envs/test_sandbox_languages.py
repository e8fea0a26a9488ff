"""Tests of sandboxed programs in bash and JavaScript: results, protections, leftover processes."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.example import Completion, Example
from envs.sandbox.languages import find_language
from envs.sandbox.limits import Limits
from envs.sandbox.sandbox import LEVELS, Sandbox, unavailable_reason
from envs.task import make_task
from envs.verifiers.code import CodeOptions, Tests, check_programs, code_reward, extract_code
from tests.envs.sandbox_helpers import NEEDS_LINUX, descendants, supervisor_pid

pytestmark = [NEEDS_LINUX, pytest.mark.long]
LEVELS_HERE = [
    level for level in LEVELS if level != "rlimits" and sys.platform == "linux" and unavailable_reason(level) is None
]
LIMITS = Limits(wall_seconds=20.0, cpu_seconds=1, memory_mib=256, disk_mib=4, file_mib=2, output_mib=1)


def open_sandbox(level: str, language: str, interpreter: str) -> Sandbox:
    if shutil.which(interpreter) is None:
        pytest.skip(f"{interpreter} is not installed")
    return Sandbox(level, LIMITS, language=language)


@pytest.fixture(params=LEVELS_HERE)
def bash(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with open_sandbox(request.param, "bash", "bash") as made:
        yield made


@pytest.fixture(params=LEVELS_HERE)
def node(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with open_sandbox(request.param, "javascript", "node") as made:
        yield made


def test_a_shell_calls_other_programs(bash: Sandbox) -> None:
    run = bash.run("read n; echo $((n + 1)); printf 'b\\na\\n' | sort | tr a-z A-Z; exit 3", b"41\n")
    assert (run.status, run.code, run.stdout) == ("finished", 3, b"42\nA\nB\n")
    assert bash.run("echo out; echo err >&2").stderr == b"err\n"


def test_node_reads_prints_and_waits(node: Sandbox) -> None:
    program = "const n = +require('fs').readFileSync(0, 'utf8'); setTimeout(() => console.log(n + 1), 10)"
    run = node.run(program, b"41\n")
    assert (run.status, run.code, run.stdout) == ("finished", 0, b"42\n")
    assert node.run("throw new Error('so')").code == 1


@pytest.mark.parametrize("program", [
    "cat /etc/passwd", f"ls {Path(__file__).resolve().parents[2]}", "ls /proc/1", "ls /home/*",
    "echo x > /usr/x", "echo x > /dev/x", "exec 3<>/dev/tcp/127.0.0.1/80", "kill -KILL 1", "kill -INT 1",
    "kill -KILL -1", "unshare -r true", "mount -t tmpfs none /tmp", "chroot / true", "mknod /tmp/x c 1 1",
    "cp /bin/ls /tmp/ls && /tmp/ls", "nice -n -5 true 2>&1 | grep . && exit 1",
])  # fmt: skip
def test_what_a_shell_must_not_do(bash: Sandbox, program: str) -> None:
    assert bash.run(program).code != 0
    assert bash.run("echo 42; ls").stdout == b"42\nsolution.sh\n"


@pytest.mark.parametrize(("program", "status"), [
    ("while :; do :; done", "time"), (":(){ :|:& };:; sleep 0.2; echo over", "finished"), ("yes", "output"),
    ("setsid sleep 1000 & disown; echo started", "finished"),
])  # fmt: skip
def test_a_shell_is_held_to_its_limits_and_ends_whole(bash: Sandbox, program: str, status: str) -> None:
    assert bash.run(program).status == status
    assert bash.run("echo 42").stdout == b"42\n"
    assert len(descendants(supervisor_pid(bash))) <= 2, "processes are left over"


def test_files_and_memory_of_a_shell_are_limited(bash: Sandbox) -> None:
    run = bash.run(
        "head -c 3M /dev/zero > f; stat -c %s f; for i in a b c d; do head -c 2M /dev/zero > $i; done; du -sm ."
    )
    size, used = run.stdout.split()[:2]
    assert int(size) == LIMITS.file_mib << 20 and int(used) <= LIMITS.disk_mib
    assert bash.run("x=$(head -c 400M /dev/zero | tr '\\0' a); echo ${#x}").stdout == b""


@pytest.mark.parametrize("program", [
    "require('fs').readFileSync('/etc/passwd')", "require('fs').writeFileSync('/usr/x', '')",
    "process.kill(1, 'SIGKILL')", "Buffer.alloc(1e9).fill(1)",
    "const a = []; for (;;) a.push(new Array(1e6).fill(a.length))",
    "require('net').connect(80, '127.0.0.1').on('error', () => process.exit(1))",
    "require('child_process').execFileSync('cat', ['/etc/passwd'])",
])  # fmt: skip
def test_what_node_must_not_do(node: Sandbox, program: str) -> None:
    assert node.run(program).code != 0
    assert node.run("console.log(42)").stdout == b"42\n"


def test_rlimits_refuses_what_starts_programs() -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    with pytest.raises(ConfigError, match="rlimits: the level runs only Python, which starts no other programs"):
        Sandbox("rlimits", language="bash")


def test_a_language_that_only_a_row_asks_for_is_checked_at_the_start() -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    row = {"inputs": ["1"], "outputs": ["1"], "language": "bash"}
    with pytest.raises(ConfigError, match="rlimits: the level runs only Python, which starts no other programs"):
        check_programs(EnvConfig(dataset="code", sandbox="rlimits"), [row])


def test_a_missing_interpreter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"node, which is not on PATH; .*env.sandbox=remote"):
        Sandbox("auto", language="javascript")


@pytest.mark.parametrize(("name", "language"), [("Python3", "python"), (" sh", "bash"), ("NodeJS", "javascript")])
def test_languages_by_every_name(name: str, language: str) -> None:
    assert find_language(name) == language


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(ValueError, match="language='ruby': choose one of python, bash, javascript"):
        Tests.parse({"inputs": ["1"], "outputs": ["1"], "language": "ruby"})
    with pytest.raises(ValueError, match="a function is called in Python, but the row has the language bash"):
        Tests.parse({"inputs": [[1]], "outputs": [1], "fn_name": "f", "language": "sh"})
    with pytest.raises(ConfigError, match=r"env.options.language='ruby': choose one of"):
        CodeOptions.from_config(EnvConfig(dataset="code", options={"language": "ruby"}))


def test_the_block_of_its_own_language_is_the_program() -> None:
    text = "```python\nprint(1)\n```\n```sh\necho 2\n```"
    assert (extract_code(text), extract_code(text, "bash"), extract_code(text, "javascript")) == (
        "print(1)\n",
        "echo 2\n",
        None,
    )
    assert extract_code("ls", "bash") is None


def test_rows_say_their_language_and_prompts_ask_for_it(tmp_path: Path) -> None:
    if not LEVELS_HERE or shutil.which("bash") is None:
        pytest.skip("bash, or a level that lets it run, is not here")
    rows: list[Any] = [
        '{"problem": "Double it.", "inputs": ["2"], "outputs": ["4"], "language": "shell"}',
        '{"problem": "Double it.", "test_cases": {"inputs": ["2"], "outputs": ["4"]}}',
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(rows))
    env = EnvConfig(dataset="code", data_files=str(file), options={"language": "python"})
    shell, python = make_task(env).examples("train")
    assert "in Bash," in shell.messages[0]["content"] and "```bash" in shell.messages[0]["content"]
    assert "in Python 3," in python.messages[0]["content"]
    assert verdict(env, shell, "```bash\nread n; echo $((2 * n))\n```") == ("right", 1.0)
    assert verdict(env, shell, "```bash\necho 5\n```")[1] == 0.0
    assert verdict(env, shell, "```python\nprint(4)\n```") == ("invalid", 0.0)
    assert verdict(env, python, "```python\nprint(4)\n```") == ("right", 1.0)


def verdict(env: EnvConfig, example: Example, text: str) -> tuple[str, float]:
    judged = code_reward(Completion(text, 1, 0, True), example, env)
    return (judged.outcome if judged.outcome == "invalid" else "right" if judged.score else "wrong", judged.score)


def test_the_number_of_this_process_is_not_the_sandboxes(bash: Sandbox) -> None:
    assert int(bash.run("echo $PPID").stdout) == 1 != os.getpid()
