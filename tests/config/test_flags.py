"""Tests of the advice for flags of nanochat, Megatron-RL and ColossalChat."""

import re

import pytest

from config.cli.error_messages import known_keys, unknown_key_message
from config.cli.flags_of_other_trainers import FLAG_HINTS
from config.cli.keys_of_other_trainers import translate_key
from config.schema.config import Config
from tests.config.test_schema import ROOT, quickstart_error_message

PAGE = ROOT / "docs" / "coming_from.md"
NANOCHAT = {
    "source": "model.name", "model-tag": "model.name", "model-step": "model.name", "device-type": "device",
    "device-batch-size": "policy.pass_size", "examples-per-step": "env.num_envs",
    "num-samples": "env.repeats", "max-new-tokens": "inference_model.max_tokens",
    "temperature": "inference_model.temperature", "top-k": "inference_model.top_k",
    "unembedding-lr": "optimizer.group_lr", "embedding-lr": "optimizer.group_lr",
    "matrix-lr": "optimizer.muon_lr", "weight-decay": "optimizer.weight_decay",
    "init-lr-frac": "optimizer.schedule", "num-epochs": "train.total_dialog_turns",
    "save-every": "train.checkpoint_frequency", "eval-every": "eval.frequency",
    "eval-examples": "eval.sets.NAME.limit",
}  # fmt: skip
MEGATRON = {
    "perform-rl-step": "grpo.py", "grpo-prompts-per-step": "env.num_envs", "grpo-group-size": "env.repeats",
    "grpo-iterations": "train.epochs", "grpo-clamp-eps-lower": "policy.clip_epsilon_low",
    "grpo-clamp-eps-upper": "policy.clip_epsilon_high", "grpo-kl-beta": "policy.kl_coef",
    "grpo-entropy-term-weight": "policy.entropy_coef",
    "grpo-filter-groups-with-same-reward": "policy.dynamic_batching",
    "global-batch-size": "train.optim_batch_size", "micro-batch-size": "train.gradient_accumulation_steps",
    "train-samples": "train.total_dialog_turns", "langrl-env-config": "env.dataset",
    "env-config": "env.dataset", "rl-default-temperature": "inference_model.temperature",
    "rl-default-top-p": "inference_model.top_p", "rl-default-top-k": "inference_model.top_k",
    "rl-prompts-per-eval": "eval.sets.NAME.limit", "rl-partial-rollouts": "grpo_async.py",
    "rl-generation-lag": "train.max_policy_age", "rl-desired-lag": "train.max_policy_age",
    "rl-max-inflight-requests": "inference_model.max_num_seqs",
    "rl-parallel-generation-tasks": "inference_model.max_num_seqs",
    "rl-submission-granularity": "grpo_async.py", "rl-consumption-granularity": "grpo_async.py",
    "rl-durable-rollout-bank": "run=rollouts", "rl-inference-logprobs-is-correction": "policy.mismatch",
    "rl-importance-sampling-truncation-coef": "policy.mismatch_cap",
    "rl-use-sequence-packing": "train.packing",
    "rl-sequence-packing-bin-size": "train.max_tokens_per_microbatch",
    "rl-sequence-packing-algo": "train.packing", "rl-sequence-packing-max-sequences-per-bin": "train.packing",
    "rl-training-cuda-graphs": "inference_model.enforce_eager",
    "rl-inference-tensor-model-parallel-size": "inference_model.tensor_parallel_size",
    "rl-inference-pipeline-model-parallel-size": "inference_model.tensor_parallel_size",
    "rl-inference-expert-model-parallel-size": "inference_model.tensor_parallel_size",
    "rl-offload-optimizer-during-inference": "train_model.offload",
    "rl-offload-inference-model-weights": "inference_model.colocate",
    "rl-remove-kv-cache-during-training": "inference_model.colocate", "refit-method": "run=plan",
    "rl-verify-model-weights-swap": "train.weight_check_every", "rl-skip-bos-token": "model.chat_template",
    "rl-profile": "run=report", "rl-inference-parsers": "env.tools",
    "seq-length": "inference_model.max_model_len",
    "inference-max-seq-length": "inference_model.max_model_len",
    "inference-max-requests": "inference_model.max_num_seqs",
    "inference-max-batch-size": "inference_model.max_num_seqs",
    "inference-dynamic-batching-max-tokens": "inference_model.max_num_batched_tokens",
    "inference-dynamic-batching-buffer-size-gb": "inference_model.kv_cache_gib",
    "inference-buffer-size-gb": "inference_model.kv_cache_gib", "pretrained-checkpoint": "model.name",
    "load": "train.resume", "finetune": "model.name", "save": "hydra.run.dir",
    "save-interval": "train.checkpoint_frequency", "save-retain-interval": "train.keep_checkpoints",
    "eval-interval": "eval.frequency", "seed": "train.seed", "bf16": "train.mixed_precision",
    "lr": "optimizer.lr", "lr-warmup-samples": "optimizer.warmup_steps",
    "weight-decay": "optimizer.weight_decay", "clip-grad": "optimizer.clip_grad_norm",
    "adam-beta1": "optimizer.betas", "adam-beta2": "optimizer.betas", "adam-eps": "optimizer.eps",
    "attention-dropout": "dropout is off", "hidden-dropout": "dropout is off",
    "calculate-per-token-loss": "policy.aggregation", "recompute-granularity": "train.gradient_checkpointing",
    "recompute-activations": "train.gradient_checkpointing",
    "use-distributed-optimizer": "train_model.shard_size",
    "tensor-model-parallel-size": "inference_model.tensor_parallel_size",
    "pipeline-model-parallel-size": "splits nothing else", "sequence-parallel": "splits nothing else",
    "context-parallel-size": "train_model.context_parallel",
    "distributed-timeout-minutes": "train.wait_timeout_s", "tokenizer-type": "model.name",
    "tokenizer-model": "model.name", "num-layers": "model.name", "hidden-size": "model.name",
    "transformer-impl": "model.attn_implementation", "attention-backend": "model.attn_implementation",
    "wandb-project": "logging.project", "wandb-exp-name": "logging.experiment_name",
    "tensorboard-dir": "hydra.run.dir", "log-interval": "logging.backend",
}  # fmt: skip
COLOSSAL = {
    "dataset": "env.dataset", "eval-dataset": "eval.sets.NAME.dataset", "project": "logging.project",
    "num-episodes": "train.total_dialog_turns", "num-trainers": "train_model.num_devices",
    "num-inferencer": "inference_model.num_devices", "num-generations": "env.repeats",
    "inference-batch-size": "env.num_envs", "inference-microbatch-size": "inference_model.max_num_seqs",
    "train-batch-size": "train.optim_batch_size", "train-minibatch-size": "train.gradient_accumulation_steps",
    "train-microbatch-size": "train.gradient_accumulation_steps", "ray_dir": "RAY_TMPDIR",
    "master_address": "ray.address", "master_port": "the run chooses free ports", "backend": "inference_model.backend",
    "temperature": "inference_model.temperature", "top-k": "inference_model.top_k",
    "top-p": "inference_model.top_p", "system-prompt": "env.system_prompt",
    "max-new-tokens": "inference_model.max_tokens", "max-prompt-tokens": "env.max_prompt_tokens",
    "algo": "policy=dapo", "learning-rate": "optimizer.lr", "kl-coeff": "policy.kl_coef",
    "reward-type": "env.reward", "eval-interval": "eval.frequency",
    "save-interval": "train.checkpoint_frequency", "save-dir": "hydra.run.dir",
    "eval-save-dir": "hydra.run.dir", "rollout-save-dir": "hydra.run.dir",
    "tensor-parallel-size": "inference_model.tensor_parallel_size",
    "pipeline-parallel-size": "splits nothing else", "zero-stage": "train_model.shard_size",
    "producer-tensor-parallel-size": "inference_model.tensor_parallel_size",
    "filter_range": "policy.filter_range", "dynamic_batching": "policy.dynamic_batching",
    "clip_eps_low": "policy.clip_epsilon_low", "clip_eps_high": "policy.clip_epsilon_high",
    "skip_threshold": "policy.ratio_max", "loss_variation": "policy.aggregation",
    "soft_over_length_punishment": "policy.overlong_cache", "cache_length": "policy.overlong_cache",
    "filter_truncated_response": "policy.filter_truncated", "response_format_tags": "env.reward",
}  # fmt: skip
SYSTEMS = {"nanochat": NANOCHAT, "megatron": MEGATRON, "colossal": COLOSSAL}


def advice(key: str) -> str:
    """Returns the advice in the message about an unknown key."""
    text = unknown_key_message(key)
    assert text.startswith(f"{key}: no such configuration key; "), text
    return text.partition("; ")[2]


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_flag_has_the_equivalent_key(system: str) -> None:
    """Checks that each flag is in a table, or is the end of a key."""
    for flag, expected in SYSTEMS[system].items():
        name = flag.replace("-", "_")
        text = translate_key(flag)
        if text is None:
            assert expected in [key for key in known_keys(Config) if key.split(".")[-1] == name], flag
            text = advice(name)
        assert expected in text and expected in advice(name), flag


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_page_has_every_flag(system: str) -> None:
    """Checks that each flag is on the page in backquotes, with hyphens or underscores."""
    names = {name.lstrip("-") for name in re.findall(r"`([\w-]+)`", PAGE.read_text())}
    assert not SYSTEMS[system].keys() - names


def test_hyphens_do_not_matter() -> None:
    assert translate_key("--grpo-group-size") == translate_key("grpo_group_size") == "use env.repeats"
    assert translate_key("learning-rate") == "use optimizer.lr"
    assert "grpo-group-size: no such configuration key; use env.repeats" in quickstart_error_message(
        "grpo-group-size=16"
    )


def test_a_flag_does_not_match_the_end_of_a_dotted_name() -> None:
    for name in ("mode", "source", "save", "load", "project"):
        assert name in FLAG_HINTS
        assert FLAG_HINTS[name] not in unknown_key_message(f"tracker.{name}")
