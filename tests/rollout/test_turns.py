"""Tests of several turns on a real engine: token ids, masks, versions, texts and log-probs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from config.schema.env import EnvConfig
from config.schema.models import ModelConfig
from envs.environments.episode_environments import EpisodeEnvironments
from envs.group import Group, SampledCompletion, Sampling
from tests.group_collection import EPISODE_LIMITS, make_group_collector, make_group_rollout
from tests.rollout.games import Game, Games
from tests.rollout.recording import (
    EOS,
    GROUPS,
    QUICKSTART,
    REPEATS,
    RecordingEngine,
    RecordingRewards,
    addition_examples,
    assert_every_sampled_token_is_trained_once,
)
from torchgrpo.batches.batch import Batch, collate
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import Response, generate
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.training.model_loading import load_model
from torchgrpo.training.response_scorer import ResponseScorer


def reflections(prompt: str, turns: int) -> dict[str, Any]:
    """Returns the options of a group rollout whose completions have up to `turns` turns."""
    env = EnvConfig(dataset="x", max_steps=turns, reasoning=True, reasoning_prompt=prompt)
    return {"environments": EpisodeEnvironments(env), "limits": replace(EPISODE_LIMITS, turns=turns)}


def sample_completions(
    engine: TransformersEngine, tokenizer: Any, numbers: Sequence[int], repeats: int, max_tokens: int, **options: Any
) -> list[list[SampledCompletion]]:
    """Samples the completions of the additions with these numbers, without rewards."""
    loop, sampling = EngineLoop(engine, timeout=600.0, wait_timeout=600.0), Sampling(max_tokens=max_tokens)
    rollout = make_group_rollout(loop, RecordingRewards(), repeats, sampling, tokenizer=tokenizer, **options)
    examples = addition_examples(max(numbers) + 1)
    requests = [rollout.make_request(rollout.encoder.encode(examples[number]), number) for number in numbers]
    completions = loop.run_all(
        [rollout.generate(request, examples[number]) for request, number in zip(requests, numbers, strict=True)]
    )
    loop.close()
    return completions


def collect_groups(
    model: Any, tokenizer: Any, turns: int, max_tokens: int = 24
) -> tuple[list[Group], RecordingEngine, RecordingRewards]:
    engine, rewards = RecordingEngine(model), RecordingRewards()
    collector = make_group_collector(
        engine,
        rewards,
        addition_examples(GROUPS),
        REPEATS,
        Sampling(max_tokens=max_tokens),
        seed=3,
        tokenizer=tokenizer,
        **reflections("+?", turns),
    )
    return collector.collect(GROUPS), engine, rewards


def collect_batch(
    model: Any, tokenizer: Any, turns: int, max_tokens: int = 24
) -> tuple[Batch, RecordingEngine, RecordingRewards]:
    groups, engine, rewards = collect_groups(model, tokenizer, turns, max_tokens)
    return collate(groups), engine, rewards


def test_trained_token_ids_equal_sampled_token_ids(model: Any, tokenizer: Any) -> None:
    batch, engine, _ = collect_batch(model, tokenizer, turns=3)
    assert_every_sampled_token_is_trained_once(engine, batch)
    assert len(engine.sampled_turns) > 2 * GROUPS * REPEATS
    assert not batch.tokens.loss_mask[~batch.tokens.response_mask].any()


def test_environment_tokens_come_from_the_template_and_have_log_prob_zero(model: Any, tokenizer: Any) -> None:
    batch, _, _ = collect_batch(model, tokenizer, turns=2)
    environment_mask = batch.tokens.response_mask & ~batch.tokens.loss_mask
    reply = tokenizer.encode("<user>+?<assistant>", add_special_tokens=False)
    assert batch.tokens.response[environment_mask].tolist() == reply * (GROUPS * REPEATS)
    assert (batch.sample_log_prob[environment_mask] == 0).all()
    assert (batch.sample_log_prob[batch.tokens.loss_mask] < 0).all()


def test_trainer_log_probs_equal_engine_log_probs(model: Any, tokenizer: Any) -> None:
    batch, _, _ = collect_batch(model, tokenizer, turns=3)
    mask = batch.tokens.loss_mask
    for packs in (True, False):
        with torch.no_grad():
            scored = ResponseScorer(model, packs, chunk_size=64)(batch.tokens).log_prob
        torch.testing.assert_close(scored[mask], batch.sample_log_prob[mask], atol=1e-4, rtol=1e-4)
        assert (scored[~mask] == 0).all()


def test_rewards_receive_the_last_turn(model: Any, tokenizer: Any) -> None:
    batch, _, rewards = collect_batch(model, tokenizer, turns=2)
    tokens = batch.tokens
    assert len(rewards.scored_completions) == len(batch)
    for row, scored_completion in enumerate(rewards.scored_completions):
        length = int(tokens.response_mask[row].sum())
        text = tokenizer.decode(tokens.response[row][:length].tolist())
        assert scored_completion.text == text.rpartition("<user>+?<assistant>")[2].removesuffix("<eos>")
        assert scored_completion.num_tokens == int(tokens.loss_mask[row].sum())


def test_texts_of_a_group_equal_its_decoded_tokens(model: Any, tokenizer: Any) -> None:
    groups, _, _ = collect_groups(model, tokenizer, turns=2)
    for group in groups:
        assert group.prompt_text == tokenizer.decode(list(group.prompt))
        for one in group.completions:
            decoded_text = tokenizer.decode(one.token_ids, skip_special_tokens=True)
            assert one.reward_input is not None and one.text.endswith(one.reward_input.text)
            assert one.text == decoded_text
            assert one.text.count("+?") == 1


def test_completions_without_replies_equal_engine_completions(model: Any, tokenizer: Any) -> None:
    """The engine gets the prompt of the group, with another seed for each completion."""
    engine = RecordingEngine(model)
    games = Games(Game, {"turns": 1, "reward": None})
    groups = sample_completions(engine, tokenizer, range(4), repeats=3, max_tokens=8, environments=games)
    requests = list(engine.requests_by_id.values())
    assert len({request.seed for request in requests}) == 12
    assert {request.sampling for request in requests} == {Sampling(max_tokens=8)}
    expected = [
        one for response in generate(TransformersEngine(model, [EOS]), requests) for one in response.completions
    ]
    completions = [one for group in groups for one in group]
    assert [replace(one, sampled_mask=[], turns=[]) for one in completions] == expected
    assert all(one.sampled_mask == [True] * len(one.token_ids) for one in completions)


def test_max_tokens_bounds_the_whole_response(model: Any, tokenizer: Any) -> None:
    batch, engine, rewards = collect_batch(model, tokenizer, turns=4, max_tokens=12)
    lengths = batch.tokens.response_mask.sum(-1)
    assert int(lengths.max()) <= 12
    assert all(len(request.prompt) + request.sampling.max_tokens <= 9 + 12 for request, _ in engine.sampled_turns)
    truncated_flags = [scored_completion.truncated for scored_completion in rewards.scored_completions]
    assert all(truncated_flags)  # four turns never fit: a reply without room ends the response as truncated
    ends = batch.tokens.loss_mask.gather(1, lengths[:, None] - 1)
    assert ends.all()  # no reply is the end of a response


def test_tokens_do_not_depend_on_concurrent_requests(model: Any, tokenizer: Any) -> None:
    def sample(*numbers: int) -> list[list[list[int]]]:
        engine, options = TransformersEngine(model, [EOS]), reflections("?", turns=3)
        groups = sample_completions(engine, tokenizer, numbers, repeats=3, max_tokens=20, **options)
        return [[one.token_ids for one in group] for group in groups]

    together = sample(*range(4))
    assert [sample(number)[0] for number in range(4)] == together


class PushingEngine(TransformersEngine):
    """Engine that loads weights of a new version after every step."""

    def step(self, timeout: float = 0.0) -> list[Response]:
        responses = super().step(timeout)
        self.load(self.model.state_dict().items(), self.policy_version + 1)
        return responses


class RenamingEngine(RecordingEngine):
    """Engine whose every answer has another engine name, as in a pool."""

    def step(self, timeout: float = 0.0) -> list[Response]:
        responses = super().step(timeout)
        for number, response in enumerate(responses, len(self.sampled_turns)):
            for one in response.completions:
                one.engine = f"engine {number}"
        return responses


def test_the_engine_of_a_completion_is_that_of_its_last_turn(model: Any, tokenizer: Any) -> None:
    engine, options = RenamingEngine(model), reflections("?", turns=3)
    ((completion,),) = sample_completions(engine, tokenizer, [0], repeats=1, max_tokens=24, **options)
    assert len(engine.sampled_turns) > 1 and completion.engine == f"engine {len(engine.sampled_turns)}"


def test_every_token_has_the_version_that_sampled_it(tokenizer: Any) -> None:
    engine = PushingEngine(load_model(ModelConfig(name=str(QUICKSTART)), torch.device("cpu")), [EOS])
    options = reflections("?", turns=3)
    (completions,) = sample_completions(engine, tokenizer, [0], repeats=2, max_tokens=24, **options)
    for completion in completions:
        sampled_versions = [
            v for v, own in zip(completion.policy_versions, completion.sampled_mask, strict=True) if own
        ]
        assert len(set(sampled_versions)) >= 3 and sampled_versions == sorted(sampled_versions)
        assert completion.policy_versions == sorted(completion.policy_versions)
        assert len(completion.policy_versions) == len(completion.token_ids) == len(completion.log_probs)
    assert engine.in_flight == 0
