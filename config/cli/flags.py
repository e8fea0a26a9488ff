"""Flags of trainers that have no sections: nanochat, Megatron-RL, ColossalChat's RL, and TorchRL's `mode`.

A flag counts as a whole alone, for its words mean something else at the end of a dotted name.
config/cli/other_trainers.py has the names that count there too.
"""

# fmt: off
_TEXTS = (
    # TorchRL
    ("the script is the mode: grpo.py is sync, grpo_async.py is async", "mode"),
    # nanochat, and what others share with it
    ("here it is model.name", "source model_tag model_step pretrained_checkpoint hf_format_dir"),
    ("here it is env.num_envs", "examples_per_step grpo_prompts_per_step"),
    ("here it is env.repeats", "num_samples grpo_group_size"),
    ("here it is policy.pass_size in the objective, and train.gradient_accumulation_steps or "
     "train.max_tokens_per_microbatch for memory",
     "device_batch_size"),
    ("here it is train.total_dialog_turns, completions of the whole run, with env.dataset for the data",
     "num_epochs"),
    ("here it is optimizer.muon_lr, with optimizer=muon_adamw", "matrix_lr"),
    ("here it is optimizer.group_lr", "embedding_lr unembedding_lr"),
    ("multiply the learning rates by it (optimizer.lr, optimizer.muon_lr, optimizer.group_lr); "
     "optimizer.schedule=linear brings them down to 0",
     "init_lr_frac"),
    ("here it is train.checkpoint_frequency, in iterations", "save_every"),
    ("here it is eval.frequency, in iterations", "eval_every"),
    ("here it is eval.sets.NAME.limit", "eval_examples rl_prompts_per_eval"),
    ("here it is device", "device_type"),
    # Megatron-RL, and what ColossalChat shares with it
    ("here it is train.epochs", "grpo_iterations"),
    ("here it is policy.clip_epsilon_low", "grpo_clamp_eps_lower clip_eps_low"),
    ("here it is policy.clip_epsilon_high", "grpo_clamp_eps_upper clip_eps_high"),
    ("here it is policy.kl_coef", "grpo_kl_beta"),
    ("here it is policy.entropy_coef, of the sampled token with policy.entropy_form=sampled",
     "grpo_entropy_term_weight"),
    ("here it is policy.dynamic_batching=true, with policy.filter_on=reward_std and policy.filter_range",
     "grpo_filter_groups_with_same_reward"),
    ("here it is policy.mismatch=truncate", "rl_inference_logprobs_is_correction"),
    ("here it is policy.mismatch_cap", "rl_importance_sampling_truncation_coef"),
    ("not needed: the script is the loop, grpo.py or grpo_async.py", "perform_rl_step"),
    ("here it is env.dataset, or env.dataset=mixture for several", "langrl_env_config env_config"),
    ("here it is inference_model.temperature", "rl_default_temperature"),
    ("here it is inference_model.top_p, where all tokens are 1.0", "rl_default_top_p"),
    ("here it is inference_model.top_k, where all tokens are 0", "rl_default_top_k"),
    ("here it is train.packing: a microbatch is one sequence, each prompt once", "rl_use_sequence_packing"),
    ("here it is train.max_tokens_per_microbatch", "rl_sequence_packing_bin_size"),
    ("packing has no more to set: train.packing, train.max_tokens_per_microbatch",
     "rl_sequence_packing_max_sequences_per_bin rl_sequence_packing_algo"),
    ("grpo_async.py trains while completions go on under new weights (inference_model.update=keep)",
     "rl_partial_rollouts"),
    ("here it is train.max_policy_age, of grpo_async.py", "rl_generation_lag rl_desired_lag"),
    ("here it is inference_model.max_num_seqs, of each engine",
     "rl_max_inflight_requests rl_parallel_generation_tasks"),
    ("grpo_async.py keeps its engines full and trains on groups as they end; nothing is to be set",
     "rl_submission_granularity rl_consumption_granularity"),
    ("completions are in the run's folder (run=rollouts); a resumed run begins with the prompts that wait",
     "rl_durable_rollout_bank rl_rollout_bank_dir rl_rollout_bank_max_bytes"),
    ("here it is train_model.offload=optimizer", "rl_offload_optimizer_during_inference"),
    ("an engine that takes turns gives its memory back (inference_model.colocate)",
     "rl_offload_inference_model_weights rl_inference_model_unified_memory_level "
     "rl_offload_kv_cache_during_training rl_remove_kv_cache_during_training "
     "inference_dynamic_batching_unified_memory_level"),
    ("here it is inference_model.tensor_parallel_size",
     "rl_inference_tensor_model_parallel_size producer_tensor_parallel_size"),
    ("an engine is split by inference_model.tensor_parallel_size alone",
     "rl_inference_pipeline_model_parallel_size rl_inference_expert_model_parallel_size "
     "rl_inference_expert_tensor_model_parallel_size"),
    ("how weights reach the engines follows from their devices; run=plan prints it",
     "refit_method refit_execution_batch_bytes"),
    ("here it is train.weight_check_every", "rl_verify_model_weights_swap"),
    ("a prompt is what the chat template makes of it (model.chat_template)",
     "rl_skip_bos_token tokenizer_hf_include_special_tokens"),
    ("the timeline of the report shows where time goes (run=report)", "rl_profile rl_profile_dir"),
    ("turns come from env.tools or env.reasoning, with env.max_steps", "rl_inference_parsers"),
    ("an engine captures its CUDA graphs itself; inference_model.enforce_eager=true does without",
     "rl_training_cuda_graphs cuda_graph_impl cuda_graph_scope inference_num_cuda_graphs "
     "decode_only_cuda_graphs inference_dynamic_batching_num_cuda_graphs te_rng_tracker"),
    ("here it is train.gradient_accumulation_steps: train.optim_batch_size over ranks and microbatches",
     "micro_batch_size"),
    ("here it is inference_model.max_model_len, of env.max_prompt_tokens and inference_model.max_tokens",
     "seq_length inference_max_seq_length"),
    ("here it is inference_model.max_num_seqs",
     "inference_max_requests inference_max_batch_size inference_dynamic_batching_max_requests "
     "inference_microbatch_size"),
    ("here it is inference_model.max_num_batched_tokens", "inference_dynamic_batching_max_tokens"),
    ("here it is inference_model.kv_cache_gib",
     "inference_buffer_size_gb inference_dynamic_batching_buffer_size_gb"),
    ("here it is train.resume, or model.name for the model that a run begins with", "load finetune"),
    ("here it is hydra.run.dir: the folder of the run", "save tensorboard_dir data_cache_path"),
    ("here it is train.keep_checkpoints", "save_retain_interval"),
    ("a checkpoint is whole, and run=export makes a model of it", "ckpt_format"),
    ("here it is optimizer.clip_grad_norm", "clip_grad"),
    ("here it is optimizer.eps", "adam_eps"),
    ("here it is optimizer.warmup_steps, in optimizer steps", "lr_warmup_samples"),
    ("here it is train.total_dialog_turns: completions in the whole run", "train_samples"),
    ("here it is policy.aggregation=token_mean", "calculate_per_token_loss"),
    ("here it is train.gradient_checkpointing", "recompute_granularity recompute_activations"),
    ("here it is train_model.shard_size: optimizer states are sharded too", "use_distributed_optimizer"),
    ("the learner shards parameters (train_model.num_devices, train_model.shard_size) and splits nothing else",
     "sequence_parallel pipeline_parallel_size tp_size pp_size sp_size"),
    ("here it is train.wait_timeout_s", "distributed_timeout_minutes"),
    ("the tokenizer is that of model.name", "tokenizer_type tokenizer_model"),
    ("kernels are chosen by torch and vLLM; model.attn_implementation and train.compile are what can be set",
     "transformer_impl use_mcore_models attention_backend"),
    ("here it is train.mixed_precision, whose sums are float32", "accumulate_allreduce_grads_in_fp32"),
    ("here it is logging.project", "wandb_project project"),
    ("here it is logging.experiment_name", "wandb_exp_name"),
    ("every optimizer step is logged, and logging.backend says where else",
     "log_interval log_progress log_throughput log_params_norm log_num_zeros_in_grad log_straggler "
     "timing_log_level timing_log_option tensorboard_log_interval log_timers_to_tensorboard"),
    ("the model's configuration is that of model.name",
     "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups normalization "
     "norm_epsilon max_position_embeddings rotary_base rotary_percent position_embedding_type swiglu "
     "untie_embeddings_and_output_weights disable_bias_linear add_qkv_bias group_query_attention "
     "use_rotary_position_embeddings make_vocab_size_divisible_by no_masked_softmax_fusion "
     "attention_softmax_in_fp32"),
    ("not needed: env.dataset gives the rows", "mock_data no_create_attention_mask_in_dataloader"),
    ("not needed: memory is given back where engine and learner take turns", "empty_unused_memory_level"),
    # ColossalChat
    ("here it is train_model.num_devices", "num_trainers"),
    ("here it is inference_model.num_devices, which counts GPUs, not engines", "num_inferencer"),
    ("here it is env.num_envs, prompts of an iteration over all engines", "inference_batch_size"),
    ("not needed: a step is split into microbatches alone (train.gradient_accumulation_steps)",
     "train_minibatch_size"),
    ("here it is train.gradient_accumulation_steps", "train_microbatch_size"),
    ("here it is policy, a preset such as policy=grpo or policy=dapo", "algo"),
    ("here it is env.reward", "reward_type reward_fn_type"),
    ("here it is hydra.run.dir: the folder of the run, with checkpoints, evaluations and rollouts",
     "save_dir eval_save_dir rollout_save_dir"),
    ("here it is ray.address", "master_address"),
    ("ports are found by the run itself", "master_port"),
    ("the variable RAY_TMPDIR moves the files of a local Ray; ray.address joins a cluster", "ray_dir"),
    ("here it is policy.aggregation", "loss_variation"),
    ("here it is policy.overlong_cache", "soft_over_length_punishment cache_length"),
    ("here it is policy.filter_truncated", "filter_truncated_response"),
    ("a reward judges the whole text; tags of your own are for env.reward=module:function",
     "response_format_tags"),
)
# fmt: on
"""What is said, and of which flags, with underscores."""
FLAGS = {name: text for text, names in _TEXTS for name in names.split()}
