"""Checks of the self-test and of `make gpu-test`: names, functions, options and remedies.

Cheap checks come first.
"""

from torchgrpo.selftest.check import Check

LORA = ["train_model.lora.enabled=true", "optimizer.lr=1e-2"]
ADAPTER = [*LORA, "inference_model.lora=adapter"]
VLLM = "inference_model.backend=vllm"
RAY_ACTOR = "ray.enabled=true"
BF16 = "train.mixed_precision=bf16"
FLOAT32_ENGINE = ["inference_model.dtype=float32"]
CUDA_GRAPHS = "inference_model.enforce_eager=false"
SHARED_GPU = [
    *("inference_model.gpu_memory_utilization=0.9", "inference_model.kv_cache_gib=2"),
    "inference_model.sleep=true",
]
NO_REFERENCE = "policy.kl_coef=0"
SEPARATE_GPUS = ["inference_model.devices=[1]", "train_model.devices=[0]", NO_REFERENCE]
"""Learner and engine on a GPU each."""
CHECKPOINTING = [*LORA, "train.gradient_checkpointing=true"]
PARALLEL_ENGINE = ["inference_model.num_devices=2", "inference_model.tensor_parallel_size=2"]
TWO_RANKS = "train_model.num_devices=2"
HOMES = ["training GPU", "host memory", "base of the LoRA policy"]
WEIGHT_PUSH, PRECISION, SCHEDULE = (
    "engine_checks.check_weight_push",
    "learner_checks.check_mixed_precision",
    "training_run_checks.check_schedule",
)

INSTALL_REMEDY = "install again as README.md says: `make run`, and `make vllm` for vLLM; their torch must be the same"
SANDBOX_REMEDY = (
    "see docs/sandbox.md for what each level needs; without a sandbox, env.dataset=code and "
    "env.tools=[python] cannot run"
)
TRACKERS_REMEDY = "set logging.backend=none; metrics.jsonl is always written"
RAY_REMEDY = "make /tmp and /dev/shm writable and free space there; only several engines and ray.enabled=true need Ray"
LEARNER_REMEDY = (
    "report the failure with selftest.json; set train.mixed_precision=fp32 and train.packing=false to "
    "avoid most failures"
)
ENGINE_REMEDY = (
    "set inference_model.backend=transformers; on a GPU try VLLM_USE_V2_MODEL_RUNNER=0, "
    "inference_model.enforce_eager=true"
)
ADAPTER_REMEDY = "set inference_model.lora=merge to send full weights instead"
PARALLEL_REMEDY = (
    "set inference_model.tensor_parallel_size=1, free space in /dev/shm, or set NCCL_P2P_DISABLE=1 to avoid a bad link"
)
SHARED_GPU_REMEDY = "give learner and engine a GPU each, or lower inference_model.gpu_memory_utilization"
NCCL_REMEDY = (
    "set NCCL_DEBUG=INFO for details, or NCCL_P2P_DISABLE=1 to avoid a bad link between GPUs; start "
    "containers with --ipc=host"
)
RANKS_REMEDY = f"set train_model.num_devices=1 to train in one process; {NCCL_REMEDY}"
RUN_REMEDY = "report the failure with selftest.json"


def cpu_check(name: str, body: str, remedy: str, vllm: bool = False, **options: object) -> Check:
    return Check(name, body, options, vllm=vllm, remedy=remedy)


def gpu_check(name: str, body: str, remedy: str, gpus: int = 1, vllm: bool = True, **options: object) -> Check:
    return Check(name, body, options, "cuda", gpus, vllm, remedy)


CHECKS = (
    cpu_check(
        "packages load", "machine_checks.check_packages", INSTALL_REMEDY, names=["ray", "peft", "torchrl", "wandb"]
    ),
    cpu_check("sandbox", "machine_checks.check_sandbox", SANDBOX_REMEDY),
    cpu_check("trackers, offline", "machine_checks.check_trackers", TRACKERS_REMEDY),
    cpu_check("Ray on this machine", "machine_checks.check_ray", RAY_REMEDY),
    cpu_check("output head, CPU", "learner_checks.check_output_head", LEARNER_REMEDY),
    cpu_check("objectives, CPU", "learner_checks.check_presets", LEARNER_REMEDY),
    cpu_check("bf16, CPU", PRECISION, LEARNER_REMEDY, mixed_precision="bf16"),
    cpu_check("fp16, CPU", PRECISION, LEARNER_REMEDY, mixed_precision="fp16"),
    cpu_check(
        "LoRA and checkpointing, CPU", PRECISION, LEARNER_REMEDY, mixed_precision="bf16", overrides=CHECKPOINTING
    ),
    cpu_check("reference homes, CPU", "learner_checks.check_reference_placements", LEARNER_REMEDY, homes=HOMES[1:]),
    cpu_check("two learner ranks, CPU", "learner_checks.check_ranks", RANKS_REMEDY),
    cpu_check("resume, CPU", "training_run_checks.check_run_resume", RUN_REMEDY),
    cpu_check("grpo.py, CPU", SCHEDULE, RUN_REMEDY),
    cpu_check("grpo_async.py, CPU", SCHEDULE, RUN_REMEDY, is_overlapped=True),
    cpu_check(
        "vLLM in process, CPU", "engine_checks.check_sampling", ENGINE_REMEDY, vllm=True, overrides=FLOAT32_ENGINE
    ),
    cpu_check("push in mid-flight, CPU", "engine_checks.check_push_in_flight", ENGINE_REMEDY, vllm=True),
    cpu_check("weights, tied head, CPU", WEIGHT_PUSH, ENGINE_REMEDY, vllm=True, tied=True),
    cpu_check(
        "vLLM in bf16, CPU", WEIGHT_PUSH, FLOAT32_ENGINE[0], vllm=True, overrides=["inference_model.dtype=bfloat16"]
    ),
    cpu_check("LoRA merged, CPU", WEIGHT_PUSH, ENGINE_REMEDY, vllm=True, overrides=LORA),
    cpu_check("LoRA adapter, CPU", WEIGHT_PUSH, ADAPTER_REMEDY, vllm=True, overrides=ADAPTER),
    cpu_check("engine as actor, CPU", WEIGHT_PUSH, RAY_REMEDY, vllm=True, overrides=[RAY_ACTOR]),
    cpu_check("tensor parallel, CPU", WEIGHT_PUSH, PARALLEL_REMEDY, vllm=True, overrides=PARALLEL_ENGINE, pushes=2),
    gpu_check("output head, GPU", "learner_checks.check_output_head", LEARNER_REMEDY, vllm=False),
    gpu_check("objectives, GPU as CPU", "learner_checks.check_presets", LEARNER_REMEDY, vllm=False),
    gpu_check(
        "LoRA and checkpointing, GPU",
        PRECISION,
        LEARNER_REMEDY,
        vllm=False,
        mixed_precision="bf16",
        overrides=CHECKPOINTING,
    ),
    gpu_check("fp16 and its overflow, GPU", PRECISION, LEARNER_REMEDY, vllm=False, mixed_precision="fp16"),
    gpu_check(
        "reference homes, GPU", "learner_checks.check_reference_placements", LEARNER_REMEDY, vllm=False, homes=HOMES
    ),
    gpu_check("resume on GPU and on CPU", "learner_checks.check_learner_resume", RUN_REMEDY, vllm=False),
    gpu_check("LoRA merged, GPU", WEIGHT_PUSH, ENGINE_REMEDY, overrides=LORA),
    gpu_check("push in mid-flight, GPU", "engine_checks.check_push_in_flight", ENGINE_REMEDY),
    gpu_check("one GPU in turns", "engine_checks.check_shared_gpu", SHARED_GPU_REMEDY, overrides=SHARED_GPU),
    gpu_check("grpo.py, one GPU, bf16", SCHEDULE, RUN_REMEDY, overrides=[VLLM, BF16]),
    gpu_check(
        "in turns, LoRA adapter", "engine_checks.check_shared_gpu", SHARED_GPU_REMEDY, overrides=[*SHARED_GPU, *ADAPTER]
    ),
    gpu_check(
        "in turns, engine as actor (ipc)",
        "engine_checks.check_shared_gpu",
        SHARED_GPU_REMEDY,
        overrides=[*SHARED_GPU, RAY_ACTOR],
    ),
    gpu_check("vLLM in bf16, CUDA graphs", "engine_checks.check_sampling", ENGINE_REMEDY, overrides=[CUDA_GRAPHS]),
    gpu_check("nccl push", WEIGHT_PUSH, NCCL_REMEDY, 2, overrides=SEPARATE_GPUS),
    gpu_check("LoRA adapter to another GPU", WEIGHT_PUSH, ADAPTER_REMEDY, 2, overrides=[*SEPARATE_GPUS, *ADAPTER]),
    gpu_check(
        "grpo_async.py, two GPUs", SCHEDULE, RUN_REMEDY, 2, overrides=[VLLM, BF16], is_overlapped=True, iterations=5
    ),
    gpu_check(
        "reference on a GPU of its own",
        "learner_checks.check_reference_placements",
        LEARNER_REMEDY,
        2,
        vllm=False,
        homes=["own devices"],
    ),
    gpu_check("two learner ranks as one, GPUs", "learner_checks.check_ranks", RANKS_REMEDY, 2, vllm=False),
    gpu_check("two learner ranks, nccl push", SCHEDULE, RANKS_REMEDY, 3, overrides=[VLLM, BF16, TWO_RANKS]),
    gpu_check("two learner ranks in turns", SCHEDULE, RANKS_REMEDY, 2, overrides=[VLLM, BF16, TWO_RANKS]),
    gpu_check("tensor parallel, GPUs", WEIGHT_PUSH, PARALLEL_REMEDY, 3, overrides=[*PARALLEL_ENGINE, NO_REFERENCE]),
)
