"""Where in a completion the answer stands: pure text, linear time, no regular expression that can backtrack."""

import re

NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def last_tagged(text: str, tag: str) -> str | None:
    """What stands between the last `<tag>` that is closed and its `</tag>`."""
    end = text.rfind(f"</{tag}>")
    if end < 0:
        return None
    start = text.rfind(f"<{tag}>", 0, end)
    return None if start < 0 else text[start + len(tag) + 2 : end].strip()


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`; None where there is none or its brace is never closed."""
    start = text.rfind("\\boxed{")
    return None if start < 0 else balanced(text, start + len("\\boxed"))


def balanced(text: str, opening: int) -> str | None:
    """What stands between the brace at `opening` and its partner; escaped braces do not count."""
    depth = 0
    index = opening
    while index < len(text):
        character = text[index]
        if character == "\\":
            index += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[opening + 1 : index]
        index += 1
    return None


def after_hashes(text: str) -> str | None:
    """The rest of the line after the last `####`, as GSM8K marks its answers."""
    _, mark, rest = text.rpartition("####")
    return rest.strip().split("\n")[0].strip() if mark else None


def after_answer_line(text: str) -> str | None:
    """What follows `Answer:` on the last line that has it, as DAPO's prompt asks for."""
    lowered = text.lower()
    start = lowered.rfind("answer:")
    return None if start < 0 else text[start + len("answer:") :].lstrip(" *").split("\n")[0].strip(" *")
