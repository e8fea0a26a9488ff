"""Names of keys in other trainers (TRL and transformers, verl, Lightning), and what is here in their place.

Each leads to the keys that do the same here, or to a sentence about what to do instead. config/messages.py tells it
to a user who types one of them.
"""

TURNS = "train.total_dialog_turns: completions in the whole run, steps times train.optim_batch_size"
EPOCHS = "train.total_dialog_turns: completions in the whole run, which may pass over the data more than once"
BATCH = "train.optim_batch_size, completions per optimizer step, over train.gradient_accumulation_steps microbatches"
PROMPTS = "env.num_envs, prompts per iteration; train.dialog_turns_per_batch counts its completions"
FOLDER = "hydra.run.dir: the folder of the run"
DEVICES = "train_model.num_devices and inference_model.num_devices"

HERE: dict[str, str] = {
    # TRL's GRPOConfig and transformers' TrainingArguments
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "max_steps": TURNS,
    "num_train_epochs": EPOCHS,
    "num_generations": "env.repeats",
    "num_generations_eval": "eval.sets.NAME.n",
    "group_size": "env.repeats",
    "num_iterations": "train.epochs",
    "per_device_train_batch_size": BATCH,
    "train_batch_size": BATCH,
    "batch_size": BATCH,
    "mini_batch_size": BATCH,
    "generation_batch_size": PROMPTS,
    "max_completion_length": "inference_model.max_tokens",
    "max_new_tokens": "inference_model.max_tokens",
    "max_prompt_length": "env.max_prompt_tokens",
    "max_seq_length": "inference_model.max_model_len",
    "vllm_max_model_length": "inference_model.max_model_len",
    "beta": "policy.kl_coef",
    "kl_coeff": "policy.kl_coef",
    "epsilon": "policy.clip_epsilon_low and policy.clip_epsilon_high",
    "epsilon_low": "policy.clip_epsilon_low",
    "epsilon_high": "policy.clip_epsilon_high",
    "delta": "policy.ratio_max",
    "loss_type": "policy, a preset (policy=dapo, policy=dr_grpo), and its field policy.aggregation",
    "scale_rewards": "policy.scale",
    "importance_sampling_level": "policy.ratio",
    "mask_truncated_completions": "policy.filter_truncated",
    "vllm_importance_sampling_correction": "policy.mismatch, with policy.old_log_prob=trainer",
    "vllm_importance_sampling_mode": "policy.mismatch and policy.mismatch_level",
    "vllm_importance_sampling_cap": "policy.mismatch_cap",
    "steps_per_generation": "train.dialog_turns_per_batch over train.optim_batch_size",
    "reward_funcs": "env.reward, a name or module:function",
    "use_vllm": "inference_model.backend=vllm",
    "vllm_gpu_memory_utilization": "inference_model.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "inference_model.tensor_parallel_size",
    "vllm_mode": "inference_model.colocate",
    "vllm_enable_sleep_mode": "inference_model.colocate",
    "warmup_ratio": "optimizer.warmup_fraction",
    "warmup_steps": "optimizer.warmup_steps",
    "lr_scheduler_type": "optimizer.schedule",
    "max_grad_norm": "optimizer.clip_grad_norm",
    "gradient_clip_val": "optimizer.clip_grad_norm",
    "grad_clip": "optimizer.clip_grad_norm",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "optim": "optimizer, a preset (optimizer=muon_adamw), and its field optimizer.name",
    "bf16": "train.mixed_precision=bf16",
    "fp16": "train.mixed_precision=fp16",
    "precision": "train.mixed_precision",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attn_implementation",
    "model_name_or_path": "model.name",
    "model_path": "model.name",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "enable_gradient_checkpointing": "train.gradient_checkpointing",
    "accumulate_grad_batches": "train.gradient_accumulation_steps",
    "save_steps": "train.checkpoint_frequency, in iterations",
    "save_total_limit": "train.keep_checkpoints",
    "eval_steps": "eval.frequency, in iterations",
    "eval_strategy": "eval.frequency, in iterations",
    "eval_on_start": "eval.sets: a run with sets evaluates them before its first iteration",
    "log_completions": "logging.sample_frequency, in iterations",
    "report_to": "logging.backend",
    "run_name": "logging.experiment_name",
    "output_dir": FOLDER,
    "overwrite_output_dir": FOLDER,
    "resume_from_checkpoint": "train.resume: auto, or the path of a checkpoint",
    "ckpt_path": "train.resume: auto, or the path of a checkpoint",
    "use_peft": "train_model.lora.enabled",
    "lora_r": "train_model.lora.r",
    "lora_alpha": "train_model.lora.alpha",
    "lora_dropout": "train_model.lora.dropout",
    "dataset_name": "env.dataset",
    "full_determinism": "train.deterministic",
    "data_seed": "train.seed",
    # Lightning
    "max_epochs": EPOCHS,
    "limit_val_batches": "eval.sets.NAME.limit",
    "val_check_interval": "eval.frequency, in iterations",
    "check_val_every_n_epoch": "eval.frequency, in iterations",
    "default_root_dir": FOLDER,
    "devices": DEVICES,
    "num_nodes": "ray.address: a cluster of several machines",
    # verl
    "data.train_files": "env.data_files, with env.dataset",
    "data.val_files": "eval.sets.NAME.data_files",
    "data.train_batch_size": PROMPTS,
    "data.max_response_length": "inference_model.max_tokens",
    "data.shuffle": "train.seed: prompts are always shuffled",
    "data.seed": "train.seed",
    "ppo_mini_batch_size": "train.optim_batch_size, which counts completions, not prompts",
    "ppo_micro_batch_size_per_gpu": "train.gradient_accumulation_steps: microbatches in an optimizer step",
    "ppo_micro_batch_size": "train.gradient_accumulation_steps: microbatches in an optimizer step",
    "ppo_epochs": "train.epochs",
    "clip_ratio": "policy.clip_epsilon_low and policy.clip_epsilon_high",
    "clip_ratio_low": "policy.clip_epsilon_low",
    "clip_ratio_high": "policy.clip_epsilon_high",
    "clip_ratio_c": "policy.dual_clip",
    "kl_loss_coef": "policy.kl_coef",
    "kl_loss_type": "policy.kl_estimator",
    "use_kl_loss": "policy.kl_coef above 0",
    "use_kl_in_reward": "policy.kl_placement=reward",
    "kl_penalty": "policy.kl_estimator",
    "entropy_coeff": "policy.entropy_coef",
    "loss_agg_mode": "policy.aggregation",
    "optim.weight_decay": "optimizer.weight_decay",
    "lr_warmup_steps": "optimizer.warmup_steps",
    "lr_warmup_steps_ratio": "optimizer.warmup_fraction",
    "min_lr_ratio": "optimizer.min_lr_fraction",
    "model.path": "model.name",
    "lora_rank": "train_model.lora.r, with train_model.lora.enabled=true",
    "rollout.n": "env.repeats",
    "rollout.name": "inference_model.backend",
    "rollout.mode": "the script: grpo_async.py overlaps, grpo.py does not",
    "tensor_model_parallel_size": "inference_model.tensor_parallel_size",
    "free_cache_engine": "inference_model.colocate",
    "adv_estimator": "policy, a preset such as policy=grpo or policy=rloo",
    "norm_adv_by_std_in_grpo": "policy.scale",
    "filter_groups": "policy.filter_range, with policy.dynamic_batching=true",
    "filter_groups.enable": "policy.dynamic_batching, with policy.filter_range",
    "filter_groups.max_num_gen_batches": "policy.filter_attempts",
    "overlong_buffer.len": "policy.overlong_cache",
    "overlong_buffer.penalty_factor": "policy.overlong_penalty",
    "custom_reward_function.path": "env.reward, as module:function",
    "custom_reward_function.name": "env.reward, as module:function",
    "trainer.total_epochs": EPOCHS,
    "trainer.total_training_steps": TURNS,
    "total_training_steps": TURNS,
    "total_epochs": EPOCHS,
    "n_gpus_per_node": DEVICES,
    "nnodes": "ray.address: a cluster of several machines",
    "trainer.logger": "logging.backend",
    "project_name": "logging.project",
    "experiment_name": "logging.experiment_name",
    "save_freq": "train.checkpoint_frequency, in iterations",
    "test_freq": "eval.frequency, in iterations",
    "val_only": "run=eval",
    "val_before_train": "eval.sets: a run with sets evaluates them before its first iteration",
    "default_local_dir": FOLDER,
    "resume_mode": "train.resume: auto, or the path of a checkpoint",
    "resume_from_path": "train.resume: auto, or the path of a checkpoint",
    "max_actor_ckpt_to_keep": "train.keep_checkpoints",
    "use_dynamic_bsz": "train.gradient_accumulation_steps: microbatches in an optimizer step",
    "rollout_correction": "policy.mismatch, with policy.old_log_prob=trainer",
}
"""Name, or the end of a dotted one: where it is here."""

ELSEWHERE: dict[str, str] = {
    "load_in_4bit": "4-bit weights are not supported; train_model.lora.enabled and model.dtype=bfloat16 save memory",
    "load_in_8bit": "8-bit weights are not supported; train_model.lora.enabled and model.dtype=bfloat16 save memory",
    "bnb_4bit_compute_dtype": "4-bit weights are not supported; train_model.lora.enabled=true saves memory",
    "push_to_hub": "uploading is not part of a run",
    "deepspeed": "DeepSpeed is not used; run=plan says what fits",
    "fsdp": "FSDP is not set by hand; run=plan says what fits",
    "use_liger_kernel": "not needed: the loss never holds all logits (train.log_prob_chunk_size)",
    "dataloader_num_workers": "prompts are made in the process of the learner; env.reward_workers judge",
    "param_offload": "weights are not offloaded; run=plan names what makes a run fit",
    "optimizer_offload": "optimizer states are not offloaded; run=plan names what makes a run fit",
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
