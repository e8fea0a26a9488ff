"""Tests of `env.fallback_reward`: it is called after a wrong verdict, and its failures are harmless."""

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.group import Verdict
from envs.option_checks import option_problems
from envs.reward_workers.service import RewardService
from envs.reward_workers.task_scorer import can_score_in_process, make_scorer
from envs.task import Completion, Example, make_task
from tests.envs.test_verifiers_simplified import NOT_ELEVEN
from tests.script_runner import compose_run_config

REWARDS_MODULE = "tests.envs.fallback_rewards"
REFERENCE = "2"


def example(answer: str) -> Example:
    return Example(({"role": "user", "content": "?"},), answer, 0)


def score_texts(fallback: str, texts: list[str], answer: str = REFERENCE, **options: object) -> list[Verdict]:
    given = {"reward": "boxed", "reward_workers": 1, "reward_timeout_s": 20.0, **options}
    env = EnvConfig(dataset="arithmetic", fallback_reward=fallback, **given)
    with closing(RewardService(make_task(env), env)) as service:
        verdicts = service.score([Completion(text) for text in texts], [example(answer)] * len(texts))
        assert service.metrics()["reward/workers_replaced"] == 0
        return verdicts


def test_the_library_accepts_answers_that_our_rules_cannot_read_but_no_unevaluated_ones() -> None:
    reference = "\\gcd(a,b)+1"
    right, same, wrong, sum_ = score_texts(
        "strict_math_verify",
        ["\\boxed{1+\\gcd(a,b)}", f"\\boxed{{{reference}}}", "\\boxed{\\gcd(a,b)+2}", "\\boxed{\\gcd(a,b)}"],
        reference,
    )
    assert [verdict.score for verdict in (right, same, wrong, sum_)] == [1.0, 1.0, 0.0, 0.0]
    assert [verdict.components["fallback_reward"] for verdict in (right, same, wrong, sum_)] == [1.0, 0.0, 0.0, 0.0]
    assert right.components["accuracy"] == 1.0
    assert {verdict.components["fallback_reward_failed"] for verdict in (right, same, wrong, sum_)} == {0.0}


def test_an_expression_that_still_has_to_be_evaluated_stays_wrong() -> None:
    given = [text for texts in NOT_ELEVEN.values() for text in texts]
    verdicts = score_texts("strict_math_verify", [f"\\boxed{{{text}}}" for text in given], "11")
    assert [text for text, verdict in zip(given, verdicts, strict=True) if verdict.score] == []


@pytest.mark.parametrize("reward", ["die", "fail", "eat"])
def test_a_fallback_that_fails_leaves_the_main_verdict(reward: str) -> None:
    texts = ["\\boxed{3}", "\\boxed{2}", "\\boxed{4}"]
    verdicts = score_texts(f"{REWARDS_MODULE}:{reward}", texts)
    assert [(each.score, each.outcome) for each in verdicts] == [(0.0, "scored"), (1.0, "scored"), (0.0, "scored")]
    assert [each.components["fallback_reward_failed"] for each in verdicts] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("reward", ["hang", "spin"])
def test_a_fallback_that_hangs_leaves_the_main_verdict(reward: str) -> None:
    fallback = f"{REWARDS_MODULE}:{reward}"
    env = EnvConfig(dataset="arithmetic", reward="boxed", fallback_reward=fallback, reward_timeout_s=1.0)
    judge = make_scorer(make_task(env))
    verdicts = [judge(Completion(f"\\boxed{{{number}}}"), example(REFERENCE)) for number in (3, 2, 4)]
    assert [(each.score, each.outcome) for each in verdicts] == [(0.0, "scored"), (1.0, "scored"), (0.0, "scored")]
    assert [each.components["fallback_reward_failed"] for each in verdicts] == [1.0, 0.0, 1.0]


def test_a_hanging_fallback_ends_before_its_worker() -> None:
    """A fifth of the deadline remains for the worker to answer, here 4 s."""
    (verdict,) = score_texts(f"{REWARDS_MODULE}:hang", ["\\boxed{3}"], reward_timeout_s=20.0)
    assert (verdict.score, verdict.outcome, verdict.components["fallback_reward_failed"]) == (0.0, "scored", 1.0)


def test_the_main_verdict_stands_if_no_process_can_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    env = EnvConfig(dataset="arithmetic", reward="boxed", fallback_reward=f"{REWARDS_MODULE}:half")
    judge = make_scorer(make_task(env))

    def full() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", full)
    before = os.listdir("/proc/self/fd")
    verdict = judge(Completion("\\boxed{3}"), example(REFERENCE))
    assert (verdict.score, verdict.components["fallback_reward_failed"]) == (0.0, 1.0)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_the_fallback_is_called_only_after_a_wrong_verdict_and_counts_only_if_right(tmp_path: Path) -> None:
    log_file = tmp_path / "asked"
    os.environ["ASKED"] = str(log_file)
    try:
        verdicts = score_texts(f"{REWARDS_MODULE}:half", ["\\boxed{2}", "\\boxed{half}", "\\boxed{yes}"])
    finally:
        del os.environ["ASKED"]
    assert log_file.read_text().split() == ["\\boxed{half}", "\\boxed{yes}"]
    assert [each.score for each in verdicts] == [1.0, 0.0, 3.0]
    assert [each.components["fallback_reward"] for each in verdicts] == [0.0, 0.0, 1.0]


def test_component_weights_apply_to_the_final_verdict() -> None:
    weights = {"accuracy": 1.0, "format": 0.5}
    (verdict,) = score_texts(f"{REWARDS_MODULE}:half", ["\\boxed{yes}"], reward_weights=weights)
    assert verdict.score == 1.5


def test_a_fallback_that_is_safe_in_this_process_needs_no_worker() -> None:
    env = EnvConfig(dataset="arithmetic", reward="exact", fallback_reward="last_number")
    task = make_task(env)
    assert can_score_in_process(task)
    verdict = make_scorer(task)(Completion("I say 2."), example(REFERENCE))
    assert (verdict.score, verdict.components["fallback_reward"]) == (1.0, 1.0)
    unsafe = make_task(EnvConfig(dataset="arithmetic", reward="exact", fallback_reward="strict_math_verify"))
    assert not can_score_in_process(unsafe)


@pytest.mark.parametrize(("options", "message"), [
    ({"fallback_reward": ""}, "give the name of a reward"),
    ({"fallback_reward": "math", "reward": "math"}, "is the same as env.reward"),
    ({"fallback_reward": "math", "reward": ["exact", "boxed"]}, "name one reward"),
])  # fmt: skip
def test_wrong_combinations_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnvConfig(dataset="math", **options)


@pytest.mark.parametrize(("name", "message"), [
    ("mathverify", r"^env\.fallback_reward='mathverify': no such reward; choose one of .*math_verify"),
    (f"{REWARDS_MODULE}:absent", r"^env\.fallback_reward"),
])  # fmt: skip
def test_an_unknown_name_is_one_message_before_any_data_is_read(name: str, message: str) -> None:
    (problem,) = option_problems(compose_run_config(f"env.fallback_reward={name}"))
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(problem)
