"""Continuous batching of a model whose every layer is plain causal attention.

A prompt goes through the model once for all who ask it between two pushes (`prefill.py`). Every running completion is
a row of one `RunningCache`; a step draws one token for all rows, whatever their lengths; finished rows leave, waiting
requests take their place.

    submit ─▶ waiting ──admit: prefill, n rows──▶ rows ──decode──▶ finished groups ─▶ step() returns them
                                                  │ ▲
                              renew (a push) ─▶ stopped ──prefill of prompt and partial answer
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from transformers import PreTrainedModel

from envs.group import SampledCompletion
from torchgrpo.rollout.engines.draw import Filter, append_token, draw, row_seeds
from torchgrpo.rollout.engines.interface import Request, Response
from torchgrpo.rollout.engines.partial_attention import NAME
from torchgrpo.rollout.engines.prefill import Prefill
from torchgrpo.rollout.engines.running_cache import Band, Computed, RunningCache, alike


@dataclass
class _Row:
    """One running completion."""

    request: Request
    seed: int
    completion: SampledCompletion = field(default_factory=lambda: SampledCompletion([], [], [], "abort"))

    @property
    def done(self) -> bool:
        return self.completion.finish_reason != "abort"

    @property
    def sequence(self) -> tuple[int, ...]:
        return (*self.request.prompt, *self.completion.token_ids)


class RunningDecoder:
    """Requests in, finished groups out, with keys and values of its own.

    Args:
        model: of an architecture with `plain_attention`; its attention is replaced.
    """

    def __init__(self, model: PreTrainedModel, eos_token_ids: Collection[int], max_num_seqs: int) -> None:
        model.set_attn_implementation(NAME)
        self.model = model
        self.eos_token_ids = eos_token_ids
        self.max_num_seqs = max_num_seqs
        self._waiting: deque[Request] = deque()
        self._rows: list[_Row] = []
        self._stopped: list[_Row] = []
        self._groups: dict[int, list[_Row]] = {}
        self._prefill = Prefill(model)
        self._cache = RunningCache()
        # A mask of four dimensions is taken as it is: transformers makes none from the positions.
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + len(self._groups)

    @property
    def running(self) -> bool:
        """Whether a completion has been begun and is not finished."""
        return bool(self._groups)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self, version: int) -> list[Response]:
        """One token for every row, those of waiting requests included."""
        self._version = version
        stopped, self._stopped = self._stopped, []  # by a push, each to go on with its next token
        stopped.sort(key=_age)
        for age, together in groupby(stopped, key=_age):
            self._continue(list(together), age)
        self._admit()
        return self.advance(version)

    def advance(self, version: int) -> list[Response]:
        """One token for every row that runs; nothing waiting is begun."""
        self._version = version
        if self._rows:
            self._decode()
        done = [number for number, group in self._groups.items() if all(row.done for row in group)]
        return [Response(number, [row.completion for row in self._groups.pop(number)]) for number in done]

    def renew(self) -> None:
        """Drop all keys and values; running sequences go through the model again in the next step."""
        self._stopped += self._rows
        self._rows = []
        self._cache.bands.clear()
        self._prefill.clear()

    def clear(self) -> None:
        self.renew()
        self._waiting.clear()
        self._stopped.clear()
        self._groups.clear()

    def _admit(self) -> None:
        """Move waiting requests into free places and draw the first token of each new row."""
        free = self.max_num_seqs - len(self._rows)
        # Those that are admitted together are one band of the cache.
        if self._rows and free < self.max_num_seqs / 8:
            return
        requests: list[Request] = []
        while self._waiting and (self._waiting[0].n <= free or not (self._rows or requests)):
            requests.append(self._waiting.popleft())
            free -= requests[-1].n
        if not requests:
            return
        seeds = row_seeds([request.seed for request in requests], [request.n for request in requests])
        numbers = iter(seeds)
        for request in requests:
            self._groups[request.request_id] = [_Row(request, next(numbers)) for _ in range(request.n)]
        prompts = self._prefill.prompts([request.prompt for request in requests])
        begun: list[_Row] = []
        for places in alike([prompt.length for prompt in prompts]):
            groups = [group for group, place in enumerate(places) for _ in range(requests[place].n)]
            longest = max(requests[place].sampling.max_tokens for place in places)
            self._cache.bands.append(Band([prompts[place] for place in places], groups, longest))
            begun += [row for place in places for row in self._groups[requests[place].request_id]]
        logits = {request.request_id: one.logits for request, one in zip(requests, prompts, strict=True)}
        self._begin(begun, torch.stack([logits[row.request.request_id] for row in begun]))

    def _begin(self, rows: list[_Row], logits: torch.Tensor) -> None:
        """Rows that stand in the cache draw a token after `logits` [rows, vocabulary]."""
        self._rows += rows
        self._sample(rows, Filter([row.request.sampling for row in rows], self.model.device), logits)
        self._filter = Filter([row.request.sampling for row in self._rows], self.model.device)
        self._drop_ended()

    def _decode(self) -> None:
        """One token for every row.

        Raises:
            RuntimeError: somebody replaced the model's attention, which would now see the new tokens alone.
        """
        implementation = self.model.config._attn_implementation
        if implementation != NAME:
            raise RuntimeError(f"the model is the engine's own, but its attention is {implementation}")
        last = torch.tensor([row.completion.token_ids[-1] for row in self._rows])
        logits = self.model(
            last[:, None].to(self.model.device),
            attention_mask=self._mask,
            position_ids=self._cache.begin(self.model.device),
            past_key_values=self._cache,
            use_cache=True,
            running=self._cache,
        ).logits
        self._cache.end()
        self._sample(self._rows, self._filter, logits[:, -1])
        self._drop_ended()

    def _sample(self, rows: list[_Row], samplings: Filter, logits: torch.Tensor) -> None:
        seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        counters = np.array([len(row.completion.token_ids) for row in rows], dtype=np.uint64)
        tokens, log_probs = draw(samplings.log_probs(logits), seeds, counters)
        for row, token, log_prob in zip(rows, tokens.tolist(), log_probs.tolist(), strict=True):
            limit = row.request.sampling.max_tokens
            append_token(row.completion, token, log_prob, self._version, self.eos_token_ids, limit)

    def _drop_ended(self) -> None:
        """Rows that ended leave the batch."""
        if not any(row.done for row in self._rows):
            return
        begin, rows = 0, []
        for band in self._cache.bands:
            own = self._rows[begin : begin + band.rows]
            begin += band.rows
            rows += [own[place] for place in band.drop([i for i, row in enumerate(own) if row.done])]
        self._cache.bands = [band for band in self._cache.bands if band.rows]
        self._rows = rows
        self._filter = Filter([row.request.sampling for row in rows], self.model.device)

    def _continue(self, rows: list[_Row], age: int) -> None:
        """Continue rows of `age` tokens each as one band; a group's prompt is that of its first row."""
        computed = self._prefill.sequences([row.sequence for row in rows])
        places: dict[int, int] = {}
        prompts: list[Computed] = []
        for row, one in zip(rows, computed, strict=True):
            if row.request.request_id not in places:
                places[row.request.request_id] = len(prompts)
                prompts.append(one.part(0, one.length - age))
        answers = [one.part(one.length - age, one.length) for one in computed]
        groups = [places[row.request.request_id] for row in rows]
        longest = max(row.request.sampling.max_tokens for row in rows)
        self._cache.bands.append(Band(prompts, groups, longest, answers))
        self._begin(rows, torch.stack([one.logits for one in computed]))


def _age(row: _Row) -> int:
    return len(row.completion.token_ids)
