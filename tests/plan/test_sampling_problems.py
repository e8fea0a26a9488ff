"""Tests of problems with settings of the sampling."""

from pathlib import Path

import pytest

from config.cli.composition import to_config
from config.schema.errors import ConfigError
from tests.config_composition import compose_config
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan import Plan
from torchgrpo.plan.problems import check_plan

MACHINE = Machine(2, 80.0, 512.0, 4000.0, "0.32.0", ("0", "1"))


def plan_of(*overrides: str) -> Plan:
    config = to_config(compose_config("grpo_gsm8k", "model.name=Qwen/Qwen2.5-0.5B-Instruct", *overrides))
    return make_plan(config, False, MACHINE, Path())


@pytest.mark.parametrize("key", ["inference_model.temperature", "inference_model.temperature_end", "eval"])
def test_temperatures_that_vllm_does_not_sample_at(key: str) -> None:
    for number in ("0.01", "2.0", "0.009", "2.1"):
        setting = f"+eval.sets.eval={{dataset:gsm8k,temperature:{number}}}" if key == "eval" else f"{key}={number}"
        if number in ("0.009", "2.1"):
            with pytest.raises(
                ConfigError, match=rf"={number}: vLLM samples at temperatures from 0\.01 to 2, or greed"
            ):
                check_plan(plan_of(setting))
            check_plan(plan_of(setting, "inference_model.backend=transformers"))
        else:
            check_plan(plan_of(setting))
