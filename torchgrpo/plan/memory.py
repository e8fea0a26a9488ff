"""Estimates of memory from sizes alone, each with the knobs that change it. No torch here.

The formulas count what scales: weights, gradients, optimizer state, activations of one microbatch, one chunk of
logits, KV cache. What libraries and allocators add is not in them (about 1 GiB on a GPU).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from config.schema.config import Config
from torchgrpo.plan import activations
from torchgrpo.plan.activations import FLOAT, Arithmetic
from torchgrpo.plan.gathering import gathered, kept_of_sums, last_sum_bytes
from torchgrpo.plan.microbatches import microbatch, rank_microbatches
from torchgrpo.plan.model_shape import DTYPE_BYTES, GIB, NF4_BYTES, ModelShape, quantized_bytes

ADAM_STATES = 2
MIXED_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
CONTEXT_BYTES = 1.5 * GIB
"""CUDA context, libraries, and what an engine that sleeps keeps (captured graphs)."""
MASTER_BUCKET, MASTER_BUCKET_BYTES = 1 << 26, 10
"""Parameters of a bfloat16 model that exist in float32 at one time in the optimizer step, and bytes of each."""
BATCH_KNOBS = "train.max_tokens_per_microbatch, gradient_accumulation_steps, inference_model.max_tokens"
CHECKPOINTING = "train.gradient_checkpointing"
HEAD_KNOBS = "train.log_prob_chunk_size"
GATHERED, GATHERING_KNOB = "gathered parameters", "train_model.num_devices=1 gathers none"

ReferenceAt = Literal["elsewhere", "resident", "sharded", "visiting"]
"""Where the reference is as a learner rank sees it: `visiting` while it scores, and gone again."""


@dataclass(frozen=True)
class Use:
    """One use of memory in bytes, and the keys that change it."""

    what: str
    bytes: float
    knobs: str


@dataclass(frozen=True)
class Phase:
    """What one device holds while one thing happens."""

    name: str
    uses: tuple[Use, ...]

    @property
    def bytes(self) -> float:
        return sum(use.bytes for use in self.uses)


def trained_parameters(config: Config, shape: ModelShape) -> int:
    lora = config.train_model.lora
    return shape.lora_parameters(lora.r) if lora.enabled else shape.parameters


def arithmetic(config: Config, on_cpu: bool) -> Arithmetic:
    """Widths of the learner's numbers. Under autocast a matrix never multiplies wider than its weights are. Ranks
    gather their parameters in half precision instead, and so the residual stream is."""
    stream = DTYPE_BYTES[config.model.dtype]
    factor = min(stream, MIXED_BYTES[config.train.mixed_precision])
    if config.train_model.ranks > 1:
        stream = factor
    lora = config.train_model.lora
    return Arithmetic(stream, factor, not lora.enabled, not on_cpu, NF4_BYTES if lora.quantized else factor)


def frozen_arithmetic(config: Config, on_cpu: bool, ranks: int) -> Arithmetic:
    """Widths of the reference's numbers. ranks: that share a copy of it, and so gather its parameters."""
    stream = DTYPE_BYTES[config.reference_model.dtype]
    factor = min(stream, MIXED_BYTES[config.train.mixed_precision])
    return Arithmetic(factor if ranks > 1 else stream, factor, True, not on_cpu, factor)


def between_steps(
    config: Config, shape: ModelShape, reference: ReferenceAt = "elsewhere", frozen: ModelShape | None = None
) -> Phase:
    """Memory that a learner rank keeps on its GPU all the time; arguments as those of `train_phases`."""
    offload = config.train_model.offload
    weights = learner_weights(config, shape)
    if reference not in ("elsewhere", "visiting"):
        shards = config.train_model.shards if reference == "sharded" else 1
        weights += (_reference(config, frozen or shape, shards),)
    kept = () if offload == "all" else weights
    if offload == "none":
        kept += learner_states(config, shape)
    return Phase("generate", tuple(use for use in kept if use.bytes))


def learner_weights(config: Config, shape: ModelShape) -> tuple[Use, ...]:
    """The policy's weights that one rank holds: its shard of all, adapters apart."""
    shards, width = config.train_model.shards, DTYPE_BYTES[config.model.dtype]
    uses = [Use("weights", shape.parameters * width / shards, "model.dtype, train_model.num_devices")]
    if config.train_model.lora.quantized:
        uses = [Use("weights, linear layers in 4 bits", quantized_bytes(shape, width, shards), "model.dtype")]
    if config.train_model.lora.enabled:
        uses.append(Use("adapters", trained_parameters(config, shape) * FLOAT / shards, "train_model.lora.r"))
    return tuple(uses)


def learner_states(config: Config, shape: ModelShape) -> tuple[Use, ...]:
    """What the optimizer of one rank keeps of its shard."""
    shards, width = config.train_model.shards, DTYPE_BYTES[config.model.dtype]
    uses = []
    if not config.train_model.lora.enabled and width < FLOAT:
        remainders = trained_parameters(config, shape) * (FLOAT - width) / shards
        uses.append(Use("rest of the weights to float32", remainders, "train_model.lora.enabled"))
    state = optimizer_state_bytes(config, shape) / shards
    return (*uses, Use("optimizer state", state, "train_model.lora.enabled, optimizer.name"))


def _reference(config: Config, frozen: ModelShape, shards: int = 1) -> Use:
    size = reference_bytes(config, frozen, config.train_model.ranks) / shards
    without = "ref_model.name" if config.policy.distill_coef != 0 else "policy.kl_coef"
    return Use(frozen_role(config), size, f"ref_model.num_devices, ref_model.dtype, {without}")


def frozen_role(config: Config) -> str:
    """What the frozen model is to the run, in a word."""
    return "teacher" if config.policy.distill_coef != 0 else "reference"


def optimizer_state_bytes(config: Config, shape: ModelShape) -> float:
    """Two float32 numbers a trained parameter for AdamW, one for Muon, which takes the layers' matrices."""
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
    reference: ReferenceAt = "elsewhere",
    frozen: ModelShape | None = None,
) -> list[Phase]:
    """The peaks of a learner rank: scoring, forward and backward pass, optimizer step.

    The scoring is without gradients, the passes are a microbatch's.
    reference: where the frozen reference is. frozen: its sizes; None: those of the policy.
    """
    frozen, ranks = frozen or shape, config.train_model.ranks
    resident = between_steps(config, shape, reference, frozen).uses
    gradients, model = learner_gradients(config, shape), config.train_model
    if model.offload == "all":
        gradients = replace(gradients, bytes=0.0)

    def phase(name: str, *uses: Use) -> Phase:
        return Phase(name, (*resident, *(use for use in uses if use.bytes)))

    visitor = [_reference(config, frozen)] if reference == "visiting" else []
    scored = scoring(config, shape, arithmetic(config, on_cpu), ranks)
    if reference != "elsewhere":
        widths = frozen_arithmetic(config, on_cpu, ranks)
        scored = max(scored, scoring(config, frozen, widths, ranks), key=_sum)
    factor = arithmetic(config, on_cpu).factor if model.lora.quantized else 0
    largest = shape.hidden_size * shape.intermediate_size
    matrix = Use("a matrix out of 4 bits", largest * factor, "model.dtype")
    # What the step takes for a moment: bfloat16 weights move in float32, a bucket at a time, of which the largest
    # matrix is alone in its own; states that live on the host visit.
    step = []
    if not model.lora.enabled and config.model.dtype != "float32" and model.offload != "all":
        largest_bucket = max(MASTER_BUCKET, shape.head_parameters / model.shards)
        bucket = min(shape.parameters / model.shards, largest_bucket) * MASTER_BUCKET_BYTES
        step = [Use("weights in float32, a part at a time", bucket, "model.dtype, train_model.lora.enabled")]
    if model.offload == "optimizer":
        knobs = "train_model.offload=all, train_model.num_devices"
        step.append(Use("optimizer state, visiting", _sum(learner_states(config, shape)), knobs))
    return [
        phase("score", *visitor, matrix, *scored),
        phase("optimize", matrix, *_peak(config, shape, on_cpu, gradients)),
        phase("optimizer step", gradients, *step),
    ]


def learner_gradients(config: Config, shape: ModelShape) -> Use:
    """One rank's shard of them."""
    model = config.train_model
    width = FLOAT if model.lora.enabled else DTYPE_BYTES[config.model.dtype]
    size = trained_parameters(config, shape) * width / model.shards
    return Use("gradients", size, "train_model.lora.enabled, train_model.num_devices")


def scoring(
    config: Config, shape: ModelShape, widths: Arithmetic, ranks: int, gathering: str = GATHERING_KNOB
) -> list[Use]:
    """Log-probs without gradients: the largest of what the root gathers, a block and the head.

    ranks: that share a copy of the parameters of the model that scores. gathering: the keys that change what they
    gather.
    """
    batch = microbatch(config, shape, on_cpu=not widths.fused_head)
    whole = gathered(shape, widths, ranks)
    block = activations.block_scoring_bytes(shape, batch, widths) + batch.mask * (1 + widths.factor)
    layer = Use("one layer's activations", block, BATCH_KNOBS)
    head = Use("output head", activations.head_forward_bytes(shape, batch, widths, 1), HEAD_KNOBS)
    moments = [
        [Use(GATHERED, 2 * (whole.outside + whole.layer), gathering)],
        [Use(GATHERED, whole.outside + 2 * whole.layer, gathering), layer],
        [Use(GATHERED, whole.outside + whole.layer, gathering), head],
    ]
    return max(moments, key=_sum)


def _sum(uses: Sequence[Use]) -> float:
    return sum(use.bytes for use in uses)


def _peak(config: Config, shape: ModelShape, on_cpu: bool, gradients: Use) -> list[Use]:
    """The fullest of some moments: the head's forward pass, its backward pass, the backward pass of the last block
    and that of the first, the sum over ranks of what is outside the blocks. With one microbatch a step, gradients come
    into being between the blocks' two, as do the sums over copies of the parameters."""
    batch, widths = microbatch(config, shape, on_cpu), arithmetic(config, on_cpu)
    whole = gathered(shape, widths, config.train_model.ranks)
    recomputes = config.train.gradient_checkpointing
    block = activations.block_bytes(shape, batch, widths)
    kept = batch.positions * shape.hidden_size * widths.stream if recomputes else block  # its input alone
    # The backward pass needs half-precision copies of the weights unless checkpointing casts again. There are none of
    # weights in 4 bits, which are computed anew whenever they multiply.
    needed = not recomputes and not config.train_model.lora.quantized
    copies = activations.weight_copies_bytes(shape, widths) if needed else 0.0
    several = rank_microbatches(config, shape) > 1
    held = gradients.bytes if several else 0.0
    kept_sums = kept_of_sums(config, several)

    def moment(now: Use, units: float, gradient: float = held, layers: int = shape.num_layers) -> list[Use]:
        activations = layers * kept + batch.mask
        copied, sums = copies * layers / shape.num_layers, kept_sums * whole.layer_sum
        return [
            Use(gradients.what, gradient, gradients.knobs),
            Use("gradients summed over copies", sums * (shape.num_layers - layers), "train_model.shard_size"),
            Use(f"activations of {batch.positions} tokens", activations, f"{BATCH_KNOBS}, {CHECKPOINTING}"),
            Use("half-precision weights", copied, f"{CHECKPOINTING}, model.dtype"),
            Use(GATHERED, units, GATHERING_KNOB),
            now,
        ]

    backward = activations.block_backward_bytes(shape, batch, widths) + (block if recomputes else 0.0)
    waiting = activations.waiting_head_gradient_bytes(shape, widths, config.train_model.ranks)
    summed = max(backward, whole.layer_gradient + whole.layer_sum)

    def layer(beside: float) -> Use:
        return Use("backward pass of one layer", summed + beside, BATCH_KNOBS)

    forward = Use("output head", activations.head_forward_bytes(shape, batch, widths, 2), HEAD_KNOBS)
    head_back = activations.head_backward_bytes(shape, batch, widths, 2 if config.policy.uses_entropy else 1)
    back = Use("backward pass of the output head", head_back, HEAD_KNOBS)
    outside = last_sum_bytes(config, whole, kept_sums)
    last = Use("gradients of embedding and head", outside, "train_model.lora.enabled")
    two, one = whole.outside + 2 * whole.layer, whole.outside + whole.layer
    # Among all gradients is that of a tied head, which waits until the end.
    moments = [
        moment(layer(waiting), two),
        moment(layer(0.0), two, gradients.bytes, layers=1),
        moment(forward, one),
        moment(back, one),
        moment(last, 0.0, gradients.bytes, layers=0),
    ]
    return max(moments, key=_sum)


def reference_bytes(config: Config, shape: ModelShape, ranks: int) -> float:
    """A whole copy of the frozen reference, in bytes.

    Its linear layers are in the dtype that the learner computes in, its embedding, which may be the head too, in that
    of the weights. ranks: that share the copy; several gather all of it in the dtype that they compute in.
    """
    width = DTYPE_BYTES[config.reference_model.dtype]
    if ranks > 1:
        return shape.parameters * min(width, MIXED_BYTES[config.train.mixed_precision])
    linear = shape.parameters - shape.head_parameters
    return linear * min(width, MIXED_BYTES[config.train.mixed_precision]) + shape.head_parameters * width


def pushed_bytes(config: Config, shape: ModelShape, dtype: str) -> float:
    """What a push carries: full weights in `dtype`, or the adapter in its own."""
    if config.inference_model.lora == "adapter":
        return trained_parameters(config, shape) * FLOAT
    return shape.parameters * DTYPE_BYTES[dtype]


def usable_bytes(gpu_memory_gib: float) -> float:
    """What a process may plan to use of a GPU: less the CUDA context, libraries and fragmentation (3%)."""
    return gpu_memory_gib * GIB * (1 - 0.03) - CONTEXT_BYTES


def engine_weights(config: Config, shape: ModelShape, dtype: str, on_cpu: bool) -> float:
    """Weights on one of an engine's devices. vLLM on a CPU keeps a tied head apart, packed."""
    width = DTYPE_BYTES["fp8" if config.inference_model.quantization else dtype]
    parameters = shape.parameters + (shape.head_parameters if on_cpu and shape.tied else 0)
    return parameters * width / config.inference_model.tensor_parallel_size


def engine_work_bytes(shape: ModelShape, batched_tokens: int, sequences: int, split: int) -> float:
    """What one device of a vLLM engine needs beside weights and cache: activations of a step, float32 logits of
    every sequence three times over (raw, processed, sorted), 1 GiB of captured graphs."""
    step = batched_tokens * (4 * shape.hidden_size + 3 * shape.intermediate_size / split) * 2
    return step + 3 * sequences * shape.vocab_size * FLOAT + GIB


def kv_bytes_per_sequence(config: Config, shape: ModelShape, dtype: str) -> float:
    """Keys and values of one sequence of the full length, on one of an engine's devices."""
    per_token = shape.kv_bytes_per_token(DTYPE_BYTES[dtype])
    return config.max_model_len * per_token / config.inference_model.tensor_parallel_size


def gib(number: float) -> str:
    return f"{number / GIB:.2f} GiB" if number >= 0.01 * GIB else f"{number / 2**20:.1f} MiB"
