"""Tests of the messages about mistyped keys, keys of other trainers, and Hydra's errors."""

import copy
import dataclasses
import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.cli.composition import register_schema, to_config
from config.cli.error_messages import PLUGINS, known_keys, quoted_override, unknown_key_message, user_message
from config.cli.flags_of_other_trainers import FLAG_HINTS
from config.cli.keys_of_other_trainers import KEY_EQUIVALENTS, SECTION_EQUIVALENTS
from config.cli.unsupported_keys import (
    UNAMBIGUOUS_WORDS,
    UNSUPPORTED_KEYS,
    UNSUPPORTED_PREFIXES,
    UNSUPPORTED_SECTIONS,
    UNTRAINED_SECTIONS,
)
from config.schema.config import Config
from config.schema.errors import ConfigError
from config.schema.evaluation import EvalSetConfig
from config.schema.policy import PRESETS
from tests.config.test_schema import EXPERIMENTS, ROOT, make_config, quickstart_error_message


@pytest.mark.parametrize(("override", "expected"), [
    ("+inference_model.min_pp=0.1", r"inference_model\.min_pp: no such configuration key"),
    ("++train.epochz=2", r"train\.epochz: .*did you mean train\.epochs"),
    ("++optimizer.learning_rate=1", r"optimizer\.learning_rate: .*use optimizer\.lr"),
    ("+env.extra_kwargs.enable_thinking=false", r"env\.extra_kwargs\.enable_thinking: no such"),
    ("+env.difficulty.lowest=0.1", r"env\.difficulty\.lowest: .*env\.difficulty\.low"),
    ("+policy.klcoef=0.1", r"policy\.klcoef: .*policy\.kl_coef"),
    ("+train_model.lora.rank=3", r"train_model\.lora\.rank: no such"),
    ("+new_section.x=1", r"new_section\.x: no such configuration key; docs/config\.md"),
    ("+trian={}", r"trian: .*did you mean train\?"),
    ("+new_section={}", r"new_section: no such configuration key"),
    ("+tags_of_mine=[a,b]", r"tags_of_mine: no such configuration key"),
    ("+eval.sets.a={dataset:x,tmperature:1}", r"eval\.sets\.a\.tmperature: .*temperature"),
])  # fmt: skip
def test_an_unknown_key_after_a_plus_is_rejected(override: str, expected: str) -> None:
    text = quickstart_error_message(override)
    assert re.search(expected, text), text


def test_every_unknown_key_is_named_at_once() -> None:
    text = quickstart_error_message("+env.one=1", "+train.two.three=2")
    assert "env.one: no such" in text
    assert "train.two.three: no such" in text


@pytest.mark.parametrize("override", [
    "+env.options.anything=7", "++env.options.deep.er=[1]", "+eval.sets.a.dataset=arithmetic",
    "+optimizer.group_lr.head=1e-4", "++train.epochs=2", "+env.data_files={train:x}",
])  # fmt: skip
def test_plain_dictionaries_accept_any_key(override: str) -> None:
    make_config("grpo_quickstart", override)


def compose_with_folder(folder: Path, *overrides: str) -> Config:
    """Composes the quickstart with a user's config folder on Hydra's search path."""
    register_schema()
    with initialize_config_dir(str(ROOT / "config"), version_base=None):
        return to_config(compose("grpo_quickstart", overrides=[f"hydra.searchpath=[file://{folder}]", *overrides]))


def write_experiment(folder: Path, text: str) -> None:
    """Writes experiment/lowlr.yaml in a config folder."""
    (folder / "experiment").mkdir()
    (folder / "experiment" / "lowlr.yaml").write_text(text)


def test_a_user_experiment_composes_and_its_keys_are_checked(tmp_path: Path) -> None:
    write_experiment(tmp_path, "# @package _global_\noptimizer: {lr: 7e-5}\n")
    assert compose_with_folder(tmp_path, "+experiment=lowlr").optimizer.lr == 7e-5
    (tmp_path / "experiment" / "lowlr.yaml").write_text("# @package _global_\noptimizer: {lrate: 1}\n")
    with pytest.raises(Exception, match="lrate") as caught:
        compose_with_folder(tmp_path, "+experiment=lowlr")
    assert "optimizer.lrate: no such configuration key" in user_message(caught.value)
    assert "(in experiment/lowlr.yaml)" in user_message(caught.value)


def test_the_message_about_several_values_names_multirun(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="sweep") as caught:
        compose_with_folder(tmp_path, "optimizer.lr=1e-5,1e-6")
    assert re.search(r"several values.*--multirun.*'optimizer\.lr=\[1e-5,1e-6\]'", user_message(caught.value))


def test_the_message_about_a_missing_package_line_shows_the_line(tmp_path: Path) -> None:
    write_experiment(tmp_path, "optimizer: {lr: 7e-5}\n")
    with pytest.raises(Exception, match="experiment") as caught:
        compose_with_folder(tmp_path, "+experiment=lowlr")
    assert "# @package _global_" in user_message(caught.value)


@pytest.mark.parametrize(("override", "expected"), [
    ("policy=gpro", r"policy=gpro: no such option; did you mean .*Choose one of .*dapo, .*dr_grpo, .*grpo, gspo"),
    ("optimizer=[a,b]", r"optimizer=b: no such option; choose one of adamw, muon_adamw"),
    ("optimizer=4", r"take the name of a preset"),
    ("+policy=dapo", r"^policy: an option is chosen already; remove the \+"),
    ("policy", r"give a value, policy=VALUE"),
    ("env.options.a=[1", r"the brackets or braces are not closed"),
    ("hydra/launcher=rq", r"the plugin is not installed; run pip install hydra-rq-launcher"),
    ("hydra/sweeper=ax", r"the plugin is not installed; run pip install hydra-ax-sweeper"),
    ("hydra.run.dirr=x", r"--cfg hydra"),
    (
        "logging.backend=[wandb,tensorbord]",
        r"^logging\.backend='tensorbord': choose one of none, mlflow, tensorboard, trackio, wandb",
    ),
    ("env.reward={a:1}", r"^env\.reward=\{'a': 1\}: give the name of a reward, or a list"),
    ("env.reward_weights={a:b}",
     r"^env\.reward_weights=\{'a': 'b'\}: weights must be finite numbers; set \{COMPONENT: weight\}"),
    ("train.epochs=1.5", r"^train\.epochs: Value '1\.5' of type 'float'.*set a whole number"),
    ("train.epochs=[1]", r"^train\.epochs: Value '\[1\]' of type 'list'"),
    ("train.epochs=null", r"^train\.epochs: .*null is not allowed; set a value"),
    ("policy.kl_coef=true", r"^policy\.kl_coef: Value 'True'.*set a number"),
    ("policy.filter_range=[x,1]", r"^policy\.filter_range\[0\]: Value 'x'"),
    ("optimizer.lr.x=4", r"^optimizer\.lr: "),
    ("train.deterministic=maybe", r"^train\.deterministic: Value 'maybe'.*true or false"),
    ("env.tools=calculator", r"^env\.tools: .*set a list, env\.tools=\[first,second\]"),
    ("env.tools={a:1}", r"^env\.tools: .*set a list, env\.tools=\[first,second\]"),
    ("policy.filter_range={a:1}", r"^policy\.filter_range: .*set a list"),
    ("optimizer.group_lr=[1]", r"^optimizer\.group_lr: .*optimizer\.group_lr=\{name:value\}"),
    ("train=[1]", r"^train: .*train is a section; set its fields, train\.FIELD=value"),
    ("policy.trust_regions={low:1}", r"^policy\.trust_regions: .*set a list"),
    ("policy.trust_regions=[5]", r"^policy\.trust_regions\[0\]: .*write each item with its fields, \{FIELD:value\}"),
    ("policy.trust_regions=[{measur:tv}]", r"^policy\.trust_regions: measur: no such field .*mean measure\?"),
    ("+policy.trust_regions=[{low:1},{lo:1}]", r"^policy\.trust_regions: lo: no such field .*mean low\?"),
    ("policy.trust_regions=[{qqqq:1}]", r"^policy\.trust_regions: qqqq: no such field .*hoose one of measure, "),
    ("policy.trust_regions=[{low:x}]", r"^policy\.trust_regions: low: Value 'x' .*set a number"),
    ("policy.trust_regions=[{measure:[tv]}]", r"^policy\.trust_regions: measure: .*set a single value"),
    ("env.options=3", r"^env\.options: .*env\.options=\{name:value\}"),
    ("env.difficulty=3", r"^env\.difficulty: .*env\.difficulty\.FIELD=value"),
    ("train=[1]", r"^train: .*train\.FIELD=value"),
    ("~train.epochs", r"^train\.epochs: .*cannot be removed; set its value"),
    ("train.seed=${oc.env:NOSUCH}", r"^train\.seed: .*'NOSUCH' not found"),
])  # fmt: skip
def test_errors_of_hydra_and_omegaconf_have_a_remedy(override: str, expected: str) -> None:
    text = quickstart_error_message(override)
    assert re.search(expected, text), text
    assert "$VALUE" not in text


@pytest.mark.long
@pytest.mark.parametrize("value", [["a", "b"], {"a": "b"}, "nonsense of no type", 1.5, None], ids=repr)
def test_each_value_of_a_wrong_type_gives_a_message(value: object) -> None:
    register_schema()
    with initialize_config_dir(str(ROOT / "config"), version_base=None):
        plain = compose("grpo_quickstart")
    for key in known_keys(Config):
        group = key.split(".")[0]
        before = copy.deepcopy(plain[group])
        try:
            OmegaConf.update(plain, key, value, merge=False)
            to_config(plain)
        except (ConfigError, OmegaConfBaseException) as error:
            text = user_message(error)
            assert "$VALUE" not in text
            assert group in text, text
        finally:
            plain[group] = before


@pytest.mark.parametrize(
    "value", ["Be brief, please: x=1", 'it\'s "so"', "hello (world)", "a!b", "back\\slash", '\\"', "end\\"]
)
def test_a_quoted_override_has_the_original_value(value: str) -> None:
    (word,) = shlex.split(quoted_override("env.system_prompt", value))
    assert make_config("grpo_quickstart", word).env.system_prompt == value


def test_a_text_that_needs_quotes_is_shown_with_them() -> None:
    assert "'env.system_prompt=\"Be brief, please: x=1\"'" in quickstart_error_message(
        "env.system_prompt=Be brief, please: x=1"
    )


def test_the_message_about_a_missing_config_lists_the_configs() -> None:
    register_schema()
    with (
        pytest.raises(Exception, match="primary config") as caught,
        initialize_config_dir(str(ROOT / "config"), version_base=None),
    ):
        compose("quickstart")
    text = user_message(caught.value)
    assert "did you mean grpo_quickstart?" in text
    assert ", ".join(EXPERIMENTS) in text


def test_the_message_about_a_foreign_config_path_names_config_dir(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\n")
    with pytest.raises(Exception, match="base") as caught, initialize_config_dir(str(tmp_path), version_base=None):
        compose("mine")
    text = user_message(caught.value)
    assert "--config-dir FOLDER" in text
    assert f"hydra.searchpath=[file://{ROOT / 'config'}]" in text


def mentioned_keys(text: str) -> list[str]:
    """Returns the configuration keys that a text mentions."""
    keys = re.findall(r"(?<![\w./])([a-z_]+(?:\.[a-zA-Z_0-9]+)+)(?!:function)", text)
    return [key for key in keys if not key.endswith((".py", ".md", ".yaml"))]


@pytest.mark.parametrize(
    "table", [KEY_EQUIVALENTS, UNSUPPORTED_KEYS, FLAG_HINTS], ids=["equivalents", "unsupported", "flags"]
)
def test_the_advice_for_a_name_mentions_existing_keys(table: dict[str, str]) -> None:
    known = {*known_keys(Config), "hydra.run.dir", *(f"eval.sets.NAME.{key}" for key in known_keys(EvalSetConfig))}
    groups = ("policy", "optimizer")
    presets = {f"{group}={path.stem}" for group in groups for path in (PRESETS.parent / group).iterdir()}
    for name, text in table.items():
        assert set(mentioned_keys(text)) <= known, name
        assert set(re.findall(r"\b(?:policy|optimizer)=\w+", text)) <= presets, name
        assert unknown_key_message(name).startswith(f"{name}: no such configuration key; "), name


def test_the_advice_for_sections_and_prefixes_mentions_existing_keys() -> None:
    for text in (
        *UNSUPPORTED_SECTIONS.values(),
        *UNSUPPORTED_PREFIXES.values(),
        *(text for _, text in UNTRAINED_SECTIONS.values()),
    ):
        assert set(mentioned_keys(text)) <= {*known_keys(Config)}, text


def test_each_unambiguous_word_is_in_a_table() -> None:
    for word in UNAMBIGUOUS_WORDS:
        assert any(name.split(".")[0] == word for name in (*KEY_EQUIVALENTS, *UNSUPPORTED_KEYS)), word


@pytest.mark.parametrize("section", [*UNSUPPORTED_SECTIONS, *UNTRAINED_SECTIONS])
def test_the_keys_of_another_model_have_no_equivalent_of_the_policy(section: str) -> None:
    for end in ("lr", "model.path", "optim.weight_decay", "ppo_epochs", "precision"):
        assert f"use {KEY_EQUIVALENTS[end]}" not in unknown_key_message(f"{section}.{end}")


def test_no_key_is_in_the_tables_of_other_trainers() -> None:
    assert not {*KEY_EQUIVALENTS, *UNSUPPORTED_KEYS, *FLAG_HINTS} & set(known_keys(Config))
    assert not FLAG_HINTS.keys() & {field.name for field in dataclasses.fields(Config)}


def test_equivalent_sections_exist() -> None:
    ours = {field.name for field in dataclasses.fields(Config)}
    for name, text in SECTION_EQUIVALENTS.items():
        assert {word.split(".")[0] for word in re.findall(r"[a-z_.]+", text)} - {"and"} <= ours, name


EXPECTED_ADVICE = {
    "use optimizer.lr": "learning_rate train.learning_rate actor_rollout_ref.actor.optim.lr",
    "use train.total_dialog_turns": "max_steps train.max_steps num_train_epochs num_episodes",
    "use env.repeats": "num_generations actor_rollout_ref.rollout.n orchestrator.rollouts_per_example",
    "use train_model.lora.quantization=nf4": "load_in_4bit",
    "use env.num_envs": "data.train_batch_size grpo.num_prompts_per_step",
    "set the settings of trainer in train, logging and eval": "trainer.nosuchthing",
    "use train.mixed_precision": "trainer.precision",
    "GRPO has no critic": (
        "critic.optim.lr algorithm.critic.ppo_epochs critic_num_nodes critic_num_gpus_per_node critic_lr"
    ),
    "set env.reward=reward_model with env.reward_model.name": "reward_model.model.path",
    "set env.reward=reward_model": (
        "reward.reward_model.model.path reward_model.rollout.n reward_num_nodes reward_num_gpus_per_node"
    ),
    "use eval.sets.NAME.n": (
        "actor_rollout_ref.rollout.val_kwargs.n eval.num_generations eval_n_samples_per_prompt"
    ),
    "set temperature, top_p, top_k, n and max_tokens in each of eval.sets":
        "actor_rollout_ref.rollout.val_kwargs.do_sample",
    "use env.max_steps, with env.tools": "env.max_turns",
    "use env.max_steps": "actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
    "use inference_model.stop, a list of strings": "stop inference_model.stop_strings rollout_stop",
    "use inference_model.min_p": "min_p sampling.min_p",
    "not supported: a penalty depends on the tokens sampled before": (
        "repetition_penalty inference_model.presence_penalty sampling.frequency_penalty"
    ),
    "a completion ends with an end token": "policy.generation.stop_token_ids",
    "use optimizer.betas": "optimizer.beta",
    "use optimizer.eps": "optimizer.epsilon",
    "use inference_model.dtype": "inference_model.precision",
    "an evaluation has no batch size": "eval.batch_size",
    "use model.name": "policy.model_name",
    "use inference_model.num_devices": "vllm_num_engines policy.generation.colocated.resources.num_nodes",
    "the learner shards parameters": (
        "policy.dtensor_cfg.tensor_parallel_size policy.megatron_cfg.tensor_model_parallel_size"
    ),
    "the reference is not trained; ref_model.name": "actor_rollout_ref.ref.fsdp_config.param_offload",
    "use ref_model.name": "actor_rollout_ref.ref.model.path ref_model.model.path ref_load",
    "use ref_model.num_devices, over all nodes": "ref_num_nodes",
    "the reference is never updated: it stays the initial policy or ref_model.name": "sync_ref_model",
    "use ref_model.name, with policy=opd": "teacher.model.path teacher_model",
    "set policy=opd to distill: ref_model.name is the teacher": "teacher.optim.lr teacher_devices distillation.enabled",
    "set policy=opd to distill": "distillation.distillation_loss.loss_mode opd_type",
    "use policy.reward_coef": "distillation.distillation_loss.use_task_rewards",
    "use policy.distill_coef, with policy=opd": "opd_kl_coef",
    "with trained adapters the reference is their base, unless ref_model.name or ref_model.num_devices is set": (
        "ref_model.lora.enabled"
    ),
    "use policy.teacher_prompt, with policy=opsd": "teacher_prompt_template",
    "use ref_model.num_devices, with policy=opd": "distillation.n_gpus_per_node",
    "use policy.overlong_cache": (
        "reward_model.overlong_buffer.len reward_model.overlong_buffer.enable "
        "reward_model.reward_kwargs.overlong_buffer_cfg.len "
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable"
    ),
    "use policy.overlong_penalty": (
        "reward_model.overlong_buffer.penalty_factor "
        "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor"
    ),
    "policy.overlong_cache and policy.overlong_pen": "reward_model.reward_kwargs.overlong_buffer_cfg.log",
    "use inference_model.max_tokens": "reward_model.reward_kwargs.max_resp_len",
    "use env.reward": "reward_model.reward_manager reward.custom_reward_function.path",
    "use env.sandbox_url": "reward_model.sandbox_fusion.url",
    "use ref_model.num_devices": "ref_num_gpus_per_node",
    "use eval.sets.NAME.temperature": "eval_temperature",
    "use eval.sets.NAME.dataset": "eval_dataset",
    "use eval.sets.NAME.max_tokens": "eval_max_response_len orchestrator.eval.sampling.max_tokens",
    "use env.oversample": "over_sampling_batch_size",
    "train_model.num_devices above 1 shards the model with FSDP2": (
        "policy.dtensor_cfg.enabled policy.megatron_cfg.enabled"
    ),
    "use inference_model.colocate": "policy.generation.colocated.enabled",
    "optimizer.schedule": "policy.scheduler policy.scheduler.kwargs.total_iters",
    "not supported: there is no critic to warm up": "freezing_actor_steps",
    "not supported: an engine has its own cache": "cache_implementation",
    "not supported: the devices of the engines determine the transport of weights": "vllm_sync_backend",
    "train.seed; prompts are always shuffled": "shuffle_dataset rollout_shuffle",
    "use optimizer.min_lr_fraction": "optimizer.lr_min optimizer.min_lr",
    "use train.checkpoint_frequency": "save_strategy",
    "use train.keep_best": "load_best_model_at_end metric_for_best_model",
    "use logging.experiment_name": "wandb_run_name",
    "no rule adapts the coefficient": "kl_target",
    "policy.baseline and policy.scale": "normalize_reward",
    "needs no server": "vllm_server_host",
    "use model.dtype and model.attn_implementation": "model_init_kwargs",
    "sampling takes inference_model.temperature": "generation_kwargs",
    "train_model.lora.dropout": "disable_dropout",
    "inference_model.max_num_seqs": "micro_rollout_batch_size",
    "grpo_async.py": "partial_rollout",
    "env.tools or env.reasoning for turns, with env.max_steps": "agent_func_path",
}  # fmt: skip
"""Part of the advice, and the names of other trainers with this advice."""


@pytest.mark.parametrize("expected", EXPECTED_ADVICE)
def test_names_of_other_trainers_have_the_expected_advice(expected: str) -> None:
    for key in EXPECTED_ADVICE[expected].split():
        assert expected in unknown_key_message(key) and "did you mean" not in unknown_key_message(key), key
    assert "did you mean policy.kl_coef" in unknown_key_message("algorithm.kl_ctrl.kl_coef")


@pytest.mark.parametrize(("key", "expected"), [
    ("ref_model.lr", "the reference is not trained"),
    ("ref_model.optim.lr", "the reference is not trained"),
    ("ref_model.weight_decay", "the reference is not trained"),
    ("ref_model.num_device", "did you mean ref_model.num_devices?"),
    ("eval.lr", "evaluation has no training settings"),
    ("eval.epochs", "evaluation has no training settings"),
    ("eval.freqency", "did you mean eval.frequency?"),
    ("reward.lr", "a reward function is not trained"),
    ("reward.timeout", "did you mean env.reward_timeout_s?"),
    ("reward.reward_model.optim.lr", "set env.reward=reward_model"),
])  # fmt: skip
def test_the_advice_for_untrained_sections_names_no_setting_of_training(key: str, expected: str) -> None:
    assert unknown_key_message(key).startswith(f"{key}: no such configuration key; {expected}")


def test_each_plugin_has_a_package_of_hydra() -> None:
    assert all(re.fullmatch(r"hydra-[a-z]+(-(launcher|sweeper))?", package) for package in PLUGINS.values())
