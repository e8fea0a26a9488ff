"""Samples the completions of a request with a vLLM server.

Seeds are those of the vLLM engine in this process.
"""

import asyncio
from dataclasses import replace

from envs.group import SampledCompletion
from torchgrpo.rollout.engines.completion_ends import CompletionEnds
from torchgrpo.rollout.engines.http_server import VLLMServer
from torchgrpo.rollout.engines.interface import Request
from torchgrpo.rollout.engines.vllm_sampling import base_seed


async def sample_group(server: VLLMServer, request: Request, ends: CompletionEnds) -> list[SampledCompletion]:
    """Samples all completions of a request concurrently.

    A failure of one cancels the others and is raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_sample_completion(server, request, index, ends)) for index in range(request.n)]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _sample_completion(
    server: VLLMServer, request: Request, index: int, ends: CompletionEnds
) -> SampledCompletion:
    """Samples one completion, in several calls if a push interrupts it (`inference_model.update=abort`).

    The server may also stop at a stop string that our tokenizer does not find; then the completion continues.
    """
    sampling, end_token_ids = request.sampling, sorted(ends.end_token_ids)
    completion = SampledCompletion([], [], [], "abort")
    seed = base_seed(request.seed) + index
    while completion.finish_reason == "abort":
        num_sampled = len(completion.token_ids)
        part = await server.sample(
            [*request.prompt, *completion.token_ids],
            base_seed(seed + num_sampled) if num_sampled else seed,
            replace(sampling, max_tokens=sampling.max_tokens - num_sampled),
            end_token_ids,
        )
        for token, log_prob, version in zip(part.token_ids, part.log_probs, part.policy_versions, strict=True):
            completion.token_ids.append(token)
            completion.log_probs.append(0.0 if sampling.temperature == 0 else log_prob)
            completion.policy_versions.append(version)
            completion.finish_reason = ends.finish_reason(completion.token_ids, sampling)
            if completion.finish_reason != "abort":
                break
    return completion
