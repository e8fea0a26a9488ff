"""Builds random groups of episodes, each in one token sequence or split into several."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from envs.group import Group, SampledCompletion, SequenceStart, Turn, Verdict
from tests.groups import make_completion, make_group

REPEATS = 4
MAX_TOKENS = 16
COMPONENTS = {"right": 1.0, "short": 0.5}


@dataclass(frozen=True)
class Piece:
    """One turn of an episode: sampled tokens, their log-probs, reply and reward."""

    sampled_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    reply_ids: tuple[int, ...]
    reward: float


@dataclass(frozen=True)
class Stream:
    """An episode of several turns. `outcome` has the other fields of the completion."""

    prompt: tuple[int, ...]
    pieces: tuple[Piece, ...]
    outcome: SampledCompletion

    def completion(self, cuts: Collection[int] = (), drops_replies: bool = False) -> SampledCompletion:
        """Makes the completion with a new sequence at each turn in `cuts`.

        drops_replies: whether the reply before a cut is only in the next prompt, not also at the end of the sequence.
        """
        ids: list[int] = []
        log_probs: list[float] = []
        mask: list[bool] = []
        context, starts, turns = [*self.prompt], [SequenceStart(0, self.prompt)], []
        for number, piece in enumerate(self.pieces):
            if number in cuts:
                while drops_replies and mask and not mask[-1]:
                    for values in (ids, log_probs, mask):
                        values.pop()  # type: ignore[attr-defined]
                starts.append(SequenceStart(len(ids), tuple(context)))
            turns.append(Turn({}, len(ids), len(ids) + len(piece.sampled_ids), reward=piece.reward))
            ids += piece.sampled_ids + piece.reply_ids
            log_probs += piece.log_probs + (0.0,) * len(piece.reply_ids)
            mask += [True] * len(piece.sampled_ids) + [False] * len(piece.reply_ids)
            context += piece.sampled_ids + piece.reply_ids
        return replace(
            self.outcome,
            token_ids=ids,
            log_probs=log_probs,
            policy_versions=[0] * len(ids),
            sampled_mask=mask,
            sequence_starts=starts if len(starts) > 1 else [],
            turns=turns,
        )


def random_streams(seed: int, groups: int = 5) -> list[list[Stream]]:
    """Makes groups of episodes of 1 to 4 turns, with random outcomes."""
    rng = random.Random(seed)

    def piece(is_last: bool) -> Piece:
        sampled = tuple(rng.randrange(4, 40) for _ in range(rng.randint(1, 4)))
        reply = () if is_last else tuple(rng.randrange(4, 40) for _ in range(rng.randint(1, 3)))
        return Piece(sampled, tuple(-3 * rng.random() - 0.01 for _ in sampled), reply, rng.choice((0.0, 0.5, 1.0)))

    def stream(prompt: tuple[int, ...]) -> Stream:
        length, right = rng.randint(1, 4), float(rng.random() < 0.5)
        components = {"right": right, "short": rng.random(), "accuracy": right}
        outcome = make_completion(
            1,
            right + rng.random(),
            components,
            outcome=rng.choices(("scored", "error"), (7, 1))[0],  # type: ignore[arg-type]
            finish_reason=rng.choices(("stop", "length"), (4, 1))[0],  # type: ignore[arg-type]
        )
        return Stream(prompt, tuple(piece(number == length - 1) for number in range(length)), outcome)

    prompts = [tuple(rng.randrange(4, 40) for _ in range(rng.randint(1, 5))) for _ in range(groups)]
    return [[stream(prompt) for _ in range(REPEATS)] for prompt in prompts]


def whole_groups(streams: Sequence[Sequence[Stream]]) -> list[Group]:
    """Makes groups whose completions are one sequence each."""
    return [
        make_group(number, [one.completion() for one in row], prompt=row[0].prompt)
        for number, row in enumerate(streams)
    ]


def split_groups(
    streams: Sequence[Sequence[Stream]], seed: int, share: float, drops_replies: bool = False
) -> list[Group]:
    """Makes the same groups with completions split at a random `share` of the turns."""
    rng = random.Random(seed)
    groups = []
    for number, row in enumerate(streams):
        cuts = [[turn for turn in range(1, len(one.pieces)) if rng.random() < share] for one in row]
        completions = [one.completion(each, drops_replies) for one, each in zip(row, cuts, strict=True)]
        groups.append(make_group(number, completions, prompt=row[0].prompt))
    return groups


def episode(rewards: Sequence[float], score: float | None = None, has_error: bool = False) -> SampledCompletion:
    """Makes an episode of one sampled token per turn, with replies of one token.

    score: of the verdict; None: the sum of the turns' rewards.
    """
    pieces = [Piece((10 + turn,), (-1.0,), (30 + turn,), reward) for turn, reward in enumerate(rewards)]
    pieces[-1] = replace(pieces[-1], reply_ids=())
    verdict = Verdict(sum(rewards) if score is None else score, {}, "error" if has_error else "scored")
    return Stream((5, 6), tuple(pieces), replace(make_completion(1), verdict=verdict)).completion()
