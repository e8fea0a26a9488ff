"""Estimates of memory and disk from sizes alone, each with the knobs that change it. No torch here.

The formulas count what scales: weights, gradients, optimizer state, activations of one microbatch, one chunk of
logits, KV cache. What libraries and allocators add is not in them (about 1 GiB on a GPU).
"""

from dataclasses import dataclass

from config.schema import Config
from plan.model_shape import DTYPE_BYTES, GIB, ModelShape

FLOAT = 4
ADAM_STATES = 2
MIXED_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
CONTEXT_BYTES = 1.5 * GIB
"""CUDA context, libraries, and what an engine that sleeps keeps (captured graphs)."""
GRAPH_BYTES = 1.0 * GIB
FRAGMENTATION = 0.03
CHUNK_BYTES = {"cpu": (1 << 24) * FLOAT, "cuda": (1 << 27) * FLOAT}


@dataclass(frozen=True)
class Part:
    """One use of memory in bytes, and the keys that change it."""

    what: str
    bytes: float
    knobs: str


@dataclass(frozen=True)
class Phase:
    """What one device holds while one thing happens."""

    name: str
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> float:
        return sum(part.bytes for part in self.parts)

    @property
    def largest(self) -> Part:
        return max(self.parts, key=lambda part: part.bytes)


def microbatch_rows(config: Config) -> int:
    return config.optim_batch_size // config.train.gradient_accumulation_steps


def microbatch_tokens(config: Config) -> int:
    """Positions that go through the model for one microbatch, all at their limits.

    With `train.share_prompt` a group's prompt counts once.
    """
    rows, repeats = microbatch_rows(config), config.env.repeats
    prompts = rows // repeats if config.train.shares_prompt else rows
    return prompts * config.env.max_prompt_tokens + rows * config.inference_model.max_tokens


def activation_bytes(config: Config, shape: ModelShape) -> float:
    """What the backward pass of one microbatch keeps.

    Per token and layer: six vectors of the hidden size (block input, two norms, their inputs, attention output
    projection), queries and attention output, keys and values, four vectors of the MLP's width. Attention
    scores are not kept (sdpa, flash). With checkpointing: one vector per layer, and one layer in full.
    """
    width = MIXED_BYTES[config.train.mixed_precision]
    heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    layer = (6 * shape.hidden_size + heads + 4 * shape.intermediate_size) * width
    if config.train.gradient_checkpointing:
        return microbatch_tokens(config) * (shape.num_layers * shape.hidden_size * width + layer)
    return microbatch_tokens(config) * shape.num_layers * layer


def trained_parameters(config: Config, shape: ModelShape) -> int:
    lora = config.train_model.lora
    return shape.lora_parameters(lora.r) if lora.enabled else shape.parameters


def train_phases(
    config: Config, shape: ModelShape, devices: int, on_cpu: bool, shares_base: bool
) -> list[Phase]:
    """The learner's peak on one of its devices.

    devices: GPUs that the layers are spread over (1 on a CPU).
    shares_base: whether a frozen reference copy lies on the same devices.
    """
    dtype = DTYPE_BYTES[config.model.dtype]
    trained = trained_parameters(config, shape)
    weights = Part("weights", shape.parameters * dtype / devices, "model.dtype, train_model.num_devices")
    resident = [weights]
    if config.train_model.lora.enabled:
        resident.append(Part("adapters", trained * dtype / devices, "train_model.lora.r"))
    if shares_base:
        resident.append(Part("reference", shape.parameters * dtype / devices, "policy.kl_coef=0 needs none"))
    state = Part("optimizer state", trained * dtype * ADAM_STATES / devices, "train_model.lora.enabled")
    gradients = Part("gradients", trained * dtype / devices, "train_model.lora.enabled")
    activations = Part(
        f"activations of {microbatch_tokens(config)} tokens",
        activation_bytes(config, shape) / devices,
        "train.gradient_accumulation_steps, train.gradient_checkpointing, inference_model.max_tokens",
    )
    logits = Part("logits", logits_bytes(config, shape, on_cpu), "train.log_prob_chunk_size")
    score = Part(
        "one layer's activations", activation_bytes(config, shape) / shape.num_layers / devices, "env.repeats"
    )
    return [
        Phase("score", (*resident, state, score, logits)),
        Phase("optimize", (*resident, state, gradients, activations, logits)),
    ]


def logits_bytes(config: Config, shape: ModelShape, on_cpu: bool) -> float:
    """A chunk of float32 logits and its gradient."""
    return 2 * chunk_size(config, shape, on_cpu) * shape.vocab_size * FLOAT


def chunk_size(config: Config, shape: ModelShape, on_cpu: bool) -> int:
    """Response tokens whose logits exist at one time: `train.log_prob_chunk_size`, else as many as fill
    `CHUNK_BYTES`, or a quarter of the head's width if that is more (each chunk passes over the whole head)."""
    if config.train.log_prob_chunk_size is not None:
        return config.train.log_prob_chunk_size
    rows = CHUNK_BYTES["cpu" if on_cpu else "cuda"] // (FLOAT * shape.vocab_size)
    return max(1, rows, shape.hidden_size // 4)


def resident_bytes(config: Config, shape: ModelShape, devices: int) -> float:
    """What the learner keeps on one of its devices between two steps: weights and optimizer state."""
    dtype = DTYPE_BYTES[config.model.dtype]
    trained = trained_parameters(config, shape)
    adapters = trained * FLOAT if config.train_model.lora.enabled else 0
    return (shape.parameters * dtype + adapters + trained * FLOAT * ADAM_STATES) / devices


def reference_bytes(config: Config, shape: ModelShape) -> float:
    """The frozen reference: its linear layers in the dtype that the learner computes in."""
    return shape.parameters * MIXED_BYTES[config.train.mixed_precision]


def usable_bytes(gpu_memory_gib: float) -> float:
    """What a process may plan to use of a GPU: less the CUDA context, libraries and fragmentation."""
    return gpu_memory_gib * GIB * (1 - FRAGMENTATION) - CONTEXT_BYTES


def engine_weights(config: Config, shape: ModelShape, dtype: str, on_cpu: bool) -> float:
    """Weights on one of an engine's devices. vLLM on a CPU keeps a tied head apart, packed."""
    width = DTYPE_BYTES["fp8" if config.inference_model.quantization else dtype]
    parameters = shape.parameters + (shape.head_parameters if on_cpu and shape.tied else 0)
    return parameters * width / config.inference_model.tensor_parallel_size


def engine_work_bytes(shape: ModelShape, batched_tokens: int, sequences: int, split: int) -> float:
    """What one device of a vLLM engine needs beside weights and cache: activations of a step, float32 logits of
    every sequence three times over (raw, processed, sorted), captured graphs."""
    step = batched_tokens * (4 * shape.hidden_size + 3 * shape.intermediate_size / split) * 2
    return step + 3 * sequences * shape.vocab_size * FLOAT + GRAPH_BYTES


def kv_bytes_per_sequence(config: Config, shape: ModelShape, dtype: str) -> float:
    """Keys and values of one sequence of the full length, on one of an engine's devices."""
    per_token = shape.kv_bytes_per_token(DTYPE_BYTES[dtype])
    return config.max_model_len * per_token / config.inference_model.tensor_parallel_size


def checkpoint_bytes(config: Config, shape: ModelShape) -> float:
    """One checkpoint: the trained weights (adapters under LoRA) and the optimizer's state."""
    return trained_parameters(config, shape) * DTYPE_BYTES[config.model.dtype] * (1 + ADAM_STATES)


def checkpoints_kept(config: Config) -> int:
    """How many checkpoints lie on disk at most: those kept, and one more while it is written."""
    frequency, keep = config.train.checkpoint_frequency, config.train.keep_checkpoints
    written = 1 + (config.total_iterations // frequency if frequency else 0)
    return min(written, keep + 1) if keep else written


def gib(number: float) -> str:
    return f"{number / GIB:.2f} GiB" if number >= 0.01 * GIB else f"{number / 2**20:.1f} MiB"
