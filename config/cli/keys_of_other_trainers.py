"""Translates keys and flags of other trainers, such as TRL, to our keys or advice.

error_messages.py prints the equivalent key to a user who types a key of another trainer. Keys without an
equivalent are in unsupported_keys.py, flags of trainers without sections in flags_of_other_trainers.py.
"""

from config.cli.flags_of_other_trainers import FLAG_HINTS
from config.cli.unsupported_keys import (
    UNAMBIGUOUS_WORDS,
    UNSUPPORTED_KEYS,
    UNSUPPORTED_PREFIXES,
    UNSUPPORTED_SECTIONS,
    UNTRAINED_SECTIONS,
)

# fmt: off
_NAMES = {
    "model.attn_implementation": "attn_implementation ref_model.attn_implementation",
    "model.dtype": "torch_dtype",
    "model.name":
        "model_name_or_path model_path model.path pretrain hf_checkpoint policy.model_name trainer.model.name "
        "inference.model.name",
    "env.data_files, with env.dataset": "data.train_files prompt_data",
    "model.chat_template": "chat_template_path custom_chat_template apply_chat_template input_template chat_template",
    "model.chat_template_kwargs, such as {enable_thinking: false}":
        "chat_template_kwargs apply_chat_template_kwargs enable_thinking",
    "model.dtype and model.attn_implementation": "model_init_kwargs",
    "env.dataset": "dataset_name",
    "env.data_revision": "dataset_revision",
    "env.options={prompt: COLUMN}": "prompt_key input_key",
    "env.options={answer: COLUMN}": "label_key",
    "env.max_prompt_tokens":
        "max_prompt_length prompt_max_len max_input_seq_length rollout_max_prompt_len eval_max_prompt_len",
    "env.max_steps, with env.tools or env.reasoning":
        "max_turns max_rollout_turns max_assistant_turns max_user_turns multi_turn.enable max_tool_calling_iterations",
    "env.max_prompt_tokens; longer prompts are skipped and counted": "data.filter_overlong_prompts data.truncation",
    "env.num_envs, in prompts per iteration, or train.dialog_turns_per_batch, in completions":
        "generation_batch_size data.train_batch_size rollout_batch_size num_prompts_per_step",
    "env.repeats":
        "num_generations group_size rollout.n n_samples_per_prompt num_generations_per_prompt rollouts_per_example",
    "env.reward_workers": "reward.num_workers math.num_workers reward_model.num_workers",
    "env.tools": "tool_config_path",
    "env.reward, a name or module:function": "reward_funcs",
    "env.reward, as module:function":
        "custom_reward_function.path custom_reward_function.name custom_rm_path reward_manager "
        "reward_model.reward_manager reward_manager.name",
    "env.sandbox_url, with env.sandbox=remote": "sandbox_fusion.url",
    "env.reward_weights, {COMPONENT: weight}": "reward_key",
    "env.oversample, in completions per prompt; policy.dynamic_batching samples more prompts":
        "over_sampling_batch_size",
    "train.checkpoint_frequency, in iterations":
        "save_steps save_freq save_interval save_period ckpt.interval save_strategy logging.checkpoint_frequency",
    "train.deterministic": "full_determinism",
    "train.dialog_turns_per_batch: completions per iteration, for one or more optimizer steps":
        "steps_per_generation steps_per_batch",
    "train.buffer_groups, of grpo_async.py, in groups": "buffer_size",
    "train.epochs": "num_iterations ppo_epochs grpo.num_iterations",
    "train.gradient_accumulation_steps": "accumulate_grad_batches",
    "train.gradient_accumulation_steps: microbatches per optimizer step":
        "ppo_micro_batch_size_per_gpu ppo_micro_batch_size micro_train_batch_size train_micro_batch_size",
    "train.max_tokens_per_microbatch":
        "use_dynamic_bsz ppo_max_token_len_per_gpu max_tokens_per_gpu dynamic_batching.enabled",
    "train.packing: a microbatch is one sequence without padding, with each prompt once":
        "share_prompt use_remove_padding packing packing_samples sequence_packing.enabled",
    "train.compile": "torch_compile use_torch_compile model.compile",
    "train.gradient_checkpointing": "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing",
    "train.keep_best": "checkpointing.metric_name metric_for_best_model load_best_model_at_end",
    "train.keep_checkpoints": "save_total_limit max_actor_ckpt_to_keep keep_top_k ckpt.keep",
    "train.mixed_precision=bf16": "bf16",
    "train.mixed_precision=fp16": "fp16",
    "train.mixed_precision": "precision",
    "train.optim_batch_size, in completions per optimizer step, of train.gradient_accumulation_steps microbatches":
        "per_device_train_batch_size train_batch_size batch_size mini_batch_size global_batch_size "
        "train_global_batch_size",
    "train.optim_batch_size, in completions, not prompts": "ppo_mini_batch_size",
    "train.resume: auto, or the path of a checkpoint or a run":
        "resume_from_checkpoint ckpt_path resume_mode resume_from_path load_checkpoint resume_step",
    "train.log_prob_chunk_size": "log_prob_micro_batch_size_per_gpu logprob_batch_size",
    "train.max_policy_age": "max_async_level max_off_policy_level",
    "train.seed": "data_seed data.seed rollout_seed",
    "train.seed; prompts are always shuffled": "data.shuffle shuffle shuffle_dataset rollout_shuffle",
    "train.total_dialog_turns: completions of the whole run, steps times train.optim_batch_size":
        "max_steps trainer.total_training_steps total_training_steps max_num_steps num_rollout",
    "train.total_dialog_turns: completions of the whole run, epochs times rows times env.repeats":
        "num_train_epochs max_epochs trainer.total_epochs total_epochs num_episodes",
    "policy.aggregation, or a preset such as policy=dapo or policy=dr_grpo": "loss_type",
    "policy, a preset such as policy=grpo or policy=rloo":
        "adv_estimator advantage_estimator use_leave_one_out_baseline",
    "policy.aggregation": "loss_agg_mode token_level_loss",
    "policy.clip_epsilon_high": "epsilon_high clip_ratio_high eps_clip_high ratio_clip_max",
    "policy.clip_epsilon_low and policy.clip_epsilon_high": "epsilon clip_ratio eps_clip eps_clip_low_high",
    "policy.clip_epsilon_low": "epsilon_low clip_ratio_low eps_clip_low ratio_clip_min",
    "policy.distill_coef": "opd_kl_coef teacher_tau",
    "policy.distill_clamp": "loss_max_clamp",
    "policy.dual_clip": "clip_ratio_c ratio_clip_c",
    "policy.dynamic_batching, with policy.filter_range": "filter_groups.enable",
    "policy.entropy_coef": "entropy_coeff",
    "policy.filter_attempts": "filter_groups.max_num_gen_batches",
    "policy.filter_range, with policy.dynamic_batching=true":
        "filter_groups dynamic_filtering_reward_range dynamic_filtering dynamic_sampling_filter_path",
    "policy.filter_truncated": "mask_truncated_completions overlong_filtering",
    "policy.distill_coef, with policy=opd":
        "opd_kl_coef kd_coef distillation_loss_coef distillation.distillation_loss.distillation_loss_coef",
    "policy.kl_coef": "beta kl_coeff kl_loss_coef init_kl_coef reference_policy_kl_penalty kl_to_ref_coeff",
    "policy.kl_coef above 0": "use_kl_loss use_kl_to_ref",
    "policy.kl_inference_coef": "kl_to_inference_coeff",
    "policy.kl_placement, loss or reward": "kl_coef_in_loss",
    "policy.kl_estimator": "kl_loss_type kl_penalty",
    "policy.kl_placement=reward": "use_kl_in_reward",
    "policy.mismatch, with policy.old_log_prob=trainer":
        "vllm_importance_sampling_correction rollout_correction enable_vllm_is_correction use_tis "
        "use_importance_sampling_correction",
    "policy.mismatch and policy.mismatch_level": "vllm_importance_sampling_mode",
    "policy.mismatch_cap": "vllm_importance_sampling_cap vllm_is_truncated_threshold tis_imp_ratio_cap",
    "policy.overlong_cache": "overlong_buffer.len overlong_buffer_len overlong_buffer_cfg.len",
    "policy.overlong_penalty": "overlong_buffer.penalty_factor overlong_buffer_cfg.penalty_factor",
    "policy.ratio": "importance_sampling_level",
    "policy.ratio_max": "delta",
    "policy.reward_coef, with policy.distill_coef; policy.reward_coef=0 trains on the teacher only":
        "use_task_rewards distillation.use_task_rewards distillation.distillation_loss.use_task_rewards",
    "policy.teacher_prompt, with policy=opsd": "teacher_prompt_template reprompt_template",
    "policy.scale": "scale_rewards norm_adv_by_std_in_grpo normalize_rewards",
    "policy.overlong_cache, a width in tokens; null disables the penalty":
        "overlong_buffer.enable overlong_buffer_cfg.enable",
    "optimizer.name, or a preset such as optimizer=muon_adamw": "optim",
    "optimizer.betas": "adam_beta1 adam_beta2 optim.betas optimizer.beta optimizer.beta1 optimizer.beta2",
    "optimizer.clip_grad_norm": "max_grad_norm gradient_clip_val grad_clip optim.max_norm",
    "optimizer.eps": "adam_epsilon optim.eps optim.epsilon optimizer.epsilon",
    "optimizer.lr": "learning_rate lr actor_learning_rate",
    "optimizer.min_lr_fraction": "min_lr_ratio min_lr_rate lr_min_ratio",
    "optimizer.schedule": "lr_scheduler_type warmup_style lr_scheduler lr_decay_style scheduler.name",
    "optimizer.warmup_fraction": "warmup_ratio lr_warmup_steps_ratio",
    "optimizer.warmup_steps": "warmup_steps lr_warmup_steps lr_warmup_iters",
    "optimizer.weight_decay": "optim.weight_decay",
    "optimizer.min_lr_fraction, a share of optimizer.lr": "min_lr lr_min eta_min",
    "train_model.num_devices":
        "n_gpus_per_node trainer.n_gpus_per_node num_processes world_size actor_num_gpus_per_node actor_num_gpus",
    "train_model.num_nodes, the number of the learner's nodes, with ray.address":
        "num_nodes nnodes trainer.nnodes num_machines actor_num_nodes",
    "train_model.offload=all": "param_offload cpu_offload fsdp_offload_enabled",
    "train_model.offload=optimizer": "optimizer_offload adam_offload",
    "train_model.shard_size": "fsdp_size",
    "train_model.context_parallel":
        "ulysses_sequence_parallel_size context_parallel_size dtensor_cfg.context_parallel_size",
    "train_model.lora.alpha": "lora_alpha",
    "train_model.lora.dropout": "lora_dropout",
    "train_model.lora.enabled": "use_peft",
    "train_model.lora.quantization": "bnb_4bit_quant_type",
    "train_model.lora.quantization=nf4, with train_model.lora.enabled=true":
        "load_in_4bit use_bnb_nested_quant train_model.quantization.enabled",
    "train_model.lora.r": "lora_r",
    "train_model.lora.r, with train_model.lora.enabled=true": "lora_rank",
    "train_model.num_devices and inference_model.num_devices": "devices n_gpus_per_node gpus_per_node",
    "ref_model.name": "ref_model.path ref_model.model.path ref.model.path ref_load ref_model_path",
    "ref_model.name, with policy=opd":
        "teacher_model teacher_model_path teacher_model_name teacher_model_name_or_path teacher_path "
        "teacher.model.path teacher.model_name teacher.name opd_teacher_load distillation.teacher_model.model_path "
        "distillation.teacher_model.path",
    "ref_model.dtype": "ref_model.torch_dtype ref_model.precision",
    "ref_model.num_devices, over all nodes": "ref_num_gpus_per_node ref_num_gpus ref_num_nodes",
    "ref_model.num_devices, with policy=opd":
        "teacher_num_gpus teacher_num_gpus_per_node teacher_num_nodes distillation.n_gpus_per_node "
        "distillation.nnodes",
    "inference_model.backend=vllm": "use_vllm",
    "inference_model.backend": "rollout.name",
    "inference_model.colocate":
        "vllm_mode vllm_enable_sleep_mode free_cache_engine colocate_all_models colocated.enabled",
    "inference_model.enforce_eager": "inference_model.compile",
    "inference_model.enforce_eager=true": "disable_cuda_graph disable_piecewise_cuda_graph",
    "inference_model.dtype":
        "inference_model.torch_dtype inference_model.precision rollout.dtype rollout.precision generation.precision",
    "inference_model.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "inference_model.max_model_len":
        "max_seq_length vllm_max_model_length seq_len max_total_sequence_length rollout_max_context_len "
        "eval_max_context_len",
    "inference_model.max_tokens":
        "max_completion_length max_new_tokens data.max_response_length generate_max_len rollout_max_response_len "
        "rollout.response_length sampling.max_tokens reward_kwargs.max_resp_len",
    "inference_model.num_devices":
        "vllm_num_engines rollout_num_gpus colocated.resources.gpus_per_node colocated.resources.num_nodes",
    "inference_model.temperature": "rollout_temperature",
    "inference_model.tensor_parallel_size":
        "vllm_tensor_parallel_size tensor_model_parallel_size inference.parallel.tp rollout_num_gpus_per_engine",
    "inference_model.top_p": "rollout_top_p",
    "inference_model.top_k": "rollout_top_k",
    "inference_model.min_p": "min_p",
    "inference_model.stop, a list of strings": "stop stop_strings stop_sequences rollout_stop",
    "eval.frequency, in iterations":
        "eval_steps eval_strategy val_check_interval check_val_every_n_epoch test_freq eval_interval val_period "
        "eval.interval eval.steps",
    "eval.sets, which a run always evaluates before its first iteration":
        "eval_on_start val_before_train val_at_start",
    "eval.sets.NAME.data_files": "data.val_files eval_prompt_data",
    "eval.sets.NAME.limit": "limit_val_batches max_val_samples eval.max_samples eval.num_examples",
    "eval.sets.NAME.n":
        "num_generations_eval n_samples_per_eval_prompt val_kwargs.n eval.n eval.num_generations eval.repeats "
        "eval_n_samples_per_prompt eval_num_generations eval.rollouts_per_example",
    "eval.sets.NAME.temperature": "val_kwargs.temperature eval.temperature eval_temperature eval.sampling.temperature",
    "eval.sets.NAME.top_p": "val_kwargs.top_p eval.top_p eval_top_p eval.sampling.top_p",
    "eval.sets.NAME.max_tokens":
        "eval.max_tokens eval.max_new_tokens eval.max_completion_length eval_max_response_len eval_max_tokens "
        "eval_max_new_tokens eval.sampling.max_tokens",
    "eval.sets": "eval_config eval_datasets",
    "eval.sets.NAME.dataset": "eval_dataset",
    "eval.sets.NAME.split": "eval_split",
    "eval.sets.NAME.options={prompt: COLUMN}": "eval_input_key",
    "eval.sets.NAME.options={answer: COLUMN}": "eval_label_key",
    "eval.sets.NAME.reward_weights": "eval_reward_key",
    "eval.sets.NAME.top_k": "eval_top_k eval.top_k val_kwargs.top_k eval.sampling.top_k",
    "logging.backend": "report_to trainer.logger use_wandb wandb_enabled",
    "logging.experiment_name": "run_name exp_name experiment_name wandb.name wandb_run_name",
    "logging.project": "project_name wandb_project",
    "logging.sample_frequency, in iterations": "log_completions",
    "run=eval": "val_only",
    "hydra.run.dir: the folder of the run":
        "output_dir overwrite_output_dir default_root_dir default_local_dir log_dir checkpoint_dir save_path "
        "logging_dir",
    "the script: grpo_async.py is asynchronous, grpo.py is synchronous": "rollout.mode async_train",
}
# fmt: on
"""Equivalent key, with a remark: its names in other trainers, or the ends of dotted names, separated by spaces."""
KEY_EQUIVALENTS = {name: here for here, names in _NAMES.items() for name in names.split()}

_SECTIONS = {
    "train, logging and eval": "trainer",
    "env": "data datamodule dataset",
    "policy": "algorithm loss_fn",
    "model, train, policy, optimizer and inference_model": "actor_rollout_ref",
    "train, policy and optimizer": "actor",
    "inference_model": "rollout generation inference",
    "env, train and eval": "grpo",
    "train": "checkpointing ckpt",
    "env, train and inference_model": "orchestrator",
    "train_model, inference_model and ray": "cluster",
    "logging": "logger tracker",
}
SECTION_EQUIVALENTS = {name: here for here, names in _SECTIONS.items() for name in names.split()}
"""First part of a dotted name in another trainer: the sections with the same settings here."""


def translate_key(key: str) -> str | None:
    """Returns the advice for a key of another trainer; None for an unknown key.

    The longest known end of the key counts: `actor_rollout_ref.rollout.n` is looked up as a whole, then as
    `rollout.n`, then as `n`. An end without its section of `UNSUPPORTED_SECTIONS` or `UNTRAINED_SECTIONS` is
    not looked up: `critic.optim.lr` is not `lr`. An end that begins with a word of `UNAMBIGUOUS_WORDS` is
    always looked up: `reward_model.overlong_buffer.len` is `overlong_buffer.len`. Flags may have hyphens. Where
    no end is known, a part of the key counts, or the prefix of a part.
    """
    flag = key.lstrip("-").replace("-", "_")
    if flag in FLAG_HINTS:
        return FLAG_HINTS[flag]
    parts = flag.split(".")
    bound = next(
        (place for place, part in enumerate(parts) if part in UNSUPPORTED_SECTIONS or part in UNTRAINED_SECTIONS),
        len(parts),
    )
    for start, part in enumerate(parts):
        name = ".".join(parts[start:])
        if start > bound and part not in UNAMBIGUOUS_WORDS:
            continue
        if name in KEY_EQUIVALENTS:
            return f"use {KEY_EQUIVALENTS[name]}"
        if name in UNSUPPORTED_KEYS:
            return UNSUPPORTED_KEYS[name]
    unambiguous = {part: text for part, text in UNSUPPORTED_KEYS.items() if part in UNAMBIGUOUS_WORDS}
    for table in (unambiguous, UNSUPPORTED_SECTIONS, UNSUPPORTED_KEYS):
        for part in parts:
            if part in table:
                return table[part]
    return next(
        (text for prefix, text in UNSUPPORTED_PREFIXES.items() for part in parts if part.startswith(prefix)), None
    )


def untrained_section_key(key: str) -> tuple[str, str] | None:
    """Splits a key of an `UNTRAINED_SECTIONS` section into our prefix and the rest.

    Returns None for a key of another section.
    """
    parts = key.split(".")
    place = next((place for place, part in enumerate(parts[:-1]) if part in UNTRAINED_SECTIONS), None)
    return None if place is None else (UNTRAINED_SECTIONS[parts[place]][0], ".".join(parts[place + 1 :]))


def section_hint(key: str) -> str | None:
    """Returns the advice for a key whose section is known in another trainer; else None."""
    parts = key.split(".")
    for part in parts[:-1]:
        if part in UNTRAINED_SECTIONS:
            return UNTRAINED_SECTIONS[part][1]
    return (
        f"set the settings of {parts[0]} in {SECTION_EQUIVALENTS[parts[0]]}"
        if parts[0] in SECTION_EQUIVALENTS
        else None
    )
