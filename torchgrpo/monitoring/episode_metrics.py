"""Metrics of episodes in an environment: turns, sequences, ends, seconds, tool calls, rewards of turns.

Means are over episodes, never over batch rows, so an episode with several sequences counts once.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from envs.group import FinishReason, SampledCompletion, ToolOutcome, Turn

MAX_REWARD_TURNS = 8
"""Maximum number of turns with a mean reward of their own."""
_ENDS: tuple[FinishReason, ...] = ("stop", "length", "turns", "deadline", "error")
_TOOL_FAULTS: dict[ToolOutcome, str] = {
    "error": "errors",
    "malformed": "malformed",
    "unknown": "unknown",
    "timeout": "timeouts",
}
"""Outcomes of failed calls, with the last part of their metric's name."""


def turn_metrics(completions: Sequence[SampledCompletion]) -> dict[str, float]:
    """Returns the metrics of turns and sequences.

    Without an environment, and with one turn in every completion, there are none.

    completions: of all groups of an optimizer step, without unselected candidates.
    """
    has_records = any(one.turns for one in completions)
    if not has_records and all(all(one.sampled_mask) for one in completions):
        return {}
    counts = [_count_turns(one) for one in completions]
    metrics = {"turns/mean": sum(counts) / len(counts)}
    metrics["turns/sampled_tokens"] = sum(one.num_sampled_tokens for one in completions) / len(completions)
    if has_records:
        metrics["turns/max"] = float(max(counts))
        metrics["agent/sequences"] = sum(one.num_sequences for one in completions) / len(completions)
    return metrics


def _count_turns(completion: SampledCompletion) -> int:
    """Returns the number of turns of the model.

    Without recorded turns this is one turn, plus one for each token of the environment before a sampled token.
    """
    if completion.turns or not completion.token_ids:
        return len(completion.turns)
    return 1 + bytes(completion.sampled_mask).count(b"\0\1")


def episode_metrics(completions: Sequence[SampledCompletion]) -> dict[str, float]:
    """Returns ends, seconds, tool calls and rewards of turns; empty without recorded turns.

    completions: all generated completions of an optimizer step, also unselected candidates and replaced groups.
    """
    if not any(one.turns for one in completions):
        return {}
    ends = Counter(one.finish_reason for one in completions)
    metrics = {f"agent/end/{end}": ends[end] / len(completions) for end in _ENDS}
    seconds = {
        "engine": [sum(turn.engine_seconds for turn in one.turns) for one in completions],
        "start": [sum(turn.start_seconds for turn in one.turns) for one in completions],
        "environment": [sum(turn.env_seconds for turn in one.turns) for one in completions],
    }
    for side, values in seconds.items():
        for share in (50, 95):
            metrics[f"agent/seconds/{side}_p{share}"] = float(np.percentile(values, share))
    for number in range(min(MAX_REWARD_TURNS, max(len(one.turns) for one in completions))):
        rewards = [one.turns[number].reward for one in completions if number < len(one.turns)]
        metrics[f"reward/turn/{number + 1}"] = sum(rewards) / len(rewards)
    return metrics | _tool_metrics(completions)


def _tool_metrics(completions: Sequence[SampledCompletion]) -> dict[str, float]:
    """Returns the mean number of calls, and the shares of failed calls; empty without calls."""
    turns = [turn for one in completions for turn in one.turns]
    calls = sum(count_tool_calls(turn) for turn in turns)
    if not calls:
        return {}
    outcomes = Counter(outcome for turn in turns for outcome in turn.tool_outcomes)
    metrics = {"tools/calls": calls / len(completions)}
    return metrics | {f"tools/{name}": outcomes[outcome] / calls for outcome, name in _TOOL_FAULTS.items()}


def count_tool_calls(turn: Turn) -> int:
    """Returns the number of a turn's tool calls, with malformed ones of known outcome."""
    return max(len(turn.tool_outcomes), len(turn.message.get("tool_calls") or ()))
