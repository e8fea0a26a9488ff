"""Metrics of repetition: completions in a group, questions in answers, prompts over batches."""

from collections import Counter, deque
from collections.abc import Sequence

from envs.group import Group
from torchgrpo.monitoring.ledger_line import prompt_id

REMEMBERED = 2000
"""Groups whose prompts are counted."""
SHORTEST_QUESTION = 8
"""Characters of a question, blanks not counted, below which its turning up in an answer says nothing: "8 + 8 = 16"
answers "8+8="."""


class Repetition:
    """Counts the prompts of the newest groups."""

    def __init__(self) -> None:
        self._newest: deque[str] = deque()
        self._counts: Counter[str] = Counter()

    def state(self) -> list[str]:
        """Ids of the prompts of the newest groups, oldest first."""
        return list(self._newest)

    def load(self, state: Sequence[str]) -> None:
        self._newest, self._counts = deque(state), Counter(state)

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Of all groups that were generated for one optimizer step.

        groups/duplicates: completions that equal an earlier one of their group, over the most that there can be; groups
        drawn at temperature 0 do not count. groups/repeats_question: share of completions that hold their whole
        question, where that is no shorter than `SHORTEST_QUESTION`. prompts/repeated: share of groups whose prompt an
        earlier one of them has. prompts/most_drawn: how often the prompt drawn most was drawn among the last
        `REMEMBERED` groups, over the mean of all prompts there.
        """
        prompts = [prompt_id(group.example.messages) for group in groups]
        self._newest.extend(prompts)
        self._counts.update(prompts)
        while len(self._newest) > REMEMBERED:
            oldest = self._newest.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        duplicates: list[float] = []
        repeated: list[int] = []
        for group in groups:
            texts, question = [one.text for one in group.candidates], group.example.messages[-1]["content"]
            most = len(texts) - 1
            drawn = most >= 1 and group.sampling.temperature
            duplicates.append(1 - (len(set(texts)) - 1) / most if drawn else 0.0)
            if max(map(len, texts)) >= len("".join(question.split())):  # seldom so where answers are short
                repeated += [holds_question(question, text) for text in texts]
        return {
            "groups/duplicates": sum(duplicates) / len(groups),
            "groups/repeats_question": sum(repeated) / sum(len(group.candidates) for group in groups),
            "prompts/repeated": 1 - len(set(prompts)) / len(prompts),
            "prompts/most_drawn": max(self._counts.values()) * len(self._counts) / len(self._newest),
        }


def holds_question(question: str, text: str) -> bool:
    """Whether the whole question stands in a text, whatever blanks and capitals either writes."""
    asked = _plain(question)
    return len(asked) >= SHORTEST_QUESTION and asked in _plain(text)


def _plain(text: str) -> str:
    return "".join(text.lower().split())
