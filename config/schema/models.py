"""The sections `model`, `train_model` and `ref_model`: models, adapters and devices."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from config.schema.errors import ConfigError
from config.schema.values import check_choice, check_minimum


@dataclass
class ModelConfig:
    """The trained policy, from which the engines and the reference model start."""

    name: str = MISSING
    """A name on the Hugging Face hub, a local folder in Hugging Face format, a checkpoint, or the folder of a
    run."""
    dtype: str = "float32"
    """Data type of the weights and adapters: `float32` or `bfloat16`. With `bfloat16`, gradients are float32, and
    the optimizer keeps the bits that rounding loses: trained weights change as in float32."""
    attn_implementation: str = "sdpa"
    """Attention kernel of the trained and reference models on padded rows (without `train.packing`): `sdpa`,
    `eager`, `flash_attention_2`."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's chat template, or `none`: a prompt is then the unchanged text
    of its messages, including control tokens. Unset: the tokenizer's template, or `none` where the tokenizer
    has none."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as `{enable_thinking: false}`, set in every rendering and in exported
    models."""

    def __post_init__(self) -> None:
        check_choice("model.dtype", self.dtype, ("float32", "bfloat16"))
        if self.chat_template == "none" and self.chat_template_kwargs:
            raise ConfigError(
                f"model.chat_template_kwargs={self.chat_template_kwargs}: there are no arguments without a chat "
                "template; leave out model.chat_template=none"
            )


@dataclass
class LoraConfig:
    """Low-rank adapters on the trained model (peft)."""

    enabled: bool = False
    """Trains adapters instead of all weights."""
    r: int = 8
    """Rank of the adapters."""
    alpha: int = 16
    """Numerator of the adapters' scale, which is alpha / r."""
    dropout: float = 0.0
    """Dropout on the input of the adapters."""
    quantization: str = "none"
    """Quantization of the frozen base: `none`, or `nf4`, which stores all linear layers except the head in 4
    bits (QLoRA, with bitsandbytes)."""

    def __post_init__(self) -> None:
        check_choice("train_model.lora.quantization", self.quantization, ("none", "nf4"))
        check_minimum("train_model.lora.r", self.r, 1)
        check_minimum("train_model.lora.alpha", self.alpha, 1)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"train_model.lora.dropout={self.dropout}: must be a share from 0 to below 1")

    @property
    def quantized(self) -> bool:
        """Whether the base is quantized to 4 bits."""
        return self.quantization != "none"


@dataclass
class TrainModelConfig:
    """Devices and adapters of the trained model."""

    num_devices: int = 1
    """Number of learner ranks: processes with one GPU each (on a CPU a share of the cores). Weights, gradients
    and optimizer states are sharded over the ranks (FSDP2), and the groups of a step are distributed among
    them. 1: the main process."""
    num_nodes: int = 1
    """Number of nodes of the Ray cluster, over which the ranks are distributed evenly; must divide
    `num_devices`."""
    shard_size: int | None = None
    """Number of ranks that share one copy of the parameters. With fewer than `num_devices`, each group of this
    many ranks has its own copy (HSDP): more memory, less traffic between nodes. Must divide `num_devices`.
    Unset: all ranks."""
    context_parallel: int = 1
    """Number of ranks that compute each microbatch together, for responses that do not fit one GPU. Each computes
    a slice of the packed sequence, and a part of the heads in attention (Ulysses). Must divide `num_devices` and
    the model's key-value heads; needs `train.packing`."""
    offload: str = "none"
    """Tensors in host memory: `none`; `optimizer`, the optimizer states, which are copied to the GPU for the
    step; `all`, also parameters and gradients, and the step runs on the CPU. Only for GPUs: less GPU memory,
    more time."""
    prefetch_layers: int = 1
    """Number of layers that ranks gather ahead of the layer that computes. More layers hide slow or uneven links, and
    take the memory of these layers. For several ranks."""
    reshard_after_forward: bool = True
    """Frees a layer after its forward pass and gathers it again for its backward pass. `false`: layers stay gathered in
    between, which saves one of two gathers and takes the memory of all layers in the gathered dtype. For several
    ranks."""
    devices: Any = None
    """Explicit device indices, one per rank, such as `[0]`, instead of the plan's choice."""
    num_threads: int | None = None
    """CPU threads of each rank. Unset: all cores, divided evenly among the ranks of a machine; with
    grpo_async.py on a CPU, one core is left to the engines."""
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        check_choice("train_model.offload", self.offload, ("none", "optimizer", "all"))
        counts = ("num_devices", "num_nodes", "shard_size", "context_parallel", "prefetch_layers", "num_threads")
        for key in counts:
            check_minimum(f"train_model.{key}", vars(self)[key], 1)

    @property
    def ranks(self) -> int:
        """Number of learner ranks: the length of `devices`, else `num_devices`."""
        listed = len(self.devices) if isinstance(self.devices, list | tuple) else 0
        return listed or self.num_devices

    @property
    def shards(self) -> int:
        """Number of ranks that share one copy of the parameters."""
        return self.shard_size or self.ranks

    @property
    def microbatch_groups(self) -> int:
        """Number of groups of ranks that each compute microbatches of their own."""
        return self.ranks // self.context_parallel


@dataclass
class RefModelConfig:
    """The frozen reference or teacher, loaded only if `policy.kl_coef` or `policy.distill_coef` is not 0."""

    name: str | None = None
    """A model as in `model.name`, with the same vocabulary. Unset: the policy before the first step."""
    dtype: str | None = None
    """Data type of the weights: `float32` or `bfloat16`. Unset: `model.dtype`."""
    num_devices: int | None = None
    """Number of scorer ranks: processes with one GPU each (on a CPU a share of the cores), which compute
    log-probs while the learner trains. Unset: for a learner of one rank a free GPU of this machine (not of a
    Ray cluster); else the learner's GPUs, in turns; with LoRA the base model."""
    shard_size: int | None = None
    """Number of scorer ranks that share one copy of the parameters; must divide `num_devices`. The microbatches
    are distributed among the copies. Unset: the smallest number with enough memory."""
    devices: Any = None
    """Explicit device indices, one per scorer rank, such as `[2,3]`, instead of the plan's choice."""

    def __post_init__(self) -> None:
        if self.dtype is not None:
            check_choice("ref_model.dtype", self.dtype, ("float32", "bfloat16"))
        for key in ("num_devices", "shard_size"):
            check_minimum(f"ref_model.{key}", vars(self)[key], 1)

    @property
    def ranks(self) -> int:
        """Number of requested scorer ranks: the length of `devices`, else `num_devices`; 0: none."""
        listed = len(self.devices) if isinstance(self.devices, list | tuple) else 0
        return listed or self.num_devices or 0
