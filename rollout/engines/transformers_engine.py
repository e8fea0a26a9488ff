"""The rollout engine for any machine: a transformers model with continuous batching in this process.

A prompt is prefilled once for its whole group. Every running completion is a row of one `SlotCache`; a step
draws one token for all rows, whatever their lengths; finished rows leave, waiting requests take their place.

    submit ─▶ waiting ──admit: prefill, n rows──▶ rows ──decode──▶ finished groups ─▶ step() returns them
                                                  │ ▲
                                   a push ─▶ stopped ──prefill of prompt and partial answer
"""

import os
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from envs.group import ALONE, SampledCompletion
from rollout.engines.draw import Filter, draw, row_seeds
from rollout.engines.sampler import Request, Response
from rollout.engines.slot_cache import SlotCache
from rollout.weights.outgoing import Outgoing

_SHRINK_BELOW = 0.75  # rows are compacted when fewer than this share still run: copying costs, idling too


@dataclass
class _Row:
    """One running completion."""

    request: Request
    seed: int
    completion: SampledCompletion = field(default_factory=lambda: SampledCompletion([], [], [], "abort"))
    done: bool = False

    @property
    def sequence(self) -> list[int]:
        return [*self.request.prompt, *self.completion.token_ids]


class TransformersEngine:
    """Samples from `model`; speaks the protocols of `rollout.engines.sampler.Engine`.

    Args:
        model: a causal language model; the engine owns it and sets it to evaluation.
        eos_token_ids: any of these ends a completion.
        max_num_seqs: rows that run together; further requests wait.
        update: running requests at a push: "wait" finishes them under the old weights first; "keep" and "abort"
            are the same here: the push only copies, and the next step goes on with the cache computed anew.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Sequence[int],
        max_num_seqs: int = 256,
        update: str = "keep",
    ) -> None:
        self.model = model.eval()
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_num_seqs = max_num_seqs
        self.update = update
        self.policy_version = 0
        self.received: frozenset[str] = frozenset()
        self._waiting: deque[Request] = deque()
        self._rows: list[_Row] = []
        self._stopped: list[_Row] = []
        self._finished: list[Response] = []
        self._groups: dict[int, list[_Row]] = {}
        self._cache = SlotCache(model.config.num_hidden_layers)
        self._weights: dict[str, torch.Tensor] = self.model.state_dict()
        self._constants: dict[str, Hashable] = {}

    @property
    def members(self) -> tuple[int, ...]:
        return (os.getpid(),)

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + len(self._groups) + len(self._finished)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self, timeout: float = 0.0) -> list[Response]:
        finished, self._finished = self._finished, []
        with torch.inference_mode():
            self._restart()
            self._admit()
            if self._rows:
                self._decode()
        return finished + self._collect()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copies every tensor that it lacks in place; running requests fare as `update` says.

        Raises:
            KeyError: a name that the model does not have, or a tensor of the model that the push does not name.
        """
        if self.update == "wait":
            self._finish_running()
        outgoing = Outgoing.of(weights)
        held, self._constants = self._constants, {}
        with torch.no_grad():
            for name, tensor in outgoing.beyond(held):
                self._weights[name].copy_(tensor)
        if missing := self._weights.keys() - outgoing.names:
            raise KeyError(
                f"the push left {len(missing)} tensors unchanged: {', '.join(sorted(missing)[:3])}"
            )
        self._constants = outgoing.constants
        self.policy_version, self.received = version, outgoing.names
        self._stop()

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[list[float]]]:
        scores = []
        with torch.inference_mode():
            for sequence in sequences:
                ids = torch.tensor([list(sequence)], device=self.model.device)
                log_probs = self.model(ids).logits[0, :-1].float().log_softmax(-1)
                scores.append(log_probs.gather(-1, ids[0, 1:, None])[:, 0].tolist())
        return {ALONE: scores}

    def sleep(self) -> None:
        """Raises RuntimeError: no plan lets this engine share a GPU (`EnginePlan.sleeps`)."""
        raise RuntimeError(
            "a transformers engine cannot give its memory back: inference_model.backend=vllm can"
        )

    def wake(self) -> None:
        """It never slept."""

    def close(self) -> None:
        self._waiting.clear()
        self._rows.clear()
        self._stopped.clear()
        self._finished.clear()
        self._groups.clear()
        self._cache = SlotCache(self.model.config.num_hidden_layers)

    def _admit(self) -> None:
        """Move waiting requests into free rows and draw the first token of each new row."""
        requests: list[Request] = []
        done = [place for place, row in enumerate(self._rows) if row.done]
        running = len(self._rows) - len(done)
        free = self.max_num_seqs - running
        while self._waiting and (self._waiting[0].n <= free or not (running or requests)):
            requests.append(self._waiting.popleft())
            free -= requests[-1].n
        if not requests:
            return
        counts = [request.n for request in requests]
        seeds = iter(row_seeds([request.seed for request in requests], counts))
        rows: list[_Row] = []
        for request in requests:
            group = [_Row(request, next(seeds)) for _ in range(request.n)]
            self._groups[request.request_id] = group
            rows += group
        source = torch.from_numpy(np.arange(len(requests)).repeat(counts)).to(self.model.device)
        cache, logits = self._prefill([list(request.prompt) for request in requests])
        longest = max(len(request.prompt) + request.sampling.max_tokens for request in requests)
        places = done[: len(rows)]
        self._cache.admit(
            cache, source, longest, torch.tensor(places, dtype=torch.int64, device=self.model.device)
        )
        for place, row in zip(places, rows, strict=False):
            self._rows[place] = row
        self._rows += rows[len(places) :]
        self._prepare()
        samplings = Filter([row.request.sampling for row in rows], self.model.device)
        self._sample(rows, samplings, logits.index_select(0, source))

    def _prefill(self, sequences: list[list[int]]) -> tuple[DynamicCache, torch.Tensor]:
        """Right-padded forward. Returns the cache and the logits after each sequence's last token [P, V].

        Padding on the right needs no mask: a causal model's real positions never see it.
        """
        device = self.model.device
        lengths = np.array([len(sequence) for sequence in sequences])
        ids = np.zeros((len(sequences), lengths.max()), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = sequence
        last, where = map(torch.from_numpy, np.unique(lengths - 1, return_inverse=True))
        cache = DynamicCache()
        logits = self.model(
            torch.from_numpy(ids).to(device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=last.to(device),
        ).logits
        return cache, logits[torch.arange(len(sequences), device=device), where.to(device)]

    def _prepare(self) -> None:
        """Per-row constants of the decode loop, rebuilt whenever rows come or go."""
        self._filter = Filter([row.request.sampling for row in self._rows], self.model.device)
        self._lengths = np.array([len(row.request.prompt) for row in self._rows], dtype=np.int64)

    def _decode(self) -> None:
        """One token for every row that is not done; done rows ride along until the next compaction."""
        self._compact()
        if not self._rows:
            return
        device = self.model.device
        counts = np.array([len(row.completion.token_ids) for row in self._rows])
        positions = torch.from_numpy(self._lengths + counts - 1).to(device)
        tokens = torch.tensor([[row.completion.token_ids[-1]] for row in self._rows], device=device)
        logits = self.model(
            tokens,
            attention_mask=self._cache.at(positions),
            position_ids=positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]
        self._sample(self._rows, self._filter, logits)

    def _sample(self, rows: list[_Row], samplings: Filter, logits: torch.Tensor) -> None:
        seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        counters = np.array([len(row.completion.token_ids) for row in rows], dtype=np.uint64)
        tokens, log_probs = draw(samplings.log_probs(logits), seeds, counters)
        for row, token, log_prob in zip(rows, tokens.tolist(), log_probs.tolist(), strict=True):
            if not row.done:
                self._extend(row, token, log_prob)

    def _extend(self, row: _Row, token: int, log_prob: float) -> None:
        completion = row.completion
        completion.token_ids.append(token)
        completion.log_probs.append(log_prob)
        completion.policy_versions.append(self.policy_version)
        if token in self.eos_token_ids:
            completion.finish_reason, row.done = "stop", True
        elif len(completion.token_ids) >= row.request.sampling.max_tokens:
            completion.finish_reason, row.done = "length", True

    def _compact(self) -> None:
        running = [index for index, row in enumerate(self._rows) if not row.done]
        if running and len(running) >= _SHRINK_BELOW * len(self._rows):
            return
        if len(running) < len(self._rows):
            self._cache.keep(torch.tensor(running, dtype=torch.int64, device=self.model.device))
            self._rows = [self._rows[index] for index in running]
            self._prepare()

    def _collect(self) -> list[Response]:
        done = [number for number, group in self._groups.items() if all(row.done for row in group)]
        responses = [
            Response(number, [row.completion for row in self._groups.pop(number)]) for number in done
        ]
        if not self._groups:
            self._compact()
        return responses

    def _finish_running(self) -> None:
        with torch.inference_mode():
            while self._groups:
                self._decode()
                self._finished += self._collect()

    def _stop(self) -> None:
        """New weights make every cached key stale: running sequences go through the model again in the next step."""
        self._stopped += [row for row in self._rows if not row.done]
        self._rows = []
        self._cache = SlotCache(self.model.config.num_hidden_layers)

    def _restart(self) -> None:
        """Continue what a push has stopped, each row with its next token."""
        if not self._stopped:
            return
        rows, self._stopped = self._stopped, []
        cache, logits = self._prefill([row.sequence for row in rows])
        longest = max(len(row.request.prompt) + row.request.sampling.max_tokens for row in rows)
        self._cache.admit(cache, torch.arange(len(rows), device=self.model.device), longest)
        self._rows = rows
        self._prepare()
        self._sample(rows, self._filter, logits)
