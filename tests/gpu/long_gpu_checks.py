"""Long checks on GPUs beside those of the self-test.

Their bodies are here or in selftest/.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from envs.group import Sampling
from tests.groups import credit_groups
from torchgrpo.batches.batch import Tokens
from torchgrpo.plan.machine import visible_gpus
from torchgrpo.rollout.weights.weight_update import WeightUpdate
from torchgrpo.selftest import learner_checks
from torchgrpo.selftest.catalogue import (
    BF16,
    CUDA_GRAPHS,
    ENGINE_REMEDY,
    FLOAT32_ENGINE,
    LEARNER_REMEDY,
    LORA,
    NCCL_REMEDY,
    NO_REFERENCE,
    RUN_REMEDY,
    SCHEDULE,
    SEPARATE_GPUS,
    VLLM,
    WEIGHT_PUSH,
    gpu_check,
)
from torchgrpo.selftest.check import CheckWorkspace
from torchgrpo.selftest.engine_checks import MEAN_GAP, check_weight_push, log_prob_gap, policy_model
from torchgrpo.selftest.tiny_model import make_config, make_model_folder, open_run, perturb_weights
from torchgrpo.selftest.training_run_checks import check_schedule, train
from torchgrpo.training.learner import make_learner
from torchgrpo.training.response_scorer import ResponseScorer

REWARD_RISES = "tests.gpu.long_gpu_checks.check_reward_rises"
LARGER = "tests.gpu.long_gpu_checks.check_larger_weights"
TRANSFORMERS = "inference_model.backend=transformers"
FP8 = ["inference_model.quantization=fp8"]
SWAPPED_DEVICES = ["train_model.devices=[1]", "inference_model.devices=[0]", NO_REFERENCE]

EXTRA = (
    gpu_check("head as fast as a product", "tests.gpu.long_gpu_checks.check_head_speed", LEARNER_REMEDY, vllm=False),
    gpu_check(
        "a step takes what the plan says",
        "tests.gpu.long_gpu_checks.check_step_memory",
        LEARNER_REMEDY,
        vllm=False,
        width=1024,
        layers=8,
    ),
    gpu_check("push right after an update", "tests.gpu.long_gpu_checks.check_push_after_update", NCCL_REMEDY),
    gpu_check("resume in turns", "training_run_checks.check_run_resume", RUN_REMEDY, overrides=[VLLM]),
    gpu_check("it learns, one GPU", "tests.gpu.long_gpu_checks.check_reward_rises", RUN_REMEDY, overrides=[VLLM]),
    gpu_check("grpo.py compiled", SCHEDULE, RUN_REMEDY, overrides=[VLLM, BF16, "train.compile=true"]),
    gpu_check("grpo.py, CUDA graphs", SCHEDULE, RUN_REMEDY, overrides=[VLLM, BF16, CUDA_GRAPHS]),
    gpu_check(
        "it learns, transformers",
        "tests.gpu.long_gpu_checks.check_reward_rises",
        RUN_REMEDY,
        2,
        vllm=False,
        overrides=[TRANSFORMERS],
    ),
    gpu_check("vLLM in float32", "engine_checks.check_sampling", ENGINE_REMEDY, overrides=FLOAT32_ENGINE),
    gpu_check("weights, tied head", WEIGHT_PUSH, ENGINE_REMEDY, tied=True),
    gpu_check("LoRA merged over nccl", WEIGHT_PUSH, NCCL_REMEDY, 2, overrides=[*SEPARATE_GPUS, *LORA]),
    gpu_check(
        "engine lost between two pushes",
        "tests.gpu.long_gpu_checks.check_lost_engine",
        NCCL_REMEDY,
        2,
        overrides=SEPARATE_GPUS,
    ),
    gpu_check("fp8 weights", WEIGHT_PUSH, ENGINE_REMEDY, overrides=FP8),
    gpu_check("weight check, 40 M parameters", LARGER, ENGINE_REMEDY, width=512, layers=12),
    gpu_check("weight check, 300 M parameters", LARGER, ENGINE_REMEDY, width=1280, layers=16),
    gpu_check("nccl, GPUs in reverse", "tests.gpu.long_gpu_checks.check_reversed_gpus", NCCL_REMEDY, 2),
    gpu_check("learner on GPU 1, engine on 0", WEIGHT_PUSH, NCCL_REMEDY, 2, overrides=SWAPPED_DEVICES),
    gpu_check("transformers engine on another GPU", SCHEDULE, RUN_REMEDY, 2, vllm=False, overrides=[TRANSFORMERS]),
    gpu_check("two engines", WEIGHT_PUSH, NCCL_REMEDY, 3, overrides=["inference_model.num_devices=2", NO_REFERENCE]),
)


def random_responses(rows: int, width: int, vocabulary: int) -> Tokens:
    """Builds random responses of one length to prompts of 8 tokens."""
    sample_tokens = torch.randint(0, vocabulary, (rows, width), generator=torch.Generator().manual_seed(0))
    return Tokens(
        prompt=torch.zeros(rows, 8, dtype=torch.int64),
        prompt_mask=torch.ones(rows, 8, dtype=torch.bool),
        response=sample_tokens,
        response_mask=torch.ones_like(sample_tokens, dtype=torch.bool),
        loss_mask=torch.ones_like(sample_tokens, dtype=torch.bool),
        batch_size=[rows],
    )


def check_head_speed(
    workspace: CheckWorkspace,
    width: int = 2048,
    vocabulary: int = 151_936,
    rows: int = 16,
    length: int = 300,
    share: float = 0.3,
) -> str:
    """Checks that the output head of float32 weights is fast under bfloat16 autocast.

    It must reach `share` of the rate of a plain bfloat16 product.
    """
    shape = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=max(1, width // 128),
    )
    with torch.device(workspace.device):
        model = LlamaForCausalLM(shape)
    scorer = ResponseScorer(model, autocast_dtype=torch.bfloat16)
    tokens = random_responses(rows, length, vocabulary)
    left, right = (
        torch.randn(shape, device=workspace.device, dtype=torch.bfloat16)
        for shape in ((rows * length // 4, width), (width, vocabulary))
    )
    product_s = _seconds(workspace, lambda: left @ right)
    step_s = _seconds(workspace, lambda: scorer(tokens).log_prob.sum().backward())
    per_product = 2 * len(left) * width * vocabulary
    rate, head_rate = per_product / product_s, 8 * rows * length * width * vocabulary / step_s
    assert head_rate > share * rate, (
        f"the head runs at {head_rate / 1e12:.0f} TFLOPS, a plain bfloat16 product at {rate / 1e12:.0f}"
    )
    return f"{head_rate / 1e12:.3g} of {rate / 1e12:.3g} TFLOPS"


def _seconds(workspace: CheckWorkspace, work: Callable[[], object]) -> float:
    """Returns the time of the second of two runs."""
    for _ in range(2):
        if workspace.device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if workspace.device == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - began
    return took


def check_step_memory(workspace: CheckWorkspace, width: int = 128, layers: int = 2) -> str:
    """Checks the peak memory of a step on a GPU against the plan's estimate."""
    name = f"model.name={make_model_folder(workspace, width=width, layers=layers)}"
    groups = learner_checks.collect_groups(workspace)
    config = make_config(workspace, name, "policy.kl_coef=0")
    plan = learner_checks.make_learner_plan(config, workspace)
    trained_learner = make_learner(config, plan, workspace.folder)
    estimate = max(phase.bytes for phase in plan.phases)
    for _ in range(2):
        trained_learner.step(credit_groups(trained_learner, groups))
    measured = torch.cuda.max_memory_allocated() if workspace.device == "cuda" else 0
    assert measured < 1.2 * estimate, f"a step took {measured / 2**20:.0f} MiB, estimated {estimate / 2**20:.0f}"
    return f"{measured / 2**20:.0f} MiB, estimated {estimate / 2**20:.0f}"


def check_reward_rises(workspace: CheckWorkspace, overrides: Sequence[str] = (), iterations: int = 20) -> str:
    """Checks that the quickstart's reward rises."""
    usual = ("env.num_envs=32", *overrides)
    rewards = [row["reward/mean"] for row in train(workspace, *usual, iterations=iterations)]
    first, last = sum(rewards[:4]) / 4, sum(rewards[-4:]) / 4
    assert last > first + 0.1, f"the reward went from {first:.2f} to {last:.2f} in {iterations} iterations"
    return f"reward {first:.2f} to {last:.2f}"


def check_larger_weights(workspace: CheckWorkspace, width: int = 128, layers: int = 2) -> str:
    """Checks that the weights of a larger random model arrive."""
    name = f"model.name={make_model_folder(workspace, width=width, layers=layers)}"
    return check_weight_push(workspace, [name, CUDA_GRAPHS])


def check_reversed_gpus(workspace: CheckWorkspace) -> str:
    """Checks a run in a process that sees the GPUs in reverse order."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(reversed(visible_gpus()))
    return check_schedule(workspace, [VLLM])


def check_lost_engine(workspace: CheckWorkspace, overrides: Sequence[str] = ()) -> str:
    """Checks that weights arrive after the engine was killed between two pushes."""
    with open_run(workspace, VLLM, *overrides) as working:
        weight_pusher, model = working.rollout_components.weight_pusher, policy_model(working)
        weight_pusher.push()
        actors = [child for child in psutil.Process().children(recursive=True) if "EngineActor" in child.name()]
        actors[0].kill()
        perturb_weights(model, seed=0)
        weight_pusher.push()
        worst = weight_pusher.check()["weight_check/max"]
        gap = float(log_prob_gap(model, working.rollout_components.engine, Sampling(max_tokens=8)).mean())
        dtype = working.plan.engine.dtype
    assert gap < MEAN_GAP[dtype], f"{dtype}: sampled log-probs are {gap:.2g} from the learner's in the mean"
    return f"weight check {worst:.1g}, sampled tokens {gap:.1g}"


# --- a native push with a receiver that only keeps the bytes ---------------------------------------------

CYCLES = 2_000_000_000  # of the GPU's clock: about a second


class RecordingCommunicator:
    """Fake NCCL communicator of vLLM that copies broadcast tensors on the sending stream."""

    def __init__(self) -> None:
        self.sent_tensors: list[torch.Tensor] = []

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.sent_tensors.append(tensor.clone())

    def destroy(self) -> None:
        pass


class NoEngines:
    """Fake engines of a push that answer nothing."""

    engine_pids = (0,)

    def call_each(self, method: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        return []

    def stacks(self) -> str:
        return ""


def check_push_after_update(workspace: CheckWorkspace) -> str:
    """Checks that a push during an update on the GPU sends the updated weights."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.base import TrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    from torchgrpo.rollout.weights.vllm_weight_transfer import TRAINER_INIT, VLLMWeightTransfer

    communicator: Any = RecordingCommunicator()

    @dataclass
    class Init(TrainerInitInfo):
        backend: ClassVar[str] = "kept"

    class Trainer(NCCLTrainerWeightTransferEngine):
        init_info_cls: Any = Init

        @classmethod
        def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> "Trainer":
            trainer = cls(client=client, source=source)
            trainer.model_update_group = communicator
            return trainer

    WeightTransferTrainerFactory.register_engine("kept", Trainer)
    TRAINER_INIT["kept"] = lambda end: Init(rank=0)
    weight = torch.zeros(1024, 1024, device=workspace.device)
    transfer = VLLMWeightTransfer("kept", timeout=30)
    transfer.push(WeightUpdate.from_pairs([("weight", weight)]), 0, NoEngines())
    for value in (1.0, 2.0):
        torch.cuda._sleep(CYCLES)
        weight.fill_(value)
        transfer.push(WeightUpdate.from_pairs([("weight", weight)]), int(value), NoEngines())
        arrived = communicator.sent_tensors[-1].cpu_check().view(torch.float32)
        assert (arrived == value).all(), f"the push sent {arrived.unique().tolist()} and not {value}"
    transfer.close()
    return "the update's result"
