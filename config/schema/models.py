"""The sections `model`, `train_model` and `ref_model`: what is trained, and where it and the reference live."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from config.schema.errors import ConfigError
from config.schema.values import at_least, one_of


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
    chat_template: str | None = None
    """A file of Jinja in the place of the tokenizer's chat template, or `none`: a prompt is then the text of its
    messages as it stands, control tokens included. Unset: the tokenizer's own, and `none` where it has none."""

    def __post_init__(self) -> None:
        one_of("model.dtype", self.dtype, ("float32", "bfloat16"))


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
        at_least("train_model.lora.r", self.r, 1)
        at_least("train_model.lora.alpha", self.alpha, 1)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"train_model.lora.dropout={self.dropout}: a share, 0 to below 1")

    @property
    def quantized(self) -> bool:
        """Whether the base is in 4 bits."""
        return self.quantization != "none"


@dataclass
class TrainModelConfig:
    """Devices and adapters of the trained model."""

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
    """The frozen reference or teacher, loaded only where `policy.kl_coef` or `policy.distill_coef` is not 0."""

    name: str | None = None
    """A model as in `model.name`, with the same tokens. Unset: the policy as it is before the first step."""
    dtype: str | None = None
    """Weights of it: `float32` or `bfloat16`. Unset: `model.dtype`."""
    num_devices: int | None = None
    """Scorer ranks: processes with a GPU each (on a CPU a share of its cores), which score while the learner works.
    Unset: a free GPU of this machine (none of a Ray cluster) beside a learner of one rank, else the learner's own
    GPUs, in turns; under LoRA the base."""
    shard_size: int | None = None
    """Scorer ranks that share one copy of its parameters; must divide `num_devices`. Copies share out the microbatches.
    Unset: the smallest that fits."""
    devices: Any = None
    """Device indices by hand, one a scorer rank, such as `[2,3]`, instead of the plan's choice."""

    def __post_init__(self) -> None:
        if self.dtype is not None:
            one_of("ref_model.dtype", self.dtype, ("float32", "bfloat16"))
        for key in ("num_devices", "shard_size"):
            at_least(f"ref_model.{key}", vars(self)[key], 1)

    @property
    def ranks(self) -> int:
        """Scorer ranks that are asked for: as many as `devices` lists, else `num_devices`; 0: none."""
        listed = len(self.devices) if isinstance(self.devices, list | tuple) else 0
        return listed or self.num_devices or 0
