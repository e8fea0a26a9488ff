"""Answers to additions that try to be paid without a sum, and a strict check of them."""

import random
import re
from fractions import Fraction

LARGEST = 9
BOXED = r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"
ANY_MARK = rf"(?:{BOXED}|<answer>(.*?)</answer>|####(.*)|[Aa]nswer:(.*))"
FORMS = {
    "math": "",
    "exact": "",
    "boxed": BOXED,
    "think_answer_tags": r"<answer>(.*?)</answer>",
    "gsm8k": "####(.*)",
    "dapo": r"[Aa]nswer:(.*)",
}
"""Named rewards, and the mark that each asks for."""
WORDS = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen",
)
MARKS = (
    "{}",
    "The answer is {}.",
    "\\boxed{{{}}}",
    "Answer: {}",
    "#### {}",
    "<answer>{}</answer>",
    "<think>a</think><answer>{}</answer>",
)


def is_right(question: str, answer: str, mark: str = "") -> bool:
    """Whether the sum of `A+B=` is written out, behind the mark where there is one to be."""
    a, b = map(int, re.findall(r"(\d+)\+(\d+)=", question)[-1])
    spoken = answer.rpartition("</think>")[2]
    found = list(re.finditer(mark or ANY_MARK, spoken))
    if found:
        spoken = next(group for group in reversed(found[-1].groups()) if group is not None)
    return (bool(found) or not mark) and written_number(spoken) == a + b


def written_number(said: str) -> Fraction | None:
    """The one number behind the last `=` or `is`, if nothing is left to calculate."""
    end = re.split(r"=|\bis\b|\bequals\b", said)[-1].strip(" .$*").removeprefix("+")
    if end.lower() in WORDS:
        return Fraction(WORDS.index(end.lower()))
    numbers = re.findall(r"\d[\d,]*(?:\.\d+)?", end)
    if len(numbers) != 1 or re.search(r"\d\s*[-+*/^!%]|[+*/^]\s*\d|--|\\(?:sqrt|frac|cdot|times|pm)", end):
        return None
    value = Fraction(numbers[0].replace(",", ""))
    return -value if re.search(r"-\s*\$?\d", end) else value


def babble(chance: random.Random, count: int) -> list[tuple[str, str]]:
    """Questions with answers, of which one out of ten has a second mark with a random number before the other."""

    def one() -> tuple[str, str]:
        question, answer = attempt(chance)
        if chance.random() < 0.1:
            answer = chance.choice(MARKS).format(chance.randint(0, 2 * LARGEST)) + answer
        return question, answer

    return [one() for _ in range(count)]


def attempt(chance: random.Random) -> tuple[str, str]:
    """A question and its answer: right in about one case out of four, else wrong, evasive or misleading."""
    a, b, other = (chance.randint(0, LARGEST) for _ in range(3))
    right, wrong = a + b, chance.randint(0, 2 * LARGEST)
    said = chance.choice(
        (
            *[str(right)] * 3,
            *[str(wrong)] * 4,
            *(f"{a}+{b}", f"{a} + {b}", f"({a})+({b})", f"{a}+{b}+0", f"{a}+{other}", f"{a} plus {b}"),
            *(f"{a}+{b}={right}", f"{a}+{b}={wrong}", f"{right}={a}+{b}"),
            *(f"{wrong} or {right}", f"{right}, {wrong}", " ".join(map(str, range(right + 1)))),
            *(f"\\frac{{{2 * right}}}{{2}}", f"\\sqrt{{{right * right}}}", f"{right}^1", f"{wrong}/1"),
            *(f"{WORDS[a]} {WORDS[b]}", WORDS[right], f"{right}.0", f"--{right}"),
        )
    )
    return f"{a}+{b}=", chance.choice(MARKS).format(said)
