"""Computes the largest microbatch's completions, positions, response tokens and logits chunk from the config.

The module imports no torch.
"""

import math

from config.schema.config import Config
from torchgrpo.plan.activations import FLOAT, MicrobatchSizes
from torchgrpo.plan.model_shape import ModelShape

BLOCK_SIZE, MIN_BLOCKS = 128, 3
"""Positions of a block of flex attention, and the smallest number of blocks.

The kernel skips pairs of blocks without visible positions. One block would be compiled for itself, as would a number of
blocks that another size of the model equals.
"""
CHUNK_BYTES = {"cpu": (1 << 24) * FLOAT, "cuda": (1 << 27) * FLOAT}


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
    """Completions of one rank's microbatch without a limit on positions."""
    shares = config.train_model.ranks * config.train.gradient_accumulation_steps
    return math.ceil(config.optim_batch_size / shares)


def rank_microbatches(config: Config, shape: ModelShape | None) -> int:
    """Microbatches of each rank in an optimizer step.

    There are fewer than `train.gradient_accumulation_steps` if a rank has fewer completions.
    """
    return math.ceil(config.optim_batch_size / (config.train_model.ranks * longest_microbatch_rows(config, shape)))


def longest_microbatch_rows(config: Config, shape: ModelShape | None) -> int:
    """Completions of one rank's microbatch if every prompt and response has the maximum length."""
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


def longest_microbatch(config: Config, shape: ModelShape, on_cpu: bool) -> MicrobatchSizes:
    """Returns the sizes of one microbatch of the longest prompts and responses.

    In a packed microbatch keys are not repeated for every query head, and there is no mask. On a GPU the sequence is
    padded to whole blocks. On a CPU, packed attention gathers the keys and values of each response together with those
    of its prompt.
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
        return MicrobatchSizes(positions, keys, 0, targets, chunk)
    rows = positions // row_length
    return MicrobatchSizes(positions, rows * row_length, rows * row_length * row_length, rows * response, chunk)


def chunk_size(config: Config, shape: ModelShape, on_cpu: bool) -> int:
    """Response tokens whose logits exist at one time.

    The number is `train.log_prob_chunk_size` if set. Otherwise the chunk fills `CHUNK_BYTES`, but has at least a
    quarter of the hidden size in tokens, since each chunk reads the whole head.
    """
    if config.train.log_prob_chunk_size is not None:
        return config.train.log_prob_chunk_size
    rows = CHUNK_BYTES["cpu" if on_cpu else "cuda"] // (FLOAT * shape.vocab_size)
    return max(1, rows, shape.hidden_size // 4)
