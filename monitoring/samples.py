"""A question with the best and the worst of its answers, for a person to read."""

from envs.group import Group, SampledCompletion, Verdict
from envs.task import Example

LONGEST_TEXT, LONGEST_GOLD = 4000, 200


def sample_text(step: int, group: Group) -> str:
    """Several lines about a group."""
    lines = [f"sample at step {step}", _indented(question(group.example), 2)]
    scores = [verdict.score for verdict in group.verdicts]
    for index in dict.fromkeys((scores.index(max(scores)), scores.index(min(scores)))):
        one, verdict = group.completions[index], group.verdicts[index]
        lines += [f"  {_headline(one, verdict, group.example)}", _indented(one.text, 4)]
    return "\n".join(lines)


def question(example: Example) -> str:
    """What the user asked; a whole chat with its roles. The system prompt is the same for all and left out."""
    asked = [message for message in example.messages if message["role"] != "system"]
    if len(asked) == 1:
        return asked[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in asked)


def _headline(one: SampledCompletion, verdict: Verdict, example: Example) -> str:
    """`reward 0.20 (accuracy 0, brief 0.2), 8 tokens, stop; gold 5`"""
    parts = ", ".join(f"{name} {value:.3g}" for name, value in verdict.parts.items())
    outcome = "" if verdict.outcome == "scored" else f", {verdict.outcome}"
    gold = _short(" ".join(str(example.answer).split()), LONGEST_GOLD)
    return (
        f"reward {verdict.score:.2f}{f' ({parts})' if parts else ''}{outcome}, {one.num_drawn} tokens, "
        f"{one.finish_reason}; gold {gold}"
    )


def _indented(text: str, width: int) -> str:
    return "\n".join(" " * width + line for line in _short(text, LONGEST_TEXT).splitlines() or [""])


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ..."
