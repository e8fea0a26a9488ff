"""Table of flags of other trainers, such as Megatron-RL, with equivalent keys or advice.

The trainers are nanochat, Megatron-RL, ColossalChat's RL, and TorchRL's `mode`. Only a whole name matches a
flag: the same word at the end of a dotted name has another meaning. config/cli/keys_of_other_trainers.py has
the names that also match the end of a dotted name.
"""

# fmt: off
_TEXTS = (
    # TorchRL
    ("the script sets the mode: run grpo.py for sync, grpo_async.py for async", "mode"),
    # nanochat, and what others share with it
    ("use model.name", "source model_tag model_step pretrained_checkpoint hf_format_dir"),
    ("use env.num_envs", "examples_per_step grpo_prompts_per_step"),
    ("use env.repeats", "num_samples grpo_group_size"),
    ("use policy.pass_size in the objective, and train.gradient_accumulation_steps or train.max_tokens_per_microbatch "
     "for memory",
     "device_batch_size"),
    ("use train.total_dialog_turns, completions of the whole run, with env.dataset for the data", "num_epochs"),
    ("use optimizer.muon_lr, with optimizer=muon_adamw", "matrix_lr"),
    ("use optimizer.group_lr", "embedding_lr unembedding_lr"),
    ("multiply the learning rates by this factor (optimizer.lr, optimizer.muon_lr, optimizer.group_lr); "
     "optimizer.schedule=linear lowers the rates to 0",
     "init_lr_frac"),
    ("use train.checkpoint_frequency, in iterations", "save_every"),
    ("use eval.frequency, in iterations", "eval_every"),
    ("use eval.sets.NAME.limit", "eval_examples rl_prompts_per_eval"),
    ("use device", "device_type"),
    # Megatron-RL, and what ColossalChat shares with it
    ("use train.epochs", "grpo_iterations"),
    ("use policy.clip_epsilon_low", "grpo_clamp_eps_lower clip_eps_low"),
    ("use policy.clip_epsilon_high", "grpo_clamp_eps_upper clip_eps_high"),
    ("use policy.kl_coef", "grpo_kl_beta"),
    ("use policy.entropy_coef, with policy.entropy_form=sampled for the sampled token",
     "grpo_entropy_term_weight"),
    ("use policy.dynamic_batching=true, with policy.filter_on=reward_std and policy.filter_range",
     "grpo_filter_groups_with_same_reward"),
    ("use policy.mismatch=truncate", "rl_inference_logprobs_is_correction"),
    ("use policy.mismatch_cap", "rl_importance_sampling_truncation_coef"),
    ("not needed: the scripts grpo.py and grpo_async.py are the training loops", "perform_rl_step"),
    ("use env.dataset, or env.dataset=mixture for several", "langrl_env_config env_config"),
    ("use inference_model.temperature", "rl_default_temperature"),
    ("use inference_model.top_p; 1.0 samples from all tokens", "rl_default_top_p"),
    ("use inference_model.top_k; 0 samples from all tokens", "rl_default_top_k"),
    ("use train.packing: a microbatch is one sequence with each prompt once", "rl_use_sequence_packing"),
    ("use train.max_tokens_per_microbatch", "rl_sequence_packing_bin_size"),
    ("packing has two settings only: train.packing and train.max_tokens_per_microbatch",
     "rl_sequence_packing_max_sequences_per_bin rl_sequence_packing_algo"),
    ("grpo_async.py trains while completions continue under new weights (inference_model.update=keep)",
     "rl_partial_rollouts"),
    ("use train.max_policy_age, of grpo_async.py", "rl_generation_lag rl_desired_lag"),
    ("use inference_model.max_num_seqs, of each engine",
     "rl_max_inflight_requests rl_parallel_generation_tasks"),
    ("grpo_async.py keeps its engines full and trains on each finished group, without a setting",
     "rl_submission_granularity rl_consumption_granularity"),
    ("completions are in the run's folder (run=rollouts); a resumed run begins with the waiting prompts",
     "rl_durable_rollout_bank rl_rollout_bank_dir rl_rollout_bank_max_bytes"),
    ("use train_model.offload=optimizer", "rl_offload_optimizer_during_inference"),
    ("an engine that takes turns with the learner frees its memory (inference_model.colocate)",
     "rl_offload_inference_model_weights rl_inference_model_unified_memory_level rl_offload_kv_cache_during_training "
     "rl_remove_kv_cache_during_training inference_dynamic_batching_unified_memory_level"),
    ("use inference_model.tensor_parallel_size",
     "rl_inference_tensor_model_parallel_size producer_tensor_parallel_size"),
    ("an engine is split by inference_model.tensor_parallel_size alone",
     "rl_inference_pipeline_model_parallel_size rl_inference_expert_model_parallel_size "
     "rl_inference_expert_tensor_model_parallel_size"),
    ("the devices of the engines determine the transport of weights; run=plan prints the transport",
     "refit_method refit_execution_batch_bytes"),
    ("use train.weight_check_every", "rl_verify_model_weights_swap"),
    ("the chat template renders a prompt (model.chat_template)",
     "rl_skip_bos_token tokenizer_hf_include_special_tokens"),
    ("the timeline of the report shows the time of each event (run=report)", "rl_profile rl_profile_dir"),
    ("set env.tools or env.reasoning for turns, with env.max_steps", "rl_inference_parsers"),
    ("an engine captures its CUDA graphs itself; inference_model.enforce_eager=true disables them",
     "rl_training_cuda_graphs cuda_graph_impl cuda_graph_scope inference_num_cuda_graphs decode_only_cuda_graphs "
     "inference_dynamic_batching_num_cuda_graphs te_rng_tracker"),
    ("use train.gradient_accumulation_steps: train.optim_batch_size over ranks and microbatches",
     "micro_batch_size"),
    ("use inference_model.max_model_len, by default env.max_prompt_tokens plus inference_model.max_tokens",
     "seq_length inference_max_seq_length"),
    ("use inference_model.max_num_seqs",
     "inference_max_requests inference_max_batch_size inference_dynamic_batching_max_requests "
     "inference_microbatch_size"),
    ("use inference_model.max_num_batched_tokens", "inference_dynamic_batching_max_tokens"),
    ("use inference_model.kv_cache_gib", "inference_buffer_size_gb inference_dynamic_batching_buffer_size_gb"),
    ("use train.resume, or model.name for the initial model of a run", "load finetune"),
    ("use hydra.run.dir: the folder of the run", "save tensorboard_dir data_cache_path"),
    ("use train.keep_checkpoints", "save_retain_interval"),
    ("checkpoints have one format, and run=export writes a model from a checkpoint", "ckpt_format"),
    ("use optimizer.clip_grad_norm", "clip_grad"),
    ("use optimizer.eps", "adam_eps"),
    ("use optimizer.warmup_steps, in optimizer steps", "lr_warmup_samples"),
    ("use train.total_dialog_turns: completions in the whole run", "train_samples"),
    ("use policy.aggregation=token_mean", "calculate_per_token_loss"),
    ("use train.gradient_checkpointing", "recompute_granularity recompute_activations"),
    ("use train_model.shard_size: optimizer states are sharded too", "use_distributed_optimizer"),
    ("use train_model.context_parallel, for ranks that divide a sequence", "sp_size"),
    ("the learner shards parameters (train_model.num_devices, train_model.shard_size), divides sequences "
     "(train_model.context_parallel) and splits nothing else",
     "sequence_parallel pipeline_parallel_size tp_size pp_size"),
    ("use train.wait_timeout_s", "distributed_timeout_minutes"),
    ("the tokenizer is that of model.name", "tokenizer_type tokenizer_model"),
    ("kernels are chosen by torch and vLLM; the settings are model.attn_implementation and train.compile",
     "transformer_impl use_mcore_models attention_backend"),
    ("use train.mixed_precision, which sums gradients in float32", "accumulate_allreduce_grads_in_fp32"),
    ("use logging.project", "wandb_project project"),
    ("use logging.experiment_name", "wandb_exp_name"),
    ("every optimizer step is logged; logging.backend names further trackers",
     "log_interval log_progress log_throughput log_params_norm log_num_zeros_in_grad log_straggler timing_log_level "
     "timing_log_option tensorboard_log_interval log_timers_to_tensorboard"),
    ("the model's configuration is that of model.name",
     "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups normalization norm_epsilon "
     "max_position_embeddings rotary_base rotary_percent position_embedding_type swiglu "
     "untie_embeddings_and_output_weights disable_bias_linear add_qkv_bias group_query_attention "
     "use_rotary_position_embeddings make_vocab_size_divisible_by no_masked_softmax_fusion attention_softmax_in_fp32"),
    ("not needed: env.dataset provides the rows", "mock_data no_create_attention_mask_in_dataloader"),
    ("not needed: memory is freed where engine and learner take turns", "empty_unused_memory_level"),
    # ColossalChat
    ("use train_model.num_devices", "num_trainers"),
    ("use inference_model.num_devices, which counts GPUs, not engines", "num_inferencer"),
    ("use env.num_envs, prompts of an iteration over all engines", "inference_batch_size"),
    ("not needed: a step is split into microbatches alone (train.gradient_accumulation_steps)",
     "train_minibatch_size"),
    ("use train.gradient_accumulation_steps", "train_microbatch_size"),
    ("use policy, a preset such as policy=grpo or policy=dapo", "algo"),
    ("use env.reward", "reward_type reward_fn_type"),
    ("use hydra.run.dir: the folder of the run, with checkpoints, evaluations and rollouts",
     "save_dir eval_save_dir rollout_save_dir"),
    ("use ray.address", "master_address"),
    ("not needed: the run chooses free ports", "master_port"),
    ("set the variable RAY_TMPDIR to move the files of a local Ray, or ray.address to join a cluster", "ray_dir"),
    ("use policy.aggregation", "loss_variation"),
    ("use policy.overlong_cache", "soft_over_length_punishment cache_length"),
    ("use policy.filter_truncated", "filter_truncated_response"),
    ("a reward scores the whole text; for tags of your own, set env.reward=module:function", "response_format_tags"),
)
# fmt: on
"""Pairs of an advice and its flags, written with underscores and separated by spaces."""
FLAG_HINTS = {name: text for text, names in _TEXTS for name in names.split()}
