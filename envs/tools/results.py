"""Turns the value that a tool returns into a text of limited length."""

import json
from typing import Any

NO_RESULT = "(no result)"


def result_text(value: Any) -> str:
    """Returns a tool's value as text.

    A dict or list becomes JSON, any other value its `str`. Lone surrogates, which have no
    encoding, become question marks.
    """
    if value is None:
        return NO_RESULT
    text = json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, dict | list) else str(value)
    return replace_surrogates(text)


def replace_surrogates(text: str) -> str:
    """Returns a text that can be encoded as UTF-8."""
    return text.encode("utf-8", "replace").decode()


def shorten_result(text: str, max_characters: int) -> str:
    """Returns a text of at most `max_characters` characters.

    Of a longer text only beginning and end stay, and between them the number of characters that are left out.
    """
    if len(text) <= max_characters:
        return text
    longest_mark = _cut_mark(len(text))
    kept = max(0, max_characters - len(longest_mark))
    head, tail = (kept + 1) // 2, kept // 2
    return f"{text[:head]}{_cut_mark(len(text) - kept)}{text[len(text) - tail :]}"


def _cut_mark(cut: int) -> str:
    return f"\n[... {cut} characters cut ...]\n"
