"""Tests of the printed samples: question, completions, rewards."""

from dataclasses import replace

from envs.group import FinishReason, SampledCompletion, Verdict
from envs.task import Example, Outcome
from tests.episodes import failed_episode, tool_episode
from tests.groups import make_group
from torchgrpo.monitoring.ledger_record import format_question
from torchgrpo.monitoring.monitor import LONGEST_TEXT, format_sample


def make_completion(
    text: str,
    score: float,
    outcome: Outcome = "scored",
    tokens: int = 8,
    finish_reason: FinishReason = "stop",
    **parts: float,
) -> SampledCompletion:
    verdict = Verdict(score, parts, outcome)
    return SampledCompletion([7] * tokens, [], [], finish_reason, text=text, verdict=verdict)


def make_example(*contents: str, reference: object = "5") -> Example:
    roles = ("system", "user", "assistant", "user")
    return Example(
        tuple({"role": role, "content": text} for role, text in zip(roles, contents, strict=False)), reference, 3
    )


def test_sample_has_best_and_worst_completion_with_components_and_reference() -> None:
    long_text = "word " * 200
    completions = [
        make_completion("7\nsince\n\n7 is nice", 0.2, accuracy=0.0, brief=0.2),
        make_completion("5", 1.0, accuracy=1.0, brief=1.0, tokens=2),
        make_completion("6 <eos>", -1.0, outcome="invalid", finish_reason="length"),
    ]
    example = make_example("Be brief.", f"What is 2 + 3?\n{long_text}end")
    assert format_sample(20, replace(make_group(0, completions), example=example)) == (
        f"sample at step 20\n  What is 2 + 3?\n  {long_text}end\n"
        "  reward 1.00 (accuracy 1, brief 1), 2 tokens, stop; reference answer 5\n    5\n"
        "  reward -1.00, invalid, 8 tokens, length; reference answer 5\n    6 <eos>"
    )
    (only,) = [completions[0]]
    assert format_sample(1, replace(make_group(0, [only, only]), example=make_example("", "?"))).splitlines()[2:] == [
        "  reward 0.20 (accuracy 0, brief 0.2), 8 tokens, stop; reference answer 5",
        "    7",
        "    since",
        "    ",
        "    7 is nice",
    ]


def test_completion_without_a_score_is_neither_best_nor_worst() -> None:
    completions = [
        make_completion("bad", -0.5),
        make_completion("unscored", 0.0, outcome="error"),
        make_completion("worse", -1.0),
    ]
    shown = format_sample(1, replace(make_group(0, completions), example=make_example("", "?")))
    assert [line.strip() for line in shown.splitlines()[3::2]] == ["bad", "worse"]
    group = replace(make_group(0, completions[1:2]), example=make_example("", "?"))
    assert "reward 0.00, error" in format_sample(1, group)


def test_chat_is_shown_with_its_roles() -> None:
    assert (
        format_question(make_example("Be brief.", "2+2?", "4", "3+3?").messages)
        == "user: 2+2?\nassistant: 4\nuser: 3+3?"
    )


def test_long_texts_are_truncated_and_an_empty_completion_is_a_line() -> None:
    text = format_sample(
        1,
        replace(make_group(0, [make_completion("", 0.0)]), example=make_example("", "a" * 9000, reference=["x" * 500])),
    )
    assert f"  {'a' * LONGEST_TEXT} ...\n" in text
    assert text.endswith(f"; reference answer ['{'x' * 198} ...\n    ")


def test_episode_is_shown_as_a_chat() -> None:
    group = replace(make_group(0, [tool_episode(), failed_episode()]), example=make_example("", "12 * 7?"))
    assert format_sample(1, group).splitlines()[2:] == [
        "  reward 1.00 (accuracy 1), 6 tokens, stop; reference answer 5",
        "    turn 1: reward 0.25, 4 tokens, engine 0.50 s, environment 0.12 s, 1 malformed call",
        "      reasoning: 12 * 7",
        "      I multiply.",
        "      mul(a=12, b=7) -> 84",
        '      lookup(query="84", deep={"limit": null}) -> nothing found (error)',
        "      tool: no JSON",
        "    turn 2: reward 0.75, 2 tokens, engine 0.25 s, environment 0.00 s",
        "      84",
    ]
    failed = replace(group, completions=group.completions[1:])
    assert format_sample(1, failed).splitlines()[-1] == "    error: Game.step raised KeyError: 'board'"


def test_turns_of_an_episode_that_the_task_scores_show_no_reward() -> None:
    group = make_group(0, [tool_episode()])
    for turn in group.completions[0].turns:
        turn.reward = 0.0
    text = format_sample(1, group)
    assert "    turn 1: 4 tokens, engine 0.50 s, environment 0.12 s, 1 malformed call\n" in text
    assert "    turn 2: 2 tokens, engine 0.25 s, environment 0.00 s\n" in text
