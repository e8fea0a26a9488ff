"""Makes vLLM's sampling parameters of completions and scores."""

import hashlib
from collections.abc import Collection
from typing import TYPE_CHECKING

from envs.group import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams

SCORE_PRIORITY = -1
"""Priority of scores in vLLM's queue, before that of completions (0): a weight check waits for its scores."""


def sampling_params(
    sampling: Sampling, seed: int, end_token_ids: Collection[int], num_sampled: int
) -> "SamplingParams":
    """Makes the parameters of a completion. num_sampled: tokens that it has already."""
    from vllm import SamplingParams

    return SamplingParams(
        seed=seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens - num_sampled,
        ignore_eos=True,  # the end token of the model's config; ours are the stop tokens
        stop_token_ids=list(end_token_ids),
        logprobs=0,
        detokenize=False,
    )


def score_params(last_token: int, use_cache: bool) -> "SamplingParams":
    """Makes the parameters that score a sequence whose last token the prompt lacks.

    use_cache: score the last token through the prefix cache, otherwise the prompt by a forward pass.
    """
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=1,
        seed=0,
        ignore_eos=True,
        logprob_token_ids=[last_token],
        prompt_logprobs=None if use_cache else 0,
        detokenize=False,
    )


def base_seed(seed: int) -> int:
    """Returns the first of a request's consecutive seeds, far from those of other requests."""
    digest = hashlib.blake2b(seed.to_bytes(16, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
