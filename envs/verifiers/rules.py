"""Named rules that score a completion's final answer against a reference answer, also as rewards.

Tasks name the rule that scores their completions; `env.reward=NAME` replaces the task's own reward.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from config.schema.env import EnvConfig
from envs.example import Completion, Example, Reward
from envs.rewards import reward
from envs.verifiers import extract, numbers
from envs.verifiers.equivalence import same_answer
from envs.verifiers.numbers import extract_final_number, parse_number, same_number

RewardComponents = dict[str, float]
"""Reward components by name."""
MAX_UNMARKED_CHARACTERS = 200
"""Maximum length of a text without any mark that is itself the final answer, for the rule `math`."""


@dataclass(frozen=True)
class Rule:
    """Rule that scores a text against a reference answer.

    system_prompt: system prompt that requests the rule's answer format; None leaves the task's prompt.
    weights: weight of every reward component in the score.
    score: function (text, reference, env) -> components, each from 0 to 1.
    in_process: whether the function can neither hang nor crash, so that it may run in the trainer's process.

    The text is the whole answer, with the prefill of the prompt.
    """

    system_prompt: str | None
    weights: Mapping[str, float]
    score: Callable[[str, Any, EnvConfig], RewardComponents]
    in_process: bool = False

    def reward(self, completion: Completion, example: Example, env: EnvConfig) -> Reward:
        """Returns the weighted sum of a completion's reward components, and the components."""
        components = self.score(completion.full_text, example.answer, env)
        return Reward(sum(weight * components[name] for name, weight in self.weights.items()), components)


def _score_components(final_answer: str | None, reference: Any, has_format: bool) -> RewardComponents:
    """Returns accuracy and format of a final answer by mathematical equality."""
    is_right = has_format and final_answer is not None and same_answer(final_answer, str(reference))
    return {"accuracy": float(is_right), "format": float(has_format)}


def extract_final_answer(text: str) -> str | None:
    """Extracts the final answer by any known mark.

    A short text without any mark is itself the final answer. The result is None without a final answer.
    """
    text = extract.strip_empty_thought(text)
    final_answer = extract.find_marked_answer(text)
    if (
        final_answer is not None
        or len(text) > MAX_UNMARKED_CHARACTERS
        or any(mark in text for mark in ("\\boxed", "<", "#"))
    ):
        return final_answer
    return text.strip() or None


def score_math(text: str, reference: Any, env: EnvConfig) -> RewardComponents:
    """Scores the final answer that `extract_final_answer` finds."""
    final_answer = extract_final_answer(text)
    return _score_components(final_answer, reference, final_answer is not None)


def score_boxed(text: str, reference: Any, env: EnvConfig) -> RewardComponents:
    r"""Scores the last `\boxed{}` after the thoughts.

    The last boxes that a comma, `and` or `or` joins are one answer.
    """
    answer_text = extract.text_after_thinking(text)
    final_answer = extract.joined_boxes(answer_text) if answer_text is not None else None
    return _score_components(final_answer, reference, bool(final_answer))


def score_think_answer_tags(text: str, reference: Any, env: EnvConfig) -> RewardComponents:
    """Scores one thought and one final answer in tags; any other format earns nothing."""
    return _score_components(extract.answer_in_tags(text), reference, extract.has_think_answer_format(text))


def score_gsm8k(text: str, reference: Any, env: EnvConfig) -> RewardComponents:
    """Scores the number after the last `####`, exactly."""
    final_answer = extract_final_number(text)
    is_right = final_answer is not None and same_number(final_answer, str(reference))
    return {"accuracy": float(is_right), "format": float(final_answer is not None)}


def score_last_number(text: str, reference: Any, env: EnvConfig) -> RewardComponents:
    """Scores the last number of the text, if the number is simplified."""
    final_answer = numbers.extract_last_number(text)
    is_right = final_answer is not None and same_number(final_answer, str(reference))
    return {"accuracy": float(is_right), "format": float(final_answer is not None)}


def score_dapo(text: str, reference: Any, env: EnvConfig) -> RewardComponents:
    """Scores the text after the last `Answer:`."""
    answer_text = extract.text_after_thinking(text)
    final_answer = extract.answer_after_label(answer_text) if answer_text is not None else None
    if final_answer is not None and "\\boxed" in final_answer:
        final_answer = extract.joined_boxes(final_answer)
    return _score_components(final_answer, reference, final_answer is not None)


def score_exact(text: str, reference: Any, env: EnvConfig) -> RewardComponents:
    """Scores the final answer, else the text after the thoughts, as text or number."""
    answer_text = extract.text_after_thinking(text)
    if answer_text is None:
        return {"accuracy": 0.0}
    final_answer = (extract.find_marked_answer(text) or answer_text).strip()
    reference_text = str(reference).strip()
    same = final_answer == reference_text or (
        parse_number(reference_text) is not None and same_number(final_answer, reference_text)
    )
    return {"accuracy": float(same)}


BOXED_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
TAGS_PROMPT = (
    "Think about the question first, between <think> and </think>. Then give the final answer alone, between "
    "<answer> and </answer>, and nothing after it."
)
GSM8K_PROMPT = "Solve the problem step by step. Write the final answer, a number alone, in the last line after ####."
DAPO_PROMPT = (
    "Solve the problem step by step. The last line of your response must be 'Answer: ' followed by the answer."
)
ACCURACY = {"accuracy": 1.0}
RULES: dict[str, Rule] = {
    "math": Rule(BOXED_PROMPT, ACCURACY, score_math),
    "boxed": Rule(BOXED_PROMPT, ACCURACY, score_boxed),
    "think_answer_tags": Rule(TAGS_PROMPT, ACCURACY, score_think_answer_tags),
    "gsm8k": Rule(GSM8K_PROMPT, {"accuracy": 0.9, "format": 0.1}, score_gsm8k, in_process=True),
    "dapo": Rule(DAPO_PROMPT, ACCURACY, score_dapo),
    "exact": Rule(None, ACCURACY, score_exact, in_process=True),
    "last_number": Rule(None, ACCURACY, score_last_number, in_process=True),
}
"""Every rule by its name."""


for _name, _rule in RULES.items():
    reward(_name, system_prompt=_rule.system_prompt, in_process=_rule.in_process)(_rule.reward)
