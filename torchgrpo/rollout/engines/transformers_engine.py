"""The rollout engine for any machine: a transformers model in this process.

submit ─▶ decoder ─▶ step() returns finished groups          load: weights between two steps

Who decodes follows from the architecture. Where every layer is plain causal attention (`plain_attention`), requests of
any length run together and share their prompts (`running_decoder.py`). Every other model, with sliding windows,
recurrent layers or an attention of its own, decodes by `generate` and the cache classes of transformers
(`library_decoder.py`): slower, and right for whatever transformers has.
"""

import os
from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from envs.group import ALONE
from torchgrpo.plan.model_shape import plain_attention
from torchgrpo.rollout.engines.interface import Request, Response, SequenceScores
from torchgrpo.rollout.engines.library_decoder import LibraryDecoder
from torchgrpo.rollout.engines.running_decoder import RunningDecoder
from torchgrpo.rollout.weights.outgoing import Outgoing

_SCORED_POSITIONS = 256
"""Positions that are scored at a time, each with the logits of the whole vocabulary, unless one sequence has more."""


class TransformersEngine:
    """Samples from `model`; speaks the protocols of `Engine`.

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
        self.update = update
        self.policy_version = 0
        plain = plain_attention(model.config.to_dict())
        kind: type[RunningDecoder] | type[LibraryDecoder] = RunningDecoder if plain else LibraryDecoder
        self.decoder = kind(self.model, frozenset(eos_token_ids), max_num_seqs)  # is called in inference mode
        self._finished: list[Response] = []
        self._weights: dict[str, torch.Tensor] = self.model.state_dict()
        self._constants: dict[str, Hashable] = {}

    @property
    def members(self) -> tuple[int, ...]:
        return (os.getpid(),)

    @property
    def in_flight(self) -> int:
        return self.decoder.in_flight + len(self._finished)

    def submit(self, request: Request) -> None:
        self.decoder.submit(request)

    def step(self, timeout: float = 0.0) -> list[Response]:
        finished, self._finished = self._finished, []
        with torch.inference_mode():
            return finished + self.decoder.step(self.policy_version)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copies every tensor that it lacks in place; running requests fare as `update` says.

        Raises:
            KeyError: a name that the model does not have, or a tensor of the model that the push does not name.
        """
        if self.update == "wait":
            with torch.inference_mode():
                while self.decoder.running:
                    self._finished += self.decoder.advance(self.policy_version)
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
        self.policy_version = version
        self.decoder.renew()

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, SequenceScores]:
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
        return {ALONE: SequenceScores(scores)}

    def sleep(self) -> None:
        """Raises RuntimeError: no plan lets this engine share a GPU (`EnginePlan.sleeps`)."""
        raise RuntimeError(
            "a transformers engine cannot give its memory back: inference_model.backend=vllm can"
        )

    def wake(self) -> None:
        """It never slept."""

    def close(self) -> None:
        self.decoder.clear()
        self._finished.clear()


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
