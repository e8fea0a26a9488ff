"""Sizes of a microbatch: completions, positions, response tokens, chunks of logits. No torch here."""

import math

from config.schema.config import Config
from torchgrpo.plan.activations import FLOAT, Microbatch
from torchgrpo.plan.model_shape import ModelShape

CHUNK_BYTES = {"cpu": (1 << 24) * FLOAT, "cuda": (1 << 27) * FLOAT}


def longest_row(config: Config) -> int:
    """Tokens of the longest prompt and response that are trained on."""
    return config.env.max_prompt_tokens + config.inference_model.max_tokens


def packs(config: Config, shape: ModelShape | None) -> bool:
    """Whether a microbatch goes through the model as one sequence; a model that is not known is taken to."""
    return config.train.packing and (shape is None or shape.plain)


def microbatch_rows(config: Config) -> int:
    """Completions of a microbatch of one rank, without a limit on its positions."""
    shares = config.train_model.ranks * config.train.gradient_accumulation_steps
    return math.ceil(config.optim_batch_size / shares)


def rank_microbatches(config: Config, shape: ModelShape | None) -> int:
    """Microbatches of each rank in an optimizer step; fewer than are asked for where it has no more to take."""
    return math.ceil(config.optim_batch_size / (config.train_model.ranks * rows_at_a_time(config, shape)))


def rows_at_a_time(config: Config, shape: ModelShape | None) -> int:
    """Completions of one microbatch of a rank, everything at its limits."""
    prompt, response = config.env.max_prompt_tokens, config.inference_model.max_tokens
    positions = microbatch_tokens(config, shape)
    if packs(config, shape):
        return max(1, min(microbatch_rows(config), (positions - prompt) // response))
    return max(1, positions // (prompt + response))


def microbatch_tokens(config: Config, shape: ModelShape | None) -> int:
    """Positions that go through the model for one microbatch, all at their limits.

    Packed, a group's prompt counts once. The limit of a microbatch gives way to a single longest response.
    """
    prompt, response = config.env.max_prompt_tokens, config.inference_model.max_tokens
    rows, repeats = microbatch_rows(config), config.env.repeats
    prompts = -(-rows // repeats) if packs(config, shape) else rows
    most = prompts * prompt + rows * response
    limit = config.train.max_tokens_per_microbatch
    return most if limit is None else min(most, max(limit, prompt + response))


def microbatch(config: Config, shape: ModelShape, on_cpu: bool) -> Microbatch:
    """Sizes of one microbatch of the longest prompts and responses.

    Packed, keys are not repeated for every query head, and there is no mask. On a CPU the rows of a call are gathered,
    each response's with its prompt's keys and values, and its outputs put in their places.
    """
    prompt, response = config.env.max_prompt_tokens, config.inference_model.max_tokens
    positions, whole = microbatch_tokens(config, shape), prompt + response
    chunk = chunk_size(config, shape, on_cpu)
    if packs(config, shape):
        targets = min(microbatch_rows(config) * response, positions - prompt)
        keys = positions * shape.num_kv_heads // shape.num_heads
        if on_cpu:
            gathered_keys = targets * whole // response + (positions - targets)
            keys = gathered_keys * shape.num_kv_heads // shape.num_heads + positions // 2
        return Microbatch(positions, keys, 0, targets, chunk)
    rows = positions // whole
    return Microbatch(positions, rows * whole, rows * whole * whole, rows * response, chunk)


def chunk_size(config: Config, shape: ModelShape, on_cpu: bool) -> int:
    """Response tokens whose logits exist at one time.

    They are `train.log_prob_chunk_size`, else as many as fill `CHUNK_BYTES`, or a quarter of the head's width if that
    is more (each chunk passes over the whole head).
    """
    if config.train.log_prob_chunk_size is not None:
        return config.train.log_prob_chunk_size
    rows = CHUNK_BYTES["cpu" if on_cpu else "cuda"] // (FLOAT * shape.vocab_size)
    return max(1, rows, shape.hidden_size // 4)
