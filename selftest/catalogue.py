"""Every check, cheap ones first. `run=selftest` tries CHECKS; `make gpu-test` tries those that need a GPU, and EXTRA."""

from selftest.check import Check

LORA = ["train_model.lora.enabled=true", "optimizer.lr=1e-2"]
ADAPTER = [*LORA, "inference_model.lora=adapter"]
VLLM = "inference_model.backend=vllm"
TRANSFORMERS = "inference_model.backend=transformers"
ACTOR = "ray.enabled=true"
HALF = "train.mixed_precision=bf16"
GRAPHS = "inference_model.enforce_eager=false"
WHOLE_GPU = "inference_model.gpu_memory_utilization=0.9"
APART = ["inference_model.devices=[1]", "train_model.devices=[0]", "policy.kl_coef=0"]
"""Learner and engine on a GPU each."""

INSTALL = (
    "install again as README.md says: `make run`, and `make vllm` for vLLM; their torch must be the same"
)
SANDBOX = (
    "docs/sandbox.md: what each level needs; without one, env.dataset=code and env.tools=[python] cannot run"
)
RAY = "/tmp and /dev/shm must be writable and have room; only several engines and ray.enabled=true need Ray"
LEARNER = "please report it with selftest.json; train.mixed_precision=fp32 and train.share_prompt=false avoid the most"
ENGINE = "inference_model.backend=transformers needs no vLLM; on a GPU VLLM_USE_V2_MODEL_RUNNER=0 and enforce_eager=true"
ADAPTERS = "inference_model.lora=merge sends full weights instead"
PARALLEL = "inference_model.tensor_parallel_size=1; /dev/shm must have room; on GPUs NCCL_P2P_DISABLE=1 avoids a bad link"
TURNS = "give learner and engine a GPU each, or lower inference_model.gpu_memory_utilization"
NCCL = (
    "NCCL_DEBUG=INFO says more; NCCL_P2P_DISABLE=1 avoids a bad link between GPUs; containers need --ipc=host"
)
RUN = "please report it with selftest.json"

MACHINE = (
    Check(
        "packages load", "machine.packages", {"names": ["ray", "peft", "torchrl", "wandb"]}, remedy=INSTALL
    ),
    Check("sandbox", "machine.sandbox", remedy=SANDBOX),
    Check(
        "trackers, offline",
        "machine.trackers",
        remedy="logging.backend=none; metrics.jsonl is always written",
    ),
    Check("Ray on this machine", "machine.ray_runtime", remedy=RAY),
)
LEARNERS = (
    Check("output head, CPU", "learner.head", remedy=LEARNER),
    Check("objectives, CPU", "learner.presets", remedy=LEARNER),
    Check("bf16, CPU", "learner.precision", {"mixed": "bf16"}, remedy=LEARNER),
    Check("fp16, CPU", "learner.precision", {"mixed": "fp16"}, remedy=LEARNER),
    Check(
        "LoRA and checkpointing, CPU",
        "learner.precision",
        {"mixed": "bf16", "overrides": [*LORA, "train.gradient_checkpointing=true"]},
        remedy=LEARNER,
    ),
    Check(
        "reference homes, CPU",
        "learner.references",
        {"homes": ["host memory", "base of the LoRA policy"]},
        remedy=LEARNER,
    ),
    Check("resume, CPU", "runs.resume", remedy=RUN),
)
RUNS = (
    Check("grpo.py, CPU", "runs.schedule", remedy=RUN),
    Check("grpo_async.py, CPU", "runs.schedule", {"overlapped": True}, remedy=RUN),
)
CPU_ENGINES = (
    Check(
        "vLLM in process, CPU",
        "engines.draws",
        {"overrides": ["inference_model.dtype=float32"]},
        vllm=True,
        remedy=ENGINE,
    ),
    Check("push in mid-flight, CPU", "engines.in_flight", vllm=True, remedy=ENGINE),
    Check("weights, tied head, CPU", "engines.weights_arrive", {"tied": True}, vllm=True, remedy=ENGINE),
    Check(
        "vLLM in bf16, CPU",
        "engines.weights_arrive",
        {"overrides": ["inference_model.dtype=bfloat16"]},
        vllm=True,
        remedy="inference_model.dtype=float32",
    ),
    Check("LoRA merged, CPU", "engines.weights_arrive", {"overrides": LORA}, vllm=True, remedy=ENGINE),
    Check("LoRA adapter, CPU", "engines.weights_arrive", {"overrides": ADAPTER}, vllm=True, remedy=ADAPTERS),
    Check(
        "engine as actor, CPU",
        "engines.weights_arrive",
        {"overrides": [ACTOR]},
        vllm=True,
        remedy=RAY,
        seconds=90,
    ),
    Check(
        "tensor parallel, CPU",
        "engines.weights_arrive",
        {
            "overrides": ["inference_model.num_devices=2", "inference_model.tensor_parallel_size=2"],
            "pushes": 2,
        },
        vllm=True,
        remedy=PARALLEL,
        seconds=120,
    ),
)


def gpu(name: str, body: str, remedy: str, gpus: int = 1, vllm: bool = True, **options: object) -> Check:
    return Check(name, body, options, "cuda", gpus, vllm, remedy, seconds=90)


GPU_LEARNERS = (
    gpu("output head, GPU", "learner.head", LEARNER, vllm=False),
    gpu("objectives, GPU as CPU", "learner.presets", LEARNER, vllm=False),
    gpu(
        "bf16, LoRA, checkpointing, GPU",
        "learner.precision",
        LEARNER,
        vllm=False,
        mixed="bf16",
        overrides=[*LORA, "train.gradient_checkpointing=true"],
    ),
    gpu("fp16 and its overflow, GPU", "learner.precision", LEARNER, vllm=False, mixed="fp16"),
    gpu(
        "reference homes, GPU",
        "learner.references",
        LEARNER,
        vllm=False,
        homes=["training GPU", "host memory", "base of the LoRA policy"],
    ),
    gpu("resume on GPU and on CPU", "learner.resumes", RUN, vllm=False),
)
GPU_ENGINES = (
    gpu("vLLM in bf16, CUDA graphs", "engines.draws", ENGINE, overrides=[GRAPHS]),
    gpu("push in mid-flight, GPU", "engines.in_flight", ENGINE),
    gpu("LoRA merged, GPU", "engines.weights_arrive", ENGINE, overrides=LORA),
    gpu("one GPU in turns", "engines.turns", TURNS, overrides=[WHOLE_GPU]),
    gpu("in turns, LoRA adapter", "engines.turns", TURNS, overrides=[WHOLE_GPU, *ADAPTER]),
    gpu("in turns, engine as actor (ipc)", "engines.turns", TURNS, overrides=[WHOLE_GPU, ACTOR]),
    gpu("grpo.py, one GPU, bf16", "runs.schedule", RUN, overrides=[VLLM, HALF]),
)
SEVERAL_GPUS = (
    gpu("nccl push", "engines.weights_arrive", NCCL, 2, overrides=APART),
    gpu("LoRA adapter to another GPU", "engines.weights_arrive", ADAPTERS, 2, overrides=[*APART, *ADAPTER]),
    gpu(
        "grpo_async.py, two GPUs",
        "runs.schedule",
        RUN,
        2,
        overrides=[VLLM, HALF],
        overlapped=True,
        iterations=5,
    ),
    gpu("learner on two GPUs", "learner.layouts", LEARNER, 2, vllm=False),
    gpu("reference on a GPU of its own", "learner.references", LEARNER, 2, vllm=False, homes=["own devices"]),
    gpu(
        "tensor parallel, GPUs",
        "engines.weights_arrive",
        PARALLEL,
        3,
        overrides=[
            "inference_model.num_devices=2",
            "inference_model.tensor_parallel_size=2",
            "policy.kl_coef=0",
        ],
    ),
)
CHECKS = (*MACHINE, *LEARNERS, *RUNS, *CPU_ENGINES, *GPU_LEARNERS, *GPU_ENGINES, *SEVERAL_GPUS)

EXTRA = (
    gpu("head as fast as a product", "learner.head_speed", LEARNER, vllm=False),
    gpu("a step takes what the plan says", "learner.memory", LEARNER, vllm=False),
    gpu("push right after an update", "push.race", NCCL),
    gpu("resume in turns", "runs.resume", RUN, overrides=[VLLM]),
    gpu("it learns, one GPU", "runs.learns", RUN, overrides=[VLLM]),
    gpu("it learns, transformers", "runs.learns", RUN, 2, vllm=False, overrides=[TRANSFORMERS]),
    gpu("vLLM in float32", "engines.draws", ENGINE, overrides=["inference_model.dtype=float32"]),
    gpu("weights, tied head", "engines.weights_arrive", ENGINE, tied=True),
    gpu("LoRA merged over nccl", "engines.weights_arrive", NCCL, 2, overrides=[*APART, *LORA]),
    gpu(
        "engine lost between two pushes", "engines.weights_arrive", NCCL, 2, overrides=APART, lose_engine=True
    ),
    gpu("fp8 weights", "engines.weights_arrive", ENGINE, overrides=["inference_model.quantization=fp8"]),
    gpu(
        "canary, 40 M parameters", "engines.weights_arrive", ENGINE, overrides=[GRAPHS], width=512, layers=12
    ),
    gpu(
        "canary, 300 M parameters",
        "engines.weights_arrive",
        ENGINE,
        overrides=[GRAPHS],
        width=1280,
        layers=16,
    ),
    gpu("nccl, GPUs in reverse", "runs.schedule", NCCL, 2, overrides=[VLLM], reverse_gpus=True),
    gpu(
        "learner on GPU 1, engine on 0",
        "engines.weights_arrive",
        NCCL,
        2,
        overrides=["train_model.devices=[1]", "inference_model.devices=[0]", "policy.kl_coef=0"],
    ),
    gpu("transformers engine on another GPU", "runs.schedule", RUN, 2, vllm=False, overrides=[TRANSFORMERS]),
    gpu(
        "learner on two GPUs, engine on a third",
        "engines.weights_arrive",
        NCCL,
        3,
        overrides=["train_model.num_devices=2", "policy.kl_coef=0"],
        tied=True,
    ),
    gpu(
        "two engines",
        "engines.weights_arrive",
        NCCL,
        3,
        overrides=["inference_model.num_devices=2", "policy.kl_coef=0"],
    ),
)
"""Longer ones, or such as measure."""
