"""Composing from what is kept against composing anew."""

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from config.composition import CONFIG_DIR, register_schema
from tests.composed import composed

VALUES = ("env.num_envs=4", "train_model.lora.r=3", "env.options.max_operand=3")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        VALUES,
        ("policy=dapo", "policy.overlong_cache=8", *VALUES),
        (*VALUES, "policy.overlong_cache=8", "policy=dapo"),
        ("++env.options.more=[1,2]", "env.options={more: 2}", "device=cpu"),
        ("eval.sets={held_out:{dataset:arithmetic,n:4}}", "train.seed=1", "train.seed=2"),
        ("policy=grpo", "policy.clip_epsilon_low=0.1", "optimizer.lr=1e-3"),
    ],
)
def test_it_is_what_hydra_composes(overrides: tuple[str, ...]) -> None:
    register_schema()
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        expected = compose("grpo_quickstart", overrides=list(overrides))
    for _ in range(2):
        ours = composed("grpo_quickstart", *overrides)
        assert OmegaConf.to_object(ours) == OmegaConf.to_object(expected)
        assert OmegaConf.to_yaml(ours) == OmegaConf.to_yaml(expected)


def test_what_is_kept_stays_as_it_is() -> None:
    ours = composed("grpo_quickstart", *VALUES)
    ours.env.repeats = 77
    assert composed("grpo_quickstart").env.repeats != 77 and composed("grpo_quickstart").env.num_envs != 4


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ConfigCompositionException):
        composed("grpo_quickstart", "env.number_of_envs=3")
