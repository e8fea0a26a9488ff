"""vLLM in this process behind the `Engine` protocol: sampling, weight loads, scores and sleep.

Only this module and `vllm_weight_receiver.py` call into a running vLLM.

The engine core runs in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`) and samples one token for every running
request in each `step`. A weight push therefore falls between two tokens, and each token's policy version is exact.
Each completion is a request of the core. The core's outputs are read as they are: vLLM's own output processor would
take longer for the lists of one log-prob than for the token.
Asynchronous scheduling samples a token before it returns the previous one, so requests in flight are finished before
a push. Log-probs are those of the distribution that is sampled from (`processed_logprobs`), computed from float32
logits whatever the dtype of the weights.
"""

import math
import os
import tempfile
import time
from collections.abc import Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from config.schema.errors import ConfigError, DeadlineError, RunError
from envs.group import SINGLE_ENGINE_NAME, SampledCompletion
from torchgrpo.rollout.engines.completion_ends import CompletionEnds
from torchgrpo.rollout.engines.interface import Request, Response, SequenceScores
from torchgrpo.rollout.engines.vllm_engine_args import engine_arguments, inspect_model_in_process
from torchgrpo.rollout.engines.vllm_process import (
    INSTALL_REMEDY,
    check_version,
    import_in_thread,
    last_output,
    preserve_process_state,
    redirect_output,
    set_environment,
    shared_memory_files_of_workers,
)
from torchgrpo.rollout.engines.vllm_sampling import SCORE_PRIORITY, base_seed, sampling_params, score_params
from torchgrpo.rollout.engines.vllm_settings import VLLMSettings
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from torchgrpo.rollout.weights.weight_update import WeightUpdate

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreOutput

START_REMEDIES = (
    "inference_model.backend=transformers runs models that vLLM cannot; "
    "inference_model.gpu_memory_utilization, kv_cache_gib and max_num_seqs bound its memory"
)


@dataclass(slots=True)
class _RunningGroup:
    """Submitted request with its completions so far. unfinished_indices: completions that are not finished."""

    request: Request
    completions: list[SampledCompletion]
    unfinished_indices: set[int]


@dataclass(slots=True)
class _Score:
    """Log-probs of one scored sequence.

    prompt: of the prompt's tokens but the first. last: of the token after the prompt; NaN until it is computed.
    """

    prompt: list[float] = field(default_factory=list)
    last: float = math.nan
    num_cached_tokens: int = 0
    is_finished: bool = False

    def add(self, output: "EngineCoreOutput") -> None:
        """Adds an output of the core."""
        if output.prefill_stats is not None:
            self.num_cached_tokens = output.prefill_stats.num_cached_tokens
        if output.new_prompt_logprobs_tensors is not None:
            self.prompt += output.new_prompt_logprobs_tensors.logprobs[:, 0].tolist()
        if output.new_logprobs is not None:
            self.last = float(output.new_logprobs.logprobs[0, 1])  # after that of the sampled token
        self.is_finished = output.finished


class VLLMEngine:
    """vLLM engine in this process. Raises ConfigError if it cannot start.

    tokenizer: finds stop strings; None if no request has any.
    """

    def __init__(self, settings: VLLMSettings, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        check_version()
        set_environment()
        self.settings = settings
        self.ends = CompletionEnds(settings.eos_token_ids, tokenizer)
        self.policy_version = 0
        self._constants: dict[str, Hashable] = {}
        self._groups: dict[int, _RunningGroup] = {}
        self._finished_responses: list[Response] = []
        self._scores: dict[str, _Score] = {}
        self._running: dict[str, tuple[_RunningGroup, int]] = {}
        self._num_core_requests = 0
        self._transferring = False
        self._shared_memory = SharedMemory()
        self._adapter: Any = None
        self._adapter_folder: tempfile.TemporaryDirectory[str] | None = None
        others = shared_memory_files_of_workers()
        with preserve_process_state(), self._compiler_stance(), redirect_output(settings.log):
            try:
                LLMEngine = import_in_thread("vllm.v1.engine.llm_engine").LLMEngine
                # vLLM would import this while loading, and its constant tensor would stay in the engine's memory.
                import_in_thread("compressed_tensors")
                with inspect_model_in_process() if settings.tensor_parallel_size == 1 else nullcontext():
                    self._llm: Any = LLMEngine.from_engine_args(engine_arguments(settings))
            except Exception as error:
                s = settings
                incomplete = f"vLLM is installed without a package that it needs; {INSTALL_REMEDY}"
                remedies = incomplete if isinstance(error, ImportError) else START_REMEDIES
                raise ConfigError(
                    f"vLLM could not start {s.model} (dtype={s.dtype}, max_model_len={s.max_model_len}, "
                    f"tensor_parallel_size={s.tensor_parallel_size}): {type(error).__name__}: {error}\n"
                    f"Remedies: {remedies}{last_output(s.log)}"
                ) from error
        self._worker_files = shared_memory_files_of_workers() - others
        self._core = self._llm.engine_core
        self._core.set_weight_version("0")

    def _compiler_stance(self) -> Any:
        """Returns a context that applies `enforce_eager` also to small functions that vLLM compiles separately."""
        return torch.compiler.set_stance("force_eager" if self.settings.enforce_eager else "default")

    @property
    def engine_pids(self) -> tuple[int, ...]:
        return (os.getpid(),)

    @property
    def in_flight(self) -> int:
        return len(self._groups) + len(self._finished_responses)

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises ValueError if prompt and response cannot fit `max_model_len`, if the id is in flight already, or for stop
        strings without a tokenizer.
        """
        self.ends.check_request(request)
        longest = len(request.prompt) + request.sampling.max_tokens
        if longest > self.settings.max_model_len:
            raise ValueError(
                f"request {request.request_id}: {len(request.prompt)} prompt tokens + max_tokens="
                f"{request.sampling.max_tokens} exceed max_model_len={self.settings.max_model_len}"
            )
        if request.request_id in self._groups:
            raise ValueError(f"request {request.request_id} is already in flight")
        completions = [SampledCompletion([], [], [], "abort") for _ in range(request.n)]
        group = _RunningGroup(request, completions, set(range(request.n)))
        for index in range(request.n):
            self._queue_completion(group, index)
        self._groups[request.request_id] = group

    def _queue_completion(self, group: _RunningGroup, index: int) -> None:
        """Queues a completion: its prompt and the tokens sampled so far."""
        request, sampled_ids = group.request, group.completions[index].token_ids
        seed = base_seed(request.seed) + index
        if sampled_ids:
            seed = base_seed(base_seed(request.seed) + index + len(sampled_ids))
        params = sampling_params(request.sampling, seed, self.settings.eos_token_ids, len(sampled_ids))
        self._running[self._add_core_request([*request.prompt, *sampled_ids], params)] = (group, index)

    def _add_core_request(self, prompt: list[int], params: "SamplingParams", priority: int = 0) -> str:
        """Adds a request to the core and returns its id there.

        priority: requests of a lower one are scheduled first; those of the same one in the order of these calls.
        """
        self._num_core_requests += 1
        name = str(self._num_core_requests)
        prepared = self._llm.input_processor.process_inputs(
            name,
            {"prompt_token_ids": prompt},
            params,
            supported_tasks=self._llm.get_supported_tasks(),
            arrival_time=self._num_core_requests,
            lora_request=self._adapter,
            priority=priority,
        )
        self._core.add_request(prepared)
        return name

    def cancel(self, request_id: int) -> None:
        self._finished_responses = [one for one in self._finished_responses if one.request_id != request_id]
        group = self._groups.pop(request_id, None)
        if group is not None:
            self._abort([name for name, (owner, _) in self._running.items() if owner is group])

    def _abort(self, names: list[str]) -> None:
        """Makes the core drop some of its requests."""
        for name in names:
            del self._running[name]
        self._core.abort_requests(names)

    def step(self, timeout: float = 0.0) -> list[Response]:
        if not self._finished_responses:
            self._advance()
        finished, self._finished_responses = self._finished_responses, []
        return finished

    def _advance(self) -> None:
        """Samples one token for every running request; none while a native transfer is under way."""
        if self._transferring:
            time.sleep(0.001)
            return
        if not (self._running or self._scores):
            return
        with self._compiler_stance():
            outputs = self._core.get_output()
        for output in outputs.outputs:
            if output.request_id in self._running:
                self._append_output(output, outputs.weight_version)
            elif output.request_id in self._scores:
                self._scores[output.request_id].add(output)

    def _append_output(self, output: "EngineCoreOutput", version: str) -> None:
        """Appends new tokens to a completion; every running completion gets one in a step."""
        group, index = self._running[output.request_id]
        completion, sampling = group.completions[index], group.request.sampling
        count = len(output.new_token_ids)
        completion.token_ids += output.new_token_ids
        completion.policy_versions += [int(version)] * count
        if sampling.temperature == 0:
            completion.log_probs += [0.0] * count
        elif output.new_logprobs is not None:
            completion.log_probs += output.new_logprobs.logprobs[:, 0].tolist()
        if output.finished:
            del self._running[output.request_id]
            reason = str(output.finish_reason)
            if reason not in ("stop", "length"):
                raise RuntimeError(f"vLLM ended a completion with finish_reason={reason!r}")
            completion.finish_reason = "stop" if reason == "stop" else "length"
        if sampling.stop:
            completion.finish_reason = self.ends.finish_reason(completion.token_ids, sampling)
            if completion.finish_reason != "abort" and not output.finished:
                self._abort([output.request_id])
        if completion.finish_reason == "abort":
            return
        group.unfinished_indices.discard(index)
        if not group.unfinished_indices:
            del self._groups[group.request.request_id]
            self._finished_responses.append(Response(group.request.request_id, group.completions))

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replaces the weights or the adapter; `settings.update` decides about requests in flight.

        Keys and values computed with the old weights are dropped, and running requests compute theirs again.
        """
        self._settle_requests()
        if self.settings.adapter is None:
            self._load_full_weights(WeightUpdate.from_pairs(weights))
        else:
            from vllm.lora.request import LoRARequest

            if self._adapter_folder is None:
                self._adapter_folder = tempfile.TemporaryDirectory(prefix="grpo_adapter_")
            folder = self._adapter_folder.name
            self.settings.adapter.write(Path(folder), weights)
            self._llm.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))
            # Requests name the adapter without `load_inplace`, which would load the adapter again at every step.
            self._adapter = LoRARequest("policy", 1, folder)
        self._set_version(version)

    def _settle_requests(self) -> None:
        """Prepares requests in flight for a push: finishes them (`wait`), or stops them (`abort`)."""
        if self.settings.update == "wait" or self.settings.async_scheduling:
            deadline = time.monotonic() + self.settings.request_timeout_s
            while self._groups:
                self._advance()
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"the push waited {self.settings.request_timeout_s:.0f} s for {len(self._groups)} "
                        "requests in flight to finish (inference_model.update=wait); raise "
                        "inference_model.request_timeout_s, or set inference_model.update=keep"
                    )
        if self.settings.update == "abort":
            self._abort(list(self._running))
        self._finish_async_steps()

    def _finish_async_steps(self) -> None:
        """Finishes engine steps that asynchronous scheduling started ahead.

        After the last token of all requests such steps, with unused results, may still run; weights must not be
        written, and memory not be released, under them.
        """
        while self._core.engine_core.batch_queue:
            self._core.get_output()

    def _load_full_weights(self, weights: WeightUpdate) -> None:
        constants, self._constants = self._constants, {}
        missing_weights = weights.missing_modules(constants)
        if self.settings.tensor_parallel_size == 1:
            self._llm.collective_rpc("receive_pushed_weights", args=(missing_weights,))
        else:  # the workers are separate processes, which live tensors cannot reach
            self._llm.collective_rpc(
                "receive_mapped_weights", args=(self._shared_memory.write(weights), missing_weights.names)
            )
        self._constants = weights.constants

    def _set_version(self, version: int) -> None:
        if self._llm.is_sleeping():
            self._llm.wake_up(tags=["kv_cache"])
        self._llm.reset_prefix_cache(reset_running_requests=True)
        self._core.set_weight_version(str(version))
        self.policy_version = version
        if self.settings.update == "abort":
            for group in self._groups.values():
                for index in sorted(group.unfinished_indices):
                    self._queue_completion(group, index)

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, SequenceScores]:
        """Scores sequences in two passes, before requests that wait in the engine.

        The last token of each sequence is scored through the prefix cache, as in sampling; all other tokens by a
        forward pass of vLLM that does not read that cache.
        """
        last = self._score_pass(sequences, use_cache=True)
        others = self._score_pass(sequences, use_cache=False)
        scores = [[*rest.prompt, end.last] for end, rest in zip(last, others, strict=True)]
        return {SINGLE_ENGINE_NAME: SequenceScores(scores, sum(end.num_cached_tokens for end in last))}

    def _score_pass(self, sequences: Sequence[Sequence[int]], use_cache: bool) -> list[_Score]:
        scores = []
        for sequence in sequences:
            scores.append(_Score())
            name = self._add_core_request(list(sequence[:-1]), score_params(sequence[-1], use_cache), SCORE_PRIORITY)
            self._scores[name] = scores[-1]
        while not all(score.is_finished for score in scores):
            self._advance()
        self._scores.clear()
        return scores

    def transfer(self, call: str, **arguments: Any) -> None:
        """Executes one call of vLLM's native weight-transfer API, on request of its trainer side.

        Args:
            call: init_weight_transfer_engine, start_weight_update, update_weights, finish_weight_update or
                shutdown_weight_transfer_engine.
        """
        if call == "start_weight_update":
            self._settle_requests()
            self._constants, self._transferring = {}, True
        version = arguments.pop("version", None)
        self._llm.collective_rpc(call, kwargs=arguments)
        if version is not None:
            self._transferring = False
            self._set_version(version)

    def sleep(self) -> None:
        """Releases GPU memory.

        Full weights are dropped, since the push after `wake` brings new ones. With an adapter, the base weights move
        to host memory.

        Raises:
            RunError: another process allocates memory of this GPU at the same time.
        """
        if self._groups:
            raise RuntimeError(f"the engine cannot sleep: {len(self._groups)} requests are in flight")
        self._finish_async_steps()
        self._constants = {}
        try:
            self._llm.sleep(level=2 if self.settings.adapter is None else 1)
        except AssertionError as error:
            if "usage increased" not in str(error):  # vLLM compares the usage of the whole GPU
                raise
            raise RunError(
                f"vLLM did not release its memory before the learner's turn: {error} Another process uses "
                "memory of this GPU, which a run whose learner and engine take turns needs for itself: end "
                "the other process, or give the run other GPUs (CUDA_VISIBLE_DEVICES)"
            ) from error

    def wake(self) -> None:
        """Allocates the weights; the next push allocates the cache, after its temporary tensors are freed."""
        self._llm.wake_up(tags=["weights"])

    def close(self) -> None:
        """Ends the engine and vLLM's state, also for other engines in this process."""
        for requests in (self._groups, self._running, self._scores, self._finished_responses):
            requests.clear()
        self._shared_memory.close()
        if self._adapter_folder is not None:
            self._adapter_folder.cleanup()
            self._adapter_folder = None
        if self.settings.tensor_parallel_size == 1:  # otherwise the worker processes end, with all their memory
            self._llm.collective_rpc("forget_reload_info")
        with preserve_process_state():
            self._core.shutdown()
        for file in self._worker_files:
            file.unlink(missing_ok=True)
