"""Decodes requests in batches of equal prompt length with transformers' `generate`, for any model.

    submit ─▶ waiting ──prompts of one length──▶ generate ──▶ their groups

Prompts of one call have one length, so nothing is padded and the model needs no support for padding. A call ends when
its last row has ended; weights are pushed between calls only.
"""

from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria

from config.schema.errors import ConfigError
from envs.group import SampledCompletion
from torchgrpo.rollout.engines.completion_ends import CompletionEnds
from torchgrpo.rollout.engines.interface import Request, Response
from torchgrpo.rollout.engines.token_sampling import SamplingFilter, append_token, row_seeds, sample_tokens


class GenerateDecoder:
    """Decodes requests to finished groups, for every model that `generate` supports.

    Same interface as `ContinuousBatchingDecoder`.

    Raises:
        ConfigError: `generate` does not support the model.
    """

    def __init__(self, model: PreTrainedModel, ends: CompletionEnds, max_num_seqs: int) -> None:
        self.model: Any = model
        self.ends = ends
        self.max_num_seqs = max_num_seqs
        self._waiting: list[Request] = []
        # The generation config of the model's files would change the sampling distribution.
        model.generation_config = GenerationConfig(do_sample=False, use_cache=True)
        try:
            with torch.inference_mode():
                self.model.generate(  # type: ignore[operator]
                    torch.zeros(2, 3, dtype=torch.int64, device=self.model.device), max_new_tokens=2
                )
        except Exception as error:
            first = (str(error).strip() or "no reason given").splitlines()[0]
            raise ConfigError(
                f"model.name={self.model.config.name_or_path}: transformers does not generate with "
                f"{type(self.model).__name__} ({type(error).__name__}: {first}): set "
                "inference_model.backend=vllm if vLLM supports the model, or choose another model"
            ) from error

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    @property
    def has_running_rows(self) -> bool:
        """Returns False, since a step finishes all rows that it starts."""
        return False

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def cancel(self, request_id: int) -> None:
        """Drops a waiting request."""
        self._waiting = [one for one in self._waiting if one.request_id != request_id]

    def step(self, version: int) -> list[Response]:
        """Generates waiting groups with prompts of the first one's length, up to `max_num_seqs` rows."""
        same_length_requests: list[Request] = []
        waiting: list[Request] = []
        rows = 0
        for request in self._waiting:
            has_same_length = not same_length_requests or len(request.prompt) == len(same_length_requests[0].prompt)
            if has_same_length and (not same_length_requests or rows + request.n <= self.max_num_seqs):
                same_length_requests.append(request)
                rows += request.n
            else:
                waiting.append(request)
        self._waiting = waiting
        if not same_length_requests:
            return []
        prompts = torch.tensor(
            [one.prompt for one in same_length_requests for _ in range(one.n)], device=self.model.device
        )
        sampling = _Sampling(same_length_requests, self.ends, version, prompts.device)
        self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=max(request.sampling.max_tokens for request in same_length_requests),
            logits_processor=[sampling],
            stopping_criteria=[_AllFinished(sampling)],
        )
        completions = iter(sampling.completions)
        return [Response(one.request_id, [next(completions) for _ in range(one.n)]) for one in same_length_requests]

    def advance(self, version: int) -> list[Response]:
        return []

    def drop_cache(self) -> None:
        """Does nothing, since no cache outlives a step."""

    def clear(self) -> None:
        self._waiting.clear()


class _Sampling(LogitsProcessor):
    """Logits processor that samples every row's token and forces `generate` to take that token."""

    def __init__(self, requests: list[Request], ends: CompletionEnds, version: int, device: torch.device) -> None:
        counts = [request.n for request in requests]
        self._samplings = [request.sampling for request in requests for _ in range(request.n)]
        self._filter = SamplingFilter(self._samplings, device)
        self._seeds = np.array(row_seeds([request.seed for request in requests], counts), dtype=np.uint64)
        self._ends = ends
        self._version = version
        self._count = 0
        self.completions = [SampledCompletion([], [], [], "abort") for _ in self._samplings]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counters = np.full(len(self._seeds), self._count, dtype=np.uint64)
        tokens, log_probs = sample_tokens(self._filter.log_probs(scores), self._seeds, counters)
        self._count += 1
        rows = zip(self.completions, self._samplings, tokens.tolist(), log_probs.tolist(), strict=True)
        for one, sampling, token, log_prob in rows:
            if one.finish_reason == "abort":
                append_token(one, token, log_prob, self._version, sampling, self._ends)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)


class _AllFinished(StoppingCriteria):
    """Stopping criterion that ends a call of `generate` when every row is finished."""

    def __init__(self, sampling: _Sampling) -> None:
        self._sampling = sampling

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **arguments: object) -> torch.Tensor:
        ended = all(one.finish_reason != "abort" for one in self._sampling.completions)
        return torch.full((len(input_ids),), ended, dtype=torch.bool, device=input_ids.device)
