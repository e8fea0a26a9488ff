"""Engine over a transformers model in this process, which chooses one of two decoders.

submit ─▶ decoder ─▶ step() returns finished groups          load: weights between two steps

The architecture determines the decoder. If every layer is plain causal attention (`plain_attention`), requests of any
length run together and share their prompts (`continuous_batching_decoder.py`). Other models, with sliding windows,
recurrent layers or another attention, decode by `generate` and the cache classes of transformers
(`generate_decoder.py`), which is slower but supports every model of transformers.
"""

import os
from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from envs.group import SINGLE_ENGINE_NAME
from torchgrpo.plan.model_shape import plain_attention
from torchgrpo.rollout.engines.completion_ends import CompletionEnds
from torchgrpo.rollout.engines.continuous_batching_decoder import ContinuousBatchingDecoder
from torchgrpo.rollout.engines.generate_decoder import GenerateDecoder
from torchgrpo.rollout.engines.interface import Request, Response, SequenceScores
from torchgrpo.rollout.weights.weight_update import WeightUpdate

_MAX_BATCH_POSITIONS = 256
"""Positions of a scored batch, each with logits of the whole vocabulary; a longer sequence is a batch of its own."""


class TransformersEngine:
    """Samples from `model`, behind the protocols of `Engine`.

    Args:
        model: a causal language model, which the engine owns and sets to evaluation mode.
        eos_token_ids: any of these ends a completion.
        max_num_seqs: rows that run together; further requests wait.
        update: treatment of running requests at a push. "wait" finishes them with the old weights first. "keep" and
            "abort" are the same here: the push copies weights, and the next step computes the cache again.
        tokenizer: finds stop strings; None if no request has any.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Sequence[int],
        max_num_seqs: int = 256,
        update: str = "keep",
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.model = model.eval()
        self.update = update
        self.policy_version = 0
        plain = plain_attention(model.config.to_dict())
        decoder_class: type[ContinuousBatchingDecoder] | type[GenerateDecoder] = (
            ContinuousBatchingDecoder if plain else GenerateDecoder
        )
        self.ends = CompletionEnds(eos_token_ids, tokenizer)
        self.decoder = decoder_class(self.model, self.ends, max_num_seqs)  # must be called in inference mode
        self._finished_responses: list[Response] = []
        self._weights: dict[str, torch.Tensor] = self.model.state_dict()
        self._constants: dict[str, Hashable] = {}

    @property
    def engine_pids(self) -> tuple[int, ...]:
        return (os.getpid(),)

    @property
    def in_flight(self) -> int:
        return self.decoder.in_flight + len(self._finished_responses)

    def submit(self, request: Request) -> None:
        """Queues a request. Raises ValueError for stop strings without a tokenizer."""
        self.ends.check_request(request)
        self.decoder.submit(request)

    def cancel(self, request_id: int) -> None:
        with torch.inference_mode():
            self.decoder.cancel(request_id)
        self._finished_responses = [one for one in self._finished_responses if one.request_id != request_id]

    def step(self, timeout: float = 0.0) -> list[Response]:
        finished, self._finished_responses = self._finished_responses, []
        with torch.inference_mode():
            return finished + self.decoder.step(self.policy_version)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copies every tensor that it lacks in place; `update` decides about running requests.

        Raises:
            KeyError: the model lacks a name of the push, or the push lacks a tensor of the model.
        """
        if self.update == "wait":
            with torch.inference_mode():
                while self.decoder.has_running_rows:
                    self._finished_responses += self.decoder.advance(self.policy_version)
        weight_update = WeightUpdate.from_pairs(weights)
        constants_before, self._constants = self._constants, {}
        with torch.no_grad():
            for name, tensor in weight_update.missing_tensors(constants_before):
                self._weights[name].copy_(tensor)
        if missing := self._weights.keys() - weight_update.names:
            raise KeyError(f"the push left {len(missing)} tensors unchanged: {', '.join(sorted(missing)[:3])}")
        self._constants = weight_update.constants
        self.policy_version = version
        self.decoder.drop_cache()

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, SequenceScores]:
        scores: list[list[float]] = []
        with torch.inference_mode():
            for batch in _padded_batches(sequences):
                # Padding behind a sequence does not change its log-probs, since attention is causal.
                ids = pad_sequence([torch.tensor(one) for one in batch], batch_first=True).to(self.model.device)
                log_probs = self.model(ids).logits[:, :-1].float().log_softmax(-1)
                scores_of_batch = log_probs.gather(-1, ids[:, 1:, None])[:, :, 0].tolist()
                scores += [row[: len(one) - 1] for row, one in zip(scores_of_batch, batch, strict=True)]
        return {SINGLE_ENGINE_NAME: SequenceScores(scores)}

    def sleep(self) -> None:
        """Raises RuntimeError: no plan lets this engine share a GPU (`EnginePlan.sleeps`)."""
        raise RuntimeError("a transformers engine cannot release its memory; set inference_model.backend=vllm")

    def wake(self) -> None:
        """Does nothing, since this engine never sleeps."""

    def close(self) -> None:
        self.decoder.clear()
        self._finished_responses.clear()


def _padded_batches(sequences: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Yields sequences in order, in batches of at most `_MAX_BATCH_POSITIONS` positions with padding."""
    batch: list[Sequence[int]] = []
    for one in sequences:
        if batch and (len(batch) + 1) * max(map(len, [*batch, one])) > _MAX_BATCH_POSITIONS:
            yield batch
            batch = []
        batch.append(one)
    if batch:
        yield batch
