"""Decodes requests with continuous batching, for models whose every layer is full causal attention.

Between two pushes a prompt goes through the model once for all its requests (`prefill.py`). Every running completion
is a row of one `GroupKVCache`. A step samples one token for all rows, whatever their lengths. Waiting requests take
the place of finished rows.

    submit ─▶ waiting ──admit: prefill, n rows──▶ rows ──decode──▶ finished groups ─▶ step() returns them
                                                  │ ▲
                     drop_cache (a push) ─▶ interrupted ──prefill of prompt and partial completion
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from transformers import PreTrainedModel

from envs.group import SampledCompletion
from torchgrpo.rollout.engines.completion_ends import CompletionEnds
from torchgrpo.rollout.engines.group_kv_cache import GroupKVCache, PrefilledSequence, RowCohort, group_by_length
from torchgrpo.rollout.engines.interface import Request, Response
from torchgrpo.rollout.engines.prefill import Prefill
from torchgrpo.rollout.engines.shared_prompt_attention import ATTENTION_NAME
from torchgrpo.rollout.engines.token_sampling import SamplingFilter, append_token, row_seeds, sample_tokens


@dataclass
class _Row:
    """Row of the batch: one running completion."""

    request: Request
    seed: int
    completion: SampledCompletion = field(default_factory=lambda: SampledCompletion([], [], [], "abort"))

    @property
    def is_finished(self) -> bool:
        return self.completion.finish_reason != "abort"

    @property
    def sequence(self) -> tuple[int, ...]:
        return (*self.request.prompt, *self.completion.token_ids)


class ContinuousBatchingDecoder:
    """Decodes requests to finished groups, with a KV cache that groups share.

    Args:
        model: its architecture must have `plain_attention`; its attention function is replaced.
    """

    def __init__(self, model: PreTrainedModel, ends: CompletionEnds, max_num_seqs: int) -> None:
        model.set_attn_implementation(ATTENTION_NAME)
        self.model = model
        self.ends = ends
        self.max_num_seqs = max_num_seqs
        self._waiting: deque[Request] = deque()
        self._rows: list[_Row] = []
        self._interrupted_rows: list[_Row] = []
        self._groups: dict[int, list[_Row]] = {}
        self._prefill = Prefill(model)
        self._cache = GroupKVCache()
        # transformers uses a mask of four dimensions unchanged and builds none from the positions.
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + len(self._groups)

    @property
    def has_running_rows(self) -> bool:
        """Whether any completion has started and is not finished."""
        return bool(self._groups)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def cancel(self, request_id: int) -> None:
        """Drops a request with its rows."""
        self._waiting = deque(one for one in self._waiting if one.request_id != request_id)
        if self._groups.pop(request_id, None) is not None:
            self._interrupted_rows = [row for row in self._interrupted_rows if row.request.request_id != request_id]
            self._drop_rows(lambda row: row.request.request_id == request_id)

    def step(self, version: int) -> list[Response]:
        """Samples one token for every row, including the rows of admitted requests; returns finished groups."""
        self._version = version
        # Rows that a push interrupted continue with their next token.
        interrupted_rows, self._interrupted_rows = self._interrupted_rows, []
        interrupted_rows.sort(key=_num_sampled)
        for num_tokens, rows in groupby(interrupted_rows, key=_num_sampled):
            self._resume_rows(list(rows), num_tokens)
        self._admit()
        return self.advance(version)

    def advance(self, version: int) -> list[Response]:
        """Samples one token for every running row and starts no waiting request; returns finished groups."""
        self._version = version
        if self._rows:
            self._decode()
        finished = [number for number, group in self._groups.items() if all(row.is_finished for row in group)]
        return [Response(number, [row.completion for row in self._groups.pop(number)]) for number in finished]

    def drop_cache(self) -> None:
        """Drops all keys and values; the next step computes those of running sequences again."""
        self._interrupted_rows += self._rows
        self._rows = []
        self._cache.cohorts.clear()
        self._prefill.clear()

    def clear(self) -> None:
        self.drop_cache()
        self._waiting.clear()
        self._interrupted_rows.clear()
        self._groups.clear()

    def _admit(self) -> None:
        """Moves waiting requests into free rows and samples the first token of each new row."""
        free = self.max_num_seqs - len(self._rows)
        # Requests that are admitted together share a cohort of the cache, so few free rows are not filled at once.
        if self._rows and free < self.max_num_seqs / 8:
            return
        requests: list[Request] = []
        while self._waiting and (self._waiting[0].n <= free or not (self._rows or requests)):
            requests.append(self._waiting.popleft())
            free -= requests[-1].n
        if not requests:
            return
        seeds = row_seeds([request.seed for request in requests], [request.n for request in requests])
        row_seed = iter(seeds)
        for request in requests:
            self._groups[request.request_id] = [_Row(request, next(row_seed)) for _ in range(request.n)]
        prompts = self._prefill.prefill_prompts([request.prompt for request in requests])
        started_rows: list[_Row] = []
        for prompt_indices in group_by_length([prompt.length for prompt in prompts]):
            groups = [group for group, index in enumerate(prompt_indices) for _ in range(requests[index].n)]
            longest = max(requests[index].sampling.max_tokens for index in prompt_indices)
            self._cache.cohorts.append(RowCohort([prompts[index] for index in prompt_indices], groups, longest))
            started_rows += [row for index in prompt_indices for row in self._groups[requests[index].request_id]]
        logits = {request.request_id: one.logits for request, one in zip(requests, prompts, strict=True)}
        self._start_rows(started_rows, torch.stack([logits[row.request.request_id] for row in started_rows]))

    def _start_rows(self, rows: list[_Row], logits: torch.Tensor) -> None:
        """Adds rows that are in the cache, and samples their tokens from `logits` [rows, vocabulary]."""
        self._rows += rows
        self._sample(rows, SamplingFilter([row.request.sampling for row in rows], self.model.device), logits)
        self._filter = SamplingFilter([row.request.sampling for row in self._rows], self.model.device)
        self._drop_rows(lambda row: row.is_finished)

    def _decode(self) -> None:
        """Samples one token for every row.

        Raises:
            RuntimeError: the model's attention function was replaced, and would see the new tokens only.
        """
        implementation = self.model.config._attn_implementation
        if implementation != ATTENTION_NAME:
            raise RuntimeError(
                f"the engine owns its model, but its attention function was replaced by {implementation}"
            )
        last = torch.tensor([row.completion.token_ids[-1] for row in self._rows])
        logits = self.model(
            last[:, None].to(self.model.device),
            attention_mask=self._mask,
            position_ids=self._cache.begin_step(self.model.device),
            past_key_values=self._cache,
            use_cache=True,
            group_cache=self._cache,
        ).logits
        self._cache.end_step()
        self._sample(self._rows, self._filter, logits[:, -1])
        self._drop_rows(lambda row: row.is_finished)

    def _sample(self, rows: list[_Row], sampling_filter: SamplingFilter, logits: torch.Tensor) -> None:
        seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        counters = np.array([len(row.completion.token_ids) for row in rows], dtype=np.uint64)
        tokens, log_probs = sample_tokens(sampling_filter.log_probs(logits), seeds, counters)
        for row, token, log_prob in zip(rows, tokens.tolist(), log_probs.tolist(), strict=True):
            append_token(row.completion, token, log_prob, self._version, row.request.sampling, self.ends)

    def _drop_rows(self, is_dropped: Callable[[_Row], bool]) -> None:
        """Removes rows from the batch and the cache."""
        if not any(is_dropped(row) for row in self._rows):
            return
        begin, rows = 0, []
        for cohort in self._cache.cohorts:
            cohort_rows = self._rows[begin : begin + cohort.rows]
            begin += cohort.rows
            rows += [
                cohort_rows[index]
                for index in cohort.drop_rows([i for i, row in enumerate(cohort_rows) if is_dropped(row)])
            ]
        self._cache.cohorts = [cohort for cohort in self._cache.cohorts if cohort.rows]
        self._rows = rows
        self._filter = SamplingFilter([row.request.sampling for row in rows], self.model.device)

    def _resume_rows(self, rows: list[_Row], num_tokens: int) -> None:
        """Puts interrupted rows back into the cache as one cohort and samples their next tokens.

        The rows have `num_tokens` tokens each. The prompt of a group is prefilled with its first row.
        """
        prefilled = self._prefill.prefill_sequences([row.sequence for row in rows])
        prompt_indices: dict[int, int] = {}
        prompts: list[PrefilledSequence] = []
        for row, one in zip(rows, prefilled, strict=True):
            if row.request.request_id not in prompt_indices:
                prompt_indices[row.request.request_id] = len(prompts)
                prompts.append(one.slice_positions(0, one.length - num_tokens))
        completions = [one.slice_positions(one.length - num_tokens, one.length) for one in prefilled]
        groups = [prompt_indices[row.request.request_id] for row in rows]
        longest = max(row.request.sampling.max_tokens for row in rows)
        self._cache.cohorts.append(RowCohort(prompts, groups, longest, completions))
        self._start_rows(rows, torch.stack([one.logits for one in prefilled]))


def _num_sampled(row: _Row) -> int:
    return len(row.completion.token_ids)
