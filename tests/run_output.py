"""Patterns of the lines that a run prints, to detect foreign output."""

import re

PROGRESS_LINES = (
    r"(starting|reading data|starting engines|loading the model|push)",
    r"(step \d+/\d+, )?(reward \d\.\d{3}, length \d+\.\d, )?\d\d:\d\d so far(, \d\d:\d\d left)?(, \w+( \w+)?"
    r"( \d+/\d+)?)?(, \d\d:\d\d to go)?",
    r"eval \w+ \d+/\d+(, \d\d:\d\d to go)?",
)
"""Patterns of progress lines, whose number depends on the time."""
RUN_LINES = (
    *PROGRESS_LINES,
    r"sample at step \d+",
    r"  .+",  # a line of a sample, of a table, or of a diagnostics message
    r"\w+: \d+ problems, \d+ completions each",
    r"finished: .*",
    r"model: .*|to evaluate this model:",
)
SMALL_RUN = (
    *("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=32"),
    *("logging.progress=true", "logging.sample_frequency=1"),
)
"""Overrides of a small run that prints all of these lines except tables."""
EVALUATION = "eval.sets={sums: {dataset: arithmetic, n: 2, limit: 8}}"


def check_no_foreign_lines(output: str) -> None:
    """Asserts that an output has only lines of `RUN_LINES` and no control characters."""
    run_lines = re.compile("|".join(RUN_LINES))
    foreign = [line for line in output.splitlines() if not run_lines.fullmatch(line)]
    assert foreign == []
    assert "arning" not in output and "\x1b" not in output and "\r" not in output


def without_progress(output: str) -> list[str]:
    progress = re.compile("|".join(PROGRESS_LINES))
    return [line for line in output.splitlines() if not progress.fullmatch(line)]
