"""Tests of the policy section: presets, and messages about bad values."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from config.schema.errors import ConfigError
from config.schema.policy import CHOICES, OBJECTIVES, PRESETS, PolicyConfig, load_policy
from config.schema.trust_region import CHOICES as REGION_CHOICES
from config.schema.trust_region import TrustRegion

NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))
ROOT = Path(__file__).resolve().parents[2]
TEACHER = {"distill_coef": 1.0, "kl_coef": 0.0}
TEACHER_PROMPT = "{prompt} It is {answer}."
"""A valid `policy.teacher_prompt`."""


def test_the_presets_are_there() -> None:
    papers = "cispo dapo dr_grpo grpo gspo ppo_dual_clip reinforce rloo"
    papers += " adaptive_entropy clip_cov dppo dppo_kl echo gdpo gmpo high_entropy icepop kl_cov kpop luspo maxrl"
    papers += " mis_sequence opd opsd opsm pass_at_k reinforce_pp reinforce_pp_baseline sapo unbiased_kl vespo"
    systems = "coati_dapo coati_grpo megatron nanochat torchrl trl verl"
    assert set(NAMES) == {*papers.split(), *(f"compat_{system}" for system in systems.split())}


@pytest.mark.parametrize("name", NAMES)
def test_preset_loads_and_states_only_what_differs(name: str) -> None:
    policy = load_policy(name)
    assert policy.name == name
    default = PolicyConfig()
    stated = OmegaConf.to_container(OmegaConf.load(PRESETS / f"{name}.yaml"))
    if "trust_regions" in stated:
        stated["trust_regions"] = [TrustRegion(**region) for region in stated["trust_regions"]]
    for key, value in stated.items():
        assert getattr(policy, key) == value
        assert key in ("name", "kl_coef") or value != getattr(default, key), f"{key} is the default"


def test_overrides() -> None:
    policy = load_policy("dapo", kl_coef=0.5, filter_range=None, dynamic_batching=False)
    assert (policy.kl_coef, policy.filter_range, policy.clip_epsilon_high) == (0.5, None, 0.28)


@pytest.mark.parametrize(("overrides", "message"), [
    ({"objective": "clipped"}, r"policy.objective='clipped'.*choose one of cispo, clamp, clip"),
    ({"klcoef": 0.1}, r"policy.klcoef=0.1: no such field; choose one of .*kl_coef"),
    ({"kl_coef": "much"}, r"much.*could not be converted to Float"),
    ({"kl_coef": -0.1}, r"policy.kl_coef=-0.1.*0 or above"),
    ({"kl_coef": float("nan")}, r"policy.kl_coef=nan"),
    ({"clip_epsilon_low": -1}, r"clip_epsilon_low=-1"),
    ({"dual_clip": 0.5}, r"dual_clip=0.5.*above 1"),
    ({"ratio_max": 0.5}, r"ratio_max=0.5.*at least 1"),
    ({"mismatch_floor": 3.0}, r"mismatch_floor=3.0.*at most policy.mismatch_cap=2.0"),
    ({"mismatch": "truncate"}, r"policy.mismatch=truncate.*set policy.old_log_prob=trainer"),
    ({"ratio": "none"}, r"policy.objective=clip.*set policy.objective=none"),
    ({"objective": "geometric", "ratio": "sequence"}, r"policy.ratio=sequence; set policy.ratio=token"),
    ({"dynamic_batching": True}, r"set policy.filter_range"),
    ({"filter_range": [0.9, 0.1]}, r"filter_range=\[0.9, 0.1\].*low < high"),
    ({"reward_coef": -1.0}, r"reward_coef=-1.0.*0 or above"),
    ({"distill_coef": float("inf")}, r"distill_coef=inf.*finite"),
    ({"distill_clamp": 0.0}, r"distill_clamp=0.0.*above 0"),
    ({"distill_log_prob": "now"}, r"distill_log_prob='now'.*choose one of old, current"),
    ({"distill_estimator": "k4"}, r"distill_estimator='k4'.*choose one of k1"),
    ({"reward_coef": 0.0, "kl_coef": 0.0},
     r"reward_coef=0.0.*the objective has no term to train on; set .*distill_coef=1"),
    ({"reward_coef": 0.0, "filter_range": [0.0, 1.0]}, r"filter_range=\[0.0, 1.0\].*reward_coef=0; set"),
    ({"reward_coef": 0.0, "kl_placement": "reward"}, r"kl_placement=reward.*set policy.kl_placement=loss"),
    ({"distill_coef": 1.0, "objective": "geometric"}, r"objective=geometric.*set policy.distill_coef=0"),
    ({"teacher_prompt": "{prompt}", **TEACHER}, r"teacher_prompt={prompt}.*lacks {answer}"),
    ({"teacher_prompt": "", **TEACHER}, r"teacher_prompt= .*lacks {prompt} and {answer}"),
    (
        {"teacher_prompt": TEACHER_PROMPT, **TEACHER, "kl_coef": 0.1},
        r"kl_coef=0.1.*sees the reference answer; set policy.kl_coef=0",
    ),
    ({"teacher_prompt": TEACHER_PROMPT, "kl_coef": 0.0}, r"distill_coef=0.0.*no teacher reads policy.teacher_prompt"),
    ({"filter_attempts": 0}, r"filter_attempts=0.*above 0"),
    ({"log_ratio_min": 1.0}, r"must enclose 0"),
    ({"entropy_coef": float("inf")}, r"entropy_coef=inf.*finite"),
    ({"selected_share": 1.5}, r"selected_share=1.5.*at most 1"),
    ({"discount": -0.1}, r"discount=-0.1.*0 or above"),
    ({"covariance_range": [5.0, 1.0]}, r"covariance_range=\[5.0, 1.0\].*low < high"),
    ({"trust_regions": [{"measure": "tw", "high": 1}]}, r"trust_regions\[0\] .*measure='tw': choose .*tv"),
    ({"trust_regions": [{"measure": "tv"}]}, r"trust_regions\[0\].*low=None, high=None: set low or high"),
    ({"trust_regions": [{"low": 2.0, "high": 1.0}]}, r"low=2.0, high=1.0.*low <= high"),
    ({"trust_regions": [{"low": -1.0}]}, r"low=-1.0.*must be at least 0"),
    ({"trust_regions": [{"between": "old_engine", "high": 2}]}, r"set policy.old_log_prob=trainer"),
    ({"trust_regions": [{"hihg": 2}]}, r"hihg"),
])  # fmt: skip
def test_bad_values(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_policy("grpo", **overrides)


def test_a_valid_teacher_prompt_is_accepted() -> None:
    assert load_policy("grpo", teacher_prompt=TEACHER_PROMPT, **TEACHER).teacher_prompt == TEACHER_PROMPT
    assert load_policy("opsd").teacher_prompt and load_policy("opd").teacher_prompt is None


@pytest.mark.parametrize(("fields", "first"), [
    ({}, False), ({"kl_placement": "reward"}, True), ({"kl_placement": "reward", "kl_coef": 0.0}, False),
    ({"distill_coef": 1.0}, False), ({"distill_coef": 1.0, "select_tokens": "kl_covariance"}, True),
    ({"select_tokens": "kl_covariance"}, False),
])  # fmt: skip
def test_when_the_reference_scores_first(fields: dict[str, Any], first: bool) -> None:
    assert PolicyConfig(**fields).scores_reference_first == first


def test_unknown_preset() -> None:
    with pytest.raises(ConfigError, match=r"policy=grop: no such preset; choose one of .*cispo.*grpo"):
        load_policy("grop")


def test_every_choice_is_known_to_the_code() -> None:
    from torchgrpo.training import (
        advantage,
        aggregation,
        dynamic_sampling,
        kl,
        loss_inputs,
        loss_terms,
        policy_terms,
        token_weights,
        trust_region,
    )

    assert set(advantage.BASELINES) == set(CHOICES["baseline"])
    assert set(advantage.SCALES) == set(CHOICES["scale"])
    assert set(advantage.DIVISORS) == set(CHOICES["epsilon_rule"])
    assert set(dynamic_sampling.FILTER_STATISTICS) == set(CHOICES["filter_on"])
    assert set(aggregation.ROW_WEIGHTS) == set(CHOICES["aggregation"])
    assert {"same", *aggregation.ROW_WEIGHTS} == set(CHOICES["kl_aggregation"])
    assert set(kl.ESTIMATORS) == set(CHOICES["kl_estimator"]) == set(CHOICES["distill_estimator"])
    assert set(loss_terms.KL_IMPORTANCE) == set(CHOICES["kl_importance"])
    assert set(loss_inputs.LOG_RATIOS) == set(CHOICES["ratio"])
    assert all(isinstance(OBJECTIVES.load(name), policy_terms.PolicyTerm) for name in OBJECTIVES.names)
    assert {"clip", "cispo", "none", "vespo"} < set(OBJECTIVES.names)
    assert set(token_weights.MISMATCH_LEVELS) == set(CHOICES["mismatch_level"])
    assert {"none", *token_weights.MISMATCH_BOUNDS} == set(CHOICES["mismatch"])
    chosen = token_weights.SELECTIONS
    assert set(chosen) == set(token_weights.SELECTION_EFFECTS) == set(CHOICES["select_tokens"])
    assert set(advantage.WHITENING_WEIGHTS) == set(CHOICES["whiten"])
    assert set(advantage.WHITENING_DIVISORS) == set(CHOICES["whiten_epsilon_rule"])
    assert {"none", *advantage.VARIANCE_CORRECTIONS} == set(CHOICES["whiten_scale"])
    regions = REGION_CHOICES
    assert set(trust_region.MEASURES) == set(regions["measure"])
    assert set(trust_region.POLICY_PAIRS) == set(regions["between"])
    assert set(trust_region.LEVELS) == set(regions["level"])
    assert set(trust_region.SIDES) == set(regions["side"])


def test_no_preset_name_decides_anything() -> None:
    for folder in ("torchgrpo", "config"):
        for path in (ROOT / folder).rglob("*.py"):
            assert "policy.name ==" not in path.read_text(), path
