"""What runs inside vLLM's workers, and the files through which an adapter reaches them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rollout.engines.vllm_settings import AdapterShape
from rollout.weights.transports import MappedWeights


def write_adapter(
    folder: Path, weights: Iterable[tuple[str, torch.Tensor]], shape: AdapterShape
) -> frozenset[str]:
    """Write a LoRA adapter in peft's format; returns the names written."""
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "target_modules": list(shape.target_modules),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return frozenset(tensors)


class WeightReceiver:
    """Mixed into vLLM's worker class (`worker_extension_cls`): a push through shared memory."""

    def reload_mapped(self: Any, handle: MappedWeights) -> None:
        self.reload_weights(weights_iterator=handle.open())
