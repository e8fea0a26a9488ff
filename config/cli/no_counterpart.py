"""Names of other trainers that have no key here, and what to do instead.

config/cli/other_trainers.py looks them up, beside those that have one.
"""

_NO_CRITIC = "GRPO has no critic; the baseline is policy.baseline"
_NO_REWARD_MODEL = "no reward model is loaded; env.reward=module:function may ask a server (docs/judges.md)"
_END_TOKENS = (
    "a completion ends with an end token of the model's generation config, tokenizer or chat template"
)
_TEACHER = (
    "policy=opd distills: ref_model.name is the teacher, ref_model.num_devices gives it GPUs, policy.distill_coef and "
    "policy.reward_coef weigh it and the reward, policy.teacher_prompt is what it sees"
)
_OF_THE_REFERENCE = (
    "the reference is not trained; ref_model.name, ref_model.dtype, ref_model.num_devices, ref_model.shard_size and "
    "ref_model.devices are all that it has"
)

# fmt: off
_TEXTS = (
    ("policy.select_tokens=top_entropy, with policy.selected_share", "top_entropy_quantile"),
    ("run=report run_dir=A,B lays two runs over each other", "a b"),
    ("a reward gets every column by its name; one for each data set: env.dataset=mixture", "reward_fn_key"),
    ("a reward gets every column by its name", "remove_unused_columns"),
    ("a template of your own can set it: model.chat_template=FILE", "enable_thinking"),
    ("a template of your own can set them: model.chat_template=FILE", "chat_template_kwargs"),
    ("a task of your own is env.dataset=module:Class", "custom_cls.path"),
    ("8-bit weights are not supported; 4-bit ones are (train_model.lora.quantization=nf4)", "load_in_8bit"),
    ("it is that of train.mixed_precision, or else model.dtype", "bnb_4bit_compute_dtype"),
    ("run=export checkpoint=RUN to=FOLDER hub=USER/NAME uploads a model", "push_to_hub hub_model_id"),
    ("DeepSpeed is not used; run=plan says what fits", "deepspeed"),
    ("train_model.num_devices above 1 shards the model with FSDP2; run=plan says what fits", "fsdp dtensor_cfg"),
    ("not needed: the loss never holds all logits (train.log_prob_chunk_size)", "use_liger_kernel"),
    ("prompts are made in the process of the learner; env.reward_workers judge", "dataloader_num_workers"),
    ("sequences are not split over devices", "ulysses_sequence_parallel_size"),
    (_NO_CRITIC, "critic_warmup critic_learning_rate critic_pretrain cliprange_value vf_coef"),
    ("policy.discount is the one factor a token; without a critic there is no lambda", "gamma lam lambd"),
    ("nothing is skipped by a mean ratio; policy.ratio_max and policy.dual_clip bound what one token does",
     "skip_threshold"),
    (_NO_REWARD_MODEL, "reward_pretrain reward_model_path remote_rm_url reward_num_nodes reward_num_gpus_per_node"),
    ("env.reward names what judges", "rm_type"),
    (f"no other text ends one: {_END_TOKENS}", "stop stop_strings rollout_stop"),
    (_END_TOKENS, "stop_token_ids rollout_stop_token_ids"),
    ("no completion is too short; a reward of your own can ask for more (env.reward=module:function)",
     "min_tokens min_new_tokens"),
    ("tokens are drawn from the model's own distribution, without penalties",
     "repetition_penalty presence_penalty frequency_penalty"),
    ("inference_model.top_p and inference_model.top_k cut the distribution; min_p is not supported", "min_p"),
    ("policy.kl_coef stays as it is set; no rule adapts it",
     "target_kl kl_target kl_horizon kl_ctrl.horizon kl_ctrl.type"),
    (_TEACHER, "use_opd opd_type"),
    ("the reference stays as it begins, the policy or ref_model.name; policy.kl_coef=0 needs none",
     "sync_ref_model ref_model_sync_steps ref_model_mixup_alpha ref_update_interval"),
    ("beside adapters the reference is their base unless ref_model.name or ref_model.num_devices is set; it has none "
     "of its own",
     "ref_model.lora.enabled ref_model.lora.r ref_model.lora.alpha ref_model.lora.dropout"),
    ("a frozen model is not quantized; ref_model.dtype=bfloat16 halves it", "ref_model.quantization.enabled"),
    ("grpo_async.py collects while it trains (train.max_policy_age bounds the age), grpo.py never does",
     "train.sync_iter train.sync"),
    ("what was trained on is never drawn again; train.epochs says how often a batch is trained on",
     "empty_replay_buffer"),
    ("an engine chooses its own kernels", "inference_model.attn_implementation"),
    ("always so: the end token is part of its completion", "include_stop_str_in_output"),
    ("always on: the completions of a prompt share its keys and values", "enable_prefix_caching"),
    ("it does not exist here: log-probs are as the engine gives them; policy.old_log_prob=trainer takes the learner's",
     "enable_fp32_lm_head enable_fp32_output"),
    ("it is of SGLang, which is not here: inference_model.backend is vllm or transformers", "disable_overlap_schedule"),
    ("logging.progress shows how far the engines are", "inference_model.verbose"),
    ("Ray is told no more than ray.address, to join a cluster, and ray.num_cpus_per_engine",
     "init_config collector_config train_handler_config replay_buffer_config"),
    ("the tokenizer is that of model.name", "tokenizer.name tokenizer_path"),
    ("LoRA is on every linear layer (train_model.lora.r, train_model.lora.alpha)",
     "target_modules lora_target_modules"),
    ("code of a model's folder is never run; only models that transformers has are trained", "trust_remote_code"),
    ("an evaluation has no batch size; inference_model.max_num_seqs bounds what an engine runs at once",
     "per_device_eval_batch_size val_batch_size eval.batch_size eval_batch_size"),
    ("every optimizer step is logged", "logging_steps logging_strategy logging_frequency"),
    ("the learner shards parameters (train_model.num_devices, train_model.shard_size) and splits nothing else",
     "pipeline_model_parallel_size context_parallel_size expert_model_parallel_size dtensor_cfg.tensor_parallel_size "
     "megatron.tensor_model_parallel_size dtensor_cfg.sequence_parallel dtensor_cfg.context_parallel_size "
     "megatron_cfg.tensor_model_parallel_size"),
    ("train.export says whether models are written beside checkpoints",
     "save_hf_ckpt save_only_model save_safetensors"),
    ("DeepSpeed is not used; train_model.shard_size says over how many GPUs the model is sharded", "zero_stage"),
    ("--config-dir FOLDER leads to a folder with experiment/NAME.yaml, which +experiment=NAME takes", "experiment"),
    ("there are no callbacks; the schedules are short enough to edit (grpo.py)", "callbacks"),
    ("Megatron is not used; train_model.num_devices above 1 shards the model with FSDP2", "megatron_cfg"),
    ("inference_model.colocate=true: engine and learner take turns on the same GPUs", "colocated"),
    ("optimizer.schedule, optimizer.warmup_steps and optimizer.min_lr_fraction hold it", "scheduler"),
    ("optimizer is a section of its own: optimizer.name, optimizer.lr", "policy.optimizer"),
    ("policy.overlong_cache and policy.overlong_penalty punish long responses", "overlong_buffer overlong_buffer_cfg"),
    ("env.sandbox=remote and env.sandbox_url name a server of SandboxFusion's", "sandbox_fusion"),
    ("not needed: completions are judged in processes of their own (env.reward_workers)", "launch_reward_fn_async"),
    ("it does not exist here: no critic is warmed up, every step trains the policy (optimizer.warmup_steps)",
     "freezing_actor_steps"),
    ("it does not exist here: an engine has a cache of its own, of inference_model.kv_cache_gib",
     "cache_implementation"),
    ("keys and values are kept in inference_model.dtype", "kv_cache_dtype"),
    ("it does not exist here: how weights reach the engines follows from their devices; inference_model.update says "
     "what becomes of requests in flight",
     "vllm_sync_backend vllm_sync_with_ray"),
    ("a run starts its engines itself and needs no server; inference_model.num_devices gives them GPUs",
     "vllm_server_host vllm_server_port vllm_server_base_url vllm_server_timeout vllm_group_port"),
    ("rewards are compared within their group: policy.baseline and policy.scale say how", "normalize_reward"),
    ("sampling takes inference_model.temperature, inference_model.top_p, inference_model.top_k and "
     "inference_model.max_tokens, and nothing else",
     "generation_kwargs"),
    ("dropout is off; adapters alone can have it (train_model.lora.dropout)",
     "disable_dropout attention_dropout hidden_dropout"),
    ("inference_model.max_num_seqs bounds what an engine generates at once", "micro_rollout_batch_size"),
    ("grpo_async.py trains while completions go on under new weights (inference_model.update=keep, "
     "train.max_policy_age)",
     "partial_rollout"),
    ("grpo_async.py overlaps generation and training, grpo.py does not", "async_engine"),
    ("turns come from env.tools or env.reasoning, with env.max_steps (docs/turns.md)", "agent_func_path"),
    ("train.keep_best keeps the checkpoint with the highest value", "greater_is_better"),
    ("an evaluation asks every problem, or eval.sets.NAME.limit of them drawn at random", "validation_shuffle"),
    ("the model's configuration is that of model.name", "hf_config_overrides"),
    ("the timeline of the report shows who did what when (run=report)", "logging.trace"),
    ("not needed: a microbatch is one sequence without padding (train.packing)", "make_sequence_length_divisible_by"),
)
# fmt: on
"""What is said, and of which names, or ends or parts of dotted ones."""
ELSEWHERE = {name: text for text, names in _TEXTS for name in names.split()}

APART: dict[str, str] = {
    "openenv": (
        "OpenEnv is not here; a task of your own is env.dataset=module:Class, with env.tools and env.max_steps"
    ),
    "critic": _NO_CRITIC,
    "reward_model": _NO_REWARD_MODEL,
    "rm": _NO_REWARD_MODEL,
    "ref": _OF_THE_REFERENCE,
    "teacher": _TEACHER,
    "distillation": _TEACHER,
    "val_kwargs": "each of eval.sets has temperature, top_p, top_k, n and max_tokens of its own",
}
"""Sections of another model, another run or another environment: what ends their names says nothing of ours."""

OWN: dict[str, tuple[str, str]] = {
    "ref_model": ("ref_model.", _OF_THE_REFERENCE),
    "eval": (
        "eval.",
        "nothing is trained in eval: eval.frequency says when, each of eval.sets has data, temperature, top_p, top_k, "
        "n and max_tokens of its own",
    ),
    "reward": (
        "env.reward_",
        "what judges is not trained; what reward holds elsewhere is here in env.reward, env.reward_weights and "
        "env.reward_timeout_s",
    ),
}
"""Sections that hold little here, and nothing that is trained: how keys that may be meant begin, and what is said."""

BEGINNINGS: dict[str, str] = {
    "critic_": _NO_CRITIC,
    **dict.fromkeys(("teacher_", "opd_", "distillation_"), _TEACHER),
}
"""How a name begins that is about what is not here, or is something else here, whatever comes after."""

STANDS_ALONE = {
    "overlong_buffer", "overlong_buffer_cfg", "reward_manager", "reward_kwargs", "sandbox_fusion",
    "custom_reward_function", "custom_cls", "launch_reward_fn_async",
}  # fmt: skip
"""Words that say by themselves what they are about: an end that begins with one counts in a section apart, too."""
