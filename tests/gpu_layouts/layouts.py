"""Machines of 1 to 8 pretended GPUs, and a learner on each as the plan lays it out, from the project's own parts."""

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
from tests.groups import drawn_from_tiny
from tests.tiny import tiny_llama
from tests.training.scorers import REPEATS
from torchgrpo.batches.batch import Batch
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan import Plan
from torchgrpo.training.learner import Learner
from torchgrpo.training.learner_models import make_models
from torchgrpo.training.published_weights import pushed_tensors
from torchgrpo.training.scorer_actor import ScorerActor
from torchgrpo.training.worker import Worker
from torchgrpo.training.workers import LocalWorkers

GROUPS = 2


@dataclass(frozen=True)
class Layout:
    """A machine and what is asked of it. gpus: 0 for a machine without. learner: its GPU by hand."""

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


PLACES = ("1 GPU, in turns", SECOND)
"""With the learner on the first GPU and on another."""


@dataclass(frozen=True)
class Case:
    """What else differs from run to run."""

    policy: PolicyConfig
    folder: Path
    tied: bool = False
    lora: bool = False
    checkpointing: bool = True
    precision: str = "bf16"


def config_of(layout: Layout, case: Case) -> Config:
    """GPU configs have bf16 and checkpointing. Presets that read the trainer's old log-probs get two epochs."""
    config = Config(
        env=EnvConfig(dataset="arithmetic", num_envs=GROUPS, repeats=REPEATS),
        model=ModelConfig(name=str(case.folder)),
        train=TrainConfig(
            mixed_precision=case.precision,
            gradient_checkpointing=case.checkpointing,
            epochs=2 if case.policy.old_log_prob == "trainer" else 1,
        ),
        policy=replace(case.policy),
        optimizer=OptimizerConfig(lr=1e-3),
        train_model=TrainModelConfig(devices=layout.learner, lora=LoraConfig(enabled=case.lora)),
        inference_model=InferenceModelConfig(
            num_devices=layout.engines, max_tokens=9, colocate=layout.colocate
        ),
    )
    config.derive()
    return config


def plan_of(layout: Layout, config: Config) -> Plan:
    gpus = tuple(str(index) for index in range(layout.gpus))
    size = 80.0 if gpus else None
    return make_plan(config, False, Machine(layout.gpus, size, 64.0, 100.0, "0.32.0", gpus), Path())


class HostHere:
    """Scorers in this very process, since a Ray actor would see no pretended GPU."""

    def __init__(self, config: Config, plan: Plan) -> None:
        self.host = ScorerActor({})
        self.host.build(config, plan)

    def begin(self, batch: Batch) -> "Future[torch.Tensor]":
        (log_prob,) = self.host.log_prob([(batch.reference_tokens, batch.temperature)])
        assert log_prob.device.type == "cpu"
        scored: Future[torch.Tensor] = Future()
        scored.set_result(log_prob)
        return scored

    def wait(self, scored: "Future[torch.Tensor]") -> torch.Tensor:
        return scored.result()


def learner_on(layout: Layout, case: Case, run_dir: Path) -> tuple[Learner, Plan]:
    """What `build` makes of the config."""
    config = config_of(layout, case)
    plan = plan_of(layout, config)
    model = tiny_llama(case.tied).to(plan.devices.train_device)
    torch.manual_seed(0)  # of fresh adapters
    models = make_models(config, model, plan)
    scorers = HostHere(config, plan) if plan.reference.home == "own devices" else None
    pushed = pushed_tensors(config, plan)
    return Learner(config, LocalWorkers(Worker(config, models, pushed)), run_dir, scorers=scorers), plan  # type: ignore[arg-type]


def save_tiny(folder: Path, tied: bool) -> Path:
    tiny_llama(tied).save_pretrained(folder)
    return folder


def judged_groups() -> list[Group]:
    """Groups with rewards that differ."""
    groups, chance = drawn_from_tiny(num_groups=GROUPS, repeats=REPEATS), random.Random(3)
    for completion in (one for group in groups for one in group.completions):
        completion.verdict = Verdict(chance.random(), {}, "scored")
    return groups
