"""Checks of sections against each other. Each raises ConfigError."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from config.schema.config import Config
from config.schema.errors import ConfigError
from config.schema.values import at_least

_BOUNDS = (
    "epsilon clip_epsilon_low clip_epsilon_high dual_clip ratio_max log_ratio_min log_ratio_max kl_log_ratio_clamp "
    "kl_clamp distill_clamp mismatch_cap filter_range covariance_range"
)
MAY_BE_INFINITE = {"optimizer.clip_grad_norm", *(f"policy.{name}" for name in _BOUNDS.split())}
"""Bounds: an infinite one is none."""


def check(config: Config) -> None:
    """Raises ConfigError for a number that is none, and where two sections contradict each other."""
    for key, number in _numbers(config):
        if math.isnan(number) or (math.isinf(number) and key not in MAY_BE_INFINITE):
            raise ConfigError(f"{key}={number}: give a finite number")
    check_batches(config)
    check_ranks(config)
    check_quantization(config)
    policy = config.policy
    if config.env.repeats == 1 and policy.baseline != "none" and policy.reward_coef != 0:
        raise ConfigError(
            f"env.repeats=1 with policy.baseline={policy.baseline}: a group of one has no baseline, every advantage of "
            "its reward would be 0; set env.repeats >= 2 or policy.baseline=none, or policy.reward_coef=0 for a "
            "teacher alone"
        )
    if policy.distill_coef != 0 and config.ref_model.name is None and policy.teacher_prompt is None:
        raise ConfigError(
            f"policy.distill_coef={policy.distill_coef} (policy {policy.name}) without a teacher: it would be the "
            "policy as it began, seeing what the policy sees; set ref_model.name to another model or run, or show it "
            "the reference answer: take policy=opsd with the policy.teacher_prompt that it has"
        )
    if config.run == "train" and config.inference_model.temperature == 0:
        raise ConfigError(
            "inference_model.temperature=0: greedy completions of one prompt are all the same, and no policy "
            "gradient has their log-probs; train with 1.0, and evaluate greedily with eval.sets.NAME.temperature=0"
        )
    sets, frequency = config.eval.sets, config.eval.frequency
    if not sets and (frequency or config.run == "eval"):
        why = "run=eval" if config.run == "eval" else f"eval.frequency={frequency}"
        raise ConfigError(
            f"{why} without eval.sets: name what is evaluated, eval.sets={{NAME: {{dataset: gsm8k}}}}"
        )
    for name, chosen in sets.items():
        chosen.env(f"eval.sets.{name}", config.env)
    best, known = config.train.keep_best, [key for name, one in sets.items() for key in one.metrics(name)]
    if best is not None and best not in known:
        there = f"there are {', '.join(known)}" if known else "there are none without eval.sets"
        raise ConfigError(f"train.keep_best={best}: no such metric of evaluation; {there}")
    if config.plan.given and config.run not in ("plan", "rehearse"):
        raise ConfigError(
            f"plan.* describes a machine to plan for, but run={config.run} works on this one: add run=plan, or leave "
            "plan.* out"
        )
    longest = config.env.max_prompt_tokens + config.longest_response
    given = config.inference_model.max_model_len
    if given is not None and given < longest:
        raise ConfigError(
            f"inference_model.max_model_len={given} is smaller than env.max_prompt_tokens="
            f"{config.env.max_prompt_tokens} + max_tokens={config.longest_response} (the largest of inference_model "
            f"and eval.sets): raise it to {longest}, or lower one of the two"
        )


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Every float of a section and of what it holds, with its dotted key."""
    if isinstance(value, float):
        yield key, value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _numbers(one, key)
    elif is_dataclass(value) or isinstance(value, dict):
        names = value if isinstance(value, dict) else [field.name for field in fields(value)]
        for name in names:
            inside = value[name] if isinstance(value, dict) else getattr(value, name)
            yield from _numbers(inside, f"{key}.{name}" if key else str(name))


def devices_asked(config: Config, section: str) -> str:
    """The setting that gives a section its devices, as it was typed."""
    asked = vars(config)[section]
    if asked.devices is not None:
        return f"{section}.devices={asked.devices}"
    return f"{section}.num_devices" + (" unset" if asked.num_devices is None else f"={asked.num_devices}")


def check_batches(config: Config) -> None:
    train, repeats = config.train, config.env.repeats
    at_least("env.repeats", repeats, 1)
    at_least("env.num_envs", config.env.num_envs, 1)
    if config.env.candidates < repeats:
        raise ConfigError(
            f"env.oversample={config.env.oversample} is less than env.repeats={repeats}: it counts the candidates "
            f"of a prompt, of which {repeats} are kept; take {2 * repeats}, or null for none"
        )
    batch, optim = config.completions_per_iteration, config.optim_batch_size
    if batch % repeats:
        raise ConfigError(
            f"train.dialog_turns_per_batch={batch} is not a multiple of env.repeats={repeats}: an iteration "
            f"is made of whole groups; take {max(1, batch // repeats) * repeats}"
        )
    if optim > batch or batch % optim:
        raise ConfigError(
            f"train.optim_batch_size={optim} does not divide the {batch} completions of an iteration "
            f"(train.dialog_turns_per_batch, or env.num_envs={config.env.num_envs} x env.repeats={repeats})"
        )
    if optim % repeats:
        raise ConfigError(
            f"train.optim_batch_size={optim} is not a multiple of env.repeats={repeats}: groups are not "
            f"split over optimizer steps; take {max(1, optim // repeats) * repeats}"
        )
    steps = train.gradient_accumulation_steps
    if steps > optim:
        raise ConfigError(
            f"train.gradient_accumulation_steps={steps} is more than the {optim} completions of an optimizer step "
            "(train.optim_batch_size): lower it"
        )
    ready = train.buffer_groups
    if ready is not None and ready < optim // repeats:
        raise ConfigError(
            f"train.buffer_groups={ready} is less than the {optim // repeats} groups of an optimizer step: the "
            "learner could never take one; raise it"
        )
    if train.total_dialog_turns < batch:
        raise ConfigError(
            f"train.total_dialog_turns={train.total_dialog_turns} is less than one iteration's {batch} "
            "completions: raise it, or lower env.num_envs"
        )


def check_ranks(config: Config) -> None:
    model, ranks = config.train_model, config.train_model.ranks
    for key, size in (("num_nodes", model.num_nodes), ("shard_size", model.shards)):
        if ranks % size:
            raise ConfigError(
                f"train_model.{key}={size} does not divide the {ranks} learner ranks (train_model.num_devices): take a "
                "divisor of it"
            )
    if model.num_nodes > 1 and model.devices is not None:
        raise ConfigError(
            f"train_model.devices={model.devices} with train_model.num_nodes={model.num_nodes}: Ray chooses the GPUs "
            "on its nodes; give train_model.num_devices alone"
        )
    if ranks > 1 and config.train.mixed_precision == "fp16":
        raise ConfigError(
            f"train.mixed_precision=fp16 with train_model.num_devices={ranks}: the gradient scaler would have to agree "
            "over all ranks; take bf16, which needs none"
        )
    if model.offload != "none" and config.device == "cpu":
        raise ConfigError(
            f"train_model.offload={model.offload} with device=cpu: everything is in host memory already; take none"
        )
    if model.offload == "all" and ranks == 1:
        raise ConfigError(
            "train_model.offload=all with train_model.num_devices=1: parameters are offloaded shard by shard, so it "
            "takes two learner ranks or more; take optimizer, or train an adapter (train_model.lora.enabled=true)"
        )
    shards, ranks = config.ref_model.shard_size, config.ref_model.ranks
    if shards is not None and not ranks:
        raise ConfigError(
            f"ref_model.shard_size={shards} without ref_model.num_devices: there are no scorer ranks that could share "
            f"a copy; give ref_model.num_devices={shards}, or leave shard_size unset"
        )
    if shards is not None and ranks % shards:
        raise ConfigError(
            f"ref_model.shard_size={shards} does not divide the {ranks} scorer ranks (ref_model.num_devices): take a "
            "divisor of it, or leave it unset"
        )


def check_quantization(config: Config) -> None:
    lora = config.train_model.lora
    if not lora.quantized:
        return
    field = f"train_model.lora.quantization={lora.quantization}"
    if not lora.enabled:
        raise ConfigError(
            f"{field} with train_model.lora.enabled=false: weights in 4 bits cannot be trained, only adapters on them; "
            "set train_model.lora.enabled=true, or train_model.lora.quantization=none"
        )
    if config.inference_model.lora == "adapter":
        raise ConfigError(
            f"{field} with inference_model.lora=adapter: engines would add the adapter to the base as its files have "
            "it, which is another policy than the one that is trained; take inference_model.lora=merge, which sends "
            "the base as 4 bits have it with the adapter added"
        )
    if config.train_model.offload == "all":
        raise ConfigError(
            f"{field} with train_model.offload=all: the scales of weights in 4 bits stay on the GPU; take "
            "train_model.offload=optimizer or none"
        )
    reference = config.ref_model
    if reference.ranks and reference.name is None and config.policy.uses_reference:
        asked = devices_asked(config, "ref_model")
        raise ConfigError(
            f"{field} with {asked}: the base in 4 bits under the adapters is the reference, and scorers would hold "
            f"another one; leave {asked.partition('=')[0]} unset"
        )
    if config.run == "rehearse":
        raise ConfigError(
            f"{field} with run=rehearse: 4-bit kernels need tensors with memory; run=plan says what they take"
        )
