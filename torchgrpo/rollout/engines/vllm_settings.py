"""Settings record of a vLLM engine, and the shape and file writer of LoRA adapters."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class AdapterShape:
    """Shape of the LoRA adapter that pushes will carry (`inference_model.lora=adapter`)."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]

    def write(self, folder: Path, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Writes the adapter in peft's format, for vLLM's workers to load."""
        tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights}
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.target_modules),
            "bias": "none",
            "use_dora": False,
            "use_rslora": False,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class VLLMSettings:
    """Settings of a vLLM engine at its start; picklable.

    model: folder or hub name. eos_token_ids: any of these ends a completion.
    device: "cpu", or "cuda" for the first visible GPU(s).
    kv_cache_bytes: of all devices of the engine together; None uses the rest of `gpu_memory_utilization` (GPU only).
    max_num_batched_tokens: largest number of tokens of a step; None leaves it to vLLM. On a CPU the engine decides.
    async_scheduling: the host prepares a step while the GPU computes the previous one. Requests in flight are then
        finished before a push, whatever the value of `update`. vLLM ignores it on a CPU.
    update: treatment of requests in flight by `load`.
    adapter: pushes carry this adapter instead of full weights.
    sleep: the engine can `sleep` (colocated GPUs).
    weight_transfer: vLLM's native backend that pushes use, "nccl" or "ipc".
    log: file for the output of vLLM during its start; None: the terminal.
    """

    model: str
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    async_scheduling: bool = False
    enforce_eager: bool = True
    quantization: str | None = None
    update: str = "keep"
    adapter: AdapterShape | None = None
    sleep: bool = False
    weight_transfer: str | None = None
    request_timeout_s: float = 900.0
    log: str | None = None
