"""Tests that the shipped experiments compose, and that bad input gives one message."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from config.cli.composition import to_config
from config.cli.error_messages import user_message
from config.schema.config import Config
from config.schema.errors import ConfigError
from config.schema.logging import LoggingConfig
from config.schema.policy import load_policy
from tests.config_composition import compose_config

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted(path.stem for path in (ROOT / "config").glob("grpo_*.yaml"))


def make_config(name: str, *overrides: str) -> Config:
    return to_config(compose_config(name, *overrides))


def quickstart_error_message(*overrides: str) -> str:
    """Returns the error message for the quickstart with these overrides."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  (the test checks the message of any error)
        make_config("grpo_quickstart", *overrides)
    return user_message(caught.value)


def test_a_policy_without_a_teacher_is_told_of_both_ways_to_one() -> None:
    for name in ("opd", "opsd"):
        text = quickstart_error_message(f"policy={name}", "policy.teacher_prompt=null")
        assert f"(policy {name}) without a teacher" in text and "Set ref_model.name" in text
        assert "set policy=opsd, whose policy.teacher_prompt shows" in text


def test_distillation_alone_needs_no_group() -> None:
    for overrides in (("policy=opd", "ref_model.name=teacher"), ("policy=opsd",)):
        assert make_config("grpo_quickstart", "env.repeats=1", *overrides).policy.distill_coef == 1
    text = quickstart_error_message("policy=opd", "ref_model.name=teacher", "policy.reward_coef=1", "env.repeats=1")
    assert "env.repeats=1" in text and "policy.reward_coef=0" in text


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_shipped_experiment_composes(name: str) -> None:
    config = make_config(name)
    assert config.total_iterations >= 1
    assert config.env.dataset


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_says_only_what_differs(name: str) -> None:
    """Checks that each setting of the file differs from its default."""
    settings = yaml.safe_load((ROOT / "config" / f"{name}.yaml").read_text())
    base, *_ = defaults = settings.pop("defaults")
    presets = [entry["override policy"] for entry in defaults if isinstance(entry, dict)]
    without = compose_config(base, *(f"policy={preset}" for preset in presets))
    for section, fields_of in settings.items():
        if not isinstance(fields_of, dict):
            assert without[section] != fields_of, section
            continue
        for key, value in fields_of.items():
            assert OmegaConf.is_missing(without[section], key) or without[section][key] != value, f"{section}.{key}"


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("preset", ["dapo", "compat_torchrl"])
def test_no_experiment_changes_a_preset(name: str, preset: str) -> None:
    config = make_config(name, f"policy={preset}")
    assert config.policy == load_policy(preset, constant_length=config.inference_model.max_tokens)


def test_batch_arithmetic() -> None:
    config = make_config(
        "grpo_quickstart", "env.num_envs=6", "env.repeats=4", "train.optim_batch_size=8", "train.epochs=2",
        "train.total_dialog_turns=100",
    )  # fmt: skip
    assert config.completions_per_iteration == 24
    assert config.prompts_per_iteration == 6
    assert config.optim_batch_groups == 2
    assert config.optimizer_steps_per_iteration == 6
    assert config.total_iterations == 4
    assert config.total_optimizer_steps == 24


@pytest.mark.parametrize(("override", "expected"), [
    ("train.epoch=2", r"train\.epoch: no such configuration key; did you mean train\.epochs"),
    ("policy.kl_coeff=0.1", r"policy\.kl_coeff: .*policy\.kl_coef"),
    ("train.epochs=many", r"train\.epochs: .*many"),
    ("train.epochs=0", r"train\.epochs=0: must be at least 1"),
    ("env.repeats=1", r"env\.repeats=1 with policy\.baseline=mean.*policy\.baseline=none"),
    ("train.optim_batch_size=100", r"train\.optim_batch_size=100 does not divide"),
    ("train.optim_batch_size=4", r"not a multiple of env\.repeats=8.*set train\.optim_batch_size=8"),
    ("train.gradient_accumulation_steps=500", r"gradient_accumulation_steps=500 is more than the 256 completions"),
    ("train.dialog_turns_per_batch=99", r"not a multiple of env\.repeats=8.*set train\.dialog_turns_per_batch=96"),
    ("train.total_dialog_turns=8", r"less than one iteration"),
    ("train.wait_timeout_s=0", r"train\.wait_timeout_s=0\.0: must be above 0"),
    ("train.wait_timeout_s=inf", r"train\.wait_timeout_s=inf: must be finite"),
    ("train.wait_timeout_s=nan", r"train\.wait_timeout_s=nan: "),
    ("inference_model.temperature=nan", r"inference_model\.temperature=nan: must be finite"),
    ("policy.log_ratio_max=nan", r"policy\.log_ratio_max=nan: must be finite"),
    ("policy.filter_range=[0,nan]", r"policy\.filter_range=.*nan"),
    ("policy.kl_coef=inf", r"policy\.kl_coef=inf: must be finite"),
    ("optimizer.lr=inf", r"optimizer\.lr=inf: must be finite"),
    ("optimizer.group_lr={head:inf}", r"optimizer\.group_lr\.head=inf: "),
    ("+eval.sets.a={dataset:arithmetic,temperature:nan}", r"eval\.sets\.a\.temperature=nan: "),
    ("env.max_prompt_tokens=0", r"env\.max_prompt_tokens=0: must be at least 1"),
    ("train_model.lora.r=0", r"train_model\.lora\.r=0: must be at least 1"),
    ("train_model.lora.alpha=-1", r"train_model\.lora\.alpha=-1: must be at least 1"),
    ("train_model.lora.dropout=1", r"train_model\.lora\.dropout=1\.0: must be a share"),
    ("logging.sample_frequency=-1", r"logging\.sample_frequency=-1: must be at least 0"),
    ("logging.rollouts_gb=inf", r"logging\.rollouts_gb=inf: must be finite"),
    ("ray.num_cpus_per_engine=0", r"ray\.num_cpus_per_engine=0: must be above 0"),
    ("train.mixed_precision=int8", r"choose one of fp32, bf16, fp16"),
    ("inference_model.max_model_len=10", r"smaller than env\.max_prompt_tokens"),
    ("policy.clip_epsilon_low=-1", r"policy\.clip_epsilon_low=-1"),
    ("train.log_prob_chunk_size=0", r"train\.log_prob_chunk_size=0: must be at least 1"),
    ("inference_model.min_p=2", r"inference_model\.min_p=2\.0: must lie in \[0, 1\]"),
    ("inference_model.stop=['a','']", r"inference_model\.stop=\['a', ''\]: an empty string .*leave it out"),
    ("inference_model.stop=a", r"inference_model\.stop: .*set a list, inference_model\.stop=\[first,second\]"),
    ("inference_model.temperature=0",
     r"inference_model\.temperature=0: greedy .* set inference_model\.temperature=1\.0.*eval\.sets"),
    ("inference_model.temperature_end=0", r"inference_model\.temperature_end=0.*above 0, or null"),
    ("inference_model.temperature_end_at=0", r"inference_model\.temperature_end_at=0.*\(0, 1\]"),
    ("env.oversample=4", r"env\.oversample=4 is less than env\.repeats=8.*set env\.oversample=16"),
    ("run=fly", r"run='fly': choose one of diagnostics, .*train"),
])  # fmt: skip
def test_bad_input_names_the_value_the_place_and_the_remedy(override: str, expected: str) -> None:
    text = quickstart_error_message(override)
    assert re.search(expected, text), text
    assert "Traceback" not in text


def test_the_constant_length_is_the_longest_response_unless_given() -> None:
    assert make_config("grpo_quickstart", "policy=dr_grpo", "inference_model.max_tokens=7").policy.constant_length == 7
    config = make_config("grpo_quickstart", "policy=dr_grpo", "policy.constant_length=9")
    assert config.policy.constant_length == 9


def test_a_missing_value_is_named() -> None:
    assert "model.name" in quickstart_error_message("model.name=???")


def all_fields(config_class: type[Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for field in fields(config_class):
        if is_dataclass(field.type):
            found += all_fields(field.type, f"{prefix}{field.name}.")
        else:
            found.append((prefix, field.name))
    return found


def test_every_field_is_read_by_code_and_documented() -> None:
    code = list(ROOT.glob("*.py"))
    for room in ("config", "envs", "torchgrpo"):
        code += (ROOT / room).rglob("*.py")
    text = "\n".join(path.read_text() for path in code)
    read = {name for pair in re.findall(r"(?<=[\w\])])\.(\w+)|[\"'](\w+)[\"']", text) for name in pair}
    described = r'^    (\w+): [^\n]*\n(?:        [^\n]*\n|    \)\n)*    """'
    documented = set(re.findall(described, text, re.MULTILINE))
    for prefix, name in all_fields(Config):
        assert name in read, f"{prefix}{name}: no code reads it"
        assert name in documented or prefix == "", f"{prefix}{name}"


@pytest.mark.parametrize(("settings", "expected"), [
    ("num_devices=8 num_nodes=3", "num_nodes=3 does not divide the 8 learner ranks"),
    ("num_devices=8 shard_size=16", "shard_size=16 does not divide the 8 learner ranks"),
    ("devices=[0,1] shard_size=3", "shard_size=3 does not divide the 2 learner ranks"),
    ("num_devices=8 context_parallel=3", "context_parallel=3 does not divide the 8 learner ranks"),
    ("context_parallel=2", "context_parallel=2 does not divide the 1 learner ranks (train_model.num_devices)"),
    ("context_parallel=0", "train_model.context_parallel=0: must be at least 1"),
    ("devices=[0,1] num_nodes=2", "train_model.devices=[0, 1] with train_model.num_nodes=2"),
    ("offload=all", "train_model.offload=all with device=cpu"),
    ("offload=disk", "choose one of none, optimizer, all"),
    ("shard_size=0", "train_model.shard_size=0: must be at least 1"),
    ("num_devices=0", "train_model.num_devices=0: must be at least 1"),
    ("prefetch_layers=0", "train_model.prefetch_layers=0: must be at least 1"),
    ("prefetch_layers=3", "train_model.prefetch_layers=3 with train_model.num_devices=1"),
    ("reshard_after_forward=false", "train_model.reshard_after_forward=false with train_model.num_devices=1"),
])  # fmt: skip
def test_invalid_ranks_are_named(settings: str, expected: str) -> None:
    assert expected in quickstart_error_message(*(f"train_model.{setting}" for setting in settings.split()))


@pytest.mark.parametrize(("settings", "expected"), [
    ("train_model.lora.enabled=true train_model.lora.quantization=fp4", "quantization='fp4': choose one of none, nf4"),
    ("train_model.num_devices=2 train.mixed_precision=fp16", "fp16 with train_model.num_devices=2"),
])  # fmt: skip
def test_invalid_precisions_are_named(settings: str, expected: str) -> None:
    assert expected in quickstart_error_message(*settings.split())


@pytest.mark.parametrize(("settings", "expected"), [
    ("train_model.lora.enabled=false", "train_model.lora.enabled=false: 4-bit weights cannot be trained"),
    ("inference_model.lora=adapter", "inference_model.lora=adapter: engines would add the adapter to the unquantized"),
    (
        "train_model.offload=all device=cuda train_model.num_devices=2",
        "train_model.offload=all: the scales of 4-bit weights stay on the GPU",
    ),
    ("run=dry_run",
     "run=dry_run: 4-bit kernels cannot run on tensors without memory; set run=plan to print the "
     "memory that a run needs"),
])  # fmt: skip
def test_invalid_settings_of_a_quantized_base_are_named(settings: str, expected: str) -> None:
    assert f"quantization=nf4 with {expected}" in quickstart_error_message(
        "train_model.lora.enabled=true", "train_model.lora.quantization=nf4", *settings.split()
    )


def test_training_with_the_folder_of_an_earlier_run_is_refused() -> None:
    message = quickstart_error_message("run_dir=runs/first")
    assert message == (
        "run_dir=runs/first: training reads no earlier run; set hydra.run.dir=runs/first for the folder of the new run"
    )


def test_ranks_and_shards() -> None:
    one = make_config("grpo_quickstart").train_model
    assert (one.ranks, one.shards) == (1, 1)
    listed = make_config("grpo_gsm8k", "train_model.devices=[3,1]").train_model
    assert (listed.ranks, listed.shards) == (2, 2)
    hybrid = ("train_model.num_devices=16", "train_model.num_nodes=2", "train_model.shard_size=8")
    groups = make_config("grpo_gsm8k", *hybrid).train_model
    assert (groups.ranks, groups.shards, groups.microbatch_groups) == (16, 8, 16)
    shared = make_config("grpo_gsm8k", *hybrid, "train_model.context_parallel=4").train_model
    assert (shared.ranks, shared.shards, shared.microbatch_groups) == (16, 8, 4)


def test_padded_rows_are_not_divided_among_ranks() -> None:
    shared = ("train_model.num_devices=2", "train_model.context_parallel=2")
    assert quickstart_error_message(*shared, "train.packing=false") == (
        "train_model.context_parallel=2 with train.packing=false: only a packed sequence is divided among ranks; set "
        "train.packing=true, or train_model.context_parallel=1"
    )


@pytest.mark.parametrize(("backend", "names"), [
    ("none", []), ("wandb", ["wandb"]), ("wandb, tensorboard", ["wandb", "tensorboard"]),
    (["mlflow", "trackio", "mlflow"], ["mlflow", "trackio"]), (["none"], []),
])  # fmt: skip
def test_trackers_are_a_name_or_a_list(backend: object, names: list[str]) -> None:
    assert LoggingConfig(backend=backend).backends == names


@pytest.mark.parametrize("backend", ["", "wandb,", [], [None], 3, None, {"wandb": 1}, "Wandb", ["wandb", ["mlflow"]]])
def test_an_unknown_tracker_is_rejected(backend: object) -> None:
    names = "none, mlflow, tensorboard, trackio, wandb"
    with pytest.raises(ConfigError, match=rf"logging\.backend=.*: choose one of {names}"):
        LoggingConfig(backend=backend)


def test_none_goes_with_no_other_tracker() -> None:
    with pytest.raises(ConfigError, match=r"logging\.backend='wandb,none': `none` excludes other"):
        LoggingConfig(backend="wandb,none")
