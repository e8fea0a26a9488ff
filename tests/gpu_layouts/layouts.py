"""Machines of 1 to 8 simulated GPUs, with a learner laid out by the plan."""

import random
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from config.schema.config import Config
from config.schema.env import EnvConfig
from config.schema.inference import InferenceModelConfig
from config.schema.models import LoraConfig, ModelConfig, TrainModelConfig
from config.schema.optimizer import OptimizerConfig
from config.schema.policy import PolicyConfig
from config.schema.train import TrainConfig
from envs.group import Group, Verdict
from tests.groups import sample_tiny_groups
from tests.tiny_models import tiny_llama
from tests.training.tiny_learners import REPEATS
from torchgrpo.batches.batch import Batch
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan import Plan
from torchgrpo.training.learner import Learner
from torchgrpo.training.learner_models import make_models
from torchgrpo.training.published_weights import push_tensor_source
from torchgrpo.training.scorer_actor import ScorerActor
from torchgrpo.training.worker import Worker
from torchgrpo.training.workers import LocalWorkers

GROUPS = 2


@dataclass(frozen=True)
class Layout:
    """A machine and its configuration.

    gpus: 0 for a machine without GPUs. learner: the GPU of the learner, if set by hand.
    """

    gpus: int
    engines: int = 1
    learner: tuple[int] | None = None
    colocate: bool = False


SECOND = "4 GPUs, learner on the second"
LAYOUTS = {
    "1 GPU, in turns": Layout(1),
    "2 GPUs": Layout(2),
    "3 GPUs": Layout(3),
    SECOND: Layout(4, learner=(1,)),
    "8 GPUs, 3 engines": Layout(8, engines=3),
}


LEARNER_LAYOUTS = ("1 GPU, in turns", SECOND)
"""Layouts with the learner on the first GPU and on another."""


@dataclass(frozen=True)
class Case:
    """The other settings that differ between test cases."""

    policy: PolicyConfig
    folder: Path
    tied: bool = False
    lora: bool = False
    checkpointing: bool = True
    precision: str = "bf16"
    packing: bool = True
    temperature_end: float | None = None


def config_of(layout: Layout, case: Case) -> Config:
    """Returns the config of a case on a layout.

    GPU configs have bf16 and checkpointing. Compiled code would not run on pretended GPUs. Presets that read the old
    log-probs of the trainer get two epochs.
    """
    config = Config(
        env=EnvConfig(dataset="arithmetic", num_envs=GROUPS, repeats=REPEATS),
        model=ModelConfig(name=str(case.folder)),
        train=TrainConfig(
            mixed_precision=case.precision,
            gradient_checkpointing=case.checkpointing,
            packing=case.packing,
            compile=False,
            epochs=2 if case.policy.old_log_prob == "trainer" else 1,
        ),
        policy=replace(case.policy),
        optimizer=OptimizerConfig(lr=1e-3),
        train_model=TrainModelConfig(devices=layout.learner, lora=LoraConfig(enabled=case.lora)),
        inference_model=InferenceModelConfig(
            num_devices=layout.engines,
            max_tokens=9,
            colocate=layout.colocate,
            temperature_end=case.temperature_end,
        ),
    )
    config.derive_fields()
    return config


def plan_of(layout: Layout, config: Config) -> Plan:
    gpus = tuple(str(index) for index in range(layout.gpus))
    size = 80.0 if gpus else None
    return make_plan(config, False, Machine(layout.gpus, size, 64.0, 100.0, "0.32.0", gpus), Path())


class LocalScorers:
    """Frozen scorers in this process, since a Ray actor would see no simulated GPU."""

    def __init__(self, config: Config, plan: Plan) -> None:
        self.host = ScorerActor({})
        self.host.build(config, plan)

    def submit(self, batch: Batch) -> "Future[torch.Tensor]":
        (log_prob,) = self.host.log_prob([(batch.reference_tokens, batch.temperature)])
        assert log_prob.device.type == "cpu"
        scored: Future[torch.Tensor] = Future()
        scored.set_result(log_prob)
        return scored

    def wait_for_log_probs(self, future: "Future[torch.Tensor]") -> torch.Tensor:
        return future.result()


def learner_on(layout: Layout, case: Case, run_dir: Path) -> tuple[Learner, Plan]:
    """Builds learner and plan of a case as `build_run` does."""
    config = config_of(layout, case)
    plan = plan_of(layout, config)
    model = tiny_llama(case.tied).to(plan.devices.train_device)
    torch.manual_seed(0)  # for the fresh adapters
    models = make_models(config, model, plan)
    scorers = LocalScorers(config, plan) if plan.reference.home == "own devices" else None
    tensor_source = push_tensor_source(config, plan)
    return Learner(config, LocalWorkers(Worker(config, models, tensor_source)), run_dir, scorers=scorers), plan  # type: ignore[arg-type]


def save_tiny(folder: Path, tied: bool) -> Path:
    tiny_llama(tied).save_pretrained(folder)
    return folder


def scored_groups() -> list[Group]:
    """Groups with rewards that differ."""
    groups, chance = sample_tiny_groups(num_groups=GROUPS, repeats=REPEATS), random.Random(3)
    for completion in (one for group in groups for one in group.completions):
        completion.verdict = Verdict(chance.random(), {}, "scored")
    return groups
