"""Checks that a config's numbers are finite and its sections do not contradict each other."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from config.schema.config import Config
from config.schema.errors import ConfigError
from config.schema.model_rewards import check_model_rewards
from config.schema.values import check_minimum

_BOUNDS = (
    "epsilon clip_epsilon_low clip_epsilon_high dual_clip ratio_max log_ratio_min log_ratio_max kl_log_ratio_clamp "
    "kl_clamp distill_clamp mismatch_cap filter_range covariance_range"
)
MAY_BE_INFINITE = {"optimizer.clip_grad_norm", *(f"policy.{name}" for name in _BOUNDS.split())}
"""Keys of bounds, for which infinity means no bound."""


def check_config(config: Config) -> None:
    """Raises ConfigError for numbers that are not finite and for contradictions between sections."""
    for key, number in _numbers(config):
        if math.isnan(number) or (math.isinf(number) and key not in MAY_BE_INFINITE):
            raise ConfigError(f"{key}={number}: must be finite")
    check_batches(config)
    check_ranks(config)
    check_quantization(config)
    check_model_rewards(config.env.judge, config.env.reward_model, config.reward_names)
    policy = config.policy
    if config.env.repeats == 1 and policy.baseline != "none" and policy.reward_coef != 0:
        raise ConfigError(
            f"env.repeats=1 with policy.baseline={policy.baseline}: a group of one completion has no "
            "baseline, so every advantage would be 0; set env.repeats >= 2 or policy.baseline=none, or "
            "policy.reward_coef=0 for a teacher alone"
        )
    if policy.distill_coef != 0 and config.ref_model.name is None and policy.teacher_prompt is None:
        raise ConfigError(
            f"policy.distill_coef={policy.distill_coef} (policy {policy.name}) without a teacher: the "
            "reference model is the initial policy with the same prompt. Set ref_model.name to another "
            "model or run, or set policy=opsd, whose policy.teacher_prompt shows the teacher the reference "
            "answer"
        )
    if config.run == "train" and config.inference_model.temperature == 0:
        raise ConfigError(
            "inference_model.temperature=0: greedy completions of one prompt are identical, and their "
            "log-probs have no policy gradient; set inference_model.temperature=1.0, and evaluate greedily "
            "with eval.sets.NAME.temperature=0"
        )
    sets, frequency = config.eval.sets, config.eval.frequency
    if not sets and (frequency or config.run == "eval"):
        setting = "run=eval" if config.run == "eval" else f"eval.frequency={frequency}"
        raise ConfigError(f"{setting}: there are no evaluation sets; set eval.sets={{NAME: {{dataset: gsm8k}}}}")
    for name, eval_set in sets.items():
        eval_set.env(f"eval.sets.{name}", config.env)
    best, known = config.train.keep_best, [key for name, one in sets.items() for key in one.metrics(name)]
    if best is not None and best not in known:
        hint = f"choose one of {', '.join(known)}" if known else "set eval.sets, whose metrics can be named"
        raise ConfigError(f"train.keep_best={best}: no such evaluation metric; {hint}")
    if config.machine.has_settings and config.run not in ("plan", "dry_run"):
        raise ConfigError(
            f"machine.* describes a machine to plan for, but run={config.run} uses this machine; set "
            "run=plan, or remove machine.*"
        )
    longest = config.env.max_prompt_tokens + config.longest_response
    max_model_len = config.inference_model.max_model_len
    if max_model_len is not None and max_model_len < longest:
        raise ConfigError(
            f"inference_model.max_model_len={max_model_len} is smaller than "
            f"env.max_prompt_tokens={config.env.max_prompt_tokens} + max_tokens={config.longest_response} "
            f"(the largest of inference_model and eval.sets); set inference_model.max_model_len={longest}, "
            "or lower env.max_prompt_tokens or max_tokens"
        )


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yields each float of a section and its subsections, with the dotted key."""
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


def device_setting(config: Config, section: str) -> str:
    """Returns the setting of a section's devices as text, for messages."""
    fields = vars(config)[section]
    if fields.devices is not None:
        return f"{section}.devices={fields.devices}"
    return f"{section}.num_devices" + (" unset" if fields.num_devices is None else f"={fields.num_devices}")


def check_batches(config: Config) -> None:
    """Checks the sizes of groups, batches and microbatches against each other."""
    train, repeats = config.train, config.env.repeats
    check_minimum("env.repeats", repeats, 1)
    check_minimum("env.num_envs", config.env.num_envs, 1)
    if config.env.candidates < repeats:
        raise ConfigError(
            f"env.oversample={config.env.oversample} is less than env.repeats={repeats}: env.oversample "
            f"counts the candidates of a prompt, of which {repeats} are kept; set "
            f"env.oversample={2 * repeats}, or null to disable oversampling"
        )
    batch, optim = config.completions_per_iteration, config.optim_batch_size
    if batch % repeats:
        raise ConfigError(
            f"train.dialog_turns_per_batch={batch} is not a multiple of env.repeats={repeats}: an iteration "
            f"consists of whole groups; set train.dialog_turns_per_batch={max(1, batch // repeats) * repeats}"
        )
    if optim > batch or batch % optim:
        raise ConfigError(
            f"train.optim_batch_size={optim} does not divide the {batch} completions of an iteration "
            f"(train.dialog_turns_per_batch, or env.num_envs={config.env.num_envs} x env.repeats={repeats}); "
            f"set a divisor of {batch}"
        )
    if optim % repeats:
        raise ConfigError(
            f"train.optim_batch_size={optim} is not a multiple of env.repeats={repeats}: groups are not "
            f"split over optimizer steps; set train.optim_batch_size={max(1, optim // repeats) * repeats}"
        )
    steps = train.gradient_accumulation_steps
    if steps > optim:
        raise ConfigError(
            f"train.gradient_accumulation_steps={steps} is more than the {optim} completions of an optimizer "
            "step (train.optim_batch_size); lower train.gradient_accumulation_steps"
        )
    capacity = train.buffer_groups
    if capacity is not None and capacity < optim // repeats:
        raise ConfigError(
            f"train.buffer_groups={capacity} is less than the {optim // repeats} groups of an optimizer "
            "step: the learner could never start a step; raise train.buffer_groups"
        )
    if train.total_dialog_turns < batch:
        raise ConfigError(
            f"train.total_dialog_turns={train.total_dialog_turns} is less than one iteration's {batch} "
            "completions; raise train.total_dialog_turns, or lower env.num_envs"
        )


def check_ranks(config: Config) -> None:
    """Checks the numbers of ranks, nodes and shards, and the settings that exclude several ranks."""
    model, ranks = config.train_model, config.train_model.ranks
    sizes = {"num_nodes": model.num_nodes, "shard_size": model.shards, "context_parallel": model.context_parallel}
    for key, size in sizes.items():
        if ranks % size:
            raise ConfigError(
                f"train_model.{key}={size} does not divide the {ranks} learner ranks "
                f"(train_model.num_devices); set a divisor of {ranks}, or change train_model.num_devices"
            )
    if model.num_nodes > 1 and model.devices is not None:
        raise ConfigError(
            f"train_model.devices={model.devices} with train_model.num_nodes={model.num_nodes}: Ray chooses "
            "the GPUs on its nodes; remove train_model.devices and set train_model.num_devices"
        )
    if model.context_parallel > 1 and not config.train.packing:
        raise ConfigError(
            f"train_model.context_parallel={model.context_parallel} with train.packing=false: only a packed sequence "
            "is divided among ranks; set train.packing=true, or train_model.context_parallel=1"
        )
    if ranks > 1 and config.train.mixed_precision == "fp16":
        raise ConfigError(
            f"train.mixed_precision=fp16 with train_model.num_devices={ranks}: the gradient scaler is not "
            "synchronized over ranks; set train.mixed_precision=bf16, which needs no scaler"
        )
    if model.offload != "none" and config.device == "cpu":
        raise ConfigError(
            f"train_model.offload={model.offload} with device=cpu: all tensors are in host memory already; "
            "set train_model.offload=none"
        )
    for key, default in (("prefetch_layers", 1), ("reshard_after_forward", True)):
        if ranks == 1 and vars(model)[key] != default:
            raise ConfigError(
                f"train_model.{key}={str(vars(model)[key]).lower()} with train_model.num_devices=1: a single rank "
                f"gathers no layers; set train_model.{key}={str(default).lower()}, or use two learner ranks or more"
            )
    if model.offload == "all" and ranks == 1:
        raise ConfigError(
            "train_model.offload=all with train_model.num_devices=1: parameters are offloaded shard by "
            "shard, which needs two learner ranks or more; set train_model.offload=optimizer, or train an "
            "adapter (train_model.lora.enabled=true)"
        )
    shards, ranks = config.ref_model.shard_size, config.ref_model.ranks
    if shards is not None and not ranks:
        raise ConfigError(
            f"ref_model.shard_size={shards} without ref_model.num_devices: there are no scorer ranks to hold "
            f"the shards; set ref_model.num_devices={shards}, or remove ref_model.shard_size"
        )
    if shards is not None and ranks % shards:
        raise ConfigError(
            f"ref_model.shard_size={shards} does not divide the {ranks} scorer ranks "
            f"(ref_model.num_devices); set a divisor of {ranks}, or remove ref_model.shard_size"
        )


def check_quantization(config: Config) -> None:
    """Checks that a quantized base has adapters and is used only where quantization works."""
    lora = config.train_model.lora
    if not lora.quantized:
        return
    field = f"train_model.lora.quantization={lora.quantization}"
    if not lora.enabled:
        raise ConfigError(
            f"{field} with train_model.lora.enabled=false: 4-bit weights cannot be trained, only adapters "
            "can; set train_model.lora.enabled=true, or train_model.lora.quantization=none"
        )
    if config.inference_model.lora == "adapter":
        raise ConfigError(
            f"{field} with inference_model.lora=adapter: engines would add the adapter to the unquantized "
            "base and sample from another policy than the trained policy. Set inference_model.lora=merge, "
            "which sends the dequantized base with the adapter added"
        )
    if config.train_model.offload == "all":
        raise ConfigError(
            f"{field} with train_model.offload=all: the scales of 4-bit weights stay on the GPU; set "
            "train_model.offload=optimizer or none"
        )
    reference = config.ref_model
    if reference.ranks and reference.name is None and config.policy.uses_reference:
        setting = device_setting(config, "ref_model")
        raise ConfigError(
            f"{field} with {setting}: the reference is the 4-bit base without its adapters, and scorers "
            f"would load another base; remove {setting.partition('=')[0]}"
        )
    if config.run == "dry_run":
        raise ConfigError(
            f"{field} with run=dry_run: 4-bit kernels cannot run on tensors without memory; set run=plan to "
            "print the memory that a run needs"
        )
