"""Names of keys in other trainers (TRL, verl, OpenRLHF, NeMo-RL, prime-rl, slime, Lightning), and what is here.

Each leads to the keys that do the same here, or to a sentence about what to do instead. config/error_messages.py tells
it to a user who types one of them.
"""

_NAMES = {
    "model.attn_implementation": "attn_implementation",
    "model.dtype": "torch_dtype",
    "model.name": (
        "model_name_or_path model_path model.path pretrain hf_checkpoint policy.model_name "
        "trainer.model.name inference.model.name"
    ),
    "env.data_files, with env.dataset": "data.train_files prompt_data",
    "model.chat_template": (
        "chat_template_path custom_chat_template apply_chat_template input_template chat_template"
    ),
    "env.dataset": "dataset_name",
    "env.data_revision": "dataset_revision",
    "env.options, with its prompt=COLUMN": "prompt_key input_key",
    "env.options, with its answer=COLUMN": "label_key",
    "env.max_prompt_tokens": "max_prompt_length prompt_max_len max_input_seq_length",
    "env.max_steps, with env.tools or env.reasoning": (
        "max_turns max_rollout_turns max_assistant_turns max_user_turns multi_turn.enable "
        "max_tool_calling_iterations"
    ),
    "env.max_prompt_tokens: a longer prompt is left out and counted": (
        "data.filter_overlong_prompts data.truncation"
    ),
    "env.num_envs, prompts per iteration; train.dialog_turns_per_batch counts its completions": (
        "generation_batch_size data.train_batch_size rollout_batch_size num_prompts_per_step"
    ),
    "env.repeats": (
        "num_generations group_size rollout.n n_samples_per_prompt num_generations_per_prompt "
        "rollouts_per_example"
    ),
    "env.reward_workers": "reward.num_workers math.num_workers reward_model.num_workers",
    "env.tools": "tool_config_path",
    "env.reward, a name or module:function": "reward_funcs",
    "env.reward, as module:function": (
        "custom_reward_function.path custom_reward_function.name custom_rm_path reward_manager"
    ),
    "train.checkpoint_frequency, in iterations": (
        "save_steps save_freq save_interval save_period ckpt.interval"
    ),
    "train.deterministic": "full_determinism",
    "train.dialog_turns_per_batch: completions of an iteration, of one or more optimizer steps": (
        "steps_per_generation"
    ),
    "train.epochs": "num_iterations ppo_epochs grpo.num_iterations",
    "train.gradient_accumulation_steps": "accumulate_grad_batches",
    "train.gradient_accumulation_steps: microbatches in an optimizer step": (
        "ppo_micro_batch_size_per_gpu ppo_micro_batch_size micro_train_batch_size train_micro_batch_size"
    ),
    "train.max_tokens_per_microbatch": (
        "use_dynamic_bsz ppo_max_token_len_per_gpu max_tokens_per_gpu dynamic_batching.enabled"
    ),
    "train.packing: a microbatch is one sequence, each prompt once": (
        "share_prompt use_remove_padding packing packing_samples sequence_packing.enabled"
    ),
    "train.compile": "torch_compile use_torch_compile",
    "train.gradient_checkpointing": (
        "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing"
    ),
    "train.keep_best": "checkpointing.metric_name",
    "train.keep_checkpoints": "save_total_limit max_actor_ckpt_to_keep keep_top_k ckpt.keep",
    "train.mixed_precision=bf16": "bf16",
    "train.mixed_precision=fp16": "fp16",
    "train.mixed_precision": "precision",
    "train.optim_batch_size, completions per optimizer step, over train.gradient_accumulation_steps microbatches": (
        "per_device_train_batch_size train_batch_size batch_size mini_batch_size global_batch_size "
        "train_global_batch_size"
    ),
    "train.optim_batch_size, which counts completions, not prompts": "ppo_mini_batch_size",
    "train.resume: auto, or the path of a checkpoint": (
        "resume_from_checkpoint ckpt_path resume_mode resume_from_path load_checkpoint resume_step"
    ),
    "train.log_prob_chunk_size": "log_prob_micro_batch_size_per_gpu logprob_batch_size",
    "train.max_policy_age": "max_async_level max_off_policy_level",
    "train.seed": "data_seed data.seed",
    "train.seed: prompts are always shuffled": "data.shuffle",
    "train.total_dialog_turns: completions in the whole run, steps times train.optim_batch_size": (
        "max_steps trainer.total_training_steps total_training_steps max_num_steps num_rollout"
    ),
    "train.total_dialog_turns: completions in the whole run, which may pass over the data more than once": (
        "num_train_epochs max_epochs trainer.total_epochs total_epochs"
    ),
    "policy, a preset (policy=dapo, policy=dr_grpo), and its field policy.aggregation": "loss_type",
    "policy, a preset such as policy=grpo or policy=rloo": (
        "adv_estimator advantage_estimator use_leave_one_out_baseline"
    ),
    "policy.aggregation": "loss_agg_mode token_level_loss",
    "policy.clip_epsilon_high": "epsilon_high clip_ratio_high eps_clip_high ratio_clip_max",
    "policy.clip_epsilon_low and policy.clip_epsilon_high": "epsilon clip_ratio eps_clip eps_clip_low_high",
    "policy.clip_epsilon_low": "epsilon_low clip_ratio_low eps_clip_low ratio_clip_min",
    "policy.dual_clip": "clip_ratio_c ratio_clip_c",
    "policy.dynamic_batching, with policy.filter_range": "filter_groups.enable",
    "policy.entropy_coef": "entropy_coeff",
    "policy.filter_attempts": "filter_groups.max_num_gen_batches",
    "policy.filter_range, with policy.dynamic_batching=true": (
        "filter_groups dynamic_filtering_reward_range dynamic_filtering dynamic_sampling_filter_path"
    ),
    "policy.filter_truncated": "mask_truncated_completions overlong_filtering",
    "policy.kl_coef": "beta kl_coeff kl_loss_coef init_kl_coef reference_policy_kl_penalty",
    "policy.kl_coef above 0": "use_kl_loss",
    "policy.kl_estimator": "kl_loss_type kl_penalty",
    "policy.kl_placement=reward": "use_kl_in_reward",
    "policy.mismatch, with policy.old_log_prob=trainer": (
        "vllm_importance_sampling_correction rollout_correction enable_vllm_is_correction use_tis "
        "use_importance_sampling_correction"
    ),
    "policy.mismatch and policy.mismatch_level": "vllm_importance_sampling_mode",
    "policy.mismatch_cap": "vllm_importance_sampling_cap vllm_is_truncated_threshold tis_imp_ratio_cap",
    "policy.overlong_cache": "overlong_buffer.len overlong_buffer_len",
    "policy.overlong_penalty": "overlong_buffer.penalty_factor",
    "policy.ratio": "importance_sampling_level",
    "policy.ratio_max": "delta",
    "policy.scale": "scale_rewards norm_adv_by_std_in_grpo normalize_rewards",
    "optimizer, a preset (optimizer=muon_adamw), and its field optimizer.name": "optim",
    "optimizer.betas": "adam_beta1 adam_beta2 optim.betas optimizer.beta optimizer.beta1 optimizer.beta2",
    "optimizer.clip_grad_norm": "max_grad_norm gradient_clip_val grad_clip optim.max_norm",
    "optimizer.eps": "adam_epsilon optim.eps optim.epsilon optimizer.epsilon",
    "optimizer.lr": "learning_rate lr actor_learning_rate",
    "optimizer.min_lr_fraction": "min_lr_ratio",
    "optimizer.schedule": "lr_scheduler_type warmup_style lr_scheduler lr_decay_style",
    "optimizer.warmup_fraction": "warmup_ratio lr_warmup_steps_ratio",
    "optimizer.warmup_steps": "warmup_steps lr_warmup_steps",
    "optimizer.weight_decay": "optim.weight_decay",
    "train_model.num_devices": (
        "n_gpus_per_node trainer.n_gpus_per_node num_processes world_size actor_num_gpus_per_node "
        "actor_num_gpus"
    ),
    "train_model.num_nodes, with ray.address: nodes of a cluster that the learner is on": (
        "num_nodes nnodes trainer.nnodes num_machines actor_num_nodes"
    ),
    "train_model.offload=all": "param_offload cpu_offload",
    "train_model.offload=optimizer": "optimizer_offload adam_offload",
    "train_model.shard_size": "fsdp_size",
    "train_model.lora.alpha": "lora_alpha",
    "train_model.lora.dropout": "lora_dropout",
    "train_model.lora.enabled": "use_peft",
    "train_model.lora.quantization": "bnb_4bit_quant_type",
    "train_model.lora.quantization=nf4, with train_model.lora.enabled=true": (
        "load_in_4bit use_bnb_nested_quant"
    ),
    "train_model.lora.r": "lora_r",
    "train_model.lora.r, with train_model.lora.enabled=true": "lora_rank",
    "train_model.num_devices and inference_model.num_devices": "devices n_gpus_per_node gpus_per_node",
    "inference_model.backend=vllm": "use_vllm",
    "inference_model.backend": "rollout.name",
    "inference_model.colocate": "vllm_mode vllm_enable_sleep_mode free_cache_engine colocate_all_models",
    "inference_model.dtype": "inference_model.precision rollout.dtype rollout.precision generation.precision",
    "inference_model.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "inference_model.max_model_len": "max_seq_length vllm_max_model_length seq_len max_total_sequence_length",
    "inference_model.max_tokens": (
        "max_completion_length max_new_tokens data.max_response_length generate_max_len "
        "rollout_max_response_len rollout.response_length sampling.max_tokens"
    ),
    "inference_model.num_devices": "vllm_num_engines rollout_num_gpus",
    "inference_model.temperature": "rollout_temperature",
    "inference_model.tensor_parallel_size": (
        "vllm_tensor_parallel_size tensor_model_parallel_size inference.parallel.tp "
        "rollout_num_gpus_per_engine"
    ),
    "eval.frequency, in iterations": (
        "eval_steps eval_strategy val_check_interval check_val_every_n_epoch test_freq eval_interval "
        "val_period"
    ),
    "eval.sets: a run with sets evaluates them before its first iteration": (
        "eval_on_start val_before_train val_at_start"
    ),
    "eval.sets.NAME.data_files": "data.val_files eval_prompt_data",
    "eval.sets.NAME.limit": "limit_val_batches max_val_samples eval.max_samples",
    "eval.sets.NAME.n": (
        "num_generations_eval n_samples_per_eval_prompt val_kwargs.n eval.n eval.num_generations eval.repeats"
    ),
    "eval.sets.NAME.temperature": "val_kwargs.temperature eval.temperature",
    "eval.sets.NAME.top_p": "val_kwargs.top_p eval.top_p",
    "eval.sets.NAME.max_tokens": "eval.max_tokens eval.max_new_tokens eval.max_completion_length",
    "logging.backend": "report_to trainer.logger use_wandb wandb_enabled",
    "logging.experiment_name": "run_name experiment_name wandb.name",
    "logging.project": "project_name wandb_project",
    "logging.sample_frequency, in iterations": "log_completions",
    "run=eval": "val_only",
    "hydra.run.dir: the folder of the run": (
        "output_dir overwrite_output_dir default_root_dir default_local_dir log_dir checkpoint_dir save_path"
    ),
    "the script: grpo_async.py overlaps, grpo.py does not": "rollout.mode async_train",
}
"""What is here: its names there, or the ends of dotted ones."""
HERE = {name: here for here, names in _NAMES.items() for name in names.split()}

_NO_CRITIC = "GRPO has no critic; the baseline is policy.baseline"
_NO_DISCOUNT = "nothing is discounted: every token of a completion has its advantage (policy.baseline)"
_NO_REWARD_MODEL = "no reward model is loaded; env.reward=module:function may ask a server (docs/judges.md)"
_END_TOKENS = (
    "a completion ends with an end token of the model's generation config, tokenizer or chat template"
)
_NO_STOP = f"no other text ends one: {_END_TOKENS}"
_NO_LEAST_LENGTH = (
    "no completion is too short; a reward of your own can ask for more (env.reward=module:function)"
)
_NO_PENALTY = "tokens are drawn from the model's own distribution, without penalties"
_NO_TEACHER = "there is no teacher; nothing is distilled"
_FIXED_REFERENCE = (
    "the reference is the policy at its beginning and stays that; policy.kl_coef=0 needs none, ref_model.num_devices "
    "gives it GPUs"
)
_ITS_TOKENIZER = "the tokenizer is that of model.name"
_NO_EVAL_BATCH = (
    "an evaluation has no batch size; inference_model.max_num_seqs bounds what an engine runs at once"
)
_NO_OTHER_SPLIT = (
    "the learner shards parameters (train_model.num_devices, train_model.shard_size) and splits nothing else"
)

ELSEWHERE: dict[str, str] = {
    "top_entropy_quantile": "policy.select_tokens=top_entropy, with policy.selected_share",
    "reward_fn_key": "a reward gets every column by its name; one for each data set: env.dataset=mixture",
    "enable_thinking": "a template of your own can set it: model.chat_template=FILE",
    "chat_template_kwargs": "a template of your own can set them: model.chat_template=FILE",
    "custom_cls.path": "a task of your own is env.dataset=module:Class",
    "load_in_8bit": "8-bit weights are not supported; 4-bit ones are (train_model.lora.quantization=nf4)",
    "bnb_4bit_compute_dtype": "it is that of train.mixed_precision, or else model.dtype",
    "push_to_hub": "run=export checkpoint=RUN to=FOLDER hub=USER/NAME uploads a model",
    "deepspeed": "DeepSpeed is not used; run=plan says what fits",
    "fsdp": "train_model.num_devices above 1 shards the model with FSDP2; run=plan says what fits",
    "use_liger_kernel": "not needed: the loss never holds all logits (train.log_prob_chunk_size)",
    "dataloader_num_workers": "prompts are made in the process of the learner; env.reward_workers judge",
    "ulysses_sequence_parallel_size": "sequences are not split over devices",
    "critic_warmup": _NO_CRITIC,
    "critic_learning_rate": _NO_CRITIC,
    "critic_pretrain": _NO_CRITIC,
    "cliprange_value": _NO_CRITIC,
    "vf_coef": _NO_CRITIC,
    "gamma": _NO_DISCOUNT,
    "lam": _NO_DISCOUNT,
    "lambd": _NO_DISCOUNT,
    "reward_pretrain": _NO_REWARD_MODEL,
    "reward_model_path": _NO_REWARD_MODEL,
    "remote_rm_url": _NO_REWARD_MODEL,
    "rm_type": "env.reward names what judges",
    "stop": _NO_STOP,
    "stop_strings": _NO_STOP,
    "rollout_stop": _NO_STOP,
    "stop_token_ids": _END_TOKENS,
    "rollout_stop_token_ids": _END_TOKENS,
    "min_tokens": _NO_LEAST_LENGTH,
    "min_new_tokens": _NO_LEAST_LENGTH,
    "repetition_penalty": _NO_PENALTY,
    "presence_penalty": _NO_PENALTY,
    "frequency_penalty": _NO_PENALTY,
    "min_p": "inference_model.top_p and inference_model.top_k cut the distribution; min_p is not supported",
    "target_kl": "policy.kl_coef stays as it is set; no rule adapts it",
    "teacher_model": _NO_TEACHER,
    "sync_ref_model": _FIXED_REFERENCE,
    "ref_model_sync_steps": _FIXED_REFERENCE,
    "ref_model_mixup_alpha": _FIXED_REFERENCE,
    "ref_load": _FIXED_REFERENCE,
    "ref_num_nodes": _FIXED_REFERENCE,
    "ref_model.name": _FIXED_REFERENCE,
    "ref_model.path": _FIXED_REFERENCE,
    "ref_model.model.path": _FIXED_REFERENCE,
    "tokenizer.name": _ITS_TOKENIZER,
    "tokenizer_path": _ITS_TOKENIZER,
    "target_modules": "LoRA is on every linear layer (train_model.lora.r, train_model.lora.alpha)",
    "lora_target_modules": "LoRA is on every linear layer (train_model.lora.r, train_model.lora.alpha)",
    "trust_remote_code": "code of a model's folder is never run; only models that transformers has are trained",
    "per_device_eval_batch_size": _NO_EVAL_BATCH,
    "val_batch_size": _NO_EVAL_BATCH,
    "eval.batch_size": _NO_EVAL_BATCH,
    "logging_steps": "every optimizer step is logged",
    "pipeline_model_parallel_size": _NO_OTHER_SPLIT,
    "context_parallel_size": _NO_OTHER_SPLIT,
    "expert_model_parallel_size": _NO_OTHER_SPLIT,
    "dtensor_cfg.tensor_parallel_size": _NO_OTHER_SPLIT,
    "megatron.tensor_model_parallel_size": _NO_OTHER_SPLIT,
    "save_hf_ckpt": "train.export says whether models are written beside checkpoints",
    "zero_stage": "DeepSpeed is not used; train_model.shard_size says over how many GPUs the model is sharded",
    "experiment": "--config-dir FOLDER leads to a folder with experiment/NAME.yaml, which +experiment=NAME takes",
    "callbacks": "there are no callbacks; the schedules are short enough to edit (grpo.py)",
}
"""Likewise: what to do without it."""

APART: dict[str, str] = {
    "critic": _NO_CRITIC,
    "reward_model": _NO_REWARD_MODEL,
    "rm": _NO_REWARD_MODEL,
    "ref": _FIXED_REFERENCE,
    "teacher": _NO_TEACHER,
    "distillation": _NO_TEACHER,
    "val_kwargs": "each of eval.sets has temperature, top_p, top_k, n and max_tokens of its own",
}
"""Sections that hold another model's or another run's settings: what ends their names says nothing of the policy's."""

SECTIONS: dict[str, str] = {
    "trainer": "train, logging and eval",
    "data": "env",
    "datamodule": "env",
    "dataset": "env",
    "algorithm": "policy",
    "actor_rollout_ref": "model, train, policy, optimizer and inference_model",
    "actor": "train, policy and optimizer",
    "rollout": "inference_model",
    "reward": "env.reward, env.reward_weights and env.reward_timeout_s",
    "grpo": "env, train and eval",
    "loss_fn": "policy",
    "generation": "inference_model",
    "checkpointing": "train",
    "orchestrator": "env, train and inference_model",
    "inference": "inference_model",
    "ckpt": "train",
    "cluster": "train_model, inference_model and ray",
    "logger": "logging",
    "tracker": "logging",
}
"""The first part of a dotted name: the sections that hold here what it holds there."""


def translated(key: str) -> str | None:
    """What a name of another trainer's is here, as the end of a sentence; None for a name that nobody uses.

    The longest end that is known counts: `actor_rollout_ref.rollout.n` is looked up whole, then as `rollout.n`,
    then as `n`. An end that leaves out a section of `APART` does not: `critic.optim.lr` is not `lr`.
    """
    parts = key.split(".")
    apart = next((place for place, part in enumerate(parts) if part in APART), None)
    for start in range(len(parts) if apart is None else apart + 1):
        name = ".".join(parts[start:])
        if name in HERE:
            return f"here it is {HERE[name]}"
        if name in ELSEWHERE:
            return ELSEWHERE[name]
    if apart is not None:
        return APART[parts[apart]]
    return next((ELSEWHERE[part] for part in parts if part in ELSEWHERE), None)


def section_elsewhere(key: str) -> str | None:
    """Where the neighbours of a name of another trainer's are; None where its first part names no section of one."""
    section = key.split(".")[0]
    return f"what {section} holds elsewhere is here in {SECTIONS[section]}" if section in SECTIONS else None
