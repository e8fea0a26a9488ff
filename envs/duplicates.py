"""Finds duplicate prompts and contradictory answers, and removes rows as `env.duplicates` says."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from envs.task import Example, Task, load_examples
from envs.verifiers.equivalence import same_answer

log = logging.getLogger(__name__)
PromptKey = tuple[str, ...]
"""Role and whitespace-normalized text of each message, then the other fields of the problem as JSON."""


@dataclass(frozen=True)
class DuplicateReport:
    """Counts of rows with duplicate prompts, and the rows of the first contradiction.

    num_rows: number of all rows.
    num_repeated: rows with the prompt of an earlier row.
    num_contradictory: prompts whose rows have different answers.
    """

    num_rows: int
    num_repeated: int
    num_contradictory: int
    first_contradiction: tuple[int, int] | None

    def __str__(self) -> str:
        text = f"{self.num_rows} rows, {self.num_repeated} of them repeat a prompt"
        if self.first_contradiction is None:
            return text
        return (
            f"{text}; {self.num_contradictory} prompts have contradictory answers (for example rows "
            f"{self.first_contradiction[0]} and {self.first_contradiction[1]})"
        )


def distinct_examples(task: Task, split: str) -> Sequence[Example]:
    """Returns the examples of a split after the removal of duplicates, and logs their count.

    The examples of a mixture are returned as they are, since its members remove their own duplicates.
    """
    examples = load_examples(task, split)
    if task.members:
        return examples
    kept, report = resolve_duplicates(examples, task.duplicates or task.env.duplicates)
    if report.num_repeated:
        log.warning("%s: %s; %d are used", task.name, report, len(kept))
    return kept


def _prompt_key(example: Example) -> PromptKey:
    """Returns a key that is equal for duplicate prompts."""
    texts: list[str] = []
    for message in example.messages:
        texts += [message["role"], " ".join(message["content"].split())]
    other = [message for message in example.messages if len(message) > 2]
    more = [*other, *example.tools, *filter(None, [example.prefill, example.problem_id])]
    return (*texts, json.dumps(more, sort_keys=True, default=str)) if more else tuple(texts)


def resolve_duplicates(examples: Sequence[Example], mode: str) -> tuple[Sequence[Example], DuplicateReport]:
    """Removes examples with duplicate prompts; returns the others in their order, and a report.

    Args:
        mode: `keep` keeps all examples. `first` keeps the first example of each prompt. `drop` also drops prompts
            with contradictory answers.
    """
    groups: dict[PromptKey, list[Example]] = {}
    for example in examples:
        groups.setdefault(_prompt_key(example), []).append(example)
    contradictions = {prompt: other for prompt, group in groups.items() if (other := _first_contradiction(group))}
    first = next(((groups[prompt][0].row, other.row) for prompt, other in contradictions.items()), None)
    report = DuplicateReport(len(examples), len(examples) - len(groups), len(contradictions), first)
    if mode == "keep":
        return examples, report
    dropped = contradictions if mode == "drop" else {}
    return [group[0] for prompt, group in groups.items() if prompt not in dropped], report


def _first_contradiction(group: Sequence[Example]) -> Example | None:
    """Returns the first example whose answer differs from the group's first answer, or None."""
    reference = group[0].answer
    for example in group[1:]:
        answer = example.answer
        both_texts = isinstance(answer, str) and isinstance(reference, str)
        if answer != reference and not (both_texts and same_answer(answer, reference)):
            return example
    return None
