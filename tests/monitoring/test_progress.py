"""Tests of the progress display in a terminal and in a log."""

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
from tests.script_runner import ENVIRONMENT, ROOT, SCHEDULE_CLASSES, compose_run_config
from tests.terminal import Terminal, TerminalProcess
from torchgrpo.monitoring.progress import Progress, escape_control_characters, format_clock
from torchgrpo.run.job import run_job

SHOW_SCRIPT = """
import subprocess, sys, time
from config.schema.logging import LoggingConfig
from torchgrpo.monitoring.progress import Progress
now = [1000.0]  # a fake clock, so the updates do not depend on the speed of the machine
time.monotonic = lambda: now[0]
progress = Progress(LoggingConfig(), 1000)
progress.start_stage("starting engines")
progress.resume(990)
for step in range(3):
    for done in range(129):
        progress.set_stage("collect", done, 128)
    now[0] += 0.6
    progress.set_stage("collect", 128, 128)
    progress.count_step(0.12345, 1024.25)
    BETWEEN
progress.close()
"""
OTHER_OUTPUT = """
    progress.print_text(f"text {step}")
    print(f"printed {step}, by the program itself", flush=True)
    subprocess.run(["sh", "-c", f"echo echoed {step}, by another process; echo second line"])
"""


def run_on_terminal(script: str, columns: int, **environment: str) -> str:
    """Returns the terminal output of a script on a terminal of this width."""
    with TerminalProcess([sys.executable, "-c", script], columns, ROOT, {**ENVIRONMENT, **environment}) as process:
        output = process.read_rest()
    assert process.code == 0, output
    return output


def show_script(between: str = "pass") -> str:
    return SHOW_SCRIPT.replace("    BETWEEN", "    " + between.strip())


def final_lines(output: str, columns: int) -> list[str]:
    """Returns the lines on the terminal at the end; no line may wrap."""
    terminal = Terminal(columns)
    terminal.feed_text(output)
    assert terminal.wrap_count == 0
    return terminal.text.splitlines()


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_bar_in_a_terminal(columns: int) -> None:
    output = run_on_terminal(show_script(), columns)
    assert "starting engines" in output
    (row,) = final_lines(output, columns)
    assert row.split()[0 if columns == 20 else 1] == "993/1000"
    if columns >= 40:
        assert re.fullmatch(r"[━╸╺]+ *993/1000  reward 0\.123  00:02 so far", row)
    if columns >= 80:
        assert "992/1000  reward 0.123  00:07 left  collect 128/128" in output
    assert output.count("/1000") < 10  # fewer updates than the 387 calls


def test_output_of_other_processes_is_kept() -> None:
    terminal = Terminal(160)
    terminal.feed_text(run_on_terminal(show_script(OTHER_OUTPUT), 160))
    text = terminal.text
    for step in range(3):
        assert re.search(rf"^text {step}$", text, re.MULTILINE)
        assert f"printed {step}, by the program itself" in text
        assert f"echoed {step}, by another process" in text
    assert text.count("second line") == 3
    assert "993/1000" in text.splitlines()[-1]


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": "unknown"}])
def test_dumb_terminal_gets_lines(environment: dict[str, str]) -> None:
    output = run_on_terminal(show_script(), 80, **environment)
    assert "\x1b" not in output and "\r" not in output
    assert output.splitlines()[0] == "starting engines"


def test_parallel_jobs_print_lines() -> None:
    job = f"multiprocessing.get_context('fork').Process(target=exec, args=({show_script()!r}, {{}}))"
    output = run_on_terminal(f"import multiprocessing\njob = {job}\njob.start()\njob.join()", 80)
    assert "\x1b" not in output and output.splitlines()[-1].startswith("step 993/1000, reward 0.123")


def test_terminal_without_unicode() -> None:
    output = run_on_terminal(show_script(), 80, PYTHONIOENCODING="ascii")
    assert output.isascii() and "\\u" not in output
    assert re.match(r"-+ +993/1000", final_lines(output, 80)[0])


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1", "TERM": "xterm-256color"}])
def test_log_has_lines(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", show_script(OTHER_OUTPUT)],
        cwd=ROOT,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    first, *lines, last = done.stderr.splitlines()
    assert "\x1b" not in done.stderr and "\r" not in done.stderr
    assert first == "starting engines"
    assert lines == ["text 0", "text 1", "text 2"]  # the next line of progress is due after ten seconds
    assert last == "step 993/1000, reward 0.123, length 1024.2, 00:02 so far"


@pytest.fixture
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Fake clock that advances only by assignment."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


def test_log_has_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str], fake_clock: list[float]) -> None:
    progress = Progress(LoggingConfig(), 100)
    progress.resume(40)
    for step in range(3):
        for done in range(16):
            progress.set_stage("collect", done, 16)
            fake_clock[0] += 1.0
        progress.count_step(step / 2, 3.25)
    assert capsys.readouterr().err.splitlines() == [
        "step 40/100, 00:00 so far, collect 0/16",
        "step 40/100, 00:10 so far, collect 10/16",
        "step 41/100, reward 0.000, length 3.2, 00:20 so far, 19:40 left, collect 4/16",
        "step 41/100, reward 0.000, length 3.2, 00:30 so far, 29:30 left, collect 14/16",
        "step 42/100, reward 0.500, length 3.2, 00:40 so far, 19:20 left, collect 8/16",
    ]


def test_evaluation_counts_its_problems(capsys: pytest.CaptureFixture[str], fake_clock: list[float]) -> None:
    progress = Progress(LoggingConfig(), 0)
    for done in range(31):
        progress.set_stage("eval sums", done, 120)
        fake_clock[0] += 1.0
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "eval sums 0/120" and lines[-1] == "eval sums 30/120, 01:30 to go"


def test_disabled_progress_prints_texts_only(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(LoggingConfig(progress=False), 10)
    progress.start_stage("starting")
    progress.set_stage("collect", 1, 2)
    progress.count_step(0.5, 3.0)
    progress.close()
    progress.close()
    assert capsys.readouterr().err == ""
    progress.print_text("a text")
    assert capsys.readouterr().err == "a text\n"


def test_run_without_a_step_leaves_no_bar() -> None:
    output = run_on_terminal(show_script().partition("progress.resume")[0] + "progress.close()", 80)
    assert "starting engines" in output and final_lines(output, 80) == []


def test_format_clock() -> None:
    assert [format_clock(seconds) for seconds in (0, 59.6, 3599, 3600, 86399, 86400, 900_000)] == [
        *("00:00", "01:00", "59:59", "1:00:00", "23:59:59", "1 d 00:00", "10 d 10:00")
    ]


def test_control_characters_are_escaped() -> None:
    assert escape_control_characters("a\x1b[2J\rb\x07\x9bc\n\td é 数") == "a\\x1b[2J\\x0db\\x07\\x9bc\n\td é 数"


QUICKSTART = ("--config-name", "grpo_quickstart", "logging.sample_frequency=2")
SETS = "eval={frequency: 2, sets: {sums: {dataset: arithmetic, n: 1, limit: 16}}}"


@pytest.mark.long
def test_run_on_a_terminal_ends_at_ctrl_c(tmp_path: Path) -> None:
    """Checks the messages at Ctrl-C and the final lines of the terminal."""
    command = [sys.executable, "grpo.py", *QUICKSTART, SETS, f"hydra.run.dir={tmp_path}"]
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    columns = 600  # wide enough for each message on one line
    with TerminalProcess(command, columns, ROOT, environment) as process:
        output = process.read_until("sample at step 4")
        process.send(signal.SIGINT)
        output += process.read_rest()
    assert process.code == 0, output
    terminal = Terminal(columns)
    terminal.feed_text(output)
    final = terminal.text
    assert "\nSIGINT: finishing this iteration, then writing a checkpoint" in final
    assert re.search(r"^  python grpo\.py .* train\.resume=auto$", final, re.MULTILINE)
    assert re.search(r"^interrupted: \d+ optimizer steps", final, re.MULTILINE)
    assert re.search(r"^[━╸╺]+ *\d+/\d+  reward 0\.\d{3}  \d\d:\d\d so far$", final, re.MULTILINE)
    assert "Loading weights" not in final and "Warning" not in final


def test_killed_run_leaves_a_usable_terminal(tmp_path: Path) -> None:
    script = show_script("time.sleep(60 * step)")
    with TerminalProcess([sys.executable, "-c", script], 80, ROOT, ENVIRONMENT) as process:
        output = process.read_until("0.123")
        process.send(signal.SIGKILL)
        output += process.read_rest()
    assert process.code == -signal.SIGKILL
    Terminal(80).feed_text(output)  # raises at commands that would need a reset
    assert not re.search(r"\x1b\[\?|\x1b\[\d*;?\d*r", output)


SCRIPT_MODULES = {"grpo.py": grpo, "grpo_async.py": grpo_async}


@pytest.mark.parametrize("script", SCRIPT_MODULES)
def test_stages_of_a_run(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the stages that both schedules report, and their order."""
    schedule = SCRIPT_MODULES[script]
    stages: list[str] = []
    monkeypatch.setattr(Progress, "set_stage", lambda _, name, done=0, total=0: stages.append(f"{name} {done}/{total}"))
    monkeypatch.setattr(Progress, "start_stage", lambda _, stage: stages.append(stage))
    config = compose_run_config(
        *("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=32"),
        *("train.gradient_accumulation_steps=2", "train.checkpoint_frequency=0"),
        "eval={sets: {sums: {dataset: arithmetic, n: 1, limit: 3}}}",
    )
    run_job(config, tmp_path, schedule.train, SCHEDULE_CLASSES[schedule])
    unique_stages = list(dict.fromkeys(stages))
    assert unique_stages[:4] == ["starting", "reading data", "starting engines", "loading the model"]
    expected_stages = ["push 0/0", "collect 0/0", "optimize 1/2", "optimize 2/2", "checkpoint 0/0"]
    for stage in (*expected_stages, "eval sums 0/3", "eval sums 3/3"):
        assert stage in unique_stages, unique_stages
    if script == "grpo.py":
        assert "collect 4/4" in unique_stages
        assert unique_stages.index("collect 4/4") < unique_stages.index("score 0/0")
