"""A printed sample shows all of the question, the answers as they were written, and how they were judged."""

from dataclasses import replace

from envs.group import FinishReason, SampledCompletion, Verdict
from envs.task import Example, Outcome
from tests.groups import make_group
from torchgrpo.monitoring.ledger_line import question
from torchgrpo.monitoring.monitor import LONGEST_TEXT, sample_text


def attempt(
    text: str,
    score: float,
    outcome: Outcome = "scored",
    tokens: int = 8,
    finish_reason: FinishReason = "stop",
    **parts: float,
) -> SampledCompletion:
    verdict = Verdict(score, parts, outcome)
    return SampledCompletion([7] * tokens, [], [], finish_reason, text=text, verdict=verdict)


def asked(*contents: str, gold: object = "5") -> Example:
    roles = ("system", "user", "assistant", "user")
    return Example(
        tuple({"role": role, "content": text} for role, text in zip(roles, contents, strict=False)), gold, 3
    )


def test_best_and_worst_with_parts_length_and_gold() -> None:
    long = "word " * 200
    attempts = [
        attempt("7\nsince\n\n7 is nice", 0.2, accuracy=0.0, brief=0.2),
        attempt("5", 1.0, accuracy=1.0, brief=1.0, tokens=2),
        attempt("6 <eos>", -1.0, outcome="invalid", finish_reason="length"),
    ]
    about = asked("Be brief.", f"What is 2 + 3?\n{long}end")
    assert sample_text(20, replace(make_group(0, attempts), example=about)) == (
        f"sample at step 20\n  What is 2 + 3?\n  {long}end\n"
        "  reward 1.00 (accuracy 1, brief 1), 2 tokens, stop; gold 5\n    5\n"
        "  reward -1.00, invalid, 8 tokens, length; gold 5\n    6 <eos>"
    )
    (only,) = [attempts[0]]
    assert sample_text(1, replace(make_group(0, [only, only]), example=asked("", "?"))).splitlines()[2:] == [
        "  reward 0.20 (accuracy 0, brief 0.2), 8 tokens, stop; gold 5",
        "    7",
        "    since",
        "    ",
        "    7 is nice",
    ]


def test_what_could_not_be_judged_is_neither_the_best_nor_the_worst() -> None:
    attempts = [attempt("bad", -0.5), attempt("unjudged", 0.0, outcome="error"), attempt("worse", -1.0)]
    shown = sample_text(1, replace(make_group(0, attempts), example=asked("", "?")))
    assert [line.strip() for line in shown.splitlines()[3::2]] == ["bad", "worse"]
    nothing = replace(make_group(0, attempts[1:2]), example=asked("", "?"))
    assert "reward 0.00, error" in sample_text(1, nothing)


def test_a_chat_is_shown_with_its_roles() -> None:
    assert (
        question(asked("Be brief.", "2+2?", "4", "3+3?").messages) == "user: 2+2?\nassistant: 4\nuser: 3+3?"
    )


def test_what_is_longer_than_a_screen_is_cut_and_an_empty_answer_is_a_line() -> None:
    text = sample_text(
        1, replace(make_group(0, [attempt("", 0.0)]), example=asked("", "a" * 9000, gold=["x" * 500]))
    )
    assert f"  {'a' * LONGEST_TEXT} ...\n" in text
    assert text.endswith(f"; gold ['{'x' * 198} ...\n    ")
