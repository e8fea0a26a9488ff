"""Longer checks than those of the self-test; their bodies are here or in selftest/."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from envs.group import Sampling
from tests.groups import credited
from torchgrpo.batches.batch import Tokens
from torchgrpo.plan.machine import visible_gpus
from torchgrpo.rollout.weights.outgoing import Outgoing
from torchgrpo.selftest import learner
from torchgrpo.selftest.catalogue import (
    APART,
    ARRIVE,
    ENGINE,
    FULL,
    GRAPHS,
    HALF,
    LEARNER,
    LORA,
    NCCL,
    NO_REFERENCE,
    RUN,
    SCHEDULE,
    VLLM,
    gpu,
)
from torchgrpo.selftest.check import Bench
from torchgrpo.selftest.engines import MEAN_GAP, drawn_gap, policy, weights_arrive
from torchgrpo.selftest.runs import schedule, train
from torchgrpo.selftest.tiny import built, configured, model_folder, moved
from torchgrpo.training.forward import ResponseScorer
from torchgrpo.training.learner import make_learner

LARGER = "tests.gpu.longer.larger"
TRANSFORMERS = "inference_model.backend=transformers"
FP8 = ["inference_model.quantization=fp8"]
SWAPPED = ["train_model.devices=[1]", "inference_model.devices=[0]", NO_REFERENCE]

EXTRA = (
    gpu("head as fast as a product", "tests.gpu.longer.head_speed", LEARNER, vllm=False),
    gpu(
        "a step takes what the plan says",
        "tests.gpu.longer.memory",
        LEARNER,
        vllm=False,
        width=1024,
        layers=8,
    ),
    gpu("push right after an update", "tests.gpu.longer.race", NCCL),
    gpu("resume in turns", "runs.resume", RUN, overrides=[VLLM]),
    gpu("it learns, one GPU", "tests.gpu.longer.learns", RUN, overrides=[VLLM]),
    gpu("grpo.py compiled", SCHEDULE, RUN, overrides=[VLLM, HALF, "train.compile=true"]),
    gpu("grpo.py, CUDA graphs", SCHEDULE, RUN, overrides=[VLLM, HALF, GRAPHS]),
    gpu("it learns, transformers", "tests.gpu.longer.learns", RUN, 2, vllm=False, overrides=[TRANSFORMERS]),
    gpu("vLLM in float32", "engines.draws", ENGINE, overrides=FULL),
    gpu("weights, tied head", ARRIVE, ENGINE, tied=True),
    gpu("LoRA merged over nccl", ARRIVE, NCCL, 2, overrides=[*APART, *LORA]),
    gpu("engine lost between two pushes", "tests.gpu.longer.lost_engine", NCCL, 2, overrides=APART),
    gpu("fp8 weights", ARRIVE, ENGINE, overrides=FP8),
    gpu("weight check, 40 M parameters", LARGER, ENGINE, width=512, layers=12),
    gpu("weight check, 300 M parameters", LARGER, ENGINE, width=1280, layers=16),
    gpu("nccl, GPUs in reverse", "tests.gpu.longer.reverse_gpus", NCCL, 2),
    gpu("learner on GPU 1, engine on 0", ARRIVE, NCCL, 2, overrides=SWAPPED),
    gpu("transformers engine on another GPU", SCHEDULE, RUN, 2, vllm=False, overrides=[TRANSFORMERS]),
    gpu("two engines", ARRIVE, NCCL, 3, overrides=["inference_model.num_devices=2", NO_REFERENCE]),
)


def random_responses(rows: int, width: int, vocabulary: int) -> Tokens:
    """All of one length, to prompts of 8 tokens."""
    drawn = torch.randint(0, vocabulary, (rows, width), generator=torch.Generator().manual_seed(0))
    return Tokens(
        prompt=torch.zeros(rows, 8, dtype=torch.int64),
        prompt_mask=torch.ones(rows, 8, dtype=torch.bool),
        response=drawn,
        response_mask=torch.ones_like(drawn, dtype=torch.bool),
        loss_mask=torch.ones_like(drawn, dtype=torch.bool),
        batch_size=[rows],
    )


def head_speed(
    bench: Bench,
    width: int = 2048,
    vocabulary: int = 151_936,
    rows: int = 16,
    length: int = 300,
    share: float = 0.3,
) -> str:
    """Under bfloat16 autocast the head of float32 weights reaches `share` of the rate of a plain bfloat16 product."""
    shape = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=max(1, width // 128),
    )
    with torch.device(bench.device):
        model = LlamaForCausalLM(shape)
    scorer = ResponseScorer(model, autocast_dtype=torch.bfloat16)
    tokens = random_responses(rows, length, vocabulary)
    left, right = (
        torch.randn(shape, device=bench.device, dtype=torch.bfloat16)
        for shape in ((rows * length // 4, width), (width, vocabulary))
    )
    product_s = _seconds(bench, lambda: left @ right)
    step_s = _seconds(bench, lambda: scorer(tokens).log_prob.sum().backward())
    per_product = 2 * len(left) * width * vocabulary
    rate, head_rate = per_product / product_s, 8 * rows * length * width * vocabulary / step_s
    assert head_rate > share * rate, (
        f"the head runs at {head_rate / 1e12:.0f} TFLOPS, a plain bfloat16 product at {rate / 1e12:.0f}"
    )
    return f"{head_rate / 1e12:.3g} of {rate / 1e12:.3g} TFLOPS"


def _seconds(bench: Bench, work: Callable[[], object]) -> float:
    """The second of two goes."""
    for _ in range(2):
        if bench.device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if bench.device == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - began
    return took


def memory(bench: Bench, width: int = 128, layers: int = 2) -> str:
    """What a step takes of a GPU at its peak, against the plan's estimate."""
    name = f"model.name={model_folder(bench, width=width, layers=layers)}"
    groups = learner.collected(bench)
    config = configured(bench, name, "policy.kl_coef=0")
    plan = learner.learner_plan(config, bench)
    trained = make_learner(config, plan, bench.folder)
    estimate = max(phase.bytes for phase in plan.phases)
    for _ in range(2):
        trained.step(credited(trained, groups))
    measured = torch.cuda.max_memory_allocated() if bench.device == "cuda" else 0
    assert measured < 1.2 * estimate, (
        f"a step took {measured / 2**20:.0f} MiB, estimated {estimate / 2**20:.0f}"
    )
    return f"{measured / 2**20:.0f} MiB, estimated {estimate / 2**20:.0f}"


def learns(bench: Bench, overrides: Sequence[str] = (), iterations: int = 20) -> str:
    """The quickstart's reward rises."""
    usual = ("env.num_envs=32", *overrides)
    rewards = [row["reward/mean"] for row in train(bench, *usual, iterations=iterations)]
    first, last = sum(rewards[:4]) / 4, sum(rewards[-4:]) / 4
    assert last > first + 0.1, f"the reward went from {first:.2f} to {last:.2f} in {iterations} iterations"
    return f"reward {first:.2f} to {last:.2f}"


def larger(bench: Bench, width: int = 128, layers: int = 2) -> str:
    """Weights of a larger random model arrive."""
    name = f"model.name={model_folder(bench, width=width, layers=layers)}"
    return weights_arrive(bench, [name, GRAPHS])


def reverse_gpus(bench: Bench) -> str:
    """A run in a process that sees the GPUs in the opposite order."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(reversed(visible_gpus()))
    return schedule(bench, [VLLM])


def lost_engine(bench: Bench, overrides: Sequence[str] = ()) -> str:
    """Weights arrive after the engine was killed between two pushes."""
    with built(bench, VLLM, *overrides) as working:
        weights, model = working.collector.weights, policy(working)
        weights.push()
        actors = [
            child for child in psutil.Process().children(recursive=True) if "EngineActor" in child.name()
        ]
        actors[0].kill()
        moved(model, seed=0)
        weights.push()
        worst = weights.check()["weight_check/largest"]
        gap = float(drawn_gap(model, working.collector.engine, Sampling(max_tokens=8)).mean())
        dtype = working.plan.engine.dtype
    assert gap < MEAN_GAP[dtype], f"{dtype}: drawn log-probs are {gap:.2g} from the learner's in the mean"
    return f"weight check {worst:.1g}, drawn tokens {gap:.1g}"


# --- a native push whose receiver only keeps the bytes: what leaves the learner, and when -----------------

CYCLES = 2_000_000_000  # of the GPU's clock: about a second


class Kept:
    """In the place of vLLM's NCCL communicator: what is broadcast is copied on the stream that sends it."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.sent.append(tensor.clone())

    def destroy(self) -> None:
        pass


class NoEngines:
    """Engines of a push that are never asked for anything."""

    members = (0,)

    def call_each(self, method: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        return []

    def stacks(self) -> str:
        return ""


def race(bench: Bench) -> str:
    """A push that begins while an update of the weights is still under way on the GPU sends what the update leaves."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.base import TrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    from torchgrpo.rollout.weights.vllm_transfer import INIT, NativeTransfer

    kept: Any = Kept()

    @dataclass
    class Init(TrainerInitInfo):
        backend: ClassVar[str] = "kept"

    class Trainer(NCCLTrainerWeightTransferEngine):
        init_info_cls: Any = Init

        @classmethod
        def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> "Trainer":
            trainer = cls(client=client, source=source)
            trainer.model_update_group = kept
            return trainer

    WeightTransferTrainerFactory.register_engine("kept", Trainer)
    INIT["kept"] = lambda end: Init(rank=0)
    weight = torch.zeros(1024, 1024, device=bench.device)
    transfer = NativeTransfer("kept", timeout=30)
    transfer.push(Outgoing.of([("weight", weight)]), 0, NoEngines())
    for value in (1.0, 2.0):
        torch.cuda._sleep(CYCLES)
        weight.fill_(value)
        transfer.push(Outgoing.of([("weight", weight)]), int(value), NoEngines())
        arrived = kept.sent[-1].cpu().view(torch.float32)
        assert (arrived == value).all(), f"the push sent {arrived.unique().tolist()} and not {value}"
    transfer.close()
    return "the update's result"
