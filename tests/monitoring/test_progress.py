"""What the run is doing, on a terminal and in a log, from its first second on."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import grpo
import grpo_async
from config.schema.logging import LoggingConfig
from tests.scripts import ENVIRONMENT, ROOT, SCHEDULE_OF, configured
from tests.terminal import OnATerminal, Terminal
from torchgrpo.monitoring.progress import Progress, clock, printable
from torchgrpo.run.job import run_job

SHOW = """
import subprocess, sys, time
from config.schema.logging import LoggingConfig
from torchgrpo.monitoring.progress import Progress
now = [1000.0]  # a clock of its own: how long a slow machine takes to show a bar decides when it shows the next
time.monotonic = lambda: now[0]
live = Progress(LoggingConfig(), 1000)
live.begin("starting engines")
live.resume(990)
for step in range(3):
    for done in range(129):
        live.stage("collect", done, 128)
    now[0] += 0.6
    live.stage("collect", 128, 128)
    live.step(0.12345, 1024.25)
    BETWEEN
live.close()
"""
OTHERS = """
    live.say(f"said {step}")
    print(f"printed {step}, by the program itself", flush=True)
    subprocess.run(["sh", "-c", f"echo told {step}, by another process; echo and once more"])
"""


def seen_on_a_terminal(script: str, columns: int, **environment: str) -> str:
    """Standard error of a process whose terminal is so wide."""
    with OnATerminal(
        [sys.executable, "-c", script], columns, ROOT, {**ENVIRONMENT, **environment}
    ) as process:
        said = process.rest()
    assert process.code == 0, said
    return said


def show(between: str = "pass") -> str:
    return SHOW.replace("    BETWEEN", "    " + between.strip())


def left_of(said: str, columns: int) -> list[str]:
    """The lines that stand on the terminal in the end; nothing may wrap."""
    terminal = Terminal(columns)
    terminal.feed(said)
    assert terminal.wrapped == 0
    return terminal.text.splitlines()


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_a_bar_of_a_terminal(columns: int) -> None:
    said = seen_on_a_terminal(show(), columns)
    assert "starting engines" in said
    (row,) = left_of(said, columns)
    assert row.split()[0 if columns == 20 else 1] == "993/1000"
    if columns >= 40:
        assert re.fullmatch(r"[━╸╺]+ *993/1000  reward 0\.123  00:02 so far", row)
    if columns >= 80:
        assert "992/1000  reward 0.123  00:07 left  collect 128/128" in said
    assert said.count("/1000") < 10  # it does not show each of 387 calls


def test_what_others_print_stays_and_breaks_nothing() -> None:
    terminal = Terminal(160)
    terminal.feed(seen_on_a_terminal(show(OTHERS), 160))
    left = terminal.text
    for step in range(3):
        assert re.search(rf"^said {step}$", left, re.MULTILINE)
        assert f"printed {step}, by the program itself" in left
        assert f"told {step}, by another process" in left
    assert left.count("and once more") == 3
    assert "993/1000" in left.splitlines()[-1]


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": "unknown"}])
def test_a_terminal_that_understands_nothing_gets_lines(environment: dict[str, str]) -> None:
    said = seen_on_a_terminal(show(), 80, **environment)
    assert "\x1b" not in said and "\r" not in said
    assert said.splitlines()[0] == "starting engines"


def test_jobs_side_by_side_share_a_terminal_as_lines() -> None:
    job = f"multiprocessing.get_context('fork').Process(target=exec, args=({show()!r}, {{}}))"
    said = seen_on_a_terminal(f"import multiprocessing\njob = {job}\njob.start()\njob.join()", 80)
    assert "\x1b" not in said and said.splitlines()[-1].startswith("step 993/1000, reward 0.123")


def test_a_terminal_without_these_characters() -> None:
    said = seen_on_a_terminal(show(), 80, PYTHONIOENCODING="ascii")
    assert said.isascii() and "\\u" not in said
    assert re.match(r"-+ +993/1000", left_of(said, 80)[0])


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1", "TERM": "xterm-256color"}])
def test_a_log_has_lines(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", show(OTHERS)],
        cwd=ROOT,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    first, *lines, last = done.stderr.splitlines()
    assert "\x1b" not in done.stderr and "\r" not in done.stderr
    assert first == "starting engines"
    assert lines == ["said 0", "said 1", "said 2"]  # the next line would come after ten seconds
    assert last == "step 993/1000, reward 0.123, length 1024.2, 00:02 so far"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_log_has_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str], now: list[float]) -> None:
    live = Progress(LoggingConfig(), 100)
    live.resume(40)
    for step in range(3):
        for done in range(16):
            live.stage("collect", done, 16)
            now[0] += 1.0
        live.step(step / 2, 3.25)
    assert capsys.readouterr().err.splitlines() == [
        "step 40/100, 00:00 so far, collect 0/16",
        "step 40/100, 00:10 so far, collect 10/16",
        "step 41/100, reward 0.000, length 3.2, 00:20 so far, 19:40 left, collect 4/16",
        "step 41/100, reward 0.000, length 3.2, 00:30 so far, 29:30 left, collect 14/16",
        "step 42/100, reward 0.500, length 3.2, 00:40 so far, 19:20 left, collect 8/16",
    ]


def test_an_evaluation_alone_counts_its_problems(
    capsys: pytest.CaptureFixture[str], now: list[float]
) -> None:
    live = Progress(LoggingConfig(), 0)
    for done in range(31):
        live.stage("eval sums", done, 120)
        now[0] += 1.0
    live.close()
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "eval sums 0/120" and told[-1] == "eval sums 30/120, 01:30 to go"


def test_nothing_is_shown_where_it_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    live = Progress(LoggingConfig(progress=False), 10)
    live.begin("starting")
    live.stage("collect", 1, 2)
    live.step(0.5, 3.0)
    live.close()
    live.close()
    assert capsys.readouterr().err == ""
    live.say("said all the same")
    assert capsys.readouterr().err == "said all the same\n"


def test_a_run_that_never_began_leaves_no_row() -> None:
    said = seen_on_a_terminal(show().partition("live.resume")[0] + "live.close()", 80)
    assert "starting engines" in said and left_of(said, 80) == []


def test_clock() -> None:
    assert [clock(seconds) for seconds in (0, 59.6, 3599, 3600, 86399, 86400, 900_000)] == [
        *("00:00", "01:00", "59:59", "1:00:00", "23:59:59", "1 d 00:00", "10 d 10:00")
    ]


def test_what_a_model_wrote_cannot_move_the_cursor() -> None:
    assert printable("a\x1b[2J\rb\x07\x9bc\n\td é 数") == "a\\x1b[2J\\x0db\\x07\\x9bc\n\td é 数"


QUICKSTART = ("--config-name", "grpo_quickstart", "logging.sample_frequency=2")
SETS = "eval={frequency: 2, sets: {sums: {dataset: arithmetic, n: 1, limit: 16}}}"


@pytest.mark.long
def test_a_run_on_a_terminal_that_ctrl_c_ends(tmp_path: Path) -> None:
    """What it says upon Ctrl-C is whole, and the cursor was never hidden."""
    command = [sys.executable, "grpo.py", *QUICKSTART, SETS, f"hydra.run.dir={tmp_path}"]
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    columns = 600  # so that what it says stands in one line
    with OnATerminal(command, columns, ROOT, environment) as process:
        said = process.until("sample at step 4")
        process.send(signal.SIGINT)
        said += process.rest()
    assert process.code == 0, said
    terminal = Terminal(columns)
    terminal.feed(said)
    final = terminal.text
    assert "\nSIGINT: finishing this iteration, then a checkpoint" in final
    assert re.search(
        r"^  python grpo\.py .* train\.resume=auto$", final, re.MULTILINE
    )  # and nothing behind it
    assert re.search(r"^interrupted: \d+ optimizer steps", final, re.MULTILINE)
    assert re.search(r"^[━╸╺]+ *\d+/\d+  reward 0\.\d{3}  \d\d:\d\d so far$", final, re.MULTILINE)
    assert "Loading weights" not in final and "Warning" not in final


def test_a_run_that_is_killed_leaves_a_terminal_that_works(tmp_path: Path) -> None:
    waits = show("time.sleep(60 * step)")
    with OnATerminal([sys.executable, "-c", waits], 80, ROOT, ENVIRONMENT) as process:
        said = process.until("0.123")
        process.send(signal.SIGKILL)
        said += process.rest()
    assert process.code == -signal.SIGKILL
    Terminal(80).feed(said)  # which knows of no command that would have to be taken back
    assert not re.search(r"\x1b\[\?|\x1b\[\d*;?\d*r", said)


SCRIPTS = {"grpo.py": grpo, "grpo_async.py": grpo_async}


@pytest.mark.parametrize("script", SCRIPTS)
def test_stages_of_a_run(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage that it passes is said to the view, in this order, by both schedules."""
    schedule = SCRIPTS[script]
    seen: list[str] = []
    monkeypatch.setattr(
        Progress, "stage", lambda _, name, done=0, total=0: seen.append(f"{name} {done}/{total}")
    )
    monkeypatch.setattr(Progress, "begin", lambda _, stage: seen.append(stage))
    config = configured(
        *("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=32"),
        *("train.gradient_accumulation_steps=2", "train.checkpoint_frequency=0"),
        "eval={sets: {sums: {dataset: arithmetic, n: 1, limit: 3}}}",
    )
    run_job(config, tmp_path, schedule.train, SCHEDULE_OF[schedule])
    said = list(dict.fromkeys(seen))
    assert said[:4] == ["starting", "reading data", "starting engines", "loading the model"]
    stages = ["push 0/0", "collect 0/0", "optimize 1/2", "optimize 2/2", "checkpoint 0/0"]
    for stage in (*stages, "eval sums 0/3", "eval sums 3/3"):
        assert stage in said, said
    if script == "grpo.py":
        assert "collect 4/4" in said and said.index("collect 4/4") < said.index("score 0/0")
