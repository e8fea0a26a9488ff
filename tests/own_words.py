"""The lines that a run prints, as patterns: any other is a library's, or a warning that nobody can act on."""

import re

PROGRESS = (
    r"(starting|reading data|starting engines|loading the model|push)",
    r"(step \d+/\d+, )?(reward \d\.\d{3}, length \d+\.\d, )?\d\d:\d\d so far(, \d\d:\d\d left)?(, \w+( \w+)?"
    r"( \d+/\d+)?)?(, \d\d:\d\d to go)?",
    r"eval \w+ \d+/\d+(, \d\d:\d\d to go)?",
)
"""Which of these there are depends on the time."""
OWN = (
    *PROGRESS,
    r"sample at step \d+",
    r"  .+",  # of a sample, of a table, of a worry
    r"\w+: \d+ problems, \d+ completions each",
    r"finished: .*",
    r"model: .*|to evaluate it:",
)
SMALL = (
    *("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=32"),
    *("logging.progress=true", "logging.sample_frequency=1"),
)
"""A run that prints all of them but a table."""
EVALUATION = "eval.sets={sums: {dataset: arithmetic, n: 2, limit: 8}}"


def check_every_line_is_ours(output: str) -> None:
    own = re.compile("|".join(OWN))
    foreign = [line for line in output.splitlines() if not own.fullmatch(line)]
    assert foreign == []
    assert "arning" not in output and "\x1b" not in output and "\r" not in output


def without_progress(output: str) -> list[str]:
    progress = re.compile("|".join(PROGRESS))
    return [line for line in output.splitlines() if not progress.fullmatch(line)]
