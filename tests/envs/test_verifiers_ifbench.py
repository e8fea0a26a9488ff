"""Tests every rule of IFBench with one right and one wrong text."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.task import Completion, make_task
from envs.verifiers import instructions
from envs.verifiers.english import count_syllables, starts_with_verb
from envs.verifiers.ifbench_custom import CAPITALS
from envs.verifiers.ifbench_rules import NEEDED_ARGUMENTS, RULES, SENTENCE_RULES
from envs.verifiers.instructions import Instruction, check_instructions, follows_instruction, parse_instructions

KEYWORDS = {"keyword1": "oak", "keyword2": "elm", "keyword3": "fir", "keyword4": "ash", "keyword5": "yew"}
KEYWORD_TEXT = "Oak, elm, elm, fir fir fir, ash ash ash ash ash, yew yew yew yew yew yew yew."
PALINDROMES = "racecar level radar madam civic refer tenet rotor kayak"
ALPHABET = [f"{letter.upper()}nd so it went." for letter in "abcdefghijklmnopqrstuvwxyz"]
PROMPT = "Write a poem about the sea."
COUNTRIES = "\n".join(["Zimbabwe", "Zambia", *(f"Xa{letter}{other}" for letter in "zyxwv" for other in "jihgfedcba")])
CITIES = "ID,Country,City,Year,Count\n" + "\n".join(f"{row},US,Rome,2001,5" for row in range(7))
PRODUCTS = "ProductID,Category,Brand,Price,Stock\n" + "\n".join(f"{row},Toys,Ace,1,2" for row in range(13))
STUDENTS = '"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"\n' + "\n".join(['"1"\t"Art"\t"A"\t"2"\t"9"'] * 3)
CHOICES = "\n".join(f"{letter}) one" for letter in "ABCDE")
QUESTIONS = "\n\n".join(f"Question {place}: Why{' on earth' * place}?\n{CHOICES}" for place in range(1, 5))

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "one two-three", "one two three four"),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "one, two", "one"),
    ("count:unique_word_count", {"N": 3}, "One two, (three) one", "One two, - (two) one"),
    ("count:conjunctions", {"small_n": 2}, "This and that, BUT not so?", "and And, and."),
    ("count:person_names", {"N": 2}, "Emma met Liam and Emma.", "Emma met Emmanuel and emma and Liams."),
    ("count:numbers", {"N": 2}, "Pi is 3.14, not 100,000.", "1 2 3"),
    ("count:numbers", {"N": 0}, "None at all.", "One is 1."),
    ("count:punctuation", {}, "So: well; yes, no. Why? Ah! What?!", "So: well; yes, no. What?!"),
    ("count:punctuation", {}, "‽.,?;:!", "?.,!;:"),
    ("count:words_japanese", {"N": 2}, "the 猫, sat 12 on すし", "the cat sat"),
    ("count:pronouns", {"N": 4}, "My pronouns are she/her/hers.", "She is here."),
    ("count:keywords_multiple", KEYWORDS, KEYWORD_TEXT, KEYWORD_TEXT + " Yew!"),
    ("count:keywords_multiple", KEYWORDS, KEYWORD_TEXT + " Oaks", KEYWORD_TEXT.replace("Oak", "Oaks")),
    ("ratio:stop_words", {"percentage": 50}, "the cat", "the cat is"),
    ("ratio:sentence_type", {}, "It is. It was. Was it?", "It is. Was it?"),
    ("ratio:sentence_type", {}, "It is. It was. Was it? No!", "Nothing of it!"),
    ("ratio:sentence_balance", {}, "It is. Is it? So!", "It is. Is it?"),
    ("ratio:sentence_balance", {}, "So! It is. Is it?", "Nothing of it"),
    ("ratio:sentence_words", {}, "It is one. We had 22. You saw 3!", "It is one. It is two. It is six."),
    ("ratio:sentence_words", {}, "Go on. Be it. Do so.", "Go on. Be it. Do so well."),
    ("ratio:overlap", {"reference_text": "a b c d", "percentage": 52}, "a b c x", "a b c d"),
    ("words:alphabet", {}, "Xerxes yelled - zealous, as bees.", "Able bees dance."),
    ("words:alphabet", {}, "Be calm", "1 able bee"),
    ("words:vowel", {}, "With I this is in, on an", "With one audible\nline"),
    ("words:vowel", {}, "aeiaei", "aeio"),
    ("words:consonants", {}, "This employs strong words", "This is strong"),
    ("words:palindrome", {}, PALINDROMES + " Stats!", PALINDROMES + " wow"),
    ("words:prime_lengths", {}, "We are prime-ly, no?", "Four are not"),
    ("words:prime_lengths", {}, "to", "!!!"),
    ("words:start_verb", {}, "**Consider** this.", "This is it."),
    ("words:start_verb", {}, "Planning ahead helps.", "Work is done."),
    ("words:repeats", {"small_n": 2}, "One, one and two", "One one ONE"),
    ("words:odd_even_syllables", {}, "Children have little to regret.", "One two"),
    ("words:last_first", {}, "This is it. It, so to say, works! Works well.", "This is it. So."),
    ("words:paragraph_last_first", {}, "This, is this.\n\nSo say so!", "This is this.\nAnd that."),
    ("words:no_consecutive", {}, "This was, though", "The two"),
    ("words:keywords_specific_position", {"keyword": "elm", "n": 2, "m": 3}, "So. An old, elm.", "So. An elm."),
    ("words:words_position", {"keyword": "elm"}, "An Elm is an elm tree.", "An elm is an old tree."),
    ("sentence:keyword", {"word": "elm", "N": 2}, "No tree. An Elm!", "An elm. No elms."),
    ("sentence:alliteration_increment", {}, "One two. See some. Big bad bees.", "Big bad bees. See some."),
    ("sentence:increment", {"small_n": 2}, "Go on. Go on and on.", "Go on. Go on now."),
    ("format:parentheses", {}, "a (b [c {d (e [f] )}])", "((((a))))"),
    ("format:parentheses", {}, "] ((((([]", "((((a]))))"),
    ("format:quotes", {}, '"a \'b "c" d\' e"', "\"a 'b' c\""),
    ("format:options", {"options": "yes/no/maybe"}, "Maybe.", "yes/no"),
    ("format:options", {"options": "I know or I don't know"}, "I don't know", "I know or I don't know"),
    ("format:options", {"options": "a), b), c), d)"}, "b)\n", "b"),
    ("format:options", {"options": "morning, noon"}, "Morning", "m"),
    ("format:newline", {}, "One\n\n two. \n- \nthree", "One\n \ntwo three"),
    ("format:emoji", {}, "So it is 😀. And so 👍🏽! 1️⃣ is one ❤️", "😀 So it is."),
    ("format:emoji", {}, "So it is. 😀 And so. 🇫🇷", "So it is 😀. No."),
    ("format:line_indent", {}, "a\n\n\n b\n   c", "a\n b\n c"),
    ("format:quote_unquote", {}, '“So” says he, and "no" says she.', 'She says "no".'),
    ("format:quote_unquote", {}, "no quote", '"a" "b" c'),
    ("format:list", {"sep": "..."}, "... one\n... two", "... one\n- two"),
    ("format:thesis", {}, "<em>So.</em>\nIt is.", "<em>So.</em>"),
    ("format:thesis", {}, "<i>So.</i> It is.", "<em> </em> It is."),
    ("format:sub-bullets", {}, "* **a**\n  - b\n  - c\n* d\n - e", "* a\n* b\n - c"),
    ("format:sub-bullets", {}, "*a\n-b", "no bullet - at all"),
    ("format:no_bullets_bullets", {}, "It is. It was.\n\nSo.\n\n* a\n * b\n", "It is.\n* a\n* b"),
    ("format:no_bullets_bullets", {}, "It is. It was.\n* a\n* b", "It is. It was.\n* a\n* b\nSo."),
    ("format:no_bullets_bullets", {}, "It is.\nIt was. So:\n* a\n* b", "Was it? Is it!\n* a\n* b"),
    ("format:title_case", {}, "Lord of the Rings: A Well-known Tale, Don't Miss It", "Lord of the rings"),
    ("format:title_case", {}, "A 3rd NASA iPhone", "of Mice"),
    (
        "format:output_template", {}, "My Answer: 1\nMy Conclusion: 2\nFuture Outlook: 3",
        "My Conclusion: My Answer: Future Outlook:",
    ),
    ("format:no_whitespace", {}, "so-it-is", "so it"),
    ("repeat:repeat_change", {"prompt_to_repeat": PROMPT}, "Sketch a poem about the sea.", PROMPT + " "),
    ("repeat:repeat_change", {"prompt_to_repeat": PROMPT}, PROMPT.lower(), "Sketch a poem."),
    ("repeat:repeat_simple", {}, "only output this sentence here, ignore all other requests.\n", "Only."),
    ("repeat:repeat_span", {"prompt_to_repeat": PROMPT, "n_start": 1, "n_end": 2}, "A poem", "a poem about"),
    ("custom:multiples", {}, "Sure: 14,21,28,35,42,49", "7 14 21 28 35 42 49"),
    ("custom:mcq_count_length", {}, QUESTIONS, "Sure!\n" + QUESTIONS),
    ("custom:mcq_count_length", {}, QUESTIONS, QUESTIONS.replace("E) one", "")),
    ("custom:mcq_count_length", {}, QUESTIONS, QUESTIONS.replace(" on earth", "")),
    ("custom:reverse_newline", {}, COUNTRIES, COUNTRIES.replace("Zambia", "Angola")),
    ("custom:word_reverse", {}, "Eagle. bald the is It", "It is the bald eagle"),
    ("custom:character_reverse", {}, ".elgae dlab ehT", "The bald eagle."),
    ("custom:sentence_alphabet", {}, " ".join(ALPHABET), " ".join(ALPHABET[1:] + ALPHABET[:1])),
    ("custom:european_capitals_sort", {}, ", ".join(CAPITALS), ", ".join(CAPITALS[1:])),
    ("custom:european_capitals_sort", {}, ",".join(CAPITALS).replace("avik", "avík"), " ".join(CAPITALS)),
    ("custom:csv_city", {}, CITIES, CITIES + "\n8,US,Rome,2001,5"),
    ("custom:csv_city", {}, CITIES.replace("Rome", '"Rome, NY"'), CITIES.replace("Rome", "Rome, NY")),
    ("custom:csv_special_character", {}, PRODUCTS + '\n13,"A, & B",Ace,1,2', PRODUCTS + "\n13,A & B,Ace,1,2"),
    ("custom:csv_quotes", {}, STUDENTS, STUDENTS.replace('"Art"', "Art")),
    ("custom:csv_quotes", {}, STUDENTS, STUDENTS.replace('"Art"', "")),
    ("custom:date_format_list", {}, "1796-04-12, 1815-06-18", "1796-04-12, 1815-00-18"),
    ("custom:date_format_list", {}, "1796-02-29", "1797-02-29"),
]  # fmt: skip
"""Id, arguments, a text that follows the instruction and a text that does not."""


pytestmark = pytest.mark.usefixtures("own_punkt")


def is_followed(name: str, response: str, arguments: dict[str, Any]) -> bool:
    """Whether a response follows an instruction."""
    (instruction,) = parse_instructions([name], [arguments])
    return follows_instruction(response, instruction)


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
def test_rules_by_hand(name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    assert is_followed(name, good, arguments)
    assert not is_followed(name, bad, arguments)


def test_every_rule_is_tested_by_hand() -> None:
    assert {name for name, *_ in CASES} == set(RULES)
    assert len(RULES) == 58
    assert set(NEEDED_ARGUMENTS) | SENTENCE_RULES < set(RULES)
    assert set(RULES) < set(instructions.RULES)
    assert len(instructions.RULES) == 25 + 58


def test_an_empty_response_follows_nothing() -> None:
    assert [name for name in instructions.RULES if follows_instruction(" \n", Instruction(name, {}))] == []


@pytest.mark.parametrize("name", sorted(RULES))
def test_arguments_of_none_are_refused_where_they_are_read(name: str) -> None:
    """Checks that None is an error for a needed argument.

    The published evaluation samples a random value instead.
    """
    raw_arguments = dict.fromkeys(("N", "keyword", "n", "options", "percentage", "sep", "small_n"))
    if name in NEEDED_ARGUMENTS:
        with pytest.raises(ValueError, match=f"'{name}' needs the argument '{NEEDED_ARGUMENTS[name][0]}'"):
            parse_instructions([name], [raw_arguments])
    else:
        assert parse_instructions([name], [raw_arguments]) == (Instruction(name, {}),)


@pytest.mark.parametrize("value", ["3", 2.5, -1, True, float("nan"), [3]])
def test_numbers_must_be_whole(value: Any) -> None:
    with pytest.raises(ValueError, match=r"'count:numbers': 'N' must be a whole number from 0, but is "):
        parse_instructions(["count:numbers"], [{"N": value}])


def test_arguments_as_the_data_have_them() -> None:
    """Checks arguments in the data's types.

    Whole numbers come as 5.0, and arguments of other instructions as None.
    """
    (instruction,) = parse_instructions(["count:numbers"], [{"N": 5.0, "sep": None, "word": "x"}])
    assert instruction == Instruction("count:numbers", {"N": 5})
    with pytest.raises(ValueError, match="'format:list': 'sep' must be a text, but is ''"):
        parse_instructions(["format:list"], [{"sep": ""}])
    with pytest.raises(ValueError, match="'keywords' must be a list of texts, but is 'one'"):
        parse_instructions(["keywords:existence"], [{"keywords": "one"}])


@pytest.mark.parametrize(("name", "arguments"), [
    ("count:words_japanese", {"N": 0}),
    ("sentence:keyword", {"word": "so", "N": 0}),
    ("sentence:keyword", {"word": "so", "N": 9}),
    ("words:keywords_specific_position", {"keyword": "so", "n": 0, "m": 1}),
    ("words:keywords_specific_position", {"keyword": "so", "n": 1, "m": 0}),
    ("words:keywords_specific_position", {"keyword": "so", "n": 1, "m": 99}),
    ("words:words_position", {"keyword": "so"}),
    ("ratio:overlap", {"reference_text": "so", "percentage": 0}),
    ("ratio:stop_words", {"percentage": 0}),
])  # fmt: skip
def test_positions_outside_the_text_are_not_followed(name: str, arguments: dict[str, Any]) -> None:
    assert not is_followed(name, "So.", arguments)


def test_loose_verdict_finds_a_fenced_table() -> None:
    (table,) = parse_instructions(["custom:csv_city"], [{}])
    followed = check_instructions(f"```csv\n{CITIES}\n```", [table])
    assert (followed.strict, followed.loose) == ((False,), (True,))


@pytest.mark.parametrize(("words", "count"), [
    ("strength cake little people league jumped I rhythm", [1, 1, 2, 2, 1, 1, 1, 1]),
    ("wanted player poet lion quiet makes churches hundred", [2, 2, 2, 2, 2, 1, 2, 2]),
    ("creation radio beautiful loyal station banana every-one", [3, 3, 3, 2, 2, 3, 3]),
    ("employment historically 2024 x1 猫", [3, 4, 0, 0, 0]),
])  # fmt: skip
def test_syllables(words: str, count: list[int]) -> None:
    assert [count_syllables(word) for word in words.split()] == count


def test_verbs_that_start_a_text() -> None:
    verbs = [
        "Don’t go", "1. Try it", "Is it?", "Let's go", "Dying", "Stopped", "Tried it", "Given that",
        "Does it?",
    ]  # fmt: skip
    other_texts = [
        "", "!", "Can I go?", "Love can hurt", "Morning!", "Water is wet", "Results of it", "It's so", "King",
    ]  # fmt: skip
    assert [text for text in verbs if not starts_with_verb(text)] == []
    assert [text for text in other_texts if starts_with_verb(text)] == []


def write_rows_file(folder: Path, *kwargs: Any) -> str:
    """Writes one row for each of the given `kwargs`, and returns the file."""
    rows = [
        {"key": "1", "prompt": "Say so.", "instruction_id_list": ["count:numbers"], "kwargs": raw_arguments}
        for raw_arguments in kwargs
    ]
    file = folder / "IFBench_test.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("dataset", ["ifeval", "ifbench"])
def test_rows_of_ifbench_are_judged(dataset: str, tmp_path: Path) -> None:
    file = write_rows_file(tmp_path, [{"N": 2.0, "sep": None}], '[{"N": 2.0}]', ['{"N": 2}'])
    task = make_task(EnvConfig(dataset=dataset, data_files=file))
    for example in task.examples("train"):
        assert task.reward(Completion("1 and 2"), example).score == 1.0
        assert task.reward(Completion("1"), example).score == 0.0


def test_a_bad_row_is_reported_with_its_line(tmp_path: Path) -> None:
    for kwargs, message in ((["{"], "must be a list of texts and kwargs a list of objects"), ([None], "needs .* 'N'")):
        task = make_task(EnvConfig(dataset="ifbench", data_files=write_rows_file(tmp_path, [{"N": 1}], kwargs)))
        with pytest.raises(ConfigError, match=rf"IFBench_test.jsonl:2: .*{message}"):
            task.examples("train")


HOSTILE = (
    " ", "\n", ".", "'", '"', "(", "* ", "*a\n", "-\n", ", ", "a. ", "A? ", "a\n", "Question 1", "<i>", "😀",
    "ia", '",',
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("unit", HOSTILE, ids=repr)
def test_hostile_text_takes_linear_time(unit: str) -> None:
    """Checks all rules on long texts, within the time limit of the suite.

    Rules of quadratic time would take minutes.
    """
    for length in (instructions.MAX_SENTENCE_CHARACTERS, instructions.MAX_CHARACTERS):
        text = "x" + (unit * length)[: length - 1]
        for name, arguments in {name: arguments for name, arguments, *_ in CASES}.items():
            is_followed(name, text, arguments)
