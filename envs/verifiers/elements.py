r"""Splits lists, sets and named values of answers, and matches two answers' values by name.

The functions work on text and do not use sympy.

    \{1,2\}   1, 2   1 and 2   1;2      a set or a bare list: the order does not count
    (1,2)   [1,2)   (1;2)                a point or an interval: ordered
    x=1, y=2        (x,y)=(1,2)          a record: compared by name; against a text without names, by order
    x=1, x=2        x=1 or 2             values of one name: a list
    a:b=2:3         \frac{AB}{CD}=2      a ratio or a fraction of names is a name too
    p=5,q=2;p=7,q=2                      records: a list of points
"""

import re
from dataclasses import dataclass

from envs.verifiers.latex import split_top_level

_AND = re.compile(
    r"(?<=[\d)}\]!]) ?(?:and|or) ?(?=[-+\d(\\\[{|a-zA-Z])|(?<=[a-zA-Z]) (?:and|or) (?=\S)"
    r"|(?<=[a-zA-Z]) (?:and|or)(?=[-+(\\\[{])"
)
_AFTER_COMMA = re.compile(r"(?<=[,;]) ?(?:and|or)(?![a-z])")
_OR = re.compile(r"(?<![a-z]) ?or ?(?![a-z]{2})")
_NAME_MARKS = re.compile(r"\\(?:overline|overrightarrow|vec|widehat|hat|bar|angle|triangle|measuredangle) ?")
_MARKED_LETTERS = r"\\(?:overline|overrightarrow|vec|widehat|hat|bar)\{[a-zA-Z]{1,3}\}|\\(?:angle|triangle) ?[A-Z]{1,3}"
_LETTER = r"(?:[a-zA-Z]|\\(?!frac|sqrt|in|cdot|times|pi(?![a-zA-Z]))[a-z]+)(?:_(?:\w|\{(?:\\triangle )?\w+\}))?'*"
_CALL = rf"{_LETTER}(?:\^\{{-1\}})?\([^()=<>]{{1,20}}\)"
_NAME_PART = rf"(?:\|?(?:{_MARKED_LETTERS}|{_CALL}|{_LETTER}|[A-Z]{{2,4}}|[A-Z]?[a-z]{{4,}})\|?|\[[A-Z]{{3,4}}\])"
_FRACTION = re.compile(
    rf"\\frac\{{(?P<top>{_NAME_PART})\}}\{{(?P<bottom>{_NAME_PART})\}}|(?P<left>{_NAME_PART})/(?P<right>{_NAME_PART})"
)
_NAME = re.compile(
    rf"(?P<name>{_NAME_PART}(?::{_NAME_PART})+|{_NAME_PART}/{_NAME_PART}|\\frac\{{{_NAME_PART}\}}\{{{_NAME_PART}\}}"
    rf"|\|?(?:{_MARKED_LETTERS}|{_CALL}|{_LETTER}|m?[A-Z]{{2,4}}|[A-Z]?[a-z]{{4,}}(?: [a-z]+){{0,3}})\|?)"
    r"(?:=|\\in(?![a-z]))(?P<value>.+)",
    re.DOTALL,
)
_NAMES = re.compile(r"\((?P<names>[^()=]+)\)(?:=|\\in)(?P<values>\([^=]+\)|\\\{\([^=]+\)\\\})", re.DOTALL)
_TERM = re.compile(r"[a-z](?:[-+]?[a-z])+=(?P<value>[^=]+(?:=.+)?)")


@dataclass(frozen=True)
class NamedValues:
    """Values of an answer by name, in the answer's order.

    names: the distinct names.
    values: one tuple for each record, with one value for every name.
    """

    names: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]

    def format_values(self, names: tuple[str, ...]) -> str:
        """Formats the values as a list of points, or of numbers for a single name.

        names: the order of the values.
        """
        places = [self.names.index(name) for name in names]
        chunks = [[chunk[place] for place in places] for chunk in self.values]
        if len(names) == 1:
            return ",".join(chunk[0] for chunk in chunks)
        return ",".join(f"({','.join(chunk)})" for chunk in chunks)

    def single_values(self) -> list[str]:
        """Returns the values of the only name; an empty list if there are several names."""
        return [chunk[0] for chunk in self.values] if len(self.names) == 1 else []

    def drop_repeats(self, other_elements: list[str]) -> "NamedValues":
        """Removes repeated values of the only name, by the function `drop_repeats`."""
        if len(self.names) > 1:
            return self
        return NamedValues(self.names, tuple((value,) for value in drop_repeats(self.single_values(), other_elements)))


def without_names(left: str, right: str) -> tuple[str, str]:
    """Removes the names of values from two answers where the names allow it.

    If only one answer has names, they are removed. If both have names, the sets of names must be equal, and the
    values of both are in one order afterwards; otherwise both answers stay unchanged.
    """
    if "=" not in left and "=" not in right and "\\in" not in left and "\\in" not in right:
        return left, right
    first, second = _parse_named_values(left), _parse_named_values(right)
    if first and second:
        if set(first.names) != set(second.names):
            return left, right
        names = second.names
        return first.drop_repeats(second.single_values()).format_values(names), second.drop_repeats(
            first.single_values()
        ).format_values(names)
    if first and "=" not in right:
        return first.drop_repeats(_list_elements(right)).format_values(first.names), _as_point(right, first)
    if second and "=" not in left:
        return _as_point(left, second), second.drop_repeats(_list_elements(left)).format_values(second.names)
    return left, right


def drop_repeats(elements: list[str], other_elements: list[str]) -> list[str]:
    """Removes repeated elements, unless the other elements have repeats."""
    return elements if len(set(other_elements)) < len(other_elements) else list(dict.fromkeys(elements))


def _list_elements(text: str) -> list[str]:
    """Returns the elements of a list, or the text itself as the only element."""
    found = parse_list(text)
    return found[1] if found else [text]


def value_of_term(text: str) -> str:
    """Returns the value of a sum or product of letters: `11` for `a+b=11`.

    Any other text stays unchanged.
    """
    found = _TERM.fullmatch(text)
    if found is None:
        return text
    letters = re.findall("[a-z]", text.partition("=")[0])
    return found["value"] if len(set(letters)) == len(letters) else text


def _as_point(text: str, record: NamedValues) -> str:
    """Converts a bare list to a point if the record has as many names.

    `4,5` beside the record `AB=4,CD=5` becomes `(4,5)`, which is ordered.
    """
    if len(record.names) < 2 or len(record.values) > 1:
        return text
    brackets, parts = parse_list(text) or ("", [])
    return f"({','.join(parts)})" if not brackets and len(parts) == len(record.names) else text


def _parse_named_values(text: str) -> NamedValues | None:
    """Parses the names and values of an answer.

    The result is None if the answer, or an element of the answer, has no name.
    """
    if "=" not in text and "\\in" not in text:
        return None
    parts = [part.strip() for part in _split_elements(text)]
    if point_match := _NAMES.fullmatch(text):
        return _parse_named_points(point_match["names"], point_match["values"])
    if all(tuples := [_NAMES.fullmatch(part) for part in parts]):
        records = [_parse_named_points(each["names"], each["values"]) for each in tuples if each]
        matching = [each for each in records if each and records[0] and each.names == records[0].names]
        if len(matching) < len(records):
            return None
        return NamedValues(matching[0].names, tuple(chunk for each in matching for chunk in each.values))
    found = [_NAME.fullmatch(part) for part in parts]
    first = found[0]
    if first is None:
        return None
    if len(parts) > 1 and not any(found[1:]) and _is_name_of_value(first["name"], first["value"]):
        return NamedValues((_plain_name(first["name"]),), tuple((part,) for part in [first["value"], *parts[1:]]))
    if None in found or not all(_is_name_of_value(each["name"], each["value"]) for each in found if each):
        return None
    names = [_plain_name(each["name"]) for each in found if each]
    values = [each["value"] for each in found if each]
    distinct = tuple(dict.fromkeys(names))
    width = len(distinct)
    if names != list(distinct) * (len(names) // width):
        return None
    return NamedValues(distinct, tuple(tuple(values[at : at + width]) for at in range(0, len(values), width)))


def _parse_named_points(names: str, values: str) -> NamedValues | None:
    """Parses the names and values of `(p,q)=(3,2)`, also with several points."""
    keys = tuple(_plain_name(name.strip()) for name in names.split(","))
    point_list = values[2:-2] if values.startswith("\\{") else values
    points = [parse_list(point.strip()) or ("", []) for point in _split_elements(point_list)]
    if len(set(keys)) < len(keys):
        return None
    if any(brackets != "()" or len(parts) != len(keys) for brackets, parts in points):
        return None
    return NamedValues(keys, tuple(tuple(parts) for _, parts in points))


def _is_name_of_value(name: str, value: str) -> bool:
    """Whether a name fits its value.

    A ratio of names needs a value with as many numbers. A fraction of names needs two different names.
    """
    if fraction := _FRACTION.fullmatch(name):
        top, bottom = (part for part in fraction.groups() if part)
        return top != bottom
    return ":" not in name or name.count(":") == value.rpartition("=")[2].count(":")


def _plain_name(name: str) -> str:
    """Returns a name without marks, braces and absolute value bars."""
    if fraction := _FRACTION.fullmatch(name):
        return "/".join(_plain_name(part) for part in fraction.groups() if part)
    return _NAME_MARKS.sub("", name).strip("|{} ").replace("{", "").replace("}", "")


def _split_elements(text: str) -> list[str]:
    """Splits a text at commas, semicolons, `and` and `or` outside all brackets."""
    pieces = split_top_level(_AFTER_COMMA.sub("", text), (",", ";"))
    return [element for piece in pieces for element in _AND.split(piece)]


def split_alternatives(text: str) -> list[str]:
    r"""Splits a text at `or` and `\cup`, which join conditions and sets."""
    return [element for piece in split_top_level(text, ("\\cup",)) for element in _OR.split(piece)]


def parse_list(text: str) -> tuple[str, list[str]] | None:
    """Returns the brackets and elements of a list, or of a set in braces.

    A list has two elements or more. The result is None for any other text.
    """
    if text.startswith("\\{") and text.endswith("\\}") and len(split_top_level(text, (",", ";"))) == 1:
        return "{}", _split_elements(text[2:-2])
    if text[:1] in ("(", "[", "{") and text[-1:] in (")", "]", "}") and text:
        point_list = split_top_level(text[1:-1], (",", ";"))
        if len(point_list) > 1 and _has_outer_brackets(text):
            braced = text[0] == "{" and text[-1] == "}"
            return ("{}" if braced else text[0] + text[-1]), point_list
    elements = _split_elements(text)
    return ("", elements) if len(elements) > 1 else None


def _has_outer_brackets(text: str) -> bool:
    """Whether the first bracket of a text closes at the end of the text."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "({[") - (character in ")}]")
        if depth == 0:
            return place == len(text) - 1
    return False


def expand_all_signs(elements: list[str]) -> list[str]:
    r"""Replaces every element that has one `\pm` by two elements.

    `\pm 1, 3` becomes 1, -1 and 3.
    """
    return [each for element in elements for each in expand_signs(element)]


def expand_signs(text: str) -> list[str]:
    r"""Expands `a\pm b` to a+b and a-b, and `\mp` with the signs exchanged.

    A text with no `\pm`, or with several signs of one kind, stays unchanged.
    """
    if text.count("\\pm") != 1 or text.count("\\mp") > 1:
        return [text]
    text = re.sub(r"(\\[pm][mp]) ", r"\1", text)
    pairs = ((("\\pm", "+"), ("\\mp", "-")), (("\\pm", "-"), ("\\mp", "+")))
    return [text.replace(*plus).replace(*minus).removeprefix("+") for plus, minus in pairs]
