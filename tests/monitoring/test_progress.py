"""What the run is doing, in one line of 80 columns, from its first second on."""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import grpo
import grpo_async
from config.schema import LoggingConfig
from monitoring.progress import Progress
from run.jobs import run_job
from tests.scripts import ROOT, SCHEDULE_OF, configured

SHOW = """
import sys, time
from config.schema import LoggingConfig
from monitoring.progress import Progress
live = Progress(LoggingConfig(), 1000)
live.begin("starting engines")
live.resume(990)
for step in range(3):
    for done in range(129):
        live.stage("collect", done, 128)
    time.sleep(0.6)
    live.stage("collect", 128, 128)
    live.step(0.12345, 1024.25)
live.close()
"""


def seen_on_a_terminal(script: str, columns: int) -> str:
    """Standard error of a process whose terminal is so wide."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=theirs)
    os.close(theirs)
    said = b""
    try:
        while piece := os.read(ours, 65536):
            said += piece
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0
    return said.decode()


def test_a_line_of_80_columns_with_stage_and_numbers() -> None:
    said = seen_on_a_terminal(SHOW, 80)
    lines = re.split(r"[\r\n]+", said)
    assert max(len(line) for line in lines) <= 80
    assert any("starting engines" in line for line in lines)
    whole = [line for line in lines if "collect 128/128" in line and "reward" in line]
    assert whole and re.match(
        r"grpo: 99\d/1000 \|.*\| 00:\d\d<.*, reward 0\.123, length 1024\.2, collect 128/128", whole[-1]
    )
    assert re.match(
        r"grpo: 993/1000 .*, reward 0\.123, length 1024\.2 *$", [line for line in lines if line.strip()][-1]
    )
    assert len(lines) < 30  # it does not print each of 387 calls


def test_nothing_is_shown_where_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    live = Progress(LoggingConfig(progress=False), 10)
    live.begin("starting")
    live.stage("collect", 1, 2)
    live.step(0.5, 3.0)
    live.close()
    live.close()
    assert stream.getvalue() == ""


def test_a_run_that_never_began_leaves_no_line() -> None:
    said = seen_on_a_terminal(SHOW.partition("live.resume")[0] + "live.close()", 80)
    assert "starting engines" in said
    assert said.rpartition("\r")[2].strip() == said.split("\r")[-2].strip() == ""


SCRIPTS = {"grpo.py": grpo, "grpo_async.py": grpo_async}


@pytest.mark.parametrize("script", SCRIPTS)
def test_stages_of_a_run(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage that it passes is said to the line, in this order, by both schedules."""
    schedule = SCRIPTS[script]
    seen: list[str] = []
    monkeypatch.setattr(
        Progress, "stage", lambda _, name, done=0, total=0: seen.append(f"{name} {done}/{total}")
    )
    monkeypatch.setattr(Progress, "begin", lambda _, stage: seen.append(stage))
    config = configured(
        *("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=32"),
        *("train.gradient_accumulation_steps=2", "train.checkpoint_frequency=0"),
    )
    run_job(config, tmp_path, schedule.train, SCHEDULE_OF[schedule])
    said = list(dict.fromkeys(seen))
    assert said[:4] == ["starting", "reading data", "starting engines", "loading the model"]
    for stage in ("push 0/0", "collect 0/0", "optimize 1/2", "optimize 2/2", "checkpoint 0/0"):
        assert stage in said, said
    if script == "grpo.py":
        assert "collect 4/4" in said and said.index("collect 4/4") < said.index("score 0/0")
