"""What groups repeat: completions within a group, questions in answers, prompts in a batch and over batches."""

from collections import Counter, deque
from collections.abc import Sequence

from envs.group import Group

REMEMBERED = 2000
"""Groups whose prompts are counted."""
SHORTEST_QUESTION = 4
"""Characters of a question below which its turning up in an answer says nothing."""


class Repetition:
    """Counts the prompts of the newest groups."""

    def __init__(self) -> None:
        self._newest: deque[tuple[str, ...]] = deque()
        self._counts: Counter[tuple[str, ...]] = Counter()

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Of all groups that were generated for one optimizer step.

        groups/duplicates: completions that equal an earlier one of their group, over the most that there can be; groups
        drawn at temperature 0 do not count. groups/repeats_question: share of completions that hold their whole
        question. prompts/repeated: share of groups whose prompt an earlier one of them has. prompts/most_drawn: how
        often the prompt drawn most was drawn among the last `REMEMBERED` groups, over the mean of all prompts there.
        """
        prompts = [tuple([message["content"] for message in group.example.messages]) for group in groups]
        self._count(prompts)
        repeated = [_repeated(group) for group in groups]
        completions = sum(len(group.candidates) for group in groups)
        return {
            "groups/duplicates": sum(_duplicates(group) for group in groups) / len(groups),
            "groups/repeats_question": sum(repeated) / completions,
            "prompts/repeated": 1 - len(set(prompts)) / len(prompts),
            "prompts/most_drawn": max(self._counts.values()) * len(self._counts) / len(self._newest),
        }

    def _count(self, prompts: Sequence[tuple[str, ...]]) -> None:
        self._newest.extend(prompts)
        self._counts.update(prompts)
        while len(self._newest) > REMEMBERED:
            oldest = self._newest.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]


def _duplicates(group: Group) -> float:
    most = len(group.candidates) - 1
    if most < 1 or not group.sampling.temperature:
        return 0.0
    return 1 - (len({one.text for one in group.candidates}) - 1) / most


def _repeated(group: Group) -> int:
    """Completions of a group that hold its question."""
    question = group.example.messages[-1]["content"]
    shortest = len("".join(question.split()))
    return sum(len(one.text) >= shortest and holds_question(question, one.text) for one in group.candidates)


def holds_question(question: str, text: str) -> bool:
    """Whether the whole question stands in a text, whatever blanks and capitals either writes."""
    asked = _plain(question)
    return len(asked) >= SHORTEST_QUESTION and asked in _plain(text)


def _plain(text: str) -> str:
    return "".join(text.lower().split())
