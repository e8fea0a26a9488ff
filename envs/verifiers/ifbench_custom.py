"""IFBench's instructions that are whole questions (`custom:*`); each function says what must hold."""

import csv
import io
import re
import unicodedata
from collections.abc import Sequence
from datetime import date
from itertools import pairwise
from string import ascii_lowercase, punctuation

from envs.verifiers.ifbench_counts import NO_PUNCTUATION
from envs.verifiers.ifeval_rules import Arguments
from envs.verifiers.sentences import split

MULTIPLES = ["14", "21", "28", "35", "42", "49"]
CAPITALS = [
    "Reykjavik", "Helsinki", "Oslo", "Tallinn", "Stockholm", "Riga", "Moscow", "Copenhagen", "Vilnius", "Minsk",
    "Dublin", "Berlin", "Amsterdam", "Warsaw", "London", "Brussels", "Prague", "Luxembourg", "Paris", "Vienna",
    "Bratislava", "Budapest", "Vaduz", "Chisinau", "Bern", "Ljubljana", "Zagreb",
]  # fmt: skip
"""Of Europe beyond 45 degrees of latitude, from the north, as the published evaluation has them."""
CITY_COLUMNS = ["ID", "Country", "City", "Year", "Count"]
PRODUCT_COLUMNS = ["ProductID", "Category", "Brand", "Price", "Stock"]
STUDENT_COLUMNS = ["StudentID", "Subject", "Grade", "Semester", "Score"]
MIN_COUNTRIES = 52
NAPOLEON = (1769, 1821)

_QUESTION = re.compile(r"Question \d+[.|):;]?")
_OPTION = re.compile(r"[A-Ea-e][.|)]\s*\w")
_DATE = re.compile(r"(\d{4})-(\d{2})-(\d{2})", re.ASCII)
_SPECIAL = re.compile(r"[^\w\s]")


def _ascii(text: str) -> str:
    """Without accents: São Tomé is Sao Tome."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def multiples(text: str, arguments: Arguments) -> bool:
    """The only numbers are the multiples of 7 from 10 to 50, in order."""
    return re.findall(r"\d+", text) == MULTIPLES


def mcq_count_length(text: str, arguments: Arguments) -> bool:
    """Four texts under `Question 1`, `Question 2` ... and nothing before, each longer, with five options A to E."""
    before, *questions = _QUESTION.split(text)
    questions = [question.strip() for question in questions if question.strip()]
    if before or len(questions) != 4:
        return False
    lengths = []
    for question in questions:
        lines = [line.strip() for line in question.split("\n")]
        options = [place for place, line in enumerate(lines) if _OPTION.match(line)]
        if len(options) != 5:
            return False
        lengths.append(len(" ".join(lines[: options[0]]).strip()))
    return all(before < after for before, after in pairwise(lengths))


def reverse_newline(text: str, arguments: Arguments) -> bool:
    """From the line with Zimbabwe on, 52 or more lines from Z to A."""
    stripped = (line.strip(punctuation + " ") for line in text.split("\n"))
    lines = [_ascii(line) for line in stripped if line]
    start = next((place for place, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    countries = lines[start:]
    return len(countries) >= MIN_COUNTRIES and countries == sorted(countries, reverse=True)


def word_reverse(text: str, arguments: Arguments) -> bool:
    """The words say "bald eagle" from the last to the first."""
    return "bald eagle" in " ".join(reversed(text.lower().translate(NO_PUNCTUATION).split()))


def character_reverse(text: str, arguments: Arguments) -> bool:
    """Has "bald eagle" backwards."""
    return "elgae dlab" in text.lower()


def sentence_alphabet(text: str, arguments: Arguments) -> bool:
    """26 sentences that begin with a, b, c ... z."""
    initials = [sentence.lstrip(punctuation + " \t\r\n")[:1].lower() for sentence in split(text)]
    return initials == list(ascii_lowercase)


def european_capitals_sort(text: str, arguments: Arguments) -> bool:
    """The names of `CAPITALS` between commas and nothing else."""
    return [name.strip() for name in _ascii(text).split(",") if name.strip()] == CAPITALS


def _table(text: str, columns: Sequence[str], rows: int, delimiter: str = ",") -> list[list[str]] | None:
    """The fields as they are written, quotes included; None without this header, so many rows and as many fields."""
    kept = io.StringIO(text.replace('"', '"""'), newline="")
    try:
        table = list(csv.reader(kept, delimiter=delimiter))
    except csv.Error:
        return None
    if len(table) != rows + 1 or any(len(row) != len(columns) for row in table):
        return None
    header = [name.strip() for name in table[0]]
    return table if [name.removeprefix('"').removesuffix('"') for name in header] == list(columns) else None


def csv_city(text: str, arguments: Arguments) -> bool:
    """A table of seven rows with the columns of `CITY_COLUMNS`, between commas."""
    return _table(text, CITY_COLUMNS, 7) is not None


def csv_special_character(text: str, arguments: Arguments) -> bool:
    """Fourteen rows between commas, and a field with a special character in double quotes."""
    table = _table(text, PRODUCT_COLUMNS, 14)
    return table is not None and any(
        _is_quoted(field) and _SPECIAL.search(field[1:-1]) for row in table[1:] for field in row
    )


def csv_quotes(text: str, arguments: Arguments) -> bool:
    """Three rows between tabs, and every field, also of the header, in double quotes."""
    table = _table(text, STUDENT_COLUMNS, 3, "\t")
    return table is not None and all(_is_quoted(field.strip()) for row in table for field in row)


def _is_quoted(field: str) -> bool:
    return len(field) > 1 and field[0] == field[-1] == '"'


def date_format_list(text: str, arguments: Arguments) -> bool:
    """Only dates of Napoleon's life as YYYY-MM-DD between commas."""
    for part in text.split(","):
        found = _DATE.fullmatch(part.strip())
        if found is None or not NAPOLEON[0] <= int(found[1]) <= NAPOLEON[1]:
            return False
        try:
            date(*map(int, found.groups()))
        except ValueError:
            return False
    return True
