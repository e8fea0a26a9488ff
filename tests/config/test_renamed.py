"""Tests of the former names of keys, values, metrics, events and ledger fields.

The command line rejects a former name with the new one; files of an earlier run are read under the new names.
"""

from pathlib import Path

import orjson
import pytest

from config.cli.composition import to_config
from config.cli.error_messages import known_keys, user_message
from config.cli.saved_settings import saved_config, saved_settings
from config.schema.config import Config
from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from config.schema.former_names import EVENTS, KEYS, METRICS, VALUES
from envs.task import make_task
from tests.config_composition import compose_config
from torchgrpo.monitoring.events import read_events
from torchgrpo.monitoring.ledger_storage import parse_record
from torchgrpo.monitoring.metric_table import pattern_of
from torchgrpo.monitoring.metrics_file import MetricsFile


def message(*overrides: str) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (any error: its message is the subject)
        to_config(compose_config("grpo_quickstart", *overrides))
    return user_message(caught.value)


@pytest.mark.parametrize("key", KEYS)
def test_a_former_key_names_the_new_one(key: str) -> None:
    assert message(f"{key}=1") == f"{key}: the key is now called {KEYS[key]}; set {KEYS[key]}=VALUE"


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in VALUES for value in VALUES[key]])
def test_a_former_value_names_the_new_one(key: str, value: str) -> None:
    assert (
        message(f"{key}={value}")
        == f"{key}={value}: the value is now called {VALUES[key][value]}; set {key}=" + (VALUES[key][value])
    )


def test_a_former_key_of_a_mixture_member_names_the_new_one() -> None:
    env = EnvConfig(dataset="mixture", mixture={"gsm8k": {"reward_second_opinion": "exact"}})
    with pytest.raises(ConfigError, match=r"gsm8k\.reward_second_opinion: the key is now called fallback_reward; set"):
        make_task(env)


def test_new_names_exist_and_former_ones_do_not() -> None:
    keys = known_keys(Config)
    assert set(KEYS.values()) | set(VALUES) <= set(keys) and not set(KEYS) & set(keys)
    assert all(pattern_of(new) == new and pattern_of(old) != old for old, new in METRICS.items())


def test_settings_of_an_earlier_run_compose(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text(
        "run: rehearse\nstep: null\nto: folder\ncheckpoint: null\nhub: null\n"
        "env: {dataset: mixture, samples: null, mixture: {gsm8k: {reward_second_opinion: exact}, math: 2}}\n"
        "model: {name: tiny}\nplan: {gpus: 2}\n"
        "train: {on_alarm: say}\npolicy: {count_dropped: false, reward_parts: apart, baseline: runner_up}\n"
    )
    config = saved_config(tmp_path)
    assert (config.run, config.export.to, config.machine.gpus) == ("dry_run", "folder", 2)
    assert config.env.mixture["gsm8k"] == {"fallback_reward": "exact"}
    assert config.train.on_alarm == "log" and not config.policy.masked_in_denominator
    assert (config.policy.reward_components, config.policy.baseline) == ("separate", "second_best")
    settings = saved_settings(tmp_path)
    assert settings is not None and "plan" not in settings and "samples" not in settings.env


def test_rows_events_and_groups_of_an_earlier_run_have_the_new_names(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"optimizer_step": 1, "mismatch/gap": 0.5, "prompts/left_out": 2}\n')
    (row,) = MetricsFile(tmp_path / "metrics.jsonl").read_rows()
    assert row == {"optimizer_step": 1, "logprob_diff/mean": 0.5, "prompts/too_long": 2}
    lines = [orjson.dumps({"event": event, "optimizer_step": 0}) for event in EVENTS]
    (tmp_path / "events.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    assert [event["event"] for event in read_events(tmp_path)] == list(EVENTS.values())
    record = parse_record(b'{"in_place_of": 3, "begun": 1.0, "drawn": 2.0, "judged": 3.0, "completions": []}')
    assert record == {"replaces": 3, "started_at": 1.0, "sampled_at": 2.0, "scored_at": 3.0, "completions": []}
