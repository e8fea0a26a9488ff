"""Tests that every reward returns a verdict in time for hostile texts."""

from contextlib import closing
from typing import Any

import pytest

from config.schema.env import EnvConfig
from envs.reward_workers.service import RewardService
from envs.task import Completion, Example, make_task
from envs.verifiers.ifeval_rules import LANGUAGE_RULES
from envs.verifiers.instructions import RULES, SENTENCE_RULES

pytestmark = pytest.mark.long

TEXTS = {
    "nothing": "", "spaces": " " * 1_000_000, "a long word": "a" * 10_000_000,
    "a long number": "9" * 1_000_000, "exponents": "-1e-9999999 #### 1E+99999999999999999999",
    "lone surrogates": "\ud800\udfff 7 \\boxed{\ud800}", "zeros": "\0" * 1000 + "7\0",
    "control characters": "".join(map(chr, range(32))) * 50, "right to left": "\u202e\u2066" * 5000 + "7",
    "accents": "7" + "\u0301" * 50_000, "digits of other scripts": "٧ ７ ७ 𝟕", "brackets": "([{<" * 20_000,
    "marks": "<answer>\\boxed{#### Answer: " * 5000, "asterisks": "*" * 50_000,
    "paragraphs": "\n\n***\n" * 10_000, "quotes": '"' * 50_000, "angles": "<<" * 30_000 + ">>" * 30_000,
    "json": "```json\n" + "[" * 50_000, "a program": "```python\nwhile True: print('7' * 1000)\n```",
}  # fmt: skip
TIMEOUT_S = 60.0
COUNTDOWN = {"numbers": [3, 4], "target": 7}
PROGRAM = {"type": "stdin_stdout", "inputs": ["1"], "outputs": ["7"]}
REWARDS: dict[str, tuple[dict[str, Any], Any]] = {
    "arithmetic": ({"dataset": "arithmetic"}, 7),
    "countdown": ({"dataset": "countdown"}, COUNTDOWN),
    "code": ({"dataset": "jsonl", "reward": "code"}, PROGRAM),
    **{
        name: ({"dataset": "jsonl", "reward": name}, "7")
        for name in ("boxed", "dapo", "exact", "gsm8k", "last_number", "math", "think_answer_tags")
    },
}


def score_texts(settings: dict[str, Any], answer: Any) -> dict[str, str]:
    """Returns the outcome of every text under a reward."""
    env = EnvConfig(**settings, reward_workers=1, reward_timeout_s=TIMEOUT_S, max_error_rate=1.0)
    example = Example(({"role": "user", "content": "?"},), answer, 0)
    with closing(RewardService(make_task(env), env)) as service:
        verdicts = service.score([Completion(text) for text in TEXTS.values()], [example] * len(TEXTS))
    return {name: verdict.outcome for name, verdict in zip(TEXTS, verdicts, strict=True)}


@pytest.mark.parametrize("reward", REWARDS)
def test_every_reward_returns_a_verdict(reward: str) -> None:
    """Checks that no text is an error or exceeds the reward's deadline.

    A text without a program is invalid for the one reward that runs programs.
    """
    without_program = "invalid" if reward == "code" else "scored"
    expected = {name: "scored" if name == "a program" else without_program for name in TEXTS}
    assert score_texts(*REWARDS[reward]) == expected


ARGUMENTS: dict[str, Any] = {
    "keywords": ["seven", "a"], "keyword": "seven", "frequency": 3, "relation": "at least",
    "forbidden_words": ["seven", "nine"], "letter": "a", "let_frequency": 3, "let_relation": "less than",
    "num_paragraphs": 3, "num_words": 5, "nth_paragraph": 2, "first_word": "seven", "num_placeholders": 2,
    "postscript_marker": "P.S.", "num_bullets": 2, "num_highlights": 2, "section_spliter": "SECTION",
    "num_sections": 2, "prompt_to_repeat": "?", "end_phrase": "Any more?", "min_words": 3, "max_words": 9,
    "N": 3, "small_n": 2, "percentage": 20, "reference_text": "seven is a number", "word": "seven", "n": 2,
    "m": 2, "n_start": 0, "n_end": 3, "options": "yes/no", "sep": "-",
    **{f"keyword{place}": f"seven{place}" for place in range(1, 6)},
}  # fmt: skip


def test_every_instruction_returns_a_verdict() -> None:
    """Checks the instructions that need neither NLTK's sentences nor a language detector.

    Their data are not on every machine.
    """
    rules = sorted(set(RULES) - SENTENCE_RULES - LANGUAGE_RULES)
    answer = {"ids": rules, "arguments": [ARGUMENTS] * len(rules)}
    assert score_texts({"dataset": "ifeval"}, answer) == dict.fromkeys(TEXTS, "scored")
