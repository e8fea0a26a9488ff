"""Rules that judge a text against a gold: what the model is asked for, what is checked, what each part is worth.

Tasks name the rule that judges them, and each rule is a named reward: `env.reward=NAME` puts it in the place of a
task's own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from config.schema.env import EnvConfig
from envs.example import Completion, Example, Reward
from envs.rewards import reward
from envs.verifiers import extract, numbers
from envs.verifiers.equivalence import same_answer
from envs.verifiers.numbers import final_number, parse_number, same_number

Parts = dict[str, float]
SHORT_ANSWER = 200
"""A text of at most so many characters without any mark is itself the final answer, for the rule `math`."""


@dataclass(frozen=True)
class Rule:
    """A rule that judges a text against a reference answer.

    judge: (text, gold, env) -> parts, each from 0 to 1. in_process: it can neither hang nor crash.

    The text is the whole answer, with what the prompt holds of it.
    """

    system_prompt: str | None
    weights: Mapping[str, float]
    judge: Callable[[str, Any, EnvConfig], Parts]
    in_process: bool = False

    def reward(self, completion: Completion, example: Example, env: EnvConfig) -> Reward:
        """The weighted sum of the parts that the judge gives a completion against the gold of its example."""
        parts = self.judge(completion.full_text, example.answer, env)
        return Reward(sum(weight * parts[name] for name, weight in self.weights.items()), parts)


def _parts(given: str | None, gold: Any, formatted: bool) -> Parts:
    right = formatted and given is not None and same_answer(given, str(gold))
    return {"accuracy": float(right), "format": float(formatted)}


def said(text: str) -> str | None:
    """The final answer however it is marked; a short text without any mark is itself the final answer."""
    text = extract.without_empty_thought(text)
    given = extract.final_answer(text)
    if given is not None or len(text) > SHORT_ANSWER or any(mark in text for mark in ("\\boxed", "<", "#")):
        return given
    return text.strip() or None


def math(text: str, gold: Any, env: EnvConfig) -> Parts:
    """The final answer, as `said` finds it."""
    given = said(text)
    return _parts(given, gold, given is not None)


def boxed(text: str, gold: Any, env: EnvConfig) -> Parts:
    """The last `\\boxed{}` after the thoughts."""
    spoken = extract.after_thinking(text)
    given = extract.boxed_together(spoken) if spoken is not None else None
    return _parts(given, gold, bool(given))


def think_answer_tags(text: str, gold: Any, env: EnvConfig) -> Parts:
    """One thought, then one final answer; without that form nothing is earned."""
    return _parts(extract.tagged(text), gold, extract.think_answer_format(text))


def gsm8k(text: str, gold: Any, env: EnvConfig) -> Parts:
    """The number after the last `####`, exactly."""
    given = final_number(text)
    right = given is not None and same_number(given, str(gold))
    return {"accuracy": float(right), "format": float(given is not None)}


def last_number(text: str, gold: Any, env: EnvConfig) -> Parts:
    """The last number, where it is worked out; what stands around it does not count."""
    given = numbers.last_number(text)
    right = given is not None and same_number(given, str(gold))
    return {"accuracy": float(right), "format": float(given is not None)}


def dapo(text: str, gold: Any, env: EnvConfig) -> Parts:
    """What follows the last `Answer:`."""
    spoken = extract.after_thinking(text)
    given = extract.answer_line(spoken) if spoken is not None else None
    if given is not None and "\\boxed" in given:
        given = extract.boxed_together(given)
    return _parts(given, gold, given is not None)


def exact(text: str, gold: Any, env: EnvConfig) -> Parts:
    """The final answer, else the text after the thoughts, as text or number."""
    spoken = extract.after_thinking(text)
    if spoken is None:
        return {"accuracy": 0.0}
    given = (extract.final_answer(text) or spoken).strip()
    golden = str(gold).strip()
    same = given == golden or (parse_number(golden) is not None and same_number(given, golden))
    return {"accuracy": float(same)}


BOXED_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
TAGS_PROMPT = (
    "Think about the question first, between <think> and </think>. Then give the final answer alone, between "
    "<answer> and </answer>, and nothing after it."
)
GSM8K_PROMPT = (
    "Solve the problem step by step. Write the final answer, a number alone, in the last line after ####."
)
DAPO_PROMPT = (
    "Solve the problem step by step. "
    "The last line of your response must be 'Answer: ' followed by the answer."
)
ACCURACY = {"accuracy": 1.0}
RULES: dict[str, Rule] = {
    "math": Rule(BOXED_PROMPT, ACCURACY, math),
    "boxed": Rule(BOXED_PROMPT, ACCURACY, boxed),
    "think_answer_tags": Rule(TAGS_PROMPT, ACCURACY, think_answer_tags),
    "gsm8k": Rule(GSM8K_PROMPT, {"accuracy": 0.9, "format": 0.1}, gsm8k, in_process=True),
    "dapo": Rule(DAPO_PROMPT, ACCURACY, dapo),
    "exact": Rule(None, ACCURACY, exact, in_process=True),
    "last_number": Rule(None, ACCURACY, last_number, in_process=True),
}


for _name, _rule in RULES.items():
    reward(_name, system_prompt=_rule.system_prompt, in_process=_rule.in_process)(_rule.reward)
