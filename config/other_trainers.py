"""Names of keys in other trainers (TRL and transformers, verl, Lightning), and what is here in their place.

Each leads to the keys that do the same here, or to a sentence about what to do instead. config/error_messages.py tells
it to a user who types one of them.
"""

_NAMES = {
    "model.attn_implementation": "attn_implementation",
    "model.dtype": "torch_dtype",
    "model.name": "model_name_or_path model_path model.path",
    "env.data_files, with env.dataset": "data.train_files",
    "env.dataset": "dataset_name",
    "env.max_prompt_tokens": "max_prompt_length",
    "env.num_envs, prompts per iteration; train.dialog_turns_per_batch counts its completions": (
        "generation_batch_size data.train_batch_size"
    ),
    "env.repeats": "num_generations group_size rollout.n",
    "env.reward, a name or module:function": "reward_funcs",
    "env.reward, as module:function": "custom_reward_function.path custom_reward_function.name",
    "train.checkpoint_frequency, in iterations": "save_steps save_freq",
    "train.deterministic": "full_determinism",
    "train.dialog_turns_per_batch: completions of an iteration, of one or more optimizer steps": "steps_per_generation",
    "train.epochs": "num_iterations ppo_epochs",
    "train.gradient_accumulation_steps": "accumulate_grad_batches",
    "train.gradient_accumulation_steps: microbatches in an optimizer step": (
        "ppo_micro_batch_size_per_gpu ppo_micro_batch_size"
    ),
    "train.max_tokens_per_microbatch": "use_dynamic_bsz ppo_max_token_len_per_gpu",
    "train.packing: a microbatch is one sequence, each prompt once": "share_prompt use_remove_padding packing",
    "train.compile": "torch_compile use_torch_compile",
    "train.gradient_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "train.keep_checkpoints": "save_total_limit max_actor_ckpt_to_keep",
    "train.mixed_precision=bf16": "bf16",
    "train.mixed_precision=fp16": "fp16",
    "train.mixed_precision": "precision",
    "train.optim_batch_size, completions per optimizer step, over train.gradient_accumulation_steps microbatches": (
        "per_device_train_batch_size train_batch_size batch_size mini_batch_size"
    ),
    "train.optim_batch_size, which counts completions, not prompts": "ppo_mini_batch_size",
    "train.resume: auto, or the path of a checkpoint": "resume_from_checkpoint ckpt_path resume_mode resume_from_path",
    "train.seed": "data_seed data.seed",
    "train.seed: prompts are always shuffled": "data.shuffle",
    "train.total_dialog_turns: completions in the whole run, steps times train.optim_batch_size": (
        "max_steps trainer.total_training_steps total_training_steps"
    ),
    "train.total_dialog_turns: completions in the whole run, which may pass over the data more than once": (
        "num_train_epochs max_epochs trainer.total_epochs total_epochs"
    ),
    "policy, a preset (policy=dapo, policy=dr_grpo), and its field policy.aggregation": "loss_type",
    "policy, a preset such as policy=grpo or policy=rloo": "adv_estimator",
    "policy.aggregation": "loss_agg_mode",
    "policy.clip_epsilon_high": "epsilon_high clip_ratio_high",
    "policy.clip_epsilon_low and policy.clip_epsilon_high": "epsilon clip_ratio",
    "policy.clip_epsilon_low": "epsilon_low clip_ratio_low",
    "policy.dual_clip": "clip_ratio_c",
    "policy.dynamic_batching, with policy.filter_range": "filter_groups.enable",
    "policy.entropy_coef": "entropy_coeff",
    "policy.filter_attempts": "filter_groups.max_num_gen_batches",
    "policy.filter_range, with policy.dynamic_batching=true": "filter_groups",
    "policy.filter_truncated": "mask_truncated_completions",
    "policy.kl_coef": "beta kl_coeff kl_loss_coef",
    "policy.kl_coef above 0": "use_kl_loss",
    "policy.kl_estimator": "kl_loss_type kl_penalty",
    "policy.kl_placement=reward": "use_kl_in_reward",
    "policy.mismatch, with policy.old_log_prob=trainer": "vllm_importance_sampling_correction rollout_correction",
    "policy.mismatch and policy.mismatch_level": "vllm_importance_sampling_mode",
    "policy.mismatch_cap": "vllm_importance_sampling_cap",
    "policy.overlong_cache": "overlong_buffer.len",
    "policy.overlong_penalty": "overlong_buffer.penalty_factor",
    "policy.ratio": "importance_sampling_level",
    "policy.ratio_max": "delta",
    "policy.scale": "scale_rewards norm_adv_by_std_in_grpo",
    "optimizer, a preset (optimizer=muon_adamw), and its field optimizer.name": "optim",
    "optimizer.betas": "adam_beta1 adam_beta2",
    "optimizer.clip_grad_norm": "max_grad_norm gradient_clip_val grad_clip",
    "optimizer.eps": "adam_epsilon",
    "optimizer.lr": "learning_rate lr",
    "optimizer.min_lr_fraction": "min_lr_ratio",
    "optimizer.schedule": "lr_scheduler_type",
    "optimizer.warmup_fraction": "warmup_ratio lr_warmup_steps_ratio",
    "optimizer.warmup_steps": "warmup_steps lr_warmup_steps",
    "optimizer.weight_decay": "optim.weight_decay",
    "train_model.num_devices": "n_gpus_per_node trainer.n_gpus_per_node num_processes world_size",
    "train_model.num_nodes, with ray.address: nodes of a cluster that the learner is on": (
        "num_nodes nnodes trainer.nnodes num_machines"
    ),
    "train_model.offload=all": "param_offload cpu_offload",
    "train_model.offload=optimizer": "optimizer_offload",
    "train_model.shard_size": "fsdp_size",
    "train_model.lora.alpha": "lora_alpha",
    "train_model.lora.dropout": "lora_dropout",
    "train_model.lora.enabled": "use_peft",
    "train_model.lora.quantization": "bnb_4bit_quant_type",
    "train_model.lora.quantization=nf4, with train_model.lora.enabled=true": "load_in_4bit use_bnb_nested_quant",
    "train_model.lora.r": "lora_r",
    "train_model.lora.r, with train_model.lora.enabled=true": "lora_rank",
    "train_model.num_devices and inference_model.num_devices": "devices n_gpus_per_node",
    "inference_model.backend=vllm": "use_vllm",
    "inference_model.backend": "rollout.name",
    "inference_model.colocate": "vllm_mode vllm_enable_sleep_mode free_cache_engine",
    "inference_model.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "inference_model.max_model_len": "max_seq_length vllm_max_model_length",
    "inference_model.max_tokens": "max_completion_length max_new_tokens data.max_response_length",
    "inference_model.tensor_parallel_size": "vllm_tensor_parallel_size tensor_model_parallel_size",
    "eval.frequency, in iterations": "eval_steps eval_strategy val_check_interval check_val_every_n_epoch test_freq",
    "eval.sets: a run with sets evaluates them before its first iteration": "eval_on_start val_before_train",
    "eval.sets.NAME.data_files": "data.val_files",
    "eval.sets.NAME.limit": "limit_val_batches",
    "eval.sets.NAME.n": "num_generations_eval",
    "logging.backend": "report_to trainer.logger",
    "logging.experiment_name": "run_name experiment_name",
    "logging.project": "project_name",
    "logging.sample_frequency, in iterations": "log_completions",
    "run=eval": "val_only",
    "hydra.run.dir: the folder of the run": "output_dir overwrite_output_dir default_root_dir default_local_dir",
    "the script: grpo_async.py overlaps, grpo.py does not": "rollout.mode",
}
"""What is here: its names there, or the ends of dotted ones."""
HERE = {name: here for here, names in _NAMES.items() for name in names.split()}

ELSEWHERE: dict[str, str] = {
    "load_in_8bit": "8-bit weights are not supported; 4-bit ones are (train_model.lora.quantization=nf4)",
    "bnb_4bit_compute_dtype": "it is that of train.mixed_precision, or else model.dtype",
    "push_to_hub": "run=export checkpoint=RUN to=FOLDER hub=USER/NAME uploads a model",
    "deepspeed": "DeepSpeed is not used; run=plan says what fits",
    "fsdp": "train_model.num_devices above 1 shards the model with FSDP2; run=plan says what fits",
    "use_liger_kernel": "not needed: the loss never holds all logits (train.log_prob_chunk_size)",
    "dataloader_num_workers": "prompts are made in the process of the learner; env.reward_workers judge",
    "ulysses_sequence_parallel_size": "sequences are not split over devices",
    "critic": "GRPO has no critic; the baseline is policy.baseline",
    "experiment": "--config-dir FOLDER leads to a folder with experiment/NAME.yaml, which +experiment=NAME takes",
    "callbacks": "there are no callbacks; the schedules are short enough to edit (grpo.py)",
}
"""Likewise: what to do without it."""

SECTIONS: dict[str, str] = {
    "trainer": "train, logging and eval",
    "data": "env",
    "datamodule": "env",
    "dataset": "env",
    "algorithm": "policy",
    "actor_rollout_ref": "model, train, policy, optimizer and inference_model",
    "actor": "train, policy and optimizer",
    "rollout": "inference_model",
    "reward_model": "env.reward, env.reward_weights and env.reward_timeout_s",
    "logger": "logging",
    "tracker": "logging",
}
"""The first part of a dotted name: the sections that hold here what it holds there."""


def translated(key: str) -> str | None:
    """What a name of another trainer's is here, as the end of a sentence; None for a name that nobody uses.

    The longest end that is known counts: `actor_rollout_ref.rollout.n` is looked up whole, then as `rollout.n`,
    then as `n`.
    """
    parts = key.split(".")
    for start in range(len(parts)):
        name = ".".join(parts[start:])
        if name in HERE:
            return f"here it is {HERE[name]}"
        if name in ELSEWHERE:
            return ELSEWHERE[name]
    return next((ELSEWHERE[part] for part in parts if part in ELSEWHERE), None)


def section_elsewhere(key: str) -> str | None:
    """Where the neighbours of a name of another trainer's are; None where its first part names no section of one."""
    section = key.split(".")[0]
    return f"what {section} holds elsewhere is here in {SECTIONS[section]}" if section in SECTIONS else None
