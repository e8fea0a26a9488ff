"""Small HTTP server with those calls of a vLLM server that a run makes.

It serves tests of what a real server cannot be brought to do.

test's thread ── start, kill, hold ──▶ server's thread with its loop ◀── HTTP ── engines under test

It is strict: an unknown path has status 404, an unknown field or a call in the wrong order 400, weights load from
complete safetensors files only, and a second call on one connection is not answered, as if the server had just closed
the idle connection.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from safetensors.torch import load_file

from tests.rollout.vllm_server import MAX_MODEL_LEN, free_port

DEADLINE_S = 120.0
VOCAB_SIZE = 263
_SAMPLING_FIELDS = {
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "ignore_eos",
    "stop_token_ids",
    "logprobs",
}
_SCORE_FIELDS = {"seed", "max_tokens", "ignore_eos", "prompt_logprobs", "detokenize"}
_PROBE_FIELDS = {"seed", "max_tokens", "logprobs", "detokenize"}
_USED_CONNECTIONS = web.AppKey("used_connections", set[Any])
_SETTINGS: dict[str, dict[str, Any]] = {
    "device_config": {"device": "cpu"},
    "scheduler_config": {"enable_chunked_prefill": False},
    "model_config": {
        "model": "quickstart",
        "logprobs_mode": "processed_logprobs",
        "max_model_len": MAX_MODEL_LEN,
        "dtype": "torch.float32",
        "generation_config": "vllm",
        "skip_tokenizer_init": False,
    },
}


class StandInServer:
    """Server whose completions are `max_tokens` times token 7, each with the same log-prob.

    lacks: path that it does not know. holds: whether samples and scores of priority 0 wait forever, from the start.
    policy: in which order it schedules. num_held: requests that wait. prompts: of the samples that it answered.
    """

    def __init__(self, lacks: str = "", holds: bool = False, policy: str = "priority") -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.num_held = 0
        self.log_prob = -1.0
        self.prompts: list[list[int]] = []
        self._lacks = lacks
        self._policy = policy
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stand-in server")
        self._thread.start()
        self._holds = holds
        self._hold_event = threading.Event()
        self._runner: web.AppRunner | None = None
        self.start()

    # --- the test's thread ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the server, with weights of its own.

        A server that was killed no longer holds samples.
        """
        self._run(self._start())

    def kill(self) -> None:
        """Closes all connections and the port."""
        self._run(self._kill())
        self._holds = False

    def close(self) -> None:
        self._run(self._kill())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    def wait_until_holding(self) -> None:
        assert self._hold_event.wait(DEADLINE_S), "no sample arrived"

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE_S)

    # --- the server's thread -------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._version, self._was_reset = "default", False
        self._resume_event = asyncio.Event()
        self._resume_event.set()
        app = web.Application(middlewares=[_refuse_bad_calls])
        app[_USED_CONNECTIONS] = set()
        handlers: dict[tuple[str, str], Callable[[web.Request], Awaitable[Any]]] = {
            ("GET", "/health"): self._answer_nothing,
            ("GET", "/server_info"): self._return_settings,
            ("GET", "/weight_info"): self._return_version,
            ("POST", "/collective_rpc"): self._call_engine,
            ("POST", "/pause"): self._pause,
            ("GET", "/is_paused"): self._get_pause,
            ("POST", "/reset_prefix_cache"): self._reset_cache,
            ("POST", "/update_weight_version"): self._set_version,
            ("POST", "/resume"): self._resume,
            ("POST", "/inference/v1/generate"): self._generate,
        }
        for (method, path), handler in handlers.items():
            if path != self._lacks:
                app.router.add_route(method, path, _answer_json(handler))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)  # 0 is no limit
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def _kill(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
            held = asyncio.all_tasks() - {asyncio.current_task()}
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)

    async def _answer_nothing(self, request: web.Request) -> None:
        return None

    async def _return_settings(self, request: web.Request) -> Any:
        assert request.query == {"config_format": "json"}
        scheduler = _SETTINGS["scheduler_config"] | {"policy": self._policy}
        return {"vllm_config": {**_SETTINGS, "scheduler_config": scheduler}}

    async def _return_version(self, request: web.Request) -> Any:
        return {"weight_version": self._version}

    async def _call_engine(self, request: web.Request) -> Any:
        call = await request.json()
        if call == {"method": "get_model_inspection"}:
            return {"results": [f"VocabParallelEmbedding(num_embeddings={VOCAB_SIZE})"]}
        assert (
            call.keys() == {"method", "kwargs"}
            and call["method"] == "reload_weights"
            and not self._resume_event.is_set()
        )
        files = list(Path(call["kwargs"]["weights_path"]).glob("*.safetensors"))
        assert files
        assert all(tensor.isfinite().all() for file in files for tensor in load_file(file).values())
        self._was_reset = False
        return {"results": [None]}

    async def _pause(self, request: web.Request) -> Any:
        assert request.query.keys() == {"mode"} and request.query["mode"] in ("keep", "wait", "abort")
        self._resume_event.clear()
        return {"status": "paused"}

    async def _get_pause(self, request: web.Request) -> Any:
        return {"is_paused": not self._resume_event.is_set()}

    async def _reset_cache(self, request: web.Request) -> Any:
        assert request.query == {"reset_running_requests": "true"} and not self._resume_event.is_set()
        self._was_reset = True
        return {"success": True}

    async def _set_version(self, request: web.Request) -> Any:
        assert not self._resume_event.is_set() and self._was_reset
        self._version = (await request.json())["new_version"]
        return {"success": True}

    async def _resume(self, request: web.Request) -> Any:
        assert not self._resume_event.is_set()
        self._resume_event.set()
        return {"status": "resumed"}

    async def _generate(self, request: web.Request) -> Any:
        body = await request.json()
        assert body.keys() == {"token_ids", "sampling_params", "priority"}
        prompt, params = body["token_ids"], body["sampling_params"]
        assert params.keys() in (_SAMPLING_FIELDS | {"detokenize"}, _SCORE_FIELDS, _PROBE_FIELDS)
        assert 0 < len(prompt) + params["max_tokens"] <= MAX_MODEL_LEN
        await self._resume_event.wait()
        if self._holds and params.keys() != _PROBE_FIELDS and body["priority"] >= 0:
            self.num_held += 1
            self._hold_event.set()
            await asyncio.Event().wait()
        if "temperature" in params:
            self.prompts.append(prompt)
        count = params["max_tokens"]
        choice = {
            "token_ids": [7] * count,
            "logprobs": {"content": [{"logprob": self.log_prob}] * count},
            "weight_versions": [{"start": 0, "end": count, "version": self._version}],
            "finish_reason": "length",
        }
        scores = [None, *({str(token): {"logprob": self.log_prob}} for token in prompt[1:])]
        return {"choices": [choice], "prompt_logprobs": scores if "prompt_logprobs" in params else None}


def _answer_json(handler: Callable[[web.Request], Awaitable[Any]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        content = await handler(request)
        return web.Response(body=b"" if content is None else orjson.dumps(content), content_type="application/json")

    return answer


@web.middleware
async def _refuse_bad_calls(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    if request.protocol in request.app[_USED_CONNECTIONS]:
        assert request.transport is not None
        request.transport.abort()
    request.app[_USED_CONNECTIONS].add(request.protocol)
    try:
        return await handler(request)
    except (AssertionError, KeyError, TypeError, ValueError, OSError) as error:
        return web.json_response({"error": {"message": f"{type(error).__name__}: {error}"}}, status=400)
