"""Tests IFEval's 25 rules against the published evaluation's verdicts and by hand."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from config.schema.errors import ConfigError
from envs.verifiers import language_detection, sentences
from envs.verifiers.ifeval_rules import NEEDED_ARGUMENTS, RULES
from envs.verifiers.instructions import (
    Instruction,
    InstructionVerdicts,
    check_instructions,
    follows_instruction,
    loose_variants,
    parse_instructions,
)
from tests.punkt import use_punkt

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT / ".." / "shared"
EXPECTED_DIFFERENCES = {
    (1129, "keywords:letter_frequency"): "asks for exclamation marks; the original samples a random letter instead",
}  # fmt: skip
"""Recorded verdicts that differ, with the reason."""


def is_followed(name: str, response: str, **arguments: Any) -> bool:
    """Whether a response follows an instruction."""
    return follows_instruction(response, Instruction(name, arguments))


@pytest.mark.long
def test_recorded_verdicts_for_every_instruction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (SHARED / "golden" / "ifeval.jsonl.gz").is_file():
        pytest.skip("no ../shared/golden/ifeval.jsonl.gz")
    use_punkt(SHARED / "data" / "punkt_tab", tmp_path / "data", monkeypatch)
    rows = {row["key"]: row for row in map(json.loads, (SHARED / "data" / "ifeval.jsonl").open(encoding="utf-8"))}
    wrong_verdicts, seen_ids = [], set()
    with gzip.open(SHARED / "golden" / "ifeval.jsonl.gz", "rt", encoding="utf-8") as lines:
        for case in map(json.loads, lines):
            row = rows[case["key"]]
            verdicts = check_instructions(
                case["response"], parse_instructions(row["instruction_id_list"], row["kwargs"])
            )
            for recorded, strict, loose in zip(case["per_instruction"], verdicts.strict, verdicts.loose, strict=True):
                seen_ids.add(recorded["id"])
                if (strict, loose) != (recorded["strict"], recorded["loose"]):
                    wrong_verdicts.append((case["key"], recorded["id"]))
    sentences.load_punkt.cache_clear()
    assert seen_ids == set(RULES)
    assert set(wrong_verdicts) == set(EXPECTED_DIFFERENCES)


RESPONSES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["apple", "pear"]}, "Pear and apples.", "Pear alone."),
    ("keywords:frequency", {"keyword": "a b", "frequency": 2, "relation": "at least"}, "a b A B", "a b"),
    ("keywords:frequency", {"keyword": "x", "frequency": 2, "relation": "less than"}, "x", "xx"),
    ("keywords:forbidden_words", {"forbidden_words": ["can"]}, "scan", "I can."),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 2, "let_relation": "at least"}, "eE", "e"),
    ("keywords:letter_frequency", {"letter": "!", "let_frequency": 2, "let_relation": "at least"}, "!!", "!"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***a***b***", "a***  ***b"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two-three", "one two"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Well"}, 'a\n\n"Well, so."', "a\n\nSo well.",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "c"}, "", "a\n\nb",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] and [[b]", "[a\n]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "bye\nP. S. more", "bye\nPS more"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "p.p.s x", "p.s. x"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n\n\n - b\n", "* a\n** b"),
    ("detectable_format:constrained_response", {}, "So: My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and * *"),
    ("detectable_format:multiple_sections", {"section_spliter": "Day", "num_sections": 2}, "Day 1 a Day 2", "Day 1"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<Title>>\ntext", "<<>> <<\n>>"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:two_responses", {}, "******a******b", "a******b******c"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Do it."}, " do it. Done.", "Done. Do it."),
    ("startend:end_checker", {"end_phrase": "Bye."}, 'So long. "BYE."', "Bye. Not."),
    ("startend:quotation", {}, ' "a" ', '"'),
    ("change_case:english_capital", {}, "THIS IS AN ENGLISH SENTENCE, IS IT NOT?", "This is an English sentence."),
    ("change_case:english_lowercase", {}, "this is an english sentence, is it not?", "This is an English sentence."),
    ("language:response_language", {"language": "de"}, "Das ist ein ganz gewöhnlicher Satz.", "A common sentence."),
    ("punctuation:no_comma", {}, "a; b", "a, b"),
]  # fmt: skip
"""Id, arguments, a response that follows the instruction and a response that does not."""


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), RESPONSES)
def test_rules_by_hand(name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    assert is_followed(name, good, **arguments) or not good
    assert not is_followed(name, bad, **arguments)


def test_sentence_rules_by_hand(own_punkt: None) -> None:
    two = {"num_sentences": 2, "relation": "at least"}
    assert is_followed("length_constraints:number_sentences", "Dr. Who came. He left.", **two)
    assert not is_followed("length_constraints:number_sentences", "Dr. Who came.", **two)
    assert not is_followed("length_constraints:number_sentences", "No. " * 20_000, **two)
    capitals = {"capital_frequency": 2, "capital_relation": "at least"}
    assert is_followed("change_case:capital_word_frequency", "I like NASA's moons.", **capitals)
    assert not is_followed("change_case:capital_word_frequency", "I like moons.", **capitals)


def test_every_rule_is_tested_by_hand() -> None:
    with_sentences = {"length_constraints:number_sentences", "change_case:capital_word_frequency"}
    assert {name for name, *_ in RESPONSES} | with_sentences == set(RULES)
    assert len(RULES) == 25
    assert set(NEEDED_ARGUMENTS) < set(RULES)


def test_loose_verdict_drops_first_or_last_line_or_asterisks() -> None:
    ends = Instruction("startend:end_checker", {"end_phrase": "bye"})
    assert check_instructions("bye\nAnything else?", [ends]) == InstructionVerdicts((False,), (True,))
    assert check_instructions("Sure!\n**bye**\nAnything else?", [ends]) == InstructionVerdicts((False,), (True,))
    assert check_instructions("Sure!\nbye\nmore\nAnything else?", [ends]) == InstructionVerdicts((False,), (False,))
    assert loose_variants("one line") == ("one line", "")


def test_language_is_the_same_every_time() -> None:
    text = "no si la tu me"
    assert len({language_detection.detect_language(text) for _ in range(20)}) == 1
    assert language_detection.detect_language("123 456") is None


def test_missing_sentence_data_stops_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nltk.data.path", ["/nowhere"])
    sentences.load_punkt.cache_clear()
    with pytest.raises(ConfigError, match=r"punkt_tab.*/nowhere.*NLTK_DATA"):
        sentences.split_sentences("One. Two.")


@pytest.mark.parametrize(("ids", "arguments", "message"), [
    (["no:such"], [{}], "unknown instruction 'no:such'"),
    (["punctuation:no_comma"], [], "1 instruction ids with 0 sets"),
    (["startend:end_checker"], [{"end_phrase": None}], "needs the argument 'end_phrase'"),
    ([], [], "0 instruction ids"),
])  # fmt: skip
def test_bad_rows_are_refused(ids: list[str], arguments: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_instructions(ids, arguments)


HOSTILE = [
    " " * 100_000, "\n" * 100_000, "[" * 100_000, "<" * 100_000, "* " * 50_000, " \n" * 50_000,
    "-\n" * 50_000,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:2]))
def test_hostile_text_takes_linear_time(text: str) -> None:
    """Checks all rules on long texts, within the time limit of the suite.

    Rules of quadratic time would take minutes.
    """
    for name, arguments, _, _ in RESPONSES:
        is_followed(name, "x" + text[1:], **arguments)


def test_a_text_is_cut_into_sentences_once_by_each_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    split_texts: list[str] = []

    class ByDots:
        def tokenize(self, text: str) -> list[str]:
            split_texts.append(text)
            return text.split(". ")

    for _ in range(2):
        tokenizer = ByDots()
        monkeypatch.setattr(sentences, "load_punkt", lambda punkt=tokenizer: punkt)
        for _ in range(3):
            assert sentences.split_sentences("One, two. Three") == ["One, two", "Three"]
            assert sentences.split_words("One, two. Three") == ["One", ",", "two", "Three"]
    assert len(split_texts) == 2
