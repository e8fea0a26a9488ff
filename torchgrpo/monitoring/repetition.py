"""Repetition metrics: equal completions in a group, prompts in completions, repeated prompts."""

from collections import Counter, deque
from collections.abc import Sequence

from envs.group import Group
from torchgrpo.monitoring.ledger_record import prompt_id

PROMPT_WINDOW = 2000
"""Number of newest groups whose prompts are counted."""
MIN_QUESTION_LENGTH = 8
"""Minimum characters of a question, without whitespace, for the prompt echo.

An answer may contain a shorter question legitimately: "8 + 8 = 16" answers "8+8=".
"""


class Repetition:
    """Computes repetition metrics and counts the prompts of the newest groups."""

    def __init__(self) -> None:
        self._newest: deque[str] = deque()
        self._counts: Counter[str] = Counter()

    def state(self) -> list[str]:
        """Returns the prompt ids of the newest groups, oldest first."""
        return list(self._newest)

    def load(self, state: Sequence[str]) -> None:
        self._newest, self._counts = deque(state), Counter(state)

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Returns the metrics of all groups generated for one optimizer step.

        groups/duplicates: completions that equal an earlier completion of their group, divided by the maximum
        number; groups sampled at temperature 0 count as 0. completions/prompt_echo: share of completions that
        contain their whole question, if it has at least `MIN_QUESTION_LENGTH` characters. prompts/duplicates:
        share of groups whose prompt also belongs to an earlier group. prompts/max_repeat_ratio: number of
        occurrences of the most frequent prompt among the last `PROMPT_WINDOW` groups, divided by the mean
        number of all prompts there.
        """
        prompts = [prompt_id(group.example.messages, group.example.problem_id) for group in groups]
        self._newest.extend(prompts)
        self._counts.update(prompts)
        while len(self._newest) > PROMPT_WINDOW:
            oldest = self._newest.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        duplicates: list[float] = []
        echoes: list[int] = []
        for group in groups:
            texts, question = [one.text for one in group.candidates], group.example.messages[-1]["content"]
            max_duplicates = len(texts) - 1
            can_differ = max_duplicates >= 1 and group.sampling.temperature
            duplicates.append(1 - (len(set(texts)) - 1) / max_duplicates if can_differ else 0.0)
            if max(map(len, texts)) >= len("".join(question.split())):  # a cheap test, rarely true for short answers
                echoes += [contains_question(question, text) for text in texts]
        return {
            "groups/duplicates": sum(duplicates) / len(groups),
            "completions/prompt_echo": sum(echoes) / sum(len(group.candidates) for group in groups),
            "prompts/duplicates": 1 - len(set(prompts)) / len(prompts),
            "prompts/max_repeat_ratio": max(self._counts.values()) * len(self._counts) / len(self._newest),
        }


def contains_question(question: str, text: str) -> bool:
    """Whether a text contains the whole question, ignoring whitespace and case."""
    question = _normalize(question)
    return len(question) >= MIN_QUESTION_LENGTH and question in _normalize(text)


def _normalize(text: str) -> str:
    return "".join(text.lower().split())
