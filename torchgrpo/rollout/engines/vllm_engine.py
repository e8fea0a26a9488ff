"""vLLM behind the engine protocols. Every call into a running vLLM is made here or in `vllm_weights.py`.

The engine core runs in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`) and draws one token for every
running request in each `step`, so a weight push falls between two tokens and each token's version is exact.
Asynchronous scheduling draws a token before the last one is handed out: with it, requests in flight are finished
before a push. Log-probs are those of the distribution that is sampled from (`processed_logprobs`), from float32
logits whatever the dtype of the weights.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from config.schema.errors import ConfigError, DeadlineError, RunError
from envs.group import ALONE, SampledCompletion, Sampling
from torchgrpo.rollout.engines.interface import Request, Response, SequenceScores
from torchgrpo.rollout.engines.vllm_engine_args import engine_arguments, model_seen_here
from torchgrpo.rollout.engines.vllm_settings import (
    INSTALL,
    VLLMSettings,
    check_version,
    communication_files,
    end_of_output,
    import_in_thread,
    output_into,
    process_state_kept,
    set_environment,
)
from torchgrpo.rollout.weights.outgoing import Outgoing
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput

REMEDIES = (
    "inference_model.backend=transformers runs models that vLLM cannot; "
    "inference_model.gpu_memory_utilization, kv_cache_gib and max_num_seqs bound its memory"
)


@dataclass
class _Group:
    """One submitted request and what has been drawn for it."""

    request: Request
    completions: list[SampledCompletion]
    unfinished: set[int] = field(default_factory=set)


class VLLMEngine:
    """A `Engine` of vLLM in this process. Raises ConfigError where it cannot start."""

    def __init__(self, settings: VLLMSettings) -> None:
        check_version()
        set_environment()
        self.settings = settings
        self.policy_version = 0
        self._constants: dict[str, Hashable] = {}
        self._groups: dict[int, _Group] = {}
        self._finished: list[Response] = []
        self._scored: dict[str, RequestOutput] = {}
        self._internal: dict[str, tuple[int, int | None]] = {}
        self._serial = 0
        self._transferring = False
        self._shared = SharedMemory()
        self._adapter: Any = None
        self._adapter_folder: tempfile.TemporaryDirectory[str] | None = None
        others = communication_files()
        with process_state_kept(), self._stance(), output_into(settings.log):
            try:
                LLMEngine = import_in_thread("vllm.v1.engine.llm_engine").LLMEngine
                # vLLM would import it while loading, and its constant tensor would lie in the engine's memory for ever.
                import_in_thread("compressed_tensors")
                with model_seen_here() if settings.tensor_parallel_size == 1 else nullcontext():
                    self._llm: Any = LLMEngine.from_engine_args(engine_arguments(settings))
            except Exception as error:
                s = settings
                incomplete = f"vLLM is there without a package that it needs; {INSTALL}"
                remedies = incomplete if isinstance(error, ImportError) else REMEDIES
                raise ConfigError(
                    f"vLLM could not start {s.model} (dtype={s.dtype}, max_model_len={s.max_model_len}, "
                    f"tensor_parallel_size={s.tensor_parallel_size}): {type(error).__name__}: {error}\n"
                    f"Remedies: {remedies}{end_of_output(s.log)}"
                ) from error
        self._files = communication_files() - others
        self._llm.set_weight_version("0")

    def _stance(self) -> Any:
        """`enforce_eager` also for the small functions that vLLM compiles on their own (20 s on a CPU)."""
        return torch.compiler.set_stance("force_eager" if self.settings.enforce_eager else "default")

    @property
    def members(self) -> tuple[int, ...]:
        return (os.getpid(),)

    @property
    def in_flight(self) -> int:
        return len(self._groups) + len(self._finished)

    def submit(self, request: Request) -> None:
        """Raises ValueError when prompt and response cannot fit `max_model_len`, or for a repeated id."""
        longest = len(request.prompt) + request.sampling.max_tokens
        if longest > self.settings.max_model_len:
            raise ValueError(
                f"request {request.request_id}: {len(request.prompt)} prompt tokens + max_tokens="
                f"{request.sampling.max_tokens} exceed max_model_len={self.settings.max_model_len}"
            )
        if request.request_id in self._groups:
            raise ValueError(f"request {request.request_id} is already in flight")
        completions = [SampledCompletion([], [], [], "abort") for _ in range(request.n)]
        self._groups[request.request_id] = _Group(request, completions, set(range(request.n)))
        if self.settings.update == "abort":
            for index in range(request.n):
                self._continue(request.request_id, index)
        else:
            params = self._sampling(request.sampling, request.n, _base_seed(request.seed))
            self._add((request.request_id, None), list(request.prompt), params)

    def _continue(self, request_id: int, index: int) -> None:
        """Queue one completion alone: its prompt and what has been drawn of it so far."""
        group = self._groups[request_id]
        drawn = group.completions[index].token_ids
        seed = _base_seed(group.request.seed) + index
        params = self._sampling(
            group.request.sampling, 1, _base_seed(seed + len(drawn)) if drawn else seed, len(drawn)
        )
        self._add((request_id, index), [*group.request.prompt, *drawn], params)

    def _sampling(self, sampling: Sampling, n: int, seed: int, drawn: int = 0) -> "SamplingParams":
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        stream = self.settings.update == "abort"
        return SamplingParams(
            n=n,
            seed=seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens - drawn,
            ignore_eos=True,  # the one in the model's own config; ours are the stop tokens
            stop_token_ids=list(self.settings.eos_token_ids),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        )

    def _add(self, owner: tuple[int, int | None], prompt: list[int], params: "SamplingParams") -> None:
        self._serial += 1
        internal = str(self._serial)
        self._internal[internal] = owner
        self._llm.add_request(internal, {"prompt_token_ids": prompt}, params, lora_request=self._adapter)

    def step(self, timeout: float = 0.0) -> list[Response]:
        if not self._finished:
            self._advance()
        finished, self._finished = self._finished, []
        return finished

    def _advance(self) -> None:
        """One token for every running request; none while a native transfer is half done."""
        if self._transferring:
            time.sleep(0.001)
            return
        if not self._llm.has_unfinished_requests():
            return
        with self._stance():
            outputs = self._llm.step()
        for output in outputs:
            if output.request_id not in self._internal:
                self._scored[output.request_id] = output
                continue
            request_id, index = self._internal[output.request_id]
            for part in output.outputs:
                self._take(self._groups[request_id], part.index if index is None else index, part)
            if output.finished:
                del self._internal[output.request_id]
            if not self._groups[request_id].unfinished:
                self._finished.append(Response(request_id, self._groups.pop(request_id).completions))

    def _take(self, group: _Group, index: int, part: "CompletionOutput") -> None:
        """Append what vLLM drew: all of it at the end, or one token at a time when `update=abort`."""
        completion = group.completions[index]
        tokens = list(part.token_ids)
        greedy = group.request.sampling.temperature == 0
        completion.token_ids += tokens
        completion.log_probs += [0.0] * len(tokens) if greedy else _flat(part.logprobs)
        if self.settings.update == "abort":
            completion.policy_versions += [self.policy_version] * len(tokens)
        else:
            for span in part.weight_versions or ():
                completion.policy_versions += [int(span.version)] * (span.end - span.start)
        if part.finish_reason is not None:
            if part.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"vLLM ended a completion with finish_reason={part.finish_reason!r}")
            completion.finish_reason = "stop" if part.finish_reason == "stop" else "length"
            group.unfinished.discard(index)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace the weights (or the adapter); requests in flight fare as `settings.update` says.

        Cached keys and values of the old weights are dropped, and running requests compute theirs anew.
        """
        self._settle()
        if self.settings.adapter is None:
            self._reload(Outgoing.of(weights))
        else:
            from vllm.lora.request import LoRARequest

            if self._adapter_folder is None:
                self._adapter_folder = tempfile.TemporaryDirectory(prefix="grpo_adapter_")
            folder = self._adapter_folder.name
            self.settings.adapter.write(Path(folder), weights)
            self._llm.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))
            # Requests name the adapter without the flag, which would load it again at every step.
            self._adapter = LoRARequest("policy", 1, folder)
        self._set_version(version)

    def _settle(self) -> None:
        """Requests in flight before a push: finish them (`wait`), or stop and queue them anew (`abort`)."""
        if self.settings.update == "wait" or self.settings.async_scheduling:
            deadline = time.monotonic() + self.settings.request_timeout_s
            while self._groups:
                self._advance()
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"the push waited {self.settings.request_timeout_s:.0f} s for {len(self._groups)} "
                        "requests in flight to finish (inference_model.update=wait); raise "
                        "inference_model.request_timeout_s or take update=keep"
                    )
        if self.settings.update == "abort":
            self._llm.abort_request(list(self._internal))
            self._internal.clear()
        self._drain()

    def _drain(self) -> None:
        """Asynchronous scheduling runs a step ahead of what it hands out: after the last token of all, steps whose
        outcome is nobody's are still under way, and must not meet memory that is written or taken away."""
        while self._llm.engine_core.engine_core.batch_queue:
            self._llm.step()

    def _reload(self, weights: Outgoing) -> None:
        held, self._constants = self._constants, {}
        lacking = weights.parts_beyond(held)
        if self.settings.tensor_parallel_size == 1:
            self._llm.collective_rpc("receive", args=(lacking,))
        else:  # the workers are processes of their own: live tensors cannot reach them
            self._llm.collective_rpc("receive_mapped", args=(self._shared.write(weights), lacking.names))
        self._constants = weights.constants

    def _set_version(self, version: int) -> None:
        self._llm.reset_prefix_cache(reset_running_requests=True)
        self._llm.set_weight_version(str(version))
        self.policy_version = version
        if self.settings.update == "abort":
            for request_id, group in self._groups.items():
                for index in sorted(group.unfinished):
                    self._continue(request_id, index)

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, SequenceScores]:
        """The last token of each sequence is scored through the prefix cache, as sampling does it; all others
        by a forward pass that vLLM makes without reading that cache."""
        last = self._score_pass(sequences, cached=True)
        others = self._score_pass(sequences, cached=False)
        # Position 0 of the prompt has no log-prob: vLLM leaves it out of the flat list.
        scores = [
            [*_flat(rest.prompt_logprobs), _flat(end.outputs[0].logprobs)[1]]
            for end, rest in zip(last, others, strict=True)
        ]
        return {ALONE: SequenceScores(scores, sum(end.num_cached_tokens or 0 for end in last))}

    def _score_pass(self, sequences: Sequence[Sequence[int]], cached: bool) -> list["RequestOutput"]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        waiting = []
        for sequence in sequences:
            self._serial += 1
            waiting.append(f"score{self._serial}")
            params = SamplingParams(
                max_tokens=1,
                seed=0,
                ignore_eos=True,
                logprob_token_ids=[sequence[-1]],
                prompt_logprobs=None if cached else 0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = {"prompt_token_ids": list(sequence[:-1])}
            self._llm.add_request(waiting[-1], prompt, params, lora_request=self._adapter)
        while not self._scored.keys() >= set(waiting):
            self._advance()
        return [self._scored.pop(internal) for internal in waiting]

    def transfer(self, call: str, **arguments: Any) -> None:
        """One call of vLLM's native weight-transfer API, as the trainer side of it asks for.

        Args:
            call: init_weight_transfer_engine, start_weight_update, update_weights, finish_weight_update or
                shutdown_weight_transfer_engine.
        """
        if call == "start_weight_update":
            self._settle()
            self._constants, self._transferring = {}, True
        version = arguments.pop("version", None)
        self._llm.collective_rpc(call, kwargs=arguments)
        if version is not None:
            self._transferring = False
            self._set_version(version)

    def sleep(self) -> None:
        """Give the GPU memory back. Full weights are dropped: the push after `wake` brings new ones. Under an
        adapter the base weights move to host memory.

        Raises:
            RunError: another process takes memory of this GPU meanwhile.
        """
        if self._groups:
            raise RuntimeError(f"the engine cannot sleep: {len(self._groups)} requests are in flight")
        self._drain()
        self._constants = {}
        try:
            self._llm.sleep(level=2 if self.settings.adapter is None else 1)
        except AssertionError as error:
            if "usage increased" not in str(error):  # of the whole GPU, before and after
                raise
            raise RunError(
                f"vLLM did not go to sleep before the learner's turn: {error} Another process takes memory of this "
                "GPU. A run whose learner and engine take turns needs the GPU for itself: end the other process, or "
                "give the run other GPUs (CUDA_VISIBLE_DEVICES)"
            ) from error

    def wake(self) -> None:
        self._llm.wake_up()

    def close(self) -> None:
        """Ends the engine, and with it vLLM's state in this process: other engines here must end too."""
        self._groups.clear()
        self._shared.close()
        if self._adapter_folder is not None:
            self._adapter_folder.cleanup()
            self._adapter_folder = None
        if self.settings.tensor_parallel_size == 1:  # else the workers end with all they hold
            self._llm.collective_rpc("forget")
        with process_state_kept():
            self._llm.engine_core.shutdown()
        for file in self._files:
            file.unlink(missing_ok=True)


def _base_seed(seed: int) -> int:
    """Where a request's n consecutive seeds begin: far from those of all other requests."""
    digest = hashlib.blake2b(seed.to_bytes(16, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def _flat(log_probs: Any) -> list[float]:
    """The numbers of vLLM's flat log-prob container (`flat_logprobs=True`), position after position."""
    return cast(list[float], log_probs.logprobs)
