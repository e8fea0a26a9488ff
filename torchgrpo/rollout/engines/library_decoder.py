"""Decoding by transformers itself: `generate`, with whatever cache the model has.

    submit ─▶ waiting ──prompts of one length──▶ generate ──▶ their groups

Rows of one call have prompts of one length, so nothing is padded and no model has to know of padding. A call ends when
its last row has ended, and no push falls into it.
"""

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria

from config.schema.errors import ConfigError
from envs.group import SampledCompletion
from torchgrpo.rollout.engines.draw import Filter, append_token, draw, row_seeds
from torchgrpo.rollout.engines.interface import Request, Response


class LibraryDecoder:
    """Requests in, finished groups out, for every model that `generate` takes; as `RunningDecoder`.

    Raises:
        ConfigError: `generate` does not take this one.
    """

    def __init__(self, model: PreTrainedModel, eos_token_ids: Collection[int], max_num_seqs: int) -> None:
        self.model: Any = model
        self.eos_token_ids = eos_token_ids
        self.max_num_seqs = max_num_seqs
        self._waiting: list[Request] = []
        # What the model's files say of sampling would change the distribution.
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
                f"{type(self.model).__name__} ({type(error).__name__}: {first}): take inference_model.backend=vllm if "
                "vLLM has it, or another model"
            ) from error

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> bool:
        """Never: a step ends with what it has begun."""
        return False

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self, version: int) -> list[Response]:
        """Groups whose prompts are as long as that of the first, as many as there is room for."""
        together: list[Request] = []
        waiting: list[Request] = []
        rows = 0
        for request in self._waiting:
            alike = not together or len(request.prompt) == len(together[0].prompt)
            if alike and (not together or rows + request.n <= self.max_num_seqs):
                together.append(request)
                rows += request.n
            else:
                waiting.append(request)
        self._waiting = waiting
        if not together:
            return []
        prompts = torch.tensor(
            [one.prompt for one in together for _ in range(one.n)], device=self.model.device
        )
        sampling = _Sampling(together, self.eos_token_ids, version, prompts.device)
        self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=max(request.sampling.max_tokens for request in together),
            logits_processor=[sampling],
            stopping_criteria=[_AllEnded(sampling)],
        )
        drawn = iter(sampling.completions)
        return [Response(one.request_id, [next(drawn) for _ in range(one.n)]) for one in together]

    def advance(self, version: int) -> list[Response]:
        return []

    def renew(self) -> None:
        """Nothing is kept from one step to the next."""

    def clear(self) -> None:
        self._waiting.clear()


class _Sampling(LogitsProcessor):
    """Sample every row's token as all engines do, and leave `generate` no other choice."""

    def __init__(
        self, requests: list[Request], eos_token_ids: Collection[int], version: int, device: torch.device
    ) -> None:
        counts = [request.n for request in requests]
        self._limits = [request.sampling.max_tokens for request in requests for _ in range(request.n)]
        self._filter = Filter([one.sampling for one in requests for _ in range(one.n)], device)
        self._seeds = np.array(row_seeds([request.seed for request in requests], counts), dtype=np.uint64)
        self._ends = eos_token_ids
        self._version = version
        self._count = 0
        self.completions = [SampledCompletion([], [], [], "abort") for _ in self._limits]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counters = np.full(len(self._seeds), self._count, dtype=np.uint64)
        tokens, log_probs = draw(self._filter.log_probs(scores), self._seeds, counters)
        self._count += 1
        rows = zip(self.completions, self._limits, tokens.tolist(), log_probs.tolist(), strict=True)
        for one, limit, token, log_prob in rows:
            if one.finish_reason == "abort":
                append_token(one, token, log_prob, self._version, self._ends, limit)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)


class _AllEnded(StoppingCriteria):
    """Ends a call of `generate` when every row has its last token."""

    def __init__(self, sampling: _Sampling) -> None:
        self._sampling = sampling

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **others: object) -> torch.Tensor:
        ended = all(one.finish_reason != "abort" for one in self._sampling.completions)
        return torch.full((len(input_ids),), ended, dtype=torch.bool, device=input_ids.device)
