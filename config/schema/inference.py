"""The `inference_model` section: the rollout engines, their devices and limits, how tokens are sampled."""

from dataclasses import dataclass
from typing import Any

from config.schema.errors import ConfigError
from config.schema.registry import Registry
from config.schema.values import above_0, check_fields, one_of

ENGINES = Registry("inference_model.backend", "torchgrpo.rollout.engines.backends", "engine_factory")


@dataclass
class InferenceModelConfig:
    """The rollout engines and how they sample."""

    backend: str = "auto"
    """`vllm`, `transformers`, or `auto`: vLLM when it is installed and a GPU is there."""
    num_devices: int = 1
    """Devices for generation; `num_devices / tensor_parallel_size` engines share the prompts."""
    devices: Any = None
    """Device indices by hand, such as `[2,3]`, instead of the plan's choice."""
    tensor_parallel_size: int = 1
    """Devices that one engine is split across; must divide `num_devices`."""
    gpu_memory_utilization: float = 0.9
    """Largest share of a GPU's memory that a vLLM engine takes for weights and KV cache. Where it takes turns with the
    learner it takes no more than what that keeps there leaves."""
    kv_cache_gib: float | None = None
    """KV cache of one engine in GiB. Unset: what `gpu_memory_utilization` leaves on a GPU, but no more than twice
    `max_num_seqs` sequences of `max_model_len` tokens where engine and learner take turns; on a CPU what
    `max_num_seqs` of them need, 4 GiB at most."""
    max_model_len: int | None = None
    """Longest prompt plus response in tokens. Unset: `env.max_prompt_tokens + max_tokens`."""
    max_num_seqs: int | None = None
    """Completions that one engine advances together; more of them wait. Unset: 512 on a GPU, 256 on a CPU."""
    max_num_batched_tokens: int | None = None
    """vLLM on a GPU only: tokens that one step takes, prompts included. Unset: 8192."""
    enforce_eager: bool | None = None
    """True: no CUDA graphs and no compilation (a faster start, slower tokens). Unset: true on a CPU only."""
    dtype: str = "auto"
    """`float32`, `bfloat16`, `float16`; `auto` takes bfloat16 on a GPU and float32 on a CPU."""
    quantization: str | None = None
    """A vLLM quantization method that accepts unquantized pushed weights, such as `fp8`."""
    temperature: float = 1.0
    """Sampling temperature; 0 takes the likeliest token."""
    temperature_end: float | None = None
    """Temperature at the end: it changes linearly over the run, and every log-prob is taken at the temperature that its
    token was drawn at. Unset: `temperature` stays."""
    temperature_end_at: float = 1.0
    """Share of the run after which `temperature_end` is reached."""
    top_p: float = 1.0
    """Smallest set of tokens with this much probability is sampled from; 1 keeps all."""
    top_k: int = 0
    """Only the k likeliest tokens are sampled from; 0 keeps all."""
    max_tokens: int = 1024
    """Longest response in tokens."""
    colocate: bool = False
    """Engine and learner take turns on the same GPUs: the engine sleeps while the learner works."""
    lora: str = "merge"
    """How a LoRA policy is sent to the engines: `merge` sends full weights, `adapter` the adapter alone."""
    update: str = "keep"
    """What happens to requests in flight when new weights arrive: `keep` continues them under the new weights with keys
    and values computed anew, `wait` finishes them under the old, `abort` stops them and queues prompt plus partial
    completion again."""
    start_timeout_s: float = 600.0
    """Seconds that an engine may take to load."""
    request_timeout_s: float = 900.0
    """Seconds that one group may take; then its engine counts as hung and is replaced."""

    def __post_init__(self) -> None:
        ENGINES.check(self.backend, "auto")
        one_of("inference_model.update", self.update, ("keep", "wait", "abort"))
        one_of("inference_model.lora", self.lora, ("merge", "adapter"))
        one_of("inference_model.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        positive = (
            "num_devices",
            "tensor_parallel_size",
            "max_tokens",
            "start_timeout_s",
            "request_timeout_s",
        )
        check_fields("inference_model", self, positive, above_0, "must be above 0")
        shares = ("gpu_memory_utilization", "top_p", "temperature_end_at")
        check_fields("inference_model", self, shares, lambda value: 0 < value <= 1, "must lie in (0, 1]")
        limits = (
            "kv_cache_gib",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "temperature_end",
        )
        check_fields("inference_model", self, limits, above_0, "must be above 0, or null")
        if self.temperature < 0 or self.top_k < 0:
            raise ConfigError(
                f"inference_model.temperature={self.temperature}, inference_model.top_k={self.top_k}: "
                "neither may be below 0"
            )
        if self.num_devices % self.tensor_parallel_size:
            raise ConfigError(
                f"inference_model.tensor_parallel_size={self.tensor_parallel_size} does not divide "
                f"inference_model.num_devices={self.num_devices}: take a divisor of it, or change num_devices"
            )

    def temperature_at(self, progress: float) -> float:
        if self.temperature_end is None:
            return self.temperature
        share = min(progress / self.temperature_end_at, 1.0)
        return self.temperature + share * (self.temperature_end - self.temperature)

    @property
    def num_engines(self) -> int:
        return self.num_devices // self.tensor_parallel_size
