"""Estimates the memory of learner ranks and engines, with the config keys that change it.

The formulas count what grows with the model or the batch: weights, gradients, optimizer state, activations of one
microbatch, one chunk of logits, KV cache. Libraries and allocators are not included (about 1 GiB on a GPU). The module
imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, cast

from config.schema.config import Config
from torchgrpo.plan import activations
from torchgrpo.plan.activations import FLOAT, ElementWidths, MicrobatchSizes
from torchgrpo.plan.fsdp_buffers import (
    gathered_bytes,
    kept_sum_share,
    last_sum_bytes,
    layers_of_scoring,
    layers_of_training,
)
from torchgrpo.plan.microbatch_sizes import longest_microbatch, rank_microbatches
from torchgrpo.plan.model_shape import DTYPE_BYTES, GIB, NF4_BYTES, ModelShape, quantized_bytes

ADAM_STATES = 2
MIXED_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
CONTEXT_BYTES = 1.5 * GIB
"""CUDA context, libraries, and the captured graphs that a sleeping engine keeps."""
MASTER_BUCKET, MASTER_BUCKET_BYTES = 1 << 29, 7
"""Parameters that the optimizer step of a bfloat16 model converts to float32 at one time, and bytes per parameter."""
BATCH_KNOBS = "train.max_tokens_per_microbatch, gradient_accumulation_steps, inference_model.max_tokens"
CHECKPOINTING = "train.gradient_checkpointing"
HEAD_KNOBS = "train.log_prob_chunk_size"
STATE_KNOBS = "train_model.num_devices, train_model.offload, train_model.lora.enabled"
GATHERED_PARAMETERS, GATHERED_KNOB = "gathered parameters", "train_model.num_devices=1 gathers none"

ReferenceLocation = Literal["elsewhere", "resident", "sharded", "visiting"]
"""Location of the reference for a learner rank; a `visiting` reference is on the GPU only while it scores."""


Recomputation = Literal["none", "selective", "full"]
"""Activations that the backward pass recomputes; the values of `train.gradient_checkpointing`."""


@dataclass(frozen=True)
class MemoryUse:
    """A use of memory in bytes, and the keys that change it."""

    name: str
    bytes: float
    knobs: str


@dataclass(frozen=True)
class Phase:
    """Memory of one device in one phase of an iteration."""

    name: str
    uses: tuple[MemoryUse, ...]

    @property
    def bytes(self) -> float:
        return sum(use.bytes for use in self.uses)


def configured_recomputation(config: Config, on_cpu: bool) -> Recomputation:
    """Returns the configured recomputation; unset, `none` on a CPU and `full` on a GPU."""
    value = config.train.gradient_checkpointing
    if value is None:
        return "none" if on_cpu else "full"
    return cast(Recomputation, value)


def trained_parameters(config: Config, shape: ModelShape) -> int:
    lora = config.train_model.lora
    return shape.lora_parameters(lora.r) if lora.enabled else shape.parameters


def learner_widths(config: Config, on_cpu: bool) -> ElementWidths:
    """Returns the element widths of the learner's tensors.

    Under autocast, matrix factors are never wider than the weights. Several ranks gather their parameters in half
    precision instead, so their residual stream is in half precision too.
    """
    stream = DTYPE_BYTES[config.model.dtype]
    factor = min(stream, MIXED_BYTES[config.train.mixed_precision])
    if config.train_model.ranks > 1:
        stream = factor
    lora = config.train_model.lora
    gathered = NF4_BYTES if lora.quantized else factor
    gradient = factor if config.train_model.ranks > 1 else FLOAT
    return ElementWidths(stream, factor, not lora.enabled, not on_cpu, gathered, gradient)


def reference_widths(config: Config, on_cpu: bool, ranks: int) -> ElementWidths:
    """Returns the element widths of the reference's tensors.

    ranks: number of ranks that share a copy, and so gather its parameters.
    """
    stream = DTYPE_BYTES[config.reference_model.dtype]
    factor = min(stream, MIXED_BYTES[config.train.mixed_precision])
    return ElementWidths(factor if ranks > 1 else stream, factor, True, not on_cpu, factor, FLOAT)


def resident_phase(
    config: Config,
    shape: ModelShape,
    reference: ReferenceLocation = "elsewhere",
    reference_shape: ModelShape | None = None,
) -> Phase:
    """Memory that a learner rank keeps on its GPU between optimizer steps.

    The arguments are those of `train_phases`.
    """
    offload = config.train_model.offload
    weights = weight_uses(config, shape)
    if reference not in ("elsewhere", "visiting"):
        shards = config.train_model.shards if reference == "sharded" else 1
        weights += (_reference_use(config, reference_shape or shape, shards),)
    kept = () if offload == "all" else weights
    if offload == "none":
        kept += optimizer_state_uses(config, shape)
    return Phase("generate", tuple(use for use in kept if use.bytes))


def weight_uses(config: Config, shape: ModelShape) -> tuple[MemoryUse, ...]:
    """Memory of one rank's shard of the policy's weights; adapters are a separate use."""
    shards, width = config.train_model.shards, DTYPE_BYTES[config.model.dtype]
    uses = [MemoryUse("weights", shape.parameters * width / shards, "model.dtype, train_model.num_devices")]
    if config.train_model.lora.quantized:
        uses = [MemoryUse("weights, linear layers in 4 bits", quantized_bytes(shape, width, shards), "model.dtype")]
    if config.train_model.lora.enabled:
        uses.append(MemoryUse("adapters", trained_parameters(config, shape) * width / shards, "train_model.lora.r"))
    return tuple(uses)


def optimizer_state_uses(config: Config, shape: ModelShape) -> tuple[MemoryUse, ...]:
    """Memory of the optimizer state of one rank's shard."""
    shards, width = config.train_model.shards, DTYPE_BYTES[config.model.dtype]
    uses = []
    if width < FLOAT:
        remainders = trained_parameters(config, shape) * (FLOAT - width) / shards
        uses.append(MemoryUse("float32 remainders of the weights", remainders, STATE_KNOBS))
    state = optimizer_state_bytes(config, shape) / shards
    return (*uses, MemoryUse("optimizer state", state, f"{STATE_KNOBS}, optimizer.name"))


def _reference_use(config: Config, reference_shape: ModelShape, shards: int = 1) -> MemoryUse:
    size = reference_bytes(config, reference_shape, config.train_model.ranks) / shards
    without = "ref_model.name" if config.policy.distill_coef != 0 else "policy.kl_coef"
    return MemoryUse(reference_role(config), size, f"ref_model.num_devices, ref_model.dtype, {without}")


def reference_role(config: Config) -> str:
    """Role of the frozen model in the objective: teacher or reference."""
    return "teacher" if config.policy.distill_coef != 0 else "reference"


def optimizer_state_bytes(config: Config, shape: ModelShape) -> float:
    """Bytes of the optimizer state of all trained parameters.

    AdamW has two float32 numbers per trained parameter. Muon, which updates the layers' matrices, has one.
    """
    trained = trained_parameters(config, shape)
    if config.optimizer.name != "muon_adamw":
        return trained * FLOAT * ADAM_STATES
    lora = config.train_model.lora.enabled
    others = 0 if lora else shape.head_parameters * (1 if shape.tied else 2)
    return FLOAT * (trained - others + ADAM_STATES * others)


def train_phases(
    config: Config,
    shape: ModelShape,
    on_cpu: bool,
    reference: ReferenceLocation = "elsewhere",
    reference_shape: ModelShape | None = None,
    recomputation: Recomputation | None = None,
) -> list[Phase]:
    """Returns the memory peaks of a learner rank, one for each phase.

    The phases are scoring without gradients, forward and backward pass of a microbatch, and optimizer step.
    reference: location of the frozen reference. reference_shape: its sizes; None: those of the policy. recomputation:
    None for `configured_recomputation`.
    """
    recomputation = recomputation or configured_recomputation(config, on_cpu)
    reference_shape, ranks = reference_shape or shape, config.train_model.ranks
    resident = resident_phase(config, shape, reference, reference_shape).uses
    gradients, model = gradient_use(config, shape), config.train_model
    if model.offload == "all":
        gradients = replace(gradients, bytes=0.0)

    def phase(name: str, *uses: MemoryUse) -> Phase:
        return Phase(name, (*resident, *(use for use in uses if use.bytes)))

    visitor = [_reference_use(config, reference_shape)] if reference == "visiting" else []
    together, ahead = model.context_parallel, model.prefetch_layers
    widths = learner_widths(config, on_cpu)
    score_uses = scoring_uses(config, shape, widths, ranks, context=together, prefetch_layers=ahead)
    if reference != "elsewhere":
        widths = reference_widths(config, on_cpu, ranks)
        reference_uses = scoring_uses(config, reference_shape, widths, ranks, context=together, prefetch_layers=ahead)
        score_uses = max(score_uses, reference_uses, key=_total_bytes)
    factor = learner_widths(config, on_cpu).factor if model.lora.quantized else 0
    largest = shape.hidden_size * shape.intermediate_size
    matrix = MemoryUse("one dequantized matrix", largest * factor, "model.dtype")
    # Temporary memory of the step: bfloat16 weights are updated in float32, one bucket at a time (the largest matrix
    # has a bucket of its own); optimizer states from host memory are copied to the GPU.
    step = []
    if config.model.dtype != "float32" and model.offload != "all":
        largest_bucket = max(MASTER_BUCKET, shape.head_parameters / model.shards)
        trained = trained_parameters(config, shape) / model.shards
        bucket = min(trained, largest_bucket) * MASTER_BUCKET_BYTES
        step = [MemoryUse("weights in float32, one bucket at a time", bucket, "model.dtype, train_model.lora.enabled")]
    if model.offload == "optimizer":
        knobs = "train_model.offload=all, train_model.num_devices"
        state = _total_bytes(optimizer_state_uses(config, shape))
        step.append(MemoryUse("optimizer state, copied from host memory", state, knobs))
    return [
        phase("score", *visitor, matrix, *score_uses),
        phase("optimize", matrix, *_optimize_uses(config, shape, on_cpu, gradients, recomputation)),
        phase("optimizer step", gradients, *step),
    ]


def gradient_use(config: Config, shape: ModelShape) -> MemoryUse:
    """Memory of one rank's shard of the gradients, float32 for weights of any dtype."""
    size = trained_parameters(config, shape) * FLOAT / config.train_model.shards
    return MemoryUse("gradients", size, "train_model.lora.enabled, train_model.num_devices")


def scoring_uses(
    config: Config,
    shape: ModelShape,
    widths: ElementWidths,
    ranks: int,
    gathered_knob: str = GATHERED_KNOB,
    context: int = 1,
    prefetch_layers: int = 1,
) -> list[MemoryUse]:
    """Returns the peak memory of a pass for log-probs without gradients.

    The peak is in the gathered parameters at the root, in one block, or in the output head.
    ranks: number of ranks that share a copy of the scoring model's parameters. gathered_knob: keys that change the
    gathered bytes. context: number of ranks that score a microbatch together. prefetch_layers: layers that are
    gathered ahead of the one that computes.
    """
    batch = longest_microbatch(config, shape, not widths.fused_head, context)
    gathered = gathered_bytes(shape, widths, ranks)
    block = activations.block_scoring_bytes(shape, batch, widths) + batch.mask * (1 + widths.factor)
    layer = MemoryUse("one layer's activations", block, _batch_knobs(config))
    head = MemoryUse("output head", activations.head_forward_bytes(shape, batch, widths, 1), HEAD_KNOBS)
    layers = layers_of_scoring(prefetch_layers, shape.num_layers)
    moments = [
        [MemoryUse(GATHERED_PARAMETERS, 2 * (gathered.outside + gathered.layer), gathered_knob)],
        [MemoryUse(GATHERED_PARAMETERS, gathered.outside + layers * gathered.layer, gathered_knob), layer],
        [MemoryUse(GATHERED_PARAMETERS, gathered.outside + gathered.layer, gathered_knob), head],
    ]
    return max(moments, key=_total_bytes)


def _batch_knobs(config: Config) -> str:
    """Returns the keys that change a microbatch; several ranks may also share one."""
    return BATCH_KNOBS if config.train_model.ranks == 1 else f"{BATCH_KNOBS}, train_model.context_parallel"


def _total_bytes(uses: Sequence[MemoryUse]) -> float:
    return sum(use.bytes for use in uses)


def _optimize_uses(
    config: Config, shape: ModelShape, on_cpu: bool, gradients: MemoryUse, recomputation: Recomputation
) -> list[MemoryUse]:
    """Returns the peak memory of a microbatch's forward and backward pass.

    The peak is the largest of five moments: forward and backward pass of the head, backward pass of the last and of the
    first block, and the sum over ranks of the gradients outside the blocks. With one microbatch per step, gradients and
    sums over copies of the parameters grow between the backward passes of the last and the first block.
    """
    batch = longest_microbatch(config, shape, on_cpu, config.train_model.context_parallel)
    widths = learner_widths(config, on_cpu)
    gathered = gathered_bytes(shape, widths, config.train_model.ranks)
    kept, recomputed = _layer_bytes(shape, batch, widths, recomputation)
    # The backward pass keeps half-precision copies of the weights unless checkpointing casts again. Weights in 4 bits
    # have no copies: they are dequantized for every product.
    keeps_copies = recomputation == "none" and not config.train_model.lora.quantized
    copies = activations.weight_copies_bytes(shape, widths) if keeps_copies else 0.0
    has_earlier_gradients = rank_microbatches(config, shape) > 1
    earlier = gradients.bytes if has_earlier_gradients else 0.0
    kept_share = kept_sum_share(config, has_earlier_gradients)
    knobs = _batch_knobs(config)

    def moment(
        own_use: MemoryUse, units: float, gradient: float = earlier, layers: int = shape.num_layers
    ) -> list[MemoryUse]:
        activations = layers * kept + batch.mask
        copied, sums = copies * layers / shape.num_layers, kept_share * gathered.layer_sum
        return [
            MemoryUse(gradients.name, gradient, gradients.knobs),
            MemoryUse("gradients summed over copies", sums * (shape.num_layers - layers), "train_model.shard_size"),
            MemoryUse(f"activations of {batch.positions} tokens", activations, f"{knobs}, {CHECKPOINTING}"),
            MemoryUse("half-precision weights", copied, f"{CHECKPOINTING}, model.dtype"),
            MemoryUse(GATHERED_PARAMETERS, units, GATHERED_KNOB),
            own_use,
        ]

    backward = activations.block_backward_bytes(shape, batch, widths) + recomputed
    delayed = activations.delayed_head_gradient_bytes(shape, widths, config.train_model.ranks)
    layer_bytes = max(backward, gathered.layer_gradient + gathered.layer_sum)
    layer_use = partial(MemoryUse, "backward pass of one layer", knobs=knobs)
    forward = MemoryUse("output head", activations.head_forward_bytes(shape, batch, widths, 2), HEAD_KNOBS)
    head_back = activations.head_backward_bytes(shape, batch, widths, 2 if config.policy.uses_entropy else 1)
    back = MemoryUse("backward pass of the output head", head_back, HEAD_KNOBS)
    outside = last_sum_bytes(config, gathered, kept_share)
    last = MemoryUse("gradients of embedding and head", outside, "train_model.lora.enabled")
    held = layers_of_training(config, shape)

    def unsharded_bytes(layers: int) -> float:
        return gathered.outside + layers * gathered.layer

    # `gradients` already includes the gradient of a tied head, which is kept until the end.
    moments = [
        moment(layer_use(bytes=layer_bytes + delayed), unsharded_bytes(held.last)),
        moment(layer_use(bytes=layer_bytes), unsharded_bytes(held.first), gradients.bytes, layers=1),
        moment(forward, unsharded_bytes(held.head_forward)),
        moment(back, unsharded_bytes(held.head_backward)),
        moment(last, 0.0, gradients.bytes, layers=0),
    ]
    return max(moments, key=_total_bytes)


def _layer_bytes(
    shape: ModelShape, batch: MicrobatchSizes, widths: ElementWidths, recomputation: Recomputation
) -> tuple[float, float]:
    """Returns the bytes of a layer's activations that are kept, and that are recomputed."""
    block = activations.block_bytes(shape, batch, widths)
    if recomputation == "none":
        return block, 0.0
    saved = activations.saved_output_bytes(shape, batch, widths) if recomputation == "selective" else 0.0
    return batch.positions * shape.hidden_size * widths.stream + saved, block - saved


def reference_bytes(config: Config, shape: ModelShape, ranks: int) -> float:
    """Bytes of a whole copy of the frozen reference.

    The linear layers are in the learner's compute dtype. The embedding, which may also be the head, is in the dtype of
    the weights. Several ranks gather all parameters in the compute dtype.
    ranks: number of ranks that share the copy.
    """
    width = DTYPE_BYTES[config.reference_model.dtype]
    if ranks > 1:
        return shape.parameters * min(width, MIXED_BYTES[config.train.mixed_precision])
    linear = shape.parameters - shape.head_parameters
    return linear * min(width, MIXED_BYTES[config.train.mixed_precision]) + shape.head_parameters * width


def pushed_bytes(config: Config, shape: ModelShape, dtype: str) -> float:
    """Bytes of a weight push: weights in `dtype`, or an adapter in the model's dtype."""
    if config.inference_model.lora == "adapter":
        return trained_parameters(config, shape) * DTYPE_BYTES[config.model.dtype]
    return shape.parameters * DTYPE_BYTES[dtype]


def usable_bytes(gpu_memory_gib: float) -> float:
    """GPU memory that a process can plan with, in bytes.

    The CUDA context, libraries and fragmentation (3%) are subtracted.
    """
    return gpu_memory_gib * GIB * (1 - 0.03) - CONTEXT_BYTES


def engine_weight_bytes(config: Config, shape: ModelShape, dtype: str, on_cpu: bool) -> float:
    """Bytes of the weights on one device of an engine.

    vLLM on a CPU keeps a separate packed copy of a tied head.
    """
    width = DTYPE_BYTES["fp8" if config.inference_model.quantization else dtype]
    parameters = shape.parameters + (shape.head_parameters if on_cpu and shape.tied else 0)
    return parameters * width / config.inference_model.tensor_parallel_size


def engine_work_bytes(shape: ModelShape, batched_tokens: int, sequences: int, split: int) -> float:
    """Bytes that one device of a vLLM engine needs beside weights and cache.

    They are the activations of a step, the float32 logits of every sequence three times (raw, processed, sorted), and
    1 GiB of captured graphs. split: devices of one engine.
    """
    step = batched_tokens * (4 * shape.hidden_size + 3 * shape.intermediate_size / split) * 2
    return step + 3 * sequences * shape.vocab_size * FLOAT + GIB


def kv_bytes_per_sequence(config: Config, shape: ModelShape, dtype: str) -> float:
    """Bytes of keys and values of one full-length sequence on one device of an engine."""
    return shape.kv_bytes(config.max_model_len, DTYPE_BYTES[dtype]) / config.inference_model.tensor_parallel_size


def format_gib(number: float) -> str:
    return f"{number / GIB:.2f} GiB" if number >= 0.01 * GIB else f"{number / 2**20:.1f} MiB"
