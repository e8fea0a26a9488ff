"""What became of every completion of a group, for people and files."""

from collections.abc import Iterator
from typing import Any

from tensordict import TensorDictBase

from envs.task import Example
from envs.token_env import FINISH_REASONS, OUTCOMES, TokenEnv
from envs.verdicts import success


def attempts(example: Example, group: TensorDictBase, env: TokenEnv) -> Iterator[dict[str, Any]]:
    """One JSON object for every completion of a scored group."""
    prompt = env.prompt_texts(group[:1])[0]
    parts = group["next", "reward_parts"]
    rows = zip(
        env.texts(group),
        group["next", "reward"][:, 0].tolist(),
        (success(group) >= 1).tolist(),
        group["next", "reward_status"][:, 0].tolist(),
        group["finish_reason"][:, 0].tolist(),
        group["tokens", "loss_mask"].sum(-1).tolist(),
        strict=True,
    )
    for sample, (text, score, correct, outcome, reason, tokens) in enumerate(rows):
        yield {
            "row": example.row,
            "sample": sample,
            "correct": correct,
            "score": score,
            "outcome": OUTCOMES[outcome],
            "parts": {name: float(parts[name][sample, 0]) for name in parts.keys()},  # noqa: SIM118
            "finish_reason": FINISH_REASONS[reason],
            "tokens": tokens,
            "prompt": prompt,
            "completion": text,
        }
