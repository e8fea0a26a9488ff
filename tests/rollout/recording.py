"""Engine and reward service on the quickstart model that record what passes through them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envs.task import Completion, Example, Reward
from tests.tiny_models import ImmediateRewards
from torchgrpo.batches.batch import Batch
from torchgrpo.rollout.engines.interface import Request, Response
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine

QUICKSTART = Path(__file__).resolve().parents[2] / "torchgrpo" / "models" / "quickstart"
EOS, REPEATS, GROUPS = 2, 4, 6


class RecordingEngine(TransformersEngine):
    """Engine that records its requests and the completions it samples."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, [EOS])
        self.requests_by_id: dict[int, Request] = {}
        self.sampled_turns: list[tuple[Request, list[int]]] = []

    def submit(self, request: Request) -> None:
        self.requests_by_id[request.request_id] = request
        super().submit(request)

    def step(self, timeout: float = 0.0) -> list[Response]:
        responses = super().step(timeout)
        for response in responses:
            request = self.requests_by_id[response.request_id]
            self.sampled_turns += [(request, list(c.token_ids)) for c in response.completions]
        return responses


class RecordingRewards(ImmediateRewards):
    """Reward service that records the completions it scores."""

    def __init__(self) -> None:
        self.completions_by_row: dict[int, list[Completion]] = {}

    @property
    def scored_completions(self) -> list[Completion]:
        """Completions in the order of the batch's rows, not the order of scoring."""
        return [one for row in sorted(self.completions_by_row) for one in self.completions_by_row[row]]

    def score(self, completions: Sequence[Completion], examples: Sequence[Example]) -> list[Reward]:
        self.completions_by_row[examples[0].row] = list(completions)
        return [Reward(1.0) for _ in completions]


def addition_examples(count: int) -> list[Example]:
    return [Example(({"role": "user", "content": f"{10 + i}+{3 * i}="},), "", i) for i in range(count)]


def assert_every_sampled_token_is_trained_once(engine: RecordingEngine, batch: Batch) -> None:
    """Asserts that each sampled turn is in one row, after its request's prompt."""
    turns = sorted((request.prompt, tuple(ids)) for request, ids in engine.sampled_turns)
    trained = []
    tokens = batch.tokens
    for row in range(len(batch)):
        prompt = tokens.prompt[row][tokens.prompt_mask[row]].tolist()
        length = int(tokens.response_mask[row].sum())
        ids, mask = tokens.response[row][:length].tolist(), tokens.loss_mask[row][:length].tolist()
        starts = [at for at in range(length) if mask[at] and not (at and mask[at - 1])]
        for start in starts:
            end = next((at for at in range(start, length) if not mask[at]), length)
            trained.append((tuple(prompt + ids[:start]), tuple(ids[start:end])))
    assert sorted(trained) == turns
