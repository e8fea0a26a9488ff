"""Conversations behind one API key, for `run=serve`: requests are matched to conversations by their messages.

request ─▶ the newest conversation with an answer that it repeats ─▶ Conversation.sample_turn ─▶ on_turn
       └─▶ else a new conversation
"""

from collections.abc import Callable, Sequence
from typing import Any

from config.schema.errors import ConfigError
from envs.example import Example, Message
from envs.group import Sampling
from torchgrpo.rollout.conversation import Conversation, ConversationParts, PromptError, SampledTurn
from torchgrpo.rollout.engines.interface import Request

MAX_CONVERSATIONS = 256
"""Conversations that later requests can continue; older ones are forgotten."""
OnTurn = Callable[[int, Sequence[Message], Sequence[dict[str, Any]], SampledTurn], None]
"""Receives the number of the conversation, messages and tools of the request, and the turn."""


class ServedConversations:
    """Conversations of any number of clients.

    seed: of the run; a conversation's number and its turns determine the seeds of its requests.
    """

    def __init__(self, parts: ConversationParts, sampling: Sampling, seed: int, on_turn: OnTurn) -> None:
        self.parts, self.sampling, self.seed, self.on_turn = parts, sampling, seed, on_turn
        self._conversations: dict[int, Conversation] = {}
        self._num_conversations = 0

    async def sample_turn(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> SampledTurn:
        """Samples the next turn of the conversation that the messages continue, as `Conversation.sample_turn`."""
        messages, tools = tuple(messages), tuple(tools)
        newest_first = reversed(self._conversations)
        number = next((each for each in newest_first if self._conversations[each].repeats(messages, tools)), None)
        if number is None:
            number = self._start_conversation(messages, tools)
        turn = await self._conversations[number].sample_turn(messages, tools, max_tokens=max_tokens, stop=stop)
        self.on_turn(number, messages, tools, turn)
        return turn

    def _start_conversation(self, messages: tuple[Message, ...], tools: tuple[dict[str, Any], ...]) -> int:
        number = self._num_conversations
        example = Example(messages, None, number, tools=tools)
        try:
            prompt = self.parts.encoder.encode(example)
        except ConfigError as error:
            raise PromptError(str(error)) from error
        request = Request(number, prompt, 1, self.sampling, (self.seed << 40) + number)
        self._conversations[number] = Conversation(self.parts, example, request, 0)
        self._num_conversations += 1
        if len(self._conversations) > MAX_CONVERSATIONS:
            del self._conversations[next(iter(self._conversations))]
        return number
