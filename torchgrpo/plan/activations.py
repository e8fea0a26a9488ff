"""Formulas for activation bytes of a decoder block and the output head in a microbatch.

    forward                 blocks keep activations for their backward pass ──▶ output head, a chunk of logits at a time
    backward of the head    logits of a chunk again, gradient of the head
    backward of a block     its activations (recomputed under checkpointing, or those that selective recomputation
                            did not keep), gradients of its widest vectors

The memory comes on top of weights, gradients and optimizer state. The formulas count the tensors that PyTorch's
autograd keeps. The block formulas assume a decoder block of the Llama kind (two RMS norms, rotary embeddings, scaled
dot-product attention, gated MLP); others count the output head and copies of weights.
tests/plan/test_memory_estimates.py compares the formulas with a dry run. The module imports no torch.
"""

from dataclasses import dataclass

from torchgrpo.plan.model_shape import ModelShape

FLOAT = 4


@dataclass(frozen=True)
class MicrobatchSizes:
    """Sizes of one microbatch in which every row has the maximum length.

    positions: positions that pass the layers. keys: attended keys, summed over the rows. mask: elements of the boolean
    attention mask, a byte each, which all blocks share. targets: response tokens. chunk: response tokens whose logits
    exist at one time. is_shared: whether the microbatch is divided among ranks.
    """

    positions: int
    keys: int
    mask: int
    targets: int
    chunk: int
    is_shared: bool = False


@dataclass(frozen=True)
class ElementWidths:
    """Bytes per element of a model's tensors, and whether its weights are trained.

    stream: bytes of an element of the weights, and so of the residual stream. factor: bytes of an element of matrix
    factors, 2 under autocast. trains_weights: whether the weights themselves are trained; false under LoRA.
    fused_head: whether the output head is that of a GPU: no copies of logits, and half-precision factors are summed in
    float32 without a wider copy. gathered_width: bytes of an element of a layer's parameters when ranks gather them.
    gradient: bytes of an element of a whole weight's gradient; several ranks widen gradients for the sum over ranks
    only.
    """

    stream: int
    factor: int
    trains_weights: bool
    fused_head: bool
    gathered_width: float
    gradient: int

    @property
    def has_autocast_copies(self) -> bool:
        """Whether autocast makes half-precision copies of float32 weights."""
        return self.factor < self.stream

    @property
    def has_half_precision_head(self) -> bool:
        """Whether the output head multiplies half-precision factors without a wider copy."""
        return self.factor < FLOAT and self.fused_head


def block_bytes(shape: ModelShape, batch: MicrobatchSizes, widths: ElementWidths) -> float:
    """Bytes of the activations that a block keeps for its backward pass.

    A norm keeps its input in float32, and its result before the weight if the weight is trained. Autocast casts the
    result once for each of the five matrices that read it; without a cast the matrices share it. Attention keeps
    queries and output, keys and values repeated for every query head (kernels take a mask with equal heads only), and
    the mask as numbers. The MLP keeps both products of the gate, its activation and their product. An adapter keeps a
    second copy of the output projection's input, and so does attention whose output goes to other ranks.
    """
    width, heads = shape.hidden_size, shape.num_heads * shape.head_dim
    norms = 2 * width * (FLOAT + (widths.stream if widths.trains_weights else 0))
    matrix_input_bytes = (5 if widths.has_autocast_copies else 2) * width * widths.factor
    attention = (2 + (not widths.trains_weights) + batch.is_shared) * heads * widths.factor
    mlp = (4 if shape.gated_mlp else 2) * shape.intermediate_size * widths.factor
    attended = 2 * batch.keys * heads * widths.factor + batch.mask * widths.factor
    return batch.positions * (norms + matrix_input_bytes + attention + mlp) + attended


def saved_output_bytes(shape: ModelShape, batch: MicrobatchSizes, widths: ElementWidths) -> float:
    """Bytes of a block's products and attention outputs, which selective recomputation keeps.

    The matrices project to queries, keys, values, twice to the residual stream, and into the MLP. Attention returns its
    output and a float32 log-sum-exp. An adapter has products of its own, with the same widths.
    """
    heads, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    products = heads + 2 * keys + 2 * shape.hidden_size + (2 if shape.gated_mlp else 1) * shape.intermediate_size
    attention = heads * widths.factor + shape.num_heads * FLOAT
    return batch.positions * (products * widths.factor * (1 if widths.trains_weights else 2) + attention)


def block_backward_bytes(shape: ModelShape, batch: MicrobatchSizes, widths: ElementWidths) -> float:
    """Bytes of the temporary tensors in the backward pass of a block.

    They are gradients of two vectors of the MLP's width, of the residual stream, and of one matrix. An adapter adds
    vectors of the MLP's width: one in float32, or two in half precision.
    """
    inner, width = shape.intermediate_size, shape.hidden_size
    vectors = 2 * inner * widths.factor + width * (widths.stream + widths.factor)
    if not widths.trains_weights:
        return batch.positions * (vectors + inner * FLOAT)
    return batch.positions * vectors + inner * width * (widths.factor + widths.gradient)


def block_scoring_bytes(shape: ModelShape, batch: MicrobatchSizes, widths: ElementWidths) -> float:
    """Maximum bytes of a block in a pass that keeps no activations.

    They are three vectors of the MLP's width (under an adapter of half-precision factors the bytes of a fourth), the
    residual stream before and after attention, and its norm.
    """
    inner = 3 * shape.intermediate_size * widths.factor
    if not widths.trains_weights:
        inner += shape.intermediate_size * (FLOAT - widths.factor)
    stream = shape.hidden_size * (3 * widths.stream + widths.factor)
    return batch.positions * (inner + stream)


def weight_copies_bytes(shape: ModelShape, widths: ElementWidths) -> float:
    """Bytes of one half-precision copy of all matrices between embedding and head."""
    heads = shape.head_parameters * (1 if shape.tied else 2)
    return (shape.parameters - heads) * widths.factor if widths.has_autocast_copies else 0.0


def head_forward_bytes(shape: ModelShape, batch: MicrobatchSizes, widths: ElementWidths, buffers: int) -> float:
    """Bytes of the output head's forward pass.

    They are the last norm, the scored rows, chunks of float32 logits, and a copy of the head in the factors' dtype.
    buffers: chunks of logits on a CPU, 2 with the entropy, else 1. A GPU has one.
    """
    norm = batch.positions * shape.hidden_size * (FLOAT + 2 * widths.stream)
    rows = batch.targets * shape.hidden_size * widths.factor
    chunks = 1 if widths.fused_head else buffers
    return norm + rows + chunks * _logits(shape, batch) + _head_copy(shape, widths)


def head_backward_bytes(shape: ModelShape, batch: MicrobatchSizes, widths: ElementWidths, buffers: int) -> float:
    """Bytes of the output head's backward pass.

    They are the last norm, the rows and their gradient, chunks of logits, and, if the head is trained, its float32
    gradient, to which each chunk adds. A GPU has one chunk, the gradient of its logits, and the gradient of the rows,
    both in the dtype of the rows.
    buffers: chunks of logits on a CPU, 2 with the entropy in the loss, else 1.
    """
    chunks, row_gradient = float(buffers), FLOAT
    if widths.fused_head:
        chunks, row_gradient = 1 + widths.factor / FLOAT, widths.factor
    norm = batch.positions * shape.hidden_size * (FLOAT + widths.stream)
    rows = batch.targets * shape.hidden_size * (row_gradient + widths.factor)
    gradient = shape.head_parameters * FLOAT if widths.trains_weights else 0.0
    return norm + rows + chunks * _logits(shape, batch) + gradient + _head_copy(shape, widths)


def delayed_head_gradient_bytes(shape: ModelShape, widths: ElementWidths, ranks: int) -> float:
    """Bytes of a head gradient that is kept until the end of the backward pass.

    The gradient of a tied head is kept until the embedding's gradient, which comes last. Over several ranks the
    gradient of any head is kept, since head and embedding are reduced together. In one process the gradient of an
    untied head is added at once.
    """
    is_delayed = (shape.tied or ranks > 1) and widths.trains_weights
    return shape.head_parameters * widths.gradient if is_delayed else 0.0


def _logits(shape: ModelShape, batch: MicrobatchSizes) -> float:
    return min(batch.chunk, batch.targets) * shape.vocab_size * FLOAT


def _head_copy(shape: ModelShape, widths: ElementWidths) -> float:
    if widths.has_half_precision_head:
        return shape.head_parameters * widths.factor if widths.has_autocast_copies else 0.0
    return shape.head_parameters * FLOAT if widths.factor < FLOAT else 0.0
