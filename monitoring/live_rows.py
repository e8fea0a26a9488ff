"""What the live view says: rows for a terminal of any width, and one line for a log.

    step    ━━━━━━━━━━━━━━━━━━──────────────────────────  37/120  01:38 left  00:42 so far
    reward  ▁▁▁▂▂▃▄▅▆▆▇▇▇█                                0.934  0.051 to 0.941  length 3.2
    eval    0.12      0.41     0.64                       sums pass@1
    time    collect 61%  optimize 30%  push 4%  evaluate 5%
    now     collect 40/128
    alarm   step 31: ...

A row is made of pieces that are there whole or not at all, so that no number is ever cut.
"""

from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

from monitoring.progress_numbers import Course

_LABEL = 8
"""Columns of a row's name and the gap behind it."""
_GRAPH = 10
"""Columns that pieces leave to a bar or a curve, at least."""
_WIDEST_GRAPH = 48
_LONG_S = 5.0
"""A stage that takes so many seconds is worth telling how long it still takes."""
_SETS = 3
"""Evaluation sets that are shown."""
CURVE, FULL, REST, CUT = "▁▂▃▄▅▆▇█", "━", "─", "…"
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
TO_ASCII = str.maketrans({**dict(zip(CURVE, "_.,-=+*#", strict=True)), FULL: "#", REST: "-", CUT: "~"})
"""For a terminal whose encoding has none of these."""


def screen_rows(course: Course, width: int, now: float) -> list[Text]:
    """The rows of a terminal, none wider than `width` columns. now: `time.monotonic`."""
    if width < 2 * _LABEL:
        return []
    rows = [*_training_rows(course, width, now)] if course.total_steps else []
    if course.doing:
        rows.append(_row("now", _stage(course, now), width))
    if course.alarm:
        words = printable(course.alarm).split()
        shown = whole(words, width - _LABEL - 2, " ")
        ending = f" {CUT}" if len(shown) < len(words) else ""
        rows.append(_row("alarm", [" ".join(shown) + ending], width, "yellow"))
    return rows


def _training_rows(course: Course, width: int, now: float) -> list[Text]:
    steps = [f"{course.steps}/{course.total_steps}"]
    left = course.seconds_left(now)
    if left is not None and course.doing:
        steps.append(f"{clock(left)} left")
    steps.append(f"{clock(now - course.began)} so far")
    means = course.rewards.means
    rewards = []
    if means:
        rewards = [
            f"{course.reward:.3f}",
            f"length {course.length:.1f}",
            f"{min(means):.3g} to {max(means):.3g}",
        ]
    metrics = [printable(f"{name} pass@1") for name in [*course.evaluations][:_SETS]]
    # One width for all graphs, so that an evaluation stands below the steps that led to it.
    graph = min(_graph_width(pieces, width) for pieces in (steps, rewards, *([one] for one in metrics)))
    rows = [_row("step", [_bar(course.steps, course.total_steps, graph), *steps], width)]
    if rewards:
        rows.append(_row("reward", [_curve(course, graph), *rewards], width, "green"))
    for name, metric in zip(course.evaluations, metrics, strict=False):
        rows.append(_row("eval", [_marks(course, name, graph), metric], width, "cyan"))
    shares = [f"{name} {share:.0%}" for name, share in course.shares(now).items() if share >= 0.005]
    if shares:
        rows.append(_row("time", shares, width))
    return rows


def log_line(course: Course, now: float) -> str:
    """How far the run is, in one line without anything that only a terminal understands."""
    pieces = []
    if course.total_steps and (course.steps or course.training_since is not None):
        pieces.append(f"step {course.steps}/{course.total_steps}")
        if course.rewards.count:
            pieces += [f"reward {course.reward:.3f}", f"length {course.length:.1f}"]
        pieces.append(f"{clock(now - course.began)} so far")
        left = course.seconds_left(now)
        if left is not None and course.doing:
            pieces.append(f"{clock(left)} left")
    if course.doing:
        pieces += _stage(course, now)
    return ", ".join(pieces)


def _row(label: str, pieces: Sequence[str], width: int, style: str = "") -> Text:
    """The first piece in the style and as many of the others as there is room for; else the name alone."""
    first, *others = pieces
    if _LABEL + cell_len(first) > width:
        return Text(label, style="bold", no_wrap=True)
    kept = whole(others, width - _LABEL - cell_len(first) - 2, "  ")
    if not kept:
        first = first.rstrip()
    behind = "".join(f"  {piece}" for piece in kept)
    row = Text(f"{label:<{_LABEL}}{first}{behind}", no_wrap=True)
    row.stylize("bold", 0, _LABEL)
    row.stylize(style, _LABEL, _LABEL + len(first))
    return row


def whole(pieces: Sequence[str], room: int, between: str) -> list[str]:
    """As many pieces, from the first on, as fit into so many columns."""
    kept: list[str] = []
    for piece in pieces:
        room -= cell_len(piece)
        if room < 0:
            break
        kept.append(piece)
        room -= len(between)
    return kept


def _graph_width(pieces: Sequence[str], width: int) -> int:
    """Columns that a graph has before those of the pieces that fit behind a narrow one."""
    room = width - _LABEL
    kept = whole(pieces, room - _GRAPH - 2, "  ")
    return max(min(room - sum(cell_len(piece) + 2 for piece in kept), _WIDEST_GRAPH), 1)


def _bar(done: int, total: int, cells: int) -> str:
    full = min(done * cells // total, cells)
    return FULL * full + REST * (cells - full)


def _curve(course: Course, cells: int) -> str:
    values = course.rewards.over(cells)
    low, high = min(values), max(values)
    scale = (len(CURVE) - 1) / (high - low) if high > low else 0.0
    drawn = "".join(CURVE[round((value - low) * scale)] for value in values)
    return drawn.ljust(cells)


def _marks(course: Course, name: str, cells: int) -> str:
    """Values of a set below the curve, each under the step it was measured after; newer ones cover older ones."""
    drawn = len(course.rewards.over(cells))
    first = course.steps - course.rewards.count
    marks = [" "] * cells
    for step, value in reversed(course.evaluations[name]):
        text = f"{value:.2f}"
        share = (step - first) / max(course.rewards.count, 1)
        start = max(min(round(share * drawn), cells - len(text)), 0)
        place = slice(max(start - 1, 0), start + len(text) + 1)
        if start + len(text) <= cells and not "".join(marks[place]).strip():
            marks[start : start + len(text)] = text
    return "".join(marks)


def _stage(course: Course, now: float) -> list[str]:
    """`collect 40/128`, and how long it still takes where that is long."""
    name = printable(course.doing)
    if not course.of:
        return [name]
    pieces = [f"{name} {course.done}/{course.of}"]
    left = course.stage_left(now)
    if left is not None and now - course.doing_since + left >= _LONG_S:
        pieces.append(f"{clock(left)} to go")
    return pieces


def clock(seconds: float) -> str:
    """`02:03`, `1:02:03`, `3 d 04:05`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}"
    return f"{hour}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"


def printable(text: str) -> str:
    """A model's text without what would move a terminal's cursor or change its colours; lines stay lines."""
    return text.translate(_CONTROL)
