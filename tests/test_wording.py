"""Violations that the lint of names and prose finds, one of each kind."""

from pathlib import Path

import pytest

from tests import wording

CLEAN = '''"""Rewards of one batch.

shape: [N].
"""

def mean_reward(expected, is_truncated):
    """Returns the mean."""
'''


@pytest.mark.parametrize(("code", "problem"), [
    (CLEAN, None),
    ('"""What a batch says."""', "the module begins with What"),
    ('def f():\n    """Of a group."""', "f begins with Of"),
    ('"""' + "word " * 15 + 'more."""', "16 words"),
    ('"""Are these the same weights?"""', "asks"),
    ('"""A line that goes\non in the next."""', "runs on"),
    ("def told(rows): ...", "name told"),
    ("def log(drawn): ...", "name drawn"),
    ("class Gathered: ...", "name Gathered"),
    ("WHOLE = 1", "name WHOLE"),
    ("class Log:\n    applied: int = 0", "name applied"),
    ("def f(self):\n    self._ended = 1", "name _ended"),
    ("def f(enabled, tied, seed): ...", None),
    ("def _is_told(num_seen): ...", None),
])  # fmt: skip
def test_code(code: str, problem: str | None) -> None:
    found = " ".join(text for _, text in wording.problems_of_code(code))
    assert problem in found if problem else not found


def test_pages() -> None:
    long = "word " * 31
    block, row = f"```\n{long}\n```", f"| {'word ' * 20} | {'word ' * 20} |"
    page = f"# Title\n\n{long.strip()}.\n\n{block}\n\n{row}\n\nShort. {'word ' * 29}."
    ((line, text),) = wording.problems_of_page(page)
    assert line == 3 and "sentence of 31 words" in text


@pytest.mark.parametrize(("line", "word"), [
    ("The doctor finds it.", "doctor"), ("A token was drawn.", "drawn"), ("tells the run", "tells"),
    ("`begun` is a key", None), ("path/to/doctor.md", None), ("drawing", None),
])  # fmt: skip
def test_banned_words(line: str, word: str | None) -> None:
    assert [text.split()[2].rstrip(":") for _, text in wording.find_banned_words(line)] == ([word] if word else [])


def test_exit_code_and_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "riddle.py").write_text('"""Of nothing."""\n')
    monkeypatch.setattr(wording, "ROOT", tmp_path)
    monkeypatch.setattr(wording, "list_files", lambda paths: [tmp_path / "riddle.py"])
    assert wording.main([]) == 1
    assert capsys.readouterr().out.startswith("riddle.py:1: first line of the module begins with Of")


def test_the_allow_lists_are_needed() -> None:
    for name in " ".join(wording.ALLOWED_FILES.values()).split():
        assert [*wording.find_banned_words((wording.ROOT / name).read_text())], f"{name} needs no exception"
