"""Tests of token ids outside the tokenizer: their completions are invalid with each engine."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from config.schema.env import EnvConfig
from envs.group import Group, Sampling
from envs.reward_workers.service import RewardService
from envs.task import Completion, Example, Reward, Task
from tests.group_collection import make_group_rollout
from tests.rollout.conftest import EOS, VOCAB, StartEngine, tiny_llama
from tests.rollout.games import Game, Games
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import SteppedEngine
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine

QUICKSTART = Path(__file__).resolve().parents[2] / "torchgrpo" / "models" / "quickstart"


class RightAnswerTask(Task):
    """Task that scores every answer as right."""

    in_process = True
    min_score = -1.0

    def examples(self, split: str) -> Sequence[Example]:
        return []

    def reward(self, completion: Completion, example: Example) -> Reward:
        return Reward(1.0)


def padded_vocabulary_model(tokens: int) -> torch.nn.Module:
    """Makes a model whose likeliest token is always outside the tokenizer's vocabulary."""
    model = tiny_llama(False)
    with torch.no_grad():
        model.lm_head.weight[:tokens] = 0
    return model


def sample_group(engine: SteppedEngine) -> Group:
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    env = EnvConfig(dataset="x")
    loop = EngineLoop(engine, timeout=600.0, wait_timeout=600.0)
    service = RewardService(RightAnswerTask(env), env)
    games = Games(Game, {"reply": "?", "turns": 2, "reward": None})
    greedy = Sampling(temperature=0.0, max_tokens=6)
    group_rollout = make_group_rollout(loop, service, 1, greedy, tokenizer=tokenizer, environments=games)
    try:
        return loop.run(group_rollout.run_group(Example(({"role": "user", "content": "1+1="},), "2", 0), 0))
    finally:
        loop.close()


def check(group: Group, tokens: int) -> None:
    (one,), (verdict,) = group.completions, group.verdicts
    assert all(tokens <= token < VOCAB for token in one.token_ids)
    assert one.text == "".join(f"<no token: {token}>" for token in one.token_ids)
    assert (verdict.outcome, verdict.score, verdict.components) == ("invalid", -1.0, {"control_tokens": 1.0})


def test_the_transformers_engine_samples_such_an_id() -> None:
    tokens = len(AutoTokenizer.from_pretrained(QUICKSTART))
    check(sample_group(TransformersEngine(padded_vocabulary_model(tokens), [EOS])), tokens)


def test_vllm_samples_such_an_id(start_engine: StartEngine) -> None:
    tokens = len(AutoTokenizer.from_pretrained(QUICKSTART))
    engine = start_engine(False)
    engine.load(padded_vocabulary_model(tokens).state_dict().items(), version=1)
    check(sample_group(engine), tokens)
