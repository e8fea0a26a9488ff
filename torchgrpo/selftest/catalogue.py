"""Catalogue of the checks of `python -m torchgrpo.selftest` and `make gpu-test`, cheap ones first."""

from torchgrpo.selftest.check import Check

LORA = ["train_model.lora.enabled=true", "optimizer.lr=1e-2"]
ADAPTER = [*LORA, "inference_model.lora=adapter"]
VLLM = "inference_model.backend=vllm"
ACTOR = "ray.enabled=true"
HALF = "train.mixed_precision=bf16"
FULL = ["inference_model.dtype=float32"]
GRAPHS = "inference_model.enforce_eager=false"
IN_TURNS = ["inference_model.gpu_memory_utilization=0.9", "inference_model.kv_cache_gib=2"]
NO_REFERENCE = "policy.kl_coef=0"
APART = ["inference_model.devices=[1]", "train_model.devices=[0]", NO_REFERENCE]
"""Learner and engine on a GPU each."""
CHECKPOINTING = [*LORA, "train.gradient_checkpointing=true"]
PARALLEL_ENGINE = ["inference_model.num_devices=2", "inference_model.tensor_parallel_size=2"]
TWO_RANKS = "train_model.num_devices=2"
HOMES = ["training GPU", "host memory", "base of the LoRA policy"]
ARRIVE, PRECISION, SCHEDULE = "engines.weights_arrive", "learner.precision", "runs.schedule"

INSTALL = (
    "install again as README.md says: `make run`, and `make vllm` for vLLM; their torch must be the same"
)
SANDBOX = (
    "docs/sandbox.md: what each level needs; without one, env.dataset=code and env.tools=[python] cannot run"
)
TRACKERS = "logging.backend=none; metrics.jsonl is always written"
RAY = "/tmp and /dev/shm must be writable and have room; only several engines and ray.enabled=true need Ray"
LEARNER = (
    "please report it with selftest.json; train.mixed_precision=fp32 and train.packing=false avoid the most"
)
ENGINE = "inference_model.backend=transformers; on a GPU VLLM_USE_V2_MODEL_RUNNER=0, inference_model.enforce_eager=true"
ADAPTERS = "inference_model.lora=merge sends full weights instead"
PARALLEL = (
    "inference_model.tensor_parallel_size=1; /dev/shm must have room; NCCL_P2P_DISABLE=1 avoids a bad link"
)
TURNS = "give learner and engine a GPU each, or lower inference_model.gpu_memory_utilization"
NCCL = (
    "NCCL_DEBUG=INFO says more; NCCL_P2P_DISABLE=1 avoids a bad link between GPUs; containers need --ipc=host"
)
RANKS = f"train_model.num_devices=1 trains in one process; {NCCL}"
RUN = "please report it with selftest.json"


def cpu(name: str, body: str, remedy: str, vllm: bool = False, **options: object) -> Check:
    return Check(name, body, options, vllm=vllm, remedy=remedy)


def gpu(name: str, body: str, remedy: str, gpus: int = 1, vllm: bool = True, **options: object) -> Check:
    return Check(name, body, options, "cuda", gpus, vllm, remedy)


CHECKS = (
    cpu("packages load", "machine.packages", INSTALL, names=["ray", "peft", "torchrl", "wandb"]),
    cpu("sandbox", "machine.sandbox", SANDBOX),
    cpu("trackers, offline", "machine.trackers", TRACKERS),
    cpu("Ray on this machine", "machine.ray_runtime", RAY),
    cpu("output head, CPU", "learner.head", LEARNER),
    cpu("objectives, CPU", "learner.presets", LEARNER),
    cpu("bf16, CPU", PRECISION, LEARNER, mixed="bf16"),
    cpu("fp16, CPU", PRECISION, LEARNER, mixed="fp16"),
    cpu("LoRA and checkpointing, CPU", PRECISION, LEARNER, mixed="bf16", overrides=CHECKPOINTING),
    cpu("reference homes, CPU", "learner.references", LEARNER, homes=HOMES[1:]),
    cpu("two learner ranks, CPU", "learner.ranks", RANKS),
    cpu("resume, CPU", "runs.resume", RUN),
    cpu("grpo.py, CPU", SCHEDULE, RUN),
    cpu("grpo_async.py, CPU", SCHEDULE, RUN, overlapped=True),
    cpu("vLLM in process, CPU", "engines.draws", ENGINE, vllm=True, overrides=FULL),
    cpu("push in mid-flight, CPU", "engines.in_flight", ENGINE, vllm=True),
    cpu("weights, tied head, CPU", ARRIVE, ENGINE, vllm=True, tied=True),
    cpu("vLLM in bf16, CPU", ARRIVE, FULL[0], vllm=True, overrides=["inference_model.dtype=bfloat16"]),
    cpu("LoRA merged, CPU", ARRIVE, ENGINE, vllm=True, overrides=LORA),
    cpu("LoRA adapter, CPU", ARRIVE, ADAPTERS, vllm=True, overrides=ADAPTER),
    cpu("engine as actor, CPU", ARRIVE, RAY, vllm=True, overrides=[ACTOR]),
    cpu("tensor parallel, CPU", ARRIVE, PARALLEL, vllm=True, overrides=PARALLEL_ENGINE, pushes=2),
    gpu("output head, GPU", "learner.head", LEARNER, vllm=False),
    gpu("objectives, GPU as CPU", "learner.presets", LEARNER, vllm=False),
    gpu("LoRA and checkpointing, GPU", PRECISION, LEARNER, vllm=False, mixed="bf16", overrides=CHECKPOINTING),
    gpu("fp16 and its overflow, GPU", PRECISION, LEARNER, vllm=False, mixed="fp16"),
    gpu("reference homes, GPU", "learner.references", LEARNER, vllm=False, homes=HOMES),
    gpu("resume on GPU and on CPU", "learner.resumes", RUN, vllm=False),
    gpu("LoRA merged, GPU", ARRIVE, ENGINE, overrides=LORA),
    gpu("push in mid-flight, GPU", "engines.in_flight", ENGINE),
    gpu("one GPU in turns", "engines.turns", TURNS, overrides=IN_TURNS),
    gpu("grpo.py, one GPU, bf16", SCHEDULE, RUN, overrides=[VLLM, HALF]),
    gpu("in turns, LoRA adapter", "engines.turns", TURNS, overrides=[*IN_TURNS, *ADAPTER]),
    gpu("in turns, engine as actor (ipc)", "engines.turns", TURNS, overrides=[*IN_TURNS, ACTOR]),
    gpu("vLLM in bf16, CUDA graphs", "engines.draws", ENGINE, overrides=[GRAPHS]),
    gpu("nccl push", ARRIVE, NCCL, 2, overrides=APART),
    gpu("LoRA adapter to another GPU", ARRIVE, ADAPTERS, 2, overrides=[*APART, *ADAPTER]),
    gpu("grpo_async.py, two GPUs", SCHEDULE, RUN, 2, overrides=[VLLM, HALF], overlapped=True, iterations=5),
    gpu("reference on a GPU of its own", "learner.references", LEARNER, 2, vllm=False, homes=["own devices"]),
    gpu("two learner ranks as one, GPUs", "learner.ranks", RANKS, 2, vllm=False),
    gpu("two learner ranks, nccl push", SCHEDULE, RANKS, 3, overrides=[VLLM, HALF, TWO_RANKS]),
    gpu("two learner ranks in turns", SCHEDULE, RANKS, 2, overrides=[VLLM, HALF, TWO_RANKS]),
    gpu("tensor parallel, GPUs", ARRIVE, PARALLEL, 3, overrides=[*PARALLEL_ENGINE, NO_REFERENCE]),
)
