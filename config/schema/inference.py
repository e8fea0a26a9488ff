"""The `inference_model` section: rollout engines, their devices and limits, sampling parameters."""

from dataclasses import dataclass, field
from typing import Any

from config.schema.errors import ConfigError
from config.schema.http_engines import check_urls
from config.schema.registry import Registry
from config.schema.values import check_choice, check_fields, is_positive, is_share

ENGINES = Registry("inference_model.backend", "torchgrpo.rollout.engines.backends", "engine_factory")


@dataclass
class InferenceModelConfig:
    """The rollout engines and their sampling parameters."""

    backend: str = "auto"
    """Engine: `vllm`, `transformers`, or `auto`, which is vLLM where installed and with a GPU. `http` uses vLLM servers
    that you start yourself, at `urls`."""
    urls: list[str] = field(default_factory=list)
    """With `backend=http`: the addresses of the vLLM servers, such as `[http://127.0.0.1:8001]`. Each is an engine."""
    weight_folder: str | None = None
    """With `backend=http`: folder for the pushed weights, on a disk that the servers read under the same path. Unset:
    `weights` in the run's folder."""
    num_devices: int = 1
    """Number of devices for generation; `num_devices / tensor_parallel_size` engines share the prompts."""
    devices: Any = None
    """Explicit device indices, such as `[2,3]`, instead of the plan's choice."""
    tensor_parallel_size: int = 1
    """Number of devices that one engine is split across; must divide `num_devices`."""
    gpu_memory_utilization: float = 0.9
    """Maximum share of a GPU's memory that a vLLM engine uses for weights and KV cache. An engine that takes
    turns with the learner uses at most the memory that the learner leaves free."""
    kv_cache_gib: float | None = None
    """KV cache of one engine in GiB. Unset on a GPU: the memory that `gpu_memory_utilization` leaves. Where
    engine and learner take turns, at most twice `max_num_seqs` sequences of `max_model_len` tokens. Unset on a
    CPU: `max_num_seqs` such sequences, at most 4 GiB."""
    max_model_len: int | None = None
    """Maximum length of prompt plus response in tokens. Unset: `env.max_prompt_tokens + max_tokens`."""
    max_num_seqs: int | None = None
    """Maximum number of completions that one engine generates concurrently; further ones wait. Unset: 512 on a
    GPU, 256 on a CPU."""
    max_num_batched_tokens: int | None = None
    """vLLM on a GPU only: maximum number of tokens in one engine step, including prompts. Unset: 8192."""
    enforce_eager: bool | None = None
    """Disables CUDA graphs and compilation: a faster start, slower generation. Unset: true only on a CPU."""
    dtype: str = "auto"
    """Data type of the engine: `float32`, `bfloat16`, `float16`, or `auto`, which is bfloat16 on a GPU and
    float32 on a CPU."""
    quantization: str | None = None
    """A vLLM quantization method that accepts unquantized pushed weights, such as `fp8`."""
    temperature: float = 1.0
    """Sampling temperature; 0 selects the most likely token."""
    temperature_end: float | None = None
    """Final temperature: the temperature changes linearly over the run, and the log-prob of each token uses the
    temperature at which the token was sampled. Unset: constant `temperature`."""
    temperature_end_at: float = 1.0
    """Share of the run at which `temperature_end` is reached."""
    top_p: float = 1.0
    """Samples from the smallest set of tokens with this total probability; 1 keeps all tokens."""
    top_k: int = 0
    """Samples only from the k most likely tokens; 0 keeps all tokens."""
    min_p: float = 0.0
    """Samples only from tokens whose probability is at least this share of the most likely token's, before `top_k` and
    `top_p` apply; 0 keeps all tokens."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a completion, such as `['</answer>']`, also in evaluations. The completion keeps the token that
    completes the string. The text that is searched includes control tokens, and only what the model samples."""
    max_tokens: int = 1024
    """Maximum response length in tokens."""
    colocate: bool = False
    """Runs engine and learner in turns on the same GPUs."""
    sleep: bool | None = None
    """Makes a vLLM engine on the learner's GPUs release its memory while the learner trains. Unset: the engine sleeps
    unless the plan knows that engine and learner fit the GPUs together."""
    lora: str = "merge"
    """Weights that a LoRA policy sends to the engines: `merge` sends the merged full weights, `adapter` only
    the adapter."""
    update: str = "keep"
    """Handling of requests in flight at a weight update. `keep` continues them with the new weights and
    recomputed keys and values. `wait` finishes them with the old weights. `abort` stops them and queues the
    prompt with its partial completion again."""
    start_timeout_s: float = 600.0
    """Maximum seconds for the start of an engine; with `backend=http` also for the return of the servers."""
    request_timeout_s: float = 900.0
    """Maximum seconds for the generation of one group; then the engine counts as hung and is replaced."""

    def __post_init__(self) -> None:
        ENGINES.check(self.backend, "auto")
        check_choice("inference_model.update", self.update, ("keep", "wait", "abort"))
        check_choice("inference_model.lora", self.lora, ("merge", "adapter"))
        check_choice("inference_model.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        positive = ("num_devices", "tensor_parallel_size", "max_tokens", "start_timeout_s", "request_timeout_s")
        check_fields("inference_model", self, positive, is_positive, "must be above 0")
        shares = ("gpu_memory_utilization", "top_p", "temperature_end_at")
        check_fields("inference_model", self, shares, lambda value: 0 < value <= 1, "must lie in (0, 1]")
        limits = ("kv_cache_gib", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "temperature_end")
        check_fields("inference_model", self, limits, is_positive, "must be above 0, or null")
        check_fields("inference_model", self, ("min_p",), is_share, "must lie in [0, 1]")
        check_urls(self.backend, self.urls, vars(self))
        if "" in self.stop:
            raise ConfigError(
                f"inference_model.stop={self.stop}: an empty string would end every completion at its first token; "
                "leave it out"
            )
        if self.temperature < 0 or self.top_k < 0:
            raise ConfigError(
                f"inference_model.temperature={self.temperature}, inference_model.top_k={self.top_k}: "
                "neither may be below 0"
            )
        if self.num_devices % self.tensor_parallel_size:
            raise ConfigError(
                f"inference_model.tensor_parallel_size={self.tensor_parallel_size} does not divide "
                f"inference_model.num_devices={self.num_devices}: set a divisor of {self.num_devices}, or "
                "change inference_model.num_devices"
            )

    def temperature_at(self, progress: float) -> float:
        if self.temperature_end is None:
            return self.temperature
        share = min(progress / self.temperature_end_at, 1.0)
        return self.temperature + share * (self.temperature_end - self.temperature)

    @property
    def num_engines(self) -> int:
        return len(self.urls) or self.num_devices // self.tensor_parallel_size
