"""Makes vLLM's sampling parameters of requests and scores, and reads its log-probs."""

import hashlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, cast

from envs.group import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams


def sampling_params(
    sampling: Sampling, n: int, seed: int, end_token_ids: Collection[int], streams: bool, num_sampled: int = 0
) -> "SamplingParams":
    """Makes the parameters of a request.

    seed: of the first completion; the others have the following numbers. streams: every token is returned at its step,
    otherwise whole completions at their end. num_sampled: tokens that the completion has already.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=n,
        seed=seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens - num_sampled,
        ignore_eos=True,  # the end token of the model's config; ours are the stop tokens
        stop_token_ids=list(end_token_ids),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY,
    )


def score_params(last_token: int, use_cache: bool) -> "SamplingParams":
    """Makes the parameters that score a sequence whose last token the prompt lacks.

    use_cache: score the last token through the prefix cache, otherwise the prompt by a forward pass.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        seed=0,
        ignore_eos=True,
        logprob_token_ids=[last_token],
        prompt_logprobs=None if use_cache else 0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def base_seed(seed: int) -> int:
    """Returns the first of a request's consecutive seeds, far from those of other requests."""
    digest = hashlib.blake2b(seed.to_bytes(16, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def flat_log_probs(log_probs: Any) -> list[float]:
    """Returns the log-probs of vLLM's flat container (`flat_logprobs=True`), in the order of positions."""
    return cast(list[float], log_probs.logprobs)
