"""The rollout engine for any machine: a transformers model with continuous batching in this process.

A prompt goes through the model once for all who ask it between two pushes (`prefill.py`). Every running completion is
a row of one `RunningCache`; a step draws one token for all rows, whatever their lengths; finished rows leave, waiting
requests take their place.

    submit ─▶ waiting ──admit: prefill, n rows──▶ rows ──decode──▶ finished groups ─▶ step() returns them
                                                  │ ▲
                                   a push ─▶ stopped ──prefill of prompt and partial answer
"""

import os
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from envs.group import ALONE, SampledCompletion
from rollout.engines.decode_step import DecodeStep
from rollout.engines.draw import Filter, draw, row_seeds
from rollout.engines.partial_attention import NAME, attend_by_groups
from rollout.engines.prefill import Prefill
from rollout.engines.running_cache import Band, Computed, RunningCache, alike
from rollout.engines.sampler import Request, Response
from rollout.weights.outgoing import Outgoing

_FREE_TO_ADMIT = 1 / 8
"""Share of the places that is free before waiting requests are admitted: together they are one band of the cache."""
_SCORED_POSITIONS = 256
"""That are scored at a time, each with the logits of the whole vocabulary, unless one sequence has more."""


@dataclass
class _Row:
    """One running completion."""

    request: Request
    seed: int
    completion: SampledCompletion = field(default_factory=lambda: SampledCompletion([], [], [], "abort"))
    done: bool = False

    @property
    def sequence(self) -> tuple[int, ...]:
        return (*self.request.prompt, *self.completion.token_ids)


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
        self._prefill = Prefill(self.model)
        self._cache = RunningCache(whole=not attend_by_groups(self.model))
        lean = not self._cache.whole and DecodeStep.fits(self.model)
        self._decode_step = DecodeStep(self.model) if lean else None
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
        scores: list[list[float]] = []
        with torch.inference_mode():
            for some in _side_by_side(sequences):
                # Padding behind a sequence changes nothing in it, for no token sees what follows.
                ids = pad_sequence([torch.tensor(one) for one in some], batch_first=True).to(
                    self.model.device
                )
                log_probs = self.model(ids).logits[:, :-1].float().log_softmax(-1)
                drawn = log_probs.gather(-1, ids[:, 1:, None])[:, :, 0].tolist()
                scores += [row[: len(one) - 1] for row, one in zip(drawn, some, strict=True)]
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
        self._cache.bands.clear()
        self._prefill.clear()
        self._forget_packed()

    def _admit(self) -> None:
        """Move waiting requests into free places and draw the first token of each new row."""
        free = self.max_num_seqs - len(self._rows)
        if self._rows and free < self.max_num_seqs * _FREE_TO_ADMIT:
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
        if not self._cache.whole and implementation != NAME:
            raise RuntimeError(f"the model is the engine's own, but its attention is {implementation}")
        positions, mask = self._cache.begin(self.model.device)
        last = torch.tensor([row.completion.token_ids[-1] for row in self._rows]).to(self.model.device)
        if self._decode_step is None:
            logits = self._whole_forward(last, positions, mask)
        else:
            logits = self._decode_step(last, positions, self._cache)
        self._cache.end()
        self._sample(self._rows, self._filter, logits)
        self._drop_ended()

    def _whole_forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Logits [rows, vocabulary] of the model's own forward."""
        logits: torch.Tensor = self.model(
            tokens[:, None],
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            **({} if self._cache.whole else {"running": self._cache}),
        ).logits
        return logits[:, -1]

    def _sample(self, rows: list[_Row], samplings: Filter, logits: torch.Tensor) -> None:
        seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        counters = np.array([len(row.completion.token_ids) for row in rows], dtype=np.uint64)
        tokens, log_probs = draw(samplings.log_probs(logits), seeds, counters)
        for row, token, log_prob in zip(rows, tokens.tolist(), log_probs.tolist(), strict=True):
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
        if not rows and not self._waiting:
            self._forget_packed()

    def _forget_packed(self) -> None:
        if self._decode_step is not None:
            self._decode_step.forget()

    def _collect(self) -> list[Response]:
        done = [number for number, group in self._groups.items() if all(row.done for row in group)]
        return [Response(number, [row.completion for row in self._groups.pop(number)]) for number in done]

    def _finish_running(self) -> None:
        with torch.inference_mode():
            while self._groups:
                self._decode()
                self._finished += self._collect()

    def _stop(self) -> None:
        """New weights make every cached key stale: running sequences go through the model again in the next step."""
        self._stopped += self._rows
        self._rows = []
        self._cache.bands.clear()
        self._prefill.clear()
        self._forget_packed()

    def _restart(self) -> None:
        """Continue what a push has stopped, each row with its next token."""
        stopped, self._stopped = self._stopped, []
        stopped.sort(key=_age)
        for age, together in groupby(stopped, key=_age):
            self._continue(list(together), age)

    def _continue(self, rows: list[_Row], age: int) -> None:
        """One band of rows that have drawn `age` tokens each; the prompt of a group is that of its first row."""
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


def _side_by_side(sequences: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """In their order, as many at a time as have `_SCORED_POSITIONS` with their padding."""
    some: list[Sequence[int]] = []
    for one in sequences:
        if some and (len(some) + 1) * max(map(len, [*some, one])) > _SCORED_POSITIONS:
            yield some
            some = []
        some.append(one)
    if some:
        yield some


def _age(row: _Row) -> int:
    return len(row.completion.token_ids)
