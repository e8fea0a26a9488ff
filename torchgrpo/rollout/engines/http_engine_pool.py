"""Pool of vLLM servers that somebody else runs, behind the `Engine` protocol.

    caller's thread                                            loop of the HTTP clients
    submit ─▶ waiting ──least loaded server──▶ on one server ─▶ a POST for each completion ──▶ server
                 ▲                                 │                      │
                 └── the server died, restarted ───┘      events ◀────────┘ the group, or why the server is lost
                     or hangs
    step ─▶ waits for an event; the groups of a lost server wait for other servers, or for its return
    load ─▶ files of the push ─▶ every live server pauses, reloads, resumes

    absent ──answers, has the settings, loads the last push, scores as the others──▶ live ──lost──▶ absent

One thread uses a pool. The coroutines touch no state of the pool but `_source`, which a push replaces as a whole.
"""

import asyncio
import logging
import queue
import secrets
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from itertools import count
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from config.schema.errors import ConfigError
from envs.group import SampledCompletion
from torchgrpo.rollout.engines.completion_ends import CompletionEnds
from torchgrpo.rollout.engines.http_client_thread import HTTPClientThread
from torchgrpo.rollout.engines.http_pool_state import HTTPPoolSettings, ServerSlot, WeightSource
from torchgrpo.rollout.engines.http_sampling import sample_group
from torchgrpo.rollout.engines.http_server import ServerLost, VLLMServer, WeightFilesRefused
from torchgrpo.rollout.engines.interface import Request, Response, SequenceScores
from torchgrpo.rollout.engines.remote_engines import EngineLost
from torchgrpo.rollout.engines.request_dispatcher import RequestDispatcher
from torchgrpo.rollout.weights.transports.weight_folder import WeightFolder
from torchgrpo.rollout.weights.weight_update import WeightUpdate

log = logging.getLogger(__name__)
_RETRY_S = 0.5
_CHECKED_TOKENS = 24
"""Length of the sequence that a returned server scores before it gets requests."""


class HTTPEnginePool:
    """Engines of `inference_model.backend=http`.

    tokenizer: finds stop strings.

    Raises:
        ConfigError: a server is absent or has wrong settings.
    """

    def __init__(
        self, settings: HTTPPoolSettings, folder: WeightFolder, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._ends = CompletionEnds(settings.end_token_ids, tokenizer)
        self._dispatcher = RequestDispatcher(settings.window)
        self._numbers = count(1)
        self._events: queue.SimpleQueue[tuple[ServerSlot, int | None, Future[Any]]] = queue.SimpleQueue()
        self._source = WeightSource(settings.model, 0)
        self._client = HTTPClientThread()
        marker = secrets.token_hex(8)
        self._slots: list[ServerSlot] = []
        try:
            for index, (url, needed) in enumerate(settings.requirements.items()):
                server = VLLMServer(url, self._client.session, needed, marker, settings.request_timeout_s)
                self._slots.append(ServerSlot(next(self._numbers), f"engine {index}", server))
            self._connect_all()
        except BaseException:
            self.close()
            raise

    def _connect_all(self) -> None:
        """Connects all servers at the start of the run; nothing is tried twice."""
        calls = {slot: self._client.start(self._prepare(slot.server)) for slot in self._slots}
        for slot, call in calls.items():
            needed = self._settings.requirements[slot.server.url]
            try:
                call.result(self._settings.start_timeout_s)
            except ServerLost as error:
                raise ConfigError(
                    f"inference_model.urls: no vLLM server answers at {slot.server.url} ({error}). Start it with\n"
                    f"  {needed.gpu_command}"
                ) from None
            except TimeoutError:
                raise ConfigError(
                    f"inference_model.urls: {slot.server.url} did not load {self._settings.model} within "
                    f"{self._settings.start_timeout_s:.0f} s (inference_model.start_timeout_s)"
                ) from None
            self._dispatcher.add_engine(slot.number)

    def close(self) -> None:
        self._client.close()
        self._dispatcher.clear()
        self._folder.close()
        self._slots = []

    # --- SteppedEngine -------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        return self._source.version

    @property
    def in_flight(self) -> int:
        return self._dispatcher.in_flight

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises ValueError if it is too long, or has stop strings without a tokenizer.
        """
        self._ends.check_request(request)
        longest = len(request.prompt) + request.sampling.max_tokens
        if longest > self._settings.max_model_len:
            raise ValueError(
                f"request {request.request_id}: {len(request.prompt)} prompt tokens + max_tokens="
                f"{request.sampling.max_tokens} exceed max_model_len={self._settings.max_model_len}"
            )
        self._dispatcher.submit(request)

    def cancel(self, request_id: int) -> None:
        """Drops a request; its connections close, whereupon the server drops it too."""
        number = self._dispatcher.cancel(request_id)
        for slot in self._slots:
            if slot.number == number:
                slot.requests.pop(request_id).cancel()

    def step(self, timeout: float) -> list[Response]:
        """Sends waiting requests, and returns responses that arrive within `timeout` seconds.

        Raises:
            EngineLost: no server came back in time, or one server or group was lost too often.
        """
        self._dispatch_requests()
        responses = self._handle_events(timeout)
        self._dispatch_requests()
        self._check_deadlines()
        return responses

    def _dispatch_requests(self) -> None:
        assigned = self._dispatcher.assign(time.monotonic())
        for slot in self._slots if assigned else ():
            for request in assigned.get(slot.number, ()):
                call = self._client.start(sample_group(slot.server, request, self._ends))
                slot.requests[request.request_id] = call
                self._report_end(slot, request.request_id, call)

    def _report_end(self, slot: ServerSlot, request_id: int | None, call: "Future[Any]") -> None:
        """Makes the end of a call an event. request_id: None for a connection."""
        call.add_done_callback(lambda future: self._events.put((slot, request_id, future)))

    def _handle_events(self, timeout: float) -> list[Response]:
        """Waits for an event, and handles all events that have arrived."""
        responses: list[Response] = []
        remaining = timeout
        while True:
            try:
                slot, request_id, call = (
                    self._events.get(timeout=remaining) if remaining > 0 else self._events.get(False)
                )
            except queue.Empty:
                return responses
            remaining = 0.0
            if slot not in self._slots or call.cancelled():
                continue
            if request_id is None:
                self._finish_connection(slot, call.result())
            elif slot.requests.get(request_id) is call:
                del slot.requests[request_id]
                responses += self._finish_request(slot, request_id, call)

    def _finish_request(
        self, slot: ServerSlot, request_id: int, call: "Future[list[SampledCompletion]]"
    ) -> list[Response]:
        try:
            completions = call.result()
        except ServerLost as error:
            self._lose(slot, str(error))
            return []
        if not self._dispatcher.finish(slot.number, request_id):
            return []
        slot.consecutive_losses = 0
        for one in completions:
            one.engine = slot.name
        return [Response(request_id, completions)]

    # --- WeightTarget --------------------------------------------------------------------------------------

    @property
    def engine_pids(self) -> tuple[int, ...]:
        """Numbers of the live servers; a server that comes back has another number."""
        return tuple(slot.number for slot in self._live)

    @property
    def _live(self) -> list[ServerSlot]:
        return [slot for slot in self._slots if slot.connection is None]

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Pushes weights by files, which every live server loads.

        The files of the push before are removed. Absent servers load the push when they come back. Waits for a server
        if all are absent.
        """
        files = self._folder.write(WeightUpdate.from_pairs(weights))
        self._source = source = WeightSource(files.path, version)
        scored = self._results({slot: self._client.start(self._load(slot.server, source)) for slot in self._live})
        if scored:
            self._source = source._replace(scores=tuple(next(iter(scored.values()))))
        self._wait_for_live()
        self._folder.remove_older()

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, SequenceScores]:
        """Scores sequences with every live server, except those that are lost meanwhile."""
        while True:
            self._wait_for_live()
            calls = {slot: self._client.start(slot.server.score(sequences)) for slot in self._live}
            if scored := self._results(calls):
                return {slot.name: SequenceScores(rows) for slot, rows in scored.items()}

    def sleep(self) -> None:
        raise ConfigError(
            "inference_model.backend=http: servers do not take turns with the learner on a GPU; leave "
            "inference_model.colocate out"
        )

    def wake(self) -> None:
        self.sleep()

    def _results(self, calls: "dict[ServerSlot, Future[Any]]") -> dict[ServerSlot, Any]:
        """Waits for calls; returns their results without those of servers that are lost meanwhile."""
        # A load is several calls, each with a deadline of its own.
        wait(calls.values(), timeout=5 * self._settings.request_timeout_s)
        results = {}
        for slot, call in calls.items():
            try:
                results[slot] = call.result(0)
            except (ServerLost, TimeoutError) as error:
                call.cancel()
                self._lose(slot, str(error) or "no answer")
        return results

    # --- absent servers ------------------------------------------------------------------------------------

    def _lose(self, slot: ServerSlot, reason: str) -> None:
        """Requeues the groups of a lost server and waits for its return in the background.

        Raises EngineLost after too many losses in a row.
        """
        groups = self._dispatcher.remove_engine(slot.number)
        for call in slot.requests.values():
            call.cancel()
        losses = slot.consecutive_losses + 1
        log.warning("%s at %s is lost with %d groups in flight: %s", slot.name, slot.server.url, len(groups), reason)
        if max(losses, *(self._dispatcher.engine_losses[one.request_id] for one in groups), 0) >= (
            self._settings.max_attempts
        ):
            raise EngineLost(
                f"{slot.name} at {slot.server.url} was lost {losses} times in a row, the last time with {len(groups)} "
                f"groups in flight: {reason}"
            )
        absent_slot = ServerSlot(
            next(self._numbers), slot.name, slot.server, consecutive_losses=losses, loss_reason=reason
        )
        self._slots[self._slots.index(slot)] = absent_slot
        self._connect(absent_slot)

    def _connect(self, slot: ServerSlot) -> None:
        slot.connection = self._client.start(self._reconnect(slot.server))
        self._report_end(slot, None, slot.connection)

    def _finish_connection(self, slot: ServerSlot, source: WeightSource) -> None:
        if source.version != self._source.version:  # a push came after its load
            self._connect(slot)
            return
        slot.connection = None
        if not self._source.scores:
            self._source = source
        self._dispatcher.add_engine(slot.number)
        log.warning("%s at %s is back, with policy version %d", slot.name, slot.server.url, source.version)

    async def _reconnect(self, server: VLLMServer) -> WeightSource:
        """Tries to make an absent server ready, until it succeeds; `_check_deadlines` bounds the attempts."""
        while True:
            source = self._source
            try:
                return await self._prepare(server)
            except ServerLost:
                await asyncio.sleep(_RETRY_S)
            except WeightFilesRefused:
                if source is self._source:  # otherwise a push has removed the files
                    raise

    async def _prepare(self, server: VLLMServer) -> WeightSource:
        """Checks a server and makes it load the present weights; returns them with its scores.

        Raises EngineLost if its scores differ from those of the other servers.
        """
        await server.check()
        source = self._source
        scores = await self._load(server, source)
        if source.scores:
            gaps = [abs(one - other) / (1 + abs(other)) for one, other in zip(scores, source.scores, strict=True)]
            gap = sum(gaps) / len(gaps)
            if not gap <= self._settings.score_bound:
                raise EngineLost(
                    f"the server at {server.url} came back, and after loading policy version {source.version} its "
                    f"log-probs differ by {gap:.2g} in the mean from those before (bound "
                    f"{self._settings.score_bound:g}): it serves another model, or did not load the weights"
                )
        return source._replace(scores=tuple(scores))

    async def _load(self, server: VLLMServer, source: WeightSource) -> list[float]:
        """Makes a server load weights; returns its scores of a fixed sequence."""
        size = min(needed.vocab_size or 1 for needed in self._settings.requirements.values())
        sequence = [37 * index % size for index in range(min(_CHECKED_TOKENS, self._settings.max_model_len - 1))]
        return await server.load(source.path, source.version, self._settings.update, sequence)

    def _wait_for_live(self) -> None:
        """Waits until any server is live."""
        other_events: list[tuple[ServerSlot, int | None, Future[Any]]] = []
        while not self._live:
            try:
                slot, request_id, call = self._events.get(timeout=_RETRY_S)
            except queue.Empty:
                self._check_deadlines()
                continue
            if slot in self._slots and request_id is None and not call.cancelled():
                self._finish_connection(slot, call.result())
            else:
                other_events.append((slot, request_id, call))
        for event in other_events:
            self._events.put(event)

    def _check_deadlines(self) -> None:
        """Counts servers that exceed the request timeout as lost, and reports servers that stay absent.

        Raises EngineLost if all servers stay absent.
        """
        now, limit = time.monotonic(), self._settings.request_timeout_s
        while (oldest := self._dispatcher.oldest_assignment()) is not None and now - oldest.assigned_at > limit:
            slot = next(slot for slot in self._slots if slot.number == oldest.engine)
            self._lose(
                slot,
                f"group {oldest.request.request_id} was not finished within {limit:.0f} s; if the server is only slow, "
                "raise inference_model.request_timeout_s",
            )
        start_limit = self._settings.start_timeout_s
        absent_slots = [slot for slot in self._slots if slot.connection is not None]
        overdue_slots = [slot for slot in absent_slots if now - slot.absent_since > start_limit]
        if self._slots and len(overdue_slots) == len(self._slots):
            servers = "; ".join(f"{slot.name} at {slot.server.url} ({slot.loss_reason})" for slot in overdue_slots)
            commands = "\n  ".join(self._settings.requirements[slot.server.url].gpu_command for slot in overdue_slots)
            raise EngineLost(
                f"the run waited {start_limit:.0f} s for a server to come back (inference_model.start_timeout_s): "
                f"{servers}. Resume the run when they are started, with\n  {commands}"
            )
        for slot in overdue_slots:
            if not slot.is_overdue:
                slot.is_overdue = True
                log.error(
                    "%s at %s is absent for more than %.0f s (inference_model.start_timeout_s); the others continue",
                    slot.name,
                    slot.server.url,
                    start_limit,
                )
