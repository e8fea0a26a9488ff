"""The graders of `compat` that work on text alone."""

import re
from collections.abc import Callable
from typing import Any

from envs.verifiers.compat_normalize import hendrycks, minerva
from envs.verifiers.extract import think_answer_format

_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_MINERVA_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


# GSM8K ---------------------------------------------------------------------------------------------------------


def nanochat_answer(text: str) -> str | None:
    """The first number after `#### ` without commas."""
    found = _MARKED.search(text)
    return found[1].strip().replace(",", "") if found else None


def nanochat_gsm8k(text: str, gold: str) -> int:
    """1 when the two texts of the numbers are equal."""
    return int(nanochat_answer(text) == nanochat_answer(f"#### {gold}"))


def openai_gsm8k(text: str, gold: str) -> bool | None:
    """The data set's own rule; None for a gold that is no number."""
    expected = nanochat_answer(f"#### {gold}")
    return None if expected is None else nanochat_answer(text) == expected


def verl_gsm8k_answer(text: str, method: str = "strict") -> str | None:
    """From the last 300 characters: the last marked number, or (flexible) the last number of any kind."""
    tail = text[-300:]
    if method == "strict":
        found = _MARKED.findall(tail)
        return found[-1].replace(",", "").replace("$", "") if found else None
    numbers = _NUMBER.findall(tail)
    if not numbers:
        return None
    usable = [number for number in numbers if number not in ("", ".")]
    return str(usable[-1] if usable else numbers[0])


def verl_gsm8k(text: str, gold: str, method: str = "strict") -> float:
    answer = verl_gsm8k_answer(text, method)
    return 1.0 if answer is not None and answer == gold else 0.0


# Competition mathematics without sympy -------------------------------------------------------------------------


def last_box(text: str) -> str | None:
    """The last `\\boxed` or `\\fbox` with its contents, as Hendrycks et al. find it."""
    if "\\boxed " in text:
        return "\\boxed " + text.split("\\boxed ")[-1].split("$")[0]
    start = text.rfind("\\boxed")
    start = text.rfind("\\fbox") if start < 0 else start
    if start < 0:
        return None
    end = _closing_brace(text, start)
    return None if end is None else text[start : end + 1]


def _closing_brace(text: str, start: int) -> int | None:
    """Where as many braces are closed as opened since `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if text[position] == "}" and depth == 0:
            return position
    return None


def box_contents(box: str) -> str | None:
    """What is inside a box that `last_box` found; None where the original fails on it."""
    if box.startswith("\\boxed "):
        return box[len("\\boxed ") :]
    return box[len("\\boxed{") : -1] if box.startswith("\\boxed{") and box.endswith("}") else None


def verl_math(text: str, gold: str) -> float:
    """The last box against the gold, both normalised as by Hendrycks et al. (2021)."""
    box = last_box(text)
    answer = box_contents(box) if box is not None else None
    return float(answer is not None and hendrycks(answer) == hendrycks(gold))


def verl_dapo(text: str, gold: str, strict_box_verify: bool = False) -> dict[str, Any]:
    """1 or -1 from the last 300 characters: the last `Answer:` normalised as by Lewkowycz et al. (2022)."""
    text = text[-300:]
    if strict_box_verify:
        box = last_box(text[-100:].replace("\\boxed ", ""))
        prediction = box_contents(box) if box is not None else None
        right = prediction == gold
    else:
        found = _MINERVA_ANSWER.findall(text)
        prediction = minerva(found[-1] if found else "[INVALID]")
        right = prediction == minerva(gold)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": prediction}


# TorchRL -------------------------------------------------------------------------------------------------------


def torchrl_tags(text: str) -> tuple[str, str]:
    """The first thought and the first answer, empty without one."""
    thought, answer = _THINK.search(text), ANSWER.search(text)
    return (thought[1].strip() if thought else "", answer[1].strip() if answer else "")


def torchrl_number(answer: str) -> str:
    """Without separators, currency and per cent signs, and the zeros behind a decimal point."""
    answer = answer.strip().replace(",", "").replace("$", "").replace("%", "").rstrip(".")
    return answer.rstrip("0").rstrip(".") if "." in answer else answer


def torchrl_verdict(text: str, right: Callable[[str], bool], format_reward: float = 0.1) -> dict[str, Any]:
    """The parser's five outputs: the right answer earns 1, any other in tags the format reward."""
    thought, answer = torchrl_tags(text)
    success = bool(answer) and right(answer)
    reward = 1.0 if success else format_reward if answer else 0.0
    formatted = {"reward_answer": float(bool(answer)), "reward_think": float(bool(thought))}
    return formatted | {"reward_right": reward, "reward": reward, "success": success}


def torchrl_gsm8k(text: str, gold: str, format_reward: float = 0.1) -> dict[str, Any]:
    return torchrl_verdict(text, lambda answer: torchrl_number(answer) == torchrl_number(gold), format_reward)


def torchrl_boxed(text: str) -> str:
    """Contents of the last box; the text itself without one; all but the last character of an unclosed one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return text.strip()
    end = _closing_brace(text, start)
    return text[start + len("\\boxed{") : -1 if end is None else end].strip()


# ColossalChat --------------------------------------------------------------------------------------------------


def coati_solution(text: str) -> str | None:
    """The last `<answer>`."""
    found = ANSWER.findall(text)
    return found[-1].strip() if found else None


def coati_structure(text: str) -> bool:
    """`<think>` first, `</answer>` last, each of the four tags once and in order."""
    return think_answer_format(text) and text.startswith("<think>") and text.endswith("</answer>")


def coati_boxed_solution(text: str) -> str | None:
    """Contents of the last box whose braces match."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    end = _closing_brace(text, start)
    return None if end is None else text[start + len("\\boxed{") : end]


def trl_think_format(text: str) -> float:
    """1 for a text that begins with its only `<think>`, closed somewhere."""
    begins = text.startswith("<think>") and "<think>" not in text[len("<think>") :]
    return float(begins and "</think>" in text)
