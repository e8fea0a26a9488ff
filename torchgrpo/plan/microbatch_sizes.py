"""Computes the largest microbatch's completions, positions, response tokens and logits chunk from the config.

The module imports no torch.
"""

import math

from config.schema.config import Config
from torchgrpo.plan.activations import FLOAT, MicrobatchSizes
from torchgrpo.plan.model_shape import ModelShape

CPU_CHUNK_BYTES, GPU_CHUNK_BYTES = 1 << 26, 1 << 30
"""Default size of a chunk of float32 logits."""
ROW_TILE = 128
"""Rows of a GPU's matrix tile, of which a chunk on a GPU has a whole number."""
BLOCK_SIZE, MIN_BLOCKS = 128, 3
"""Positions of a block of flex attention, and the smallest number of blocks.

The kernel skips pairs of blocks without visible positions. One block would be compiled for itself, as would a number of
blocks that another size of the model equals.
"""


def longest_row_tokens(config: Config) -> int:
    """Tokens of the longest prompt and response in training."""
    return config.env.max_prompt_tokens + config.response_tokens


def uses_packing(config: Config, shape: ModelShape | None) -> bool:
    """Whether a microbatch is one packed sequence, also for a model of unknown shape."""
    return config.train.packing and (shape is None or shape.has_plain_attention)


def padded_positions(positions: int) -> int:
    """Positions of a packed sequence on a GPU, which whole blocks of flex attention contain."""
    return max(-(-positions // BLOCK_SIZE), MIN_BLOCKS) * BLOCK_SIZE


def microbatch_rows(config: Config) -> int:
    """Completions of one microbatch without a limit on positions."""
    shares = config.train_model.microbatch_groups * config.train.gradient_accumulation_steps
    return math.ceil(config.optim_batch_size / shares)


def rank_microbatches(config: Config, shape: ModelShape | None) -> int:
    """Microbatches of each rank in an optimizer step.

    There are fewer than `train.gradient_accumulation_steps` if a rank has fewer completions.
    """
    groups = config.train_model.microbatch_groups
    return math.ceil(config.optim_batch_size / (groups * longest_microbatch_rows(config, shape)))


def longest_microbatch_rows(config: Config, shape: ModelShape | None) -> int:
    """Completions of one microbatch if every prompt and response has the maximum length."""
    prompt, response = config.env.max_prompt_tokens, config.response_tokens
    positions = microbatch_tokens(config, shape)
    if uses_packing(config, shape):
        return max(1, min(microbatch_rows(config), (positions - prompt) // response))
    return max(1, positions // (prompt + response))


def microbatch_tokens(config: Config, shape: ModelShape | None) -> int:
    """Positions of one microbatch if every prompt and response has the maximum length.

    In a packed microbatch the prompt of a group counts once. A single prompt and response of maximum length may exceed
    `train.max_tokens_per_microbatch`.
    """
    prompt, response = config.env.max_prompt_tokens, config.response_tokens
    rows, repeats = microbatch_rows(config), config.env.repeats
    prompts = -(-rows // repeats) if uses_packing(config, shape) else rows
    longest_positions = prompts * prompt + rows * response
    limit = config.train.max_tokens_per_microbatch
    return longest_positions if limit is None else min(longest_positions, max(limit, prompt + response))


def longest_microbatch(config: Config, shape: ModelShape, on_cpu: bool, ranks: int = 1) -> MicrobatchSizes:
    """Returns the sizes of one microbatch of the longest prompts and responses on a rank.

    In a packed microbatch keys are not repeated for every query head, and there is no mask. On a GPU the sequence is
    padded to whole blocks. On a CPU, packed attention gathers the keys and values of each response together with those
    of its prompt. A rank that shares the microbatch with others computes a slice of its positions, all of which may be
    response tokens, and a part of the keys' heads.
    ranks: number of ranks that compute the microbatch together.
    """
    prompt, response = config.env.max_prompt_tokens, config.response_tokens
    positions, row_length = microbatch_tokens(config, shape), prompt + response
    chunk = chunk_size(config, shape, on_cpu)
    if uses_packing(config, shape):
        targets = min(microbatch_rows(config) * response, positions - prompt)
        if on_cpu:
            gathered_keys = targets * row_length // response + (positions - targets)
            keys = gathered_keys * shape.num_kv_heads // shape.num_heads + positions // 2
        else:
            positions = padded_positions(positions)
            keys = positions * shape.num_kv_heads // shape.num_heads
        own = -(-positions // ranks)
        return MicrobatchSizes(own, keys // ranks, 0, min(targets, own), chunk, is_shared=ranks > 1)
    rows = positions // row_length
    return MicrobatchSizes(positions, rows * row_length, rows * row_length * row_length, rows * response, chunk)


def chunk_size(config: Config, shape: ModelShape, on_cpu: bool) -> int:
    """Response tokens whose logits exist at one time.

    The number is `train.log_prob_chunk_size` if set, else `automatic_chunk_size`.
    """
    if config.train.log_prob_chunk_size is not None:
        return config.train.log_prob_chunk_size
    return automatic_chunk_size(shape.vocab_size, shape.hidden_size, on_cpu)


def automatic_chunk_size(vocabulary: int, width: int, on_cpu: bool) -> int:
    """Returns the default number of rows whose logits exist at one time.

    Each chunk reads the whole head [vocabulary, width] and adds to its gradient, which only pays off for many rows.
    So the chunk's logits are at least a quarter of the size of the head on a CPU, and half of it on a GPU.
    """
    row_bytes = vocabulary * FLOAT
    if on_cpu:
        return max(1, CPU_CHUNK_BYTES // row_bytes, width // 4)
    rows = max(GPU_CHUNK_BYTES // row_bytes, width // 2)
    return max(ROW_TILE, rows // ROW_TILE * ROW_TILE)
