"""What the long test files cost: the order in which the suite runs them, its markers, what `make quick` leaves out.

Seconds on two idle cores, rounded; `make test ARGS=--costs` prints those of a run. A file without a row takes a few
seconds at most and starts no engine.
"""

ENGINE = {
    "test_resume.py": 150,
    "test_kill_and_resume.py": 110,
    "test_dry_runs.py": 110,
    "test_command_line.py": 93,
    "rollout/test_pool.py": 90,
    "test_vllm_runs.py": 80,
    "test_grpo.py": 75,
    "test_cluster.py": 69,
    "test_grpo_async.py": 65,
    "test_engines.py": 60,
    "test_eval_of_checkpoints.py": 60,
    "test_selftest.py": 60,
    "test_evaluation.py": 50,
    "test_endings.py": 50,
    "rollout/test_pool_remains.py": 45,
    "rollout/test_canary.py": 42,
    "test_nothing_learned.py": 40,
    "test_sampling.py": 40,
    "envs/test_own_code.py": 25,
    "test_muon.py": 25,
    "rollout/test_ray_runtime.py": 20,
    "rollout/test_vllm_engine.py": 20,
    "rollout/test_transports.py": 18,
    "monitoring/test_progress.py": 17,
    "test_installed.py": 17,
    "rollout/test_vllm_async.py": 13,
    "rollout/test_vllm_transfer.py": 13,
    "envs/test_docs_rewards.py": 13,
    "test_turns.py": 12,
    "rollout/test_vllm_precision.py": 10,
    "rollout/test_turns.py": 10,
    "rollout/test_weights.py": 8,
    "rollout/test_engine_share.py": 8,
    "gpu_layouts/test_push.py": 6,
    "test_build_models.py": 5,
}
"""Files that start vLLM, Ray, or whole runs of the scripts."""
SLOW = {
    "plan/test_memory_estimates.py": 33,
    "monitoring/test_trackers.py": 27,
    "envs/test_reward_service.py": 21,
    "envs/test_sandbox.py": 21,
    "config/test_messages.py": 19,
    "gpu_layouts/test_batch_to_loss.py": 15,
    "config/test_schema.py": 11,
    "plan/test_plan.py": 9,
    "envs/test_code.py": 8,
    "envs/test_hostile_texts.py": 6,
    "training/test_aggregation.py": 6,
    "envs/test_sandbox_attacks.py": 5,
    "envs/test_sandbox_life.py": 4,
    "envs/test_grade.py": 4,
    "envs/test_mixture.py": 4,
}
"""Files that compute for long, or start many processes."""
