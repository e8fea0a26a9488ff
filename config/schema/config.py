"""The whole configuration: the sections, and what follows from several of them. No torch here.

Dataclasses say names, types, defaults and what each field does, a file for each section. YAML files say only what
differs. `to_config` turns a composed Hydra config into a checked `Config`; after it nothing is a DictConfig and nothing
needs a default.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from config.schema.env import EnvConfig
from config.schema.evaluation import EvalConfig
from config.schema.inference import InferenceModelConfig
from config.schema.logging import LoggingConfig
from config.schema.models import ModelConfig, RefModelConfig, TrainModelConfig
from config.schema.optimizer import OptimizerConfig
from config.schema.plan import MachineConfig
from config.schema.policy import PolicyConfig
from config.schema.ray import RayConfig
from config.schema.registry import Registry
from config.schema.rollouts import RolloutsConfig
from config.schema.train import TrainConfig
from config.schema.values import one_of

JOBS = Registry("run", "torchgrpo.run.jobs", "run")


@dataclass
class Config:
    """Everything a run depends on. Sections are checked alone first, then against each other."""

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
    plan: MachineConfig = field(default_factory=MachineConfig)
    device: str = "auto"
    """`cuda`, `cpu`, or `auto`: CUDA when it is there; configs of billion-parameter models say `cuda`."""
    run_dir: Any = None
    """The folder of a run, or several (`A,B`), that `run=report`, `doctor`, `rollouts` or `replay` looks at. Unset: the
    newest below the current folder."""
    step: int | None = None
    """run=replay: the number of the optimizer step that is computed again."""
    rollouts: RolloutsConfig = field(default_factory=RolloutsConfig)
    run: str = "train"
    """`train`, `plan` (print the device plan and stop), `rehearse` (one optimizer step of a learner rank on no device:
    what it would take), `rewards` (grade saved completions), `eval`, `export` (a checkpoint as a model).
    Of a run that has been made: `report` (its page), `doctor` (what is worth worrying about), `rollouts` (what it
    generated), `replay` (one of its optimizer steps again)."""
    checkpoint: str | None = None
    """run=export: a checkpoint, or the folder of a run (its newest one)."""
    to: str | None = None
    """run=export: the folder that the model is written to; it must not hold anything yet."""
    hub: str | None = None
    """run=export: a hub name, USER/NAME, that the folder is uploaded to as well. It is private where it is new."""

    def __post_init__(self) -> None:
        JOBS.check(self.run)
        one_of("device", self.device, ("auto", "cuda", "cpu"))

    @property
    def reference_model(self) -> ModelConfig:
        """The files of the frozen model that scores: those of `ref_model.name`, else the policy's."""
        ref = self.ref_model
        return replace(self.model, name=ref.name or self.model.name, dtype=ref.dtype or self.model.dtype)

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
    def total_iterations(self) -> int:
        return max(1, self.train.total_dialog_turns // self.completions_per_iteration)

    @property
    def batches_per_version(self) -> int:
        """Batches that grpo_async.py's learner takes between two weight pushes."""
        return -(-self.train.weight_update_frequency // self.train.epochs)

    @property
    def optimizer_steps_per_iteration(self) -> int:
        return self.train.epochs * (self.completions_per_iteration // self.optim_batch_size)

    @property
    def total_optimizer_steps(self) -> int:
        return self.total_iterations * self.optimizer_steps_per_iteration

    def derive(self) -> None:
        """Fills what other sections decide where it is unset."""
        if self.policy.constant_length is None:
            self.policy.constant_length = self.inference_model.max_tokens

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response, in training or in an evaluation."""
        return max([self.inference_model.max_tokens, *(s.max_tokens or 0 for s in self.eval.sets.values())])

    @property
    def max_model_len(self) -> int:
        """Prompt plus response in tokens that the engines must hold."""
        return self.inference_model.max_model_len or self.env.max_prompt_tokens + self.longest_response
