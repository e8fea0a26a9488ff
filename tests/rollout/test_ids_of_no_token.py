"""Ids that a model has rows for and its tokenizer no token: what holds one is invalid, with each engine."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from config.schema.env import EnvConfig
from envs.group import Group, Sampling
from envs.judging.service import RewardService
from envs.task import Completion, Example, Reward, Task
from envs.turns import Conversation, ThinkAgain
from tests.generating import generation
from tests.rollout.conftest import EOS, VOCAB, StartEngine, tiny_llama
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import SteppedEngine
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine

QUICKSTART = Path(__file__).resolve().parents[2] / "torchgrpo" / "models" / "quickstart"


class Liked(Task):
    """Every answer that it sees is right."""

    in_process = True
    min_score = -1.0

    def examples(self, split: str) -> Sequence[Example]:
        return []

    def reward(self, completion: Completion, example: Example) -> Reward:
        return Reward(1.0)


def beyond_the_tokenizer(tokens: int) -> torch.nn.Module:
    """A model whose likeliest token is always one that the tokenizer does not have."""
    model = tiny_llama(False)
    with torch.no_grad():
        model.lm_head.weight[:tokens] = 0
    return model


def drawn_by(engine: SteppedEngine) -> Group:
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    env = EnvConfig(dataset="x")
    loop = EngineLoop(engine, timeout=600.0, wait_timeout=600.0)
    service = RewardService(Liked(env), env)
    conversation = Conversation(tokenizer, [ThinkAgain("?")], 2)
    greedy = Sampling(temperature=0.0, max_tokens=6)
    made = generation(loop, service, 1, greedy, tokenizer=tokenizer, conversation=conversation)
    try:
        return loop.run(made.run_group(Example(({"role": "user", "content": "1+1="},), "2", 0), 0))
    finally:
        loop.close()


def check(group: Group, tokens: int) -> None:
    (one,), (verdict,) = group.completions, group.verdicts
    assert all(tokens <= token < VOCAB for token in one.token_ids)
    assert one.text == "".join(f"<no token: {token}>" for token in one.token_ids)
    assert (verdict.outcome, verdict.score, verdict.parts) == ("invalid", -1.0, {"control_tokens": 1.0})


def test_the_transformers_engine_draws_one() -> None:
    tokens = len(AutoTokenizer.from_pretrained(QUICKSTART))
    check(drawn_by(TransformersEngine(beyond_the_tokenizer(tokens), [EOS])), tokens)


def test_vllm_draws_one(start_engine: StartEngine) -> None:
    tokens = len(AutoTokenizer.from_pretrained(QUICKSTART))
    engine = start_engine(False)
    engine.load(beyond_the_tokenizer(tokens).state_dict().items(), version=1)
    check(drawn_by(engine), tokens)
