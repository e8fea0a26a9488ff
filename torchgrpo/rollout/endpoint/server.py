"""Serves the policy to agents over HTTP, with a key for each episode.

    agent ── HTTP ──▶ connection ──▶ handler ──▶ task of an answer ──▶ Conversation.sample_turn ──▶ engine
                                        │            ▲
    agent again (same request) ── handler ───────────┘

Connections, handlers and answers run in the run's event loop. A client that goes away cancels its handler, the last
handler of an answer cancels the answer's task, and the cancelled `sample_turn` frees its engine row.
"""

import asyncio
import hashlib
import logging
import resource
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from config.schema.errors import ConfigError
from envs.agents.results import AgentResult
from torchgrpo.rollout.conversation import EpisodeOverError, LimitError, PromptError, SampledTurn, TurnSource
from torchgrpo.rollout.endpoint.chat_completions import (
    ChatRequest,
    DecodeTokens,
    chat_reply,
    chat_stream,
    parse_chat_request,
)
from torchgrpo.rollout.endpoint.connection import Connection, RefusedConnection
from torchgrpo.rollout.endpoint.messages_api import messages_reply, messages_stream, messages_to_chat
from torchgrpo.rollout.endpoint.open_episode import OpenEpisode, parse_reward
from torchgrpo.rollout.endpoint.replies import Reply, error_reply, json_reply
from torchgrpo.rollout.endpoint.request_body import RequestError, parse_json_object
from torchgrpo.rollout.endpoint.responses_api import responses_reply, responses_stream, responses_to_chat

MAX_BODY_BYTES = 32 * 2**20
MAX_REQUESTS_IN_FLIGHT = 64
"""Requests of one key at the same time."""
MAX_CONNECTIONS = 4096
MAX_CLOSED_KEYS = 2**16
MAX_WARNINGS = 32
BACKLOG = 1024
SHUTDOWN_S = 5.0
MODELS = {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "grpo"}]}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Form:
    """Form of completion requests: its translation to chat completions, and of the replies back."""

    to_chat: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    reply: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]]
    stream: Callable[[dict[str, Any], Mapping[str, Any]], bytes]


_FORMS = {
    "/v1/chat/completions": _Form(lambda body: body, lambda reply, body: reply, chat_stream),
    "/v1/messages": _Form(messages_to_chat, messages_reply, messages_stream),
    "/v1/responses": _Form(responses_to_chat, responses_reply, responses_stream),
}
_METHODS = {**dict.fromkeys(_FORMS, "POST"), "/v1/models": "GET", "/v1/episode/reward": "POST"}


class Endpoint:
    """Endpoint of a run.

    Args:
        decode: returns the text of each token, for `logprobs`.
        host: address to listen on. Agents with a key may use the policy, so another host than loopback opens it to
            the network.
        port: 0 for a free port.
        deadline_s: seconds for a client to send a request, or to read a reply.
    """

    def __init__(self, decode: DecodeTokens, host: str = "127.0.0.1", port: int = 0, deadline_s: float = 60.0) -> None:
        self.url = ""
        self._decode, self._host, self._port, self._deadline_s = decode, host, port, deadline_s
        self._episodes: dict[str, OpenEpisode] = {}
        self._closed_keys: dict[str, None] = {}
        self._warnings: set[str] = set()
        num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        is_bounded = num_files != resource.RLIM_INFINITY
        self._max_connections = min(MAX_CONNECTIONS, num_files // 2) if is_bounded else MAX_CONNECTIONS
        self._reset_metrics()

    def _reset_metrics(self) -> None:
        self._num_requests = self._num_refused = self._num_answered = 0
        self._overhead_s = 0.0

    async def start(self) -> None:
        """Listens for requests.

        Raises:
            ConfigError: the address is in use, or is none of this machine.
        """
        loop = asyncio.get_running_loop()
        self._server = web.Server(self._handle, handler_cancellation=True)
        try:
            self._listener = await loop.create_server(self._connect, self._host, self._port, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(f"the endpoint cannot listen on {self._host}:{self._port}: {error.strerror}") from error
        port = self._listener.sockets[0].getsockname()[1]
        self.url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}/v1"

    def _connect(self) -> asyncio.Protocol:
        if len(self._server.connections) >= self._max_connections:
            return RefusedConnection()  # the run needs the other file descriptors
        return Connection(self._server, asyncio.get_running_loop(), self._deadline_s)

    async def stop(self) -> None:
        """Closes episodes and connections."""
        self._listener.close()
        answers = [answer.task for episode in self._episodes.values() for answer in episode.answers.values()]
        for key in list(self._episodes):
            self._remove_episode(key)
        await asyncio.gather(*answers, return_exceptions=True)
        self._server.pre_shutdown()
        await self._server.shutdown(SHUTDOWN_S)

    def open_episode(self, conversation: TurnSource) -> str:
        """Returns the API key of an episode."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._episodes[key] = OpenEpisode(conversation)
        return key

    def last_refusal(self, key: str) -> str:
        """Returns the reason of the last refused request of an episode; empty without one."""
        return self._episodes[key].last_refusal

    def close_episode(self, key: str) -> AgentResult | None:
        """Ends an episode; returns the reward that the agent reported, if any.

        Raises:
            Exception: the first failure of the conversation that is no fault of a request, such as a lost engine.
        """
        episode = self._remove_episode(key)
        if episode.failure is not None:
            raise episode.failure
        return episode.reported_reward

    def _remove_episode(self, key: str) -> OpenEpisode:
        episode = self._episodes.pop(key)
        self._closed_keys[key] = None
        if len(self._closed_keys) > MAX_CLOSED_KEYS:
            del self._closed_keys[next(iter(self._closed_keys))]
        episode.cancel_answers()
        return episode

    def metrics(self) -> dict[str, float]:
        """Returns requests, refused ones, and the mean overhead in seconds, since the last call.

        The overhead is the time from the end of a request's body to the end of its reply, without `sample_turn`.
        """
        numbers = {
            "endpoint/requests": float(self._num_requests),
            "endpoint/refused": float(self._num_refused),
            "endpoint/overhead_s": self._overhead_s / max(1, self._num_answered),
        }
        self._reset_metrics()
        return numbers

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers a request; every fault of a client is a status."""
        self._num_requests += 1
        try:
            method = _METHODS.get(request.path)
            if method is None:
                raise RequestError(404, "this path is unknown; the paths are " + ", ".join(_METHODS))
            if request.method != method:
                error = RequestError(405, f"this path takes {method} requests only")
                return await self._send(request, error_reply(error, {"Allow": method}))
            episode = self._find_episode(request)
            if episode.num_requests >= MAX_REQUESTS_IN_FLIGHT:
                raise RequestError(
                    429, f"{MAX_REQUESTS_IN_FLIGHT} requests of this key are in flight; wait for one", may_retry=True
                )
            episode.num_requests += 1
            try:
                return await self._answer_episode(request, episode)
            finally:
                episode.num_requests -= 1
        except RequestError as error:
            return await self._send(request, error_reply(error))

    def _find_episode(self, request: web.BaseRequest) -> OpenEpisode:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if (episode := self._episodes.get(key)) is not None:
            return episode
        if key in self._closed_keys:
            raise RequestError(410, "the episode of this API key is over", code="episode_over")
        raise RequestError(
            401, "no episode has this API key; send the key of OPENAI_API_KEY as a bearer token", code="invalid_api_key"
        )

    async def _answer_episode(self, request: web.BaseRequest, episode: OpenEpisode) -> web.StreamResponse:
        if request.path == "/v1/models":
            return await self._send(request, json_reply(MODELS))
        body = await self._read_body(request)
        started_at = time.perf_counter()
        episode = self._find_episode(request)  # it may have ended meanwhile
        if request.path == "/v1/episode/reward":
            episode.reported_reward = parse_reward(parse_json_object(body, "the body"))
            return await self._send(request, json_reply(vars(episode.reported_reward)))
        digest = hashlib.blake2b(body, digest_size=16, person=request.path.encode()[-16:]).digest()
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        form = _FORMS[request.path]
        answer = episode.join_reply(digest, is_retry, lambda: self._make_reply(episode, form, body))
        is_first = not answer.task.done() and answer.num_clients == 1
        try:
            await asyncio.wait((answer.task,))
            if answer.task.cancelled():
                raise RequestError(410, "the episode of this API key is over", code="episode_over")
            reply = answer.task.result()
            response = await self._send(request, reply)
            answer.is_delivered = True
        finally:
            episode.leave_reply(digest, answer)
        if is_first and reply.status == 200:
            self._num_answered += 1
            self._overhead_s += time.perf_counter() - started_at - reply.sampling_s
        return response

    async def _read_body(self, request: web.BaseRequest) -> bytes:
        """Reads a body of bounded size, within the deadline."""
        too_large = RequestError(413, f"the body is larger than {MAX_BODY_BYTES} bytes; send shorter messages")
        if (request.content_length or 0) > MAX_BODY_BYTES:
            raise too_large
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise RequestError(415, "the body is compressed; send it without Content-Encoding")
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        body = bytearray()
        try:
            async with asyncio.timeout(self._deadline_s):
                async for chunk in request.content.iter_any():
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        raise too_large
        except TimeoutError:
            raise RequestError(
                408, f"the body did not arrive within {self._deadline_s:g} s; send it again", may_retry=True
            ) from None
        except web.RequestPayloadError:
            raise RequestError(400, "the body is cut or badly encoded; send it whole") from None
        return bytes(body)

    async def _make_reply(self, episode: OpenEpisode, form: _Form, text: bytes) -> Reply:
        """Samples the turns of a request, and returns the reply or an error."""
        try:
            body = parse_json_object(text, "the body")
            chat_body = form.to_chat(body)
            chat = parse_chat_request(chat_body, self._warn_once)
            started_at = time.perf_counter()
            turns = await _sample_turns(episode.conversation, chat)
            sampling_s = time.perf_counter() - started_at
            reply = form.reply(chat_reply(chat, turns, self._decode), body)
            if body.get("stream"):
                return Reply(200, form.stream(reply, body), {}, "text/event-stream", sampling_s)
            return json_reply(reply, sampling_s)
        except RequestError as error:
            refusal = error
        except LimitError as error:
            refusal = RequestError(429, str(error), code="episode_limit")
        except PromptError as error:
            refusal = RequestError(400, str(error), "messages")
        except EpisodeOverError as error:
            refusal = RequestError(410, str(error), code="episode_over")
        except RecursionError:
            refusal = RequestError(400, "the body is nested too deeply")
        except Exception as error:  # `close_episode` raises it, and an episode that is served alone may never close
            if episode.failure is None:
                episode.failure = error
                log.exception("the policy failed to answer a request")
            refusal = RequestError(500, "the policy failed; the run reports the reason")
        episode.last_refusal = refusal.message
        return error_reply(refusal)

    def _warn_once(self, setting: str, message: str) -> None:
        if setting not in self._warnings and len(self._warnings) < MAX_WARNINGS:
            self._warnings.add(setting)
            log.warning("%s", message)

    async def _send(self, request: web.BaseRequest, reply: Reply) -> web.StreamResponse:
        """Sends a reply.

        Raises:
            ConnectionError: the client has gone away, or does not read.
        """
        self._num_refused += 400 <= reply.status < 500
        response = reply.response()
        if reply.status in (408, 413):
            response.force_close()
        try:
            async with asyncio.timeout(self._deadline_s):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client does not read its reply") from None
        return response


async def _sample_turns(conversation: TurnSource, chat: ChatRequest) -> list[SampledTurn]:
    """Samples the choices of a request at the same time.

    The first error cancels the others.
    """

    def sample_turn() -> Awaitable[SampledTurn]:
        return conversation.sample_turn(chat.messages, chat.tools, max_tokens=chat.max_tokens, stop=chat.stop)

    if chat.n == 1:
        return [await sample_turn()]
    tasks = [asyncio.ensure_future(sample_turn()) for _ in range(chat.n)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
