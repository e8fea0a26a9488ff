"""Episodes in an environment, by hand: tool calls, several sequences, and an environment that failed."""

from typing import Any

from envs.example import Message
from envs.group import SampledCompletion, SequenceStart, Turn
from tests.groups import make_completion


def tool_call(name: str, identifier: str = "call_1", **arguments: Any) -> Message:
    """Returns a tool call as a message has it."""
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_result(content: str, identifier: str = "call_1") -> Message:
    return {"role": "tool", "tool_call_id": identifier, "content": content}


def tool_episode() -> SampledCompletion:
    """Returns an episode of two calls with results and a malformed one, then the answer."""
    calls = [tool_call("mul", a=12, b=7), tool_call("lookup", "call_2", query="84", deep={"limit": None})]
    first = Turn(
        {"role": "assistant", "content": "I multiply.", "reasoning_content": "12 * 7", "tool_calls": calls},
        0,
        4,
        (tool_result("nothing\nfound", "call_2"), tool_result("84"), tool_result("no JSON", "call_3")),
        reward=0.25,
        engine_seconds=0.5,
        env_seconds=0.125,
        tool_outcomes=("ok", "error", "malformed"),
    )
    second = Turn({"role": "assistant", "content": "84"}, 7, 9, reward=0.75, engine_seconds=0.25)
    return make_completion(
        9,
        1.0,
        {"accuracy": 1.0},
        sampled_mask=[True] * 4 + [False] * 3 + [True] * 2,
        turns=[first, second],
        text="I multiply. mul 84",
    )


def rewritten_episode() -> SampledCompletion:
    """Returns an episode of three turns that the deadline ended.

    The third turn begins the second sequence.
    """
    hint: Message = {"role": "user", "content": "41+1="}
    board: Message = {"role": "user", "content": "an empty board"}
    turns = [
        Turn({"role": "assistant", "content": "40"}, 0, 2, (hint,), (board,), engine_seconds=1.0, env_seconds=2.0),
        Turn({"role": "assistant", "content": "41"}, 3, 5, (hint,), engine_seconds=1.0, env_seconds=2.0),
        Turn({"role": "assistant", "content": ""}, 5, 6, engine_seconds=1.0, env_seconds=3.0),
    ]
    return make_completion(
        6,
        0.0,
        {"accuracy": 0.0},
        finish_reason="deadline",
        sampled_mask=[True, True, False, True, True, True],
        sequence_starts=[SequenceStart(0, (5, 6)), SequenceStart(5, (5, 6, 3, 4))],
        turns=turns,
        text="40 41",
    )


def failed_episode() -> SampledCompletion:
    """Returns an episode whose environment raised an error after the first turn."""
    turn = Turn({"role": "assistant", "content": "5"}, 0, 2, engine_seconds=0.5, env_seconds=0.25)
    error = "Game.step raised KeyError: 'board'"
    return make_completion(2, outcome="error", finish_reason="error", turns=[turn], text="5", error=error)


def hostile_episode() -> SampledCompletion:
    """Returns an episode whose texts, arguments and error hold markup and lone surrogates."""
    markup = "</script><script>alert(1)</script>\x1b \u202e"
    call = tool_call(markup, **{markup: "\ud800", "number": 10**30})
    turn = Turn(
        {"role": "assistant", "content": markup, "reasoning_content": markup, "tool_calls": [call]},
        0,
        3,
        (tool_result(markup), {"role": "user", "content": markup}),
        tool_outcomes=("unknown",),
    )
    return make_completion(
        3, outcome="error", finish_reason="error", turns=[turn], text=markup, error=f"{markup} \udc80"
    )
