"""IFEval: every instruction on an answer that follows it and one that does not, and the recorded verdicts."""

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

nltk = pytest.importorskip("nltk")
pytest.importorskip("langdetect")

from config.env import EnvConfig  # noqa: E402
from config.errors import ConfigError  # noqa: E402
from envs.task import Completion, make_task  # noqa: E402
from envs.verifiers import sentences  # noqa: E402
from envs.verifiers.ifeval import instructions, judge  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT / ".." / "shared"
PUNKT = SHARED / "data" / "punkt_tab" / "english"
DIFFERENT = {
    (1129, "keywords:letter_frequency"): "the letter is '!', for which the original draws one at random"
}
PARAGRAPHS = "One.\n\n***\n\nTwo."


@pytest.fixture(autouse=True)
def _nltk_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The real English model where it is on this machine, else one that knows no abbreviation but "dr"."""
    english = tmp_path / "tokenizers" / "punkt_tab" / "english"
    if PUNKT.is_dir():
        shutil.copytree(PUNKT, english)
    else:
        english.mkdir(parents=True)
        for name in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
            (english / name).write_text("dr\n" if name.startswith("abbrev") else "")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    sentences.load.cache_clear()
    yield
    sentences.load.cache_clear()


def follows(response: str, name: str, arguments: dict[str, Any]) -> tuple[bool, bool]:
    followed = judge(response, instructions([name], [arguments]))
    return followed.strict[0], followed.loose[0]


CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["sun", "moon"]}, "Sun and moon.", "Sun."),
    ("keywords:frequency", {"keyword": "sun", "frequency": 2, "relation": "at least"}, "Sun, sun.", "Sun."),
    ("keywords:forbidden_words", {"forbidden_words": ["rain"]}, "Sun.", "Rain."),
    ("keywords:letter_frequency", {"letter": "z", "let_frequency": 2, "let_relation": "at least"}, "Zz", "z"),
    (
        "language:response_language",
        {"language": "de"},
        "Das ist ein deutscher Satz über das Wetter.",
        "It rains today.",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        "One. Two.",
        "One.",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, PARAGRAPHS, "One."),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "less than"},
        "One two",
        "One two three",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "two"},
        "One.\n\nTwo words.",
        "One.\n\nThree words.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Hello.\nP.S. more", "Hello."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n* b", "* a"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "Yes."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "*this* one", "this one"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        "Section 1\na",
    ),
    ("detectable_format:json_format", {}, '{"a": 1}', "a: 1"),
    ("detectable_format:title", {}, "<<title>> text", "title text"),
    ("combination:two_responses", {}, "first******second", "first"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "Say it. It.", "It."),
    ("startend:end_checker", {"end_phrase": "The end."}, "So. The end.", "The end. So."),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "AB CD",
        "AB cd",
    ),
    ("change_case:english_capital", {}, "THIS IS ENGLISH TEXT.", "This is English text."),
    ("change_case:english_lowercase", {}, "this is english text.", "This is English text."),
    ("punctuation:no_comma", {}, "a b", "a, b"),
    ("startend:quotation", {}, '"quoted"', "not quoted"),
]


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), CASES, ids=[case[0] for case in CASES])
def test_every_instruction(name: str, arguments: dict[str, Any], right: str, wrong: str) -> None:
    assert follows(right, name, arguments) == (True, True)
    assert follows(wrong, name, arguments) == (False, False)


def test_there_are_25_and_loose_forgives_a_first_line() -> None:
    assert len({case[0] for case in CASES}) == 25
    assert follows("Sure, here:\nno commas", "punctuation:no_comma", {}) == (False, True)


def test_language_detection_says_the_same_every_time() -> None:
    text = "Hola amigo taxi hotel"
    arguments = {"language": "es"}
    assert len({follows(text, "language:response_language", arguments) for _ in range(20)}) == 1


def test_missing_sentence_data_is_an_error_and_not_a_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nowhere")])
    with pytest.raises(ConfigError, match="punkt_tab"):
        follows(
            "One. Two.", "length_constraints:number_sentences", {"num_sentences": 1, "relation": "at least"}
        )


def test_recorded_verdicts() -> None:
    recorded = SHARED / "golden" / "ifeval.jsonl.gz"
    if not recorded.is_file():
        pytest.skip("the recorded verdicts are not on this machine")
    rows = [json.loads(line) for line in (SHARED / "data" / "ifeval.jsonl").open()]
    prompts = {row["key"]: row for row in rows}
    different = set()
    with gzip.open(recorded) as lines:
        cases = [json.loads(line) for line in lines]
    for case in cases:
        row = prompts[case["key"]]
        ours = judge(case["response"], instructions(row["instruction_id_list"], row["kwargs"]))
        for theirs, strict, loose in zip(case["per_instruction"], ours.strict, ours.loose, strict=True):
            if (theirs["strict"], theirs["loose"]) != (strict, loose):
                different.add((case["key"], theirs["id"]))
    assert different == set(DIFFERENT)


def test_the_reward_is_the_share_or_all(tmp_path: Path) -> None:
    row = {
        "key": 1,
        "prompt": "Write.",
        "instruction_id_list": ["punctuation:no_comma", "detectable_format:title"],
        "kwargs": [{}, {}],
    }
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    for options, expected in (({}, 0.5), ({"credit": "all"}, 0.0)):
        task = make_task(EnvConfig(dataset="ifeval", data_files=str(file), options=options))
        verdict = task.reward(Completion("no title"), task.examples("train")[0])
        assert verdict.score == expected
        assert verdict.parts["instructions"] == 0.5
