"""Tests of `eval.sets`: bad values, and settings inherited from training."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from config.schema.evaluation import EvalSetConfig
from tests.config.test_schema import make_config, quickstart_error_message


@pytest.mark.parametrize(("override", "expected"), [
    ("eval.sets={a:{dataset:x,tmperature:2}}", r"eval\.sets\.a\.tmperature: no such .*did you mean temperature"),
    ("eval.sets={a:{dataset:x,wxyz:2}}", r"eval\.sets\.a\.wxyz: no such .*choose one of dataset, data_files"),
    ("eval.sets={a:{dataset:x,n:lots}}", r"eval\.sets\.a\.n: Value 'lots'"),
    ("eval.sets={a:{n:2}}", r"eval\.sets\.a\.dataset: no value"),
    ("eval.sets={a:3}", r"eval\.sets\.a=3: give the fields"),
    ("eval.sets={a/b:{dataset:x}}", r"eval\.sets\.a/b: the name of a set becomes the name of a folder"),
    ("eval.sets={a:{dataset:x,n:0}}", r"eval\.sets\.a\.n=0: must be at least 1"),
    ("eval.sets={a:{dataset:x,top_p:2}}", r"eval\.sets\.a\.top_p=2\.0: must lie in"),
    ("eval.sets={a:{dataset:x,min_p:2}}", r"eval\.sets\.a\.min_p=2\.0: must lie in"),
    ("eval.sets={a:{dataset:x,temperature:-1}}", r"eval\.sets\.a\.temperature=-1\.0"),
    ("eval.sets={a:{dataset:x,n:2,temperature:0}}", r"the same completion 2 times"),
    ("eval.frequency=3", r"eval\.frequency=3: there are no evaluation sets; set eval\.sets"),
    ("eval.frequency=-3", r"eval\.frequency=-3: must be at least 0"),
    ("run=eval", r"run=eval: there are no evaluation sets; set eval\.sets"),
])  # fmt: skip
def test_bad_sets_are_named(override: str, expected: str) -> None:
    text = quickstart_error_message(override)
    assert re.search(expected, text), text


def test_a_set_can_be_changed_key_by_key() -> None:
    config = make_config("grpo_quickstart", "eval.sets={a:{dataset:x,n:2}}", "eval.sets.a.n=3", "eval.sets.b.dataset=y")
    assert config.eval.sets == {"a": EvalSetConfig("x", n=3), "b": EvalSetConfig("y")}


def test_free_keys_need_no_plus() -> None:
    assert make_config("grpo_quickstart", "env.options.anything=7").env.options["anything"] == 7


def test_the_engines_hold_the_longest_response_of_all() -> None:
    config = make_config("grpo_quickstart", "eval.sets={a:{dataset:x,max_tokens:90},b:{dataset:x}}")
    assert config.longest_response == 90
    assert config.max_model_len == config.env.max_prompt_tokens + 90
    assert "set inference_model.max_model_len=" in quickstart_error_message(
        "eval.sets={a:{dataset:x,max_tokens:90}}", "inference_model.max_model_len=60"
    )


def test_the_same_data_set_inherits_and_another_does_not() -> None:
    training = EnvConfig(
        dataset="x", data_files={"train": "a", "test": "b"}, options={"size": 3}, system_prompt="Think.",
        reward="boxed", reward_weights={"format": 0.1}, repeats=16,
    )  # fmt: skip
    same = EvalSetConfig("x", n=2, options={"depth": 1}).env("eval.sets.a", training)
    assert (same.data_files, same.split, same.repeats) == ({"train": "a", "test": "b"}, "test", 2)
    assert same.options == {"size": 3, "depth": 1}
    assert (same.system_prompt, same.reward, same.reward_weights) == ("Think.", "boxed", {"format": 0.1})
    other = EvalSetConfig("y").env("eval.sets.b", training)
    assert (other.data_files, other.options, other.system_prompt) == (None, {}, None)
    assert (other.reward, other.reward_weights) == (None, None)
    assert other.max_prompt_tokens == training.max_prompt_tokens
    own = EvalSetConfig("y", reward="dapo", system_prompt="Box it.").env("eval.sets.b", training)
    assert (own.reward, own.system_prompt) == ("dapo", "Box it.")


def test_a_held_out_share_is_evaluated_on() -> None:
    training = EnvConfig(dataset="x", data_files="rows.jsonl", holdout=0.1)
    env = EvalSetConfig("x").env("eval.sets.a", training)
    assert (env.data_files, env.holdout, env.split) == ("rows.jsonl", 0.1, "test")
    assert EvalSetConfig("x", data_files="other.jsonl").env("eval.sets.a", training).holdout == 0.0


def test_a_held_out_share_of_the_hub_is_evaluated_on_too() -> None:
    training = EnvConfig(dataset="ifeval", holdout=0.1)
    assert EvalSetConfig("ifeval").env("eval.sets.a", training).holdout == 0.1
    assert EvalSetConfig("gsm8k").env("eval.sets.a", training).holdout == 0.0
    assert EvalSetConfig("ifeval", data_files="other.jsonl").env("eval.sets.a", training).holdout == 0.0


@pytest.mark.parametrize("more", [{}, {"holdout": 0.0}])
def test_a_member_of_one_split_is_not_evaluated_by_accident(more: dict[str, float]) -> None:
    member = {"dataset": "jsonl", "data_files": "rows.jsonl"}
    training = EnvConfig(dataset="mixture", mixture={"mine": member | more, "gsm8k": 1})
    with pytest.raises(ConfigError, match=r"env\.mixture\.mine\.data_files=rows\.jsonl holds one split.*\.mine\.hold"):
        EvalSetConfig("mixture").env("eval.sets.a", training)
    assert EvalSetConfig("mixture", split="train").env("eval.sets.a", training).split == "train"
    unread = EnvConfig(dataset="arithmetic", mixture={"mine": member})
    assert EvalSetConfig("arithmetic").env("eval.sets.a", unread).split == "test"
    for own in (member | {"holdout": 0.1}, member | {"data_files": {"train": "a", "test": "b"}}):
        EvalSetConfig("mixture").env("eval.sets.a", replace(training, mixture={"mine": own}))


def test_prompts_of_training_are_not_evaluated_by_accident() -> None:
    training = EnvConfig(dataset="x", data_files="rows.jsonl")
    for files in (None, "rows.jsonl", ["rows.jsonl"], "./rows.jsonl", str(Path("rows.jsonl").absolute())):
        with pytest.raises(ConfigError, match=r"split=test: env\.data_files=\S*rows\.jsonl\S* holds one split"):
            EvalSetConfig("x", data_files=files).env("eval.sets.a", training)
    assert EvalSetConfig("x", split="train").env("eval.sets.a", training).data_files == "rows.jsonl"
    assert EvalSetConfig("x", data_files="other.jsonl").env("eval.sets.a", training).data_files == "other.jsonl"
