"""Holds answers and reward of an episode that has a key.

    request ─┬─ same path and body in flight ──▶ waits for that answer ─┐
             ├─ same, reply not delivered ─────▶ that reply             ├─▶ client
             └─ else ──▶ task: sample turns ───▶ new reply ─────────────┘

The task of an answer is cancelled when its last client goes away, or when the episode closes.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from envs.agents.results import AgentResult, read_record
from torchgrpo.rollout.conversation import TurnSource
from torchgrpo.rollout.endpoint.replies import Reply
from torchgrpo.rollout.endpoint.request_body import bad_request, short_repr

MAX_RECENT_ANSWERS = 64


@dataclass(eq=False)
class SharedReply:
    """Answer to a request, with the number of clients that wait for it.

    is_delivered: whether a client has received the reply.
    """

    task: asyncio.Task[Reply]
    num_clients: int = 0
    is_delivered: bool = False

    def has_failed(self) -> bool:
        """Whether no sampled reply exists or will exist."""
        return self.task.done() and (self.task.cancelled() or self.task.result().status != 200)


@dataclass(eq=False)
class OpenEpisode:
    """Conversation of an episode, with its answers by the digest of their requests.

    failure: first exception of the conversation that is no fault of a request. last_refusal: reason of the last
    refused request.
    """

    conversation: TurnSource
    answers: dict[bytes, SharedReply] = field(default_factory=dict)
    num_requests: int = 0
    reported_reward: AgentResult | None = None
    failure: Exception | None = None
    last_refusal: str = ""

    def join_reply(
        self, digest: bytes, is_retry: bool, make_reply: Callable[[], Coroutine[Any, Any, Reply]]
    ) -> SharedReply:
        """Returns the answer to a request, for one more client.

        A request that an earlier one equals is answered once while it is in flight, where its reply did not reach a
        client, and where the client says that it sends the request again.

        is_retry: whether the client says so. make_reply: samples the reply and raises nothing.
        """
        answer = self.answers.get(digest)
        if answer is None or (answer.is_delivered and not is_retry):
            answer = self.answers[digest] = SharedReply(asyncio.create_task(make_reply()))
            self._remove_old_answers()
        answer.num_clients += 1
        return answer

    def leave_reply(self, digest: bytes, answer: SharedReply) -> None:
        """Removes a client; the last one cancels an unfinished answer."""
        answer.num_clients -= 1
        if answer.num_clients:
            return
        is_unfinished = answer.task.cancel()
        if (is_unfinished or answer.has_failed()) and self.answers.get(digest) is answer:
            del self.answers[digest]

    def cancel_answers(self) -> None:
        """Cancels the answers in flight."""
        for answer in self.answers.values():
            answer.task.cancel()

    def _remove_old_answers(self) -> None:
        num_extra = len(self.answers) - MAX_RECENT_ANSWERS
        unused = [digest for digest, answer in self.answers.items() if not answer.num_clients and answer.task.done()]
        for digest in unused[: max(0, num_extra)]:
            del self.answers[digest]


def parse_reward(body: Mapping[str, Any]) -> AgentResult:
    """Checks a reported reward.

    Raises:
        RequestError: no finite number, or an unknown field.
    """
    if unknown := body.keys() - {"reward", "components"}:
        raise bad_request(f"the field {short_repr(min(unknown))} is unknown; send reward and components")
    if body.get("reward") is None:
        raise bad_request("reward is missing; send a number", "reward")
    try:
        return read_record(body)
    except ValueError as error:
        raise bad_request(str(error)) from None
