"""What a user reads who mistyped something: keys that do not exist, names of other trainers, Hydra's own hints."""

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
from config.cli.error_messages import PLUGINS, known_keys, quoted, readable, unknown_key
from config.cli.flags import FLAGS
from config.cli.no_counterpart import APART, BEGINNINGS, ELSEWHERE, OWN, STANDS_ALONE
from config.cli.other_trainers import HERE, SECTIONS
from config.schema.config import Config
from config.schema.errors import ConfigError
from config.schema.evaluation import EvalSetConfig
from config.schema.policy import PRESETS
from tests.config.test_schema import EXPERIMENTS, ROOT, composed, message


@pytest.mark.parametrize(("override", "expected"), [
    ("+inference_model.min_pp=0.1", r"inference_model\.min_pp: no such configuration key"),
    ("++train.epochz=2", r"train\.epochz: .*did you mean train\.epochs"),
    ("++optimizer.learning_rate=1", r"optimizer\.learning_rate: .*here it is optimizer\.lr"),
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
def test_a_key_behind_a_plus_is_refused_as_any_other(override: str, expected: str) -> None:
    text = message(override)
    assert re.search(expected, text), text


def test_every_unknown_key_is_named_at_once() -> None:
    text = message("+env.one=1", "+train.two.three=2")
    assert "env.one: no such" in text
    assert "train.two.three: no such" in text


@pytest.mark.parametrize("override", [
    "+env.options.anything=7", "++env.options.deep.er=[1]", "+eval.sets.a.dataset=arithmetic",
    "+optimizer.group_lr.head=1e-4", "++train.epochs=2", "+env.data_files={train:x}",
])  # fmt: skip
def test_what_is_free_stays_free(override: str) -> None:
    composed("grpo_quickstart", override)


def of_a_folder(folder: Path, *overrides: str) -> Config:
    """The quickstart with a folder of the user's own beside the configs that ship."""
    register_schema()
    with initialize_config_dir(str(ROOT / "config"), version_base=None):
        return to_config(
            compose("grpo_quickstart", overrides=[f"hydra.searchpath=[file://{folder}]", *overrides])
        )


def experiment(folder: Path, text: str) -> None:
    (folder / "experiment").mkdir()
    (folder / "experiment" / "lowlr.yaml").write_text(text)


def test_an_experiment_of_ones_own_works_and_its_keys_are_checked(tmp_path: Path) -> None:
    experiment(tmp_path, "# @package _global_\noptimizer: {lr: 7e-5}\n")
    assert of_a_folder(tmp_path, "+experiment=lowlr").optimizer.lr == 7e-5
    (tmp_path / "experiment" / "lowlr.yaml").write_text("# @package _global_\noptimizer: {lrate: 1}\n")
    with pytest.raises(Exception, match="lrate") as caught:
        of_a_folder(tmp_path, "+experiment=lowlr")
    assert "optimizer.lrate: no such configuration key" in readable(caught.value)
    assert "(in experiment/lowlr.yaml)" in readable(caught.value)


def test_several_values_are_told_of_multirun(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="sweep") as caught:
        of_a_folder(tmp_path, "optimizer.lr=1e-5,1e-6")
    assert re.search(r"several values.*--multirun.*'optimizer\.lr=\[1e-5,1e-6\]'", readable(caught.value))


def test_an_experiment_without_its_first_line_is_told_of_it(tmp_path: Path) -> None:
    experiment(tmp_path, "optimizer: {lr: 7e-5}\n")
    with pytest.raises(Exception, match="experiment") as caught:
        of_a_folder(tmp_path, "+experiment=lowlr")
    assert "# @package _global_" in readable(caught.value)


@pytest.mark.parametrize(("override", "expected"), [
    ("policy=gpro", r"policy=gpro: no such option; did you mean .*There are: .*dapo, .*dr_grpo, .*grpo, gspo"),
    ("optimizer=[a,b]", r"optimizer=b: no such option; There are: adamw, muon_adamw"),
    ("optimizer=4", r"take the name of a preset"),
    ("+policy=dapo", r"^policy: an option has been chosen already; leave the \+ out"),
    ("policy", r"give a value, policy=VALUE"),
    ("env.options.a=[1", r"the list or the braces do not end"),
    ("hydra/launcher=rq", r"not installed; pip install hydra-rq-launcher"),
    ("hydra/sweeper=ax", r"not installed; pip install hydra-ax-sweeper"),
    ("hydra.run.dirr=x", r"--cfg hydra"),
    (
        "logging.backend=[wandb,tensorbord]",
        r"^logging\.backend='tensorbord': choose one of none, mlflow, tensorboard, trackio, wandb",
    ),
    ("env.reward={a:1}", r"^env\.reward=\{'a': 1\}: give the name of a reward, or a list"),
    ("env.reward_weights={a:b}", r"^env\.reward_weights=\{'a': 'b'\}: finite numbers, \{PART: weight\}"),
    ("train.epochs=1.5", r"^train\.epochs: Value '1\.5' of type 'float'.*give a whole number"),
    ("train.epochs=[1]", r"^train\.epochs: Value '\[1\]' of type 'list'"),
    ("train.epochs=null", r"^train\.epochs: .*null is no value for it"),
    ("policy.kl_coef=true", r"^policy\.kl_coef: Value 'True'.*give a number"),
    ("policy.filter_range=[x,1]", r"^policy\.filter_range\[0\]: Value 'x'"),
    ("optimizer.lr.x=4", r"^optimizer\.lr: "),
    ("train.deterministic=maybe", r"^train\.deterministic: Value 'maybe'.*true or false"),
    ("env.tools=calculator", r"^env\.tools: .*give a list, env\.tools=\[first,second\]"),
    ("env.tools={a:1}", r"^env\.tools: .*give a list, env\.tools=\[first,second\]"),
    ("policy.filter_range={a:1}", r"^policy\.filter_range: .*give a list"),
    ("optimizer.group_lr=[1]", r"^optimizer\.group_lr: .*optimizer\.group_lr=\{name:value\}"),
    ("train=[1]", r"^train: .*it is a section: set its fields, train\.FIELD=value"),
    ("policy.trust_regions={low:1}", r"^policy\.trust_regions: .*give a list"),
    ("policy.trust_regions=[5]", r"^policy\.trust_regions\[0\]: .*an item has fields, \{FIELD:value\}"),
    ("policy.trust_regions=[{measur:tv}]", r"^policy\.trust_regions: measur: no such field .*mean measure\?"),
    ("+policy.trust_regions=[{low:1},{lo:1}]", r"^policy\.trust_regions: lo: no such field .*mean low\?"),
    ("policy.trust_regions=[{qqqq:1}]", r"^policy\.trust_regions: qqqq: no such field .*There are: measure, "),
    ("policy.trust_regions=[{low:x}]", r"^policy\.trust_regions: low: Value 'x' .*give a number"),
    ("policy.trust_regions=[{measure:[tv]}]", r"^policy\.trust_regions: measure: .*it takes one value"),
    ("env.options=3", r"^env\.options: .*env\.options=\{name:value\}"),
    ("env.difficulty=3", r"^env\.difficulty: .*env\.difficulty\.FIELD=value"),
    ("train=[1]", r"^train: .*train\.FIELD=value"),
    ("~train.epochs", r"^train\.epochs: .*cannot be taken away"),
    ("train.seed=${oc.env:NOSUCH}", r"^train\.seed: .*'NOSUCH' not found"),
])  # fmt: skip
def test_hydras_and_omegaconfs_errors_keep_their_help(override: str, expected: str) -> None:
    text = message(override)
    assert re.search(expected, text), text
    assert "$VALUE" not in text


@pytest.mark.long
@pytest.mark.parametrize("value", [["a", "b"], {"a": "b"}, "nonsense of no type", 1.5, None], ids=repr)
def test_no_value_of_the_wrong_type_ends_in_anything_but_a_message(value: object) -> None:
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
            text = readable(error)
            assert "$VALUE" not in text
            assert group in text, text
        finally:
            plain[group] = before


@pytest.mark.parametrize(
    "value", ["Be brief, please: x=1", 'it\'s "so"', "hello (world)", "a!b", "back\\slash", '\\"', "end\\"]
)
def test_the_quoting_that_is_shown_is_the_one_that_works(value: str) -> None:
    (word,) = shlex.split(quoted("env.system_prompt", value))
    assert composed("grpo_quickstart", word).env.system_prompt == value


def test_a_text_that_needs_quotes_is_shown_with_them() -> None:
    assert "'env.system_prompt=\"Be brief, please: x=1\"'" in message(
        "env.system_prompt=Be brief, please: x=1"
    )


def test_the_configs_are_listed_where_one_is_not_there() -> None:
    register_schema()
    with (
        pytest.raises(Exception, match="primary config") as caught,
        initialize_config_dir(str(ROOT / "config"), version_base=None),
    ):
        compose("quickstart")
    text = readable(caught.value)
    assert "did you mean grpo_quickstart?" in text
    assert ", ".join(EXPERIMENTS) in text


def test_a_foreign_config_path_is_told_of_config_dir(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\n")
    with (
        pytest.raises(Exception, match="base") as caught,
        initialize_config_dir(str(tmp_path), version_base=None),
    ):
        compose("mine")
    text = readable(caught.value)
    assert "--config-dir FOLDER" in text
    assert f"hydra.searchpath=[file://{ROOT / 'config'}]" in text


def places(text: str) -> list[str]:
    """The configuration keys and sections that a text sends its reader to."""
    keys = re.findall(r"(?<![\w./])([a-z_]+(?:\.[a-zA-Z_0-9]+)+)(?!:function)", text)
    return [key for key in keys if not key.endswith((".py", ".md", ".yaml"))]


@pytest.mark.parametrize("table", [HERE, ELSEWHERE, FLAGS], ids=["here", "elsewhere", "flags"])
def test_where_a_name_leads_to_exists(table: dict[str, str]) -> None:
    known = {
        *known_keys(Config),
        "hydra.run.dir",
        *(f"eval.sets.NAME.{key}" for key in known_keys(EvalSetConfig)),
    }
    groups = ("policy", "optimizer")
    presets = {f"{group}={path.stem}" for group in groups for path in (PRESETS.parent / group).iterdir()}
    for name, text in table.items():
        assert set(places(text)) <= known, name
        assert set(re.findall(r"\b(?:policy|optimizer)=\w+", text)) <= presets, name
        assert unknown_key(name).startswith(f"{name}: no such configuration key; "), name


def test_where_sections_and_beginnings_lead_to_exists() -> None:
    for text in (*APART.values(), *BEGINNINGS.values(), *(text for _, text in OWN.values())):
        assert set(places(text)) <= {*known_keys(Config)}, text


def test_what_stands_alone_is_looked_up_somewhere() -> None:
    for word in STANDS_ALONE:
        assert any(name.split(".")[0] == word for name in (*HERE, *ELSEWHERE)), word


@pytest.mark.parametrize("section", [*APART, *OWN])
def test_the_end_of_a_name_of_another_model_says_nothing_of_the_policys(section: str) -> None:
    for end in ("lr", "model.path", "optim.weight_decay", "ppo_epochs", "precision"):
        assert f"here it is {HERE[end]}" not in unknown_key(f"{section}.{end}")


def test_no_name_of_ours_is_taken_for_anothers() -> None:
    assert not {*HERE, *ELSEWHERE, *FLAGS} & set(known_keys(Config))
    assert not FLAGS.keys() & {field.name for field in dataclasses.fields(Config)}


def test_sections_of_others_lead_to_ours() -> None:
    ours = {field.name for field in dataclasses.fields(Config)}
    for name, text in SECTIONS.items():
        assert {word.split(".")[0] for word in re.findall(r"[a-z_.]+", text)} - {"and"} <= ours, name


LEADS = {
    "here it is optimizer.lr": "learning_rate train.learning_rate actor_rollout_ref.actor.optim.lr",
    "here it is train.total_dialog_turns": "max_steps train.max_steps num_train_epochs num_episodes",
    "here it is env.repeats": "num_generations actor_rollout_ref.rollout.n orchestrator.rollouts_per_example",
    "here it is train_model.lora.quantization=nf4": "load_in_4bit",
    "here it is env.num_envs": "data.train_batch_size grpo.num_prompts_per_step",
    "here in train, logging and eval": "trainer.nosuchthing",
    "here it is train.mixed_precision": "trainer.precision",
    "GRPO has no critic": (
        "critic.optim.lr algorithm.critic.ppo_epochs critic_num_nodes critic_num_gpus_per_node critic_lr"
    ),
    "no reward model is loaded; env.reward=module:function": "reward_model.model.path",
    "no reward model is loaded": (
        "reward.reward_model.model.path reward_model.rollout.n reward_num_nodes reward_num_gpus_per_node"
    ),
    "here it is eval.sets.NAME.n": (
        "actor_rollout_ref.rollout.val_kwargs.n eval.num_generations eval_n_samples_per_prompt"
    ),
    "each of eval.sets has temperature": "actor_rollout_ref.rollout.val_kwargs.do_sample",
    "here it is env.max_steps, with env.tools": "env.max_turns",
    "here it is env.max_steps": "actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
    "no other text ends one": "stop inference_model.stop_strings rollout_stop",
    "a completion ends with an end token": "policy.generation.stop_token_ids",
    "here it is optimizer.betas": "optimizer.beta",
    "here it is optimizer.eps": "optimizer.epsilon",
    "here it is inference_model.dtype": "inference_model.precision",
    "an evaluation has no batch size": "eval.batch_size",
    "here it is model.name": "policy.model_name",
    "here it is inference_model.num_devices": "vllm_num_engines policy.generation.colocated.resources.num_nodes",
    "the learner shards parameters": (
        "policy.dtensor_cfg.tensor_parallel_size policy.megatron_cfg.tensor_model_parallel_size"
    ),
    "the reference is not trained; ref_model.name": "actor_rollout_ref.ref.fsdp_config.param_offload",
    "here it is ref_model.name": "actor_rollout_ref.ref.model.path ref_model.model.path ref_load",
    "here it is ref_model.num_devices, over all nodes": "ref_num_nodes",
    "the reference stays as it begins, the policy or ref_model.name": "sync_ref_model",
    "here it is ref_model.name, with policy=opd": "teacher.model.path teacher_model",
    "policy=opd distills: ref_model.name is the teacher": "teacher.optim.lr teacher_devices distillation.enabled",
    "policy=opd distills": "distillation.distillation_loss.loss_mode opd_type",
    "here it is policy.reward_coef": "distillation.distillation_loss.use_task_rewards",
    "here it is policy.distill_coef, with policy=opd": "opd_kl_coef",
    "beside adapters the reference is their base unless ref_model.name or ref_model.num_devices is set": (
        "ref_model.lora.enabled"
    ),
    "here it is policy.teacher_prompt, with policy=opsd": "teacher_prompt_template",
    "here it is ref_model.num_devices, with policy=opd": "distillation.n_gpus_per_node",
    "here it is policy.overlong_cache": (
        "reward_model.overlong_buffer.len reward_model.overlong_buffer.enable "
        "reward_model.reward_kwargs.overlong_buffer_cfg.len "
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable"
    ),
    "here it is policy.overlong_penalty": (
        "reward_model.overlong_buffer.penalty_factor "
        "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor"
    ),
    "policy.overlong_cache and policy.overlong_pen": "reward_model.reward_kwargs.overlong_buffer_cfg.log",
    "here it is inference_model.max_tokens": "reward_model.reward_kwargs.max_resp_len",
    "here it is env.reward": "reward_model.reward_manager reward.custom_reward_function.path",
    "here it is env.sandbox_url": "reward_model.sandbox_fusion.url",
    "here it is ref_model.num_devices": "ref_num_gpus_per_node",
    "here it is eval.sets.NAME.temperature": "eval_temperature",
    "here it is eval.sets.NAME.dataset": "eval_dataset",
    "here it is eval.sets.NAME.max_tokens": "eval_max_response_len orchestrator.eval.sampling.max_tokens",
    "here it is env.oversample": "over_sampling_batch_size",
    "train_model.num_devices above 1 shards the model with FSDP2": (
        "policy.dtensor_cfg.enabled policy.megatron_cfg.enabled"
    ),
    "here it is inference_model.colocate": "policy.generation.colocated.enabled",
    "optimizer.schedule": "policy.scheduler policy.scheduler.kwargs.total_iters",
    "it does not exist here: no critic is warmed up": "freezing_actor_steps",
    "it does not exist here: an engine has a cache of its own": "cache_implementation",
    "it does not exist here: how weights reach the engines": "vllm_sync_backend",
    "train.seed: prompts are always shuffled": "shuffle_dataset rollout_shuffle",
    "here it is optimizer.min_lr_fraction": "optimizer.lr_min optimizer.min_lr",
    "here it is train.checkpoint_frequency": "save_strategy",
    "here it is train.keep_best": "load_best_model_at_end metric_for_best_model",
    "here it is logging.experiment_name": "wandb_run_name",
    "no rule adapts it": "kl_target",
    "policy.baseline and policy.scale": "normalize_reward",
    "needs no server": "vllm_server_host",
    "here it is model.dtype and model.attn_implementation": "model_init_kwargs",
    "sampling takes inference_model.temperature": "generation_kwargs",
    "train_model.lora.dropout": "disable_dropout",
    "inference_model.max_num_seqs": "micro_rollout_batch_size",
    "grpo_async.py": "partial_rollout",
    "env.tools or env.reasoning, with env.max_steps": "agent_func_path",
}  # fmt: skip
"""What is said of names of other trainers."""


@pytest.mark.parametrize("expected", LEADS)
def test_names_of_other_trainers_lead_to_ours(expected: str) -> None:
    for key in LEADS[expected].split():
        assert expected in unknown_key(key) and "did you mean" not in unknown_key(key), key
    assert "did you mean policy.kl_coef" in unknown_key("algorithm.kl_ctrl.kl_coef")


@pytest.mark.parametrize(("key", "expected"), [
    ("ref_model.lr", "the reference is not trained"),
    ("ref_model.optim.lr", "the reference is not trained"),
    ("ref_model.weight_decay", "the reference is not trained"),
    ("ref_model.num_device", "did you mean ref_model.num_devices?"),
    ("eval.lr", "nothing is trained in eval"),
    ("eval.epochs", "nothing is trained in eval"),
    ("eval.freqency", "did you mean eval.frequency?"),
    ("reward.lr", "what judges is not trained"),
    ("reward.timeout", "did you mean env.reward_timeout_s?"),
    ("reward.reward_model.optim.lr", "no reward model is loaded"),
])  # fmt: skip
def test_sections_where_nothing_is_trained_lead_to_no_setting_of_training(key: str, expected: str) -> None:
    assert unknown_key(key).startswith(f"{key}: no such configuration key; {expected}")


def test_each_plugin_is_installed_by_a_package_of_hydras() -> None:
    assert all(re.fullmatch(r"hydra-[a-z]+(-(launcher|sweeper))?", package) for package in PLUGINS.values())
