"""Defines `Config`, all sections of the configuration and values derived from several sections.

One file per section has a dataclass with the names, types, defaults and meanings of the fields. YAML files only
set what differs from the defaults. `to_config` converts a composed Hydra config into a checked `Config`, which
contains no DictConfig and no missing values. This package does not import torch.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from config.schema.evaluation import EvalConfig
from config.schema.inference import InferenceModelConfig
from config.schema.jobs import ExportConfig, ReplayConfig, RewardsConfig, ServeConfig
from config.schema.logging import LoggingConfig
from config.schema.machine import MachineConfig
from config.schema.models import ModelConfig, RefModelConfig, TrainModelConfig
from config.schema.optimizer import OptimizerConfig
from config.schema.policy import PolicyConfig
from config.schema.ray import RayConfig
from config.schema.registry import Registry
from config.schema.rollouts import RolloutsConfig
from config.schema.train import TrainConfig
from config.schema.values import check_choice

JOBS = Registry("run", "torchgrpo.run.jobs", "run")


@dataclass
class Config:
    """The settings of a run.

    Each section is checked by itself first, then all sections against each other.
    """

    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    train_model: TrainModelConfig = field(default_factory=TrainModelConfig)
    ref_model: RefModelConfig = field(default_factory=RefModelConfig)
    inference_model: InferenceModelConfig = field(default_factory=InferenceModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    device: str = "auto"
    """Device type: `cuda`, `cpu`, or `auto`, which is CUDA where available. The configs of billion-parameter
    models set `cuda`."""
    run_dir: Any = None
    """The folder of a run, or several folders (`A,B`), that `run=report`, `diagnostics`, `rollouts` or `replay`
    reads. Unset: the newest run below the current folder."""
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    rollouts: RolloutsConfig = field(default_factory=RolloutsConfig)
    run: str = "train"
    """The job. `train` is the default. `plan` prints the device plan, `dry_run` estimates one optimizer step
    without a device. `rewards` scores saved completions, `eval` evaluates a model, `export` writes the model of
    a checkpoint, `serve` answers requests of agents. On an earlier run: `report` writes its page, `diagnostics`
    lists its problems, `rollouts` prints its completions, `replay` computes one of its optimizer steps again."""

    def __post_init__(self) -> None:
        JOBS.check(self.run)
        check_choice("device", self.device, ("auto", "cuda", "cpu"))
        if self.run == "train" and self.run_dir is not None:
            raise ConfigError(
                f"run_dir={self.run_dir}: training reads no earlier run; set hydra.run.dir={self.run_dir} for the "
                "folder of the new run"
            )

    @property
    def reference_model(self) -> ModelConfig:
        """The `model` section of the frozen reference model or teacher.

        The files are those of `ref_model.name`, or the policy's where `ref_model.name` is unset.
        """
        ref = self.ref_model
        return replace(self.model, name=ref.name or self.model.name, dtype=ref.dtype or self.model.dtype)

    @property
    def reward_names(self) -> set[str]:
        """Names of all rewards, those of members of a mixture and of evaluation sets included."""
        members = [one.get("reward") for one in self.env.mixture.values() if isinstance(one, dict)]
        rewards = [self.env.reward, *members, *(one.reward for one in self.eval.sets.values())]
        return {name for reward in rewards for name in (reward if isinstance(reward, list) else [reward]) if name}

    @property
    def completions_per_iteration(self) -> int:
        return self.train.dialog_turns_per_batch or self.env.num_envs * self.env.repeats

    @property
    def prompts_per_iteration(self) -> int:
        return self.completions_per_iteration // self.env.repeats

    @property
    def optim_batch_size(self) -> int:
        return self.train.optim_batch_size or self.completions_per_iteration

    @property
    def optim_batch_groups(self) -> int:
        return self.optim_batch_size // self.env.repeats

    @property
    def groups_in_flight(self) -> int:
        """Groups that each engine of grpo_async.py has in flight.

        With `env.episodes` there are twice as many as have room, so that an episode waits for every free place.
        """
        return max(self.env.num_envs, -(-2 * (self.env.episodes or 0) // self.env.candidates))

    @property
    def total_iterations(self) -> int:
        return max(1, self.train.total_dialog_turns // self.completions_per_iteration)

    @property
    def batches_per_version(self) -> int:
        """Batches that the learner of grpo_async.py trains on between two weight pushes."""
        return -(-self.train.weight_update_frequency // self.train.epochs)

    @property
    def optimizer_steps_per_iteration(self) -> int:
        return self.train.epochs * (self.completions_per_iteration // self.optim_batch_size)

    @property
    def total_optimizer_steps(self) -> int:
        return self.total_iterations * self.optimizer_steps_per_iteration

    def derive_fields(self) -> None:
        """Fills unset fields whose defaults depend on other sections."""
        if self.policy.constant_length is None:
            self.policy.constant_length = self.response_tokens

    @property
    def response_tokens(self) -> int:
        """Maximum number of tokens after the prompt in training, replies of an environment included."""
        episode_tokens = self.env.max_episode_tokens if self.env.plays_episodes else None
        return episode_tokens or self.inference_model.max_tokens

    @property
    def longest_response(self) -> int:
        """Maximum number of response tokens, in training or in an evaluation."""
        return max([self.response_tokens, *(s.max_tokens or 0 for s in self.eval.sets.values())])

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt plus response in the engines."""
        return self.inference_model.max_model_len or self.env.max_prompt_tokens + self.longest_response
