"""Machines of 1 to 8 pretended GPUs, and a learner on each as the plan lays it out, from the project's own parts."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import dispatch_model
from transformers import PreTrainedModel

from config.env import EnvConfig
from config.inference import InferenceModelConfig
from config.optimizer import OptimizerConfig
from config.policy import PolicyConfig
from config.schema import Config, LoraConfig, ModelConfig, RefModelConfig, TrainConfig, TrainModelConfig
from envs.group import Group, Verdict
from plan.machine import Machine
from plan.plan import Plan, make_plan
from tests.groups import drawn_from_tiny
from tests.tiny import tiny_llama
from tests.training.scorers import REPEATS
from training.learner_models import make_models, torch_devices
from training.local_learner import LocalLearner, pushed_tensors

GROUPS = 2


@dataclass(frozen=True)
class Layout:
    """A machine and what is asked of it. gpus: 0 for a machine without. train_devices: by hand."""

    gpus: int
    train: int = 1
    engines: int = 1
    reference: int = 1
    train_devices: tuple[int, ...] | None = None
    colocate: bool = False


LAYOUTS = {
    "1 GPU, in turns": Layout(1),
    "2 GPUs": Layout(2),
    "3 GPUs": Layout(3),
    "3 GPUs, learner on 2": Layout(3, train=2),
    "4 GPUs, learner on 2": Layout(4, train=2),
    "8 GPUs, learner on 4": Layout(8, train=4, engines=3),
}


SPREADS = ("1 GPU, in turns", "3 GPUs, learner on 2", "8 GPUs, learner on 4")
"""With the learner on 1, 2 and 4 GPUs."""


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
        train_model=TrainModelConfig(layout.train, layout.train_devices, lora=LoraConfig(enabled=case.lora)),
        ref_model=RefModelConfig(layout.reference),
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


def spread(model: PreTrainedModel, devices: list[torch.device]) -> PreTrainedModel:
    """`model` with accelerate's hooks, as `device_map` leaves it over several devices; a tied head stays with its
    twin. By hand, since accelerate would not cut a model of two layers."""
    if len(devices) == 1:
        return model.to(devices[0])  # type: ignore[arg-type]
    parts = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]
    places = {part: devices[index * len(devices) // len(parts)].index for index, part in enumerate(parts)}
    places["model.rotary_emb"] = devices[-1].index
    places["lm_head"] = (devices[0] if model.config.tie_word_embeddings else devices[-1]).index
    placed: PreTrainedModel = dispatch_model(model, device_map=places)
    return placed


def learner_on(layout: Layout, case: Case, run_dir: Path) -> tuple[LocalLearner, Plan]:
    """What `build` makes of the config."""
    config = config_of(layout, case)
    plan = plan_of(layout, config)
    model = spread(tiny_llama(case.tied), torch_devices(plan.devices.train))
    torch.manual_seed(0)  # of fresh adapters
    models = make_models(config, model, plan)
    return LocalLearner(config, models, pushed_tensors(config, plan), run_dir), plan


def save_tiny(folder: Path, tied: bool) -> Path:
    tiny_llama(tied).save_pretrained(folder)
    return folder


def judged_groups() -> list[Group]:
    """Groups with rewards that differ."""
    groups, chance = drawn_from_tiny(num_groups=GROUPS, repeats=REPEATS), random.Random(3)
    for completion in (one for group in groups for one in group.completions):
        completion.verdict = Verdict(chance.random(), {}, "scored")
    return groups
