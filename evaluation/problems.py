"""The prompts of an evaluation set: distinct ones, the same in every run."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from envs.task import Example


@dataclass(frozen=True)
class Problems:
    """examples: what is evaluated. repeated: rows with a prompt that was there before. too_long: prompts over
    the limit. Neither is evaluated."""

    examples: list[Example]
    repeated: int
    too_long: int


def choose_problems(
    examples: Sequence[Example], limit: int | None, fits: Callable[[Example], bool]
) -> Problems:
    """Each prompt once, however often the file repeats it; with `limit`, a random choice that is always the same.

    Order is that of the data set.
    """
    order = list(range(len(examples)))
    if limit is not None:
        random.Random(0).shuffle(order)
    seen: set[tuple[tuple[str, str], ...]] = set()
    chosen: list[int] = []
    repeated = too_long = 0
    for index in order:
        if len(chosen) == limit:
            break
        example = examples[index]
        prompt = tuple((message["role"], message["content"].strip()) for message in example.messages)
        if prompt in seen:
            repeated += 1
        elif not fits(example):
            too_long += 1
        else:
            seen.add(prompt)
            chosen.append(index)
    return Problems([examples[index] for index in sorted(chosen)], repeated, too_long)
