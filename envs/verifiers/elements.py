"""The elements of an answer that has several, and the names that they are given. Pure text, no sympy.

\\{1,2\\}   1, 2   1 and 2   1;2      a set or a bare list: its order says nothing
(1,2)   [1,2)   (1;2)                a point or an interval: ordered
x=1, y=2        (x,y)=(1,2)          a record: by name; against one without names, in its order
x=1, x=2        x=1 or 2             values of one name: a list
a:b=2:3         \\frac{AB}{CD}=2      a ratio or a fraction of names is a name too
p=5,q=2;p=7,q=2                      records: a list of points
"""

import re
from dataclasses import dataclass

from envs.verifiers.latex import split_top

_AND = re.compile(
    r"(?<=[\d)}\]!]) ?(?:and|or) ?(?=[-+\d(\\\[{|a-zA-Z])|(?<=[a-zA-Z]) (?:and|or) (?=\S)"
    r"|(?<=[a-zA-Z]) (?:and|or)(?=[-+(\\\[{])"
)
_AFTER_COMMA = re.compile(r"(?<=[,;]) ?(?:and|or)(?![a-z])")
_OR = re.compile(r"(?<![a-z]) ?or ?(?![a-z]{2})")
_MARKED_NAME = re.compile(r"\\(?:overline|overrightarrow|vec|widehat|hat|bar|angle|triangle|measuredangle) ?")
_MARKED = (
    r"\\(?:overline|overrightarrow|vec|widehat|hat|bar)\{[a-zA-Z]{1,3}\}|\\(?:angle|triangle) ?[A-Z]{1,3}"
)
_LETTER = (
    r"(?:[a-zA-Z]|\\(?!frac|sqrt|in|cdot|times|pi(?![a-zA-Z]))[a-z]+)(?:_(?:\w|\{(?:\\triangle )?\w+\}))?'*"
)
_CALL = rf"{_LETTER}(?:\^\{{-1\}})?\([^()=<>]{{1,20}}\)"
_PART = rf"(?:\|?(?:{_MARKED}|{_CALL}|{_LETTER}|[A-Z]{{2,4}}|[A-Z]?[a-z]{{4,}})\|?|\[[A-Z]{{3,4}}\])"
_FRACTION = re.compile(
    rf"\\frac\{{(?P<top>{_PART})\}}\{{(?P<bottom>{_PART})\}}|(?P<left>{_PART})/(?P<right>{_PART})"
)
_NAME = re.compile(
    rf"(?P<name>{_PART}(?::{_PART})+|{_PART}/{_PART}|\\frac\{{{_PART}\}}\{{{_PART}\}}"
    rf"|\|?(?:{_MARKED}|{_CALL}|{_LETTER}|m?[A-Z]{{2,4}}|[A-Z]?[a-z]{{4,}}(?: [a-z]+){{0,3}})\|?)"
    r"(?:=|\\in(?![a-z]))(?P<value>.+)",
    re.DOTALL,
)
_NAMES = re.compile(r"\((?P<names>[^()=]+)\)(?:=|\\in)(?P<values>\([^=]+\)|\\\{\([^=]+\)\\\})", re.DOTALL)
_TERM = re.compile(r"[a-z](?:[-+]?[a-z])+=(?P<value>[^=]+(?:=.+)?)")


@dataclass(frozen=True)
class Named:
    """Values by name, in their order. `chunks` times the same names, each time with other values."""

    names: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]

    def text(self, names: tuple[str, ...]) -> str:
        """As a list of points, or of numbers where there is one name; the values in the order of `names`."""
        places = [self.names.index(name) for name in names]
        chunks = [[chunk[place] for place in places] for chunk in self.values]
        if len(names) == 1:
            return ",".join(chunk[0] for chunk in chunks)
        return ",".join(f"({','.join(chunk)})" for chunk in chunks)

    def elements(self) -> list[str]:
        """The values of the only name; none where there are several names."""
        return [chunk[0] for chunk in self.values] if len(self.names) == 1 else []

    def once(self, others: list[str]) -> "Named":
        """Remove repeated values of the only name, as the function `once`."""
        if len(self.names) > 1:
            return self
        return Named(self.names, tuple((value,) for value in once(self.elements(), others)))


def without_names(left: str, right: str) -> tuple[str, str]:
    """Both without the names of their values, in one order, where their names allow it; else as they are.

    A name that only one of the two has says nothing; two names must be the same.
    """
    if "=" not in left and "=" not in right and "\\in" not in left and "\\in" not in right:
        return left, right
    first, second = _named(left), _named(right)
    if first and second:
        if set(first.names) != set(second.names):
            return left, right
        names = second.names
        return first.once(second.elements()).text(names), second.once(first.elements()).text(names)
    if first and "=" not in right:
        return first.once(_elements(right)).text(first.names), _as_point(right, first)
    if second and "=" not in left:
        return _as_point(left, second), second.once(_elements(left)).text(second.names)
    return left, right


def once(elements: list[str], others: list[str]) -> list[str]:
    """Remove repeated elements, where the others repeat none."""
    return elements if len(set(others)) < len(others) else list(dict.fromkeys(elements))


def _elements(text: str) -> list[str]:
    found = items(text)
    return found[1] if found else [text]


def value_of_term(text: str) -> str:
    """What `a+b=11` says that letters alone add up or multiply to: `11`; any other text stays."""
    found = _TERM.fullmatch(text)
    if found is None:
        return text
    letters = re.findall("[a-z]", text.partition("=")[0])
    return found["value"] if len(set(letters)) == len(letters) else text


def _as_point(text: str, other: Named) -> str:
    """A bare list as the point that it is beside a record: `4,5` beside `AB=4,CD=5` is ordered."""
    if len(other.names) < 2 or len(other.values) > 1:
        return text
    brackets, parts = items(text) or ("", [])
    return f"({','.join(parts)})" if not brackets and len(parts) == len(other.names) else text


def _named(text: str) -> Named | None:
    """The names and values of an answer; None where it, or an element of it, has no name."""
    if "=" not in text and "\\in" not in text:
        return None
    parts = [part.strip() for part in _pieces(text)]
    if whole := _NAMES.fullmatch(text):
        return _points(whole["names"], whole["values"])
    if all(tuples := [_NAMES.fullmatch(part) for part in parts]):
        records = [_points(each["names"], each["values"]) for each in tuples if each]
        alike = [each for each in records if each and records[0] and each.names == records[0].names]
        if len(alike) < len(records):
            return None
        return Named(alike[0].names, tuple(chunk for each in alike for chunk in each.values))
    found = [_NAME.fullmatch(part) for part in parts]
    first = found[0]
    if first is None:
        return None
    if len(parts) > 1 and not any(found[1:]) and _names_value(first["name"], first["value"]):
        return Named((_plain(first["name"]),), tuple((part,) for part in [first["value"], *parts[1:]]))
    if None in found or not all(_names_value(each["name"], each["value"]) for each in found if each):
        return None
    names = [_plain(each["name"]) for each in found if each]
    values = [each["value"] for each in found if each]
    distinct = tuple(dict.fromkeys(names))
    width = len(distinct)
    if names != list(distinct) * (len(names) // width):
        return None
    return Named(distinct, tuple(tuple(values[at : at + width]) for at in range(0, len(values), width)))


def _points(names: str, values: str) -> Named | None:
    """Of `(p,q)=(3,2)`, also with several points on the right."""
    keys = tuple(_plain(name.strip()) for name in names.split(","))
    inside = values[2:-2] if values.startswith("\\{") else values
    points = [items(point.strip()) or ("", []) for point in _pieces(inside)]
    if len(set(keys)) < len(keys):
        return None
    if any(brackets != "()" or len(parts) != len(keys) for brackets, parts in points):
        return None
    return Named(keys, tuple(tuple(parts) for _, parts in points))


def _names_value(name: str, value: str) -> bool:
    """Whether a ratio's value has as many numbers, and a fraction's name two parts."""
    if fraction := _FRACTION.fullmatch(name):
        top, bottom = (part for part in fraction.groups() if part)
        return top != bottom
    return ":" not in name or name.count(":") == value.rpartition("=")[2].count(":")


def _plain(name: str) -> str:
    if fraction := _FRACTION.fullmatch(name):
        return "/".join(_plain(part) for part in fraction.groups() if part)
    return _MARKED_NAME.sub("", name).strip("|{} ").replace("{", "").replace("}", "")


def _pieces(text: str) -> list[str]:
    """Cut at commas, semicolons, `and` and `or` outside every bracket."""
    pieces = split_top(_AFTER_COMMA.sub("", text), (",", ";"))
    return [element for piece in pieces for element in _AND.split(piece)]


def alternatives(text: str) -> list[str]:
    """Cut at `or` and `\\cup`, which join conditions and sets."""
    return [element for piece in split_top(text, ("\\cup",)) for element in _OR.split(piece)]


def items(text: str) -> tuple[str, list[str]] | None:
    """Brackets and elements of a list of two or more, or of a set in braces; None for anything else."""
    if text.startswith("\\{") and text.endswith("\\}") and len(split_top(text, (",", ";"))) == 1:
        return "{}", _pieces(text[2:-2])
    if text[:1] in ("(", "[", "{") and text[-1:] in (")", "]", "}") and text:
        inside = split_top(text[1:-1], (",", ";"))
        if len(inside) > 1 and _encloses(text):
            braced = text[0] == "{" and text[-1] == "}"
            return ("{}" if braced else text[0] + text[-1]), inside
    elements = _pieces(text)
    return ("", elements) if len(elements) > 1 else None


def _encloses(text: str) -> bool:
    """Whether the first bracket of a text ends with it."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "({[") - (character in ")}]")
        if depth == 0:
            return place == len(text) - 1
    return False


def with_both_signs(elements: list[str]) -> list[str]:
    """Each element with a `\\pm` as two: `\\pm 1, 3` is 1, -1 and 3."""
    return [each for element in elements for each in both_signs(element)]


def both_signs(text: str) -> list[str]:
    """`a\\pm b` as a+b and a-b, `\\mp` the other way round; with two or more of a kind, or none, the text itself."""
    if text.count("\\pm") != 1 or text.count("\\mp") > 1:
        return [text]
    text = re.sub(r"(\\[pm][mp]) ", r"\1", text)
    pairs = ((("\\pm", "+"), ("\\mp", "-")), (("\\pm", "-"), ("\\mp", "+")))
    return [text.replace(*plus).replace(*minus).removeprefix("+") for plus, minus in pairs]
