"""Tests of the settings of `env.judge` and `env.reward_model`."""

from pathlib import Path

import pytest

from config.schema.config import Config
from config.schema.errors import ConfigError
from envs.rewards import find_rewards
from tests.script_runner import compose_run_config

JUDGE = ("env.judge.url=http://127.0.0.1:8000/v1", "env.judge.model=judge")


def config(*overrides: str) -> Config:
    return compose_run_config("env.dataset=arithmetic", *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("env.reward=judge",), "env.reward=judge: env.judge.url is unset; set env.judge.url=http://HOST:PORT/v1"),
        (("env.reward=[exact,judge]", JUDGE[0]), "env.judge.model is unset; set env.judge.model=NAME"),
        (("env.reward=judge", "env.judge.url=localhost:8000"), "env.judge.url=localhost:8000: not the address of a"),
        (JUDGE, "env.judge.url=http://127.0.0.1:8000/v1: no reward is called judge; set env.reward=judge"),
        (("env.reward=exact", "env.judge.scale=5"), "env.judge.scale=5: no reward is called judge"),
        (("env.reward=judge", *JUDGE, "env.judge.rubric_file=absent.md"), "env.judge.rubric_file=absent.md: cannot be"),
        (("env.reward=judge", *JUDGE, "env.judge.rubric=' '"), "env.judge.rubric: the rubric is empty"),
        (("env.reward=judge", *JUDGE, "env.judge.rubric=a", "env.judge.rubric_file=b"), "are both set"),
        (("env.reward=judge", *JUDGE, "env.judge.scale=0"), "env.judge.scale=0: must be at least 1"),
        (("env.reward=judge", *JUDGE, "env.judge.timeout_s=0"), "env.judge.timeout_s=0.0: must be above 0"),
        (("env.reward=judge", *JUDGE, "env.judge.requests_per_minute=0"), "env.judge.requests_per_minute=0.0: must be"),
        (("env.reward=judge", *JUDGE, "env.fallback_reward=exact"), "such as env.reward=[exact,judge]"),
        (("env.reward=exact", "env.fallback_reward=judge"), "env.fallback_reward=judge with env.reward=exact"),
        (("env.reward=judge", *JUDGE, "env.reward_weights={accuracy: 1}"), "the only component of env.reward=judge is"),
        (("env.reward=reward_model",), "env.reward_model.name is unset; set env.reward_model.name=FOLDER"),
        (("env.reward=exact", "env.reward_model.name=f"), "env.reward_model.name=f: no reward is called reward_model"),
        (("env.reward_model.dtype=int8",), "env.reward_model.dtype='int8': choose one of float32, bfloat16"),
        (("env.reward=jugde",), "no such reward; choose one of"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find_rewards(config(*overrides).env)
    assert message in str(refused.value)


def test_unreadable_rubrics_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rubric.md"
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match=r"env.judge.rubric_file=.*cannot be read .*UTF-8"):
        config("env.reward=judge", *JUDGE, f"env.judge.rubric_file={file}")
    file.write_text("Only the sum counts.")
    assert config("env.reward=judge", *JUDGE, f"env.judge.rubric_file={file}").env.judge.read_rubric() == (
        "Only the sum counts."
    )


@pytest.mark.parametrize(
    "place",
    [
        ("env.reward=[exact,judge]", "env.reward_weights=[1,0.5]"),
        ("eval.sets={held:{dataset:arithmetic,reward:judge}}",),
        ("env.dataset=mixture", "env.mixture={arithmetic:{reward:[exact,judge]},countdown:1}"),
    ],
    ids=["list", "evaluation set", "mixture"],
)
def test_a_judge_may_stand_in_training_evaluation_or_mixture(place: tuple[str, ...]) -> None:
    assert "judge" in config(*JUDGE, *place).reward_names


def test_an_evaluation_set_inherits_the_judge() -> None:
    settings = config("env.reward=judge", *JUDGE, "eval.sets={held:{dataset:arithmetic}}")
    env = settings.eval.sets["held"].env("eval.sets.held", settings.env)
    assert env.reward == "judge" and env.judge == settings.env.judge
    other = settings.eval.sets["held"].__class__(dataset="countdown").env("eval.sets.other", settings.env)
    assert other.reward is None
