"""Builders of groups for tests: by hand, at random, or sampled by the transformers engine."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from envs.chat import encode_prompt
from envs.group import (
    OUTCOMES,
    FinishReason,
    Group,
    GroupTimes,
    SampledCompletion,
    Sampling,
    SequenceStart,
    Turn,
    Verdict,
)
from envs.task import Completion, Example, Outcome
from tests.tiny_models import EOS, LetterTokenizer, numbered_examples, tiny_llama
from torchgrpo.batches.batch import Batch
from torchgrpo.batches.rollout import Rollout
from torchgrpo.rollout.engines.interface import Request
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.training.learner import Learner

TIMES = GroupTimes(0.0, 1.0, 2.0)


def make_completion(
    tokens: int | Sequence[int] = 3,
    score: float = 0.0,
    components: dict[str, float] | None = None,
    *,
    outcome: Outcome = "scored",
    finish_reason: FinishReason = "stop",
    sampled_mask: Sequence[bool] = (),
    versions: int | Sequence[int] = 0,
    log_probs: float | Sequence[float] = -1.0,
    sequence_starts: Sequence[SequenceStart] = (),
    turns: Sequence[Turn] = (),
    text: str = "",
    error: str = "",
) -> SampledCompletion:
    """Makes a completion with a verdict.

    tokens: token ids, or their number. sampled_mask: per token, False for a token of the environment; empty if all are
    sampled. versions, log_probs: one value for all tokens, or one per token. turns: their messages and replies are
    also the messages in the input of the reward.
    """
    ids = list(range(1, tokens + 1)) if isinstance(tokens, int) else list(tokens)
    completion = SampledCompletion(
        token_ids=ids,
        log_probs=[log_probs] * len(ids) if isinstance(log_probs, float) else list(log_probs),
        policy_versions=[versions] * len(ids) if isinstance(versions, int) else list(versions),
        finish_reason=finish_reason,
        sampled_mask=list(sampled_mask),
        text=text,
        verdict=Verdict(score, components or {}, outcome),
        sequence_starts=list(sequence_starts),
        turns=list(turns),
        error=error,
    )
    messages = tuple(message for turn in turns for message in (turn.message, *turn.replies))
    truncated = finish_reason == "length"
    return replace(completion, reward_input=Completion("", completion.num_sampled_tokens, truncated, turns=messages))


def make_group(
    group_id: int,
    completions: Sequence[SampledCompletion],
    *,
    prompt: Sequence[int] = (5, 6),
    source: str = "",
    temperature: float = 1.0,
    unselected_candidates: Sequence[SampledCompletion] = (),
    replaces: Group | None = None,
) -> Group:
    example = Example(({"role": "user", "content": "1+1="},), "2", group_id, source)
    return Group(
        group_id=group_id,
        example=example,
        prompt=tuple(prompt),
        prompt_text="1+1=",
        sampling=Sampling(temperature=temperature),
        completions=list(completions),
        times=TIMES,
        unselected_candidates=list(unselected_candidates),
        replaces=replaces,
    )


def random_group(
    rng: random.Random, group_id: int, repeats: int, source: str = "", candidates: int = 0, num_replaced: int = 0
) -> Group:
    """Makes a group with random lengths, outcomes, finish reasons, turns and versions.

    candidates: number of unselected candidates. num_replaced: length of the chain of replaced groups.
    """

    def completion() -> SampledCompletion:
        length = rng.randint(1, 9)
        return make_completion(
            [rng.randrange(1, 40) for _ in range(length)],
            rng.choice((0.0, 0.25, 1.0)),
            {"accuracy": rng.choice((0.0, 0.5, 1.0)), "format": rng.random()},
            outcome=rng.choices(OUTCOMES, (6, 1, 1))[0],
            finish_reason=rng.choice(("stop", "length")),
            sampled_mask=rng.choice(([], [True, *(rng.random() < 0.7 for _ in range(length - 1))])),
            versions=[rng.randint(3, 5) for _ in range(length)],
            log_probs=[-rng.random() for _ in range(length)],
        )

    return make_group(
        group_id,
        [completion() for _ in range(repeats)],
        prompt=[rng.randrange(1, 40) for _ in range(rng.randint(1, 6))],
        source=source,
        temperature=rng.choice((0.5, 1.0)),
        unselected_candidates=[completion() for _ in range(candidates)],
        replaces=random_group(rng, 1000 * num_replaced + group_id, repeats, source, candidates, num_replaced - 1)
        if num_replaced
        else None,
    )


def length_verdict(group_id: int, index: int, text: str) -> Verdict:
    return Verdict(float(len(text)), {"length": 1.0}, "scored")


def sample_groups(
    model: PreTrainedModel,
    examples: Sequence[Example],
    repeats: int,
    max_tokens: int,
    temperature: float = 1.0,
    judge: Callable[[int, int, str], Verdict] = length_verdict,
) -> list[Group]:
    """Samples groups 0, 1, ... of these examples from `model` with the transformers engine.

    judge: returns the verdict for group id, index of the completion in the group, and text.
    """
    tokenizer, engine = LetterTokenizer(), TransformersEngine(model, [EOS])
    prompts = [encode_prompt(tokenizer, example) for example in examples]  # type: ignore[arg-type]
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    for group_id, prompt in enumerate(prompts):
        engine.submit(Request(group_id, tuple(prompt), repeats, sampling, seed=group_id))
    completions: dict[int, list[SampledCompletion]] = {}
    while engine.in_flight:
        for response in engine.step(1.0):
            texts = tokenizer.batch_decode([one.token_ids for one in response.completions])
            completions[response.request_id] = [
                replace(one, text=text, verdict=judge(response.request_id, index, text))
                for index, (one, text) in enumerate(zip(response.completions, texts, strict=True))
            ]
    return [
        Group(group_id, example, tuple(prompt), "", sampling, completions[group_id], TIMES)
        for group_id, (example, prompt) in enumerate(zip(examples, prompts, strict=True))
    ]


def sample_tiny_groups(temperature: float = 1.0, num_groups: int = 6, repeats: int = 4) -> list[Group]:
    """Samples groups of the tiny model, with prompts and responses of unequal length."""
    examples = numbered_examples(200)[3 : 3 + 5 * num_groups : 5]
    return sample_groups(tiny_llama(), examples, repeats, max_tokens=9, temperature=temperature)


def credit_groups(learner: Learner, groups: Sequence[Group], trained_at: int | None = None) -> Batch:
    """Returns the batch of groups with the learner's advantages."""
    return learner.credit(Rollout.from_groups(groups, trained_at)).batch
