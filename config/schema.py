"""The whole configuration as dataclasses: names, types, defaults and what each field does. No torch here.

YAML files say only what differs. `to_config` turns a composed Hydra config into a checked `Config`; after it
nothing is a DictConfig and nothing needs a default.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from config.env import EnvConfig
from config.errors import ConfigError
from config.evaluation import EvalConfig
from config.inference import InferenceModelConfig
from config.machine import MachineConfig
from config.optimizer import OptimizerConfig
from config.policy import PolicyConfig
from config.rollouts import RolloutsConfig
from config.values import at_least, one_of


@dataclass
class ModelConfig:
    """The policy that is trained, and that the engines and the reference start from."""

    name: str = MISSING
    """A Hugging Face hub name, a local folder in Hugging Face format, a checkpoint, or the folder of a run."""
    dtype: str = "float32"
    """Weights of the trained model: `float32`, or `bfloat16`, beside which the optimizer keeps the bits that rounding
    drops, so that they move as float32 ones do."""
    attn_implementation: str = "sdpa"
    """Attention kernel of the trained and reference models on whole rows (without `train.packing`): `sdpa`, `eager`,
    `flash_attention_2`."""

    def __post_init__(self) -> None:
        one_of("model.dtype", self.dtype, ("float32", "bfloat16"))


@dataclass
class TrainConfig:
    """Length of the run, batch sizes, precision, checkpoints, and the limits of the overlapped schedule."""

    seed: int = 0
    """Fixes the order of the prompts and every random draw."""
    total_dialog_turns: int = 100_000
    """Completions, not turns, that the whole run trains on."""
    dialog_turns_per_batch: int | None = None
    """Completions, not turns, of one iteration. Unset: `env.num_envs * env.repeats`."""
    optim_batch_size: int | None = None
    """Completions per optimizer step. Unset: all of an iteration's."""
    gradient_accumulation_steps: int = 1
    """Microbatches per optimizer step, of about equal size; changes memory, not the gradient."""
    max_tokens_per_microbatch: int | None = None
    """Positions of a microbatch at most, prompts, responses and padding; a single longer response goes alone. Needs it
    more microbatches than `gradient_accumulation_steps`, there are more. Unset: no limit."""
    epochs: int = 1
    """Passes over an iteration's completions."""
    mixed_precision: str = "fp32"
    """Arithmetic of forward and backward: `fp32`, `bf16`, `fp16` (with a gradient scaler)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    packing: bool = True
    """A microbatch goes through the model as one sequence without padding, each prompt once (exact); by an attention
    of its own, whatever `model.attn_implementation` says. Models with sliding windows or recurrent layers take whole,
    padded rows all the same."""
    compile: bool = False
    """Each decoder layer is compiled (torch.compile): the first step takes up to 100 s on a CPU, later ones 6 to 11%
    less time (docs/scaling.md); the same numbers to rounding. Needs a C++ compiler."""
    log_prob_chunk_size: int | None = None
    """Response tokens whose logits exist at one time, [chunk, vocabulary]. Unset: by the head's size."""
    checkpoint_frequency: int = 100
    """Iterations between checkpoints; 0 keeps only the one at the end."""
    keep_checkpoints: int = 3
    """Newest checkpoints that are kept; older ones are removed. 0 keeps all. A run that is resumed from an earlier
    checkpoint removes the later ones in any case."""
    keep_best: str | None = None
    """A metric of evaluation such as `eval/SET/pass@1`: the checkpoint with its highest value is kept too, and one is
    written after an evaluation that gives a higher one. `checkpoints/best` and `models/best` name it."""
    export: bool = True
    """Beside each checkpoint that is kept, a folder in Hugging Face format, `models/checkpoint_000040`, and `model`,
    the newest: as much disk space each as the model's weights in `model.dtype`. A LoRA adapter is merged, and lies in
    `adapter` beside that."""
    async_checkpoint: bool = True
    """The run goes on while a checkpoint is written, from a copy in the host's memory; otherwise it waits."""
    resume: str | None = None
    """A checkpoint, the folder of a run (its newest one), or `auto`: of this run's folder or the newest run like it."""
    restarts: int = 0
    """How often a run whose learner rank was lost goes on by itself, from its newest checkpoint."""
    max_nonfinite_steps: int = 3
    """Optimizer steps with a non-finite loss or gradient in a row after which the run stops."""
    deterministic: bool = True
    """On a CPU the same config and seed give the same bits; on a GPU slower kernels where they exist."""
    max_policy_age: int = 1
    """grpo_async.py: versions that a group may lag behind the trainer when it is consumed."""
    stale_groups: str = "drop"
    """grpo_async.py: a group beyond `max_policy_age` is dropped, or with `wait` never started too early."""
    weight_update_frequency: int = 1
    """grpo_async.py: optimizer steps between two weight pushes, rounded up to whole batches of `epochs` steps."""
    buffer_groups: int | None = None
    """grpo_async.py: finished groups that may wait for the learner. Unset: two optimizer steps' worth."""
    on_alarm: str = "say"
    """What an alarm of the doctor (docs/doctor.md) does: `say` it; `checkpoint`, write one at the end of the iteration;
    `stop`, end the run there with a checkpoint and exit code 1. Warnings are said and no more."""
    wait_timeout_s: float = 600.0
    """Seconds that the learner may wait for groups, a push for the engines, or the run for a checkpoint, before the
    run stops."""

    def __post_init__(self) -> None:
        one_of("train.mixed_precision", self.mixed_precision, ("fp32", "bf16", "fp16"))
        one_of("train.on_alarm", self.on_alarm, ("say", "checkpoint", "stop"))
        one_of("train.stale_groups", self.stale_groups, ("drop", "wait"))
        counts = ("total_dialog_turns", "gradient_accumulation_steps", "epochs", "max_nonfinite_steps")
        optional = ("log_prob_chunk_size", "max_tokens_per_microbatch")
        for key in (*counts, "weight_update_frequency", *optional):
            at_least(f"train.{key}", vars(self)[key], 1)
        for key in ("checkpoint_frequency", "keep_checkpoints", "max_policy_age", "restarts"):
            at_least(f"train.{key}", vars(self)[key], 0)


@dataclass
class LoraConfig:
    """Low-rank adapters on the trained model (peft)."""

    enabled: bool = False
    """Train adapters instead of all weights."""
    r: int = 8
    """Rank."""
    alpha: int = 16
    """Scale numerator: adapters are multiplied by alpha / r."""
    dropout: float = 0.0
    """Dropout on the adapters' input."""
    quantization: str = "none"
    """The frozen base: `none`, or `nf4`, its linear layers but the head in 4 bits (QLoRA, with bitsandbytes)."""

    def __post_init__(self) -> None:
        one_of("train_model.lora.quantization", self.quantization, ("none", "nf4"))

    @property
    def quantized(self) -> bool:
        """Whether the base is in 4 bits."""
        return self.quantization != "none"


@dataclass
class TrainModelConfig:
    """Where the trained model lives."""

    num_devices: int = 1
    """Learner ranks: processes with a GPU each (on a CPU a share of its cores), over which weights, gradients and
    optimizer states are sharded (FSDP2), and the groups of a step shared out. 1 is the run's own process."""
    num_nodes: int = 1
    """Nodes of the Ray cluster that the ranks are spread over evenly; must divide `num_devices`."""
    shard_size: int | None = None
    """Ranks that share one copy of the parameters; with fewer than `num_devices` every group of so many holds a copy of
    its own (HSDP): more memory, less traffic between nodes. Must divide `num_devices`. Unset: all ranks."""
    offload: str = "none"
    """What lives in host memory: `none`; `optimizer`, states that visit the GPU for the step; `all`, parameters and
    gradients too, and the step is made on the CPU. GPUs only; less memory of theirs, more time."""
    devices: Any = None
    """Device indices by hand, one a rank, such as `[0]`, instead of the plan's choice."""
    num_threads: int | None = None
    """CPU threads of each rank. Unset: all cores, shared out evenly among the ranks of a machine; with grpo_async.py on
    a CPU one is left to the engines."""
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        one_of("train_model.offload", self.offload, ("none", "optimizer", "all"))
        for key in ("num_devices", "num_nodes", "shard_size", "num_threads"):
            at_least(f"train_model.{key}", vars(self)[key], 1)

    @property
    def ranks(self) -> int:
        """Learner ranks: as many as `devices` lists, else `num_devices`."""
        listed = len(self.devices) if isinstance(self.devices, list | tuple) else 0
        return listed or self.num_devices

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the parameters."""
        return self.shard_size or self.ranks


@dataclass
class RefModelConfig:
    """Where the frozen reference model lives. It is loaded only where `policy.kl_coef` is above 0."""

    num_devices: int = 1
    """GPUs of the reference beside a learner of one rank: 1. Where the learner has more ranks, the reference is sharded
    over all of them, whatever this says."""
    devices: Any = None
    """Its device index by hand, instead of the plan's choice; a learner of one rank only."""


@dataclass
class RayConfig:
    """The Ray cluster that carries several engines."""

    enabled: bool = False
    """Run engines as Ray actors even where one engine in process would do."""
    address: str | None = None
    """An existing cluster's address; unset starts a local one on loopback."""
    num_cpus_per_engine: int = 1
    """CPU cores that an engine actor reserves."""


@dataclass
class LoggingConfig:
    """Where metrics go besides `metrics.jsonl`, and what is printed."""

    backend: Any = "none"
    """Trackers: `wandb`, `tensorboard`, `mlflow`, `trackio`, a list of them such as `[wandb,tensorboard]`, or `none`;
    `metrics.jsonl` is always written."""
    mode: str = "offline"
    """W&B only: `online` or `offline`."""
    project: str = "grpo"
    """Project of W&B and trackio, experiment of MLflow."""
    experiment_name: str | None = None
    """Name of the run in the tracker. Unset: the run folder's."""
    sample_frequency: int = 20
    """Iterations between sample completions, printed and sent to the trackers; 0: none."""
    trace: bool = False
    """Write `trace.json` when the run ends: who did what when, for ui.perfetto.dev or chrome://tracing."""
    progress: bool = True
    """The live view on a terminal, a line every ten seconds in a log."""
    rollouts_gb: float = 10.0
    """The ledger: every group of training and evaluation goes to `rollouts/` in the run's folder, which may take so
    many gigabytes; then the oldest files go. 0: none is kept."""

    def __post_init__(self) -> None:
        one_of("logging.mode", self.mode, ("online", "offline"))
        at_least("logging.rollouts_gb", self.rollouts_gb, 0)
        names = self._named()
        for name in names or [self.backend]:
            one_of("logging.backend", name, ("none", "wandb", "tensorboard", "mlflow", "trackio"))
        if "none" in names and len(names) > 1:
            raise ConfigError(f"logging.backend={self.backend!r}: `none` goes with no other tracker")

    @property
    def backends(self) -> list[str]:
        """The trackers, each once; empty for `none`."""
        return [name for name in dict.fromkeys(self._named()) if name != "none"]

    def _named(self) -> list[Any]:
        if isinstance(self.backend, str):
            return [name.strip() for name in self.backend.split(",")]
        return self.backend if isinstance(self.backend, list) else []


JOBS = (
    *("train", "plan", "rehearse", "rewards", "eval", "export", "selftest"),
    *("report", "doctor", "rollouts", "replay", "diff"),
)
"""What `run=` names."""


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
    a: str | None = None
    """run=diff: the folder of a run, which is compared with that of `b`."""
    b: str | None = None
    """run=diff: the folder of the other run."""
    rollouts: RolloutsConfig = field(default_factory=RolloutsConfig)
    run: str = "train"
    """`train`, `plan` (print the device plan and stop), `rehearse` (one optimizer step of a learner rank on no device:
    what it would take), `rewards` (grade saved completions), `eval`, `export` (a checkpoint as a model), `selftest`
    (try every path that this machine has). Of a run that has been made: `report` (its page), `doctor` (what is worth
    worrying about), `rollouts` (what it generated), `replay` (one of its optimizer steps again), `diff` (two runs)."""
    checkpoint: str | None = None
    """run=export: a checkpoint, or the folder of a run (its newest one)."""
    to: str | None = None
    """run=export: the folder that the model is written to; it must not hold anything yet."""
    hub: str | None = None
    """run=export: a hub name, USER/NAME, that the folder is uploaded to as well. It is private where it is new."""

    def __post_init__(self) -> None:
        one_of("run", self.run, JOBS)
        one_of("device", self.device, ("auto", "cuda", "cpu"))

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
    def total_optimizer_batches(self) -> int:
        """Batches that grpo_async.py's learner takes; each is trained on `train.epochs` times."""
        return self.total_iterations * (self.completions_per_iteration // self.optim_batch_size)

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
