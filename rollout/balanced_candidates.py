"""Which of a prompt's candidates make its group."""

import random
from collections.abc import Sequence

from envs.group import Verdict


def choose_balanced(verdicts: Sequence[Verdict], repeats: int, seed: int) -> list[bool]:
    """`repeats` of a prompt's candidates: as many right as wrong ones, or as near to it as there are.

    Which of the right (or wrong) ones is random, fixed by `seed`. Those whose judging failed are taken last.
    """
    chance = random.Random(seed)
    order = sorted(range(len(verdicts)), key=[chance.random() for _ in verdicts].__getitem__)
    right = [place for place in order if verdicts[place].judged and verdicts[place].success > 0.5]
    wrong = [place for place in order if verdicts[place].judged and verdicts[place].success <= 0.5]
    failed = [place for place in order if not verdicts[place].judged]
    take_right = min(len(right), max(repeats - len(wrong), repeats // 2))
    take_wrong = min(len(wrong), repeats - take_right)
    chosen = {*right[:take_right], *wrong[:take_wrong], *failed[: repeats - take_right - take_wrong]}
    return [place in chosen for place in range(len(verdicts))]
