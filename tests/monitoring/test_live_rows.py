"""Rows of the live view at every width, the line of a log, and the numbers in them against those by hand."""

import io
import math
import re
from collections.abc import Callable

import pytest
from rich.cells import cell_len
from rich.console import Console

from monitoring.live_rows import CURVE, TO_ASCII, clock, log_line, printable, screen_rows
from monitoring.progress_numbers import FINEST, Course, Curve

NOW = 5000.0
NUMBER = re.compile(r"[\d.:/%]*\d[\d.:/%]*")


def begun(total: int = 120) -> Course:
    course = Course(total, began=NOW - 100)
    course.does("push", 0, 0, NOW - 90)
    return course


def amid() -> Course:
    """37 of 120 steps in 74 s, after 20 s of an evaluation."""
    course = begun()
    course.evaluated(0, {"eval/sums/pass@1": 0.125, "eval/sums/pass@1_low": 0.1, "eval/sums/problems": 32.0})
    course.does("collect", 0, 128, NOW - 74)
    for step in range(37):
        course.stepped(step / 36, 3.25)
        if step == 18:
            course.evaluated(19, {"eval/sums/pass@1": 0.5})
    course.seconds |= {"collect": 40.0, "optimize": 25.0, "push": 4.0, "evaluate": 25.0}
    course.does("optimize", 2, 2, NOW - 12)
    course.does("collect", 0, 128, NOW - 10)
    course.does("collect", 40, 128, NOW - 1)
    return course


def full() -> Course:
    """Long numbers, long and wide texts."""
    course = Course(1_234_567, steps=1_000_000, began=NOW - 500_000)
    course.does("collect", 0, 9, NOW - 400_000)
    for step in range(5000):
        course.stepped(-12345.678 + step, 32768.5)
    for name in (
        "gsm8k",
        "数学の問題集です",
        "a_set_whose_name_is_longer_than_any_terminal_is_wide" * 3,
        "d",
        "e",
    ):
        for step in (0, 1_002_000, 1_005_000):
            course.evaluated(step, {f"eval/{name}/pass@1": step / 2e6})
    course.seconds |= {"collect": 1e5, "optimize": 2e5, "push": 5e4, "evaluate": 5e4}
    course.does("eval a_set_whose_name_is_longer_than_any_terminal_is_wide", 12345, 1234567, NOW - 1000)
    course.alarm = (
        "step 1000031: clip share 0.4567 over 0.3\nwhich 数学の問題集 says \x1b[2J " + "12345.678 " * 40
    )
    return course


def plain(course: Course, width: int) -> list[str]:
    return [row.plain for row in screen_rows(course, width, NOW)]


@pytest.mark.parametrize("width", [0, 5, 16, 20, 24, 30, 39, 40, 60, 79, 80, 120, 200])
@pytest.mark.parametrize("make", [begun, amid, full])
def test_no_row_wraps_and_no_number_is_cut(make: Callable[[], Course], width: int) -> None:
    course = make()
    file = io.StringIO()
    console = Console(file=file, width=max(width, 1), highlight=False, markup=False)
    rows = screen_rows(course, width, NOW)
    console.print(*rows, sep="\n", end="")
    drawn = file.getvalue().split("\n") if rows else []
    assert drawn == [row.plain for row in rows]
    assert all(cell_len(line) <= width for line in drawn)
    whole = {number for line in plain(course, 4000) for number in NUMBER.findall(line)}
    for line in drawn:
        assert set(NUMBER.findall(line)) <= whole, line
    assert not any("\x1b" in line for line in drawn)


def test_at_80_columns() -> None:
    step, reward, evaluation, times, doing = plain(amid(), 80)
    assert re.fullmatch(r"step    ━+─+  37/120  02:46 left  01:40 so far", step)  # 74 / 37 * 83 = 166 s
    assert re.fullmatch(r"reward  [▁▂▃▄▅▆▇█]+  +1\.000  length 3\.2  0 to 1", reward)
    assert re.fullmatch(r"eval    0\.12 +0\.50 +sums pass@1", evaluation)
    assert times == "time    collect 40%  optimize 25%  push 4%  evaluate 25%  other 6%"
    assert doing == "now     collect 40/128  00:22 to go"  # 10 / 40 * 88
    bar = step[8:].split()[0]
    assert bar.count("━") == 37 * len(bar) // 120


@pytest.mark.parametrize("width", [40, 80, 200])
def test_an_evaluation_stands_below_its_step(width: int) -> None:
    step, reward, evaluation, *_ = plain(amid(), width)
    drawn = reward[8:].split()[0]
    if "0.50" in evaluation[8:-1]:
        assert evaluation.index("0.50") - 8 == min(
            round(19 / 37 * len(drawn)), len(step.split()[1]) - len("0.50")
        )
    assert "sums pass@1" in evaluation


def test_at_40_columns_the_important_ones_are_there() -> None:
    rows = plain(amid(), 40)
    assert [row.split()[0] for row in rows] == ["step", "reward", "eval", "time", "now"]
    assert "37/120" in rows[0] and "1.000" in rows[1] and "collect 40/128" in rows[4]


def test_before_the_first_step_and_without_training() -> None:
    assert plain(begun(), 80)[1:] == ["now     push"]
    assert "0/120" in plain(begun(), 80)[0] and "left" not in plain(begun(), 80)[0]
    alone = Course(0)
    assert plain(alone, 80) == []
    alone.does("eval sums", 3, 30, NOW - 30)
    assert plain(alone, 80) == ["now     eval sums 3/30  04:30 to go"]


def test_the_line_of_a_log() -> None:
    assert log_line(begun(), NOW) == "push"
    assert (
        log_line(amid(), NOW)
        == "step 37/120, reward 1.000, length 3.2, 01:40 so far, 02:46 left, collect 40/128, 00:22 to go"
    )
    ended = amid()
    ended.doing = ""
    assert log_line(ended, NOW) == "step 37/120, reward 1.000, length 3.2, 01:40 so far"


def test_time_left_counts_what_happened_since_the_first_batch() -> None:
    course = amid()
    assert course.seconds_left(NOW) == pytest.approx(74 / 37 * 83)
    resumed = Course(120, steps=100, began=NOW - 50)
    assert resumed.seconds_left(NOW) is None
    resumed.does("collect", 0, 8, NOW - 30)
    assert resumed.seconds_left(NOW) is None
    resumed.stepped(0.5, 1.0)
    assert resumed.seconds_left(NOW) == pytest.approx(30 * 19)


@pytest.mark.parametrize("count", [1, 7, FINEST - 1, FINEST, FINEST + 1, 1000, 100_000])
def test_a_curve_holds_the_means_of_equally_many_steps(count: int) -> None:
    curve = Curve()
    values = [math.sin(step / 50) for step in range(count)]
    for value in values:
        curve.add(value)
    each = curve.steps_each
    assert curve.count == count and len(curve.means) < FINEST
    assert len(curve.means) == count // each
    for index, mean in enumerate(curve.means):
        part = values[index * each : (index + 1) * each]
        assert mean == pytest.approx(math.fsum(part) / each, abs=1e-12)
    shown = curve.over(40)
    assert len(shown) == min(40, len(curve.means))
    assert min(curve.means) <= min(shown) <= max(shown) <= max(curve.means)


def test_a_curve_of_nothing_and_of_what_is_not_finite() -> None:
    curve = Curve()
    curve.add(float("nan"))
    assert curve.over(10) == [] and curve.count == 0
    course = begun()
    course.stepped(float("nan"), 2.0)
    assert "1/120" in plain(course, 80)[0]
    for value in (0.5, 0.5):
        course.stepped(value, 2.0)
    assert re.match(rf"reward  {CURVE[0]}{{2}} ", plain(course, 80)[1])


def test_clock() -> None:
    assert [clock(seconds) for seconds in (0, 59.6, 3599, 3600, 86399, 86400, 900_000)] == [
        *("00:00", "01:00", "59:59", "1:00:00", "23:59:59", "1 d 00:00", "10 d 10:00")
    ]


def test_what_a_model_wrote_cannot_move_the_cursor() -> None:
    assert printable("a\x1b[2J\rb\x07\x9bc\n\td é 数") == "a\\x1b[2J\\x0db\\x07\\x9bc\n\td é 数"


def test_ascii_draws_the_same_widths() -> None:
    rows = plain(full(), 80)
    translated = [row.translate(TO_ASCII) for row in rows]
    assert [len(row) for row in rows] == [len(row) for row in translated]
    assert all(row.isascii() for row in translated if "数" not in row)
