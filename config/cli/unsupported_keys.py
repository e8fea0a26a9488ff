"""Tables of other trainers' keys that have no equivalent here, with advice for each.

config/cli/keys_of_other_trainers.py looks up these tables together with the table of equivalent keys.
"""

_NO_CRITIC = "GRPO has no critic; the baseline is policy.baseline"
_REWARD_MODEL = (
    "set env.reward=reward_model with env.reward_model.name and env.reward_model.device, or env.reward=judge for a "
    "server (docs/judges.md)"
)
_END_TOKENS = "a completion ends with an end token of the model's generation config, tokenizer or chat template"
_TEACHER = (
    "set policy=opd to distill: ref_model.name is the teacher, ref_model.num_devices its number of GPUs, "
    "policy.teacher_prompt its prompt; policy.distill_coef and policy.reward_coef weight the teacher and "
    "the reward"
)
_REFERENCE_NOT_TRAINED = (
    "the reference is not trained; ref_model.name, ref_model.dtype, ref_model.num_devices, ref_model.shard_size and "
    "ref_model.devices are its only settings"
)

# fmt: off
_TEXTS = (
    ("policy.select_tokens=top_entropy, with policy.selected_share", "top_entropy_quantile"),
    ("run=report run_dir=A,B compares two runs", "a b"),
    ("a reward receives every column by its name; set env.dataset=mixture for one reward per data set",
     "reward_fn_key"),
    ("a reward receives every column by its name", "remove_unused_columns"),
    ("set env.dataset=module:Class for a task of your own", "custom_cls.path"),
    ("8-bit weights are not supported; set train_model.lora.quantization=nf4 for 4-bit weights", "load_in_8bit"),
    ("the compute dtype is the dtype of train.mixed_precision, or else model.dtype", "bnb_4bit_compute_dtype"),
    ("run=export export.checkpoint=RUN export.to=FOLDER export.hub=USER/NAME uploads a model",
     "push_to_hub hub_model_id"),
    ("DeepSpeed is not used; set run=plan to print the memory that a run needs", "deepspeed"),
    ("train_model.num_devices above 1 shards the model with FSDP2; run=plan prints the memory that a run needs",
     "fsdp dtensor_cfg"),
    ("not needed: the loss never holds all logits (train.log_prob_chunk_size)", "use_liger_kernel"),
    ("prompts are built in the process of the learner; env.reward_workers processes score completions",
     "dataloader_num_workers"),
    (_NO_CRITIC, "critic_warmup critic_learning_rate critic_pretrain cliprange_value vf_coef"),
    ("policy.discount is the only discount per token; without a critic there is no lambda", "gamma lam lambd"),
    ("no batch is skipped by its mean ratio; policy.ratio_max and policy.dual_clip bound the ratio of each token",
     "skip_threshold"),
    (_REWARD_MODEL, "reward_pretrain reward_model_path remote_rm_url reward_num_nodes reward_num_gpus_per_node"),
    ("env.reward names the reward function", "rm_type"),
    (f"{_END_TOKENS}, or with the text of a token in inference_model.stop", "stop_token_ids rollout_stop_token_ids"),
    ("completions have no minimum length; penalise short completions with a reward of your own "
     "(env.reward=module:function)",
     "min_tokens min_new_tokens"),
    ("not supported: a penalty depends on the tokens sampled before, and the trainer's log-probs do not apply it, so "
     "they would be of another distribution; penalise repetition with a reward of your own "
     "(env.reward=module:function)",
     "repetition_penalty presence_penalty frequency_penalty no_repeat_ngram_size length_penalty"),
    ("not supported: the trainer's log-probs do not apply biases or masks of single tokens",
     "logit_bias bad_words bad_words_ids allowed_token_ids"),
    ("policy.kl_coef is constant; no rule adapts the coefficient",
     "target_kl kl_target kl_horizon kl_ctrl.horizon kl_ctrl.type"),
    (_TEACHER, "use_opd opd_type"),
    ("the reference is never updated: it stays the initial policy or ref_model.name; policy.kl_coef=0 needs no "
     "reference",
     "sync_ref_model ref_model_sync_steps ref_model_mixup_alpha ref_update_interval"),
    ("the reference has no adapters; with trained adapters the reference is their base, unless ref_model.name or "
     "ref_model.num_devices is set",
     "ref_model.lora.enabled ref_model.lora.r ref_model.lora.alpha ref_model.lora.dropout"),
    ("a frozen model is not quantized; set ref_model.dtype=bfloat16 to halve its memory",
     "ref_model.quantization.enabled"),
    ("grpo_async.py collects completions during training (train.max_policy_age bounds the age); grpo.py collects and "
     "trains in turn",
     "train.sync_iter train.sync"),
    ("no batch is trained on again in a later iteration; train.epochs sets the passes over a batch",
     "empty_replay_buffer"),
    ("an engine chooses its own kernels", "inference_model.attn_implementation"),
    ("not needed: a completion keeps its end token or stop string", "include_stop_str_in_output"),
    ("always on: the completions of a prompt share its keys and values", "enable_prefix_caching"),
    ("not supported: log-probs are used as the engine returns them; set policy.old_log_prob=trainer for the learner's "
     "log-probs",
     "enable_fp32_lm_head enable_fp32_output"),
    ("SGLang is not supported: inference_model.backend is vllm or transformers", "disable_overlap_schedule"),
    ("logging.progress shows the progress of the engines", "inference_model.verbose"),
    ("the settings of Ray are ray.address, to join a cluster, ray.num_cpus_per_engine and ray.enabled",
     "init_config collector_config train_handler_config replay_buffer_config"),
    ("the tokenizer is that of model.name", "tokenizer.name tokenizer_path"),
    ("LoRA is on every linear layer (train_model.lora.r, train_model.lora.alpha)",
     "target_modules lora_target_modules"),
    ("code in a model's folder is never run; only models of transformers can be trained", "trust_remote_code"),
    ("an evaluation has no batch size; inference_model.max_num_seqs bounds the concurrent completions of an engine",
     "per_device_eval_batch_size val_batch_size eval.batch_size eval_batch_size"),
    ("every optimizer step is logged", "logging_steps logging_strategy logging_frequency"),
    ("the learner shards parameters (train_model.num_devices, train_model.shard_size), divides sequences "
     "(train_model.context_parallel) and splits nothing else",
     "pipeline_model_parallel_size expert_model_parallel_size dtensor_cfg.tensor_parallel_size "
     "megatron.tensor_model_parallel_size dtensor_cfg.sequence_parallel megatron_cfg.tensor_model_parallel_size"),
    ("train.export sets whether models are written beside checkpoints",
     "save_hf_ckpt save_only_model save_safetensors"),
    ("DeepSpeed is not used; train_model.shard_size sets the number of GPUs that share one copy of the model",
     "zero_stage"),
    ("set --config-dir FOLDER and +experiment=NAME to read FOLDER/experiment/NAME.yaml", "experiment"),
    ("callbacks are not supported; edit the training loop instead (grpo.py)", "callbacks"),
    ("Megatron is not used; train_model.num_devices above 1 shards the model with FSDP2", "megatron_cfg"),
    ("inference_model.colocate=true: engine and learner take turns on the same GPUs", "colocated"),
    ("optimizer.schedule, optimizer.warmup_steps and optimizer.min_lr_fraction set the schedule", "scheduler"),
    ("optimizer is a section of its own: optimizer.name, optimizer.lr", "policy.optimizer"),
    ("policy.overlong_cache and policy.overlong_penalty penalise long responses",
     "overlong_buffer overlong_buffer_cfg"),
    ("env.sandbox=remote and env.sandbox_url name a SandboxFusion server", "sandbox_fusion"),
    ("not needed: completions are scored in separate processes (env.reward_workers)", "launch_reward_fn_async"),
    ("not supported: there is no critic to warm up, so every step trains the policy (optimizer.warmup_steps)",
     "freezing_actor_steps"),
    ("not supported: an engine has its own cache, whose size is inference_model.kv_cache_gib",
     "cache_implementation"),
    ("keys and values are kept in inference_model.dtype", "kv_cache_dtype"),
    ("not supported: the devices of the engines determine the transport of weights; inference_model.update sets the "
     "handling of requests in flight",
     "vllm_sync_backend vllm_sync_with_ray"),
    ("a run starts its engines itself and needs no server; inference_model.num_devices gives them GPUs",
     "vllm_server_host vllm_server_port vllm_server_base_url vllm_server_timeout vllm_group_port"),
    ("rewards are normalized within their group; set policy.baseline and policy.scale", "normalize_reward"),
    ("sampling takes inference_model.temperature, inference_model.top_p, inference_model.top_k, inference_model.min_p, "
     "inference_model.stop and inference_model.max_tokens, and nothing else",
     "generation_kwargs"),
    ("dropout is off for the model; set train_model.lora.dropout for adapters",
     "disable_dropout attention_dropout hidden_dropout"),
    ("inference_model.max_num_seqs bounds the concurrent completions of an engine", "micro_rollout_batch_size"),
    ("grpo_async.py trains while completions continue under new weights (inference_model.update=keep, "
     "train.max_policy_age)",
     "partial_rollout"),
    ("grpo_async.py overlaps generation and training, grpo.py does not", "async_engine"),
    ("set env.tools or env.reasoning for turns, with env.max_steps (docs/turns.md)", "agent_func_path"),
    ("train.keep_best keeps the checkpoint with the highest value", "greater_is_better"),
    ("an evaluation samples every problem, or a random choice of eval.sets.NAME.limit problems", "validation_shuffle"),
    ("the model's configuration is that of model.name", "hf_config_overrides"),
    ("the timeline of the report shows the events of every process (run=report)", "logging.trace"),
    ("not needed: a microbatch is one sequence without padding (train.packing)", "make_sequence_length_divisible_by"),
)
# fmt: on
"""Pairs of an advice and its keys: whole names, or ends or parts of dotted names, separated by spaces."""
UNSUPPORTED_KEYS = {name: text for text, names in _TEXTS for name in names.split()}

UNSUPPORTED_SECTIONS: dict[str, str] = {
    "openenv": (
        "OpenEnv is not supported; set env.dataset=module:Class for a task of your own, with env.tools and "
        "env.max_steps"
    ),
    "critic": _NO_CRITIC,
    "reward_model": _REWARD_MODEL,
    "rm": _REWARD_MODEL,
    "ref": _REFERENCE_NOT_TRAINED,
    "teacher": _TEACHER,
    "distillation": _TEACHER,
    "val_kwargs": "set temperature, top_p, top_k, n and max_tokens in each of eval.sets",
}
"""Advice for sections of another model, run or environment.

The end of a key below such a section, such as `lr`, has no equivalent key.
"""

UNTRAINED_SECTIONS: dict[str, tuple[str, str]] = {
    "ref_model": ("ref_model.", _REFERENCE_NOT_TRAINED),
    "eval": (
        "eval.",
        "evaluation has no training settings; set eval.frequency for the interval, and data, temperature, "
        "top_p, top_k, n and max_tokens in each of eval.sets",
    ),
    "reward": (
        "env.reward_",
        "a reward function is not trained; the settings of rewards are env.reward, env.reward_weights and "
        "env.reward_timeout_s",
    ),
}
"""Sections with few settings, none of them of training: the prefix of similar keys, and the advice."""

UNSUPPORTED_PREFIXES: dict[str, str] = {
    "critic_": _NO_CRITIC,
    **dict.fromkeys(("teacher_", "opd_", "distillation_"), _TEACHER),
}
"""Advice for every name with one of these prefixes: features that are missing, or have other keys."""

UNAMBIGUOUS_WORDS = {
    "overlong_buffer", "overlong_buffer_cfg", "reward_manager", "reward_kwargs", "sandbox_fusion",
    "custom_reward_function", "custom_cls", "launch_reward_fn_async",
}  # fmt: skip
"""Words that identify a key on their own: a name that begins with one is looked up in any section."""
