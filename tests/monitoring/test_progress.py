"""What the run is doing, on a terminal and in a log, from its first second on."""

import io
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import grpo
import grpo_async
from config.logging import LoggingConfig
from monitoring.progress import Progress
from run.jobs import run_job
from tests.scripts import ENVIRONMENT, ROOT, SCHEDULE_OF, configured
from tests.terminal import OnATerminal, Terminal

SHOW = """
import subprocess, sys, time
from config.logging import LoggingConfig
from monitoring.progress import Progress
clock = [1000.0]  # of its own: how long a slow machine takes to show a row decides when it shows the next
time.monotonic = lambda: clock[0]
live = Progress(LoggingConfig(), 1000)
live.begin("starting engines")
live.resume(990)
for step in range(3):
    for done in range(129):
        live.stage("collect", done, 128)
    clock[0] += 0.6
    live.stage("collect", 128, 128)
    live.step(0.12345, 1024.25)
    live.spent("collect", 0.6)
    live.evaluated(991 + step, {"eval/sums/pass@1": 0.25})
    live.alarm(f"step {step}: half of the groups teach nothing")
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


def screens(said: str, columns: int) -> list[str]:
    """What the terminal holds after each update, the last lines alone of it; nothing may wrap."""
    terminal, seen = Terminal(columns), []
    for number, piece in enumerate(said.split("\r\x1b[J")):
        terminal.feed(f"\r\x1b[J{piece}" if number else piece)
        seen.append(terminal.text)
    assert terminal.wrapped == 0
    return seen


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_rows_of_a_terminal(columns: int) -> None:
    said = seen_on_a_terminal(show(), columns)
    seen = screens(said, columns)
    assert any("starting engines" in screen for screen in seen)
    amid = [screen for screen in seen if "collect 128/128" in screen and "0.123" in screen]
    names = [line.split()[0] for line in amid[-1].splitlines() if line]
    assert names == ["step", "reward", "eval", "time", "now", "alarm"]
    *rows, alarm = seen[-1].splitlines()
    assert [row.split()[0] for row in rows] == ["step", "reward", "eval", "time"]
    assert "993/1000" in rows[0] and "0.123" in rows[1] and "sums pass@1" in rows[2]
    assert alarm.split()[:3] == ["alarm", "step", "2:"]
    assert len(seen) < 10  # it does not show each of 387 calls


def test_what_others_print_stays_and_breaks_nothing() -> None:
    said = seen_on_a_terminal(show(OTHERS), 80)
    final = screens(said, 80)[-1]
    for step in range(3):
        assert re.search(rf"^said {step}$", final, re.MULTILINE)
        assert f"printed {step}, by the program itself" in final
        assert f"told {step}, by another process" in final
    assert final.count("and once more") == 3
    assert final.splitlines()[-1].startswith("alarm   step 2: half of the groups teach nothing")


def test_colours_only_where_they_are_wanted() -> None:
    colour = re.compile(r"\x1b\[[0-9;]*3[0-9]m")
    coloured = seen_on_a_terminal(show(), 80, COLORTERM="")
    without = seen_on_a_terminal(show(), 80, COLORTERM="", NO_COLOR="1")
    assert colour.search(coloured) and not colour.search(without)
    assert screens(coloured, 80)[-1].splitlines()[1:3] == screens(without, 80)[-1].splitlines()[1:3]


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
    assert re.search(r"^step    #+-*  993/1000", screens(said, 80)[-1], re.MULTILINE)


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
    assert re.fullmatch(r"step 993/1000, reward 0\.123, length 1024\.2, 00:0\d so far", last)


def test_a_log_has_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, clock = io.StringIO(), [1000.0]
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    live = Progress(LoggingConfig(), 100)
    live.resume(0)
    for done in range(101):
        live.stage("collect", done, 100)
        clock[0] += 1.0
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[3] == "step 0/100, 00:30 so far, collect 30/100, 01:10 to go"


def test_nothing_is_shown_where_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    live = Progress(LoggingConfig(progress=False), 10)
    live.begin("starting")
    live.stage("collect", 1, 2)
    live.step(0.5, 3.0)
    live.alarm("a worry")
    live.close()
    live.close()
    assert stream.getvalue() == ""
    live.say("said all the same")
    assert stream.getvalue() == "said all the same\n"


def test_a_run_that_never_began_leaves_no_row() -> None:
    said = seen_on_a_terminal(show().partition("live.resume")[0] + "live.close()", 80)
    seen = screens(said, 80)
    assert any("starting engines" in screen for screen in seen)
    assert seen[-1] == ""


def test_what_an_earlier_part_of_the_run_left_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    live = Progress(LoggingConfig(), 10)
    live.resume(2)
    rows = [{"optimizer_step": step, "reward/mean": step / 4, "length/response_mean": 8.0} for step in (1, 2)]
    live.remember([*rows, {"optimizer_step": 2, "eval/sums/pass@1": 0.5}])
    assert live.course.rewards.means == [0.25, 0.5] and live.course.steps == 2
    assert live.course.evaluations == {"sums": [(2, 0.5)]}


QUICKSTART = ("--config-name", "grpo_quickstart", "logging.sample_frequency=2")
SETS = "eval={frequency: 2, sets: {sums: {dataset: arithmetic, n: 1, limit: 16}}}"


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
    rows = final.splitlines()
    shown = next(index for index, row in enumerate(rows) if re.match(r"step    ━+", row))
    assert [row.split()[0] for row in rows[shown : shown + 4]] == ["step", "reward", "eval", "time"]
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
