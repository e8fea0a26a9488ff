"""Rules of IFBench for single complete questions (`custom:*`).

Every function checks one instruction on a text; its name is the end of the instruction's id.
"""

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
from envs.verifiers.sentences import split_sentences

MULTIPLES = ["14", "21", "28", "35", "42", "49"]
CAPITALS = [
    "Reykjavik", "Helsinki", "Oslo", "Tallinn", "Stockholm", "Riga", "Moscow", "Copenhagen", "Vilnius", "Minsk",
    "Dublin", "Berlin", "Amsterdam", "Warsaw", "London", "Brussels", "Prague", "Luxembourg", "Paris", "Vienna",
    "Bratislava", "Budapest", "Vaduz", "Chisinau", "Bern", "Ljubljana", "Zagreb",
]  # fmt: skip
"""Capitals of Europe beyond 45 degrees of latitude, from north to south, as in the published evaluation."""
CITY_COLUMNS = ["ID", "Country", "City", "Year", "Count"]
PRODUCT_COLUMNS = ["ProductID", "Category", "Brand", "Price", "Stock"]
STUDENT_COLUMNS = ["StudentID", "Subject", "Grade", "Semester", "Score"]
MIN_COUNTRIES = 52
"""Minimum number of countries of `custom:reverse_newline`."""
NAPOLEON = (1769, 1821)
"""Years of Napoleon's birth and death."""

_QUESTION = re.compile(r"Question \d+[.|):;]?")
_OPTION = re.compile(r"[A-Ea-e][.|)]\s*\w")
_DATE = re.compile(r"(\d{4})-(\d{2})-(\d{2})", re.ASCII)
_SPECIAL = re.compile(r"[^\w\s]")


def _remove_accents(text: str) -> str:
    """Removes accents: São Tomé becomes Sao Tome."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def multiples(text: str, arguments: Arguments) -> bool:
    """Whether the only numbers are the multiples of 7 from 10 to 50, in order."""
    return re.findall(r"\d+", text) == MULTIPLES


def mcq_count_length(text: str, arguments: Arguments) -> bool:
    """Whether the text consists of four questions with five options each.

    The headings are `Question 1`, `Question 2` and so on, and the options A to E. Nothing precedes the first
    question, and every question is longer than the one before.
    """
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
    """Whether 52 or more lines from Zimbabwe on are sorted from Z to A."""
    stripped = (line.strip(punctuation + " ") for line in text.split("\n"))
    lines = [_remove_accents(line) for line in stripped if line]
    start = next((place for place, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    countries = lines[start:]
    return len(countries) >= MIN_COUNTRIES and countries == sorted(countries, reverse=True)


def word_reverse(text: str, arguments: Arguments) -> bool:
    """Whether the text contains "bald eagle" after its words are reversed."""
    return "bald eagle" in " ".join(reversed(text.lower().translate(NO_PUNCTUATION).split()))


def character_reverse(text: str, arguments: Arguments) -> bool:
    """Whether the text contains "bald eagle" backwards."""
    return "elgae dlab" in text.lower()


def sentence_alphabet(text: str, arguments: Arguments) -> bool:
    """Whether the text consists of 26 sentences that begin with a, b, c ... z."""
    initials = [sentence.lstrip(punctuation + " \t\r\n")[:1].lower() for sentence in split_sentences(text)]
    return initials == list(ascii_lowercase)


def european_capitals_sort(text: str, arguments: Arguments) -> bool:
    """Whether the text consists of the names in `CAPITALS` between commas."""
    return [name.strip() for name in _remove_accents(text).split(",") if name.strip()] == CAPITALS


def _parse_table(text: str, columns: Sequence[str], rows: int, delimiter: str = ",") -> list[list[str]] | None:
    """Returns the fields of a CSV table as written, quotes included.

    The result is None if the header, the number of rows or the number of fields differs.
    """
    quoted_text = io.StringIO(text.replace('"', '"""'), newline="")
    try:
        table = list(csv.reader(quoted_text, delimiter=delimiter))
    except csv.Error:
        return None
    if len(table) != rows + 1 or any(len(row) != len(columns) for row in table):
        return None
    header = [name.strip() for name in table[0]]
    return table if [name.removeprefix('"').removesuffix('"') for name in header] == list(columns) else None


def csv_city(text: str, arguments: Arguments) -> bool:
    """Whether the text is a table of seven rows with the columns `CITY_COLUMNS`."""
    return _parse_table(text, CITY_COLUMNS, 7) is not None


def csv_special_character(text: str, arguments: Arguments) -> bool:
    """Whether the text is a table of 14 rows with a quoted special character.

    The columns are `PRODUCT_COLUMNS`. A field in double quotes has a special character.
    """
    table = _parse_table(text, PRODUCT_COLUMNS, 14)
    return table is not None and any(
        _is_quoted(field) and _SPECIAL.search(field[1:-1]) for row in table[1:] for field in row
    )


def csv_quotes(text: str, arguments: Arguments) -> bool:
    """Whether the text is a table of three rows with every field in double quotes.

    Tabs separate the fields, and the header is quoted too.
    """
    table = _parse_table(text, STUDENT_COLUMNS, 3, "\t")
    return table is not None and all(_is_quoted(field.strip()) for row in table for field in row)


def _is_quoted(field: str) -> bool:
    """Whether a field is in double quotes."""
    return len(field) > 1 and field[0] == field[-1] == '"'


def date_format_list(text: str, arguments: Arguments) -> bool:
    """Whether the text lists dates of Napoleon's life as YYYY-MM-DD between commas."""
    for part in text.split(","):
        found = _DATE.fullmatch(part.strip())
        if found is None or not NAPOLEON[0] <= int(found[1]) <= NAPOLEON[1]:
            return False
        try:
            date(*map(int, found.groups()))
        except ValueError:
            return False
    return True
