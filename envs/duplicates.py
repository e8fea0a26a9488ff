"""Duplicate rows, which ask the same: found, reported, and kept or dropped as `env.duplicates` says."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from envs.task import Example, Task, checked_examples
from envs.verifiers.equivalence import same_answer

log = logging.getLogger(__name__)
Asked = tuple[str, ...]
"""Role and text of each message, where white space counts for nothing, and what else makes the prompt."""


@dataclass(frozen=True)
class DuplicateReport:
    """Counts of repeated rows, and the rows of the first contradiction.

    repeated: rows whose prompt an earlier row has too. contradictory: prompts whose rows do not agree on the answer.
    """

    rows: int
    repeated: int
    contradictory: int
    first_contradiction: tuple[int, int] | None

    def __str__(self) -> str:
        text = f"{self.rows} rows, {self.repeated} of them repeat a prompt"
        if self.first_contradiction is None:
            return text
        return (
            f"{text}; {self.contradictory} prompts have contradictory answers (rows {self.first_contradiction[0]} "
            f"and {self.first_contradiction[1]} for one)"
        )


def distinct_examples(task: Task, split: str) -> Sequence[Example]:
    """A split of the task with its duplicates reported, and kept or dropped as `env.duplicates` says. Members of a
    mixture see to their own."""
    examples = checked_examples(task, split)
    if task.members:
        return examples
    kept, report = resolve_duplicates(examples, task.duplicates or task.env.duplicates)
    if report.repeated:
        log.warning("%s: %s; %d are used", task.name, report, len(kept))
    return kept


def _asked(example: Example) -> Asked:
    texts: list[str] = []
    for message in example.messages:
        texts += [message["role"], " ".join(message["content"].split())]
    other = [message for message in example.messages if len(message) > 2]
    more = [*other, *example.tools, *filter(None, [example.prefill])]
    return (*texts, json.dumps(more, sort_keys=True, default=str)) if more else tuple(texts)


def resolve_duplicates(examples: Sequence[Example], mode: str) -> tuple[Sequence[Example], DuplicateReport]:
    """Examples in their order, with one prompt kept as often as `mode` says.

    Args:
        mode: `keep` all; the `first` of each prompt; `drop` prompts with contradictory answers, and keep the
            first of the others.
    """
    groups: dict[Asked, list[Example]] = {}
    for example in examples:
        groups.setdefault(_asked(example), []).append(example)
    contradictions = {prompt: other for prompt, group in groups.items() if (other := _other(group))}
    first = next(((groups[prompt][0].row, other.row) for prompt, other in contradictions.items()), None)
    report = DuplicateReport(len(examples), len(examples) - len(groups), len(contradictions), first)
    if mode == "keep":
        return examples, report
    dropped = contradictions if mode == "drop" else {}
    return [group[0] for prompt, group in groups.items() if prompt not in dropped], report


def _other(group: Sequence[Example]) -> Example | None:
    """The first example of one prompt whose answer is not that of the first; None when all agree."""
    gold = group[0].answer
    for example in group[1:]:
        answer = example.answer
        texts = isinstance(answer, str) and isinstance(gold, str)
        if answer != gold and not (texts and same_answer(answer, gold)):
            return example
    return None
