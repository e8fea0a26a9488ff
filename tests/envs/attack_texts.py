"""Answers to additions that try to earn a reward without the sum.

The module also has a strict check of such answers.
"""

import random
import re
from fractions import Fraction

MAX_ADDEND = 9
"""Maximum addend."""
BOXED_PATTERN = r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"
ANY_MARK = rf"(?:{BOXED_PATTERN}|<answer>(.*?)</answer>|####(.*)|[Aa]nswer:(.*))"
MARK_PATTERNS = {
    "math": "",
    "exact": "",
    "boxed": BOXED_PATTERN,
    "think_answer_tags": r"<answer>(.*?)</answer>",
    "gsm8k": "####(.*)",
    "dapo": r"[Aa]nswer:(.*)",
}
"""Pattern of the mark that each named reward requires."""
WORDS = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen",
)
"""Sums in words, in order."""
MARKS = (
    "{}",
    "The answer is {}.",
    "\\boxed{{{}}}",
    "Answer: {}",
    "#### {}",
    "<answer>{}</answer>",
    "<think>a</think><answer>{}</answer>",
)
"""Formats that mark an answer."""


def is_right(question: str, answer: str, mark: str = "") -> bool:
    """Whether the answer to `A+B=` states the sum, behind the mark if one is required."""
    a, b = map(int, re.findall(r"(\d+)\+(\d+)=", question)[-1])
    answer_text = answer.rpartition("</think>")[2]
    matches = list(re.finditer(mark or ANY_MARK, answer_text))
    if matches:
        answer_text = next(group for group in reversed(matches[-1].groups()) if group is not None)
    return (bool(matches) or not mark) and parse_written_number(answer_text) == a + b


def parse_written_number(text: str) -> Fraction | None:
    """Returns the only number behind the last `=` or `is`, if the number is simplified."""
    end = re.split(r"=|\bis\b|\bequals\b", text)[-1].strip(" .$*").removeprefix("+")
    if end.lower() in WORDS:
        return Fraction(WORDS.index(end.lower()))
    numbers = re.findall(r"\d[\d,]*(?:\.\d+)?", end)
    if len(numbers) != 1 or re.search(r"\d\s*[-+*/^!%]|[+*/^]\s*\d|--|\\(?:sqrt|frac|cdot|times|pm)", end):
        return None
    value = Fraction(numbers[0].replace(",", ""))
    return -value if re.search(r"-\s*\$?\d", end) else value


def sample_questions(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Samples questions with answers, every tenth with a second mark.

    The second mark has a random number and precedes the answer.
    """

    def sample_question() -> tuple[str, str]:
        question, answer = sample_attempt(rng)
        if rng.random() < 0.1:
            answer = rng.choice(MARKS).format(rng.randint(0, 2 * MAX_ADDEND)) + answer
        return question, answer

    return [sample_question() for _ in range(count)]


def sample_attempt(rng: random.Random) -> tuple[str, str]:
    """Samples a question and an answer that is right, wrong, evasive or misleading.

    About one answer in four is right.
    """
    a, b, other = (rng.randint(0, MAX_ADDEND) for _ in range(3))
    right, wrong = a + b, rng.randint(0, 2 * MAX_ADDEND)
    claim = rng.choice(
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
    return f"{a}+{b}=", rng.choice(MARKS).format(claim)
