"""Client of one vLLM server that somebody else runs: checks, samples, scores and pushes.

Every push gives the server's weights a name, `MARKER:VERSION`, with a marker that only this run knows. The server
returns with a completion which weights sampled which tokens. A restarted server has lost the name with the weights, so
its completions are recognized, whenever it restarted.

    /server_info                  settings, compared at every connection
    /inference/v1/generate        token ids in; token ids, log-probs and names of weights out
    /is_paused                    a push that broke off leaves a paused server, which is resumed
    /pause ─▶ /collective_rpc reload_weights ─▶ /reset_prefix_cache ─▶ /update_weight_version ─▶ /resume     a push
"""

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from config.schema.errors import ConfigError, RunError
from envs.group import FinishReason, Sampling
from torchgrpo.rollout.engines.vllm_sampling import SCORE_PRIORITY

_SHORT_CALL_S = 60.0
_CACHE_RESET_S, _CACHE_RETRY_S = 30.0, 0.05


class ServerLost(Exception):
    """The server does not answer, is broken, or has other weights than this run pushed."""


class WeightFilesRefused(RunError):
    """The server could not load the files of a push."""


@dataclass(frozen=True)
class ServerRequirements:
    """Settings that a server must have.

    vocab_size: rows of the embedding; None if unknown. dtype: of the weights, as torch names it. needs_tokenizer: the
    requests have stop strings. gpu_command, cpu_command: how to start the server on either device.
    """

    model: str
    vocab_size: int | None
    max_model_len: int
    dtype: str
    needs_tokenizer: bool
    gpu_command: str
    cpu_command: str


@dataclass(frozen=True)
class SampledPart:
    """Tokens that one call sampled. finish_reason: "abort" if the server stopped before their end."""

    token_ids: list[int]
    log_probs: list[float]
    policy_versions: list[int]
    finish_reason: FinishReason


class VLLMServer:
    """Client of the vLLM server at `url`, used in one asyncio loop.

    marker: names the weights of this run. timeout_s: for a completion, a score or a load.
    """

    def __init__(
        self, url: str, session: aiohttp.ClientSession, requirements: ServerRequirements, marker: str, timeout_s: float
    ) -> None:
        self.url = url
        self._session = session
        self._requirements = requirements
        self._marker = marker
        self._timeout_s = timeout_s
        self._version: int | None = None

    # --- checks --------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Compares the server's settings with those that the run needs.

        Raises:
            ConfigError: a setting differs; the message has the command line.
            ServerLost: the server does not answer, or not yet.
        """
        await self._call("GET", "/health", _SHORT_CALL_S)
        self._version = None
        try:
            info = await self._call("GET", "/server_info?config_format=json", _SHORT_CALL_S)
            await self._call("GET", "/weight_info", _SHORT_CALL_S)
            is_paused = (await self._call("GET", "/is_paused", _SHORT_CALL_S))["is_paused"]
            tree = (await self._call("POST", "/collective_rpc", self._timeout_s, {"method": "get_model_inspection"}))[
                "results"
            ][0]
            settings = info["vllm_config"]
            on_cpu = str(settings["device_config"]["device"]).startswith("cpu")
        except (CallRefusal, KeyError, TypeError, IndexError) as error:
            raise self._wrong_server(
                f"has no endpoints for settings and weights ({error}): VLLM_SERVER_DEV_MODE=1 is not set, or the "
                "server is not vLLM 0.32",
                self._requirements.gpu_command,
            ) from None
        command = self._requirements.cpu_command if on_cpu else self._requirements.gpu_command
        faults = self._faults(settings, on_cpu, tree)
        if faults:
            raise self._wrong_server(" and ".join(faults), command)
        if is_paused:  # by a push that broke off
            await self._call("POST", "/resume", _SHORT_CALL_S)
        try:
            sampled = await self._generate([0], {"max_tokens": 1, "seed": 0, "logprobs": 0, "detokenize": False})
            has_versions = bool(sampled["choices"][0]["weight_versions"])
        except (CallRefusal, KeyError, TypeError, IndexError) as error:
            raise self._wrong_server(f"does not sample from token ids ({error})", command) from None
        if not has_versions:
            raise self._wrong_server("does not return the version of its weights with a completion", command)

    def _faults(self, settings: dict[str, Any], on_cpu: bool, tree: str) -> list[str]:
        """Returns settings that the run cannot use. tree: the server's model as text."""
        needed, model, scheduler = self._requirements, settings["model_config"], settings["scheduler_config"]
        faults = []
        if model["logprobs_mode"] != "processed_logprobs":
            faults.append(
                f"returns log-probs of another distribution than it samples from (--logprobs-mode "
                f"{model['logprobs_mode']} instead of processed_logprobs)"
            )
        if model["max_model_len"] < needed.max_model_len:
            faults.append(
                f"accepts sequences of {model['max_model_len']} tokens, but prompt plus response may reach "
                f"{needed.max_model_len} (--max-model-len)"
            )
        if model["dtype"].removeprefix("torch.") != needed.dtype:
            faults.append(f"computes in {model['dtype'].removeprefix('torch.')} instead of {needed.dtype} (--dtype)")
        if model["generation_config"] != "vllm":
            faults.append(
                f"changes the sampling parameters of requests (--generation-config {model['generation_config']} "
                "instead of vllm)"
            )
        if needed.needs_tokenizer and model["skip_tokenizer_init"]:
            faults.append("has no tokenizer to find inference_model.stop (--skip-tokenizer-init)")
        rows = re.search(r"\bnum_embeddings=(\d+)", tree)
        if needed.vocab_size is not None and rows is not None and int(rows[1]) != needed.vocab_size:
            faults.append(
                f"serves another model, {model['model']}, whose vocabulary has {rows[1]} tokens instead of "
                f"{needed.vocab_size}"
            )
        if scheduler["policy"] != "priority":
            faults.append(
                f"scores after completions that wait (--scheduling-policy {scheduler['policy']} instead of priority)"
            )
        if on_cpu and scheduler["enable_chunked_prefill"]:
            faults.append(
                "would fail at seeded requests on its CPU, since it splits prompts (--enable-chunked-prefill)"
            )
        return faults

    def _wrong_server(self, fault: str, command: str) -> ConfigError:
        return ConfigError(f"inference_model.urls: the server at {self.url} {fault}. Start it with\n  {command}")

    # --- sampling and scores -------------------------------------------------------------------------------

    async def sample(
        self, prompt: Sequence[int], seed: int, sampling: Sampling, end_token_ids: list[int]
    ) -> SampledPart:
        """Samples one completion of a prompt.

        Raises:
            ServerLost: see there; also if other weights than those of this run sampled a token.
            RunError: the server refuses the request.
        """
        params = {
            "seed": seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_tokens": sampling.max_tokens,
            "ignore_eos": True,  # the end token of the model's config; ours are the stop tokens
            "stop_token_ids": end_token_ids,
            "logprobs": 0,
            "detokenize": bool(sampling.stop),
        }
        if sampling.stop:
            params |= {"stop": list(sampling.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
        choice = (await self._generate_or_fail(prompt, params))["choices"][0]
        token_ids: list[int] = choice["token_ids"]
        log_probs = [one["logprob"] for one in choice["logprobs"]["content"] or ()]
        versions = self._versions(choice)
        if not len(token_ids) == len(log_probs) == len(versions):
            raise RunError(
                f"the server at {self.url} answered with {len(token_ids)} tokens, {len(log_probs)} log-probs and the "
                f"versions of {len(versions)} tokens: is it vLLM 0.32?"
            )
        reason = choice["finish_reason"]
        if reason not in ("stop", "length", "abort"):
            raise RunError(f"the server at {self.url} ended a completion with finish_reason={reason!r}")
        return SampledPart(token_ids, log_probs, versions, reason)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Scores all tokens but the first, at temperature 1, before completions that wait."""
        return list(await asyncio.gather(*map(self._score_sequence, sequences)))

    async def _score_sequence(self, sequence: Sequence[int]) -> list[float]:
        params = {"max_tokens": 1, "seed": 0, "ignore_eos": True, "prompt_logprobs": 0, "detokenize": False}
        reply = await self._generate_or_fail(sequence, params, SCORE_PRIORITY)
        self._versions(reply["choices"][0])
        return [
            position[str(token)]["logprob"]
            for token, position in zip(sequence[1:], reply["prompt_logprobs"][1:], strict=True)
        ]

    def _versions(self, choice: dict[str, Any]) -> list[int]:
        """Returns the policy version of every token. Raises ServerLost for weights of unknown origin."""
        versions: list[int] = []
        for span in choice["weight_versions"] or ():
            marker, _, number = span["version"].partition(":")
            if marker != self._marker:
                raise ServerLost(_foreign_weights(span["version"]))
            versions += [int(number)] * (span["end"] - span["start"])
        return versions

    async def _generate_or_fail(self, prompt: Sequence[int], params: dict[str, Any], priority: int = 0) -> Any:
        try:
            return await self._generate(prompt, params, priority)
        except CallRefusal as error:
            raise RunError(f"the server at {self.url} refused a request: {error}") from None

    async def _generate(self, prompt: Sequence[int], params: dict[str, Any], priority: int = 0) -> Any:
        body = {"token_ids": list(prompt), "sampling_params": params, "priority": priority}
        return await self._call("POST", "/inference/v1/generate", self._timeout_s, body)

    # --- pushes --------------------------------------------------------------------------------------------

    async def load(self, source: str | Path, version: int, update: str, checked_sequence: Sequence[int]) -> list[float]:
        """Makes the server load weights, and score a sequence with them first.

        source: a folder, or a model on the hub. version: of the policy. update: treatment of requests in flight, as
        `inference_model.update`.
        Returns the log-probs of the sequence.

        Raises:
            ServerLost: see there; also if the server restarted since the last load.
            WeightFilesRefused: the server is well, but cannot load these files.
        """
        if self._version is not None:
            name = (await self._call("GET", "/weight_info", _SHORT_CALL_S))["weight_version"]
            if name != f"{self._marker}:{self._version}":
                raise ServerLost(_foreign_weights(name))
        self._version = None
        await self._call("POST", f"/pause?mode={update}", self._timeout_s)
        try:
            rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(source)}}
            await self._call("POST", "/collective_rpc", self._timeout_s, rpc, is_load=True)
            await self._reset_cache()
            new_name = {"new_version": f"{self._marker}:{version}"}
            await self._call("POST", "/update_weight_version", _SHORT_CALL_S, new_name)
            # The score waits in the paused server, so that no completion takes its place.
            scores, _ = await asyncio.gather(
                self._score_sequence(checked_sequence), self._call("POST", "/resume", _SHORT_CALL_S)
            )
        except CallRefusal as error:
            with suppress(CallRefusal, ServerLost):  # leave no paused server behind
                await self._call("POST", "/resume", _SHORT_CALL_S)
            raise WeightFilesRefused(
                f"the server at {self.url} did not load the weights of policy version {version} from {source}: "
                f"{error}. Set inference_model.weight_folder to a folder that the server reads under the same path"
            ) from None
        self._version = version
        return scores

    async def _reset_cache(self) -> None:
        """Drops keys and values of the old weights, also those of requests in flight."""
        deadline = time.monotonic() + _CACHE_RESET_S
        while not (await self._call("POST", "/reset_prefix_cache?reset_running_requests=true", _SHORT_CALL_S))[
            "success"
        ]:
            if time.monotonic() > deadline:
                raise ServerLost(f"its prefix cache could not be emptied within {_CACHE_RESET_S:.0f} s")
            await asyncio.sleep(_CACHE_RETRY_S)

    # --- calls ---------------------------------------------------------------------------------------------

    async def _call(
        self, method: str, path: str, timeout_s: float, body: dict[str, Any] | None = None, is_load: bool = False
    ) -> Any:
        """Calls an endpoint and returns its JSON.

        is_load: a failure may be one of the files, as long as the server is well.

        Raises:
            CallRefusal: the server answers that it will not.
            ServerLost: no answer, or an answer that shows a broken server.
        """
        data = None if body is None else orjson.dumps(body)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as reply:
                content = await reply.read()
        except TimeoutError:
            raise ServerLost(f"no answer to {path} within {timeout_s:.0f} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(f"{type(error).__name__}: {error}") from None
        if reply.status == 200:
            try:
                return orjson.loads(content) if content else None
            except orjson.JSONDecodeError:
                raise CallRefusal(f"{path} answered with {content[:80]!r}, which is not JSON") from None
        message = f"status {reply.status} of {path}: {_error_text(content)}"
        if is_load and reply.status >= 500:
            await self._call("GET", "/health", _SHORT_CALL_S)
            raise CallRefusal(message)
        raise ServerLost(message) if reply.status >= 500 else CallRefusal(message)


class CallRefusal(Exception):
    """The server is well and refuses a call."""


def _foreign_weights(name: str) -> str:
    return (
        f"its weights are named {name!r} and were not pushed by this run: the server was restarted, or another program "
        "pushes weights into it"
    )


def _error_text(content: bytes) -> str:
    """Returns the message of an error reply."""
    try:
        return str(orjson.loads(content)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return content[:300].decode(errors="replace")
