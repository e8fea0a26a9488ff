"""Groups made by hand, made at random, and drawn by the real engine, for tests of whoever reads them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from envs.chat import encode_prompt
from envs.group import OUTCOMES, FinishReason, Group, SampledCompletion, Sampling, Times, Verdict
from envs.task import Completion, Example, Outcome
from tests.tiny import EOS, LetterTokenizer, numbered_examples, tiny_llama
from torchgrpo.batches.batch import Batch
from torchgrpo.batches.rollout import Rollout
from torchgrpo.rollout.engines.interface import Request
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.training.learner import Learner

TIMES = Times(0.0, 1.0, 2.0)


def make_completion(
    tokens: int | Sequence[int] = 3,
    score: float = 0.0,
    parts: dict[str, float] | None = None,
    *,
    outcome: Outcome = "scored",
    finish_reason: FinishReason = "stop",
    sampled: Sequence[bool] = (),
    versions: int | Sequence[int] = 0,
    log_probs: float | Sequence[float] = -1.0,
) -> SampledCompletion:
    """tokens: their ids, or how many. versions, log_probs: one for all tokens, or one a token."""
    ids = list(range(1, tokens + 1)) if isinstance(tokens, int) else list(tokens)
    made = SampledCompletion(
        token_ids=ids,
        log_probs=[log_probs] * len(ids) if isinstance(log_probs, float) else list(log_probs),
        policy_versions=[versions] * len(ids) if isinstance(versions, int) else list(versions),
        finish_reason=finish_reason,
        sampled=list(sampled),
        verdict=Verdict(score, parts or {}, outcome),
    )
    made.shown = Completion("", made.num_drawn, finish_reason == "length")
    return made


def make_group(
    group_id: int,
    completions: Sequence[SampledCompletion],
    *,
    prompt: Sequence[int] = (5, 6),
    source: str = "",
    temperature: float = 1.0,
    left_out: Sequence[SampledCompletion] = (),
    in_place_of: Group | None = None,
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
        left_out=list(left_out),
        in_place_of=in_place_of,
    )


def random_group(
    chance: random.Random, group_id: int, repeats: int, source: str = "", candidates: int = 0, chain: int = 0
) -> Group:
    """Unequal lengths, every outcome and finish reason, turns, versions; `candidates` left out, `chain` replaced."""

    def completion() -> SampledCompletion:
        length = chance.randint(1, 9)
        return make_completion(
            [chance.randrange(1, 40) for _ in range(length)],
            chance.choice((0.0, 0.25, 1.0)),
            {"accuracy": chance.choice((0.0, 0.5, 1.0)), "format": chance.random()},
            outcome=chance.choices(OUTCOMES, (6, 1, 1))[0],
            finish_reason=chance.choice(("stop", "length")),
            sampled=chance.choice(([], [True, *(chance.random() < 0.7 for _ in range(length - 1))])),
            versions=[chance.randint(3, 5) for _ in range(length)],
            log_probs=[-chance.random() for _ in range(length)],
        )

    return make_group(
        group_id,
        [completion() for _ in range(repeats)],
        prompt=[chance.randrange(1, 40) for _ in range(chance.randint(1, 6))],
        source=source,
        temperature=chance.choice((0.5, 1.0)),
        left_out=[completion() for _ in range(candidates)],
        in_place_of=random_group(chance, 1000 * chain + group_id, repeats, source, candidates, chain - 1)
        if chain
        else None,
    )


def by_length(group_id: int, place: int, text: str) -> Verdict:
    return Verdict(float(len(text)), {"length": 1.0}, "scored")


def drawn_groups(
    model: PreTrainedModel,
    examples: Sequence[Example],
    repeats: int,
    max_tokens: int,
    temperature: float = 1.0,
    judge: Callable[[int, int, str], Verdict] = by_length,
) -> list[Group]:
    """Groups 0, 1, ... of these examples, drawn by the transformers engine from `model`.

    judge: of the group's id, the completion's place in the group, and its text.
    """
    tokenizer, engine = LetterTokenizer(), TransformersEngine(model, [EOS])
    prompts = [encode_prompt(tokenizer, example) for example in examples]  # type: ignore[arg-type]
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    for group_id, prompt in enumerate(prompts):
        engine.submit(Request(group_id, tuple(prompt), repeats, sampling, seed=group_id))
    drawn: dict[int, list[SampledCompletion]] = {}
    while engine.in_flight:
        for response in engine.step(1.0):
            texts = tokenizer.batch_decode([one.token_ids for one in response.completions])
            drawn[response.request_id] = [
                replace(one, text=text, verdict=judge(response.request_id, place, text))
                for place, (one, text) in enumerate(zip(response.completions, texts, strict=True))
            ]
    return [
        Group(
            group_id,
            example,
            tuple(prompt),
            "",
            sampling,
            drawn[group_id],
            TIMES,
        )
        for group_id, (example, prompt) in enumerate(zip(examples, prompts, strict=True))
    ]


def drawn_from_tiny(temperature: float = 1.0, num_groups: int = 6, repeats: int = 4) -> list[Group]:
    """Groups of the tiny model with prompts and responses of unequal length."""
    examples = numbered_examples(200)[3 : 3 + 5 * num_groups : 5]
    return drawn_groups(tiny_llama(), examples, repeats, max_tokens=9, temperature=temperature)


def credited(learner: Learner, groups: Sequence[Group], trained_at: int | None = None) -> Batch:
    """The batch of groups as `learner` trains on it."""
    return learner.credit(Rollout.of(groups, trained_at)).batch
