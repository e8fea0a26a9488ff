"""What one microbatch needs on top of weights, gradients and optimizer state. From sizes alone; no torch here.

    forward                 blocks keep what their backward pass needs ──▶ output head, a chunk of logits at a time
    backward of the head    logits of a chunk again, gradient of the head
    backward of a block     what it kept (computed again under checkpointing), gradients of its widest vectors

Each formula counts the tensors that PyTorch's autograd keeps for a decoder block of the Llama kind (two RMS norms,
rotary embeddings, scaled dot-product attention, gated MLP). tests/plan/test_memory_estimates.py holds
them against a rehearsal.
"""

from dataclasses import dataclass

from torchgrpo.plan.model_shape import ModelShape

FLOAT = 4


@dataclass(frozen=True)
class Microbatch:
    """How much goes through the model at a time, every row at its limits.

    positions: that pass the layers. keys: that are attended to, summed over the rows. mask: elements of the boolean
    attention mask, a byte each, which all blocks share. targets: response tokens. chunk: of these, whose logits exist
    at one time.
    """

    positions: int
    keys: int
    mask: int
    targets: int
    chunk: int


@dataclass(frozen=True)
class Arithmetic:
    """Bytes of an element, and what is trained.

    stream: of weights, and so of the residual stream. factor: of what matrices multiply, 2 under autocast.
    trains_weights: the weights themselves; false under LoRA. fused_head: half-precision factors of the output head
    are summed in float32 as they are (a GPU); otherwise they are widened first. gathered: of a layer's parameters as
    ranks hand them to each other.
    """

    stream: int
    factor: int
    trains_weights: bool
    fused_head: bool
    gathered: float

    @property
    def casts(self) -> bool:
        """Whether autocast makes half-precision copies of float32 weights."""
        return self.factor < self.stream

    @property
    def half_head(self) -> bool:
        return self.factor < FLOAT and self.fused_head


def block_bytes(shape: ModelShape, batch: Microbatch, widths: Arithmetic) -> float:
    """What a block keeps for its backward pass.

    A norm: its input in float32, its result before the weight (if that is trained). Autocast casts the result once
    for each of the five matrices that read it, and without a cast they share it. Attention: queries and output;
    keys and values repeated for every query head, since kernels take a mask with equal heads only; the mask as
    numbers. MLP: both products of the gate, its activation, their product. An adapter has the output projection's
    input once more.
    """
    width, heads = shape.hidden_size, shape.num_heads * shape.head_dim
    norms = 2 * width * (FLOAT + (widths.stream if widths.trains_weights else 0))
    read = (5 if widths.casts else 2) * width * widths.factor
    attention = (2 if widths.trains_weights else 3) * heads * widths.factor
    mlp = (4 if shape.gated_mlp else 2) * shape.intermediate_size * widths.factor
    seen = 2 * batch.keys * heads * widths.factor + batch.mask * widths.factor
    return batch.positions * (norms + read + attention + mlp) + seen


def block_backward_bytes(shape: ModelShape, batch: Microbatch, widths: Arithmetic) -> float:
    """What exists for a moment in the backward pass of a block: gradients of two vectors of the MLP's width, of the
    residual stream, and of one matrix. An adapter widens the MLP's vector to float32."""
    inner, width = shape.intermediate_size, shape.hidden_size
    vectors = 2 * inner * widths.factor + width * (widths.stream + widths.factor)
    if not widths.trains_weights:
        return batch.positions * (vectors + inner * FLOAT)
    return batch.positions * vectors + inner * width * (widths.factor + widths.stream)


def block_scoring_bytes(shape: ModelShape, batch: Microbatch, widths: Arithmetic) -> float:
    """The most that a block holds when nothing is kept: three vectors of the MLP's width (under an adapter one of
    them in float32), the residual stream before and after attention and its norm."""
    inner = 3 * shape.intermediate_size * widths.factor
    if not widths.trains_weights:
        inner += shape.intermediate_size * (FLOAT - widths.factor)
    stream = shape.hidden_size * (3 * widths.stream + widths.factor)
    return batch.positions * (inner + stream)


def weight_copies_bytes(shape: ModelShape, widths: Arithmetic) -> float:
    """One half-precision copy of all matrices between embedding and head."""
    heads = shape.head_parameters * (1 if shape.tied else 2)
    return (shape.parameters - heads) * widths.factor if widths.casts else 0.0


def head_forward_bytes(shape: ModelShape, batch: Microbatch, widths: Arithmetic, buffers: int) -> float:
    """The last norm, the rows that are scored, chunks of float32 logits, a copy of the head in the factors' dtype.

    buffers: 1 without, 2 with the entropy.
    """
    norm = batch.positions * shape.hidden_size * (FLOAT + 2 * widths.stream)
    rows = batch.targets * shape.hidden_size * widths.factor
    return norm + rows + buffers * _logits(shape, batch) + _head_copy(shape, widths)


def head_backward_bytes(shape: ModelShape, batch: Microbatch, widths: Arithmetic, buffers: int) -> float:
    """The last norm, the rows and their float32 gradient, chunks of logits (once more as factors in half precision),
    and where the head is trained its float32 gradient, to which each chunk's is added.

    buffers: 1, or 2 where the entropy is in the loss.
    """
    norm = batch.positions * shape.hidden_size * (FLOAT + widths.stream)
    rows = batch.targets * shape.hidden_size * (FLOAT + widths.factor)
    logits = buffers * _logits(shape, batch)
    gradient = 0.0
    if widths.trains_weights:
        gradient = shape.head_parameters * FLOAT * (2 if widths.half_head else 1)
    if widths.half_head:
        logits += _logits(shape, batch) * widths.factor / FLOAT
    return norm + rows + logits + gradient + _head_copy(shape, widths)


def waiting_head_gradient_bytes(shape: ModelShape, widths: Arithmetic, ranks: int) -> float:
    """A tied head's gradient waits for the embedding's, which comes last, and over several ranks any head's, for both
    are summed together; in one process another head's is added at once."""
    waits = (shape.tied or ranks > 1) and widths.trains_weights
    return shape.head_parameters * widths.stream if waits else 0.0


def _logits(shape: ModelShape, batch: Microbatch) -> float:
    return min(batch.chunk, batch.targets) * shape.vocab_size * FLOAT


def _head_copy(shape: ModelShape, widths: Arithmetic) -> float:
    if widths.half_head:
        return shape.head_parameters * widths.factor if widths.casts else 0.0
    return shape.head_parameters * FLOAT if widths.factor < FLOAT else 0.0
