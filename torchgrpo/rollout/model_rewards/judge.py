"""Reward by a judge: a server with OpenAI's chat API grades each completion (`env.judge`).

    score ─▶ key of the content ─▶ kept grade
                    │ none
                    ▼
             one task for equal content ─▶ slot, rate, budget ─▶ POST ─▶ grade, kept
                    ▲                                             │ busy, lost, no grade
                    └──────────────── pause ◀─────────────────────┘ up to `retries` times

Runs in the run's asyncio loop. A task ends when no call waits for it any longer. A request has `timeout_s` seconds; a
`Retry-After` delays the other requests too.
"""

import asyncio
import logging
import random
import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from config.schema.errors import RunError
from config.schema.model_rewards import JudgeConfig
from envs.example import Completion, Example
from torchgrpo.rollout.model_rewards.grade_cache import GradeCache, content_key
from torchgrpo.rollout.model_rewards.interface import ModelRewardError
from torchgrpo.rollout.model_rewards.judge_prompt import DEFAULT_RUBRIC, JudgePrompt, make_judge_prompt

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Pause before the first retry, and the longest pause without a `Retry-After`."""
LONGEST_RETRY_AFTER_S = 120.0
"""Longest `Retry-After` that a request waits for."""
WINDOW_SIZE = 1000
"""Number of the last requests whose durations count."""


class _RetryableError(Exception):
    """Failure of a request that may pass. pause_s: seconds that the server asks to wait."""

    def __init__(self, message: str, pause_s: float = 0.0) -> None:
        super().__init__(message)
        self.pause_s = pause_s


@dataclass(eq=False)
class _SharedRequest:
    """Task of a request, and the number of calls that wait for its grade."""

    task: asyncio.Task[int]
    num_waiting: int = 0


class JudgeReward:
    """Judge as an async reward; the score is the grade divided by `env.judge.scale`.

    num_requests: requests of the run so far, retries included; a resumed run sets the number of its checkpoint.

    Raises:
        ConfigError: settings are missing, or rubric, key or cache folder cannot be used.
    """

    def __init__(self, config: JudgeConfig) -> None:
        config.check_complete()
        self.config = config
        self.url = f"{str(config.url).rstrip('/')}/chat/completions"
        self.rubric = config.read_rubric() or DEFAULT_RUBRIC
        self.num_requests = self.num_retries = self.num_cached = 0
        key = config.read_api_key()
        self._client = httpx.AsyncClient(
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=config.timeout_s,
            limits=httpx.Limits(max_connections=config.concurrency),
        )
        logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for each request
        self._cache = GradeCache(config.cache)
        self._slots = asyncio.Semaphore(config.concurrency)
        self._interval = 60.0 / config.requests_per_minute if config.requests_per_minute else 0.0
        self._next_start = self._paused_until = 0.0
        self._shared: dict[str, _SharedRequest] = {}
        self._seconds: deque[float] = deque(maxlen=WINDOW_SIZE)

    async def score(self, completion: Completion, example: Example) -> float:
        """Returns the grade of a completion as 0 to 1.

        Raises:
            ModelRewardError: no grade after all retries, or a status that a retry cannot change.
            RunError: the run has used its budget of requests.
        """
        prompt = make_judge_prompt(completion, example, self._rubric_of(example), self.config.scale)
        body: dict[str, Any] = {"model": self.config.model, "messages": prompt.messages}
        for name, value in (("max_tokens", self.config.max_tokens), ("temperature", self.config.temperature)):
            if value is not None:
                body[name] = value
        key = content_key([self.url, body])
        grade = self._cache.read(key)
        if grade is None:
            grade = await self._share_request(key, body, prompt)
        else:
            self.num_cached += 1
        return grade / self.config.scale

    def metrics(self) -> dict[str, float]:
        """Returns the counts of requests, and the median of the last requests' seconds."""
        return {
            "judge/requests": float(self.num_requests),
            "judge/retries": float(self.num_retries),
            "judge/cached": float(self.num_cached),
            "judge/seconds": statistics.median(self._seconds) if self._seconds else 0.0,
        }

    async def close(self) -> None:
        """Cancels unfinished requests, and closes the connections."""
        tasks = [shared.task for shared in self._shared.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    def _rubric_of(self, example: Example) -> str:
        """Returns the rubric with that of the row. Raises ModelRewardError if the row has none."""
        column = self.config.rubric_column
        if column is None:
            return self.rubric
        text = example.row_data.get(column)
        if not isinstance(text, str) or not text.strip():
            raise ModelRewardError(f"env.judge.rubric_column={column}: the row has no text in this column")
        return f"{self.rubric.strip()}\n\nRubric for this conversation:\n{text.strip()}"

    async def _share_request(self, key: str, body: dict[str, Any], prompt: JudgePrompt) -> int:
        """Awaits the grade of a request; equal requests in flight are sent once."""
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = _SharedRequest(asyncio.create_task(self._request_grade(key, body, prompt)))
        else:
            self.num_cached += 1
        shared.num_waiting += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.num_waiting -= 1
            if shared.task.done() or not shared.num_waiting:
                shared.task.cancel()
                if self._shared.get(key) is shared:
                    del self._shared[key]

    async def _request_grade(self, key: str, body: dict[str, Any], prompt: JudgePrompt) -> int:
        """Sends a request at most `1 + retries` times, and keeps the grade."""
        problem = ""
        for attempt in range(self.config.retries + 1):
            self.num_retries += attempt > 0
            try:
                async with self._slots:
                    await self._wait_for_start()
                    reply = await self._send(body)
                grade = _read_grade(reply, prompt)
            except _RetryableError as error:
                problem = str(error)
                if attempt < self.config.retries:
                    await asyncio.sleep(max(error.pause_s, _pause(attempt)))
                continue
            await asyncio.to_thread(self._cache.write, key, grade, reply)
            return grade
        raise ModelRewardError(f"{self.url}: {problem} ({self.config.retries + 1} requests)")

    async def _wait_for_start(self) -> None:
        """Waits for the next start that `requests_per_minute` and the server's pause allow."""
        start = max(time.monotonic(), self._next_start)
        self._next_start = start + self._interval
        while (seconds := max(start, self._paused_until) - time.monotonic()) > 0:
            await asyncio.sleep(seconds)

    async def _send(self, body: dict[str, Any]) -> str:
        """Sends one request; returns the text of the reply.

        Raises:
            _RetryableError, ModelRewardError: the request failed.
            RunError: the budget is used.
        """
        budget = self.config.budget
        if budget is not None and self.num_requests >= budget:
            raise RunError(
                f"env.judge.budget={budget}: the run has sent {self.num_requests} requests to {self.url}; raise "
                "env.judge.budget and resume, or set env.judge.cache to keep grades"
            )
        self.num_requests += 1
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.config.timeout_s):  # httpx limits each read, not their sum
                reply = await self._client.post(self.url, json=body)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise _RetryableError(
                f"the judge did not reply within env.judge.timeout_s={self.config.timeout_s:g} seconds"
            ) from error
        except httpx.HTTPError as error:
            raise _RetryableError(f"{type(error).__name__}: {error}") from error
        finally:
            self._seconds.append(time.monotonic() - began)
        return self._read_reply(reply)

    def _read_reply(self, reply: httpx.Response) -> str:
        """Returns the text of a reply. Raises as `_send`."""
        status = reply.status_code
        if status != httpx.codes.OK:
            message = f"HTTP status {status}: {reply.text[:300]}"
            if status not in (408, 429) and status < 500:
                raise ModelRewardError(f"{self.url}: {message}")
            pause_s = _retry_after(reply.headers)
            if pause_s > LONGEST_RETRY_AFTER_S:
                raise ModelRewardError(f"{self.url}: {message} (the server asks to wait {pause_s:.0f} s)")
            self._paused_until = max(self._paused_until, time.monotonic() + pause_s)
            raise _RetryableError(message, pause_s)
        try:
            choice = reply.json()["choices"][0]
            text = choice["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise _RetryableError(f"HTTP status {status}, but no completion: {reply.text[:300]!r}") from error
        if choice.get("finish_reason") == "length":
            raise _RetryableError(
                f"HTTP status {status}, but the reply was cut off: raise env.judge.max_tokens={self.config.max_tokens}"
            )
        if not isinstance(text, str):
            raise _RetryableError(f"HTTP status {status}, but the reply's content is {text!r}")
        return text


def _read_grade(reply: str, prompt: JudgePrompt) -> int:
    """Returns the grade in a reply, or raises a retryable error."""
    try:
        return prompt.read_grade(reply)
    except ValueError as error:
        raise _RetryableError(f"HTTP status 200, but no grade: {error}") from error


def _pause(attempt: int) -> float:
    """Returns a random pause in seconds, so that failed requests do not return together."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**attempt) * random.uniform(0.5, 1.0)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Returns the seconds of a `Retry-After`, a number or a date, or 0."""
    value = headers.get("Retry-After", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):  # no date, or a date without a time zone
        return 0.0
