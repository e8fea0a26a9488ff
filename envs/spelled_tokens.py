"""Marks tokens spelled in messages, so that they stay text in the rendered chat.

A message can spell a token as a whole, or spell a part of it that the template's text completes: a function named
`<|im_end|` before the template's `>`. In both cases one character of the message becomes a mark, so that the rendered
text does not contain the token. The template still sees all other characters.
"""

import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

import jinja2

_MARK_DIGITS = 6  # hexadecimal digits of the largest code point
_LOOKED_UP_KEYS = frozenset(
    (
        *("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "id", "type", "function"),
        *("arguments", "description", "parameters", "properties", "required", "items", "enum"),
    )
)
"""Keys that templates look up in messages and tools; a change would hide their values."""


class SpelledTokens:
    """Finder and marker of tokens in the strings of messages and tools.

    tokens: texts of the tokens that only the template may write.
    """

    def __init__(self, tokens: Collection[str]) -> None:
        self.tokens = tuple(sorted(tokens, key=len, reverse=True))
        alternatives = "|".join(map(re.escape, self.tokens)) or "(?!)"
        self.pattern = re.compile(alternatives)
        self._starts = re.compile(f"(?={alternatives})")
        self._key = f"mark{secrets.token_hex(8)}"  # random, so that no text can contain a mark
        self._mark_pattern = re.compile(f"{self._key}([0-9a-f]{{{_MARK_DIGITS}}})")

    def is_spelled(self, values: Any, template: str) -> bool:
        """Whether a string spells a token, alone or together with the template's text."""
        texts: list[str] = []
        with_edges: list[str] = []
        _collect_strings(values, texts, with_edges)
        if self.pattern.search("\0".join((*texts, *with_edges))) is not None:
            return True
        edges = token_edges(self.tokens, template)
        return edges.any and any(map(edges.touches, with_edges))

    def mark(self, values: Any, template: str) -> Any:
        """Copies messages or tools with marks in all spelled tokens."""
        edges = token_edges(self.tokens, template)

        def mark_in(value: Any, has_edges: bool) -> Any:
            if isinstance(value, str):
                return self._mark_text(value, edges if has_edges else _NO_EDGES)
            if isinstance(value, Mapping):
                return {
                    mark_in(key, key not in _LOOKED_UP_KEYS): mark_in(inside, key != "role")
                    for key, inside in value.items()
                }
            if isinstance(value, list | tuple):
                return [mark_in(inside, has_edges) for inside in value]
            return value

        return mark_in(values, True)

    def unmark(self, text: str) -> str:
        """Replaces the marks in a rendered text by the characters that they stand for."""
        return self._mark_pattern.sub(lambda match: chr(int(match[1], 16)), text)

    def _mark_text(self, text: str, edges: "TokenEdges") -> str:
        places = {match.start() for match in self._starts.finditer(text)} | edges.places(text)
        for place in sorted(places, reverse=True):
            text = f"{text[:place]}{self._key}{ord(text[place]):0{_MARK_DIGITS}x}{text[place + 1 :]}"
        return text


class TokenEdges:
    """Parts of tokens that become a whole token between the texts of a chat template.

    beginnings: a template's text can end in what precedes them in a token. ends: a template's text can begin with what
    follows them. middles: both. any: whether there are such parts.
    """

    def __init__(self, beginnings: Collection[str], ends: Collection[str], middles: Collection[str]) -> None:
        self._beginnings, self._ends, self._middles = tuple(beginnings), tuple(ends), frozenset(middles)
        self.any = bool(self._beginnings or self._ends or self._middles)

    def touches(self, text: str) -> bool:
        """Whether a string of a message may be completed to a token."""
        return text.startswith(self._beginnings) or text.endswith(self._ends) or text in self._middles

    def places(self, text: str) -> set[int]:
        """Returns indices of characters to mark, so that nothing completes the string to a token."""
        places = {0} if text.startswith(self._beginnings) or text in self._middles else set()
        return places | ({len(text) - 1} if text.endswith(self._ends) else set())


_NO_EDGES = TokenEdges((), (), ())


@lru_cache(maxsize=8)
def token_edges(tokens: tuple[str, ...], template: str) -> TokenEdges:
    """Returns the parts of tokens that the texts of a Jinja template complete."""
    literals = set(template_literals(template))
    heads = {literal[-length:] for literal in literals for length in range(1, len(literal) + 1)}
    tails = {literal[:length] for literal in literals for length in range(1, len(literal) + 1)}
    beginnings, ends, middles = set(), set(), set()
    for token in tokens:
        starts = [cut for cut in range(1, len(token)) if token[:cut] in heads]
        stops = [cut for cut in range(1, len(token)) if token[cut:] in tails]
        beginnings |= {token[start:] for start in starts}
        ends |= {token[:stop] for stop in stops}
        middles |= {token[start:stop] for start in starts for stop in stops if start < stop}
    return TokenEdges(beginnings, ends, middles)


def template_literals(template: str) -> Iterator[str]:
    """Yields the text between the tags of a Jinja template, and its string constants."""
    lexer = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).lexer
    for _, kind, value in lexer.wrap(lexer.tokeniter(template, None)):
        if kind in ("data", "string"):
            yield value


def _collect_strings(value: Any, texts: list[str], with_edges: list[str]) -> None:
    """Adds every string in a JSON value to one of two lists.

    texts: roles and the keys that templates look up; a template completes roles by design: `<|` + role + `|>`.
    with_edges: all other strings.
    """
    if isinstance(value, str):
        with_edges.append(value)
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            (texts if key in _LOOKED_UP_KEYS else with_edges).append(str(key))
            if key == "role":
                texts.append(str(inside))
            else:
                _collect_strings(inside, texts, with_edges)
    elif isinstance(value, list | tuple):
        for inside in value:
            _collect_strings(inside, texts, with_edges)
