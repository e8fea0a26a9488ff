"""Reproduces graders of other trainers that need only text operations."""

import re
from collections.abc import Callable
from typing import Any

from envs.verifiers.compat_normalize import normalize_hendrycks, normalize_minerva
from envs.verifiers.extract import has_think_answer_format

_HASH_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_MINERVA_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


# GSM8K ---------------------------------------------------------------------------------------------------------


def nanochat_answer(text: str) -> str | None:
    """Returns the first number after `#### `, without commas."""
    found = _HASH_NUMBER.search(text)
    return found[1].strip().replace(",", "") if found else None


def nanochat_gsm8k(text: str, reference: str) -> int:
    """Returns 1 if the texts of the two numbers are equal."""
    return int(nanochat_answer(text) == nanochat_answer(f"#### {reference}"))


def openai_gsm8k(text: str, reference: str) -> bool | None:
    """Scores an answer by the rule of the GSM8K data set.

    The result is None if the reference answer is not a number.
    """
    expected = nanochat_answer(f"#### {reference}")
    return None if expected is None else nanochat_answer(text) == expected


def verl_gsm8k_answer(text: str, method: str = "strict") -> str | None:
    """Extracts the answer from the last 300 characters of a text.

    method: `strict` takes the last number after `#### `; `flexible` takes the last number of any kind.
    """
    tail = text[-300:]
    if method == "strict":
        found = _HASH_NUMBER.findall(tail)
        return found[-1].replace(",", "").replace("$", "") if found else None
    numbers = _NUMBER.findall(tail)
    if not numbers:
        return None
    usable = [number for number in numbers if number not in ("", ".")]
    return str(usable[-1] if usable else numbers[0])


def verl_gsm8k(text: str, reference: str, method: str = "strict") -> float:
    """Returns 1 if the extracted answer equals the reference answer as text."""
    answer = verl_gsm8k_answer(text, method)
    return 1.0 if answer is not None and answer == reference else 0.0


# Competition mathematics without sympy -------------------------------------------------------------------------


def last_box(text: str) -> str | None:
    r"""Returns the last `\boxed` or `\fbox` with its contents, by Hendrycks et al."""
    if "\\boxed " in text:
        return "\\boxed " + text.split("\\boxed ")[-1].split("$")[0]
    start = text.rfind("\\boxed")
    start = text.rfind("\\fbox") if start < 0 else start
    if start < 0:
        return None
    end = _closing_brace(text, start)
    return None if end is None else text[start : end + 1]


def _closing_brace(text: str, start: int) -> int | None:
    """Returns the position at which all braces since `start` are closed."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if text[position] == "}" and depth == 0:
            return position
    return None


def box_contents(box: str) -> str | None:
    """Returns the contents of a box that `last_box` found.

    The result is None if the original function fails on the box.
    """
    if box.startswith("\\boxed "):
        return box[len("\\boxed ") :]
    return box[len("\\boxed{") : -1] if box.startswith("\\boxed{") and box.endswith("}") else None


def verl_math(text: str, reference: str) -> float:
    """Compares the last box with the reference answer, both normalized by Hendrycks et al. (2021)."""
    box = last_box(text)
    answer = box_contents(box) if box is not None else None
    return float(answer is not None and normalize_hendrycks(answer) == normalize_hendrycks(reference))


def verl_dapo(text: str, reference: str, strict_box_verify: bool = False) -> dict[str, Any]:
    """Returns the verdict 1 or -1 about the last 300 characters of a text.

    The last `Answer:` is normalized by Lewkowycz et al. (2022).
    """
    text = text[-300:]
    if strict_box_verify:
        box = last_box(text[-100:].replace("\\boxed ", ""))
        prediction = box_contents(box) if box is not None else None
        is_right = prediction == reference
    else:
        found = _MINERVA_ANSWER.findall(text)
        prediction = normalize_minerva(found[-1] if found else "[INVALID]")
        is_right = prediction == normalize_minerva(reference)
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": prediction}


# TorchRL -------------------------------------------------------------------------------------------------------


def torchrl_tags(text: str) -> tuple[str, str]:
    """Returns the first thought and the first answer; each is empty if missing."""
    thought, answer = _THINK.search(text), ANSWER.search(text)
    return (thought[1].strip() if thought else "", answer[1].strip() if answer else "")


def torchrl_number(answer: str) -> str:
    """Removes separators, currency and per cent signs, and zeros at the end of decimals."""
    answer = answer.strip().replace(",", "").replace("$", "").replace("%", "").rstrip(".")
    return answer.rstrip("0").rstrip(".") if "." in answer else answer


def torchrl_verdict(text: str, is_right: Callable[[str], bool], format_reward: float = 0.1) -> dict[str, Any]:
    """Returns the five outputs of the parser for a text.

    The right answer earns 1, any other answer in tags the format reward.
    """
    thought, answer = torchrl_tags(text)
    success = bool(answer) and is_right(answer)
    reward = 1.0 if success else format_reward if answer else 0.0
    format_rewards = {"reward_answer": float(bool(answer)), "reward_think": float(bool(thought))}
    return format_rewards | {"reward_right": reward, "reward": reward, "success": success}


def torchrl_gsm8k(text: str, reference: str, format_reward: float = 0.1) -> dict[str, Any]:
    """Scores the first `<answer>` as a number."""
    return torchrl_verdict(text, lambda answer: torchrl_number(answer) == torchrl_number(reference), format_reward)


def torchrl_boxed(text: str) -> str:
    """Returns the contents of the last box, or the whole text without a box.

    Of an unclosed box, all but the last character is returned.
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return text.strip()
    end = _closing_brace(text, start)
    return text[start + len("\\boxed{") : -1 if end is None else end].strip()


# ColossalChat --------------------------------------------------------------------------------------------------


def coati_solution(text: str) -> str | None:
    """Returns the contents of the last `<answer>`."""
    found = ANSWER.findall(text)
    return found[-1].strip() if found else None


def coati_structure(text: str) -> bool:
    """Whether a text consists of one thought and one answer in tags.

    `<think>` is first, `</answer>` is last, and each of the four tags appears once and in order.
    """
    return has_think_answer_format(text) and text.startswith("<think>") and text.endswith("</answer>")


def coati_boxed_solution(text: str) -> str | None:
    """Returns the contents of the last box if its braces match."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    end = _closing_brace(text, start)
    return None if end is None else text[start + len("\\boxed{") : end]


def trl_think_format(text: str) -> float:
    """Returns 1 for a text that begins with its only `<think>` and closes the thought."""
    begins = text.startswith("<think>") and "<think>" not in text[len("<think>") :]
    return float(begins and "</think>" in text)
