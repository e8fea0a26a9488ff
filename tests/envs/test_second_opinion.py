"""A second opinion is asked where the first verdict is not "right", turns it only by "right", and harms nothing."""

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.group import Verdict
from envs.judging.judge import judges_in_process, make_judge
from envs.judging.service import RewardService
from envs.option_checks import option_problems
from envs.task import Completion, Example, make_task
from tests.envs.test_verifiers_worked_out import NOT_ELEVEN
from tests.scripts import configured

HERE = "tests.envs.second_opinions"
GOLD = "2"


def example(answer: str) -> Example:
    return Example(({"role": "user", "content": "?"},), answer, 0)


def judged(second: str, texts: list[str], answer: str = GOLD, **options: object) -> list[Verdict]:
    given = {"reward": "boxed", "reward_workers": 1, "reward_timeout_s": 20.0, **options}
    env = EnvConfig(dataset="arithmetic", reward_second_opinion=second, **given)
    with closing(RewardService(make_task(env), env)) as service:
        verdicts = service.score([Completion(text) for text in texts], [example(answer)] * len(texts))
        assert service.metrics()["reward/workers_replaced"] == 0
        return verdicts


def test_the_library_turns_what_our_rules_cannot_read_and_nothing_that_is_not_worked_out() -> None:
    gold = "\\gcd(a,b)+1"
    right, same, wrong, sum_ = judged(
        "strict_math_verify",
        ["\\boxed{1+\\gcd(a,b)}", f"\\boxed{{{gold}}}", "\\boxed{\\gcd(a,b)+2}", "\\boxed{\\gcd(a,b)}"],
        gold,
    )
    assert [verdict.score for verdict in (right, same, wrong, sum_)] == [1.0, 1.0, 0.0, 0.0]
    assert [verdict.parts["second_opinion"] for verdict in (right, same, wrong, sum_)] == [1.0, 0.0, 0.0, 0.0]
    assert right.parts["accuracy"] == 1.0
    assert {verdict.parts["second_opinion_failed"] for verdict in (right, same, wrong, sum_)} == {0.0}


def test_an_expression_that_still_has_to_be_evaluated_stays_wrong() -> None:
    given = [text for texts in NOT_ELEVEN.values() for text in texts]
    verdicts = judged("strict_math_verify", [f"\\boxed{{{text}}}" for text in given], "11")
    assert [text for text, verdict in zip(given, verdicts, strict=True) if verdict.score] == []


@pytest.mark.parametrize("deed", ["hang", "spin", "die", "fail", "eat"])
def test_one_that_hangs_or_fails_leaves_the_first_verdict(deed: str) -> None:
    seconds = 1.5 if deed in ("hang", "spin") else 20.0
    texts = ["\\boxed{3}", "\\boxed{2}", "\\boxed{4}"]
    verdicts = judged(f"{HERE}:{deed}", texts, reward_timeout_s=seconds)
    assert [(each.score, each.outcome) for each in verdicts] == [
        (0.0, "scored"),
        (1.0, "scored"),
        (0.0, "scored"),
    ]
    assert [each.parts["second_opinion_failed"] for each in verdicts] == [1.0, 0.0, 1.0]


def test_where_no_process_can_be_made_the_first_verdict_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    env = EnvConfig(dataset="arithmetic", reward="boxed", reward_second_opinion=f"{HERE}:half")
    judge = make_judge(make_task(env))

    def full() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", full)
    before = os.listdir("/proc/self/fd")
    verdict = judge(Completion("\\boxed{3}"), example(GOLD))
    assert (verdict.score, verdict.parts["second_opinion_failed"]) == (0.0, 1.0)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_it_is_asked_only_where_the_first_is_not_right_and_only_right_counts(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    os.environ["ASKED"] = str(asked)
    try:
        verdicts = judged(f"{HERE}:half", ["\\boxed{2}", "\\boxed{half}", "\\boxed{yes}"])
    finally:
        del os.environ["ASKED"]
    assert asked.read_text().split() == ["\\boxed{half}", "\\boxed{yes}"]
    assert [each.score for each in verdicts] == [1.0, 0.0, 3.0]
    assert [each.parts["second_opinion"] for each in verdicts] == [0.0, 0.0, 1.0]


def test_weights_of_parts_count_the_verdict_that_stands() -> None:
    weights = {"accuracy": 1.0, "format": 0.5}
    (verdict,) = judged(f"{HERE}:half", ["\\boxed{yes}"], reward_weights=weights)
    assert verdict.score == 1.5


def test_one_that_is_safe_in_this_process_needs_no_worker() -> None:
    env = EnvConfig(dataset="arithmetic", reward="exact", reward_second_opinion="last_number")
    task = make_task(env)
    assert judges_in_process(task)
    verdict = make_judge(task)(Completion("I say 2."), example(GOLD))
    assert (verdict.score, verdict.parts["second_opinion"]) == (1.0, 1.0)
    unsafe = make_task(
        EnvConfig(dataset="arithmetic", reward="exact", reward_second_opinion="strict_math_verify")
    )
    assert not judges_in_process(unsafe)


@pytest.mark.parametrize(("options", "message"), [
    ({"reward_second_opinion": ""}, "give the name of a reward"),
    ({"reward_second_opinion": "math", "reward": "math"}, "is env.reward itself"),
    ({"reward_second_opinion": "math", "reward": ["exact", "boxed"]}, "name one reward"),
])  # fmt: skip
def test_what_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnvConfig(dataset="math", **options)


@pytest.mark.parametrize(("name", "message"), [
    ("mathverify", r"^env\.reward_second_opinion='mathverify' is not a known reward; known: .*math_verify"),
    (f"{HERE}:absent", r"^env\.reward_second_opinion"),
])  # fmt: skip
def test_an_unknown_name_is_one_message_before_any_data_is_read(name: str, message: str) -> None:
    (problem,) = option_problems(configured(f"env.reward_second_opinion={name}"))
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(problem)
